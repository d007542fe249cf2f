"""A session is remembered by itself, a new one by its parent, and no more of them than bounds say."""

from __future__ import annotations

import pytest

from farhop.balance import homes as homes_module
from farhop.balance.homes import Homes


def test_the_sessions_silent_for_longest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes_module, "SESSIONS_MAX", 2)
    homes = Homes()
    for session in (1, 2, 1, 3):
        homes.moved_in(session, "m", f"r{session}")
    assert [homes.of(session, "m") for session in (1, 2, 3)] == ["r1", None, "r3"]
    assert homes.of(1, "other") is None
    assert len(homes) == 2


def test_a_new_session_begins_where_its_parent_is() -> None:
    homes = Homes()
    homes.moved_in(1, "m", "a")
    assert homes.near(2, 1, "m") == "a"
    assert homes.near(2, 1, "other") == homes.near(2, 0, "m") == homes.near(0, 1, "m") == ""
    homes.moved_in(2, "m", "b")
    assert homes.near(2, 1, "m") == "b"
