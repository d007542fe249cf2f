"""What global balancers report while a drill runs; each is asked separately, so that a dead one delays no other.

Never decides, and never keeps old reports: a balancer that has not answered lately does not count.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from farhop.loose_json import as_dict, dicts
from farhop_drill.measures import StatusSample

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

EVERY_S = 0.25
FRESH_S = 1.5
_WORST_FIRST = ("down", "draining", "suspect", "returning", "up")


class StatusPoller:
    """`asks` give a balancer's /status each, or None if it does not answer; they have time limits of their own."""

    def __init__(
        self, asks: Sequence[Callable[[], Awaitable[Mapping[str, Any] | None]]], clock: Callable[[], float]
    ) -> None:
        self._asks, self._clock = asks, clock
        self._answers: dict[int, tuple[float, Mapping[str, Any]]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Begin to look."""
        self._tasks = [asyncio.create_task(self._follow(at)) for at in range(len(self._asks))]

    async def close(self) -> None:
        """Look no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def _follow(self, at: int) -> None:
        while True:
            status = await self._asks[at]()
            if status is not None:
                self._answers[at] = self._clock(), status
            await asyncio.sleep(EVERY_S)

    def look(self, began: float) -> StatusSample | None:
        """What the balancers that answered lately report, times counted from `began`; None if none did."""
        now = self._clock()
        return seen([status for at, status in self._answers.values() if now - at <= FRESH_S], now - began)


def seen(statuses: Sequence[Mapping[str, Any]], at_s: float) -> StatusSample | None:
    """Of each region the worst state that any of these balancers gives it, and its fullest share of any model."""
    if not statuses:
        return None
    states: dict[str, str] = {}
    used: dict[str, float] = {}
    pilots: dict[str, bool] = {}
    for status in statuses:
        for one in dicts(status.get("regions")):
            name, state = str(one.get("region")), str(one.get("state"))
            pilot, share = one.get("pilot_light"), one.get("admitted_share")
            asleep = as_dict(pilot).get("state") == "asleep"  # nothing goes there, and nothing is wrong
            if state == "up" and isinstance(share, float | int) and share < 1.0 and not asleep:
                state = "returning"  # or hot: some requests avoid it
            states[name] = min(states.get(name, "up"), state, key=_badness)
            if isinstance(pilot, dict):
                pilots[name] = pilots.get(name, True) and not asleep
            for instance in dicts(one.get("instances")):
                for offer in as_dict(instance.get("models")).values():
                    used[name] = max(used.get(name, 0.0), float(offer.get("used_share") or 0.0))
    epochs = tuple(status["law_epoch"] for status in statuses if isinstance(status.get("law_epoch"), int))
    return StatusSample(at_s=at_s, states=states, used=used, epochs=epochs, pilots=pilots)


def _badness(state: str) -> int:
    return _WORST_FIRST.index(state) if state in _WORST_FIRST else 0
