"""SGLang's disaggregation live: engines that prefill and engines that answer, asked at once, on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from classic import Gpu, l4, region
from inprocess import MODEL, until

from farhop_lab.engine.bootstrap import BootstrapRooms, Mode
from farhop_lab.engine.core.faults import Fault
from farhop_lab.engine.core.held import TransferLink
from farhop_lab.engine.core.sequence import TextModel
from farhop_lab.engine.core.text import write_all
from regional_lb.app.main import RegionalBalancer
from tests.conftest import at_once

KEY = {"authorization": "Bearer sk-farhop-anywhere"}
COMPLETION = "/v1/completions"
TOKENS = 20


class World:
    """Engines `p0`, `p1` (prefill), `d0`, `d1` (decode), their balancer, and a client."""

    def __init__(
        self, engines: list[Gpu], balancer: RegionalBalancer, url: str, session: aiohttp.ClientSession
    ) -> None:
        self.p, self.d = engines[:2], engines[2:]
        self.balancer, self._url, self._session = balancer, url, session

    def post(self, prompt: str, **fields: Any) -> Any:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, **fields}
        return self._session.post(self._url + COMPLETION, json=body, headers=KEY)

    async def ask(self, prompt: str, **fields: Any) -> tuple[Any, str, Any]:
        """Headers, text and usage of a stream."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async with self.post(prompt, **options, **fields) as answer:
            body = await answer.read()
            assert answer.status == 200, body
        events = [msgspec.json.decode(line[6:]) for line in body.split(b"\n\n") if line.startswith(b"data: {")]
        text = "".join(choice["text"] for event in events for choice in event["choices"])
        return answer.headers, text, events[-1].get("usage")

    async def at_rest(self) -> None:
        """Until nothing runs, waits or is held anywhere, which must come to be."""
        flow, engines = self.balancer.flow, [gpu.replica for gpu in (*self.p, *self.d)]
        await until(
            lambda: not (flow.under_way + len(flow.replicas.ledger) + sum(one.core.has_work for one in engines))
        )
        await until(lambda: not sum(one.core.kv.referenced + len(one.rooms or ()) for one in engines))


