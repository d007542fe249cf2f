"""A session is remembered by itself, a new one by its parent, and no more of them than bounds say."""

from __future__ import annotations

import pytest

from farhop.balance import session_affinity as homes_module
from farhop.balance.session_affinity import PARTS, SessionAffinity


def test_the_sessions_silent_for_longest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes_module, "SESSIONS_MAX", 2 * PARTS)
    affinity = SessionAffinity()
    a, b, c, elsewhere = 1, 1 + PARTS, 1 + 2 * PARTS, 2
    for session in (elsewhere, a, b, a, c):
        affinity.moved_in(session, "m", f"r{session}")
    assert [affinity.of(session, "m") for session in (a, b, c)] == [f"r{a}", None, f"r{c}"]
    assert affinity.of(a, "other") is None
    assert affinity.of(elsewhere, "m") == "r2"  # of another part
    assert len(affinity) == 3


def test_a_new_session_begins_where_its_parent_is() -> None:
    affinity = SessionAffinity()
    affinity.moved_in(1, "m", "a")
    assert affinity.near(2, 1, "m") == "a"
    assert affinity.near(2, 1, "other") == affinity.near(2, 0, "m") == affinity.near(0, 1, "m") == ""
    affinity.moved_in(2, "m", "b")
    assert affinity.near(2, 1, "m") == "b"
