"""The route receipt: one answer header that says why the request went to its region, for a client that asks for it;
and, after a stream, a comment with the outcome.

`x-farhop-explain: 1` asks for it, and the API key must allow it (`explain: true` in the law, or `farhop key create
--explain`). It never reveals another tenant, an address, anything inside a region, or a place that the tenant's own law
does not name or allow: regions that are unlawful for the request are only counted, by the clause of the tenant's own
law that excludes them. Never decides: it describes a decision already made.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from farhop.relay.http.head import EXPLAIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farhop.balance.machine import Request
    from farhop.relay.http.head import Head
    from farhop.service.authentication.authenticator import Caller
    from global_lb.fleet.table import Scored
    from global_lb.routing.pick import Decision
    from topology.model import Topology

HEADER = b"x-farhop-receipt"
CANDIDATES_MAX = 16
CLAUSES_MAX = 8
_REFUSED = {
    "refused": "this key may not see receipts; one may that was issued with --explain, or that has `explain: true` "
    "in the law"
}
# How the law's clauses begin that are the tenant's own words; a model's rule for everybody is the operator's.
_OWN = ("tenant ", "key ", "request ")
_OTHERS = "a rule of the model"


def receipt(
    head: Head, request: Request, caller: Caller | None, decision: Decision | None, topology: Topology
) -> bytes:
    """The header's line; b"" if it was not asked for, or nothing was decided."""
    if head.get(EXPLAIN) != b"1" or decision is None:
        return b""
    fields = _receipt_of(decision) if _may(request, caller, topology) else _REFUSED
    if request.alias and fields is not _REFUSED:
        fields |= {"asked_for": request.alias, "model": request.model}
    # ASCII, and no control character: JSON escapes both.
    return b"%b: %b\r\n" % (HEADER, json.dumps(fields, separators=(",", ":")).encode("ascii"))


def tail(
    head: Head, request: Request, caller: Caller | None, topology: Topology, attempts: Sequence[tuple[str, str]],
    ttft_ms: float,
) -> bytes:  # fmt: skip
    """The SSE comment after a stream; b"" if it was not asked for, or is not permitted. `attempts`: the regions that
    were asked before the one that answered, each with its outcome."""
    if head.get(EXPLAIN) != b"1" or not _may(request, caller, topology):
        return b""
    passed = [{"region": region, "outcome": reason} for region, reason in attempts[:CANDIDATES_MAX]]
    fields = {"ttft_ms": _number(ttft_ms), "before": passed}
    return b": %b %b\n\n" % (HEADER, json.dumps(fields, separators=(",", ":")).encode("ascii"))


def _may(request: Request, caller: Caller | None, topology: Topology) -> bool:
    if caller is not None and caller.explain:
        return True
    tenant = topology.tenants.get(request.tenant)
    return tenant is not None and any(key.explain for key in tenant.keys if key.name == request.key)


def _receipt_of(decision: Decision) -> dict[str, Any]:
    ranked, chosen = decision.ranked, decision.chosen
    return {
        "policy": decision.route.policy.name,
        "unit": decision.route.policy.unit,
        "law_epoch": decision.verdict.epoch,
        "chosen": chosen.region if chosen is not None else None,
        "margin": _margin(ranked, chosen),
        "drawn_from": sorted(decision.ties),
        "spilled_from": decision.spilled_from,
        "candidates": [_candidate(one) for one in ranked[:CANDIDATES_MAX]],
        "not_serving": sorted(set(decision.absent) & decision.verdict.lawful)[:CANDIDATES_MAX],
        "excluded_by_law": excluded(decision),
    }


def _candidate(one: Scored) -> dict[str, Any]:
    figures = {"score": one.score, "ttft_ms": one.ttft_ms, "rtt_ms": one.rtt_ms, "wait_ms": one.wait_ms}
    return {"region": one.region, **{name: _number(value) for name, value in figures.items()}}


def _margin(ranked: tuple[Scored, ...], chosen: Scored | None) -> float | None:
    """By how much the best of the others was worse, in the policy's unit; below 0: better, and it was passed over."""
    others = [one.score for one in ranked if chosen is not None and one.region != chosen.region]
    return _number(min(others) - chosen.score) if chosen is not None and others else None


def excluded(decision: Decision) -> dict[str, int]:
    """By clause of the law, the number of regions that it excludes."""
    clauses = (why if why.startswith(_OWN) else _OTHERS for why in decision.verdict.excluded.values())
    return dict(Counter(clauses).most_common(CLAUSES_MAX))


def _number(value: float) -> float | None:
    return round(value, 2) if math.isfinite(value) else None
