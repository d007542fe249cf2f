"""Reloads the configuration and the map of a running process when their files change, or at SIGHUP.

Invariants: an unusable file, or one that does not fit the law in force, changes nothing and stops nothing: the last
good one stays in force, and the error is logged; a reload is applied whole, in one step of the event loop, so that no
decision sees half of it; settings that cannot change at run time stay as they are and are named. Never decides which
settings may change: each tier does (`Live`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pydantic import BaseModel

from farhop.config import ConfigError, load
from farhop.service.assembly import stores
from farhop.service.assembly.dataplane import LIVE_LIMITS
from farhop.service.config.process import Member
from farhop.service.process.clock import wall
from topology.problems import TopologyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from structlog.typing import FilteringBoundLogger

    from farhop.service.law.lawbook import LawBook
    from farhop.telemetry.metrics import TierMetrics
    from topology.law import Law
    from topology.model import Topology

C = TypeVar("C", bound=Member)
Live = dict[str, tuple[str, ...]]
"""The fields that may change while a process lives, and what beside each must be as it was, or neither is taken."""

LIVE: Live = {
    "topology": (), "log_level": (), "hop": (), "requests": (), "session": (), **dict.fromkeys(LIVE_LIMITS, ()),
}  # fmt: skip
LOOK_S = 2.0  # between two looks at the files
PROBLEMS_SHOWN_MAX = 20


def merged(running: C, wanted: C, live: Live) -> tuple[C, list[str], list[str]]:
    """The configuration to run, from the running one and the file's; the fields that were taken, and those that need a
    restart."""
    differ = [".".join(path) for path in _differing(running, wanted)]
    waiting = {path for path in differ if not any(_within(path, name) for name in live)}
    for name, beside in live.items():
        if any(_within(path, other) for path in waiting for other in beside):
            waiting.update(path for path in differ if _within(path, name))
    taken = [path for path in differ if path not in waiting]
    update: dict[str, Any] = {}
    for name in live:
        if not any(_within(path, name) for path in taken):
            continue
        part, _, field = name.partition(".")
        value = getattr(wanted, part)
        if field:
            value = update.get(part, getattr(running, part)).model_copy(update={field: getattr(value, field)})
        update[part] = value
    return running.model_copy(update=update), taken, sorted(waiting)


def _within(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")


def _differing(one: Any, other: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of the fields in which two differ. Never a value: one may be a secret."""
    if isinstance(one, BaseModel) and type(one) is type(other):
        for name in type(one).model_fields:
            yield from _differing(getattr(one, name), getattr(other, name), (*path, name))
    elif isinstance(one, dict) and isinstance(other, dict) and path:
        for name in sorted({*one, *other}, key=str):
            if name not in one or name not in other:
                yield (*path, str(name))
            else:
                yield from _differing(one[name], other[name], (*path, str(name)))
    elif one != other:
        yield path


