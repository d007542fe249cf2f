"""Modifiers: small pure functions over the candidates or their scores, each with its reason; the same for every policy.

Invariants: a modifier only narrows the candidates or moves their scores, so none leads out of what is lawful and
serves; none writes what it reads. A reason is "" where a modifier had nothing to say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from xxhash import xxh3_64_intdigest

from farhop.balance import hashing
from global_lb.routing.policy.shares import draw_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from farhop.balance.machine import Request
    from global_lb.fleet.table import Candidates, Column
    from global_lb.routing.policy.account import EgressBudget, ForeignQuota
    from global_lb.routing.policy.overrides import Pin


def pinned(candidates: Candidates, pin: Pin) -> tuple[Candidates, str]:
    """The region pinned to alone, if it is a candidate; if not, all of it, or nothing where the pin is strict."""
    place = candidates.at.get(pin.region)
    why = f"pinned to {pin.region} by {pin.author}: {pin.why}"
    if place is not None:
        return candidates.only([place], why), why
    if pin.strict:
        return candidates.only([], why), f"{why}; it does not serve, and no other region may"
    return candidates, f"{why}; it does not serve, so the pin is passed over"


def within_quota(candidates: Candidates, quota: ForeignQuota) -> tuple[Candidates, str]:
    """Only this region (or none, if it is no candidate) once the quota of leaving requests is used up. Only for
    requests that are lawful here."""
    if quota.allows():
        return candidates, ""
    why = f"the foreign quota of {quota.share:.3g} is used up"
    return candidates.only([] if candidates.here is None else [candidates.here], why), why


def within_budget(candidates: Candidates, budget: EgressBudget, now: float) -> tuple[Candidates, str]:
    """Once the egress budget is exhausted, restrict the candidates to the own region, if that serves."""
    if not budget.spent(now):
        return candidates, ""
    why = f"the egress budget of {budget.usd_per_hour:g} USD an hour is spent"
    if candidates.here is None:
        return candidates, f"{why}; no region serves here, so it is skipped"
    return candidates.only([candidates.here], why), why


def biased(candidates: Candidates, *biases: Mapping[str, float]) -> tuple[Column, str]:
    """The biases (ms) to be added to the scores."""
    totals = {name: sum(bias.get(name, 0.0) for bias in biases) for name in {n for bias in biases for n in bias}}
    named = [f"{name} {ms:+g}" for name, ms in sorted(totals.items()) if ms and name in candidates.at]
    bias_ms = np.array([totals.get(name, 0.0) for name in candidates.names])
    return bias_ms, f"bias in ms: {', '.join(named)}" if named else ""


def priced(candidates: Candidates, usd_weight_ms: float) -> Column:
    """Milliseconds to be added to the scores: what a dollar is worth, times what each costs more than the cheapest."""
    usd = candidates.usd()
    dearer: Column = usd_weight_ms * (usd - usd.min())
    return dearer


def canary(request: Request, shares: Mapping[str, float], by: str) -> tuple[str, str]:
    """The canary region for this request, "" for most requests. The draw is stable by session, tenant or request."""
    key = hashing.key_of(f"tenant {request.tenant}") if by == "tenant" else draw_key(request)
    # Not the draw of the policies: it would pick the same sessions again.
    point, start = xxh3_64_intdigest(key.to_bytes(8, "little"), seed=1) / 2.0**64, 0.0
    for region, share in shares.items():
        if start <= point < start + share:
            return region, f"canary: {region} tries {share:.3g} of the requests"
        start += share
    return "", ""


def at_home(
    candidates: Candidates, home: str, chosen: int, avoided: NDArray[np.bool_] | None, most_ms: float
) -> tuple[int, str]:
    """The session's region, if it is not hot and at most `most_ms` slower than the chosen one."""
    place = candidates.at.get(home)
    if place is None or place == chosen or (avoided is not None and avoided[place]):
        return chosen, ""
    predicted_ms = candidates.predicted_ms()
    slower_ms = predicted_ms.item(place) - predicted_ms.item(chosen)
    if slower_ms > most_ms:
        return chosen, f"the session leaves {home}, which is {slower_ms:.0f} ms slower"
    return place, f"the session stays in {home}, {max(slower_ms, 0.0):.0f} ms slower than {candidates.names[chosen]}"
