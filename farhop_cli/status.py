"""`farhop status`: what is wrong, where the load is and which law is in force, in ten lines; then the chosen tables.

A balancer that does not answer is a row and an exit code, not an error; a missing figure is a dash. Never changes
anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
import typer
from rich.live import Live
from rich.text import Text

from farhop.loose_json import as_dict, dicts, dicts_by_name
from farhop_cli import admin, fleet, show, summary
from farhop_cli.access import AdminError
from farhop_cli.exits import NEGATIVE, PARTIAL, fail, warn
from farhop_cli.show import cell, number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from farhop.store.documents.announce import AnnounceReport
    from farhop_cli.fleet import Balancer, Fleet
    from farhop_cli.options import FleetOptions

WATCH_S = 2.0
SHORTER = 0.8  # of a round trip: two measurements in a row differ by less
FIND_EVERY = 8  # redraws, after which balancers are looked up in etcd again

_VIEW = (
    "seen from", "region", "state", ">rtt ms", ">wait ms", ">used", ">foreign tok", ">slots", ">in flight",
    ">report age s", "why",
)  # fmt: skip
_HUBS = ("seen from", "hub", "contact", ">outages", ">revision", ">balancers", ">reports", "why")
_OVERRIDES = ("region", "override", "by", "until", ">minutes left", "why")
_GLOBAL = ("region", "state", ">epoch", ">under way", ">spilled out", ">spilled in", ">trie nodes", "why")
_ROUTES = ("seen from", "tenant", "model", "policy", "answer", ">µ$ spent", ">µ$/h", ">quota", "set by")
_SPLITS = ("region", "model", "weights", ">rules", "sticky", "served nowhere")
_LAWS = ("region", "tier", ">epoch", "from", ">revision", "by", "why", "signed", "on disk", "what is wrong")
_PREFIXES = ("seen from", "region", "prefix stream", ">nodes", ">predicted tok", ">cached tok", ">error")
_REGIONAL = (
    "region", "state", ">epoch", ">under way", ">queued", ">queued tok", ">trie nodes", ">predicted tok", ">cached tok",
    ">error", "why",
)  # fmt: skip
ANNOUNCERS = ("entry", "instance", "prefixes", "speaker", "wanted", "since", "actual", "sessions", "why")
_BUILDS = ("region", "tier", "instance", "version", "admin port", ">configuration", "awaits restart", "last error")
_REPLICAS = (
    "region", "replica", "state", ">in flight", ">slots", ">engine runs", ">waits", ">kv tok", ">of",
    ">engine kv %", ">hit %", ">prefill ms/tok", ">tpot ms", ">sample age s", "why",
)  # fmt: skip


class BalancerStatus(msgspec.Struct, frozen=True):
    """A balancer's status, or why there is none. `spills`: requests it sent past a hot region, by destination.

    `name` is its region's, with its own if the region has several of the tier.
    """

    region: str
    url: str
    status: dict[str, Any] | None
    error: str = ""
    spills: dict[str, int] | None = None
    instance: str = ""
    name: str = ""


@dataclass(frozen=True)
class StatusOptions:
    """What to show beside the summary."""

    regions: bool = False
    replicas: bool = False
    prefixes: bool = False
    law: bool = False
    wide: bool = False
    region: str = ""
    watch: bool = False


def run(asked: StatusOptions, fleet_options: FleetOptions) -> int:
    """Show the fleet's state; the exit code: 3 if not all answered, else 1 if a region is down."""
    if asked.watch and fleet_options.as_json:
        fail("--watch, --json: give one of them")
    here = fleet_options.fleet(asked.region)
    if asked.watch:
        _watch(asked, fleet_options, here)
    upper, lower, answered = _asked(here, asked, spills=asked.wide or asked.regions or fleet_options.as_json)
    fleet.unreachable(here, answered)
    down, missing = down_regions(upper), fleet.partial(here, answered)
    if fleet_options.as_json:
        unreached = [*here.trouble, *(one.error for one in answered if one.status is None)]
        summed = summary.of(here.name, upper, lower, unreached, asked.region, here.announcers)
        lists = {"global": upper, "regional": lower, "announcers": here.announcers}
        show.json({"summary": summed, **lists, "down": down, "unreachable": unreached})
    else:
        draw(here, asked, upper, lower, answered)
    if missing:
        also = f"; down: {', '.join(down)}" if down else ""
        warn(f"{missing}{also}")
        return PARTIAL
    if down:
        fail(f"down: {', '.join(down)}", NEGATIVE)
    return 0


