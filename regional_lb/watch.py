"""Looks at replicas: probes their health, scrapes their metrics and their GPUs', and says what it saw.

One task per replica and question, jittered, so that a slow one never delays another. Invariants: a page that cannot be
read is a failed scrape, not a failed replica: the last sample ages; whatever is not believed is counted, by reason.
Never decides.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING

from msgspec.structs import replace

from farhop.relay import fetch
from farhop.relay.fetch import FetchError
from farhop.relay.outbound import OutboundLimits, Pool
from farhop.shell.tasks import Tasks
from regional_lb import gpus, signals
from regional_lb.config import place_of
from regional_lb.exposition import PageError
from regional_lb.view import Replica, ReplicaProbed, ReplicaSampled, ViewSwapped, view_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from farhop.balance.machine import Address, Event
    from regional_lb.config import RegionalConfig, ReplicaConfig

PAGE_BYTES_MAX = 4 * 1024 * 1024
_HEALTH_BYTES_MAX = 64 * 1024
# Anything else may be a page whose server says nothing better of it.
_NO_PAGES = (b"text/html", b"application/json")
_GPUS_FRESH = 4  # rounds for which an exporter's last word holds: a GPU that broke does not mend while it is silent


class Watcher:
    """Watches all replicas. `react` is told events; `refused` counts what was not believed, by reason.

    `context` and `trouble` are as the relay's pool has them: probes believe whom requests believe.
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
    ) -> None:
        self._config, self._watch = config, config.watch
        self._context, self._trouble = context, trouble
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
        for url in {replica.dcgm for replica in self._config.replicas if replica.dcgm}:
            self._tasks.start(self._look_at_gpus(url), f"GPUs at {url}")

    async def close(self) -> None:
        """Stop looking."""
        await self._tasks.close()
        if self._pool is not None:
            await self._pool.close()

    async def _probe(self, replica: ReplicaConfig) -> None:
        path = _engine(replica).health
        while True:
            ok = await self._healthy(replica.address, path)
            self._react(ReplicaProbed(replica.label, ok, self._fault(replica)))
            await self._pause(self._watch.probe_s)

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

    def _fault(self, replica: ReplicaConfig) -> str:
        """What its GPUs' exporter lately said to be broken."""
        heard_at, known = self._gpus.get(replica.dcgm, (0.0, ()))
        fresh = self._clock() - heard_at < _GPUS_FRESH * self._watch.gpus_s
        return gpus.fault(known, replica.gpus) if fresh else ""

    def _dropped(self, reason: str) -> None:
        self._refused(f"metrics_{reason}")

    async def _pause(self, seconds: float) -> None:
        # ±20 %, so that many balancers do not look at one engine in step.
        await asyncio.sleep(seconds * (0.8 + 0.4 * self._rng.random()))

    async def _healthy(self, address: Address, path: str) -> bool:
        assert self._pool is not None
        try:
            return (await fetch.get(self._pool, address, path, self._watch.timeout_s, _HEALTH_BYTES_MAX)).status == 200
        except FetchError:
            return False

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
        role=config.role,
    )
