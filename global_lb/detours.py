"""Ways round: to which region the path through another global balancer is shorter than the wire. Told; decides nothing.

Each global balancer publishes the wire times it measured, under a lease, and reads the others'. Invariants: a way is
told only where every leg was measured and the sum beats the wire by the margin; never through our own region or the
target's; a document that is absurd or stands under another's key changes nothing and is counted; no clock tells how old
one is: its lease takes it away. Losing etcd changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from farhop.balance.wire import SAMPLE_MAX_MS
from farhop.store.contract import WIRE_PREFIX, ChangeKind, wire_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from farhop.store.contract import Change, Store

MARGIN_SHARE = 0.1  # of the wire time: what a way round must save to be worth a word
MARGIN_MS = 5.0  # and at least this
DOCUMENT_LIMIT_BYTES = 64 * 1024
REGIONS_MAX = 1024  # in one document
OTHERS_MAX = 256
LOOK_S = 1.0
GAP_S = 10.0  # between two publications, unless a wire time moved
MOVED_SHARE = 0.2
MOVED_MS = 1.0  # less is noise, however short the wire
LEASE_S = 15.0
_PLACES = 1  # decimals of a millisecond that are published

_Name = Annotated[str, Meta(min_length=1, max_length=256)]
_Ms = Annotated[float, Meta(ge=0.0, le=SAMPLE_MAX_MS)]


class Wires(msgspec.Struct, frozen=True):
    """What one global balancer says: `balancer` (<region>/<instance>) measured `rtt_ms` from `region` to others."""

    balancer: _Name
    region: _Name
    rtt_ms: Annotated[dict[_Name, _Ms], Meta(max_length=REGIONS_MAX)]


class Way(msgspec.Struct, frozen=True):
    """Through `balancer`, which stands in `region`: `rtt_ms` there and on, milliseconds."""

    balancer: str
    region: str
    rtt_ms: float


_decoder = msgspec.json.Decoder(Wires)


def encode(wires: Wires) -> bytes:
    """A document within its limits: where not all regions go in, the nearest do."""
    nearest = sorted(wires.rtt_ms.items(), key=lambda item: (item[1], item[0]))[:REGIONS_MAX]
    while True:
        document = msgspec.json.encode(Wires(wires.balancer, wires.region, dict(nearest)))
        if len(document) <= DOCUMENT_LIMIT_BYTES:
            return document
        nearest = nearest[: len(nearest) * 7 // 8]


def decode(key: str, document: bytes) -> Wires:
    """Read what stands under `key`. ValueError if any of it is out of its domain, or another's."""
    if len(document) > DOCUMENT_LIMIT_BYTES:
        raise ValueError(f"{len(document)} bytes, at most {DOCUMENT_LIMIT_BYTES}")
    try:
        wires = _decoder.decode(document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if key != f"{WIRE_PREFIX}{wires.balancer}" or not wires.balancer.startswith(f"{wires.region}/"):
        raise ValueError("stands under another's key")
    return wires


def ways(direct: Mapping[str, float], others: Iterable[Wires], here: str) -> dict[str, Way]:
    """The best way round to each region that has one: min over others of rtt(here, other) + rtt(other, region), ms.

    `direct` are the wire times measured from the region `here`. Equal ways: the first by the balancer's name.
    """
    outside = (other for other in others if other.region != here and other.region in direct)
    near = sorted(((direct[o.region], o.balancer, o) for o in outside), key=lambda one: one[:2])
    found: dict[str, Way] = {}
    for region, wire_ms in direct.items():
        limit_ms = wire_ms - max(MARGIN_SHARE * wire_ms, MARGIN_MS)
        best: tuple[float, str, str] | None = None
        for there_ms, name, other in near:
            if there_ms > (limit_ms if best is None else best[0]):
                break  # farther than that saves nothing: so does, always, who stands in the region itself
            on_ms = other.rtt_ms.get(region)
            if on_ms is None or region == here or there_ms + on_ms > limit_ms:
                continue
            way = (there_ms + on_ms, name, other.region)
            best = way if best is None else min(best, way)
        if best is not None:
            found[region] = Way(best[1], best[2], best[0])
    return found


def moved(told: Mapping[str, float], fresh: Mapping[str, float]) -> bool:
    """Whether it is worth saying anew at once."""
    if told.keys() != fresh.keys():
        return True
    return any(abs(ms - told[region]) >= max(MOVED_SHARE * told[region], MOVED_MS) for region, ms in fresh.items())


class Detours:
    """Publishes `measured()` (ms by region) as `instance` of `region`, and holds what others say.

    `refused` counts documents not believed, by reason; `clock` is monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        region: str,
        instance: str,
        measured: Callable[[], Mapping[str, float]],
        refused: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._store, self._region, self._name = store, region, f"{region}/{instance}"
        self._key = wire_key(region, instance)
        self._measured, self._refused, self._clock = measured, refused, clock
        self._others: dict[str, Wires] = {}  # by key

    async def publish(self) -> None:
        """Until cancelled. The lease outlives an outage of a few seconds; a longer one takes the word away."""
        told, told_at = self._rounded(), self._clock()
        publication = await self._store.publish(self._key, self._document(told), LEASE_S)
        while True:
            await asyncio.sleep(LOOK_S)
            fresh, now = self._rounded(), self._clock()
            if moved(told, fresh) or (now - told_at >= GAP_S and fresh != told):
                told, told_at = fresh, now
                await publication.update(self._document(fresh))

    def _rounded(self) -> dict[str, float]:
        return {region: round(ms, _PLACES) for region, ms in self._measured().items()}

    def _document(self, rtt_ms: dict[str, float]) -> bytes:
        return encode(Wires(self._name, self._region, rtt_ms))

    async def follow(self) -> None:
        """Until cancelled, or the store is closed."""
        async with contextlib.aclosing(self._store.watch(WIRE_PREFIX)) as changes:
            async for change in changes:
                self.changed(change)

    def changed(self, change: Change) -> None:
        """Take one step of the watch."""
        if change.kind is ChangeKind.SNAPSHOT:
            listed = {entry.key for entry in change.entries}
            self._others = {key: wires for key, wires in self._others.items() if key in listed}
            for entry in change.entries:
                self._read(entry.key, entry.value)
        elif change.kind is ChangeKind.PUT:
            self._read(change.key, change.value)
        elif change.kind is ChangeKind.DELETE:
            self._others.pop(change.key, None)

    def _read(self, key: str, document: bytes) -> None:
        if key == self._key:
            return
        if key not in self._others and len(self._others) >= OTHERS_MAX:
            self._refused("too_many_wires")
            return
        try:
            self._others[key] = decode(key, document)
        except ValueError:
            self._refused("wire_malformed")

    def told(self) -> dict[str, dict[str, Any]]:
        """By region, the best way round, for people; regions without one are left out."""
        found = ways(self._measured(), self._others.values(), self._region)
        return {region: msgspec.structs.asdict(way) for region, way in found.items()}
