"""Client networks: the whole address space in intervals, and the widest block around an address with one answer.

An interval's value says where its clients are, or, further on, which answer they get. A block that an answer is for
(ECS scope, RFC 7871) is the largest aligned one inside its interval: two such blocks are equal or apart, so scopes
never overlap, however the networks that were given did (deaggregation). Never knows entries, and never reads a file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_network

import numpy as np
import numpy.typing as npt

Starts = npt.NDArray[np.uint64]
Values = npt.NDArray[np.uint32]

BITS = {4: 32, 6: 64}
"""How much of an address is looked at: all of IPv4, and of IPv6 the network half, as no resolver sends more."""

UNKNOWN, PRIVATE = 0, 1
"""Values of addresses that no network holds, and of those that have nothing of where a client is (RFC 7871, 11.2)."""

PRIVATE_NETWORKS: tuple[IPv4Network | IPv6Network, ...] = tuple(
    ip_network(text)
    for text in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16",
        "::/64", "fc00::/7", "fe80::/10",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Space:
    """One family's address space. Interval i is [starts[i], starts[i + 1]); the first starts at 0, none is empty."""

    bits: int
    starts: Starts
    values: Values

    def at(self, address: int) -> int:
        """The value of an address, given as an integer of `bits` bits."""
        return int(self.values[bisect_right(self.starts, address) - 1])

    def with_values(self, values: Values) -> Space:
        """The same intervals with other values, neighbours of one value merged."""
        keep = np.ones(len(values), dtype=bool)
        keep[1:] = values[1:] != values[:-1]
        return Space(self.bits, self.starts[keep], values[keep])

    def grained(self, length: int) -> Space:
        """The same values, with a boundary at every prefix of this length: as many more intervals at most."""
        marks = np.arange(0, 1 << length, dtype=np.uint64) << np.uint64(self.bits - length)
        starts = np.union1d(self.starts, marks)
        return Space(self.bits, starts, self.values[np.searchsorted(self.starts, starts, side="right") - 1])


def scope(starts: Sequence[int], index: int, address: int, bits: int) -> int:
    """The prefix length of the largest aligned block around an address inside interval `index`; 0: the whole space.

    Such a block must part from the last address before the interval and from the first one after it: it is one bit
    longer than what the address has in common with either.
    """
    length = 0
    if index:
        length = bits + 1 - (address ^ (starts[index] - 1)).bit_length()
    if index + 1 < len(starts):
        length = max(length, bits + 1 - (address ^ starts[index + 1]).bit_length())
    return length


def spaces(networks: Iterable[tuple[IPv4Network | IPv6Network, int]]) -> dict[int, Space]:
    """The spaces of both families, by 4 and 6, from networks with their values.

    The narrowest network that holds an address decides; of two equal ones the later. Private networks come before all
    others, so that a configured one overrides them.
    """
    given: dict[int, dict[tuple[int, int], int]] = {4: {}, 6: {}}
    for network in PRIVATE_NETWORKS:
        given[network.version][_cut(network)] = PRIVATE
    for network, value in networks:
        given[network.version][_cut(network)] = value
    return {family: _space(BITS[family], found) for family, found in given.items()}


def of_arrays(family: int, first: Starts, lengths: npt.NDArray[np.int64], values: Values) -> Space:
    """As `spaces`, of one family, for networks as arrays: first address, prefix length, value."""
    found = {_cut(network): PRIVATE for network in PRIVATE_NETWORKS if network.version == family}
    found.update(zip(zip(first.tolist(), lengths.tolist(), strict=True), values.tolist(), strict=True))
    return _space(BITS[family], found)


def _cut(network: IPv4Network | IPv6Network) -> tuple[int, int]:
    """First address and prefix length, of as many bits as are looked at."""
    first = int(network.network_address)
    return (first, network.prefixlen) if network.version == 4 else (first >> 64, min(network.prefixlen, 64))


def _space(bits: int, networks: dict[tuple[int, int], int]) -> Space:
    starts: list[int] = [0]
    values: list[int] = [UNKNOWN]
    open_: list[tuple[int, int]] = [(1 << bits, UNKNOWN)]  # ends and values of the networks around, outermost first

    def mark(at: int, value: int) -> None:
        if starts[-1] == at:
            values[-1] = value
        else:
            starts.append(at)
            values.append(value)

    for (first, length), value in sorted(networks.items()):
        while open_[-1][0] <= first:
            end, _ = open_.pop()
            mark(end, open_[-1][1])
        mark(first, value)
        open_.append((first + (1 << (bits - length)), value))
    while len(open_) > 1:
        end, _ = open_.pop()
        if end < 1 << bits:
            mark(end, open_[-1][1])
    made = Space(bits, np.array(starts, dtype=np.uint64), np.array(values, dtype=np.uint32))
    return made.with_values(made.values)


def blocks(space: Space) -> Iterator[tuple[int, int, int]]:
    """Every block of a space in order: first address, prefix length, value. They cover it and are apart."""
    starts = space.starts.tolist()
    for index, (start, value) in enumerate(zip(starts, space.values.tolist(), strict=True)):
        end = starts[index + 1] if index + 1 < len(starts) else 1 << space.bits
        at = start
        while at < end:
            length = scope(starts, index, at, space.bits)
            yield at, length, value
            at += 1 << (space.bits - length)
