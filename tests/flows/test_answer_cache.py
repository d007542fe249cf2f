"""Answers given again and shared, over both tiers on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from aiohttp import web
from inprocess import MODEL, Answer, Both, Engine, both, chat, read, send, tenant, topology, until

from farhop.accounts import segments
from farhop.accounts.usage import Reading, Sums
from farhop.balance.machine import LawChanged
from farhop.identity.api_keys import digest, with_checksum
from farhop.relay.upstream import recording
from farhop.store.contract import issued_key
from farhop.store.documents import issued_keys
from farhop.store.documents.issued_keys import IssuedKey
from global_lb.routing.policy import RouteConfig
from global_lb.routing.routes import RoutesChanged
from tests.drills.classic import Gpu, l4
from topology.law import Law
from topology.model import Rule

if TYPE_CHECKING:
    import openai

SDKS = ("openai",)  # see conftest.py
KEEPS = {"keep_answers_s": 600.0}
SHARES = {"coalesce": True}
TOKENS = 24
NOW = datetime.now(UTC)


def body(text: str = "why?", **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    return {"model": MODEL, "messages": [message], "max_tokens": TOKENS, "temperature": 0, **more}


def stream(text: str = "why?", **more: Any) -> dict[str, Any]:
    return body(text, stream=True, **more)


def text_of(answer: Answer) -> str:
    """The text of an answer, however it was told."""
    if answer.headers["content-type"].startswith("application/json"):
        return str(answer.json["choices"][0]["message"]["content"])
    return "".join(c["delta"].get("content") or "" for e in chunks(answer) for c in e["choices"])


def chunks(answer: Answer) -> list[Any]:
    events = answer.body.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    return [msgspec.json.decode(event.removeprefix(b"data: ")) for event in events[:-2]]


def word(answer: Answer) -> str | None:
    return answer.headers.get("x-farhop-cache")


@asynccontextmanager
async def emulated(
    *tenants: dict[str, Any], routes: Any = (KEEPS,), speedup: float = 100.0, **global_: Any
) -> AsyncIterator[tuple[Both, Gpu]]:
    """Both tiers over an emulated engine."""
    async with AsyncExitStack() as stack:
        gpu = await stack.enter_async_context(Gpu(l4(speedup), 7).running())
        replica = {"url": f"http://127.0.0.1:{gpu.port}", "models": [MODEL], "name": "one", "engine": "vllm"}
        made = both(
            Engine(), topology(*tenants), regional={"replicas": [replica]}, global_={"routes": list(routes), **global_}
        )
        balancers = await stack.enter_async_context(made)
        yield balancers, gpu
        await balancers.at_rest()
        await until(lambda: balancers.global_.answer_cache.cache.store.taken == 0)


async def test_a_repeated_request_is_a_cache_hit_with_the_same_bytes() -> None:
    async with emulated() as (up, gpu):
        began = time.monotonic()
        first, again = [await send(up.entry, chat(body=body())) for _ in range(2)]
        elapsed_s = time.monotonic() - began
        assert (first.status, word(first), word(again)) == (200, "miss", "hit")
        assert first.body == again.body
        assert gpu.asked == 1
        assert again.headers["x-farhop-region"] == "virginia"
        assert 0 <= int(again.headers["age"]) <= elapsed_s
        assert again.headers["x-farhop-decision"] != first.headers["x-farhop-decision"]
        record = up.global_.decisions.get(again.headers["x-farhop-decision"])
        assert record is not None
        found = record["answer_cache"]
        assert (found["outcome"], found["region"], found["decision"]) == (
            "hit", "virginia", first.headers["x-farhop-decision"],
        )  # fmt: skip
        other = await send(up.entry, chat(body=body("how?")))
        assert (word(other), gpu.asked) == ("miss", 2)


async def test_stored_answer_is_served_as_stream_or_document_whatever_its_original_form() -> None:
    async with emulated() as (up, gpu):
        whole = await send(up.entry, chat(body=body("one")))
        for include in (False, True):
            options = {"stream_options": {"include_usage": True}} if include else {}
            found = await send(up.entry, chat(body=stream("one", **options)))
            assert (word(found), found.headers["content-type"].split(";")[0]) == ("hit", "text/event-stream")
            assert text_of(found) == text_of(whole)
            usages = [chunk["usage"] for chunk in chunks(found) if chunk.get("usage")]
            assert usages == ([whole.json["usage"]] if include else [])
            assert {chunk["id"] for chunk in chunks(found)} == {whole.json["id"]}
        streamed = await send(up.entry, chat(body=stream("two")))
        found = await send(up.entry, chat(body=body("two")))
        assert (word(streamed), word(found)) == ("miss", "hit")
        assert text_of(found) == text_of(streamed)
        assert found.json["usage"]["completion_tokens"] > 0
        assert not any(chunk.get("usage") for chunk in chunks(streamed))  # it did not ask for it
        again = await send(up.entry, chat(body=stream("two")))
        assert again.body == streamed.body
        with_usage = await send(up.entry, chat(body=stream("two", stream_options={"include_usage": True})))
        assert chunks(with_usage)[-1]["usage"] == found.json["usage"]
        assert gpu.asked == 2


async def test_the_sdk_reads_what_is_given_again_in_either_form() -> None:
    async with emulated() as (up, gpu):
        sdk = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{up.entry}/v1", api_key="sk-farhop-anywhere")
        async with sdk:
            asked: Any = {"model": MODEL, "messages": body()["messages"], "max_tokens": TOKENS, "temperature": 0}
            whole = await sdk.chat.completions.create(**asked)
            found, usage = "", None
            async for chunk in await sdk.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}
            ):
                found += "".join(choice.delta.content or "" for choice in chunk.choices)
                usage = chunk.usage or usage
            again = await sdk.chat.completions.with_raw_response.create(**asked)
        assert found == whole.choices[0].message.content
        assert usage == whole.usage
        assert (again.headers["x-farhop-cache"], again.parse()) == ("hit", whole)
        assert gpu.asked == 1


async def test_uncacheable_request_bypasses_the_cache_and_a_disabled_cache_sends_no_header() -> None:
    only = {"model": MODEL, **KEEPS}
    async with emulated(routes=[only], answers_bytes=1 << 20) as (up, gpu):
        first = await send(up.entry, chat(body=body(temperature=0.5)))
        assert (word(first), gpu.asked) == ("bypass", 1)
        for _ in range(2):
            assert word(await send(up.entry, chat(body=body(), cache_control="no-store"))) == "bypass"
        assert word(await send(up.entry, chat(body=body()))) == "miss"
        assert word(await send(up.entry, chat(body=body(), cache_control="no-cache"))) == "bypass"
        assert word(await send(up.entry, chat(body=body(), cache_control="max-age=600"))) == "hit"
        assert gpu.asked == 5
        keyed = body(temperature=0.9)
        assert word(await send(up.entry, chat(body=keyed, x_farhop_cache_key="mine"))) == "miss"
        assert word(await send(up.entry, chat(body=keyed, x_farhop_cache_key="mine"))) == "hit"
        assert word(await send(up.entry, chat(body=keyed, x_farhop_cache_key="other"))) == "miss"
        wrong = await send(up.entry, chat(body=keyed, x_farhop_cache_key="not one"))
        assert (wrong.status, wrong.json["error"]["param"]) == (400, "x-farhop-cache-key")
        outcomes = up.global_.answer_cache.cache.outcomes
        assert outcomes == {
            ("bypass", "sampled"): 1, ("bypass", "no_store"): 2, ("bypass", "no_cache"): 1, ("miss", ""): 3,
            ("hit", ""): 2,
        }  # fmt: skip
        up.global_.relay.react(RoutesChanged({("", MODEL): RouteConfig(model=MODEL)}))
        assert up.global_.ingress.relay is up.global_.relay  # nothing is in between
        assert len(up.global_.answer_cache.cache.store) == 0
        assert word(await send(up.entry, chat(body=body()))) is None


async def test_stored_answer_expires() -> None:
    async with emulated(routes=[{"keep_answers_s": 0.05}]) as (up, gpu):
        assert word(await send(up.entry, chat(body=body()))) == "miss"
        await asyncio.sleep(0.06)
        assert word(await send(up.entry, chat(body=body()))) == "miss"
        assert gpu.asked == 2


async def test_change_of_routes_drops_stored_answers() -> None:
    async with emulated() as (up, gpu):
        assert word(await send(up.entry, chat(body=body()))) == "miss"
        up.global_.relay.react(RoutesChanged({("other", ""): RouteConfig(tenant="other")}))
        assert word(await send(up.entry, chat(body=body()))) == "hit"  # it is unrelated
        up.global_.relay.react(RoutesChanged({("", ""): RouteConfig(keep_answers_s=601.0)}))
        assert word(await send(up.entry, chat(body=body()))) == "miss"
        assert gpu.asked == 2


async def test_no_tenant_gets_another_s_answer() -> None:
    mine, others = tenant("mine"), tenant("others")
    async with emulated(mine, others, routes=[{"tenant": "mine", **KEEPS}, {"tenant": "others", **KEEPS}]) as (up, gpu):
        first = await send(up.entry, chat(key="sk-farhop-mine", body=body()))
        second = await send(up.entry, chat(key="sk-farhop-others", body=body()))
        assert (word(first), word(second), gpu.asked) == ("miss", "miss", 2)
        assert word(await send(up.entry, chat(key="sk-farhop-mine", body=body()))) == "hit"
        assert word(await send(up.entry, chat(body=body()))) is None  # its route does not enable it


async def test_answer_is_neither_stored_nor_served_where_the_law_forbids_it() -> None:
    elsewhere = tenant("elsewhere")
    elsewhere["residency"] = {"processing": {"allow": ["world"]}, "logging": {"allow": ["eu"]}}
    async with emulated(elsewhere) as (up, gpu):
        # This entry is in Virginia, where no record of that tenant may be kept.
        for _ in range(2):
            assert word(await send(up.entry, chat(key="sk-farhop-elsewhere", body=body()))) == "bypass"
        assert word(await send(up.entry, chat(body=body()))) == "miss"
        # An answer made in Virginia is not given to a client that stays within Europe; no region serves it there.
        narrowed = await send(up.entry, chat(body=body(), x_farhop_allow="eu"))
        assert narrowed.status == 503
        assert word(await send(up.entry, chat(body=body(), x_farhop_allow="us"))) == "hit"
        assert gpu.asked == 3


async def test_change_of_law_makes_stored_answers_unreachable() -> None:
    async with emulated() as (up, gpu):
        assert word(await send(up.entry, chat(body=body()))) == "miss"
        law = up.global_.flow.law
        later = Law(replace(law.topology, epoch=law.epoch + 1))
        up.regional.relay.react(LawChanged(later))
        up.global_.laws.adopt(later)  # as it does when a law comes from etcd
        assert up.global_.flow.law.epoch == law.epoch + 1
        assert len(up.global_.answer_cache.cache.store) == 0
        assert word(await send(up.entry, chat(body=body()))) == "miss"
        assert gpu.asked == 2


# -- requests under way


class Pouring(Engine):
    """It streams so many large events, and then says its end."""

    events, size = 0, 0

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(({}, msgspec.json.decode(await request.read())))
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        text = b"x" * self.size
        for _ in range(self.events):
            await asyncio.sleep(0)
            await answer.write(b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % text)
        await answer.write(b"data: [DONE]\n\n")
        return answer


@asynccontextmanager
async def scripted(
    engine: Engine, *tenants: dict[str, Any], routes: Any = (SHARES,), **global_: Any
) -> AsyncIterator[Both]:
    """Both tiers over an engine that does as it is told."""
    async with engine.running(), both(engine, topology(*tenants), global_={"routes": list(routes), **global_}) as up:
        yield up
        engine.release.set()
        await up.at_rest()
        await until(lambda: up.global_.answer_cache.cache.store.taken == 0)


class Client:
    """One that takes its time with its answer, or leaves."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer, self._read = reader, writer, b""

    @classmethod
    async def asking(cls, up: Both, request: bytes) -> Client:
        """It has sent its request."""
        reader, writer = await asyncio.open_connection("127.0.0.1", up.entry, limit=1 << 16)
        writer.write(request)
        return cls(reader, writer)

    async def until(self, text: bytes) -> bytes:
        """What comes up to this."""
        async with asyncio.timeout(20.0):
            self._read += await self._reader.readuntil(text)
        return self._read

    async def read_to_end(self) -> Answer:
        """The whole answer."""
        return read(await self.wire())

    async def wire(self) -> bytes:
        """All that comes, as it came."""
        async with asyncio.timeout(20.0):
            self._read += await self._reader.read()
        await self.leave()
        return self._read

    async def leave(self) -> None:
        """It wants no more."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


def outcomes(up: Both) -> dict[tuple[str, str], int]:
    return dict(up.global_.answer_cache.cache.outcomes)


async def test_requests_under_way_share_one_stream_and_the_leaders_client_may_leave() -> None:
    engine = Engine()
    engine.behaviour = "pause"
    async with scripted(engine) as up:
        leader = await Client.asking(up, chat(body=stream()))
        begun = await leader.until(b'"one"')
        assert b"x-farhop-cache: miss" in begun
        followers = [await Client.asking(up, chat(body=stream(user=f"u{n}"))) for n in range(3)]
        firsts = [await follower.until(b'"one"') for follower in followers]
        assert all(b"x-farhop-cache: hit\r\n" in first and b"x-farhop-region: virginia" in first for first in firsts)
        await leader.leave()
        await followers[0].leave()
        await until(lambda: up.global_.metrics.in_flight == 3)  # the leader's request is over when its own answer is
        engine.release.set()
        answers = [await follower.read_to_end() for follower in followers[1:]]
        assert [text_of(answer) for answer in answers] == ["onetwothree"] * 2
        assert len(engine.seen) == 1
        ids = [answer.headers["x-farhop-decision"] for answer in answers]
        assert len(set(ids)) == 2
        await until(lambda: all(up.global_.decisions.get(name) for name in ids))
        reply = up.global_.decisions.get(ids[0])
        assert reply is not None
        assert (reply["answer_cache"]["outcome"], reply["answer_cache"]["saved"]["completion_tokens"]) == ("shared", 3)
        assert reply["usage"] is None
        assert outcomes(up) == {("miss", ""): 1, ("shared", ""): 3}
        # Nothing was to be stored.
        assert word(await send(up.entry, chat(body=stream()))) == "miss"


async def test_two_issued_keys_of_a_tenant_share_no_stream() -> None:
    engine = Engine()
    engine.behaviour = "pause"
    keys = {name: with_checksum(name.rjust(30, "0")) for name in ("one", "two")}
    async with scripted(engine) as up:
        for name, key in keys.items():
            one = IssuedKey(id=name, sha256=digest(key), tenant="anywhere", author="ann", why="test", at=NOW)
            await up.global_.store.put(issued_key(name), issued_keys.encode(one))
        await until(lambda: all(up.global_.keys.get(digest(key)) is not None for key in keys.values()))
        clients = []
        for key in (keys["one"], keys["two"], keys["one"]):
            clients.append(await Client.asking(up, chat(key, stream())))
            await clients[-1].until(b'"one"')
        engine.release.set()
        assert [word(await client.read_to_end()) for client in clients] == ["miss", "miss", "hit"]


async def test_an_answer_has_few_readers_and_the_next_request_leads_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece is written to all of them in one turn of the loop: to 1,500 it took 100 ms."""
    monkeypatch.setattr(recording, "READERS_MAX", 3)
    engine = Engine()
    engine.behaviour = "pause"
    async with scripted(engine) as up:
        clients = []
        for _ in range(7):
            clients.append(await Client.asking(up, chat(body=stream())))
            await clients[-1].until(b'"one"')
        engine.release.set()
        answers = [await client.read_to_end() for client in clients]
        assert [text_of(answer) for answer in answers] == ["onetwothree"] * 7
        assert [word(answer) for answer in answers] == ["miss", "hit", "hit", "miss", "hit", "hit", "miss"]
        assert len(engine.seen) == 3