def _asked(
    here: Fleet, asked: StatusOptions, *, spills: bool
) -> tuple[list[BalancerStatus], list[BalancerStatus], list[fleet.StatusReply]]:
    """The status of each global and each regional balancer; and the raw answers."""
    chosen = [one for one in here.balancers if one.tier != "regional" or asked.region in ("", one.region)]
    answered, paths = asyncio.run(_ask_all(here, chosen, spills=spills))
    several = {(one.tier, one.region) for one in chosen if len(here.of(one.tier, one.region)) > 1}
    upper: list[BalancerStatus] = []
    lower: list[BalancerStatus] = []
    for one, sent in zip(answered, paths, strict=True):
        of = one.balancer
        region = of.region or of.url
        name = f"{region}/{of.instance}" if (of.tier, of.region) in several and of.instance else region
        seen = BalancerStatus(region, of.url, one.status, one.error, sent, of.instance, name)
        (lower if of.tier == "regional" else upper).append(seen)
    return upper, lower, answered


def draw(
    here: Fleet,
    asked: StatusOptions,
    upper: list[BalancerStatus],
    lower: list[BalancerStatus],
    answered: list[fleet.StatusReply],
) -> None:
    unreached = [*here.trouble, *(one.error for one in answered if one.status is None)]
    for line, style in summary.lines(summary.of(here.name, upper, lower, unreached, asked.region, here.announcers)):
        show.line(line, style)
    if here.announcers and (asked.wide or asked.regions):
        announcers = [announcer(one) for one in here.announcers if asked.region in ("", one.region)]
        show.table("announcers of entries", ANNOUNCERS, announcers)
    _print(asked, upper, lower)


def _watch(asked: StatusOptions, fleet_options: FleetOptions, here: Fleet) -> None:
    """Until Ctrl-C: on a terminal in place, elsewhere one after another."""
    out, draws = show.console(), 0
    live = Live(console=out, screen=True, auto_refresh=False, vertical_overflow="crop") if out.is_terminal else None
    with live if live is not None else contextlib.nullcontext():
        while True:
            if draws % FIND_EVERY == FIND_EVERY - 1:
                with contextlib.suppress(typer.Exit):  # the previous view stays until there is a new one
                    here = fleet_options.fleet(asked.region)
            upper, lower, answered = _asked(here, asked, spills=asked.wide or asked.regions)
            if live is None:
                draw(here, asked, upper, lower, answered)
            else:
                with show.captured() as captured:
                    draw(here, asked, upper, lower, answered)
                live.update(Text.from_ansi(captured()), refresh=True)
            draws += 1
            time.sleep(WATCH_S)


def _from_disk(tier: str, one: BalancerStatus) -> list[str]:
    """It was started without etcd, and still is without."""
    shown = [kept for kept in _parts(one, "kept") if kept.get("from_disk")]
    return [
        f"{tier} balancer of {one.region}: started from what was kept on disk; hub {cell(kept.get('hub'))} is silent: "
        f"{cell(kept.get('why'))}"
        for kept in shown
    ]


def _print(asked: StatusOptions, upper: list[BalancerStatus], lower: list[BalancerStatus]) -> None:
    wide = asked.wide
    both = [("global", one) for one in upper] + [("regional", one) for one in lower]
    if wide or asked.law:
        for tier, one in both:
            for line in _from_disk(tier, one):
                show.line(line)
    if wide or asked.regions:
        rows = [row for one in upper for row in _views(one, upper) if asked.region in ("", row[1]) or row[1] == ""]
        show.table("regions, as each global balancer sees them", _VIEW, rows)
    if wide:
        _table("hubs, as each global balancer sees them", _HUBS, [row for one in upper for row in _hubs(one)])
    if wide or asked.law or asked.regions:
        _table("what operators set", _OVERRIDES, _set_by_operators(asked.region, upper, lower))
    if wide or asked.law:
        _table("the law that each balancer follows", _LAWS, [row for tier, one in both for row in _law(tier, one)])
    if wide or asked.regions:
        show.table("global balancers", _GLOBAL, [_global(one, upper) for one in upper])
    if wide:
        _table("routes that are not the default", _ROUTES, [row for one in upper for row in _routes(one)])
    if wide or asked.prefixes:
        _table("prefixes in each region, as each global balancer knows them", _PREFIXES, [
            _prefixes(one, region)
            for one in upper
            for region in _parts(one, "regions")
            if "prefix_nodes" in region and asked.region in ("", region.get("region"))
        ])  # fmt: skip
    if lower and (wide or asked.replicas):
        show.table("regional balancers", _REGIONAL, [_balancer(one) for one in lower])
        _table("traffic split between versions", _SPLITS, [row for one in lower for row in _splits(one)])
        show.table("replicas", _REPLICAS, [row for one in lower for row in replica_rows(one)])
    if lower and wide:
        show.table("builds", _BUILDS, [_build(tier, one) for tier, one in both])


