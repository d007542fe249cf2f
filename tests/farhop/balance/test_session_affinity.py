"""A session is remembered by itself, a new one by its parent, and no more of them than bounds say."""

from __future__ import annotations

import pytest

from farhop.balance import session_affinity as homes_module
from farhop.balance.session_affinity import SessionAffinity


def test_the_sessions_silent_for_longest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes_module, "SESSIONS_MAX", 2)
    affinity = SessionAffinity()
    for session in (1, 2, 1, 3):
        affinity.moved_in(session, "m", f"r{session}")
    assert [affinity.of(session, "m") for session in (1, 2, 3)] == ["r1", None, "r3"]
    assert affinity.of(1, "other") is None
    assert len(affinity) == 2


def test_a_new_session_begins_where_its_parent_is() -> None:
    affinity = SessionAffinity()
    affinity.moved_in(1, "m", "a")
    assert affinity.near(2, 1, "m") == "a"
    assert affinity.near(2, 1, "other") == affinity.near(2, 0, "m") == affinity.near(0, 1, "m") == ""
    affinity.moved_in(2, "m", "b")
    assert affinity.near(2, 1, "m") == "b"
