"""How well cached prefixes are predicted: what was expected in each engine's cache beside what was found. Never a test.

Emulated engines with small caches (this process), a regional balancer as shipped (its own process), conversations that
continue; and what no balancer is told: other clients of the same engines, and caches that are reset. Once by our own
prediction alone, once corrected by KV events, once with a tokenizer in addition. The same requests each time.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any

import aiohttp
import msgspec

from farhop_lab.bench.bodies import KEY, MODEL
from farhop_lab.bench.harness import HOST, BenchError, ProxyEnvironment, answers
from farhop_lab.bench.tiers import TierEnvironment
from farhop_lab.engine.core.text import VOCABULARY
from farhop_lab.engine.main import TokenizerError, host
from farhop_lab.engine.settings import EngineSettings
from farhop_lab.engine.tokenizer_file import TEMPLATE, TOKENIZER, write
from farhop_lab.world.child import ChildError
from farhop_lab.world.client import Result, answer
from farhop_lab.world.etcd import EtcdLabError
from farhop_lab.world.ports import free_ports

ENGINES = 4
KV_BLOCKS = 512  # 8,192 tokens each: all conversations together need about as much as all engines have
SPEEDUP = 20.0  # over an L4: 1,000 tokens take 30 ms
CONVERSATIONS, SYSTEM_PROMPTS = 20, 2
SYSTEM_TOKENS, TURN_TOKENS, TURNS_MAX = 400, 120, 10
REQUESTS = 300
AT_ONCE = 5
OTHERS_SHARE = 0.15  # of requests, those that another client sends straight to an engine
RESETS = (0.35, 0.7)  # after these shares of the requests, half of the engines' caches are reset
_READY_S = 20.0
_SERIES = re.compile(rb'farhop_prefix_(\w+)_tokens_total\{.*source="(\w+)".*\} (\S+)')


class Row(msgspec.Struct, frozen=True):
    """One variant. Tokens are per request; `error_tokens` is the absolute error of the prediction.

    `exact_share`: of the predicted tokens, those known from the engine's own events.
    """

    what: str
    requests: int
    prompt_tokens: float
    found_tokens: float
    expected_tokens: float
    error_tokens: float
    exact_share: float
    ttft_p50_ms: float
    ttft_p95_ms: float


@dataclass(frozen=True, slots=True)
class _Variant:
    name: str
    events: bool
    tokenizer: bool


VARIANTS = (
    _Variant("our mirror alone", events=False, tokenizer=False),
    _Variant("corrected by KV events", events=True, tokenizer=False),
    _Variant("KV events and tokenizer", events=True, tokenizer=True),
)


def measure(
    progress: Callable[[str], None], requests: int = REQUESTS, variants: tuple[_Variant, ...] = VARIANTS
) -> list[Row]:
    """A row for each variant. Raises BenchError."""
    rows = []
    for variant in variants:
        progress(variant.name)
        try:
            rows.append(asyncio.run(_row(variant, requests)))
        except (ChildError, EtcdLabError, TokenizerError, TimeoutError) as error:
            raise BenchError(f"{variant.name}: {str(error) or 'it took too long; is the machine too busy?'}") from None
    return rows


@dataclass(slots=True)
class _Setup:
    """The running processes: the engines' addresses, and those for clients and scrapes."""

    engines: list[str]
    entry: str
    admin: str
    session: aiohttp.ClientSession


@asynccontextmanager
async def _set_up(variant: _Variant) -> AsyncIterator[_Setup]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="farhop-bench-")))
        write(folder)
        replicas: list[dict[str, Any]] = []
        engines: list[str] = []
        for index in range(ENGINES):
            events, replay = free_ports(2)
            settings = EngineSettings(
                ports=[0], model=MODEL, profile="l4", speedup=SPEEDUP, kv_blocks=KV_BLOCKS, kv_events_port=events,
                kv_replay_port=replay, tokenizer=folder / TOKENIZER,
            )  # fmt: skip
            engines += await stack.enter_async_context(host(settings))
            addresses = {"kv_events": f"tcp://{HOST}:{events}", "kv_replay": f"tcp://{HOST}:{replay}"}
            known = {"url": f"http://{engines[-1]}", "name": f"gpu-{index}", "models": [MODEL]}
            replicas.append(known | (addresses if variant.events else {}))
        client, admin = free_ports(2)
        files = {"file": str(folder / TOKENIZER), "template": str(folder / TEMPLATE)}
        around = await stack.enter_async_context(TierEnvironment(ProxyEnvironment(folder, (), 0)))
        config = {
            "admin": {"port": admin}, "tier": {"port": 0}, "control": {"port": 0}, "client": {"port": client},
            "replicas": replicas, "tokenizers": {MODEL: files} if variant.tokenizer else {},
        }  # fmt: skip
        await around.tier("regional", config)
        # By the engines' token counts: from its first prompt the balancer estimates the length of the next ones.
        hello = _text(Random(0), SYSTEM_TOKENS)
        first = {"model": MODEL, "messages": [{"role": "user", "content": hello}], "max_tokens": 1}
        async with asyncio.timeout(_READY_S):
            while not await answers(HOST, client, msgspec.json.encode(first)):
                await asyncio.sleep(0.05)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield _Setup(engines, f"http://{HOST}:{client}", f"http://{HOST}:{admin}", session)