async def test_upstream_is_cancelled_when_the_last_reader_leaves() -> None:
    engine = Engine()
    engine.behaviour = "pause"
    async with scripted(engine, routes=[KEEPS | SHARES]) as up:
        clients = [await Client.asking(up, chat(body=stream())) for _ in range(2)]
        for client in clients:
            await client.until(b'"one"')
            await client.leave()
        await up.at_rest()  # although the engine never continued
        engine.release.set()
        assert word(await send(up.entry, chat(body=stream()))) == "miss"  # half an answer is not stored
        assert word(await send(up.entry, chat(body=stream()))) == "hit"


async def test_a_request_waiting_for_a_shared_first_byte_gets_it_and_may_leave() -> None:
    engine = Engine()
    engine.behaviour = "wait"
    async with scripted(engine, routes=[KEEPS | SHARES]) as up:
        asked = [await Client.asking(up, chat(body=body())) for _ in range(4)]
        await until(lambda: up.global_.metrics.in_flight == 4 and len(engine.seen) == 1)
        await asked[0].leave()
        await asked[1].leave()
        await until(lambda: up.global_.metrics.in_flight == 3)
        engine.release.set()
        answers = [await one.read_to_end() for one in asked[2:]]
        assert [(answer.status, word(answer), text_of(answer)) for answer in answers] == [(200, "hit", "hello")] * 2
        assert word(await send(up.entry, chat(body=body()))) == "hit"
        assert len(engine.seen) == 1


