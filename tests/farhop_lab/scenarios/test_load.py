"""Scenario files: the ready-made ones are sound, and a bad one is told whole, a line for each thing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from farhop_lab.scenarios.load import ScenarioError, built, find, parse, shipped_names
from farhop_lab.studies import routers
from topology.problems import TopologyError

GOOD = """
name: small
sites:
  virginia: {gpu: l4, replicas: 1}
  tokyo: {gpu: l4, replicas: 1}
work:
  - {kind: chat, clients: {virginia: 2}}
"""
ROUTERS = ["farhop", "skywalker"]


def problems(text: str, folder: Path = Path()) -> list[str]:
    with pytest.raises(TopologyError) as caught:
        parse(text, "it", folder, ROUTERS)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("name", shipped_names())
def test_the_ready_made_ones_are_sound(name: str) -> None:
    scenario = find(name, routers.names())
    assert scenario.doc.name == name
    assert scenario.doc.about


def test_the_set_ups_of_the_field_are_there() -> None:
    def counts(name: str) -> tuple[dict[str, int], list[dict[str, int]]]:
        doc = find(name, routers.names()).doc
        return {r: site.replicas for r, site in doc.sites.items()}, [dict(work.clients) for work in doc.work]

    eight = {"virginia": 3, "tokyo": 3, "frankfurt": 2}
    assert counts("arena") == (eight, [{"virginia": 80, "tokyo": 80, "frankfurt": 80}])
    assert counts("wildchat") == (eight, [{"virginia": 40, "tokyo": 30, "frankfurt": 30}])
    twelve = dict.fromkeys(eight, 4)
    assert counts("tree-2") == (twelve, [{"virginia": 40, "tokyo": 20, "frankfurt": 20}])
    assert counts("tree-mixed") == (twelve, [{"virginia": 2}, {"tokyo": 20, "frankfurt": 20}])
    assert counts("diurnal") == (twelve, [{"virginia": 120, "tokyo": 40, "frankfurt": 40}])
    assert counts("push") == ({"virginia": 4}, [{"virginia": 30}])


def test_scenario_survives_serialization() -> None:
    scenario = parse(GOOD, "it", Path(), ROUTERS)
    assert built(scenario.document(), scenario.folder).doc == scenario.doc
    assert scenario.but(seeds=9).doc.seeds == 9
    assert scenario.doc.seeds == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("tokyo: {gpu: l4", "tokio: {gpu: l4"), 'sites.tokio: unknown region "tokio"; did you mean "tokyo"?'),
        (("replicas: 1}\nwork", "replicas: 1}\nrouters: [skywaker]\nwork"), 'did you mean "skywalker"?'),
        (
            ("gpu: l4, replicas: 1}\n  tokyo", "gpu: l40, replicas: 1}\n  tokyo"),
            'sites.virginia.gpu: unknown GPU "l40"',
        ),
        (("clients: {virginia: 2}", "clients: {paris: 2}"), 'work[0].clients.paris: unknown region "paris"'),
        (("clients: {virginia: 2}", "tenant: nobody, clients: {virginia: 2}"), 'unknown tenant "nobody"'),
        (("clients: {virginia: 2}", "clients: {virginia: 2}, per_s: {tokyo: 1}"), "give either `clients` or `per_s`"),
        (("clients: {virginia: 2}", "clients: {virginia: 2}, bursts: {every_s: 5}"), "they are of an open loop"),
        (
            ("clients: {virginia: 2}", "per_s: {virginia: 2}, bursts: {every_s: 5, for_s: 6}"),
            "work[0].bursts.for_s: longer than 5 s",
        ),
        (("{kind: chat, ", "{kind: requests, figures: {renewed_s: 1}, "), "renewed_s is of an open loop"),
        (("{kind: chat, ", "{kind: chat, figures: {turn: 3}, "), "turn: no figure of this kind"),
        (("{kind: chat, ", "{kind: chat, figures: {turns: 0}, "), "must be 1 or more"),
        (("{kind: chat, ", "{kind: agents, "), "no lawful replica holds more than 16384"),
        (("clients: {virginia: 2}", "tenant: eu-only, clients: {virginia: 2}"), "no site lies where the law"),
        (("clients: {virginia: 2}", "tenant: japan-only, clients: {virginia: 2}"), 'forbids entry in "virginia"'),
        (("{kind: chat, clients: {virginia: 2}}", "{kind: azure, path: gone.csv, regions: [tokyo]}"), "gone.csv"),
        (
            ("{kind: chat, clients: {virginia: 2}}", "{kind: azure, path: gone.csv, regions: [tokyo]}"),
            "say `context_tokens: 16384` here, and longer ones are cut",
        ),
        (("name: small", "name: small\nwarm_up_s: 600"), "leave nothing of 600 s"),
        (("name: small", "name: small\ntopology: mars"), 'topology: "mars"'),
        (("name: small", "name: small\nbalancers: {virginia: 0}"), "give it at least one balancer"),
        (
            ("name: small", "name: small\nfaults: [{at_s: 1, what: freeze, region: tokyo}]"),
            "faults[0].to: freeze needs",
        ),
        (("name: small", "name: small\nfaults: [{at_s: 1, what: kill, region: frankfurt}]"), "no site in"),
        (("name: small", "name: small\nfaults: [{at_s: 1, what: oom, region: tokyo, replica: gpu-0}]"), "oom needs it"),
        (
            ("name: small", "name: small\nfaults: [{at_s: 1, what: pause, region: tokyo, replica: gpu-9, for_s: 2}]"),
            "faults[0].replica: pause needs one of its region; tokyo has gpu-0",
        ),
        (
            ("name: small", "name: small\nfaults: [{at_s: 1, what: kill, region: tokyo, replica: gpu-0}]"),
            "kill does not take it",
        ),
        (("name: small", "name: small\nfaults: [{at_s: 999, what: kill, region: tokyo}]"), "after the end at 600 s"),
    ],
)
def test_error_is_one_line_with_its_remedy(change: tuple[str, str], words: str) -> None:
    assert change[0] in GOOD
    found = problems(GOOD.replace(*change))
    assert any(words in line for line in found), found
    assert all("\n" not in line for line in found)


def test_all_errors_are_reported_together() -> None:
    text = (
        GOOD.replace("gpu: l4", "gpu: l5").replace("virginia: 2", "paris: 2").replace("name: small", "name: s\nname: t")
    )
    found = problems(text)
    assert len(found) == 4
    assert sum("unknown GPU" in line for line in found) == 2
    assert any("given twice" in line for line in found)


@pytest.mark.parametrize(
    "content",
    [
        b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,12",
        b"",
        b"\x1f\x8b\x08broken",
        b"nonsense\n1,2,3\n",
    ],
)
def test_a_malformed_trace_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    work = "{kind: azure, path: t.csv, regions: [tokyo], figures: {context_tokens: 8000, max_tokens: 500}}"
    (line,) = problems(GOOD.replace("{kind: chat, clients: {virginia: 2}}", work), tmp_path)
    assert line.startswith("work[0].path: ")
    assert "t.csv" in line


def test_a_trace_that_records_no_regions_cannot_be_placed_as_recorded(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,12,3\n")
    work = "{kind: azure, path: t.csv, regions: [tokyo], place: recorded, figures: {context_tokens: 8000}}"
    (line,) = problems(GOOD.replace("{kind: chat, clients: {virginia: 2}}", work), tmp_path)
    assert line.startswith("work[0].place: azure records no regions")


@pytest.mark.parametrize("name", ["arenaa", "no/such.yaml"])
def test_an_unknown_scenario_names_those_there_are(name: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        find(name, ROUTERS)
    assert "arena" in str(caught.value)


@pytest.mark.parametrize("text", ["- a list", "", "a: [", "x: 2026-13-45"])
def test_document_other_than_a_scenario_is_reported(text: str) -> None:
    assert len(problems(text)) == 1


@pytest.mark.parametrize(
    "content", [b'{"at_s": 0.0, "output_tokens": 3}\n{"at_s": 1.0}\n', b'[\n  {"at_s": 0.0}\n]', b"\x1f\x8b\x08rest"]
)
def test_request_log_is_reported_with_the_command_that_converts_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.jsonl").write_bytes(content)
    with pytest.raises(ScenarioError, match=r"a request log or a trace.*farhop sim import .*t.jsonl --out mine.yaml"):
        find(str(tmp_path / "t.jsonl"), ROUTERS)


def test_a_scenario_may_be_one_line_of_json() -> None:
    assert parse(json.dumps(yaml.safe_load(GOOD)), "s", Path(), ROUTERS).doc.name == "small"


def test_binary_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScenarioError, match="not UTF-8"):
        find(str(tmp_path / "s.yaml"), ROUTERS)
