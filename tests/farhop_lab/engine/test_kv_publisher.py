"""The publisher on real sockets, as a subscriber of vLLM's sees one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
import zmq

from farhop_lab.engine.kv_publisher import KvPublisher
from farhop_lab.engine.main import ListenError, host
from farhop_lab.engine.settings import EngineSettings
from farhop_lab.world.ports import free_ports

HOST = "127.0.0.1"


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


async def _came(socket: zmq.Socket[bytes], within_s: float = 60.0) -> list[bytes]:
    deadline = time.monotonic() + within_s
    while not socket.poll(0):
        assert time.monotonic() < deadline, "nothing came"
        await asyncio.sleep(0.005)
    return socket.recv_multipart()


async def test_batches_are_numbered_and_sent_again(context) -> None:
    events, replay = free_ports(2)
    publisher = KvPublisher(HOST, events, replay, "map", b"kv")
    sub, dealer = context.socket(zmq.SocketType.SUB), context.socket(zmq.SocketType.DEALER)
    try:
        sub.subscribe(b"")
        sub.connect(f"tcp://{HOST}:{events}")
        seq = 0
        while not sub.poll(5):  # until it has subscribed
            publisher.publish(b"%d" % seq)
            seq += 1
            await asyncio.sleep(0)
        topic, number, payload = await _came(sub)
        assert (topic, payload) == (b"kv", b"%d" % int.from_bytes(number, "big"))
        dealer.connect(f"tcp://{HOST}:{replay}")
        dealer.send_multipart([b"", (seq - 1).to_bytes(8, "big")])
        assert await _came(dealer) == [b"", (seq - 1).to_bytes(8, "big"), b"%d" % (seq - 1)]
        assert await _came(dealer) == [b"", b"\xff" * 8, b""]
        dealer.send_multipart([b"one frame too", b"", bytes(8)])  # not answered, as vLLM
        publisher.publish(b"on")
        dealer.send_multipart([b"", seq.to_bytes(8, "big")])
        assert (await _came(dealer))[-1] == b"on"
    finally:
        sub.close()
        dealer.close()
        publisher.close()
        publisher.close()


async def test_a_port_that_is_taken_is_named() -> None:
    events, replay = free_ports(2)
    first = KvPublisher(HOST, events, replay, "map")
    try:
        with pytest.raises(OSError, match=str(replay)):
            KvPublisher(HOST, free_ports(1)[0], replay, "map")
        with pytest.raises(ListenError, match=f"KV events: cannot publish on {HOST}:{events}"):
            async with host(EngineSettings(ports=[0], kv_events_port=events)):
                pass
    finally:
        first.close()
