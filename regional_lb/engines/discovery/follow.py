"""Follows all sources and announces the whole roster whenever it changes.

Invariants: a source that fails, hangs or sends nonsense delays no other; simultaneous changes are announced together;
every endpoint left out is counted, and logged once when it appears. Never drops a replica because a source is silent.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from farhop.service.process.tasks import Tasks
from regional_lb.engines.config import DnsSource, EtcdSource, FileSource
from regional_lb.engines.discovery.dns import DnsNames
from regional_lb.engines.discovery.etcd import EtcdKeys
from regional_lb.engines.discovery.file import ReplicaFile
from regional_lb.engines.discovery.kubernetes import Kubernetes
from regional_lb.engines.discovery.roster import Roster
from regional_lb.engines.discovery.source import Failed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from farhop.store.contract import Store
    from regional_lb.engines.config import EnginesConfig, ReplicaConfig, SourceConfig
    from regional_lb.engines.discovery.roster import LeftOut
    from regional_lb.engines.discovery.source import Found, Source

GAP_S = 0.1  # between two announcements: a thousand pods that come together are one change or a few
# The pause after an announcement, as a multiple of the time that it took: a thousand pods that come one by one still
# leave most of the process to requests.
_PAUSE_FACTOR = 9.0
LEFT_OUT_SHOWN_MAX = 32


def source_of(config: SourceConfig, region: str, store: Store, rng: Random) -> Source:
    """The source that a part of the configuration describes."""
    if isinstance(config, FileSource):
        return ReplicaFile(config)
    if isinstance(config, EtcdSource):
        return EtcdKeys(config, region, store)
    if isinstance(config, DnsSource):
        return DnsNames(config, rng)
    return Kubernetes(config, rng)


class Discovery:
    """`announce` is given all replicas; `refused` counts rejected endpoints by reason; `warn` is called with a source
    and what is wrong there.

    Without sources nothing runs and nothing is announced.
    """

    def __init__(
        self,
        config: EnginesConfig,
        store: Store,
        announce: Callable[[Sequence[ReplicaConfig]], None],
        refused: Callable[[str], None],
        warn: Callable[[str, str], None],
        rng: Random,
    ) -> None:
        self._announce, self._refused, self._warn = announce, refused, warn
        self._sources = [source_of(source, config.region, store, rng) for source in config.discovery]
        self._roster = Roster(config.replicas, [source.label for source in self._sources])
        self._changed = asyncio.Event()
        self._problems: dict[str, tuple[str, ...]] = {}
        self._left_out: tuple[LeftOut, ...] = ()
        self._tasks = Tasks()

    def open(self) -> None:
        """Begin to follow the sources."""
        for source in self._sources:
            self._tasks.start(source.follow(self._took), f"discovery: {source.label}")
        if self._sources:
            self._tasks.start(self._announcing(), "announce what is discovered")

    def fix(self, replicas: Sequence[ReplicaConfig]) -> None:
        """The configuration's replicas are these from now on: announced at once if there is no other source."""
        self._roster.fix(replicas)
        if self._sources:
            self._changed.set()
        else:
            self._announce(replicas)

    async def close(self) -> None:
        """Stop following the sources. The announced replicas stay."""
        await self._tasks.close()

    def _took(self, step: Found | Failed) -> None:
        if self._roster.take(step):
            self._changed.set()
        if isinstance(step, Failed):
            self._refused("discovery_failed")
            kept = "its last list stays in use" if step.source in self._problems else "it has given no list yet"
            self._warn(step.source, f"{step.why}; {kept}")
            return
        before = self._problems.get(step.source, ())
        for problem in step.problems:
            if problem not in before:
                self._refused("discovery_malformed")
                self._warn(step.source, problem)
        self._problems[step.source] = step.problems

    async def _announcing(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._changed.wait()
            self._changed.clear()
            began_s = loop.time()
            replicas, left_out = self._roster.merged()
            known = set(self._left_out)
            for one in left_out:
                if one not in known:
                    self._refused(f"discovery_{one.reason}")
                    self._warn(one.source, f"{one.replica} is left out: {one.why}")
            self._left_out = tuple(left_out)
            self._announce(replicas)
            await asyncio.sleep(max(GAP_S, _PAUSE_FACTOR * (loop.time() - began_s)))

    def objective(self, name: str) -> int | None:
        """The priority of an InferenceObjective of the pools found here; None where there is none of this name."""
        for source in self._sources:
            if isinstance(source, Kubernetes) and name in source.objectives:
                return source.objectives[name]
        return None

    def failing_open(self) -> list[str]:
        """The pools whose gateways bypass a picker that does not answer."""
        return [
            source.label
            for source in self._sources
            if isinstance(source, Kubernetes) and source.failure_mode == "FailOpen"
        ]

    def status(self) -> dict[str, Any]:
        """The state for /status; empty without discovery."""
        if not self._sources:
            return {}
        left_out = [
            {"source": o.source, "replica": o.replica, "why": o.why} for o in self._left_out[:LEFT_OUT_SHOWN_MAX]
        ]
        shown = {"discovery": self._roster.status(), "discovery_left_out": left_out}
        pools = [source for source in self._sources if isinstance(source, Kubernetes) and source.failure_mode]
        if pools:
            shown["pools"] = [
                {
                    "source": one.label,
                    "failure_mode": one.failure_mode,
                    "objectives": dict(one.objectives),
                    "objectives_trouble": one.objectives_trouble,
                }
                for one in pools
            ]
        return shown
