"""A balancer's snapshot of the fleet at one moment, and the picture that several such snapshots are merged into.

Invariants: a figure that no balancer reported is left out, never shown as 0; a balancer's figures keep the time at
which it reported them, and are marked as cut off once that is too long ago; if balancers report different states, the
worst is shown, with the balancers that report it. Pure; never holds a prompt or a key.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from farhop.balance.health.reading import worst_first
from farhop.loose_json import as_dict
from topology.law import Scope

if TYPE_CHECKING:
    from topology.law import Law

Snapshot = dict[str, Any]
FORM = 1  # of a snapshot: a balancer of another build is shown as far as it is understood
LATE_MS, CUT_OFF_MS = 2_500, 6_000
DECISIONS_MAX = 24
REPLICAS_MAX, REGIONS_MAX, QUEUES_MAX, TENANTS_MAX = 256, 128, 64, 128
ROWS_AT_ONCE = 16
REGIONS_AT_ONCE = 4  # each of up to some hundred replicas, which are counted
TEXT_MAX = 160
FULL_SHARE = 0.9  # of a region's slots: above it is reported
WRONG_MAX = 16
_REPLICA = {
    "state": "state", "why": "why", "in_flight": "in_flight", "elsewhere": "in_flight_elsewhere", "slots": "slots",
    "running": "engine_running", "waiting": "engine_waiting", "kv": "engine_kv_usage", "hit": "engine_hit_share",
    "tpot_ms": "tpot_ms", "prefill_ms": "prefill_ms_per_token", "share": "share", "slow": "slow",
    "version": "version", "models": "models", "role": "role", "kv_events": "kv_events",
}  # fmt: skip


class LastSnapshot(msgspec.Struct, frozen=True):
    """A balancer's last snapshot, when it came (ms since 1970; 0: never), and in `error` why there is no newer one."""

    snapshot: Snapshot | None
    at_ms: int = 0
    error: str = ""
    tier: str = ""
    region: str = ""


def plain(value: Any) -> Any:
    """As a picture holds it: no None, text of a bounded length, numbers finite and with three digits that matter."""
    if isinstance(value, str):
        return value[:TEXT_MAX]
    if isinstance(value, float):
        return _rounded(value)
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, Mapping):  # costs the most to ask
        return {str(key)[:TEXT_MAX]: made for key, one in value.items() if (made := plain(one)) is not None}
    if isinstance(value, list | tuple | frozenset | set):
        return [made for one in value if (made := plain(one)) is not None]
    return value


def _rounded(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.3g}")
    return int(short) if short.is_integer() else short


# -- one balancer's


def of_status(
    status: Mapping[str, Any], at_ms: int, decisions: Iterable[Mapping[str, Any]], arcs: Mapping[str, Any]
) -> Generator[None, None, Snapshot]:
    """A balancer's snapshot, from its status. `arcs`: requests per second by target, by outcome.

    A generator that returns the snapshot at its end. At each yield other tasks may run: a row takes some 40 us, and
    there may be many.
    """
    law = status.get("law")
    law = law if isinstance(law, Mapping) else {}
    snapshot: Snapshot = {
        "form": FORM,
        "at": at_ms,
        **{name: status.get(name) for name in ("tier", "region", "instance", "version", "under_way")},
        "epoch": status.get("law_epoch"),
        "law": {
            name: str(value) if name == "at" else value
            for name in ("source", "author", "why", "at", "signed_by", "etcd_out_of_reach", "trouble")
            if (value := law.get(name))
        },
        "decisions": {str(one.get("decision")): _brief(one) for one in decisions},
        "arcs": arcs,
        "trouble": status.get("store_trouble") or None,
    }
    if status.get("tier") == "global":
        snapshot["overrides"] = {
            f"{one.get('action')} {one.get('region')} {one.get('tenant') or one.get('model') or ''}".strip(): {
                name: one.get(name) for name in ("action", "region", "tenant", "model", "ms", "author", "why", "until")
            }
            for one in status.get("operator_overrides") or ()
            if isinstance(one, Mapping)
        }
    else:
        snapshot["queued"] = status.get("queued_requests")
        snapshot["queue"] = {
            f"{one['priority']} {one['tenant']}": one["requests"] for one in (status.get("queue") or ())[:QUEUES_MAX]
        }
        snapshot["prefix_nodes"] = status.get("trie_nodes")
        predicted, found = status.get("predicted_hit_tokens"), status.get("actual_hit_tokens")
        snapshot["hits"] = {"predicted": predicted, "actual": found}
    cleaned: Snapshot = plain(snapshot)
    rows, name, row, most = (
        ("regions", "region", _region, REGIONS_MAX)
        if status.get("tier") == "global"
        else ("replicas", "replica", _replica, REPLICAS_MAX)
    )
    made = cleaned[rows] = {}
    for one in (status.get(rows) or ())[:most]:
        if isinstance(one, Mapping):
            made[str(one.get(name))[:TEXT_MAX]] = plain(row(one))
            if len(made) % ROWS_AT_ONCE == 0:
                yield
    return cleaned


