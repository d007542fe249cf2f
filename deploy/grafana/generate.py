"""Makes the Grafana dashboards from the metrics that the code exposes, and copies the rules into the chart.

`make deploy` runs it. A query names metrics and labels of the registry (tests/house/reference.py reads it), or this
fails: no panel can go on asking for what is gone. Panels' descriptions are the metrics' own.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests" / "house"))

import reference  # noqa: E402

METRICS = {one.name: one for one in reference.metrics()}
ALWAYS = ("tier", "region", "instance")  # of every series; Prometheus sets `instance`
SELECTED = 'region=~"$region"'
RULES = ROOT / "deploy" / "prometheus" / "farhop.rules.yaml"
WIDTH, HEIGHT, COLUMNS = 12, 8, 2


class UnknownError(Exception):
    """A panel asks for a metric or label that is not there; the text names both."""


@dataclass(frozen=True)
class Query:
    """One line of a panel: PromQL, what its series are called, and the metrics it reads."""

    expr: str
    legend: str
    metrics: tuple[str, ...]


@dataclass(frozen=True)
class Panel:
    """A graph of one or more queries in one unit (Grafana's name for it)."""

    title: str
    unit: str
    queries: tuple[Query, ...]


def _known(name: str, by: tuple[str, ...], matchers: str = "") -> None:
    metric = METRICS.get(name)
    if metric is None:
        raise UnknownError(f"no metric {name}; see docs/reference/metrics.md")
    labels = {*ALWAYS, *(label.strip(" `") for label in metric.labels.split(","))}
    used = {*by, *(part.split("=")[0].rstrip("!").strip() for part in matchers.split(",") if part)}
    if strangers := used - labels:
        raise UnknownError(f"{name} has no label {', '.join(sorted(strangers))}")


def _at(name: str, matchers: str) -> str:
    return f"{name}{{{', '.join(filter(None, (SELECTED, matchers)))}}}"


def _legend(by: tuple[str, ...]) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in by)


def rate(name: str, *by: str, matchers: str = "") -> Query:
    """How fast a counter grows, a second, summed by labels."""
    _known(name, by, matchers)
    if METRICS[name].kind != "counter":
        raise UnknownError(f"{name} is no counter")
    return Query(f"sum by ({', '.join(by)}) (rate({_at(name, matchers)}[$__rate_interval]))", _legend(by), (name,))


def now(name: str, *by: str, how: str = "sum", matchers: str = "") -> Query:
    """A gauge, summed by labels, or the `max` or `min` of them."""
    _known(name, by, matchers)
    if METRICS[name].kind != "gauge":
        raise UnknownError(f"{name} is no gauge")
    return Query(f"{how} by ({', '.join(by)}) ({_at(name, matchers)})", _legend(by), (name,))


def quantile(share: float, name: str, *by: str, matchers: str = "") -> Query:
    """A quantile of a histogram."""
    _known(name, by, matchers)
    if METRICS[name].kind != "histogram":
        raise UnknownError(f"{name} is no histogram")
    buckets = f"sum by ({', '.join((*by, 'le'))}) (rate({_at(f'{name}_bucket', matchers)}[$__rate_interval]))"
    return Query(f"histogram_quantile({share:g}, {buckets})", f"p{100 * share:g} {_legend(by)}", (name,))


def mean(name: str, *by: str, matchers: str = "") -> Query:
    """The mean of a summary or a histogram."""
    _known(name, by, matchers)
    parts = [
        f"sum by ({', '.join(by)}) (rate({_at(name + end, matchers)}[$__rate_interval]))" for end in ("_sum", "_count")
    ]
    return Query(" / ".join(parts), _legend(by), (name,))


def share(part: Query, whole: Query) -> Query:
    """One query as a share of another."""
    return Query(f"{part.expr} / ({whole.expr} > 0)", part.legend, (*part.metrics, *whole.metrics))


REQUESTS, TTFT, TPOT = "farhop_requests_total", "farhop_ttft_seconds", "farhop_tpot_seconds"
ENTRY, BELOW = 'tier="global"', 'tier="regional"'

