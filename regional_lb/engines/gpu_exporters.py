"""Watches GPUs by their DCGM exporters: one task per exporter, however many replicas' GPUs it tells of.

Invariants: a report holds for a few rounds, since a broken GPU does not recover while its exporter is silent; a page
that cannot be read is counted, and changes nothing. Never decides what a fault or strain means for a replica.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farhop.relay.upstream.fetch import FetchError
from regional_lb.engines.config import place_of
from regional_lb.engines.signals import gpus
from regional_lb.engines.signals.exposition import PageError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable

    from farhop.service.process.tasks import Tasks
    from regional_lb.engines.config import EnginesConfig, ReplicaConfig
    from regional_lb.engines.pages import Pages

_FRESH_ROUNDS = 4  # for which an exporter's last report holds


class GpuExporters:
    """The exporters that replicas name (`dcgm`). `pause` sleeps for about so many seconds; `refused` counts pages that
    could not be read, by reason."""

    def __init__(
        self,
        config: EnginesConfig,
        *,
        tasks: Tasks,
        pages: Pages,
        pause: Callable[[float], Awaitable[None]],
        refused: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._config, self._tasks, self._pages = config, tasks, pages
        self._pause, self._refused, self._clock = pause, refused, clock
        self._found: dict[str, tuple[float, tuple[gpus.Gpu, ...]]] = {}  # by URL, and when it was fetched
        self._watching: dict[str, asyncio.Task[None]] = {}  # by URL

    def watch(self, urls: set[str]) -> None:
        """These are all exporters from now on."""
        for url in self._watching.keys() - urls:
            self._watching.pop(url).cancel()
            self._found.pop(url, None)
        for url in urls - self._watching.keys():
            self._watching[url] = self._tasks.start(self._look(url), f"GPUs at {url}")

    def health_of(self, replica: ReplicaConfig) -> tuple[str, str]:
        """What its GPUs' exporter last reported as broken, and what as strained; "" for nothing."""
        fetched_at, found = self._found.get(replica.dcgm, (0.0, ()))
        if self._clock() - fetched_at >= _FRESH_ROUNDS * self._config.watch.gpus_s:
            return "", ""
        health = self._config.health
        strain = gpus.strain(found, replica.gpus, health.gpu_temperature_c_max, health.gpu_free_mib_min)
        return gpus.fault(found, replica.gpus), strain

    async def _look(self, url: str) -> None:
        address, path = place_of(url)
        while url in self._watching:
            try:
                self._found[url] = self._clock(), gpus.read_gpus(await self._pages.metrics(address, path))
            except (PageError, FetchError) as error:
                self._refused(f"gpus_{error.reason}")
            await self._pause(self._config.watch.gpus_s)