def legislate(up: Both, **changes: Any) -> None:
    """Another law is in force in both tiers."""
    law = up.global_.flow.law
    later = Law(replace(law.topology, epoch=law.epoch + 1, **changes))
    up.regional.relay.react(LawChanged(later))
    up.global_.laws.adopt(later)


async def test_no_request_shares_the_answer_of_one_that_came_by_another_name() -> None:
    """Both names may have the same rules until a law says of one of them what it does not say of the other: an attempt
    is judged again by the leader's alone."""
    engine = Engine()
    engine.behaviour = "pause"
    names = [{"model": name, "models": [{"model": MODEL}]} for name in ("fast", "auto")]
    async with scripted(engine, routes=[SHARES, *names]) as up:
        asked = [await Client.asking(up, chat(body=stream() | {"model": name})) for name in ("fast", "auto", "auto")]
        await until(lambda: up.global_.metrics.in_flight == 3 and len(engine.seen) == 2)
        legislate(up, models={"auto": Rule(("world",), ("us",))})
        engine.release.set()
        answers = [await one.read_to_end() for one in asked]
        assert sorted(str(word(answer)) for answer in answers) == ["hit", "miss", "miss"]
        assert word(answers[0]) == "miss"
        await up.at_rest()
        kept = [up.global_.decisions.get(answer.headers["x-farhop-decision"]) is not None for answer in answers]
        assert kept == [True, False, False]  # the rule keeps records of what came by that name from here


