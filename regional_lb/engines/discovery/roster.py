"""Merges the endpoints of all sources into one list of replicas.

Invariants: addresses and names are unique, and the first source's entry wins; the last data of a failing source stay in
force; the same inputs give the same list in the same order; there are never more than REPLICAS_MAX. Pure: no IO, no
clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from regional_lb.engines.config import REPLICAS_MAX
from regional_lb.engines.discovery.source import PROBLEM_CHARS_MAX, Failed, Found

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from regional_lb.engines.config import ReplicaConfig

PROBLEMS_MAX = 32  # reported for one source


class LeftOut(msgspec.Struct, frozen=True):
    """A replica that is not in the list. `reason` is a fixed word to count by: duplicate or limit."""

    source: str
    replica: str
    reason: str
    why: str


class _Reported:
    __slots__ = ("found", "trouble")

    def __init__(self) -> None:
        self.found: Found | None = None
        self.trouble = "has not answered yet"


class Roster:
    """See the module's docstring. `fixed` are the replicas of the configuration, which go first."""

    def __init__(self, fixed: Sequence[ReplicaConfig], sources: Iterable[str]) -> None:
        self._fixed = Found("configuration", tuple(fixed))
        self._reported = {source: _Reported() for source in sources}

    def fix(self, replicas: Sequence[ReplicaConfig]) -> None:
        """The configuration's are these from now on."""
        self._fixed = Found("configuration", tuple(replicas))

    def take(self, step: Found | Failed) -> bool:
        """A source spoke. Whether the list may be another one now."""
        reported = self._reported[step.source]
        if isinstance(step, Failed):
            reported.trouble = step.why[:PROBLEM_CHARS_MAX]
            return False
        changed = reported.found is None or reported.found.replicas != step.replicas
        reported.found, reported.trouble = step, ""
        return changed

    def merged(self) -> tuple[list[ReplicaConfig], list[LeftOut]]:
        """All replicas (the configuration's first, then by source), and those left out."""
        kept: list[ReplicaConfig] = []
        left_out: list[LeftOut] = []
        addresses: dict[tuple[str, int], str] = {}
        names: dict[str, str] = {}
        for found in (
            self._fixed,
            *(reported.found for reported in self._reported.values() if reported.found is not None),
        ):
            for replica in found.replicas:
                place, name = (replica.address.host, replica.address.port), replica.label
                if place in addresses:
                    why = f"{replica.address} is there already, from {addresses[place]}; announce it once"
                    left_out.append(LeftOut(found.source, name, "duplicate", why))
                elif name in names:
                    why = f"another of this name is there already, from {names[name]}; give each its own"
                    left_out.append(LeftOut(found.source, name, "duplicate", why))
                elif len(kept) >= REPLICAS_MAX:
                    why = f"more than {REPLICAS_MAX} replicas in one balancer; run several"
                    left_out.append(LeftOut(found.source, name, "limit", why))
                else:
                    addresses[place] = names[name] = found.source
                    kept.append(replica)
        return kept, left_out

    def status(self) -> list[dict[str, Any]]:
        """For /status: how many replicas each source knows, what it left out, and why it cannot be asked."""
        return [
            {
                "source": source,
                "replicas": len(reported.found.replicas) if reported.found is not None else 0,
                "problems": list(reported.found.problems[:PROBLEMS_MAX]) if reported.found is not None else [],
                "trouble": reported.trouble,
            }
            for source, reported in self._reported.items()
        ]
