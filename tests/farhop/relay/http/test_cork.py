"""Writes held to the end of the loop's turn."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from farhop.relay.http.cork import CROWD, Cork


class Wire:
    """A transport that notes how it was written to."""

    def __init__(self) -> None:
        self.calls: list[list[bytes]] = []
        self.closing = False

    def write(self, data: bytes) -> None:
        self.calls.append([data])

    def writelines(self, parts: list[bytes]) -> None:
        self.calls.append(list(parts))

    def is_closing(self) -> bool:
        return self.closing


def crowded(monkeypatch: pytest.MonkeyPatch) -> Cork:
    """One with two writes in the millisecond before."""
    loop = asyncio.get_running_loop()
    moment = loop.time()
    monkeypatch.setattr(loop, "time", lambda: moment)
    cork, elsewhere = Cork(loop), Wire()
    to: Any = elsewhere
    cork.write(to, b"1")
    cork.write(to, b"2")
    assert elsewhere.calls == [[b"1"], [b"2"]]  # hardly anything came before: at once
    moment += 0.001
    return cork


async def test_writes_of_one_loop_turn_leave_together_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    cork, a, b = crowded(monkeypatch), Wire(), Wire()
    to_a: Any = a
    to_b: Any = b
    cork.write(to_a, b"1")
    cork.write(to_b, b"2")
    cork.write(to_a, b"3")
    assert a.calls == []
    await asyncio.sleep(0)
    assert (a.calls, b.calls) == ([[b"1", b"3"]], [[b"2"]])
    cork.write(to_a, b"4")
    await asyncio.sleep(0)
    assert a.calls[1:] == [[b"4"]]


async def test_flush_writes_to_open_connections_only(monkeypatch: pytest.MonkeyPatch) -> None:
    cork, a, b = crowded(monkeypatch), Wire(), Wire()
    to_a: Any = a
    to_b: Any = b
    cork.write(to_a, b"1")
    cork.write(to_b, b"2")
    b.closing = True
    cork.flush()
    assert (a.calls, b.calls) == ([[b"1"]], [])
    await asyncio.sleep(0)
    assert a.calls == [[b"1"]]


async def test_few_chunks_are_written_at_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    cork, a, b = crowded(monkeypatch), Wire(), Wire()
    to_a: Any = a
    to_b: Any = b
    cork.write(to_b, b"2")
    cork.write(to_a, b"1")
    cork.write(to_a, b"3", CROWD)
    assert (a.calls, b.calls) == ([[b"1", b"3"]], [])
    cork.write(to_a, b"4", CROWD)
    await asyncio.sleep(0)
    assert (a.calls[1:], b.calls) == ([[b"4"]], [[b"2"]])


async def test_many_chunks_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    cork, wires = Cork(loop), [Wire() for _ in range(9)]
    moment = loop.time()
    monkeypatch.setattr(loop, "time", lambda: moment)
    for wire in wires:
        to: Any = wire
        cork.write(to, b"1", CROWD)
    assert all(wire.calls == [[b"1"]] for wire in wires)
    moment += 1.0
    for wire in wires:
        to = wire
        cork.write(to, b"2", CROWD)
    assert all(len(wire.calls) == 1 for wire in wires)
    cork.flush()
    assert all(wire.calls[1:] == [[b"2"]] for wire in wires)