DASHBOARDS: dict[str, tuple[str, list[Panel]]] = {
    "fleet": ("Farhop: fleet", [
        Panel("Requests a second, by entry", "reqps", (rate(REQUESTS, "region", matchers=ENTRY),)),
        Panel("Requests a second, by how they ended", "reqps", (rate(REQUESTS, "reason", "code", matchers=ENTRY),)),
        Panel("Time to first token", "s", tuple(quantile(q, TTFT, matchers=ENTRY) for q in (0.5, 0.9, 0.99))),
        Panel("Time to first token by entry, p90", "s", (quantile(0.9, TTFT, "region", matchers=ENTRY),)),
        Panel("Time per output token", "s", tuple(quantile(q, TPOT, matchers=ENTRY) for q in (0.5, 0.9, 0.99))),
        Panel("Duration", "s", tuple(quantile(q, "farhop_duration_seconds", matchers=ENTRY) for q in (0.5, 0.9, 0.99))),
        Panel("Regions that may be chosen", "short", (now("farhop_region_up", "target", how="min"),)),
        Panel("Replicas wanted so that any region may be lost", "short", (now("farhop_desired_replicas", "target", "model", matchers=ENTRY, how="max"),)),
        Panel("Pilot-light regions: 0 asleep, 0.5 waking, 1 awake", "short", (now("farhop_pilot_light_awake", "target", how="max"),)),
        Panel("Age of regions' reports", "s", (now("farhop_report_age_seconds", "target", how="max"),)),
        Panel("Attempts a second, by region and outcome", "reqps", (rate("farhop_attempts_total", "target", "outcome", matchers=ENTRY),)),
        Panel("Mean time to first token, by region that served", "s", (mean("farhop_target_ttft_seconds", "target", matchers=ENTRY),)),
        Panel("Requests a second, by model", "reqps", (rate("farhop_model_requests_total", "model", "code", matchers=ENTRY),)),
        Panel("Tokens a second, by model", "short", (rate("farhop_model_tokens_total", "model", "kind", matchers=ENTRY),)),
        Panel("Time to first token by model, p90", "s", (quantile(0.9, "farhop_model_ttft_seconds", "model", matchers=ENTRY),)),
        Panel("Time per output token by model, p90", "s", (quantile(0.9, "farhop_model_tpot_seconds", "model", matchers=ENTRY),)),
        Panel("Requests under way", "short", (now("farhop_in_flight", "tier", "region"),)),
        Panel("Tokens a second", "short", (rate("farhop_tokens_total", "kind", matchers=ENTRY),)),
        Panel("Answer cache: requests a second", "reqps", (rate("farhop_answer_cache_requests_total", "outcome", "reason"),)),
        Panel("Answer cache: tokens saved a second", "short", (rate("farhop_answer_cache_saved_tokens_total", "region", "kind"),)),
        Panel("Answer cache: bytes, and allowed", "bytes", (
            now("farhop_answer_cache_bytes", "instance", "what"), now("farhop_answer_cache_bytes_max", "instance"))),
        Panel("Answer cache: answers", "short", (now("farhop_answer_cache_answers", "instance"),)),
    ]),
    "region": ("Farhop: region", [
        Panel("Requests a second, by how they ended", "reqps", (rate(REQUESTS, "reason", "code", matchers=BELOW),)),
        Panel("Refused a second, by reason", "reqps", (rate("farhop_refusals_total", "tier", "reason"),)),
        Panel("Waiting requests", "short", (now("farhop_queued_requests", "region", "instance"),)),
        Panel("Waiting prompt tokens", "short", (now("farhop_queued_tokens", "region", "instance"),)),
        Panel("Replicas by state", "short", (now("farhop_replicas", "region", "state", how="max"),)),
        Panel("Replicas wanted, and there", "short", (
            now("farhop_desired_replicas", "region", "model", matchers=BELOW, how="max"), now("farhop_ready_replicas", "region", "model", how="max"))),
        Panel("Models by mode", "short", (now("farhop_models_by_mode", "region", "mode", how="max"),)),
        Panel("Time to first token, within the region", "s", tuple(quantile(q, TTFT, matchers=BELOW) for q in (0.5, 0.9, 0.99))),
        Panel("Promised time to first token was off by, p90", "s", (quantile(0.9, "farhop_ttft_error_seconds", "tier", "direction"),)),
        Panel("Promised time to first token was off by, share of what was seen, p50", "percentunit", (quantile(0.5, "farhop_ttft_error_ratio", "tier"),)),
        Panel("Versions: requests a second", "reqps", (rate("farhop_version_requests_total", "version", "split", "code"),)),
        Panel("Versions: mean time to first token", "s", (mean("farhop_version_ttft_seconds", "version"),)),
        Panel("Other balancers connected", "short", (now("farhop_peers_connected", "region", "instance"),)),
        Panel("Since peers' last message", "s", (now("farhop_peer_age_seconds", "instance", "peer", how="max"),)),
        Panel("Event loop late by", "s", (now("farhop_loop_lag_seconds", "tier", "instance", how="max"),)),
        Panel("Event loop late, share of time", "percentunit", (rate("farhop_loop_late_seconds_total", "tier", "instance"),)),
        Panel("Bytes held, of those allowed", "percentunit", (
            share(now("farhop_buffered_bytes", "instance"), now("farhop_buffered_bytes_max", "instance")),
            share(now("farhop_buffered_answer_bytes", "instance"), now("farhop_buffered_bytes_max", "instance")))),
        Panel("Connections", "short", (now("farhop_connections", "instance", "listener"), now("farhop_upstream_connections", "instance"))),
        Panel("Request slots used, tenants with bytes held", "short", (
            now("farhop_request_slots_used", "instance"), now("farhop_buffering_tenants", "instance"))),
        Panel("Refused before a request was read", "reqps", (rate("farhop_connections_refused_total", "reason"),)),
        Panel("Large bodies, unknown fields", "reqps", (
            rate("farhop_large_bodies_total", "how"), rate("farhop_unknown_body_fields_total", "field"))),
        Panel("Samples that made no sense", "short", (rate("farhop_invalid_samples_total", "instance"),)),
    ]),
    "replica": ("Farhop: replica", [
        Panel("Requests at each replica", "short", (now("farhop_replica_in_flight", "replica"),)),
        Panel("What each replica may use of its slots", "percentunit", (now("farhop_replica_usable_ratio", "replica", how="min"),)),
        Panel("KV cache in use", "percentunit", (now("farhop_replica_kv_cache_usage_ratio", "replica", how="max"),)),
        Panel("Ejections", "short", (rate("farhop_replica_ejections_total", "region", "reason"),)),
        Panel("Gateways: requests open", "short", (now("farhop_picker_streams", "region"),)),
        Panel("Gateways: connected to a later endpoint", "short", (rate("farhop_picker_moved_total", "region"),)),
        Panel("Gateways: not served", "short", (rate("farhop_picker_misled_total", "region", "reason"),)),
        Panel("Gateways that fail open", "short", (now("farhop_picker_fails_open", "region", how="max"),)),
        Panel("Attempts a second, by outcome", "reqps", (rate("farhop_attempts_total", "target", "outcome", matchers=BELOW),)),
        Panel("Streams whose engine broke, and streams that could not go on", "reqps", (
            rate("farhop_resumes_total", "region", "outcome", "reason"),)),
        Panel("Tokens computed again where streams went on", "short", (rate("farhop_resume_recomputed_tokens_total", "region"),)),
        Panel("Kept of streams, so that they can go on", "bytes", (now("farhop_resume_kept_bytes", "region", "instance"),)),
        Panel("Mean time to first token", "s", (mean("farhop_target_ttft_seconds", "target", matchers=BELOW),)),
        Panel("Time per output token", "s", tuple(quantile(q, TPOT, matchers=BELOW) for q in (0.5, 0.9, 0.99))),
        Panel("Pages, probes and events refused", "short", (rate("farhop_reports_refused_total", "reason", matchers=BELOW),)),
    ]),
    "accounts": ("Farhop: usage, audit, limits", [
        Panel("Usage records a second, by what became of them", "reqps", (rate("farhop_usage_records_total", "region", "result"),)),
        Panel("Usage records sent on", "reqps", (rate("farhop_usage_deliveries_total", "region", "result"),)),
        Panel("Usage cannot be written, or sent on", "bool", (now("farhop_usage_trouble", "region", "part", how="max"),)),
        Panel("Usage records on the disk", "bytes", (now("farhop_usage_spool_bytes", "region", "instance"),)),
        Panel("Starts after a kill", "short", (rate("farhop_usage_unclean_starts_total", "region"),)),
        Panel("Entries of audit logs", "short", (now("farhop_audit_entries", "region", "instance"),)),
        Panel("Entries that no checkpoint names yet", "short", (now("farhop_audit_unsigned", "region", "instance"),)),
        Panel("Decisions that audit could not take", "reqps", (rate("farhop_audit_lost_total", "region"),)),
        Panel("Audit cannot be written", "bool", (now("farhop_audit_trouble", "region", how="max"),)),
        Panel("Refused by limits", "reqps", (rate("farhop_limits_refused_total", "region", "kind", "whose"),)),
        Panel("Used of the limit that is used most, by its home", "percentunit", (
            now("farhop_limit_used_ratio", "region", "kind", how="max"),)),
        Panel("A limit has been used to 90 % or more for", "s", (
            now("farhop_limit_nearly_used_seconds", "region", how="max"),)),
        Panel("Roots of limits that do not answer", "bool", (
            now("farhop_limit_root_silent", "tier", "region", "target", how="max"),)),
    ]),
    "law-and-spill": ("Farhop: law, spill, trust", [
        Panel("Requests the law turned away", "reqps", (rate("farhop_residency_denials_total", "tier", "region", "reason"),)),
        Panel("Epoch of the law in force", "short", (now("farhop_law_epoch", "tier", "region", "instance", how="max"),)),
        Panel("A law is refused", "bool", (now("farhop_law_rejected", "tier", "region", how="max"),)),
        Panel("Documents in etcd that are ignored", "short", (now("farhop_ignored_documents", "tier", "region", how="max"),)),
        Panel("Reports and documents refused", "short", (rate("farhop_reports_refused_total", "region", "reason", matchers=ENTRY),)),
        Panel("Spilled a second, by entry and target", "reqps", (rate("farhop_spilled_requests_total", "region", "target"),)),
        Panel("Share that spills", "percentunit", (
            share(rate("farhop_spilled_requests_total", "region", matchers=ENTRY), rate(REQUESTS, "region", matchers=ENTRY)),)),
        Panel("Configuration: generation in force", "short", (now("farhop_config_generation", "tier", "region", "instance", how="max"),)),
        Panel("Configuration: refused, awaiting a restart", "short", (
            now("farhop_config_rejected", "tier", "region", how="max"),
            now("farhop_config_awaits_restart", "tier", "region", how="max"))),
        Panel("Configuration read again", "short", (rate("farhop_config_reloads_total", "region", "result"),)),
        Panel("Admin port: refused", "reqps", (rate("farhop_admin_requests_refused_total", "region", "reason"),)),
        Panel("Console: who looks", "short", (now("farhop_console_viewers", "tier", "region", how="sum"),)),
        Panel("Handshakes refused", "short", (rate("farhop_handshakes_refused_total", "region", "listener", "reason"),)),
        Panel("Certificates end at", "dateTimeAsIso", (
            Query(f"min by (tier, region, part) ({_at('farhop_certificate_expiry_timestamp_seconds', '')}) * 1000",
                  "{{tier}} {{region}} {{part}}", ("farhop_certificate_expiry_timestamp_seconds",)),)),
        Panel("Certificates that were not taken up", "bool", (now("farhop_certificate_stale", "tier", "region", "part", how="max"),)),
        Panel("Age of identity providers' keys", "s", (now("farhop_issuer_keys_age_seconds", "tier", "region", "issuer", how="max"),)),
    ]),
    "entry-dns": ("Farhop: entry by DNS", [
        Panel("Questions a second", "reqps", (rate("farhop_dns_queries_total", "region"),)),
        Panel("What they met", "reqps", (rate("farhop_dns_events_total", "region", "event"),)),
        Panel("Answers by the entry named first", "reqps", (rate("farhop_dns_led_total", "target"),)),
        Panel("Share that each entry takes", "percentunit", (now("farhop_dns_entry_share", "region", "target", how="min"),)),
        Panel("Faults and restarts of workers", "short", (
            rate("farhop_dns_worker_faults_total", "region"), rate("farhop_dns_worker_restarts_total", "region"))),
        Panel("Networks that entries measured, and those led elsewhere for it", "short", (
            now("farhop_dns_networks_learned", "region", how="max"), now("farhop_dns_networks_moved", "region", how="max"))),
        Panel("The last view took to prepare", "ms", (now("farhop_dns_view_prepared_ms", "region", how="max"),)),
    ]),
    "prefix-prediction": ("Farhop: prefix prediction", [
        Panel("Prompt tokens expected to be cached", "short", (rate("farhop_prefix_predicted_tokens_total", "tier", "source"),)),
        Panel("Prompt tokens that were", "short", (rate("farhop_prefix_actual_tokens_total", "tier", "source"),)),
        Panel("Off by, as a share of what was expected", "percentunit", (
            share(rate("farhop_prefix_error_tokens_total", "region", "source", matchers=BELOW),
                  rate("farhop_prefix_predicted_tokens_total", "region", "source", matchers=BELOW)),)),
        Panel("Share of prompts that was cached", "percentunit", (
            share(rate("farhop_tokens_total", "region", matchers=f'{BELOW}, kind="cached"'),
                  rate("farhop_tokens_total", "region", matchers=f'{BELOW}, kind="prompt"')),)),
        Panel("At the entry: found of what was expected, by region", "percentunit", (
            share(rate("farhop_region_prefix_actual_tokens_total", "target"),
                  rate("farhop_region_prefix_predicted_tokens_total", "target")),)),
        Panel("Trust in expected hits", "percentunit", (now("farhop_region_cache_hit_calibration", "target", how="min"),)),
        Panel("Nodes of the prefix trie", "short", (now("farhop_prefix_trie_nodes", "tier", "region", "instance", how="max"),)),
        Panel("Replicas whose cache is known wholly", "short", (now("farhop_kv_exact_replicas", "region", how="max"),)),
        Panel("Blocks reported", "short", (now("farhop_kv_blocks", "region", how="max"),)),
        Panel("Blocks that made no sense", "short", (rate("farhop_kv_blocks_ignored_total", "region", "reason"),)),
        Panel("Prompts read as tokens, or not", "reqps", (
            rate("farhop_tokenized_prompts_total", "region"), rate("farhop_untokenized_prompts_total", "region", "reason"))),
        Panel("Prompts that an engine counts otherwise", "reqps", (
            rate("farhop_miscounted_prompts_total", "region"), rate("farhop_mispredicted_prompts_total", "region"))),
    ]),
    "anycast": ("Farhop: anycast", [
        Panel("Announced, draining", "bool", (
            now("farhop_anycast_announced", "region", "instance", how="max"),
            now("farhop_anycast_draining", "region", "instance", how="max"))),
        Panel("Not what is wanted, for", "s", (now("farhop_anycast_differs_seconds", "region", "instance", how="max"),)),
        Panel("Entry fit", "bool", (now("farhop_anycast_entry_fit", "region", "instance", how="min"),)),
        Panel("Kept as the last healthy site", "bool", (now("farhop_anycast_kept_as_last", "region", "instance", how="max"),)),
        Panel("BGP sessions", "short", (now("farhop_anycast_sessions", "region", "instance"),)),
        Panel("BGP session of each peer", "bool", (now("farhop_anycast_session_up", "region", "peer", how="min"),)),
        Panel("Updates a second", "short", (rate("farhop_anycast_updates_total", "region", "phase"),)),
        Panel("Held back by the update budget, for", "s", (now("farhop_anycast_held_seconds", "region", "instance", how="max"),)),
        Panel("Speakers ended by force", "short", (rate("farhop_anycast_speaker_kills_total", "region", "instance"),)),
    ]),
}  # fmt: skip