def _text(rng: Random, tokens: int) -> str:
    return "".join(rng.choice(VOCABULARY).decode() for _ in range(tokens))


async def _row(variant: _Variant, requests: int) -> Row:
    async with _set_up(variant) as setup:
        before = await _sums(setup)
        results = await _Load(setup, requests).run()
        after = await _sums(setup)
    good = [r for r in results if r.ok and r.usage is not None and r.ttft_ms is not None]
    if len(good) < max(2, len(results)):
        why = next((r.error.message for r in results if r.error is not None), "an answer without text or usage")
        raise BenchError(f"{variant.name}: {len(results) - len(good)} of {len(results)} requests failed: {why}")
    grown = {key: after[key] - before.get(key, 0.0) for key in after}
    expected, found, off = (grown["predicted"], grown["actual"], grown["error"])
    ttft_ms = [r.ttft_ms for r in good if r.ttft_ms is not None]
    return Row(
        what=variant.name,
        requests=len(good),
        prompt_tokens=sum(r.usage.prompt_tokens for r in good if r.usage is not None) / len(good),
        found_tokens=found / len(good),
        expected_tokens=expected / len(good),
        error_tokens=off / len(good),
        exact_share=grown["predicted exact"] / expected if expected else 0.0,
        ttft_p50_ms=median(ttft_ms),
        ttft_p95_ms=quantiles(ttft_ms, n=20)[-1],
    )


async def _sums(setup: _Setup) -> dict[str, float]:
    """The balancer's own sums, in all and by source."""
    async with setup.session.get(f"{setup.admin}/metrics") as response:
        page = await response.read()
    sums: dict[str, float] = {}
    for what, source, value in _SERIES.findall(page):
        for key in (what.decode(), f"{what.decode()} {source.decode()}"):
            sums[key] = sums.get(key, 0.0) + float(value)
    return sums


class _Load:
    """The same requests for every variant, in the same order; engines may finish them in another."""

    def __init__(self, setup: _Setup, requests: int) -> None:
        self._setup, self._requests = setup, requests
        self._rng = Random(1)
        self._systems = [self._prompt(SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]
        self._talks = [self._new(n) for n in range(CONVERSATIONS)]
        self._sent = 0
        self._resets = [int(share * requests) for share in RESETS]

    def _prompt(self, tokens: int) -> str:
        return _text(self._rng, tokens)

    def _new(self, n: int) -> list[dict[str, str]]:
        return [{"role": "system", "content": self._systems[n % SYSTEM_PROMPTS]}]

    async def run(self) -> list[Result]:
        """All of them, AT_ONCE at a time."""
        results: list[Result] = []
        free = list(range(CONVERSATIONS))

        async def client() -> None:
            while self._sent < self._requests:
                self._sent += 1
                if self._resets and self._sent >= self._resets[0]:
                    self._resets.pop(0)
                    await self._reset()
                if self._rng.random() < OTHERS_SHARE:
                    await self._other()
                n = free.pop(self._rng.randrange(len(free)))
                results.append(await self._turn(n))
                free.append(n)

        await asyncio.gather(*(client() for _ in range(AT_ONCE)))
        return results

    async def _turn(self, n: int) -> Result:
        talk = self._talks[n]
        if len(talk) > 2 * TURNS_MAX:
            talk = self._talks[n] = self._new(n)
        talk.append({"role": "user", "content": self._prompt(TURN_TOKENS)})
        body = {"model": MODEL, "messages": talk, "max_tokens": 16, "ignore_eos": True, "stream": True,
                "stream_options": {"include_usage": True}}  # fmt: skip
        result = await answer([self._setup.entry], KEY, body, session=self._setup.session, request_s=60.0)
        talk.append({"role": "assistant", "content": result.text})
        return result

    async def _other(self) -> None:
        """Another client, which does not come through the balancer."""
        engine = self._setup.engines[self._rng.randrange(ENGINES)]
        body = {"model": MODEL, "prompt": self._prompt(4 * SYSTEM_TOKENS), "max_tokens": 1}
        async with self._setup.session.post(f"http://{engine}/v1/completions", json=body) as response:
            await response.read()

    async def _reset(self) -> None:
        for engine in self._setup.engines[: ENGINES // 2]:
            async with self._setup.session.post(f"http://{engine}/reset_prefix_cache") as response:
                await response.read()
