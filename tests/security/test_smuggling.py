"""Nobody smuggles: what was one request before us is one at the engine, whoever stands in front of us and behind.

The corpus goes to every port that clients or the tier above reach, plain and through real proxies, and the engine tells
what arrived: of each connection no more and nothing else than what a strict reader finds in it.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fronts import BEHIND, PROXIES, STAMP, Proxy
from relay_wire import Message, Upstream, plain
from smuggling import EVIL, Case, cases

sys.path.insert(0, str(Path(__file__).parents[1] / "flows"))

from inprocess import PAGE, Both, both, tenant, topology

CASES = cases()
_MARK = re.compile(rb"(outer|inner)#([0-9]{3})#")
_CLIENTS = 64  # at a time
_QUIET_S = 0.6  # a connection that is silent for so long waits for bytes that do not come


class Recorder(Upstream):
    """An engine that keeps all it is asked for, beside its own pages."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = lambda m: plain(PAGE.encode() if "/metrics" in m.line else b'{"choices":[],"usage":null}')

    def asked_for(self) -> list[Message]:
        return [message for message in self.asked if message.line.startswith("POST ")]


@asynccontextmanager
async def tiers(proxy: Proxy | None, folder: Path) -> AsyncIterator[tuple[Recorder, Both]]:
    """Both tiers before a recording engine, with the proxy between them and it."""
    engine = Recorder()
    await engine.open()
    place: Any = type("Place", (), {"scheme": "http", "address": f"127.0.0.1:{engine.address.port}"})
    try:
        if proxy is None:
            async with both(place, topology(tenant("t"))) as running:
                yield engine, running
        else:
            async with proxy.running(folder, [engine.address.port], BEHIND) as (port,):
                place.address = f"127.0.0.1:{port}"
                async with both(place, topology(tenant("t"))) as running:
                    yield engine, running
    finally:
        await engine.close()


async def _say(port: int, wire: bytes, patient: bool) -> list[int]:
    """Say it all and hear what comes until the end, or until nothing does. The statuses of the answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found = b""
    try:
        writer.write(wire)
        async with asyncio.timeout(10.0 if patient else _QUIET_S):
            while data := await reader.read(65536):
                found += data
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.transport.abort()
    return [int(status) for status in re.findall(rb"HTTP/1\.1 ([0-9]{3}) ", found)]


async def attack(port: int) -> list[list[int]]:
    """All cases, each on a connection of its own; the statuses that each was answered."""
    room = asyncio.Semaphore(_CLIENTS)

    async def one(number: int, case: Case) -> list[int]:
        async with room:
            return await _say(port, case.marked(number), bool(case.reads))

    return await asyncio.gather(*(one(number, case) for number, case in enumerate(CASES)))


def arrived(engine: Recorder) -> dict[int, list[str]]:
    """By case the requests that came to the engine. None may hold two, or what was never to come."""
    found: dict[int, list[str]] = defaultdict(list)
    for message in engine.asked_for():
        marks = _MARK.findall(message.body)
        assert len(marks) == 1, message
        names = [name for name, _ in message.headers]
        assert not [name for name in names if name.startswith("x-farhop-")], message
        assert len(set(names)) == len(names), message
        found[int(marks[0][1])].append(marks[0][0].decode())
    return found


@pytest.mark.parametrize("name", ["entry", "client", "tier"])
async def test_of_each_connection_arrives_what_a_strict_reader_finds(name: str, tmp_path: Path) -> None:
    async with tiers(None, tmp_path) as (engine, running):
        answer = await attack(getattr(running, name))
        await running.at_rest()
        found = arrived(engine)
        assert EVIL not in repr([(message.line, message.headers) for message in engine.asked_for()]).encode()
    wrong = {
        case.name: (found[number], answer[number])
        for number, case in enumerate(CASES)
        if not _as_read(case, found[number], nobody=name == "tier")
    }
    assert wrong == {}


def _as_read(case: Case, found: list[str], *, nobody: bool) -> bool:
    """Whether an engine got what it should of a case; `nobody` gets in where a token is wanted."""
    reads = [] if nobody else list(case.reads)
    return found == reads or (not case.surely and found == [])


@pytest.mark.parametrize("proxy", PROXIES, ids=lambda proxy: proxy.name)
async def test_one_request_through_a_proxy_is_one_request_at_the_engine(proxy: Proxy, tmp_path: Path) -> None:
    """In front of both tiers, and behind them before the engine."""
    if proxy.find() is None:
        pytest.skip(f"{proxy.name} is not installed: {proxy.install}")
    async with (
        tiers(proxy, tmp_path) as (engine, running),
        proxy.running(tmp_path, [running.entry, running.client], STAMP) as ports,
    ):
        for port in ports:
            engine.asked.clear()
            await attack(port)
            await running.at_rest()
            found = arrived(engine)
            for header in (STAMP, BEHIND):
                seen = Counter(message.get(header) or "" for message in engine.asked_for())
                assert max(seen.values()) == 1, f"one request of {proxy.name} came as two"
                assert "" not in seen
            assert all(len(set(marks)) == len(marks) for marks in found.values())
            plainly = {case.name: found[number] for number, case in enumerate(CASES)}
            assert (plainly["one"], plainly["two in a row"]) == (["outer"], ["outer", "inner"])
