"""Looks at replicas: probes their health, warms them up, scrapes their metrics and their GPUs', says what it saw.

One task per replica and question, jittered, so that a slow one never delays another. Invariants: a page that cannot be
read is a failed scrape, not a failed replica: the last sample ages; whatever is not believed is counted, by reason.
Never decides.
"""

from __future__ import annotations

import asyncio
import ssl
from math import inf
from typing import TYPE_CHECKING

import grpc
from msgspec.structs import replace

from farhop.relay import fetch
from farhop.relay.fetch import FetchError
from farhop.relay.outbound import OutboundLimits, Pool
from farhop.shell.tasks import Tasks
from regional_lb import gpus, probes, signals
from regional_lb.config import place_of
from regional_lb.exposition import PageError
from regional_lb.view import Replica, ReplicaProbed, ReplicaSampled, ViewSwapped, view_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from farhop.balance.machine import Address, Event
    from regional_lb.config import RegionalConfig, ReplicaConfig

PAGE_BYTES_MAX = 4 * 1024 * 1024
_WARMUP_S = 60.0  # each completion of a warm-up may take so long: kernels are compiled, graphs captured
_HUNG = "it generates nothing, whatever its health page says"
# Anything else may be a page whose server says nothing better of it.
_NO_PAGES = (b"text/html", b"application/json")
_GPUS_FRESH = 4  # rounds for which an exporter's last word holds: a GPU that broke does not mend while it is silent