def _table(title: str, columns: Sequence[str], rows: list[list[str]]) -> None:
    """A table, if there is something in it."""
    if rows:
        show.table(title, columns, rows)


def _set_by_operators(region: str, upper: list[BalancerStatus], lower: list[BalancerStatus]) -> list[list[str]]:
    drained = [_override(name, one) for name, one in drains(upper).items()]
    rows = [*drained, *(_bias_or_pin(one) for one in biases_and_pins(upper)), *_refusals(lower)]
    return [row for row in rows if region in ("", row[0])]


def announcer(one: AnnounceReport) -> list[str]:
    """An announcer as a row of a table with ANNOUNCERS: what it announces, since when, and why not."""
    up = f"{sum(one.sessions.values())} of {len(one.sessions)}" if one.sessions else "-"
    actual = f"{one.actual or 'unknown'}{' (differs)' if one.differs else ''}"
    since = datetime.fromtimestamp(one.since, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if one.since else "-"
    return [one.entry, one.instance, ", ".join(one.prefixes), one.speaker, one.wanted, since, actual, up, one.why]


def _build(tier: str, one: BalancerStatus) -> list[str]:
    """The build, and the generation of its configuration in force."""
    status = one.status or {}
    configuration = as_dict(status.get("configuration"))
    names = [", ".join(map(str, configuration.get(name) or ())) or show.NONE for name in ("awaits_restart", "trouble")]
    process = [cell(status.get(field)) for field in ("instance", "version")]
    return [one.name, tier, *process, one.url or show.NONE, cell(configuration.get("generation")), *names]


async def _ask_all(
    here: Fleet, chosen: list[Balancer], *, spills: bool
) -> tuple[list[fleet.StatusReply], list[dict[str, int] | None]]:
    async with admin.AdminClient(here.access) as http:
        answered = await asyncio.gather(*(fleet.look(http, one) for one in chosen))
        wanted = [
            one.balancer.url if spills and one.status and one.balancer.tier != "regional" else "" for one in answered
        ]
        return list(answered), list(await asyncio.gather(*(_spills(http, url) for url in wanted)))


async def _spills(http: admin.AdminClient, url: str) -> dict[str, int] | None:
    if not url:
        return None
    try:
        return spills(await admin.page(http, url, "/metrics"))
    except AdminError:
        return None  # a balancer whose metrics are elsewhere


_SPILL = re.compile(r'farhop_spilled_requests_total\{(?:.*,)?target="([^"\\]{1,128})"(?:,.*)?\} ([0-9.e+]{1,32})')


def spills(page: str) -> dict[str, int]:
    """Requests spilled, by the region they went to, in a global balancer's metrics."""
    found: dict[str, int] = {}
    for line in page.splitlines():
        match = _SPILL.fullmatch(line)
        if match is not None:
            with contextlib.suppress(ValueError):
                found[match[1]] = found.get(match[1], 0) + int(float(match[2]))
    return found


def drains(upper: list[BalancerStatus]) -> dict[str, dict[str, Any]]:
    """Drains by region, by the first balancer that reports one."""
    found: dict[str, dict[str, Any]] = {}
    for one in upper:
        for region in _parts(one, "regions"):
            drain = region.get("override")
            if isinstance(drain, dict):
                found.setdefault(str(region.get("region")), drain)
    return found


def biases_and_pins(upper: list[BalancerStatus]) -> list[dict[str, Any]]:
    """Biases and pins, each once, by the first balancer that reports it."""
    found: dict[str, dict[str, Any]] = {}
    for one in upper:
        for each in _parts(one, "operator_overrides"):
            found.setdefault(" ".join(str(each.get(f)) for f in ("action", "region", "tenant", "model")), each)
    return [found[key] for key in sorted(found)]


def _bias_or_pin(found: dict[str, Any]) -> list[str]:
    ms = found.get("ms")
    whom = f"{cell(found.get('tenant') or found.get('model'))}{' (strict)' if found.get('strict') else ''}"
    action = f"bias {ms:+g} ms" if isinstance(ms, int | float) else f"pin {whom}"
    return _override(str(found.get("region")), {**found, "action": action})


def _refusals(lower: list[BalancerStatus]) -> list[list[str]]:
    """What regions are set to refuse, each once, by the first of their balancers that reports it."""
    found: dict[tuple[str, str], list[str]] = {}
    for one in lower:
        status = one.status or {}
        region = str(status.get("region"))
        for each in dicts(as_dict(status.get("overrides")).get("refusals")):
            what = f"refuse {100 * float(each.get('share') or 0.0):g} % of {each.get('model') or 'all'}"
            found.setdefault((region, str(each.get("model"))), _override(region, {**each, "action": what}))
    return [found[key] for key in sorted(found)]


def _law(tier: str, one: BalancerStatus) -> list[list[str]]:
    law = (one.status or {}).get("law")
    if not isinstance(law, dict):
        return []
    wrong = [str(one) for one in law.get("trouble") or []]
    if law.get("etcd_out_of_reach"):
        wrong.append(f"frozen, etcd is out of reach: {law['etcd_out_of_reach']}")
    epoch, named = law.get("epoch"), law.get("newest_named")
    if isinstance(epoch, int) and isinstance(named, int) and named > epoch:
        wrong.append(f"tokens name epoch {named}, unknown here")
    texts = (cell(law.get(field)) for field in ("source", "revision", "author", "why"))
    signed = law.get("signed_by") or ("unsigned" if law.get("author") else None)
    kept = "yes" if law.get("kept_on_disk") else "no"
    return [[one.name, tier, cell(epoch), *texts, cell(signed), kept, "; ".join(wrong)]]


def _override(region: str, found: dict[str, Any]) -> list[str]:
    left_s = found.get("left_s")
    minutes = left_s / 60.0 if isinstance(left_s, int | float) else None
    texts = (cell(found.get(field)) for field in ("action", "author", "until"))
    return [region, *texts, number(minutes), cell(found.get("why"))]


def down_regions(upper: list[BalancerStatus]) -> list[str]:
    """The regions that some global balancer takes for down; sorted."""
    return sorted({str(r.get("region")) for one in upper for r in _parts(one, "regions") if r.get("state") == "down"})


def _views(one: BalancerStatus, upper: list[BalancerStatus]) -> list[list[str]]:
    if one.status is None:
        return [[one.name, "", "unreachable", *[show.NONE] * 7, one.error]]
    rtts = {seen.region: _rtts_ms(seen) for seen in upper} | {one.region: _rtts_ms(one)}
    return [_view(one.name, region, _shorter_way(one.region, region, rtts)) for region in _parts(one, "regions")]


def _rtts_ms(one: BalancerStatus) -> dict[str, float]:
    """Its round trips to other regions, by region."""
    found = {cell(region.get("region")): region.get("rtt_ms") for region in _parts(one, "regions")}
    return {name: float(rtt) for name, rtt in found.items() if isinstance(rtt, int | float) and name != one.region}


def _shorter_way(here: str, region: dict[str, Any], rtts_ms: Mapping[str, Mapping[str, float]]) -> str:
    """Through which region the round trip would be clearly shorter, by what its balancer measured: a network's fault,
    most often."""
    to = cell(region.get("region"))
    direct_ms = rtts_ms[here].get(to, 0.0)
    ways = [(first + rtts_ms[by][to], by) for by, first in rtts_ms[here].items() if to in rtts_ms.get(by, ())]
    way_ms, by = min(ways, default=(direct_ms, ""))
    return f"{way_ms:.0f} ms through {by}" if way_ms < SHORTER * direct_ms else ""


def _view(seen_from: str, region: dict[str, Any], shorter: str) -> list[str]:
    instances = dicts(region.get("instances"))
    offers = [list((i.get("models") or {}).values()) for i in instances]
    waits = [o["wait_ms"] for models in offers for o in models if "wait_ms" in o]
    # The models of one instance share its replicas' slots.
    slots = [max((o.get("slots_free", 0) for o in models), default=0) for models in offers]
    return [
        seen_from,
        cell(region.get("region")),
        _state(region),
        number(region.get("rtt_ms")),
        number(min(waits, default=None)),
        percent(_most(region, offers, "used_share")),
        number(_most(region, offers, "headroom_foreign_tokens"), 0),
        number(sum(slots) if slots else None),
        number(region.get("in_flight")),
        number(min((i["report_age_s"] for i in instances if "report_age_s" in i), default=None), 2),
        "; ".join(filter(None, (cell(region.get("why")), shorter))),
    ]


def _state(region: dict[str, Any]) -> str:
    state, share = cell(region.get("state")), region.get("share")
    if isinstance(share, float) and share > 0.0:
        return f"{state} ({percent(share)} left)"
    gladly, pilot = region.get("admitted_share"), region.get("pilot_light")
    if state == "up" and isinstance(pilot, dict):
        back = f", {percent(gladly)} back" if isinstance(gladly, float) and 0.0 < gladly < 1.0 else ""
        return f"{state} (pilot-light: {cell(pilot.get('state'))}{back})"
    if state == "up" and isinstance(gladly, float) and gladly < 1.0:
        return f"{state} ({percent(gladly)} back)" if gladly > 0.0 else f"{state} (hot)"
    return state + (" (forced)" if region.get("forced") else "")


def _most(region: dict[str, Any], offers: list[list[dict[str, Any]]], field: str) -> object:
    """A figure of the region, if it is known for the whole; otherwise the maximum over its instances' models."""
    shown = [one.get(field) for models in offers for one in models]
    return region.get(field, max((n for n in shown if isinstance(n, int | float)), default=None))


def percent(share: object) -> str:
    """A share as a percentage, or a dash."""
    shown = isinstance(share, int | float) and not isinstance(share, bool) and math.isfinite(share)
    return f"{share:.0%}".replace("%", " %") if shown else show.NONE


def _error(shown: dict[str, Any]) -> list[str]:
    """Tokens predicted to be cached, the actual number, and by how much the prediction was too high (or, below 0, too
    low).
    """
    predicted, cached = shown.get("predicted_hit_tokens"), shown.get("actual_hit_tokens")
    off = None
    if isinstance(predicted, int | float) and isinstance(cached, int | float) and cached > 0:
        off = (predicted - cached) / cached
    return [number(predicted, 0), number(cached, 0), percent(off)]


def _global(one: BalancerStatus, upper: list[BalancerStatus]) -> list[str]:
    status = one.status
    if status is None:
        return [one.name, "unreachable", *[show.NONE] * 5, one.error]
    received = [seen.spills.get(one.region, 0) for seen in upper if seen.spills is not None]
    sent = sum(one.spills.values()) if one.spills is not None else None
    figures = (
        status.get("law_epoch"),
        status.get("under_way"),
        sent,
        sum(received) if received else None,
        status.get("trie_nodes"),
    )
    trouble = status.get("store_trouble")
    return [one.name, "answers", *(number(figure, 0) for figure in figures), f"etcd: {trouble}" if trouble else ""]


def _routes(one: BalancerStatus) -> list[list[str]]:
    """A row for each route but the default."""
    found = (one.status or {}).get("routes_author")
    by = f"{cell(found.get('author'))}: {cell(found.get('why'))}" if isinstance(found, dict) else show.NONE
    return [
        [
            one.name,
            cell(route.get("tenant") or "any"),
            cell(route.get("model") or "any"),
            cell(route.get("policy")),
            _answer(route),
            _millionths(route.get("egress_spent_usd")),
            _millionths(route.get("egress_usd_per_hour")),
            percent(route.get("foreign_quota")),
            by,
        ]
        for route in _parts(one, "routes")
        if (isinstance(found, dict) and found.get("routes") != 0) or _unlike_default(route)
    ]


def _unlike_default(route: dict[str, Any]) -> bool:
    """Whether any of its fields differs from the default."""
    plain = {"policy": "predictive", "answer": "proxy", "tenant": "", "model": "", "usd_weight_ms": 0.0}
    counted = route.get("foreign_quota") is not None or route.get("egress_usd_per_hour") is not None
    return counted or any(route.get(field, value) != value for field, value in plain.items())


def _answer(route: dict[str, Any]) -> str:
    least = route.get("redirect_bytes")
    return cell(route.get("answer")) + (f" from {number(least, 0)} B" if least else "")


def _millionths(usd: object) -> str:
    """The cost of requests is counted in millionths of a dollar."""
    return number(usd * 1e6, 0) if isinstance(usd, int | float) and math.isfinite(usd) else show.NONE


def _prefixes(one: BalancerStatus, region: dict[str, Any]) -> list[str]:
    return [
        one.name,
        cell(region.get("region")),
        _stream(region),
        number(region.get("prefix_nodes"), 0),
        *_error(region),
    ]


def _hubs(one: BalancerStatus) -> list[list[str]]:
    """A row for each hub: whether it is connected, and which of its documents were refused, by reason."""
    return [
        [
            one.name,
            cell(hub.get("hub")),
            "yes" if hub.get("in_contact") else "lost",
            *(number(hub.get(field), 0) for field in ("outages", "revision", "balancers", "reports")),
            cell(hub.get("trouble") or _refused(hub)),
        ]
        for hub in _parts(one, "hubs")
    ]


def _refused(hub: dict[str, Any]) -> str:
    shown = ", ".join(f"{number(n, 0)} {why}" for why, n in as_dict(hub.get("refused")).items())
    return f"refused: {shown}" if shown else ""


def _stream(region: dict[str, Any]) -> str:
    """The state of the region's prefix stream, and for how long its data have been stale."""
    state, behind_s = cell(region.get("prefix_stream")), region.get("prefix_behind_s")
    return f"{state} {number(behind_s)} s" if isinstance(behind_s, int | float) else state


def _balancer(one: BalancerStatus) -> list[str]:
    status = one.status
    if status is None:
        return [one.name, "unreachable", *[show.NONE] * 8, one.error]
    figures = (
        number(status.get(f), 0) for f in ("law_epoch", "under_way", "queued_requests", "queued_tokens", "trie_nodes")
    )
    return [one.name, "answers", *figures, *_error(status), ""]


def _splits(one: BalancerStatus) -> list[list[str]]:
    """A row for each model whose traffic is split there."""
    return [
        [
            one.name,
            model,
            " ".join(f"{version}={weight:g}" for version, weight in (split.get("weights") or {}).items()) or show.NONE,
            number(len(split.get("rules") or [])),
            cell(split.get("sticky")),
            cell(" ".join(split.get("unserved") or [])),
        ]
        for model, split in dicts_by_name((one.status or {}).get("splits")).items()
    ]


def replica_rows(one: BalancerStatus) -> list[list[str]]:
    return [
        [
            one.name,
            cell(replica.get("replica")),
            cell(replica.get("state")),
            number(replica.get("in_flight")),
            number(replica.get("slots")),
            number(replica.get("engine_running"), 0),
            number(replica.get("engine_waiting"), 0),
            number(replica.get("kv_tokens"), 0),
            number(replica.get("kv_tokens_total"), 0),
            _percent(replica.get("engine_kv_usage")),
            _percent(replica.get("engine_hit_share")),
            number(replica.get("prefill_ms_per_token"), 4),
            number(replica.get("tpot_ms"), 2),
            number(replica.get("sample_age_s"), 2),
            cell("; ".join(_remarks(replica))),
        ]
        for replica in _parts(one, "replicas")
    ]


def _remarks(replica: dict[str, Any]) -> list[str]:
    """Remarks beside its figures."""
    remarks = [str(replica[field]) for field in ("why", "slow") if replica.get(field)]
    if replica.get("reports_cached_tokens") is False:
        remarks.append("its answers do not report cached tokens")
    return remarks


def _percent(share: object) -> str:
    """A share as a percentage."""
    return number(100.0 * share, 0) if isinstance(share, int | float) and math.isfinite(share) else show.NONE


def _parts(one: BalancerStatus, field: str) -> list[dict[str, Any]]:
    return dicts((one.status or {}).get(field))
