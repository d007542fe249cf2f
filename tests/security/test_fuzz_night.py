"""The fuzz targets, for a while; `fuzz_bodies.py` says what they look for."""

from __future__ import annotations

import fuzz_bodies
import fuzz_night
import pytest


def test_fuzzed_requests_always_end_in_an_outcome() -> None:
    found = fuzz_night.rounds(seed=2, first=0, count=2500)
    assert found["rounds"] == 2500
    assert found["bodies passed"] > 300  # most of it must not be garbage
    assert found["requests passed"] > 600


def test_finding_has_the_command_that_reproduces_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> bool:
        raise ValueError("a bug")

    monkeypatch.setattr(fuzz_bodies, "check", broken)
    with pytest.raises(fuzz_night.FindingError, match=r"a bug[^@]*--seed 2 --first 40 --rounds 1"):
        fuzz_night.rounds(seed=2, first=40, count=5)
