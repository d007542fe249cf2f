"""A fleet in ten lines: what is wrong, where the load is, which law is in force. From balancers' statuses; no IO."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from farhop.balance.health.reading import worst_first
from farhop.loose_json import as_dict, as_list, dicts, dicts_by_name
from farhop_cli.show import number

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from farhop.store.documents.announce import AnnounceReport

LINES_MAX = 10
WRONG_MAX, BUSY_MAX = 4, 3
NO_ENTRY = "unknown: no global balancer was found; does one run, and may it write its address to etcd?"
NOT_TOLD = "as entries see it: no regional balancer answered (with --config none is asked; a context asks all)"
_LATELY_S = 60.0  # older failures of requests are not reported


class AskedBalancer(Protocol):
    """A balancer that was asked for its status, and what it said."""

    @property
    def region(self) -> str:
        """Its region."""

    @property
    def name(self) -> str:
        """Its name, for people."""

    @property
    def status(self) -> dict[str, Any] | None:
        """Its status; None if it did not answer."""


class Load(msgspec.Struct, frozen=True):
    """A region's load. None is unknown."""

    region: str
    state: str
    in_flight: int | None
    queued: int | None
    used_share: float | None
    wait_ms: float | None
    replicas_up: int | None
    replicas: int | None


class Summary(msgspec.Struct, frozen=True):
    """The fleet at a glance. `epochs` says which balancers use which law; `wrong` is worst first."""

    fleet: str
    balancers: int
    answered: int
    global_balancers: int
    regions: dict[str, int]  # how many, by state
    epochs: dict[int, list[str]]
    law: str
    wrong: list[str]
    loads: list[Load]  # the busiest first


def of(
    name: str, upper: Sequence[AskedBalancer], lower: Sequence[AskedBalancer], unreached: Sequence[str],
    region: str = "", announcers: Sequence[AnnounceReport] = (),
) -> Summary:  # fmt: skip
    """From balancers' statuses; `unreached` is what could not be asked, and why."""
    views = _worst(upper, region)
    loads = [_load(one, view, lower) for one, view in views.items()]
    answered = [one for one in (*upper, *lower) if one.status is not None]
    epochs: dict[int, list[str]] = {}
    for one in answered:
        epoch = (one.status or {}).get("law_epoch")
        if isinstance(epoch, int):
            epochs.setdefault(epoch, []).append(one.name)
    wrong = [*(f"not reached: {why}" for why in unreached), *_wrong(upper, lower, views, epochs, region)]
    wrong += _unannounced(one for one in announcers if region in ("", one.region))
    return Summary(
        name,
        len(upper) + len(lower),
        len(answered),
        len(upper),
        dict(Counter(str(view.get("state") or "unknown") for view in views.values())),
        epochs,
        _law(answered),
        list(dict.fromkeys(wrong)),
        sorted(loads, key=lambda load: (-(load.used_share or 0.0), -(load.in_flight or 0), load.region)),
    )


def lines(summary: Summary) -> Iterator[tuple[str, str | None]]:
    """At most LINES_MAX of them, each with a style."""
    states = ", ".join(
        f"{count} {state}" for state, count in sorted(summary.regions.items(), key=lambda one: worst_first(one[0]))
    )
    regions = sum(summary.regions.values())
    yield (
        f"{summary.fleet}: {regions} region{'s' if regions != 1 else ''}{f' ({states})' if states else ''}, "
        f"{summary.answered} of {summary.balancers} balancers answered",
        "bold",
    )
    yield f"law: {_epochs(summary)}", None if len(summary.epochs) < 2 else "yellow"
    if not summary.wrong:
        yield "wrong: nothing", "green"
    few = summary.wrong if len(summary.wrong) <= WRONG_MAX else summary.wrong[: WRONG_MAX - 1]
    for what in few:
        yield f"wrong: {what}", "red"
    if len(few) < len(summary.wrong):
        yield f"wrong: and {len(summary.wrong) - len(few)} more; see --wide", "red"
    told = not summary.loads or any(load.in_flight is not None for load in summary.loads)
    yield f"load: {(_total(summary.loads) if told else NOT_TOLD) if summary.global_balancers else NO_ENTRY}", None
    for load in summary.loads[:BUSY_MAX]:
        yield f"  {_shown(load)}", None


def _epochs(summary: Summary) -> str:
    if not summary.epochs:
        return "epoch unknown: no balancer reports it"
    if len(summary.epochs) == 1:
        return f"epoch {next(iter(summary.epochs))} everywhere{summary.law}"
    parts = (f"epoch {epoch} at {_few(summary.epochs[epoch])}" for epoch in sorted(summary.epochs, reverse=True))
    return f"{'; '.join(parts)}{summary.law}"


def _few(names: Sequence[str]) -> str:
    listed = sorted(set(names))
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