class Reloader(Generic[C]):
    """See the module's docstring. `path` is the configuration's file; None: it was not read from one, and stays.

    `prepare` builds everything that a configuration and a map define, outside the loop, or raises ConfigError; what it
    returns applies all of it at once, given the law over that map. `clusters` are the etcd clusters that a
    configuration and a map define: those of the start stay.
    """

    def __init__(
        self,
        path: Path | None,
        config: C,
        topology: Topology,
        live: Live,
        laws: LawBook,
        prepare: Callable[[C, Topology], Callable[[Law], None]],
        clusters: Callable[[C, Topology], Mapping[str, object]] | None,
        log: FilteringBoundLogger | None = None,
    ) -> None:
        self._path, self._kind, self._live = path, type(config), live
        self.config, self.topology = config, topology
        self._laws, self._prepare, self._clusters = laws, prepare, clusters
        self._hubs = clusters(config, topology) if clusters is not None else {}
        self._stamp = self._seen = self._stamps()
        self.generation, self._since = 1, wall()
        self.trouble: tuple[str, ...] = ()
        self.awaiting: tuple[str, ...] = ()  # fields that await a restart
        self.counts: Counter[str] = Counter()  # reloads, by result
        self._read_under_epoch = laws.law.epoch  # when the files were read last
        self._one = asyncio.Lock()
        self._log = log

    # -- when

    async def keep(self) -> None:
        """Check the files for as long as the process lives. A changed file is read once it no longer changes."""
        while self._path is not None:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Read the files if they are others than those last read, and the same as at the last look; and again what was
        passed over, once another law is in force: it may fit that one."""
        stamp = await asyncio.to_thread(self._stamps)
        still, self._seen = stamp == self._seen, stamp
        if still and (stamp != self._stamp or (self.trouble and self._laws.law.epoch != self._read_under_epoch)):
            await self.reload()

    def _stamps(self) -> tuple[object, ...]:
        """What shows that a file was replaced. Links are followed, since they may be pointed elsewhere."""
        files = [] if self._path is None else [self._path, *_map_file(self.config)]
        return tuple(_stamp_of(file) for file in files)

    # -- what

    async def reload(self) -> None:
        """Read the files, and apply them if they are valid."""
        async with self._one:
            if self._path is None:
                return
            stamp = await asyncio.to_thread(self._stamps)
            try:
                result = await self._take(self._path)
            except (ConfigError, TopologyError) as error:
                self._pass_over(_problems(error))
            except Exception as error:  # noqa: BLE001 - a fault of ours: what is in force must not fall with it
                self._pass_over([f"internal: {type(error).__name__}; nothing was changed"], error)
            else:
                self.trouble = ()
                self.counts[result] += 1
            self._stamp, self._read_under_epoch = stamp, self._laws.law.epoch

    async def _take(self, path: Path) -> str:
        wanted = await asyncio.to_thread(load, self._kind, path)
        made, taken, waiting = merged(self.config, wanted, self._live)
        topology = await asyncio.to_thread(stores.topology_of, made)
        if self._clusters is not None:
            hubs = self._clusters(made, topology)
            waiting += [f"hubs.{name} of the topology" for name in sorted({*hubs, *self._hubs})
                        if hubs.get(name) != self._hubs.get(name)]  # fmt: skip
        another = topology != self.topology
        if taken or another:
            put = await asyncio.to_thread(self._prepare, made, topology)

            def swap(law: Law) -> None:
                put(law)
                self.config, self.topology = made, topology
                self.generation, self._since = self.generation + 1, wall()

            if another:
                await self._laws.remap(topology, swap)
            else:
                swap(self._laws.law)
            self._log_event("configuration in force", generation=self.generation, fields=_shortened(taken),
                      topology=_changed(another))  # fmt: skip
        if waiting and tuple(waiting) != self.awaiting:
            self._log_event("restart to change this", fields=_shortened(waiting))
        self.awaiting = tuple(waiting)
        return "taken" if taken or another else "unchanged"

    def _log_event(self, event: str, **fields: object) -> None:
        if self._log is not None:
            self._log.warning(event, **fields)

    def _pass_over(self, problems: list[str], error: Exception | None = None) -> None:
        self.trouble = _shortened(problems)
        self.counts["rejected"] += 1
        if self._log is not None:
            self._log.error("configuration rejected: the last good one stays in force", in_force=self.generation,
                           problems=self.trouble, exc_info=error)  # fmt: skip

    # -- saying so

    def status(self) -> dict[str, Any]:
        """For people: which configuration is in force, what is wrong with the one in the file, what needs a restart."""
        return {
            "file": None if self._path is None else str(self._path),
            "generation": self.generation,
            "since": self._since.astimezone(UTC).isoformat(timespec="seconds"),
            "topology": {"name": self.topology.name, "regions": len(self.topology.regions)},
            "trouble": list(self.trouble),
            "awaits_restart": list(_shortened(list(self.awaiting))),
        }

    def observe(self, metrics: TierMetrics) -> None:
        """Export the state as metrics."""
        gauge, counter = metrics.gauge, metrics.counter
        gauge("config_generation", "Generation of the files in force: 1 at the start.", self._generation)
        gauge("config_rejected", "1 if the files on disk cannot be used.", lambda: float(bool(self.trouble)))
        gauge("config_awaits_restart", "Fields that change with a restart alone.", lambda: float(len(self.awaiting)))
        counter("config_reloads", "Readings of the files, by result.", lambda: dict(self.counts), "result")

    def _generation(self) -> float:
        return float(self.generation)


def _changed(another: bool) -> str:
    return "changed" if another else "the same"


def _map_file(config: Member) -> Iterable[Path]:
    return [Path(config.topology)] if config.topology.endswith((".yaml", ".yml")) else []


def _stamp_of(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _problems(error: ConfigError | TopologyError) -> list[str]:
    if isinstance(error, TopologyError):
        return [f"{error.source}: {problem}" for problem in error.problems]
    return str(error).splitlines()


def _shortened(problems: list[str]) -> tuple[str, ...]:
    more = len(problems) - PROBLEMS_SHOWN_MAX
    return (*problems[:PROBLEMS_SHOWN_MAX], *((f"and {more} more",) if more > 0 else ()))
