"""The Prometheus of deploy/compose: a real one loads its configuration and the rules, and scrapes live balancers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import machine
import pytest
import yaml

from farhop_lab.world.ports import free_ports
from tests.conftest import RunningWorld

SHIPPED = machine.DEPLOY / "compose" / "prometheus.yaml"
RULES = machine.DEPLOY / "prometheus"
LONG = "Asked again, a prompt of several blocks is expected in the cache. " * 60
pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed (Debian: prometheus)"
)


def configured(running: RunningWorld, folder: Path) -> Path:
    """As shipped, but for whom it scrapes, where the rules are, and how often it looks."""
    document: dict[str, Any] = yaml.safe_load(SHIPPED.read_text())
    document["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    document["rule_files"] = [
        pattern.replace("/etc/prometheus/farhop", str(RULES)) for pattern in document["rule_files"]
    ]
    (job,) = document["scrape_configs"]
    runs = list(running.world.regions.values())
    upper, lower = job["static_configs"]
    upper["targets"] = [run.global_admin.removeprefix("http://") for run in runs]
    lower["targets"] = [run.regional_admin.removeprefix("http://") for run in runs]
    path = folder / "prometheus.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


@pytest.fixture
def prometheus(running: RunningWorld, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("prometheus")
    path = configured(running, folder)
    checked = machine.run("promtool", "check", "config", str(path))
    assert "SUCCESS" in checked.stdout
    (port,) = free_ports(1)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["prometheus", f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def queried(url: str, path: str, **query: str) -> Any:
    asked = f"{url}{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
    with urllib.request.urlopen(asked, timeout=10.0) as response:
        return json.load(response)["data"]


def until(true: Any, within_s: float = 30.0) -> Any:
    end = time.monotonic() + within_s
    while True:
        try:
            found = true()
        except OSError:
            found = None
        if found or time.monotonic() > end:
            return found
        time.sleep(0.2)


def test_prometheus_scrapes_live_balancers_and_evaluates_every_rule(running: RunningWorld, prometheus: str) -> None:
    url, balancers = prometheus, 2 * len(running.world.regions)

    def scraped() -> bool:
        targets = queried(url, "/api/v1/targets")["activeTargets"]
        return len(targets) == balancers and all(one["health"] == "up" for one in targets)

    assert until(scraped), queried(url, "/api/v1/targets")
    info = queried(url, "/api/v1/query", query="count by (tier) (farhop_build_info)")["result"]
    assert {one["metric"]["tier"]: int(one["value"][1]) for one in info} == {
        "global": balancers // 2, "regional": balancers // 2,
    }  # fmt: skip
    assert until(lambda: queried(url, "/api/v1/query", query="farhop_desired_replicas")["result"])
    shipped = sum(len(group["rules"]) for group in yaml.safe_load((RULES / "farhop.rules.yaml").read_text())["groups"])

    def evaluated() -> bool:
        rules = [rule for group in queried(url, "/api/v1/rules")["groups"] for rule in group["rules"]]
        return len(rules) == shipped and all(rule["health"] == "ok" for rule in rules)

    assert until(evaluated), queried(url, "/api/v1/rules")


def test_dashboard_panels_show_what_live_balancers_report(running: RunningWorld, prometheus: str) -> None:
    """Every query is one that Prometheus answers; and where a request has been, the panels have something to show."""
    panels = {
        (path.stem, panel["title"], target["expr"])
        for path in sorted((machine.DEPLOY / "grafana").glob("*.json"))
        for panel in json.loads(path.read_text())["panels"]
        for target in panel["targets"]
    }

    def series(query: str) -> list[Any]:
        asked = query.replace("$__rate_interval", "20s").replace("$region", ".*")
        return list(queried(prometheus, "/api/v1/query", query=asked)["result"])

    def counted(expression: str) -> bool:
        """Whether all that it names is told now, by somebody who lives."""
        return all(series(selector) for selector in re.findall(r"\bfarhop_[a-z0-9_]+(?:\{[^}]*\})?", expression))

    assert until(lambda: series("farhop_in_flight"))
    waiting = set(panels)
    # A rate needs two samples: requests go on until each panel has shown something, or names what nothing counted.
    end = time.monotonic() + 60.0
    while missing := {one for one in waiting if counted(one[2])}:
        assert time.monotonic() < end, sorted(missing)
        for region in running.world.regions:
            assert running.ask(region, "anywhere", LONG, max_tokens=4).error is None
        waiting -= {one for one in missing if series(one[2])}
    assert len(panels - waiting) > len(panels) / 2
