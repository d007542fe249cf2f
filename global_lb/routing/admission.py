"""The law, before anything else: where a request may be read, and where it may be processed.

Evaluated at arrival and again before every attempt. What counts is the intersection of the law in force when the
request came and the law in force now: a change in flight can only narrow. Never weighs, never fails open.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farhop.balance import outcome
from farhop.balance.health.reading import State
from topology.law import Scope

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farhop.balance.machine import Request
    from farhop.balance.outcome import Outcome
    from topology.law import Law, Verdict

_DRAINING = str(State.DRAINING)
_HINTS = Scope.HINTS  # to look up an enum's member is a call, and this is asked for every request


def both(one: frozenset[str], other: frozenset[str] | None) -> frozenset[str]:
    """The intersection of both. If they are equal, the law's own set object is returned, since caches are keyed by
    it."""
    return one if other is None or one is other or one == other else one & other


def may_read(tenant: str, region: str, law: Law) -> bool:
    """Whether a balancer in `region` may be the first to read the tenant's bodies."""
    return region in law.verdict(tenant, "", Scope.ENTRY).lawful


def hints_allowed(request: Request, region: str, law: Law) -> bool:
    """Whether a trace of the request's prefix may be kept in `region`."""
    return region in law.request_verdict(request, _HINTS).lawful


def turned_away(reason: Outcome) -> bool:
    """Whether a region refused in favour of other requests, and would take this one as the last resort. A region with a
    standing queue releases requests that may find room elsewhere, and keeps those that found none."""
    return reason in (outcome.FOREIGN_FULL, outcome.BROKEN_PROMISE, outcome.QUEUE_TIMEOUT)


def not_serving(absent: Mapping[str, str]) -> dict[str, str]:
    """Why regions are absent, as a text for the client: of a drain not who ordered it, and why."""
    return {region: _DRAINING if reason.startswith(_DRAINING) else reason for region, reason in absent.items()}


def refused_by(refusals: Mapping[str, Outcome], absent: Mapping[str, str]) -> str:
    """What happened to a request in each region, as a text for the client."""
    why = [f"{region}: {reason.reason}" for region, reason in sorted(refusals.items())]
    why += [f"{region}: {reason}" for region, reason in sorted(not_serving(absent).items()) if region not in refusals]
    return f"no lawful region can serve this request now ({'; '.join(why[:16])})"


def summary(verdict: Verdict, lawful: frozenset[str]) -> str:
    """Why no region is lawful, for each region, as text for the client. `lawful`: by the law that the request came
    under."""
    reasons: dict[str, list[str]] = {}
    for region, why in sorted(verdict.excluded.items()):
        reasons.setdefault(why, []).append(region)
    if narrowed := sorted(verdict.lawful - lawful):
        reasons["not lawful when the request came"] = narrowed
    why = "; ".join(f"{', '.join(regions[:8])}: {reason}" for reason, regions in list(reasons.items())[:8])
    return f"no region may lawfully process this request ({why})"
