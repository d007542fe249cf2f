"""A wire between two namespaces: TCP sees its whole length, and nothing of it is left behind."""

from __future__ import annotations

import asyncio
import os
import subprocess

import pytest

from farhop_lab.wan import long_wire
from farhop_lab.wan.long_wire import FAR, HOSTS, NEAR, LongWire, WireError

RTT_MS = 120.0
_SERVE = (
    "import socket as s; l = s.create_server(('{host}', 9)); print(flush=True); "
    "c, _ = l.accept(); print(len(c.recv(9)))"
)
_ASK = (
    "import socket as s, time as t; b = t.monotonic(); c = s.create_connection(('{host}', 9), 20); "
    "print((t.monotonic() - b) * 1e3); c.sendall(b'123456789')"
)


def _output(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


async def _python(wire: LongWire, end: str, text: str) -> asyncio.subprocess.Process:
    words = wire.command(end, ["python3", "-c", text.format(host=HOSTS[FAR])])
    return await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)


@pytest.mark.root
@pytest.mark.skipif(bool(long_wire.lacking()), reason="no TUN devices or namespaces here")
async def test_a_handshake_takes_the_whole_round_trip_and_all_is_removed() -> None:
    async with LongWire(RTT_MS, {"net.ipv4.tcp_slow_start_after_idle": "0"}) as wire:
        server = await _python(wire, FAR, _SERVE)
        assert server.stdout is not None
        await server.stdout.readline()
        client = await _python(wire, NEAR, _ASK)
        said, _ = await client.communicate()
        assert float(said) >= RTT_MS
        assert (await server.communicate())[0] == b"9\n"
        setting = wire.command(FAR, ["sysctl", "-n", "net.ipv4.tcp_slow_start_after_idle"])
        assert _output(*setting) == "0\n"
        names = [wire.command(end, [])[3] for end in (NEAR, FAR)]
    left = _output("ip", "netns", "list")
    assert not [name for name in names if name in left]


@pytest.mark.root
@pytest.mark.skipif(bool(long_wire.lacking()), reason="no TUN devices or namespaces here")
async def test_a_setting_that_the_kernel_refuses_leaves_nothing_behind() -> None:
    wire = LongWire(RTT_MS, {"net.ipv4.no_such_setting": "1"})
    with pytest.raises(WireError, match="no_such_setting"):
        await wire.__aenter__()
    left = _output("ip", "netns", "list")
    assert wire.command(NEAR, [])[3] not in left


async def test_missing_root_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(WireError, match="network namespaces take root"):
        await LongWire(RTT_MS, {}).__aenter__()


async def test_packets_of_one_direction_arrive_in_their_order_and_not_before_they_are_due() -> None:
    loop = asyncio.get_running_loop()
    (source, sent), (target, seen) = (os.pipe2(os.O_NONBLOCK | os.O_DIRECT) for _ in range(2))
    way = long_wire.Way(source, seen, 0.05)
    began = loop.time()
    packets = [b"%d" % number for number in range(12)]  # a pipe of packets holds 16
    arrived = list[bytes]()
    loop.add_reader(target, lambda: arrived.append(os.read(target, 9)))
    for packet in packets:
        os.write(sent, packet)
    while len(arrived) < len(packets):
        await asyncio.sleep(0.005)
    assert arrived == packets
    assert loop.time() - began >= 0.05
    way.close()
    loop.remove_reader(target)
    for one in (source, sent, target, seen):
        os.close(one)