async def test_a_follower_that_goes_alone_stays_within_the_law_that_it_came_under() -> None:
    elsewhere = {"processing": {"allow": ["eu"]}, "on_exhausted": "wait", "wait_max_s": 20}
    engine = Engine()
    async with scripted(engine, tenant("elsewhere", residency=elsewhere)) as up:
        asked = [await Client.asking(up, chat(key="sk-farhop-elsewhere", body=body())) for _ in range(3)]
        await until(lambda: len(up.global_.flow.held) == 1 and up.global_.metrics.in_flight == 3)
        await asyncio.sleep(0.05)  # all have been read
        who = up.global_.flow.law.topology.tenants["elsewhere"]
        assert who.residency is not None
        moved = replace(who, residency=replace(who.residency, processing=Rule(("us",))))
        legislate(up, tenants={**up.global_.flow.law.topology.tenants, "elsewhere": moved})
        answers = [await one.read_to_end() for one in asked]
        assert [answer.status for answer in answers] == [451] * 3
        assert engine.seen == []
        assert (await send(up.entry, chat(key="sk-farhop-elsewhere", body=body()))).status == 200


class Failing(Engine):
    """It fails at its first request, once it is told to, and serves all others."""

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        if self.seen:
            return await super()._chat(request)
        self.seen.append(({}, {}))
        await self.release.wait()
        return web.json_response({"error": {"message": "no", "code": "bad"}}, status=500)