class Watcher:
    """Watches all replicas. `react` is told events; `refused` counts what was not believed, by reason.

    `context` and `trouble` are as the relay's pool has them: probes believe whom requests believe; `credentials` is the
    same for gRPC. `answered_at` tells when a replica last answered a request well.
    """

    def __init__(
        self,
        config: RegionalConfig,
        react: Callable[[Event], None],
        refused: Callable[[str], None],
        clock: Callable[[], float],
        rng: Random,
        context: Callable[[], ssl.SSLContext] = ssl.create_default_context,
        trouble: Callable[[Address, str], None] = lambda _address, _why: None,
        credentials: Callable[[], grpc.ChannelCredentials] = grpc.ssl_channel_credentials,
        answered_at: Callable[[str], float] = lambda _label: -inf,
    ) -> None:
        self._config, self._watch = config, config.watch
        self._context, self._trouble, self._credentials = context, trouble, credentials
        self._answered_at = answered_at
        self._key = config.engine_key.get_secret_value() if config.engine_key else None
        self._ready: set[str] = set()  # whose last probe said so
        self._hung: set[str] = set()
        self._react, self._refused, self._clock, self._rng = react, refused, clock, rng
        self._pool: Pool | None = None
        self._gpus: dict[str, tuple[float, tuple[gpus.Gpu, ...]]] = {}  # by the exporter's URL, and when it was heard
        self._tasks = Tasks()

    async def open(self) -> None:
        """Begin: the view is there at once, what is in it becomes known as probes come back."""
        self._pool = Pool(OutboundLimits(connect_s=self._watch.timeout_s), self._context, self._trouble)
        self._react(ViewSwapped(view_of([_replica(replica) for replica in self._config.replicas])))
        for replica in self._config.replicas:
            self._tasks.start(self._probe(replica), f"probe {replica.label}")
            self._tasks.start(self._scrape(replica), f"scrape {replica.label}")
            if replica.probe.generate_s:
                self._tasks.start(self._generate(replica), f"have {replica.label} generate")
        for url in {replica.dcgm for replica in self._config.replicas if replica.dcgm}:
            self._tasks.start(self._look_at_gpus(url), f"GPUs at {url}")

    async def close(self) -> None:
        """Stop looking."""
        await self._tasks.close()
        if self._pool is not None:
            await self._pool.close()

    async def _probe(self, replica: ReplicaConfig) -> None:
        assert self._pool is not None
        path = _engine(replica).health
        prober = probes.prober(replica, path, self._pool, self._watch.timeout_s, self._credentials)
        fails, cold = 0, replica.probe.warmup > 0
        try:
            while True:
                verdict = await prober.look()
                fails = 0 if verdict.ok else fails + 1
                cold = cold or (fails >= self._watch.fall and replica.probe.warmup > 0)
                if cold and verdict is probes.READY:
                    self._tell(replica, probes.UNREADY)
                    cold = not await self._warm_up(replica)
                    verdict = probes.FAILED if cold else verdict
                self._tell(replica, verdict)
                await self._pause(self._watch.probe_s)
        finally:
            await prober.close()

    def _tell(self, replica: ReplicaConfig, verdict: probes.Verdict) -> None:
        ready = self._ready.add if verdict is probes.READY else self._ready.discard
        ready(replica.label)
        fault, strain = self._gpus_of(replica)
        hung = _HUNG if replica.label in self._hung and verdict is probes.READY else ""
        self._react(ReplicaProbed(replica.label, verdict.ok, fault or hung, verdict.ready, strain))

    async def _warm_up(self, replica: ReplicaConfig) -> bool:
        """Whether it went through. Who refuses to be asked so is not warmed up, and serves all the same."""
        assert self._pool is not None
        for _ in range(replica.probe.warmup):
            told = await probes.generates(self._pool, replica, self._key, _WARMUP_S)
            if told is None:
                self._refused("generate_status")
                return True
            if not told:
                return False
        return True

    async def _generate(self, replica: ReplicaConfig) -> None:
        """See whether it still generates whenever no answer of its has shown that for a while."""
        assert self._pool is not None
        name, every_s = replica.label, replica.probe.generate_s
        shown_at = self._clock()
        while True:
            await self._pause(every_s / 4.0)
            shown_at = max(shown_at, self._answered_at(name))
            if self._clock() - shown_at < every_s:
                self._hung.discard(name)
            elif name in self._ready:
                told = await probes.generates(self._pool, replica, self._key, every_s)
                if told is False:
                    self._hung.add(name)
                    continue
                if told is None:
                    self._refused("generate_status")
                self._hung.discard(name)
                shown_at = self._clock()

    async def _scrape(self, replica: ReplicaConfig) -> None:
        engine, (address, path) = _engine(replica), _metrics_place(replica)
        while True:
            try:
                page = await self._page(address, path)
                sample = signals.read_page(page, self._clock(), self._dropped, engine)
                self._react(ReplicaSampled(replica.label, sample))
            except (PageError, FetchError) as error:
                self._refused(f"metrics_{error.reason}")
            await self._pause(self._watch.scrape_s)

    async def _look_at_gpus(self, url: str) -> None:
        address, path = place_of(url)
        while True:
            try:
                self._gpus[url] = self._clock(), gpus.read_gpus(await self._page(address, path))
            except (PageError, FetchError) as error:
                self._refused(f"gpus_{error.reason}")
            await self._pause(self._watch.gpus_s)

    def _gpus_of(self, replica: ReplicaConfig) -> tuple[str, str]:
        """What its GPUs' exporter lately said to be broken, and what strained."""
        heard_at, known = self._gpus.get(replica.dcgm, (0.0, ()))
        if self._clock() - heard_at >= _GPUS_FRESH * self._watch.gpus_s:
            return "", ""
        health = self._config.health
        strain = gpus.strain(known, replica.gpus, health.gpu_temperature_c_max, health.gpu_free_mib_min)
        return gpus.fault(known, replica.gpus), strain

    def _dropped(self, reason: str) -> None:
        self._refused(f"metrics_{reason}")

    async def _pause(self, seconds: float) -> None:
        # ±20 %, so that many balancers do not look at one engine in step.
        await asyncio.sleep(seconds * (0.8 + 0.4 * self._rng.random()))

    async def _page(self, address: Address, path: str) -> bytes:
        """The page, whole: what is cut short could say 1 where it meant 12. Raises PageError, FetchError."""
        assert self._pool is not None
        answer = await fetch.get(self._pool, address, path, self._watch.timeout_s, PAGE_BYTES_MAX)
        if answer.status != 200:
            raise PageError("status", f"status {answer.status}")
        if answer.content_type in _NO_PAGES:
            raise PageError("type", f"{answer.content_type.decode()} is no metrics page")
        return answer.body


def _engine(replica: ReplicaConfig) -> signals.Engine:
    return signals.ENGINES[replica.engine] if replica.engine is not None else signals.ANY


def _metrics_place(replica: ReplicaConfig) -> tuple[Address, str]:
    """Where its page is: where the configuration says, or where such engines have it."""
    if replica.metrics:
        return place_of(replica.metrics)
    engine, address = _engine(replica), replica.address
    return replace(address, port=engine.metrics_port or address.port), engine.metrics


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
        version=config.version,
    )
