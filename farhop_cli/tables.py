"""Decisions as tables: which region and why, which replica and why. For records and for `explain` alike.

The input is an admin port's JSON; a field that is missing is a dash, never a crash.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from farhop.loose_json import as_dict, as_list, dicts, dicts_by_name
from farhop_cli import show
from farhop_cli.show import cell, number

if TYPE_CHECKING:
    from farhop_lab.world.world_file import WorldFile

Record = Mapping[str, Any]

_REGION_COLUMNS = (
    "", "region", ">score", ">ttft ms", ">rtt ms", ">upload ms", ">wait ms", ">hit tok", ">prefill ms", ">tpot ms",
    ">residual ms", ">slots", ">µ$", "why",
)  # fmt: skip
_REPLICA_COLUMNS = ("", "replica", ">score", ">hit tok", ">to prefill", ">backlog tok", ">tpot ms", "why")


def regions(reasons: Record, title: str) -> None:
    """A global decision: the candidates best first, then regions that do not serve, then those that the law
    excludes.
    """
    absent, unlawful = as_dict(reasons.get("not_serving")), as_dict(reasons.get("unlawful"))
    rows = [_candidate(one, reasons.get("chosen"), absent) for one in dicts(reasons.get("candidates"))]
    scored = len(rows)
    named = {row[1] for row in rows}
    rows += [_outside(name, f"not serving: {why}") for name, why in absent.items() if name not in named]
    rows += [_outside(name, f"law: {why}") for name, why in unlawful.items()]
    by = f"; score in {cell(reasons.get('unit'))}" if reasons.get("unit") else ""
    show.table(title + by, _REGION_COLUMNS, rows, dim=frozenset(range(scored, len(rows))))
    _terms(reasons, "region")
    for note in as_list(reasons.get("notes")):
        show.line(cell(note))


def _millionths(usd: object) -> str:
    """Millionths of a dollar, which is what requests cost."""
    return number(usd * 1e6, 1) if isinstance(usd, int | float) and math.isfinite(usd) else show.NONE


def _candidate(one: Record, chosen: object, absent: Mapping[str, Any]) -> list[str]:
    name = cell(one.get("region"))
    is_chosen = one.get("region") == chosen
    figures = [number(one.get(field)) for field in ("score", "ttft_ms", "rtt_ms", "upload_ms", "wait_ms")]
    return [
        "→" if is_chosen else "",
        name,
        *figures,
        number(one.get("hit_tokens"), 0),
        number(one.get("prefill_ms")),
        number(one.get("tpot_ms")),
        number(one.get("residual_ms")),
        number(one.get("slots_free")),
        _millionths(one.get("usd")),
        cell(absent.get(name)) if name in absent else ("chosen" if is_chosen else ""),
    ]


def _outside(name: str, why: str) -> list[str]:
    return ["✗", name, *[""] * (len(_REGION_COLUMNS) - 3), why]


def law(shown: Record) -> str:
    """A balancer's law in a line: its epoch, its source, its author and reason."""
    revision = f" (revision {shown['revision']})" if shown.get("revision") else ""
    signed = f", by {cell(shown.get('author'))}: {cell(shown.get('why'))}" if shown.get("author") else ""
    return f"law of epoch {cell(shown.get('epoch'))}, from {cell(shown.get('source'))}{revision}{signed}"


def pilot_lights(shown: object) -> list[str]:
    """A line for each pilot-light region: whether it sleeps, and why it was woken."""
    return [
        f"{name} is a pilot-light: {cell(one.get('state'))}" + (f" ({one['why']})" if one.get("why") else "")
        for name, one in dicts_by_name(shown).items()
    ]


def replicas(reasons: Record, title: str) -> None:
    """A regional decision: the candidates with their scores."""
    why = "chosen to learn how fast it is" if reasons.get("explored") else "chosen"
    rows = [_replica(one, reasons.get("chosen"), why) for one in dicts(reasons.get("candidates"))]
    by = (
        f", policy {cell(reasons.get('policy'))}, score in {cell(reasons.get('unit'))}" if reasons.get("policy") else ""
    )
    if reasons.get("version"):
        by += f", version {cell(reasons.get('version'))}"
    if reasons.get("split"):
        by += f" (split: {cell(reasons.get('split'))})"
    show.table(title + by, _REPLICA_COLUMNS, rows)
    _terms(reasons, "replica")