def _law(answered: Sequence[AskedBalancer]) -> str:
    """Who set the newest one, if known."""
    laws = [law for one in answered if isinstance(law := (one.status or {}).get("law"), dict)]
    newest = max(laws, key=lambda law: law["epoch"] if isinstance(law.get("epoch"), int) else -1, default={})
    author = newest.get("author")
    if not author:
        return ""
    signed = f"signed by {newest['signed_by']}" if newest.get("signed_by") else "unsigned"
    return f", set by {author} ({signed}): {newest.get('why') or ''}".rstrip(": ")


# -- load


def _worst(upper: Sequence[AskedBalancer], region: str) -> dict[str, dict[str, Any]]:
    """Each region as the balancer with the worst view reports it."""
    found: dict[str, dict[str, Any]] = {}
    for one in upper:
        for view in dicts((one.status or {}).get("regions")):
            name = str(view.get("region"))
            if region not in ("", name):
                continue
            if name not in found or worst_first(view.get("state")) < worst_first(found[name].get("state")):
                found[name] = view
    return found


def _load(region: str, view: dict[str, Any], lower: Sequence[AskedBalancer]) -> Load:
    own = [one.status for one in lower if one.region == region and one.status is not None]
    # By name: several balancers of a region share its replicas.
    replicas = {str(one.get("replica")): one for status in own for one in dicts(status.get("replicas"))}
    instances = dicts(view.get("instances"))
    offers = [offer for instance in instances for offer in dicts_by_name(instance.get("models")).values()]
    up = sum(replica.get("state") == "up" for replica in replicas.values())
    return Load(
        region,
        str(view.get("state") or "unknown"),
        _sum(status.get("under_way") for status in own),
        _sum(status.get("queued_requests") for status in own),
        _best(max, [view.get("used_share"), *(offer.get("used_share") for offer in offers)]),
        _best(min, [offer.get("wait_ms") for offer in offers]),
        up if own else None,
        len(replicas) if own else None,
    )


def _sum(values: Any) -> int | None:
    known = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    return sum(known) if known else None


def _best(best: Any, values: Any) -> float | None:
    known = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)]
    return float(best(known)) if known else None


def _total(loads: Sequence[Load]) -> str:
    busiest = next((load.region for load in loads if load.used_share), None)
    parts = [
        f"{number(_sum(load.in_flight for load in loads))} requests under way",
        f"{number(_sum(load.queued for load in loads))} queued",
    ]
    return ", ".join(parts) + (f"; most of its capacity used: {busiest}" if busiest else "")


def _shown(load: Load) -> str:
    used = f"{load.used_share:.0%} used" if load.used_share is not None else "use unknown"
    seen = f"{used}, wait {number(load.wait_ms)} ms"
    if load.replicas is None:  # none of its own balancers reports it
        return f"{load.region}: {load.state}, {seen}"
    return (
        f"{load.region}: {load.state}, {number(load.in_flight)} under way, {number(load.queued)} queued, {seen}, "
        f"{load.replicas_up} of {load.replicas} replicas up"
    )


# -- what is wrong


def _wrong(
    upper: Sequence[AskedBalancer],
    lower: Sequence[AskedBalancer],
    views: dict[str, dict[str, Any]],
    epochs: dict[int, list[str]],
    region: str,
) -> Iterator[str]:
    for state in ("down", "suspect"):
        for name, view in views.items():
            if view.get("state") == state:
                yield f"{name} is {state}: {view.get('why') or 'no reason given'}"
    if len(epochs) > 1:
        behind = [name for epoch in sorted(epochs)[:-1] for name in epochs[epoch]]
        yield f"the law is not the same everywhere: {_few(behind)} behind epoch {max(epochs)}"
    for one in (*upper, *lower):
        yield from _wrong_at(one)
    for one in lower:
        if region in ("", one.region):
            yield from _replicas(one)
    for one in upper:
        for view in dicts((one.status or {}).get("regions")):
            age_s = view.get("token_rejected_age_s")
            if isinstance(age_s, int | float) and age_s < _LATELY_S and region in ("", view.get("region")):
                yield f"{view.get('region')} refuses hop tokens of {one.name}: give both the same key (`farhop check`)"
            age_s = view.get("other_answered_age_s")
            if isinstance(age_s, int | float) and age_s < _LATELY_S and region in ("", view.get("region")):
                yield f"something else than {view.get('region')} answers {one.name} at its tier address"
    for name, view in views.items():
        if view.get("state") == "up":
            yield from _capacity(name, view)
        drain = view.get("override")
        if isinstance(drain, dict):
            yield f"{name} is drained by {drain.get('author') or 'unknown'}: {drain.get('why') or 'no reason given'}"