def _region(one: Mapping[str, Any]) -> dict[str, Any]:
    instances = [i for i in one.get("instances") or () if isinstance(i, Mapping)]
    offers = [o for i in instances for o in (i.get("models") or {}).values()]
    per_instance = [list((i.get("models") or {}).values()) for i in instances]
    drain = one.get("override")
    age = min((i["report_age_s"] for i in instances if "report_age_s" in i), default=None)
    return {
        "state": one.get("state"),
        "why": one.get("why"),
        "forced": one.get("forced") or None,
        "share": one.get("share"),
        "admitted": one.get("admitted_share"),
        "rtt_ms": one.get("rtt_ms"),
        "in_flight": one.get("in_flight"),
        "queued": one.get("queued_requests"),
        "wait_ms": min((o["wait_ms"] for o in offers if "wait_ms" in o), default=None),
        "used": max((o["used_share"] for o in offers if o.get("used_share") is not None), default=None),
        "slots_free": sum(max((o.get("slots_free", 0) for o in models), default=0) for models in per_instance),
        "replicas": sum(max((o.get("replicas_ready", 0) for o in models), default=0) for models in per_instance),
        # Below a second a report is new, and a figure that always moves would cost a viewer for nothing.
        "report_age_s": None if age is None else math.floor(age),
        "drain": {name: drain.get(name) for name in ("author", "why", "until")} if isinstance(drain, Mapping) else None,
        "pilot": (one.get("pilot_light") or {}).get("state"),
        "prefix_nodes": one.get("prefix_nodes"),
        "models": sorted({name for i in instances for name in (i.get("models") or {})}),
    }


def _replica(one: Mapping[str, Any]) -> dict[str, Any]:
    row = {name: one.get(field) for name, field in _REPLICA.items()}
    age, until = one.get("sample_age_s"), one.get("until_s")
    row["age_s"] = math.floor(age) if isinstance(age, float | int) else None
    row["until_s"] = math.ceil(until) if isinstance(until, float | int) else None
    return {name: value for name, value in row.items() if value not in (None, "", [], 1.0 if name == "share" else None)}


def _brief(one: Mapping[str, Any]) -> dict[str, Any]:
    reasons = one.get("reasons")
    reasons = reasons if isinstance(reasons, Mapping) else {}
    attempts = one.get("attempts") or [{}]
    return {
        "at": one.get("at_unix_ms"),
        "tenant": one.get("tenant"),
        "model": one.get("model"),
        "to": attempts[-1].get("target") or reasons.get("chosen"),
        "tries": len(one.get("attempts") or ()),
        "status": one.get("status"),
        "outcome": one.get("outcome"),
        "ttft_ms": one.get("ttft_ms"),
        "ms": one.get("duration_ms"),
        "spilled": reasons.get("spilled_from"),
        "policy": reasons.get("policy"),
    }


