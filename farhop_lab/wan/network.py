"""All links of an emulated world: one for every ordered pair of regions, started, changed and broken together.

Round-trip times are divided by the engines' speed-up, so that network and engine stay in proportion. Each link draws
its jitter from its own seed: what happens on one does not change another.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING

from farhop_lab.wan.alarm import Alarm
from farhop_lab.wan.link import Link, LinkError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


JITTER_SHARE = 0.02


class Network:
    """`rtt_ms` as in a topology: real round trips in ms of each pair of regions, in either order. Close it in the end.

    `jitter_share` is the jitter as a share of the delay. `bandwidth_mbps` is real, too: it grows with the speed-up.
    LinkError if a pair is missing, given twice unequally, or a figure is out of range.
    """

    def __init__(
        self,
        rtt_ms: Mapping[tuple[str, str], float],
        local_rtt_ms: float = 1.0,
        *,
        speedup: float = 1.0,
        seed: int = 0,
        jitter_share: float = JITTER_SHARE,
    ) -> None:
        if not speedup > 0:
            raise LinkError(f"speedup: {speedup} is not above 0")
        self._speedup, self._local_rtt_ms, self._jitter_share = speedup, local_rtt_ms, jitter_share
        self._rtt_ms = _symmetric(rtt_ms)
        self._alarm: Alarm | None = None
        self._links = {
            (a, b): Link(
                f"{a}>{b}",
                self._delay_ms(ms),
                self._delay_ms(ms) * jitter_share,
                rng=Random(f"{seed} {a}>{b}"),
            )
            for (a, b), ms in self._rtt_ms.items()
        }

    def _delay_ms(self, rtt_ms: float) -> float:
        return rtt_ms / 2 / self._speedup

    # -- life cycle

    async def start(self) -> None:
        """Start every link."""
        self._alarm = self._alarm or Alarm()
        for link in self._links.values():
            await link.start(self._alarm)

    async def close(self) -> None:
        """Close every link."""
        await asyncio.gather(*(link.close() for link in self._links.values()))
        if self._alarm is not None:
            self._alarm.close()
            self._alarm = None

    async def __aenter__(self) -> Network:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    # -- links

    @property
    def links(self) -> Mapping[tuple[str, str], Link]:
        """Every link, by (from, to)."""
        return self._links

    def link(self, from_region: str, to_region: str) -> Link:
        """The link for connections from one region to another. Raises LinkError."""
        try:
            return self._links[from_region, to_region]
        except KeyError:
            text = f"no link from {from_region!r} to {to_region!r}: name two different regions of this world"
            raise LinkError(text) from None

    def rtt_ms(self, a: str, b: str) -> float:
        """The present round trip, sped up; within one region that of the world, though no link delays it."""
        if a == b:
            return self._local_rtt_ms / self._speedup
        self.link(a, b)
        return self._rtt_ms[a, b] / self._speedup

    # -- live control

    def set_rtt(self, a: str, b: str, rtt_ms: float) -> None:
        """Change a pair's real round trip, both ways, from the next chunk on."""
        delay_ms = self._delay_ms(rtt_ms)
        for pair in ((a, b), (b, a)):
            self.link(*pair).set(delay_ms=delay_ms, jitter_ms=delay_ms * self._jitter_share)
            self._rtt_ms[pair] = rtt_ms

    def cut(self, region: str, other: str | None = None) -> None:
        """Cut all links to and from a region, or only those between it and another."""
        self._each(region, other, Link.cut)

    def freeze(self, region: str, other: str | None = None) -> None:
        """Freeze all links to and from a region, or only those between it and another."""
        self._each(region, other, Link.freeze)

    def blackhole(self, region: str, other: str | None = None) -> None:
        """As freeze, but present connections stay dead."""
        self._each(region, other, Link.blackhole)

    def heal(self, region: str, other: str | None = None) -> None:
        """Heal all links to and from a region, or only those between it and another."""
        self._each(region, other, Link.heal)

    def _each(self, region: str, other: str | None, act: Callable[[Link], None]) -> None:
        for link in tuple(self._around(region, other)):
            act(link)

    def _around(self, region: str, other: str | None) -> Iterator[Link]:
        if other is not None:
            yield self.link(region, other)
            yield self.link(other, region)
            return
        if self._links and not any(region in pair for pair in self._links):
            raise LinkError(
                f"no region {region!r} in this world; it has {', '.join(sorted({a for a, _ in self._links}))}"
            )
        yield from (link for pair, link in self._links.items() if region in pair)


def _symmetric(rtt_ms: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    """Every ordered pair of different regions."""
    found: dict[tuple[str, str], float] = {}
    for (a, b), ms in rtt_ms.items():
        if a == b:
            continue
        if rtt_ms.get((b, a), ms) != ms:
            raise LinkError(f"rtt_ms: {a} and {b} are given twice, {ms} and {rtt_ms[b, a]} ms; keep one")
        if not ms > 0:
            raise LinkError(f"rtt_ms: {a} to {b}: {ms} is not above 0")
        found[a, b] = found[b, a] = ms
    regions = sorted({name for pair in found for name in pair})
    for a in regions:
        for b in regions:
            if a != b and (a, b) not in found:
                raise LinkError(f"rtt_ms: {a} to {b}: no round-trip time; give one")
    return found
