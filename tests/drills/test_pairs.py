"""Prefill and decode on two engines, live: one prefills for two, behind a real regional balancer, on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from classic import SPEEDUP, Gpu, gpus, l4, region
from inprocess import MODEL, until

from farhop_lab.engine.core.faults import Fault
from farhop_lab.engine.core.sequence import Sequence, TextModel
from farhop_lab.engine.core.text import write_all
from farhop_lab.engine.formats.api import Transfer
from regional_lb.app.main import RegionalBalancer
from tests.conftest import at_once

KEY = {"authorization": "Bearer sk-farhop-anywhere"}
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TOKENS = 20


class World:
    """Engines `p` (prefill), `d0` and `d1` (decode), their balancer, and a client."""

    def __init__(
        self,
        engines: list[Gpu],
        kill_prefill: Callable[[], Awaitable[None]],
        balancer: RegionalBalancer,
        url: str,
        session: aiohttp.ClientSession,
    ) -> None:
        self.p, *self.d = engines
        self.kill_prefill = kill_prefill
        self.balancer, self.url, self._session = balancer, url, session

    def post(self, prompt: str, **fields: Any) -> Any:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, **fields}
        return self._session.post(self.url + COMPLETION, json=body, headers=KEY)

    async def ask(self, prompt: str, **fields: Any) -> tuple[Any, dict[str, Any]]:
        """Headers and the whole answer; of a stream, its text and usage."""
        async with self.post(prompt, **fields) as answer:
            body = await answer.read()
            assert answer.status == 200, body
            if not fields.get("stream"):
                document = msgspec.json.decode(body)
                return answer.headers, {"text": document["choices"][0]["text"], "usage": document["usage"]}
        events = [msgspec.json.decode(line[6:]) for line in body.split(b"\n\n") if line.startswith(b"data: {")]
        found = {"text": "".join(choice["text"] for event in events for choice in event["choices"])}
        return answer.headers, found | {"usage": events[-1].get("usage")}

    async def at_rest(self) -> None:
        """Until nothing runs and nothing is held anywhere, which must come to be."""
        flow = self.balancer.flow
        cores = [gpu.replica.core for gpu in (self.p, *self.d)]
        await until(lambda: not (flow.under_way + len(flow.replicas.ledger) + sum(core.has_work for core in cores)))
        await until(lambda: not sum(core.kv.referenced for core in cores))


@asynccontextmanager
async def _world(speedup: float = SPEEDUP, probe_timeout_s: float = 5.0) -> AsyncIterator[World]:
    """Probes are patient, for busy machines, unless a test is about who does not answer them."""
    profile = l4(speedup)
    async with (
        AsyncExitStack() as alive,
        gpus(profile, profile) as others,
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                force_close=True
            )  # a connection at rest would have the balancer wait at its end
        ) as session,
    ):
        engines = [await alive.enter_async_context(Gpu(profile, 0).running()), *others]
        for gpu in engines:  # one model that says the same, as real replicas have
            gpu.replica.text_model = TextModel(MODEL, 0, 50.0)
        fields = {"prefill_ms_per_token": profile.prefill_ms_per_token, "tpot_ms": profile.decode_floor_ms}
        roles = (("p", "prefill"), ("d0", "decode"), ("d1", "mixed"))
        replicas = [
            {"url": f"http://127.0.0.1:{gpu.port}", "models": [MODEL], "name": name, "role": role, **fields}
            for gpu, (name, role) in zip(engines, roles, strict=True)
        ]
        watch = {"probe_s": 0.05, "scrape_s": 0.05, "timeout_s": probe_timeout_s, "rise": 1, "fall": 2}
        async with region(engines, replicas=replicas, watch=watch) as (balancer, url):
            yield World(engines, alive.aclose, balancer, url, session)


def _prompt(name: str, tokens: int = 600) -> str:
    return (f"{name} tells of the sea and of the shore. " * tokens)[: 4 * tokens]


def _expected(prompt: str) -> str:
    return write_all(prompt.encode(), 0, 1e9, TOKENS).decode()


async def test_pair_gives_the_answer_of_one_engine_and_names_both_replicas() -> None:
    async with _world() as world:
        for n, stream in enumerate((False, True, True, False)):
            prompt = _prompt(f"alice{n}")
            options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            headers, answer = await world.ask(prompt, **options)
            assert answer["text"] == _expected(prompt)
            assert headers["x-farhop-prefill-replica"] == "p"
            assert headers["x-farhop-replica"] in ("d0", "d1")
            usage = answer["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (600, TOKENS)
            assert usage["prompt_tokens_details"]["cached_tokens"] == 592  # 37 full blocks of 38
        decision = world.balancer.decisions.get(headers["x-farhop-decision"])
        assert decision is not None
        assert decision["reasons"]["prefill"] == "p"
        assert decision["attempts"] == [{"target": headers["x-farhop-replica"], "outcome": "served"}]
        await world.at_rest()
        assert sum(gpu.replica.transfers.fetched_blocks for gpu in world.d) == 4 * 37
        assert world.p.replica.core.counters.generation_tokens == 4  # a token each


async def test_both_engines_know_it_by_one_name_and_one_trace() -> None:
    async with _world() as world:
        seen: list[dict[str, str]] = []
        for gpu in (world.p, *world.d):
            serve = gpu.replica.serve

            async def listen(request: web.Request, *rest: Any, serve: Any = serve) -> Any:
                seen.append({name.lower(): value for name, value in request.headers.items()})
                return await serve(request, *rest)

            gpu.replica.serve = listen  # type: ignore[method-assign]
        await world.ask(_prompt("zoe"))
        first, second = seen
        assert first["x-request-id"] == second["x-request-id"]
        assert first["traceparent"] == second["traceparent"]


async def test_a_conversation_stays_with_its_decode_engine_and_short_prompts_are_whole() -> None:
    """On engines 4 times as fast as real ones: what a prefill costs must stand out of what a busy machine adds."""
    async with _world(4.0) as world:
        prompt = _prompt("bob")
        headers, answer = await world.ask(prompt)
        again, _ = await world.ask(prompt + answer["text"] + " and then?")
        assert "x-farhop-prefill-replica" not in again
        assert again["x-farhop-replica"] == headers["x-farhop-replica"]
        short, _ = await world.ask("hello")
        assert "x-farhop-prefill-replica" not in short
        several, _ = await world.ask(_prompt("carol"), n=2)
        assert "x-farhop-prefill-replica" not in several
        await world.at_rest()


async def test_all_requests_are_served_if_the_prefill_engine_breaks_or_is_gone() -> None:
    async with _world() as world:
        world.p.replica.faults.command(Fault("fast-500"))  # green to probes
        headers, answer = await world.ask(_prompt("dave"), stream=True)
        assert answer["text"] == _expected(_prompt("dave"))
        assert "x-farhop-prefill-replica" not in headers
        world.p.replica.faults.command(None)


async def test_the_prefill_engine_dies_between_the_halves() -> None:
    """What it held is out of reach: the decode engine computes the prompt itself."""
    async with _world() as world:
        for gpu in world.d:
            fetch = gpu.replica.transfers.pull

            async def pull(source: Transfer, sequence: Sequence, fetch: Any = fetch) -> None:
                await world.kill_prefill()
                await fetch(source, sequence)

            gpu.replica.transfers.pull = pull  # type: ignore[method-assign]
        headers, answer = await world.ask(_prompt("erin"), stream=True, stream_options={"include_usage": True})
        assert headers["x-farhop-prefill-replica"] == "p"
        assert answer["text"] == _expected(_prompt("erin"))
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_frozen_prefill_engine_is_given_up_and_its_requests_are_served() -> None:
    async with _world(probe_timeout_s=1.0) as world:
        world.p.frozen.set()
        headers, answer = await world.ask(_prompt("frank"), stream=True)
        assert answer["text"] == _expected(_prompt("frank"))
        assert "x-farhop-prefill-replica" not in headers


@pytest.mark.parametrize("half", ["prefill", "decode"])
async def test_a_client_that_leaves_stops_both_engines(half: str) -> None:
    """At once, though they have 2,000 tokens to make: everything here is on one loop, whose rounds are counted."""
    async with _world() as world:
        first, second = world.p.replica.core, [gpu.replica.core for gpu in world.d]
        asking = asyncio.create_task(world.ask(_prompt("gina", 4000), max_tokens=2000))
        if half == "prefill":
            await until(lambda: first.has_work)
        else:
            await until(lambda: any(core.running for core in second))
        before = sum(core.counters.generation_tokens for core in second)
        asking.cancel()
        await at_once(lambda: not first.has_work and not any(core.has_work for core in second), 60)
        made = sum(core.counters.generation_tokens for core in second) - before
        assert made == 0 if half == "prefill" else made < 1000
        await world.at_rest()


async def test_a_client_does_not_say_where_kv_is_fetched_from() -> None:
    async with _world() as world:
        async with world.post("hello", kv_transfer_params={"remote_host": "10.0.0.1"}) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["param"] == "kv_transfer_params"
        async with world.post("hello", kv_transfer_params=None) as answer:
            assert answer.status == 200


async def test_many_concurrent_requests_are_answered_as_by_one_engine() -> None:
    async with _world() as world:
        prompts = [_prompt(f"crowd{n}", 300 + 20 * n) for n in range(24)]
        answer = await asyncio.gather(*(world.ask(prompt, stream=bool(n % 2)) for n, prompt in enumerate(prompts)))
        for prompt, (_, one) in zip(prompts, answer, strict=True):
            assert one["text"] == _expected(prompt)
        paired = sum("x-farhop-prefill-replica" in headers for headers, _ in answer)
        assert paired > 0
        await world.at_rest()