def whole(steps: Generator[None, None, Snapshot]) -> Snapshot:
    """The result of such a generator, run without pauses."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            made: Snapshot = end.value
            return made


# -- several balancers'


def freshness(latest: LastSnapshot, now_ms: int) -> str:
    """`fresh`, `late` or `cut off`: how far a snapshot can be gone by."""
    if latest.snapshot is None:
        return "cut off"
    age_ms = now_ms - latest.at_ms
    if age_ms > CUT_OFF_MS:
        return "cut off"
    return "late" if latest.error or age_ms > LATE_MS else "fresh"


def picture(latest: Mapping[str, LastSnapshot], law: Law | None, now_ms: int) -> Generator[None, None, dict[str, Any]]:
    """The fleet, as those balancers report it. Keys of `latest` name balancers. Returns and yields like of_status."""
    fresh = {name: freshness(one, now_ms) for name, one in latest.items()}
    snapshots = {name: one.snapshot for name, one in latest.items() if one.snapshot is not None}
    upper = {name: snapshot for name, snapshot in snapshots.items() if snapshot.get("tier") == "global"}
    lower = {name: snapshot for name, snapshot in snapshots.items() if snapshot.get("tier") == "regional"}
    names = {region for snapshot in upper.values() for region in as_dict(snapshot.get("regions"))}
    names |= {str(snapshot.get("region")) for snapshot in snapshots.values()} | {
        one.region for one in latest.values() if one.region
    }
    if law is not None:
        names |= set(law.topology.regions)
    yield
    balancers, regions = dict[str, Any](), dict[str, Any]()
    for at, (name, one) in enumerate(latest.items()):
        balancers[name[:TEXT_MAX]] = plain(_balancer(one, fresh[name]))
        if at % ROWS_AT_ONCE == ROWS_AT_ONCE - 1:
            yield
    of_region: dict[str, dict[str, LastSnapshot]] = {}
    for key, one in latest.items():
        for region in {one.region, (one.snapshot or {}).get("region")} - {None}:
            of_region.setdefault(str(region), {})[key] = one
    for at, name in enumerate(sorted(names)):
        regions[name[:TEXT_MAX]] = plain(_merged(name, latest, upper, of_region.get(name, {}), fresh))
        if at % REGIONS_AT_ONCE == REGIONS_AT_ONCE - 1:
            yield
    more = plain({
        "arcs": {
            f"{snapshot.get('region')}>{target}": flows
            for name, snapshot in upper.items()
            if fresh[name] != "cut off"  # traffic of a balancer that cannot be heard is unknown
            for target, flows in as_dict(snapshot.get("arcs")).items()
        },
        "overrides": {
            key: one for snapshot in upper.values() for key, one in as_dict(snapshot.get("overrides")).items()
        },
    })  # fmt: skip
    made: dict[str, Any] = {"at": now_ms, "balancers": balancers, "regions": regions, **more}
    yield
    # These are most of it, and plain already: snapshots are, and of a law one is made once.
    return {
        **made,
        "wrong": wrong(made),
        "replicas": {name: as_dict(snapshot.get("replicas")) for name, snapshot in lower.items()},
        "queues": {name: snapshot["queue"] for name, snapshot in lower.items() if snapshot.get("queue")},
        "decisions": _newest(snapshots),
        "law": _law(law) if law is not None else {},
    }


def wrong(picture: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is wrong in a picture, worst first. `subject`: a balancer, a region or "law"; `what`: the problem; `state`:
    which sign is shown for it. `seen_at` is there for a balancer that does not answer now: when its last snapshot came.
    """
    found: list[tuple[int, dict[str, Any]]] = []

    def add(rank: int, state: str, subject: str, what: str, **more: Any) -> None:
        found.append((rank, {"state": state, "subject": subject, "what": what, **more}))

    balancers, regions = as_dict(picture.get("balancers")), as_dict(picture.get("regions"))
    for name, one in balancers.items():
        if one["fresh"] != "fresh":
            lost = one["fresh"] == "cut off"
            more = {"seen_at": one["seen_at"]} if "seen_at" in one else {}
            why = f": {one['error']}" if one.get("error") else ""
            add(
                0 if lost else 3,
                "cut off" if lost else "suspect",
                name,
                f"{'cut off' if lost else 'late'}{why}",
                **more,
            )
        if one.get("trouble"):
            add(2, "suspect", name, f"etcd: {one['trouble']}")
        for text in as_dict(one.get("law")).get("trouble") or ():
            add(2, "suspect", name, f"law: {text}")
    for name, one in regions.items():
        state = one.get("state")
        if state in ("down", "suspect"):
            seen = list(as_dict(one.get("seen")).values())
            agree = seen.count(state)
            some = f" (as {agree} of {len(seen)} global balancers see it)" if agree < len(seen) else ""
            add(0 if state == "down" else 1, state, name, f"{state}: {one.get('why', '')}{some}")
        elif state == "draining":
            drain = as_dict(one.get("drain"))
            by = f", by {drain.get('author')}: {drain.get('why')}" if drain else ""
            add(4, state, name, f"draining{by}")
        if one.get("used", 0.0) > FULL_SHARE:
            add(2, "suspect", name, f"{one['used']:.0%} of its slots are used, {one.get('queued', 0)} wait")
        up, of = one.get("replicas_up", 0), one.get("replicas_all", 0)
        if up < of and state != "down" and "cut_off" not in one:
            add(2, "suspect", name, f"{up} of {of} replicas are up")
    epochs = {one["epoch"] for one in balancers.values() if one["fresh"] != "cut off" and "epoch" in one}
    if len(epochs) > 1:
        add(1, "suspect", "law", f"balancers use different epochs: {', '.join(map(str, sorted(epochs)))}")
    return [one for _, one in sorted(found, key=lambda pair: pair[0])][:WRONG_MAX]