def _terms(reasons: Record, what: str) -> None:
    """The terms of each score in milliseconds: the columns add up to it. Terms that are 0 for all are left out."""
    found = [(cell(one.get(what)), number(one.get("score")), as_dict(one.get("terms_ms")))
             for one in dicts(reasons.get("candidates"))]  # fmt: skip
    named = dict.fromkeys(name for _, _, terms in found for name in terms)
    names = [name for name in named if any(terms.get(name) not in (0.0, 0, None) for _, _, terms in found)]
    if names:
        rows = [[who, score, *(number(terms.get(name)) for name in names)] for who, score, terms in found]
        show.table("the score is the sum, in ms, of", (what, ">score", *(f">{name}" for name in names)), rows)


def _replica(one: Record, chosen: object, why: str) -> list[str]:
    is_chosen = one.get("replica") == chosen
    return [
        "→" if is_chosen else "",
        cell(one.get("replica")),
        number(one.get("score")),
        number(one.get("hit_tokens"), 0),
        number(one.get("uncached_tokens"), 0),
        number(one.get("backlog_tokens"), 0),
        number(one.get("tpot_ms")),
        "full" if one.get("full") else (why if is_chosen else ""),
    ]


def global_record(record: Record, place: str) -> None:
    """A global balancer's record of a request."""
    reasons = record.get("reasons")
    if isinstance(reasons, Mapping):
        regions(reasons, f"which region: decided in {place}, {_under(reasons)}")
    _attempts(record)


def regional_record(record: Record, region: str) -> None:
    """A regional balancer's record of a request."""
    reasons = record.get("reasons")
    if isinstance(reasons, Mapping):
        replicas(reasons, f"which replica: decided in {region}")
    _attempts(record)


def outcome(record: Record, place: str) -> None:
    """The outcome of a past request, in a line."""
    usage, model, asked_for = as_dict(record.get("usage")), record.get("model"), record.get("asked_for")
    parts = [
        f"{place}: {cell(record.get('outcome'))}, status {cell(record.get('status'))}",
        f"tenant {cell(record.get('tenant'))}",
        f"model {cell(model)}" + (f" (asked for {cell(asked_for)})" if asked_for not in (None, model) else ""),
        f"{number(record.get('prompt_bytes'))} prompt bytes",
        f"ttft {number(record.get('ttft_ms'))} ms",
        f"{number(record.get('duration_ms'))} ms in all",
    ]
    if usage:
        counts = (number(usage.get(name)) for name in ("prompt_tokens", "cached_tokens", "completion_tokens"))
        parts.append("tokens {} ({} cached) + {}".format(*counts))
    if given := as_dict(record.get("answer_cache")):
        parts.append(_given_again(given))
    show.line(" · ".join(parts))


def _given_again(given: Record) -> str:
    """The request whose answer was given again."""
    line = f"answer cache: {cell(given.get('outcome'))}"
    if given.get("why"):
        line += f" ({cell(given.get('why'))})"
    if given.get("decision"):
        line += f" of {cell(given.get('decision'))}, made in {cell(given.get('region'))}"
        line += f" {number(given.get('age_s'), 0)} s before" if given.get("age_s") else ""
    return line


def show_world(world: WorldFile) -> None:
    """The addresses of a running world, and its demo keys."""
    show.table(
        f"a world of {len(world.regions)} regions, {world.speedup:g} × the real speed, serving {world.model}",
        ("region", "entry for clients", "global admin", "regional admin", "engines"),
        [
            [name, one.entry, one.global_admin, one.regional_admin, ", ".join(one.engines)]
            for name, one in world.regions.items()
        ],
    )
    show.line(f"etcd {world.etcd} · spans {cell(world.collector)}")
    show.line(f"keys: {', '.join(f'{tenant} {key}' for tenant, key in world.keys.items()) or 'none'}")


def _under(reasons: Record) -> str:
    return f"policy {cell(reasons.get('policy'))}, law of epoch {cell(reasons.get('law_epoch'))}"


def _attempts(record: Record) -> None:
    """Its attempts, if there were others than the one that served it."""
    attempts = dicts(record.get("attempts"))
    if len(attempts) > 1 or any(one.get("outcome") != "served" for one in attempts):
        show.line("attempts: " + ", then ".join(f"{one.get('target')} {one.get('outcome')}" for one in attempts))
