"""Turns the state of entries into tables: for every client network, the ordered list of entries to answer with.

The law is a filter: a list never contains an entry outside its name's lawful set, or outside the places that its client
network is confined to. Lists are by cost: round-trip time from the client's location, plus an operator's bias. An entry
that takes a share of its clients comes first for that share of networks (drawn by a hash of each), and last for the
others. A DOWN entry is listed only if all lawful entries are DOWN. Never reads a clock; runs outside the processes that
answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from entry_dns.fleet.entry_health import EntryHealth, State
from entry_dns.fleet.networks import PRIVATE, UNKNOWN, Space
from topology.geo import distance_km

if TYPE_CHECKING:
    from topology.model import Topology

NO_ENTRY = 0xFFFF  # in an order: no further entry
ASK_RESOLVER = 0xFFFFFFFF  # as a group: the address decides nothing, the resolver's own does
SHARED_MAX = 24  # entries that take a share at once; more are drawn together
GRAIN = {4: 16, 6: 16}  # while shares are drawn no network counts as larger
_FIBRE_MS_PER_KM = 0.015  # a round trip: 200 km/ms there and back, on paths half as long again as the great circle
UNKNOWN_MS = 1e4
_LATE = 1e7


@dataclass(frozen=True, slots=True)
class ClientLocation:
    """The location of a network's clients: degrees, or measured milliseconds to entries, which correct geography.

    `within`: the places of the law that they are confined to; () for none.
    """

    latitude: float | None = None
    longitude: float | None = None
    rtt_ms: tuple[tuple[str, float], ...] = ()
    within: tuple[str, ...] = ()


UNKNOWN_LOCATION = ClientLocation()


@dataclass(frozen=True, slots=True)
class Atlas:
    """Client networks, their locations, and the cost of each entry for each location. Values of spaces are rows.

    `costs`: locations × entries, milliseconds; `allowed`: the same shape, True unless confinement forbids it.
    """

    entries: tuple[str, ...]
    spaces: Mapping[int, Space]
    costs: npt.NDArray[np.float64]
    allowed: npt.NDArray[np.bool_]


def atlas(topology: Topology, spaces: Mapping[int, Space], locations: Sequence[ClientLocation]) -> Atlas:
    """The atlas of a map's entries, in their order. The first two locations are those of UNKNOWN and PRIVATE."""
    entries = tuple(topology.entries)
    regions = [topology.regions[topology.entries[name].region] for name in entries]
    costs = np.full((len(locations), len(entries)), UNKNOWN_MS)
    allowed = np.ones((len(locations), len(entries)), dtype=bool)
    column = {name: at for at, name in enumerate(entries)}
    for row, location in enumerate(locations):
        if location.latitude is not None and location.longitude is not None:
            for at, region in enumerate(regions):
                km = distance_km(location.latitude, location.longitude, region.latitude, region.longitude)
                costs[row, at] = topology.local_rtt_ms + km * _FIBRE_MS_PER_KM
        for name, ms in location.rtt_ms:
            if name in column:
                costs[row, column[name]] = ms
        if location.within:
            for at, region in enumerate(regions):
                allowed[row, at] = not topology.ancestors(region.name).isdisjoint(location.within)
    return Atlas(entries, dict(spaces), costs, allowed)


@dataclass(frozen=True, slots=True)
class Table:
    """The prepared order of entries for every client network.

    `spaces`: by family, a space whose values are groups. `orders`: groups × width, each group's entries as indices,
    best first, NO_ENTRY after the last. `fallback`: the group of clients of unknown network. `shared`: the group with
    the entries that are lawful for every network, for a resolver that caches one answer for all its clients; -1 if no
    network is confined.
    """

    spaces: Mapping[int, Space]
    orders: npt.NDArray[np.uint16]
    fallback: int = 0
    shared: int = -1

    @property
    def uniform(self) -> bool:
        """Whether every address of both families is in group 0, so that its answer has scope 0."""
        return all(len(space.starts) == 1 and int(space.values[0]) == 0 for space in self.spaces.values())


class _Columns(NamedTuple):
    """Of each entry, in the map's order: whether the law allows it, whether it answers, the share of networks that it
    takes (0..1), its bias in ms, and whether it is drained."""

    may: npt.NDArray[np.bool_]
    up: npt.NDArray[np.bool_]
    share: npt.NDArray[np.float64]
    bias_ms: npt.NDArray[np.float64]
    drained: npt.NDArray[np.bool_]