def _balancer(latest: LastSnapshot, fresh: str) -> dict[str, Any]:
    snapshot = latest.snapshot or {}
    named = ("instance", "version", "epoch", "law", "under_way", "trouble", "prefix_nodes", "hits")
    return {
        "tier": snapshot.get("tier") or latest.tier,
        "region": snapshot.get("region") or latest.region,
        **{name: snapshot.get(name) for name in named},
        "fresh": fresh,
        "seen_at": latest.at_ms or None,
        "error": latest.error or None,
    }


def _merged(
    name: str,
    latest: Mapping[str, LastSnapshot],
    upper: Mapping[str, Snapshot],
    here: Mapping[str, LastSnapshot],
    fresh: Mapping[str, str],
) -> dict[str, Any]:
    """A region: its state by the worst of the global balancers that answer, its load by its own where those are.
    `here` are those of its balancers that are known."""
    views = {key: one for key, snapshot in upper.items() if (one := as_dict(snapshot.get("regions")).get(name))}
    seen = {key: one for key, one in views.items() if fresh[key] != "cut off"}
    worst: dict[str, Any] = min(seen.values(), key=lambda one: worst_first(one.get("state")), default={})
    last = worst or max(views.items(), key=lambda one: latest[one[0]].at_ms, default=("", {}))[1]
    lower = {
        key: one.snapshot
        for key, one in here.items()
        if one.snapshot is not None and (one.snapshot.get("tier"), one.snapshot.get("region")) == ("regional", name)
    }
    own, own_latest = list(lower.values()), [one for key, one in lower.items() if fresh[key] != "cut off"]
    row: dict[str, Any] = {
        **{k: v for k, v in last.items() if k != "state"},
        "state": worst.get("state", "unknown"),
        "seen": {key: one.get("state") for key, one in seen.items()},
        "of": len(upper),
        "cut_off": sorted(key for key in here if fresh[key] == "cut off") or None,
        "seen_at": max((latest[key].at_ms for key in (*views, *here)), default=0) or None,
    }
    if not worst:
        row["why"] = "no global balancer that answers reports it"
    if own:
        # Balancers of one region share its replicas: each reports all, and how much of the load is not its own.
        replicas = {
            key: one for snapshot in (own_latest or own) for key, one in as_dict(snapshot.get("replicas")).items()
        }
        row["slots"] = sum(int(one.get("slots") or 0) for one in replicas.values())
        row["replicas_all"] = len(replicas)
        row["replicas_up"] = sum(one.get("state") == "up" for one in replicas.values())
    if own_latest:
        # From outside a report is a little older: a region says best itself how full it is.
        row["busy"] = sum(int(one.get("in_flight") or 0) + int(one.get("elsewhere") or 0) for one in replicas.values())
        if row["slots"]:
            row["used"] = row["busy"] / row["slots"]
        row["queued"] = sum(int(snapshot.get("queued") or 0) for snapshot in own_latest)
    return row