@asynccontextmanager
async def _engine(mode: Mode, wait_s: float = 60.0) -> AsyncIterator[tuple[Gpu, int]]:
    """An engine of that mode, and its bootstrap port (0: none)."""
    gpu = Gpu(l4(), 0)
    gpu.replica.text_model = TextModel(MODEL, 0, 50.0)  # one model that says the same, as real replicas have
    gpu.replica.rooms = rooms = BootstrapRooms(mode, gpu.replica.core, TransferLink(), wait_s)
    runner = web.AppRunner(rooms.application(), access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    async with gpu.running():
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield gpu, runner.addresses[0][1] if mode == "prefill" else 0
        finally:
            await runner.cleanup()


@asynccontextmanager
async def _world(probe_timeout_s: float = 5.0) -> AsyncIterator[World]:
    """Probes are patient, for busy machines, unless a test is about who does not answer them."""
    modes: tuple[tuple[str, Mode], ...] = (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"), ("d1", "decode"))
    async with (
        AsyncExitStack() as alive,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
    ):
        fields = {"prefill_ms_per_token": l4().prefill_ms_per_token, "tpot_ms": l4().decode_floor_ms}
        engines, replicas = [], []
        for name, mode in modes:
            gpu, port = await alive.enter_async_context(_engine(mode))
            engines.append(gpu)
            one = {"url": f"http://127.0.0.1:{gpu.port}", "models": [MODEL], "name": name, "role": mode, **fields}
            replicas.append(one | {"disaggregation": "sglang"} | ({"bootstrap_port": port} if port else {}))
        watch = {"probe_s": 0.05, "scrape_s": 0.05, "timeout_s": probe_timeout_s, "rise": 1, "fall": 2}
        async with region(engines, replicas=replicas, watch=watch) as (balancer, url):
            yield World(engines, balancer, url, session)


def _prompt(name: str, tokens: int = 600) -> str:
    return (f"{name} tells of the sea and of the shore. " * tokens)[: 4 * tokens]


def _expected(prompt: str) -> str:
    return write_all(prompt.encode(), 0, 1e9, TOKENS).decode()


async def test_pair_gives_the_answer_of_one_engine_and_is_accounted_once() -> None:
    async with _world() as world:
        for n in range(3):
            headers, text, usage = await world.ask(_prompt(f"alice{n}"))
            assert text == _expected(_prompt(f"alice{n}"))
            assert headers["x-farhop-prefill-replica"] in ("p0", "p1")
            assert headers["x-farhop-replica"] in ("d0", "d1")
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (600, TOKENS)
        async with world.post("hi") as answer:  # short, and in one piece
            assert (answer.status, "x-farhop-prefill-replica" in answer.headers) == (200, True)
        decision = world.balancer.decisions.get(headers["x-farhop-decision"])
        assert decision is not None
        assert decision["attempts"] == [{"target": headers["x-farhop-replica"], "outcome": "served"}]
        await world.at_rest()
        assert sum(gpu.replica.core.counters.generation_tokens for gpu in world.p) == 4  # a token each


async def test_a_broken_prefill_engine_fails_no_request() -> None:
    async with _world() as world:
        world.p[0].replica.faults.command(Fault("fast-500"))  # green to probes
        attempts: list[dict[str, str]] = []
        for n in range(6):
            headers, text, _ = await world.ask(_prompt(f"dave{n}"))
            assert (text, headers["x-farhop-prefill-replica"]) == (_expected(_prompt(f"dave{n}")), "p1")
            decision = world.balancer.decisions.get(headers["x-farhop-decision"])
            assert decision is not None
            attempts += decision["attempts"][:-1]
        assert attempts  # the one that failed, and the message says where
        assert all(one == {"target": "p0", "outcome": "prefill_failed"} for one in attempts)
        await world.at_rest()


@pytest.mark.parametrize("half", ["prefill", "decode"])
async def test_a_frozen_one_is_given_up_and_its_requests_are_served(half: str) -> None:
    async with _world(1.0) as world:
        (world.p if half == "prefill" else world.d)[0].frozen.set()
        answer = await asyncio.gather(*(world.ask(_prompt(f"frank{n}")) for n in range(6)))
        for n, (headers, text, _) in enumerate(answer):
            assert text == _expected(_prompt(f"frank{n}"))
            frozen = ("x-farhop-prefill-replica", "p0") if half == "prefill" else ("x-farhop-replica", "d0")
            assert headers[frozen[0]] != frozen[1]


async def test_a_client_that_leaves_stops_both_engines() -> None:
    async with _world() as world:
        cores = [gpu.replica.core for gpu in (*world.p, *world.d)]
        for sight in (world.p, world.d):  # while one prefills, and while the other answers
            asking = asyncio.create_task(world.ask(_prompt("gina", 4000), max_tokens=2000))
            await until(lambda sight=sight: any(gpu.replica.core.has_work for gpu in sight))
            asking.cancel()
            await at_once(lambda: not any(core.has_work for core in cores), 60)
            await world.at_rest()


async def test_many_requests_at_once_while_some_clients_leave() -> None:
    async with _world() as world:
        prompts = [_prompt(f"crowd{n}", 300 + 20 * n) for n in range(24)]
        asking = [asyncio.create_task(world.ask(prompt)) for prompt in prompts]
        await asyncio.sleep(0.05)
        for task in asking[::5]:
            task.cancel()
        answer = await asyncio.gather(*asking, return_exceptions=True)
        served = [
            (prompt, one) for prompt, one in zip(prompts, answer, strict=True) if not isinstance(one, BaseException)
        ]
        assert len(served) >= 19
        assert all(one[1] == _expected(prompt) for prompt, one in served)
        await world.at_rest()


async def test_a_request_that_is_at_fault_itself_is_answered_with_its_error() -> None:
    async with _world() as world:
        async with world.post(_prompt("hugo", 40_000)) as answer:  # more than the engines' context
            assert answer.status == 400
            assert "maximum context length" in (await answer.json())["error"]["message"]
        for name, value in (("bootstrap_host", "10.0.0.1"), ("bootstrap_port", 1), ("bootstrap_room", 0)):
            async with world.post("hello", **{name: value}) as answer:
                assert (answer.status, (await answer.json())["error"]["param"]) == (400, name)
        async with world.post(_prompt("ida"), n=2) as answer:
            assert answer.status == 503
            assert "several prompts or answers" in (await answer.json())["error"]["message"]
        await world.at_rest()
