"""Another program answers at a region's address, whose gRPC still works: a process that took its port over, or a load
balancer with a page of its own. What it says is no answer of the region: another lawful region has the request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from random import Random

import pytest
from inprocess import (
    HOP_KEY,
    Engine,
    as_on_the_map,
    chat,
    global_config,
    head,
    regional_config,
    send,
    streaming,
    topology,
    until,
)

from farhop.balance.health.region import LivenessConfig
from farhop_lab.memory_store import MemoryCluster, MemoryStore
from global_lb.app.main import GlobalBalancer
from regional_lb.app.main import RegionalBalancer

WORLD = topology()
JSON = b"content-type: application/json\r\ncontent-length: 11\r\n"
SAID = {
    "JSON": b"HTTP/1.1 200 OK\r\n" + JSON + b'\r\n{"ok":true}',
    "nothing": b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
    "endless": b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\n\r\n" + b"x" * 100_000,
    "events": b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {}\n\n",
    "another region": b"HTTP/1.1 200 OK\r\nx-farhop-region: tokyo\r\n" + JSON + b'\r\n{"ok":true}',
    "a region's name that is longer": b"HTTP/1.1 200 OK\r\nx-farhop-region: virginia2\r\n" + JSON + b'\r\n{"ok":true}',
    "not found": b"HTTP/1.1 404 Not Found\r\n" + JSON + b'\r\n{"ok":true}',
    "not allowed": b"HTTP/1.1 405 Not Allowed\r\ncontent-length: 0\r\n\r\n",
    "a redirect": b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:9/\r\ncontent-length: 0\r\n\r\n",
    "unavailable": b"HTTP/1.1 503 Service Unavailable\r\n" + JSON + b'\r\n{"ok":true}',
    "an error": b"HTTP/1.1 500 Internal Server Error\r\n" + JSON + b'\r\n{"ok":true}',
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
}


class Other:
    """Stands in the place of a region from when it `says` something: until then it lets all through."""

    def __init__(self) -> None:
        self.says, self.asked, self.port = b"", 0, 0
        self._through: set[asyncio.StreamWriter] = set()

    def takes_over(self, says: bytes) -> None:
        """From now on it says this, and the connections of who was there before are gone."""
        self.says = says
        while self._through:
            self._through.pop().transport.abort()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Other]:
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            self.port = server.sockets[0].getsockname()[1]
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            where = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
            writer.write(b"HTTP/1.1 200 ok\r\n\r\n")
            first = await reader.read(65536)
            if (is_request := first.startswith(b"POST /v1/")) and self.says:  # the rest is gRPC
                self.asked += 1
                writer.write(self.says)
                await writer.drain()
                if b"octet-stream" in self.says:
                    while True:
                        writer.write(b"x" * 65536)
                        await writer.drain()
                while b"content-length" in self.says and await reader.read(65536):
                    self.asked += 1
                    writer.write(self.says)
            else:
                host, port = where.split(":")
                there, onward = await asyncio.open_connection(host, int(port))
                self._through |= {writer, onward} if is_request else set()
                onward.write(first)
                await asyncio.gather(_pump(reader, onward), _pump(there, writer))
        writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
    writer.close()


@asynccontextmanager
async def fleet(*regions: str) -> AsyncIterator[tuple[int, GlobalBalancer, Other, dict[str, Engine]]]:
    """Virginia's entry over these regions, the first of which may have another in its place."""
    cluster = MemoryCluster()
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(Other().running())
        engines = {region: await stack.enter_async_context(Engine().running()) for region in regions}
        for seed, (region, engine) in enumerate(engines.items()):
            below = RegionalBalancer(
                regional_config(engine, region, instance=f"r-{region}"), WORLD,
                Random(seed), MemoryStore(Random(seed + 10), cluster),
            )  # fmt: skip
            stack.push_async_callback(below.close)
            await below.open()
        config = global_config(proxies={regions[0]: f"http://127.0.0.1:{other.port}"})
        above = GlobalBalancer(config, WORLD, Random(7), MemoryStore(Random(17), cluster))
        stack.push_async_callback(above.close)
        entry = int((await above.open()).split("clients on 127.0.0.1:")[1].split(",")[0])
        await until(lambda: {r for r in regions if _serves(above, r)} == set(regions))
        yield entry, above, other, engines


def _region(above: GlobalBalancer, name: str) -> dict[str, object]:
    found = [one for one in above.tier_admin.status()["regions"] if one["region"] == name]
    return found[0] if found else {}


def _serves(above: GlobalBalancer, name: str) -> bool:
    region = _region(above, name)
    instances = region.get("instances") or []
    assert isinstance(instances, list)
    # Reports may come before the region is up: then another region is preferred.
    up = region.get("state") == "up"
    return up and any(model["replicas_ready"] for one in instances for model in one["models"].values())


