"""Replaying tells what a machine decides otherwise, and nothing where it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from farhop.balance import machine, outcome
from farhop.balance.prefix import chain
from farhop_lab.histories import names, recorder
from farhop_lab.histories.replay import amended, replay, same
from regional_lb.scheduler import admission
from topology.law import Law
from topology.load import load, shipped


def kept(path: Path) -> Path:
    law = Law(load(shipped("three-regions")))
    region, tenant = sorted(law.topology.regions)[0], sorted(law.topology.tenants)[0]
    genesis = names.of_region(region, law, "seed")
    one = recorder.HistoryRecorder("one", genesis)
    flow = one.watch(names.made(genesis))
    request = machine.Request("r1", tenant, "nobody's", 1000, 1000, chain.chain(b"x" * 1000, 1), 60.0)
    flow.handle(machine.RequestArrived(request), 1.0)
    flow.handle(machine.ClientLeft("r1"), 2.0)
    recorder.write(path, [one])
    return path


def test_unchanged_machine_replays_without_differences(tmp_path: Path) -> None:
    (one,) = replay(kept(tmp_path / "a.history"))
    assert (one.entries, one.diverging, one.first) == (2, 0, ())


def test_different_decision_is_reported_with_its_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = kept(tmp_path / "a.history")
    refused = admission.Refusal(outcome.QUEUE_FULL, "for a test")
    monkeypatch.setattr(admission, "refusal", lambda *_: refused)
    (one,) = replay(path)
    assert one.diverging == 1
    (found,) = one.first
    assert (found.history, found.position) == ("a: one", 0)
    assert "RequestArrived" in found.done
    assert "model_not_in_region" in found.expected
    assert "queue_full" in found.given


def test_a_machine_that_raises_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: object) -> None:
        raise RuntimeError("no")

    path = kept(tmp_path / "a.history")
    monkeypatch.setattr(admission, "refusal", raises)
    (one,) = replay(path)
    assert (one.diverging, one.first[0].given) == (1, "'RuntimeError: no'")


def test_numbers_agree_within_rounding() -> None:
    assert same((1.0, "a"), (1.0 + 1e-12, "a"), 0.0)
    assert not same((1.0, "a"), (1.0 + 1e-6, "a"), 0.0)


def test_amending_a_history_keeps_new_report_fields_and_refuses_new_decisions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kept(tmp_path / "a.history")
    recorder.write(path, amended(path))
    (one,) = replay(path)
    assert (one.entries, one.diverging) == (2, 0)
    refused = admission.Refusal(outcome.QUEUE_FULL, "for a test")
    monkeypatch.setattr(admission, "refusal", lambda *_: refused)
    with pytest.raises(ValueError, match="a: one, entry 0: another decision"):
        amended(path)