def dashboard(name: str) -> dict[str, Any]:
    """As Grafana takes it."""
    title, panels = DASHBOARDS[name]
    return {
        "uid": f"farhop-{name}",
        "title": title,
        "tags": ["farhop"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [_datasource(), _region()]},
        "links": [{"type": "dashboards", "title": "Farhop", "tags": ["farhop"], "asDropdown": True, "keepTime": True}],
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus"}


def _region() -> dict[str, Any]:
    return {
        "name": "region",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "$datasource"},
        "query": "label_values(farhop_build_info, region)",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    said = dict.fromkeys(f"`{name}`: {METRICS[name].meaning}" for query in panel.queries for name in query.metrics)
    source = {"type": "prometheus", "uid": "$datasource"}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": "\n\n".join(said),
        "datasource": source,
        "gridPos": {
            "x": number % COLUMNS * WIDTH, "y": number // COLUMNS * HEIGHT, "w": WIDTH, "h": HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": {"fillOpacity": 8}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": source, "expr": query.expr, "legendFormat": query.legend}
            for index, query in enumerate(panel.queries)
        ],
    }  # fmt: skip


def files() -> dict[Path, str]:
    """Everything that is made, by where it stands."""
    made = {HERE / f"{name}.json": json.dumps(dashboard(name), indent=1) + "\n" for name in DASHBOARDS}
    return {**made, ROOT / "deploy" / "kubernetes" / "farhop" / "files" / RULES.name: RULES.read_text()}


def main() -> None:
    """Write them."""
    for path, text in files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
