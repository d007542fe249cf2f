"""Decisions as tables: chosen, runners-up, who does not serve, whom the law keeps out; odd records never crash."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop_cli import tables
from farhop_lab.world.world_file import RegionFile, WorldFile


def row(out: str, name: str) -> str:
    return next(line for line in out.splitlines() if f" {name} " in line)


def test_first_token_later_than_the_terms_say_is_explained(capsys, made):
    tables.regions(made.regions("tokyo", [made.candidate("tokyo", ttft_ms=21.25, residual_ms=10.75)]), "which region")
    out = capsys.readouterr().out
    assert "residual ms" in out
    assert "21.2" in row(out, "tokyo")
    assert "10.8" in row(out, "tokyo")


def test_a_global_decision_shows_every_region_once_with_its_reason(capsys, made):
    reasons = made.regions(
        "frankfurt",
        [made.candidate("frankfurt", score=3.0), made.candidate("virginia")],
        not_serving={"virginia": "suspect: channel broken", "osaka": "down: no recent report"},
        unlawful={"tokyo": "tenant eu-only: processing allows only eu"},
    )
    tables.regions(reasons, "which region")
    out = capsys.readouterr().out
    assert "→" in row(out, "frankfurt")
    assert "chosen" in row(out, "frankfurt")
    assert row(out, "virginia").count("12.5") == 7
    assert "suspect: channel broken" in row(out, "virginia")
    assert "not serving: down: no recent report" in row(out, "osaka")
    assert "law: tenant eu-only: processing allows only eu" in row(out, "tokyo")
    assert all(out.count(f" {name} ") == 1 for name in ("frankfurt", "virginia", "osaka", "tokyo"))


def test_a_regional_decision(capsys, made):
    tables.regional_record(made.record(made.replicas("r1")), "virginia")
    out = capsys.readouterr().out
    assert "decided in virginia" in out
    assert "→" in row(out, "r1")
    assert "3.2" in row(out, "r1")
    assert "full" in row(out, "other")
    assert "attempts" not in out  # it was routed to the region that served it, at once


def test_a_version_is_shown_with_why_where_there_is_one(capsys, made):
    tables.replicas({**made.replicas("r1"), "version": "v2", "split": "rule 1: v2"}, "which replica")
    assert "score in ms, version v2 (split: rule 1: v2)" in capsys.readouterr().out
    tables.replicas({**made.replicas("r1"), "version": "", "split": ""}, "which replica")
    assert "version" not in capsys.readouterr().out


def test_attempts_are_shown_where_there_is_something_to_show(capsys, made):
    attempts = [{"target": "tokyo", "outcome": "connect_failed"}, {"target": "virginia", "outcome": "served"}]
    tables.global_record(made.record(made.regions(None, []), attempts=attempts), "virginia")
    assert "attempts: tokyo connect_failed, then virginia served" in capsys.readouterr().out


def test_an_outcome_in_a_line(capsys, made):
    tables.outcome(made.record(None), "global, virginia")
    line = capsys.readouterr().out
    assert "global, virginia: served, status 200" in line
    assert "tokens 9 (4 cached) + 3" in line
    assert "asked for" not in line
    tables.outcome(made.record(None, usage=None, ttft_ms=None), "x")
    assert "tokens" not in capsys.readouterr().out
    tables.outcome(made.record(None, asked_for="auto"), "x")
    assert "model llama-3.1-8b (asked for auto) · 9 prompt" in " ".join(capsys.readouterr().out.split())
    given = {"outcome": "hit", "why": "", "region": "tokyo", "decision": "d7", "age_s": 3.2}
    tables.outcome(made.record(None, answer_cache=given), "x")
    assert "answer cache: hit of d7, made in tokyo 3 s before" in " ".join(capsys.readouterr().out.split())
    tables.outcome(made.record(None, answer_cache={"outcome": "bypass", "why": "sampled", "region": ""}), "x")
    assert "answer cache: bypass (sampled)" in " ".join(capsys.readouterr().out.split())


def test_a_score_s_terms_are_columns_except_those_that_are_zero_for_all(capsys):
    candidates = [
        {"replica": "r1", "score": 30.0, "terms_ms": {"prefill": 25.0, "decode": 5.0, "adapter": 0.0}},
        {"replica": "r2", "score": 7.5, "terms_ms": {"prefill": 7.5, "decode": 0.0, "adapter": 0.0}},
    ]
    tables.replicas({"chosen": "r1", "explored": True, "unit": "ms", "candidates": candidates}, "which replica")
    out = capsys.readouterr().out
    assert "chosen to learn how fast it is" in out
    head = next(line for line in out.splitlines() if "prefill" in line and "decode" in line)
    assert "adapter" not in head
    assert [line.split() for line in out.splitlines() if "25.0" in line] == [["r1", "30.0", "25.0", "5.0"]]


ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["reasons", "candidates", "chosen", "attempts", "region", "not_serving", "unlawful", "usage",
                         "answer_cache"]),
        inner, max_size=4,
    ),
    max_leaves=8,
)  # fmt: skip


@given(
    record=st.dictionaries(st.sampled_from(["reasons", "attempts", "usage", "status", "answer_cache"]), ODD, max_size=4)
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_no_record_of_another_version_crashes_it(record):
    tables.global_record(record, "somewhere")
    tables.regional_record(record, "somewhere")
    tables.outcome(record, "somewhere")


@pytest.mark.parametrize("collector", ["", "http://127.0.0.1:4318"])
def test_a_running_world(capsys, collector):
    region = RegionFile("http://e:1", "http://g:2", "http://r:3", ["http://engine:4"])
    keys = {"anywhere": "sk-x"}
    tables.show_world(WorldFile(os.getpid(), 10.0, "t.yaml", "etcd:5", collector, "m", keys, {"virginia": region}))
    out = capsys.readouterr().out
    for text in ("http://e:1", "http://g:2", "http://r:3", "http://engine:4", "etcd:5", "sk-x", collector or "–"):
        assert text in out


def test_pilot_lights_are_shown_with_what_woke_them():
    shown = {
        "tokyo": {"state": "waking", "why": "paris cannot be used for llama"},
        "rome": {"state": "asleep", "why": ""},
    }
    assert tables.pilot_lights(shown) == [
        "tokyo is a pilot-light: waking (paris cannot be used for llama)",
        "rome is a pilot-light: asleep",
    ]
    assert tables.pilot_lights(None) == tables.pilot_lights({"x": 3}) == []
