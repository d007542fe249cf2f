"""Looks at replicas: probes their health, scrapes their metrics, and swaps the view.

One task per replica, jittered, so that a slow one never delays another. Invariants: a value outside its domain is
dropped and counted, never trusted; a page that cannot be read is a failed scrape, not a failed replica. Never decides.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

import aiohttp
import msgspec

from farhop.shell.tasks import Tasks
from regional_lb.view import Replica, ReplicaProbed, Sample, ViewSwapped, view_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from farhop.balance.machine import Event
    from regional_lb.config import RegionalConfig, ReplicaConfig, Watch

PAGE_BYTES_MAX = 4 * 1024 * 1024
COUNT_MAX = 1_000_000_000
_COUNT = re.compile(r"[0-9]{1,10}")

# vLLM's names; whole names are matched, and what other engines call them is a table of its own.
_WAITING = "vllm:num_requests_waiting"
_RUNNING = "vllm:num_requests_running"
_KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_QUERIES = "vllm:prefix_cache_queries_total"
_HITS = "vllm:prefix_cache_hits_total"
_CACHE_CONFIG = "vllm:cache_config_info"
_WANTED = frozenset((_WAITING, _RUNNING, *_KV_USAGE, _QUERIES, _HITS, _CACHE_CONFIG))


class PageError(Exception):
    """A metrics page that does not say what it must; the text names the metric."""


# The exposition format: name, labels whose values may hold anything but a bare quote, value (and perhaps a timestamp).
_VALUE = r'"(?:[^"\\]++|\\.)*+"'
_LINE = re.compile(rf"(\w[\w:]*+)(?:\{{((?:[^\"{{}}]++|{_VALUE})*+)\}})?[ \t]+(\S+)")
_LABEL = re.compile(rf"(\w+)[ \t]*=[ \t]*({_VALUE})")


def read_page(text: str, at: float) -> Sample:
    """The sample in a vLLM metrics page. Several engines of one server are summed. Raises PageError."""
    values: dict[str, list[float]] = {}
    kv_tokens = 0
    for line in text.split("\n"):
        if not line.startswith("vllm:") or line.partition("{")[0].partition(" ")[0] not in _WANTED:
            continue
        match = _LINE.match(line)
        if match is None:
            raise PageError(f"{line.partition('{')[0][:64]}: not a line of metrics")
        name, labels, number = match.groups()
        values.setdefault(name, []).append(_sound(name, number))
        if name == _CACHE_CONFIG:
            kv_tokens += _cache_tokens(labels or "")
    if _WAITING not in values or _RUNNING not in values:
        raise PageError(f"{_WAITING} or {_RUNNING} is missing: is this a vLLM metrics page?")
    usage = next((values[name] for name in _KV_USAGE if name in values), [0.0])
    return Sample(
        at=at,
        waiting=int(sum(values[_WAITING])),
        running=int(sum(values[_RUNNING])),
        kv_usage=sum(usage) / len(usage),
        kv_tokens=min(kv_tokens, COUNT_MAX) or None,
        prefix_queries=sum(values.get(_QUERIES, [0.0])),
        prefix_hits=sum(values.get(_HITS, [0.0])),
    )


def _sound(name: str, number: str) -> float:
    try:
        value = float(number)
    except ValueError:
        raise PageError(f"{name}: not a number") from None
    most = 1.0 if name in _KV_USAGE else COUNT_MAX if name not in (_QUERIES, _HITS) else 1e18
    if not 0.0 <= value <= most:  # false for NaN as well
        raise PageError(f"{name}: {value!r} is outside 0..{most:g}")
    return value


def _cache_tokens(labels: str) -> int:
    """num_gpu_blocks × block_size from the labels of the info metric."""
    told = {name: value[1:-1] for name, value in _LABEL.findall(labels)}
    blocks, size = told.get("num_gpu_blocks", ""), told.get("block_size", "")
    if not (_COUNT.fullmatch(blocks) and _COUNT.fullmatch(size)):
        return 0  # older engines say None before they know
    tokens = int(blocks) * int(size)
    return tokens if tokens <= COUNT_MAX else 0


class Watcher:
    """Watches all replicas. `react` is told events; `refused` counts pages not believed, by reason."""

    def __init__(
        self,
        config: RegionalConfig,
        react: Callable[[Event], None],
        refused: Callable[[str], None],
        clock: Callable[[], float],
        rng: Random,
    ) -> None:
        self._config, self._react, self._refused, self._clock, self._rng = config, react, refused, clock, rng
        self._replicas = {r.label: _replica(r) for r in config.replicas}
        self._session: aiohttp.ClientSession | None = None
        self._tasks = Tasks()

    async def open(self) -> None:
        """Begin: the view is there at once, what is in it becomes known as probes come back."""
        timeout = aiohttp.ClientTimeout(total=self._config.watch.timeout_s)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
        self._session = aiohttp.ClientSession(
            timeout=timeout, connector=connector, auto_decompress=False, headers={"accept-encoding": "identity"}
        )
        self._react(ViewSwapped(view_of(list(self._replicas.values()))))
        for replica in self._config.replicas:
            self._tasks.start(self._probe(replica, self._config.watch), f"probe {replica.label}")
            self._tasks.start(self._scrape(replica, self._config.watch), f"scrape {replica.label}")

    async def close(self) -> None:
        """Stop looking."""
        await self._tasks.close()
        if self._session is not None:
            await self._session.close()

    async def _probe(self, replica: ReplicaConfig, watch: Watch) -> None:
        while True:
            self._react(ReplicaProbed(replica.label, await self._healthy(replica)))
            await self._pause(watch.probe_s)

    async def _scrape(self, replica: ReplicaConfig, watch: Watch) -> None:
        while True:
            try:
                text = await self._page(replica)
                self._learn(replica.label, read_page(text, self._clock()))
            except (aiohttp.ClientError, TimeoutError, OSError):
                pass  # whether it is alive is the probe's to say; without scrapes the last one ages
            except (PageError, UnicodeDecodeError):
                self._refused("metrics")
            await self._pause(watch.scrape_s)

    async def _pause(self, seconds: float) -> None:
        # ±20 %, so that many balancers do not look at one engine in step.
        await asyncio.sleep(seconds * (0.8 + 0.4 * self._rng.random()))

    async def _healthy(self, replica: ReplicaConfig) -> bool:
        assert self._session is not None
        try:
            async with self._session.get(f"{replica.origin}/health", allow_redirects=False) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def _page(self, replica: ReplicaConfig) -> str:
        """The page, whole: what is cut short could say 1 where it meant 12. Raises PageError if it is too large."""
        assert self._session is not None
        async with self._session.get(f"{replica.origin}/metrics", allow_redirects=False) as answer:
            if answer.status != 200:
                raise PageError(f"status {answer.status}")
            page = bytearray()
            async for piece in answer.content.iter_any():
                page += piece
                if len(page) > PAGE_BYTES_MAX:
                    raise PageError(f"more than {PAGE_BYTES_MAX} bytes")
            return page.decode()

    def _learn(self, name: str, sample: Sample) -> None:
        known = self._replicas[name]
        kv_tokens = sample.kv_tokens or known.kv_tokens
        self._replicas[name] = msgspec.structs.replace(known, sample=sample, kv_tokens=kv_tokens)
        self._react(ViewSwapped(view_of(list(self._replicas.values()))))


def _replica(config: ReplicaConfig) -> Replica:
    return Replica(
        name=config.label,
        address=config.address,
        models=frozenset(config.models),
        gpu=config.gpu,
        slots=config.slots,
        kv_tokens=config.kv_tokens,
        prefill_tokens_max=config.prefill_tokens_max,
        prefill_ms_per_token=config.prefill_ms_per_token,
        tpot_ms=config.tpot_ms,
        usd_per_hour=config.usd_per_hour,
    )
