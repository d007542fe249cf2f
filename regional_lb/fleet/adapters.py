"""Which LoRA adapters each replica has loaded, as far as is known, and how long loading one takes.

An engine keeps the `max` adapters last used (vLLM: `--max-loras`) and reports which run and wait, not which are loaded:
so what it ran, and what was sent to it, is remembered in that order. Invariants: no more is remembered of a replica
than it can have loaded; names that were not configured are not kept; scoring never writes. Never decides.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from farhop.balance.estimate.ewma import RevertingMean

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from regional_lb.fleet.table import Column, Table
    from regional_lb.fleet.view import Lora

LOAD_MS = 200.0  # to start from: some 100 MB from the host's disk, once
LOAD_MS_MIN, LOAD_MS_MAX = 1.0, 60_000.0
_PLACES = 4  # of an engine that does not report it
# Requests go where loading seems cheap: a sample inflated by a stall is clipped, and forgotten within minutes.
_LEARN, _FORGET_S, _CLIP = 0.25, 300.0, 4.0


class _Places:
    """One replica's adapters. `used`: least recently used first. `full`: running adapters occupy all of its places."""

    __slots__ = ("known", "max", "running", "used")

    def __init__(self, known: frozenset[str]) -> None:
        self.known, self.max = known, _PLACES
        self.used: OrderedDict[str, None] = OrderedDict()
        self.running: frozenset[str] = frozenset()

    def use(self, adapter: str) -> None:
        self.used[adapter] = None
        self.used.move_to_end(adapter)
        self.shrink()

    def shrink(self) -> None:
        while len(self.used) > self.max:
            self.used.popitem(last=False)


class Adapters:
    """See the module's docstring. `names` are all that some replica serves."""

    def __init__(self) -> None:
        self.names: frozenset[str] = frozenset()
        self._load = RevertingMean(_LEARN, LOAD_MS, LOAD_MS_MIN, LOAD_MS_MAX, _FORGET_S, clip=_CLIP)
        self._places: dict[str, _Places] = {}

    def adopt(self, served: Mapping[str, frozenset[str]]) -> None:
        """Take the adapters that each replica serves."""
        before = self._places
        self._places = {
            name: before[name] if name in before and before[name].known == known else _Places(known)
            for name, known in served.items()
            if known
        }
        self.names = frozenset().union(*served.values())

    def on_report(self, replica: str, lora: Lora) -> None:
        """An engine reported what runs and what waits there."""
        places = self._places.get(replica)
        if places is None:
            return
        places.max = max(lora.max, 1)
        places.shrink()
        places.running = lora.running & places.known
        for adapter in sorted((lora.running | lora.waiting) & places.known):
            places.use(adapter)

    def sent(self, replica: str, model: str) -> None:
        """A request goes to a replica. Ignored if its model is not an adapter."""
        places = self._places.get(replica)
        if places is not None and model in places.known:
            places.use(model)

    def forget(self, replica: str) -> None:
        """The replica has no adapter loaded any more."""
        places = self._places.get(replica)
        if places is not None:
            places.used.clear()
            places.running = frozenset()

    def loaded(self, replica: str) -> Collection[str]:
        """The adapters that the replica probably has loaded, least recently used first."""
        places = self._places.get(replica)
        return tuple(places.used) if places is not None else ()

    def load_ms(self, now: float) -> float:
        """Milliseconds to load an adapter, as learned."""
        return self._load.at(now)

    def learn(self, extra_ms: float, now: float) -> None:
        """Learn the loading time of an adapter from a first token that came `extra_ms` later than its prefill
        explains.
        """
        self._load.update(min(max(extra_ms, LOAD_MS_MIN), LOAD_MS_MAX), now)

    def delay_ms(self, model: str, table: Table, now: float) -> Column | None:
        """How long (ms) a request for the model waits at each row before its prefill can begin; None if it is not an
        adapter.

        One that is not loaded is loaded first; where others run in all places, one of those must end before.
        """
        if model not in self.names:
            return None
        delay, load_ms = np.zeros(len(table)), self.load_ms(now)
        for place, name in enumerate(table.of.names):
            places = self._places.get(name)
            if places is None or model not in places.known or model in places.used:
                continue
            full = len(places.running) >= places.max
            delay[place] = load_ms + (table.service_ms.item(place) if full else 0.0)
        return delay