def _newest(snapshots: Mapping[str, Snapshot]) -> dict[str, Any]:
    """The newest decisions of all, each once: from a global balancer if one reports it. If the law forbids the record
    there, it may come from the region that served it, which does not know the entry."""
    found: dict[str, Any] = {}
    for name, snapshot in sorted(snapshots.items(), key=lambda one: one[1].get("tier") == "global"):
        above = snapshot.get("tier") == "global"
        end = {"from": snapshot.get("region")} if above else {"to": snapshot.get("region")}
        for key, one in as_dict(snapshot.get("decisions")).items():
            found[key] = {**one, **{field: at for field, at in end.items() if at is not None}, "by": name}
    return dict(sorted(found.items(), key=lambda one: (-(one[1].get("at") or 0), one[0]))[:DECISIONS_MAX])


@lru_cache(maxsize=2)
def _law(law: Law) -> dict[str, Any]:
    """The map, and where each tenant's work may be. It changes with the law alone."""
    tenants = sorted(law.topology.tenants)[:TENANTS_MAX]
    made: dict[str, Any] = plain({
        "epoch": law.epoch,
        "places": {
            name: {
                "lat": one.latitude, "lon": one.longitude, "city": one.city, "country": one.country,
                "within": sorted(one.jurisdictions),
            }
            for name, one in law.topology.regions.items()
        },
        "tenants": {
            name: {str(scope): sorted(law.verdict(name, "", scope).lawful) for scope in Scope} for name in tenants
        },
        "excluded": {
            name: {region: why for region in law.topology.regions if (why := law.verdict(name, "").why_not(region))}
            for name in tenants
        },
    })  # fmt: skip
    return made


# -- what would have been


def without(record: Mapping[str, Any], target: str) -> dict[str, Any]:
    """Where a decision would have gone if this region or replica had been drained: the best of the others by the scores
    of that moment, regions that were not hot first. `chosen` is absent if none is left."""
    reasons = as_dict(record.get("reasons"))
    others = [one for one in reasons.get("candidates") or () if one.get(_named(reasons)) != target]
    by_score = sorted(others, key=lambda one: (bool(one.get("hot")), one.get("score", math.inf)))
    best: Mapping[str, Any] = by_score[0] if by_score else {}
    return _what_if(reasons, best, target)


def compared(record: Mapping[str, Any], again: Mapping[str, Any], target: str) -> dict[str, Any]:
    """The same, of two decisions by one balancer: the second was asked to leave out `target`."""
    reasons = as_dict(record.get("reasons"))
    return {**_what_if(reasons, _chosen(as_dict(again.get("reasons"))), target), "asked": True}


def _what_if(reasons: Mapping[str, Any], best: Mapping[str, Any], target: str) -> dict[str, Any]:
    was, named, moved = _chosen(reasons), _named(reasons), reasons.get("chosen") == target
    goes = best if moved else was
    document: dict[str, Any] = {
        "drained": target,
        "moved": moved,
        "chosen": goes.get(named) if moved else reasons.get("chosen"),
        "ttft_ms": goes.get("ttft_ms"),
        "was_ttft_ms": was.get("ttft_ms"),
        "was": reasons.get("chosen"),
    }
    cleaned: dict[str, Any] = plain(document)
    return cleaned


def _named(reasons: Mapping[str, Any]) -> str:
    return "region" if any("region" in one for one in reasons.get("candidates") or ()) else "replica"


def _chosen(reasons: Mapping[str, Any]) -> dict[str, Any]:
    named = _named(reasons)
    return next((one for one in reasons.get("candidates") or () if one.get(named) == reasons.get("chosen")), {})