async def test_followers_are_routed_separately_if_upstream_fails_before_first_byte() -> None:
    engine = Failing()
    async with scripted(engine, routes=[KEEPS | SHARES]) as up:
        asked = [await Client.asking(up, chat(body=body())) for _ in range(3)]
        await until(lambda: up.global_.metrics.in_flight == 3 and len(engine.seen) == 1)
        engine.release.set()
        answers = [await one.read_to_end() for one in asked]
        assert sorted((answer.status, word(answer)) for answer in answers) == [
            (200, "bypass"), (200, "bypass"), (500, "miss"),
        ]  # fmt: skip
        assert len(engine.seen) == 3
        assert outcomes(up) == {("miss", ""): 1, ("bypass", "leader_failed"): 2}


async def test_errors_are_neither_shared_nor_kept() -> None:
    engine = Engine()
    engine.behaviour = "error"
    async with scripted(engine, routes=[KEEPS | SHARES]) as up:
        answers = await asyncio.gather(*(send(up.entry, chat(body=body())) for _ in range(3)))
        assert {answer.status for answer in answers} == {500}
        assert len(engine.seen) == 3
        assert len(up.global_.answer_cache.cache.store) == 0


async def test_a_stream_that_breaks_breaks_for_all_and_is_not_kept() -> None:
    engine = Engine()
    engine.behaviour = "pause"
    async with scripted(engine, routes=[KEEPS | SHARES]) as up:
        asked = [await Client.asking(up, chat(body=stream())) for _ in range(2)]
        for one in asked:
            await one.until(b'"one"')
        engine.behaviour = "die"
        engine.release.set()
        answers = [await one.read_to_end() for one in asked]
        for answer in answers:
            assert b'"upstream_died_mid_stream"' in answer.body.split(b"\n\n")[-2]
        await up.at_rest()
        reply = up.global_.decisions.get(answers[1].headers["x-farhop-decision"])
        assert reply is not None
        assert reply["outcome"] == "upstream_died_mid_stream"
        assert len(up.global_.answer_cache.cache.store) == 0


