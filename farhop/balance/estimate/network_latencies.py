"""The round-trip times to client networks, measured on their connections: the minimum for each /24 and /48.

Invariants: the number of networks is bounded, and the one measured longest ago is dropped first; a network that is not
on the public internet (private, loopback, link-local, for documentation) is never held; each figure was measured, at
most two windows ago. Never reads a clock, and never knows who the client is.
"""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

import msgspec

LENGTHS = {4: 24, 6: 48}
WINDOW_S = 900.0  # routes change over hours, and the minimum of many counts: published figures are 15 to 30 minutes old
RTT_MS_MAX = 10_000.0
Network = IPv4Network | IPv6Network


class Latency(msgspec.Struct, frozen=True):
    """The latency of one network: the least round-trip time in milliseconds, and how many connections measured it,
    rounded down to a power of two.
    """

    ms: float
    samples: int


class _Measured(msgspec.Struct):
    window: int
    least_us: int
    samples: int
    before_us: int = 0
    before_samples: int = 0


class NetworkLatencies:
    """See the module's docstring."""

    def __init__(self, networks_max: int) -> None:
        self._most = networks_max
        self._measured: dict[str, _Measured] = {}  # by the network's first bytes as text, measured last at the end

    def __len__(self) -> int:
        return len(self._measured)

    def take(self, host: str, rtt_us: int, now: float) -> None:
        """Add the round-trip time that a connection from the address `host` measured."""
        if not 0 < rtt_us <= RTT_MS_MAX * 1e3:
            return
        key = _key(host)
        window = int(now // WINDOW_S)
        known = self._measured.pop(key, None)
        if known is None:
            if not key or not is_public(network_of(key)):
                return
            if len(self._measured) >= self._most:
                del self._measured[next(iter(self._measured))]
            known = _Measured(window, rtt_us, 0)
        elif known.window != window:
            follows = window == known.window + 1
            known.before_us, known.before_samples = (known.least_us, known.samples) if follows else (0, 0)
            known.window, known.least_us, known.samples = window, rtt_us, 0
        known.least_us = min(known.least_us, rtt_us)
        known.samples += 1
        self._measured[key] = known

    def clear(self) -> None:
        """Drop all measurements."""
        self._measured.clear()

    def read(self, now: float, most: int, samples_min: int) -> dict[str, Latency]:
        """The latencies by network; above `most` networks, those measured most often. Networks with fewer than
        `samples_min` connections are left out, for the privacy of few clients, and since few samples prove little.
        """
        window = int(now // WINDOW_S)
        measured: list[tuple[int, str, int]] = []
        for key, one in self._measured.items():
            if one.window == window:
                samples, least = one.samples + one.before_samples, one.least_us
                if one.before_samples:
                    least = min(least, one.before_us)
            elif one.window == window - 1:
                samples, least = one.samples, one.least_us
            else:
                continue
            if samples >= samples_min:
                measured.append((samples, key, least))
        measured.sort(key=lambda one: (-one[0], one[1]))
        return {
            str(network_of(key)): Latency(round(least / 1e3, 1), 1 << (samples.bit_length() - 1))
            for samples, key, least in measured[:most]
        }


def _key(host: str) -> str:
    """What the addresses of one network have in common, as text: quick for IPv4. "" for what is no address."""
    if ":" not in host:
        return host.rpartition(".")[0]
    try:
        address = IPv6Address(host.partition("%")[0])
    except ValueError:
        return ""
    mapped = address.ipv4_mapped
    return str(mapped).rpartition(".")[0] if mapped is not None else address.packed[:6].hex()


def network_of(key: str) -> Network:
    """The network of a key. Raises ValueError."""
    if "." in key:
        return ip_network(f"{key}.0/{LENGTHS[4]}")
    return IPv6Network((bytes.fromhex(key).ljust(16, b"\0"), LENGTHS[6]))


def is_public(network: Network) -> bool:
    """Whether the network is on the public internet."""
    first = ip_address(network.network_address)
    return network.is_global and not first.is_multicast


def parse(text: str) -> Network:
    """The network in a text of the table. Raises ValueError for another prefix length, or if it is not on the public
    internet.
    """
    network = ip_network(text)
    if network.prefixlen != LENGTHS[network.version]:
        raise ValueError(f"{text[:64]}: must be a /{LENGTHS[4]} or, of IPv6, a /{LENGTHS[6]}")
    if not is_public(network):
        raise ValueError(f"{text[:64]}: is not of the public internet")
    return network
