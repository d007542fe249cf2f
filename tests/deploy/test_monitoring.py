"""Dashboards, rules and runbooks: every query asks for what there is, every alert is tested and has its page."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import machine
import pytest
import yaml

PROMETHEUS = machine.DEPLOY / "prometheus"
RULES = PROMETHEUS / "farhop.rules.yaml"
PROMTOOL = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
HEADINGS = ("## What it means", "## What to look at", "## What to do")
SUFFIXES = ("_bucket", "_sum", "_count")
PROCESS = {"process_open_fds", "process_max_fds", "process_cpu_seconds_total"}  # prometheus_client's own collector


@cache
def generate() -> Any:
    """deploy/grafana/generate.py, which reads all sources as it is imported: not in every worker."""
    sys.path.insert(0, str(machine.DEPLOY / "grafana"))
    import generate

    return generate


def rules() -> Iterator[dict[str, Any]]:
    # Every worker reads this file, and the loader in C needs a tenth of the time.
    for group in yaml.load(RULES.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))["groups"]:
        yield from group["rules"]


ALERTS = {one["alert"]: one for one in rules() if "alert" in one}


def asked(text: str) -> set[str]:
    """The metrics that a query or a page names, without a histogram's endings."""
    found = set(re.findall(r"\b(?:farhop|process)_[a-z0-9_]*[a-z0-9]\b", text))
    return {
        next((name.removesuffix(end) for end in SUFFIXES if name.removesuffix(end) in generate().METRICS), name)
        for name in found
    }


def test_generated_files_equal_the_committed_ones() -> None:
    files = generate().files()
    stale = [str(path) for path, text in files.items() if not path.exists() or path.read_text() != text]
    assert not stale, f"run `make deploy`: {stale}"
    assert {*(machine.DEPLOY / "grafana").glob("*.json")} == {path for path in files if path.suffix == ".json"}


def test_every_metric_is_in_a_dashboard() -> None:
    shown = {
        name
        for _, panels in generate().DASHBOARDS.values()
        for panel in panels
        for q in panel.queries
        for name in q.metrics
    }
    hidden = set(generate().METRICS) - shown - {"farhop_build_info"}  # it names the regions to choose from
    assert not hidden, f"give each a panel in deploy/grafana/generate.py, then `make deploy`: {sorted(hidden)}"


@pytest.mark.parametrize("path", sorted((machine.DEPLOY / "grafana").glob("*.json")), ids=lambda path: path.stem)
def test_a_dashboard_asks_for_what_there_is(path: Path) -> None:
    made = json.loads(path.read_text())
    queries = [target["expr"] for panel in made["panels"] for target in panel["targets"]]
    assert queries
    for query in queries:
        assert asked(query)
        assert asked(query) <= set(generate().METRICS), query
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in made["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in made["panels"]}) == len(places)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: generate().rate("farhop_gone_total"), "no metric farhop_gone_total"),
        (lambda: generate().rate("farhop_requests_total", "tenant"), "has no label tenant"),
        (lambda: generate().now("farhop_replicas", matchers='colour="red"'), "has no label colour"),
        (lambda: generate().rate("farhop_replicas"), "is no counter"),
        (lambda: generate().now("farhop_requests_total"), "is no gauge"),
        (lambda: generate().quantile(0.9, "farhop_replicas"), "is no histogram"),
    ],
)
def test_a_query_for_what_is_not_there_is_refused(make: Any, expected: str) -> None:
    with pytest.raises(generate().UnknownError, match=expected):
        make()


@PROMTOOL
def test_every_query_is_promql(tmp_path: Path) -> None:
    variables = {"$__rate_interval": "5m", "$region": ".*"}
    queries = [q.expr for _, panels in generate().DASHBOARDS.values() for panel in panels for q in panel.queries]
    for variable, value in variables.items():
        queries = [query.replace(variable, value) for query in queries]
    path = tmp_path / "queries.yaml"
    made = [{"record": f"farhop:panel{number}", "expr": query} for number, query in enumerate(queries)]
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": made}]}))
    assert f"{len(queries)} rules found" in machine.run("promtool", "check", "rules", str(path)).stdout


@PROMTOOL
def test_the_rules_are_sound_and_fire_where_they_should() -> None:
    assert "SUCCESS" in machine.run("promtool", "check", "rules", "--lint=all", "--lint-fatal", str(RULES)).stdout
    assert "SUCCESS" in machine.run("promtool", "test", "rules", str(PROMETHEUS / "farhop.test.yaml")).stdout


def test_rules_ask_for_what_there_is() -> None:
    known = set(generate().METRICS) | PROCESS
    gone = {one.get("alert", one.get("record")): asked(one["expr"]) - known for one in rules()}
    assert not {name: names for name, names in gone.items() if names}


def test_every_alert_is_tested_where_it_fires() -> None:
    tests = yaml.safe_load((PROMETHEUS / "farhop.test.yaml").read_text())["tests"]
    fired = {one["alertname"] for test in tests for one in test.get("alert_rule_test", ()) if one["exp_alerts"]}
    assert fired == set(ALERTS)


def test_every_alert_has_its_page_and_every_page_its_alert() -> None:
    pages = {path.stem: path.read_text() for path in (PROMETHEUS / "runbooks").glob("*.md")}
    assert pages.keys() == ALERTS.keys()
    for name, one in ALERTS.items():
        assert one["annotations"]["runbook"] == f"deploy/prometheus/runbooks/{name}.md"
        assert one["labels"]["severity"] in ("critical", "warning", "info")
        page = pages[name]
        assert page.startswith(f"# {name}\n")
        assert [line for line in page.splitlines() if line.startswith("## ")] == list(HEADINGS), name
        assert asked(page) <= set(generate().METRICS) | PROCESS, name


def test_links_of_the_pages_lead_somewhere() -> None:
    gone = [
        f"{path.name}: {link}"
        for path in machine.DEPLOY.rglob("*.md")
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
        if not (path.parent / link).exists()
    ]
    assert not gone