@pytest.fixture(autouse=True)
def _virginia_is_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    as_on_the_map(monkeypatch)


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_another_answers_in_a_region_s_place_is_no_answer(said: str, stream: bool) -> None:
    async with fleet("virginia", "frankfurt") as (entry, above, other, _):
        body = streaming() if stream else None
        assert (await send(entry, chat(body=body))).headers["x-farhop-region"] == "virginia"
        assert _region(above, "virginia")["other_answered_age_s"] is None
        other.takes_over(SAID[said])
        answers = [await send(entry, chat(body=body)) for _ in range(8)]
        assert {(one.status, one.headers.get("x-farhop-region")) for one in answers} == {(200, "frankfurt")}
        assert other.asked
        region = _region(above, "virginia")
        assert (region["state"], region["why"]) == ("suspect", "relay failures")
        age_s = region["other_answered_age_s"]
        assert isinstance(age_s, float)
        assert age_s < 60.0
        assert b'outcome="no_engine_there"' in above.metrics.render()


@pytest.mark.parametrize(
    ("status", "code"), [(413, "body_too_large"), *((status, "head_too_large") for status in (400, 414, 431))]
)
async def test_what_is_too_large_for_a_proxy_before_a_region_is_the_client_s_to_change(status: int, code: str) -> None:
    """A client with long prompts must not have its region taken out for all others."""
    async with fleet("virginia", "frankfurt") as (entry, above, other, engines):
        other.takes_over(b"HTTP/1.1 %d no\r\n%b\r\n<html></ht>" % (status, JSON))
        for _ in range(4):
            answer = await send(entry, chat())
            assert (answer.status, answer.code) == (413 if status == 413 else 431, code)
        assert (_region(above, "virginia")["state"], engines["frankfurt"].seen) == ("up", [])


async def test_a_proxy_that_refuses_what_is_too_large_does_not_speak_for_the_region_behind_it() -> None:
    """It need not have asked the region: clients of large bodies must not keep in what fails for all others."""
    unavailable, too_large = SAID["unavailable"], b"HTTP/1.1 413 no\r\n%b\r\n<html></ht>" % JSON
    async with fleet("virginia", "frankfurt") as (entry, above, other, _):
        statuses = []
        for said in (unavailable, unavailable, too_large, unavailable):
            other.takes_over(said)
            statuses.append((await send(entry, chat())).status)
        assert statuses == [200, 200, 413, 200]
        assert _region(above, "virginia")["state"] == "suspect"


async def test_a_proxy_that_has_waited_long_enough_for_an_answer_in_one_piece_speaks_of_the_request() -> None:
    """Elsewhere it would take as long again, and the region is well."""
    async with fleet("virginia", "frankfurt") as (entry, above, other, engines):
        other.takes_over(b"HTTP/1.1 504 Gateway Time-out\r\n%b\r\n<html></ht>" % JSON)
        for _ in range(4):
            answer = await send(entry, chat())
            assert (answer.status, answer.code) == (504, "whole_answer_timeout")
        region = _region(above, "virginia")
        assert (region["state"], region["other_answered_age_s"], engines["frankfurt"].seen) == ("up", None, [])
        assert (await send(entry, chat(body=streaming()))).status == 200  # a stream's first byte may come sooner there


async def test_where_no_other_region_is_lawful_the_refusal_names_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    soon = partial(LivenessConfig, relay_hold_s=1.0)  # and not 10 s, which this would wait
    monkeypatch.setattr("global_lb.app.main.LivenessConfig", soon)
    async with fleet("virginia") as (entry, above, other, _):
        other.takes_over(SAID["JSON"])
        answer = await send(entry, chat())
        assert (answer.status, answer.code) == (503, "no_region_serving")
        assert "virginia: no_engine_there" in answer.json["error"]["message"]
        other.says = b""
        await until(lambda: _region(above, "virginia")["state"] == "up")
        assert (await send(entry, chat())).status == 200


@pytest.mark.parametrize("path", ["/v1/models", "/v2/models/none/infer", "/v1/chat/completions"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
async def test_what_a_region_refuses_unread_says_so(path: str, method: str) -> None:
    """It is known for the region's by that, as it does not name the region."""
    async with fleet("virginia") as (_, above, _, _):
        (instance,) = above.flow.regions.view.regions["virginia"].instances
        answer = await send(instance.tier.port, head(method, path, content_length="0"))
        assert answer.headers["x-farhop-outcome"]
        broken = await send(instance.tier.port, b"no request\r\n\r\n")
        assert (broken.status, broken.headers["x-farhop-outcome"]) == (400, "malformed_http")
