"""What both tiers' machines decided once they decide still: every kept history, played to the machines of today.

A change that is meant to decide otherwise is recorded anew (README.md here): `diff` says what it changed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from farhop_lab.histories.replay import replay

HISTORIES = sorted(Path(__file__).parent.glob("*.history"))


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
def test_recorded_histories_replay_to_the_same_decisions(path: Path) -> None:
    found = [str(divergence) for one in replay(path) for divergence in one.first]
    assert not found, "\n".join(["", *found[:3]])


def test_there_are_histories_and_they_are_small() -> None:
    assert len(HISTORIES) >= 30
    assert sum(path.stat().st_size for path in HISTORIES) <= 3_000_000