async def test_a_slow_follower_neither_stalls_the_others_nor_fills_the_memory() -> None:
    engine = Pouring()
    engine.events, engine.size = 800, 64 * 1024  # more than the wires hold and than a reader may be behind
    bound = 64 * 1024 * 1024
    async with scripted(engine, routes=[KEEPS | SHARES], answers_bytes=bound) as up:
        store = up.global_.answer_cache.cache.store
        slow = await Client.asking(up, chat(body=stream()))
        fast = [await Client.asking(up, chat(body=stream())) for _ in range(2)]
        answers = await asyncio.gather(*(one.wire() for one in fast))
        assert [answer.count(b"x" * engine.size) for answer in answers] == [engine.events] * 2
        assert len(engine.seen) == 1
        assert store.taken <= bound
        with contextlib.suppress(ConnectionResetError):
            assert len(await slow.wire()) < engine.events * engine.size  # it was cut off
        await slow.leave()
        assert len(store) == 0  # more than its share


async def test_a_single_slow_reader_stops_the_upstream() -> None:
    engine = Pouring()
    engine.events, engine.size = 400, 64 * 1024
    async with scripted(engine, answers_bytes=1024 * 1024) as up:
        slow = await Client.asking(up, chat(body=stream()))
        await asyncio.sleep(0.3)
        assert up.global_.answer_cache.cache.store.taken <= 1024 * 1024
        assert (await slow.wire()).count(b"x" * engine.size) == engine.events


async def test_cache_hit_is_recorded_as_a_request_without_tokens_and_with_saved_tokens(tmp_path: Path) -> None:
    async with emulated(usage={"dir": str(tmp_path)}) as (up, _):
        for _ in range(3):
            await send(up.entry, chat(body=body()))
        page = up.global_.metrics.render().decode()
        completions = next(
            line for line in page.splitlines() if line.startswith('farhop_tokens_total{kind="completion"')
        )
        assert float(completions.rpartition(" ")[2]) == TOKENS
    lines = [line for _, line in segments.read(tmp_path)]
    records = sorted((event.data for event in Reading().events(lines)), key=lambda data: data.measured)
    assert [(one.measured, one.answer_cache, one.output_tokens, one.saved_output_tokens) for one in records] == [
        ("again", "hit", 0, TOKENS), ("again", "hit", 0, TOKENS), ("engine", "miss", TOKENS, 0),
    ]  # fmt: skip
    sums = Sums()
    for one in records:
        sums.add(one, None)
    assert (sums.requests, sums.given_again, sums.output_tokens, sums.unmeasured) == (3, 2, TOKENS, 0)
    assert {one.region for one in records} == {"virginia"}