def _capacity(name: str, view: dict[str, Any]) -> Iterator[str]:
    """What a region that is up lacks: replicas, or room."""
    offers = [
        (model, offer["replicas_ready"])
        for instance in dicts(view.get("instances"))
        for model, offer in dicts_by_name(instance.get("models")).items()
        if isinstance(offer.get("replicas_ready"), int)
    ]
    ready = {model for model, count in offers if count}
    if without := {model for model, _ in offers} - ready:
        yield f"{name} has no replica ready of {_few(sorted(without))}"
        if not ready:
            return  # so it takes no work
    admitted = view.get("admitted_share")
    if isinstance(admitted, int | float) and admitted <= 0.0:
        yield f"{name} is hot: new work goes elsewhere if it can"


def _unannounced(announcers: Iterable[AnnounceReport]) -> Iterator[str]:
    for one in announcers:
        if one.differs:
            yield f"{one.instance} announces entry {one.entry} as {one.actual or 'unknown'}, and should as {one.wanted}"
        elif not one.healthy:
            yield f"{one.instance} has entry {one.entry} {one.wanted}: {one.why or 'its probes fail'}"


def _wrong_at(one: AskedBalancer) -> Iterator[str]:
    status = one.status or {}
    name = f"{status.get('tier') or ''} {one.name}".strip()  # both tiers of a region have its name
    yield from _store_wrong(name, status)
    root = as_dict(as_dict(status.get("limits")).get("root"))
    if root.get("trouble"):
        yield f"{name} cannot lend out limits (tenants with limits here may get 429): {root['trouble']}"
    yield from _law_wrong(name, status)
    yield from _configuration_wrong(name, as_dict(status.get("configuration")))
    for what in _texts(as_dict(status.get("picker")).get("trouble")):
        yield f"{name}: {what}"
    for issued_by, issuer in dicts_by_name(as_dict(status.get("keys")).get("issuers")).items():
        if issuer.get("trouble"):
            yield f"{name} cannot fetch the keys of issuer {issued_by}: {issuer['trouble']}"
    for what, account in dicts_by_name(status.get("accounts")).items():
        yield from _account_wrong(name, what, account)
    for kept in dicts(status.get("kept")):
        if kept.get("from_disk"):
            yield f"{name} started from what was kept on disk: hub {kept.get('hub')} is silent"


def _store_wrong(name: str, status: dict[str, Any]) -> Iterator[str]:
    if status.get("store_trouble"):
        yield f"{name} has lost etcd: {status['store_trouble']}"
    for hub in dicts(status.get("published" if status.get("tier") == "global" else "hubs")):
        if hub.get("trouble"):
            yield f"{name} is missing in hub {hub.get('hub')}: {hub['trouble']}"
    for hub in dicts(status.get("ignored")):
        key, why = next(iter((hub.get("such_as") or {"": ""}).items()))
        yield (
            f"{name} ignores {hub.get('documents')} documents in hub {hub.get('hub')}, such as {key}: {why}; "
            "sign them with a key that it knows (deploy/ROTATION.md)"
        )


def _law_wrong(name: str, status: dict[str, Any]) -> Iterator[str]:
    law = as_dict(status.get("law"))
    for what in _texts(law.get("trouble")):
        yield f"{name}, law: {what}"
    if law.get("etcd_out_of_reach") and not status.get("store_trouble"):
        yield f"{name}, law: frozen, etcd is out of reach: {law['etcd_out_of_reach']}"


def _configuration_wrong(name: str, configuration: dict[str, Any]) -> Iterator[str]:
    for what in _texts(configuration.get("trouble"))[:1]:
        stands = f"generation {configuration.get('generation')} stands"
        yield f"{name}, configuration rejected ({stands}): {what}"
    waits = _texts(configuration.get("awaits_restart"))
    if waits:
        yield f"{name}, configuration: {', '.join(waits[:4])} await a restart"


def _account_wrong(name: str, what: str, account: dict[str, Any]) -> Iterator[str]:
    """`what`: the kind of records, usage or audit."""
    if account.get("trouble"):
        yield f"{name} cannot write {what}: {account['trouble']}"
    prices, delivery = as_dict(account.get("prices")), as_dict(account.get("delivery"))
    if prices.get("trouble"):
        yield f"{name}, price book passed over: {prices['trouble']}"
    if delivery.get("trouble"):
        yield f"{name} cannot send {what} on: {delivery['trouble']}"


def _replicas(one: AskedBalancer) -> Iterator[str]:
    replicas = dicts((one.status or {}).get("replicas"))
    bad = [replica for replica in replicas if replica.get("state") != "up"]
    if bad:
        first = bad[0]
        why = [first.get("why") or "no reason given", *_texts(first.get("problems"))]
        yield (
            f"{one.name}: {len(bad)} of {len(replicas)} replicas not up, such as {first.get('replica')} "
            f"({first.get('state')}: {': '.join(map(str, why))})"
        )
    elif (one.status or {}) and not replicas:
        yield f"{one.name} has no replicas"


def _texts(value: object) -> list[str]:
    return [str(one) for one in as_list(value)]
