"""What models are based on, from several sources."""

from __future__ import annotations

import pytest

from topology import lineage
from topology.lineage import Lineages, merged

NONE: frozenset[str] = frozenset()
A, B = frozenset({"a"}), frozenset({"b"})


def test_all_bases_count_and_one_that_is_known_goes_before_not_knowing() -> None:
    assert merged([{"x": A, "y": None, "z": NONE}, {"x": B, "y": NONE, "z": NONE}]) == {
        "x": A | B,
        "y": None,
        "z": NONE,
    }
    assert merged([{"x": None}, {"x": A}, {"x": NONE}]) == {"x": A}


def test_a_learned_base_stays_until_another_is_reported() -> None:
    known = Lineages()
    assert known.learn([{"x": A}])
    assert not known.learn([{"x": A}])
    assert not known.learn([])
    assert known.learn([{"y": NONE}])
    assert known.of == {"x": A, "y": NONE}
    before = known.of
    assert known.learn([{"x": B}])
    assert (known.of["x"], before["x"]) == (B, A)


def test_models_that_are_gone_are_forgotten_before_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage, "MODELS_MAX", 3)
    known = Lineages()
    for name in "abcde":
        known.learn([{name: NONE}])
    assert set(known.of) == set("cde")
