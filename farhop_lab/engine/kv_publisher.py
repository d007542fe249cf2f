"""Publishes an engine's KV events as vLLM does: a PUB socket, and a ROUTER that replays what it still keeps.

Batches are numbered from 0, from the start of the process; the last BUFFER_BATCHES are kept. Never waits for a
subscriber: one that is too slow misses batches, and asks for a replay.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import zmq

from farhop_lab.engine.core.kv_log import batch

if TYPE_CHECKING:
    from farhop_lab.engine.core.kv_log import KvLog

BUFFER_BATCHES = 10_000  # vLLM's default, and so is the next
WAITING_MAX = 100_000
_END = (-1).to_bytes(8, "big", signed=True)


class KvPublisher:
    """Publishes the events of a log. OSError if a port is taken. Close it in the end."""

    def __init__(self, host: str, port: int, replay_port: int | None, schema: str, topic: bytes = b"") -> None:
        self._schema, self._topic = schema, topic
        self.seq = 0
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=BUFFER_BATCHES)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.pub = self._context.socket(zmq.SocketType.PUB)
        self.pub.set_hwm(WAITING_MAX)
        self._router: zmq.Socket[bytes] | None = None
        try:
            self._bind(self.pub, host, port)
            if replay_port is not None:
                self._router = self._context.socket(zmq.SocketType.ROUTER)
                self._router.set_hwm(WAITING_MAX)
                self._bind(self._router, host, replay_port)
                asyncio.get_running_loop().add_reader(self._descriptor(self._router), self._asked)
        except OSError:
            self.close()
            raise

    def _bind(self, socket: zmq.Socket[bytes], host: str, port: int) -> None:
        try:
            socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"KV events: {os.strerror(error.errno or 0)}", f"{host}:{port}") from None

    def publish_new(self, log: KvLog) -> None:
        """Publish what is new in the log, if anything is."""
        events = log.take()
        if events:
            self.publish(batch(events, time.time(), self._schema))

    def publish(self, payload: bytes) -> None:
        """Send a batch under the next number."""
        self.kept.append((self.seq, payload))
        self.pub.send_multipart((self._topic, self.seq.to_bytes(8, "big"), payload), zmq.Flag.NOBLOCK)
        self.seq += 1
        if self._router is not None:
            self._asked()  # sending hides from the descriptor what came in the meantime

    def close(self) -> None:
        """Stop. Idempotent."""
        if self._router is not None and not self._router.closed:
            asyncio.get_running_loop().remove_reader(self._descriptor(self._router))
        self._context.destroy(linger=0)

    def _descriptor(self, socket: zmq.Socket[bytes]) -> int:
        return int(socket.getsockopt(zmq.SocketOption.FD))

    def _asked(self) -> None:
        assert self._router is not None
        while True:
            try:
                frames: list[Any] = self._router.recv_multipart(zmq.Flag.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 3:
                continue  # as vLLM: no answer to a request of another form
            who, start = frames[0], int.from_bytes(frames[2], "big")
            for seq, payload in self.kept:
                if seq >= start:
                    self._router.send_multipart((who, b"", seq.to_bytes(8, "big"), payload), zmq.Flag.NOBLOCK)
            self._router.send_multipart((who, b"", _END, b""), zmq.Flag.NOBLOCK)
