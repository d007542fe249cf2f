"""The interface of a BGP speaker: start it, send it an update for all prefixes, ask it which prefixes it announces.

A speaker never announces by itself: when the process that controls it ends, the announcement ends, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import TYPE_CHECKING, Protocol

from entry_anycast.announcing.machine import Phase

if TYPE_CHECKING:
    from collections.abc import Mapping

GRACEFUL_SHUTDOWN = (65535, 0)  # RFC 8326


class SpeakerError(Exception):
    """It cannot be started, refused an update, or does not answer. One line, with the remedy if there is one."""


@dataclass(frozen=True, slots=True)
class SpeakerState:
    """The announcements of a speaker (None: unknown), and whether the session with each neighbour is up."""

    phase: Phase | None
    sessions: Mapping[str, bool]


class Speaker(Protocol):
    """One speaker. `name` is for people."""

    name: str

    async def start(self) -> None:
        """Start it or connect to it, with nothing announced. Raises SpeakerError."""

    async def update(self, phase: Phase) -> None:
        """Announce all prefixes in this phase; returns when it is acknowledged. Raises SpeakerError."""

    async def observe(self) -> SpeakerState:
        """The present announcements. Raises SpeakerError."""

    async def kill(self) -> None:
        """End the announcement at once, by force. It can be started anew then."""


def family(prefix: str) -> int:
    """4 or 6."""
    return network(prefix).version


def network(prefix: str) -> IPv4Network | IPv6Network:
    """Raises ValueError, with the remedy."""
    try:
        return ip_network(prefix)
    except ValueError as error:
        raise ValueError(f"{prefix[:64]!r} is no prefix such as 192.0.2.0/24 or 2001:db8::1/128: {error}") from None


def phase_of(found: set[tuple[str, bool]], wanted: set[str]) -> Phase | None:
    """Of what is announced (where and what, and whether it drains), where all of `wanted` should be."""
    if not found:
        return Phase.WITHDRAWN
    draining = {drains for _, drains in found}
    if len(draining) != 1 or {what for what, _ in found} != wanted:
        return None
    return Phase.DRAINING if draining.pop() else Phase.ANNOUNCED