def table(known: Atlas, healths: Sequence[EntryHealth], lawful: frozenset[str], most: int) -> Table:
    """The table for names whose lawful entries are these, with lists of at most `most` entries."""
    columns = _columns(known, healths, lawful)
    takes_a_share = columns.may & columns.up & (columns.share > 0.0) & (columns.share < 1.0)
    drawn = [int(at) for at in np.flatnonzero(takes_a_share)[:SHARED_MAX]]
    spaces, kinds = _kinds(known, columns.share, drawn)
    nothing_known = np.array([UNKNOWN], dtype=np.uint64)
    unique, inverse = np.unique(np.concatenate([*kinds.values(), nothing_known]), return_inverse=True)
    inverse = inverse.reshape(-1)
    location = (unique & np.uint64(0xFFFFFFFF)).astype(np.int64)
    cost, allowed = _costs(known, columns, drawn, unique), known.allowed[location] & columns.may
    for_all = allowed.all(axis=0)
    confines = bool((allowed != for_all).any())
    if confines:  # one more row, for clients of unknown network: the entries that are lawful for all
        location = np.append(location, UNKNOWN)
        cost = np.vstack((cost, cost[inverse[-1]]))
        allowed = np.vstack((allowed, for_all))
    lists, group = np.unique(_ranked(cost, allowed, columns.up, most), axis=0, return_inverse=True)
    groups = group.reshape(-1).astype(np.uint32)
    groups[location == PRIVATE] = ASK_RESOLVER
    known_groups = np.unique(groups[inverse[:-1]])
    if len(known_groups[known_groups != ASK_RESOLVER]) == 1:  # one answer for all, private addresses included
        groups[:] = known_groups[known_groups != ASK_RESOLVER][0]
    merged: dict[int, Space] = {}
    begin = 0
    for family, those in kinds.items():
        merged[family] = spaces[family].with_values(groups[inverse[begin : begin + len(those)]])
        begin += len(those)
    shared = int(groups[-1]) if confines else -1
    return _renumbered(merged, lists, int(groups[inverse[-1]]), shared)


def _columns(known: Atlas, healths: Sequence[EntryHealth], lawful: frozenset[str]) -> _Columns:
    by_name = {one.entry: one for one in healths}
    in_order = [by_name.get(name) for name in known.entries]
    return _Columns(
        may=np.array([name in lawful for name in known.entries], dtype=bool),
        up=np.array([one is None or one.answers for one in in_order], dtype=bool),
        share=np.array([1.0 if one is None else one.share for one in in_order]),
        bias_ms=np.array([0.0 if one is None else one.bias_ms for one in in_order]),
        drained=np.array([one is not None and one.state is State.DRAINED for one in in_order], dtype=bool),
    )


def _kinds(
    known: Atlas, share: npt.NDArray[np.float64], drawn: Sequence[int]
) -> tuple[dict[int, Space], dict[int, npt.NDArray[np.uint64]]]:
    """The spaces, as fine as shares need them, and by family the kind of each of their ranges: the lower 32 bits are
    its location, bit 32 + n says that the n-th entry that is `drawn` does not take it within its share."""
    spaces: dict[int, Space] = {}
    kinds: dict[int, npt.NDArray[np.uint64]] = {}
    for family, whole in known.spaces.items():
        space = whole.grained(GRAIN[family]) if drawn else whole
        bits = space.values.astype(np.uint64)
        for n, at in enumerate(drawn):
            late = _hashed(space.starts, known.entries[at]) >= share[at]
            bits |= late.astype(np.uint64) << np.uint64(32 + n)
        spaces[family], kinds[family] = space, bits
    return spaces, kinds


def _costs(
    known: Atlas, columns: _Columns, drawn: Sequence[int], kinds: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """The cost of each entry (a column) for networks of each of these kinds (a row), in ms. Entries that must not take
    these networks are after all that may."""
    none = columns.may & columns.up & (columns.share <= 0.0)
    cost: npt.NDArray[np.float64] = known.costs[(kinds & np.uint64(0xFFFFFFFF)).astype(np.int64)] + columns.bias_ms
    cost[:, none] += _LATE
    for n, at in enumerate(drawn):
        cost[:, at] += _LATE * ((kinds >> np.uint64(32 + n)) & np.uint64(1)).astype(np.float64)
    # A drained entry is behind all that are merely full: no client should go there.
    cost[:, none & columns.drained] += _LATE
    return cost


def _ranked(
    cost: npt.NDArray[np.float64], allowed: npt.NDArray[np.bool_], up: npt.NDArray[np.bool_], most: int
) -> npt.NDArray[np.uint16]:
    """The best entries of each row, at most this many, best first, NO_ENTRY after the last: the allowed entries that
    answer, or all allowed ones if none answers. Writes into `cost`."""
    some_up = np.asarray((allowed & up).any(axis=1))
    candidate = np.where(some_up[:, None], allowed & up, allowed)
    cost[~candidate] = np.inf
    ranked = np.argsort(cost, axis=1, kind="stable")[:, :most]
    orders: npt.NDArray[np.uint16] = np.where(
        np.take_along_axis(cost, ranked, axis=1) < np.inf, ranked, NO_ENTRY
    ).astype(np.uint16)
    return orders


def _renumbered(spaces: dict[int, Space], lists: npt.NDArray[np.uint16], fallback: int, shared: int) -> Table:
    """Without the lists that no network gets."""
    used = np.unique(np.concatenate([space.values for space in spaces.values()]))
    more = [fallback] if shared < 0 else [fallback, shared]
    used = np.union1d(used[used != ASK_RESOLVER], np.array(more, dtype=used.dtype))
    merged = {
        family: Space(
            space.bits,
            space.starts,
            np.where(space.values == ASK_RESOLVER, ASK_RESOLVER, np.searchsorted(used, space.values)).astype(np.uint32),
        )
        for family, space in spaces.items()
    }
    positions = [int(at) for at in np.searchsorted(used, more)]
    return Table(merged, lists[used], positions[0], positions[1] if shared >= 0 else -1)


def _hashed(starts: npt.NDArray[np.uint64], entry: str) -> npt.NDArray[np.float64]:
    """Of each interval, a number from 0 to 1 that stays while shares change: splitmix64 of where it begins."""
    seed = int.from_bytes(entry.encode()[:8].ljust(8, b"\0"), "little") * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    with np.errstate(over="ignore"):
        x = starts + np.uint64(seed)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) / float(1 << 53)
