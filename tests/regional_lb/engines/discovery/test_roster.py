from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regional_lb.engines.config import ReplicaConfig
from regional_lb.engines.discovery import roster as module
from regional_lb.engines.discovery.roster import Roster
from regional_lb.engines.discovery.source import Failed, Found


@cache
def replica(name: str, host: str, port: int = 1) -> ReplicaConfig:
    return ReplicaConfig(name=name, url=f"http://{host}:{port}", models=["m"])


def labels(roster: Roster) -> list[str]:
    return [one.label for one in roster.merged()[0]]


def test_of_a_source_that_fails_the_last_list_stands_and_an_empty_list_is_one() -> None:
    roster = Roster([replica("fixed", "f")], ["a", "b"])
    assert roster.status()[0]["trouble"] == "has not answered yet"
    assert roster.take(Found("a", (replica("one", "1"),)))
    assert roster.take(Found("b", (replica("two", "2"),)))
    assert not roster.take(Found("b", (replica("two", "2"),), ("left one out",)))
    assert not roster.take(Failed("a", "gone fishing"))
    assert labels(roster) == ["fixed", "one", "two"]
    found = roster.status()[0]
    assert (found["trouble"], found["replicas"]) == ("gone fishing", 1)
    assert roster.status()[1]["problems"] == ["left one out"]
    assert roster.take(Found("a", ()))
    assert labels(roster) == ["fixed", "two"]
    assert roster.status()[0]["trouble"] == ""


def test_an_address_and_a_name_stand_once_and_the_first_source_wins() -> None:
    roster = Roster([replica("one", "1")], ["a", "b"])
    roster.take(Found("b", (replica("b", "2"), replica("again", "2"))))
    roster.take(Found("a", (replica("other", "1"), replica("one", "9"), replica("b2", "2"))))
    kept, left_out = roster.merged()
    assert [one.label for one in kept] == ["one", "b2"]
    assert [(out.source, out.replica, out.reason) for out in left_out] == [
        ("a", "other", "duplicate"), ("a", "one", "duplicate"), ("b", "b", "duplicate"), ("b", "again", "duplicate"),
    ]  # fmt: skip
    assert left_out[0].why == "1:1 is there already, from configuration; announce it once"
    assert "another of this name" in left_out[1].why


def test_no_more_than_one_balancer_can_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPLICAS_MAX", 2)
    roster = Roster([replica("one", "1")], ["a"])
    roster.take(Found("a", (replica("two", "2"), replica("three", "3"))))
    kept, left_out = roster.merged()
    assert [one.label for one in kept] == ["one", "two"]
    assert [(out.replica, out.reason) for out in left_out] == [("three", "limit")]


SETS = st.lists(st.tuples(st.sampled_from("pqrs"), st.sampled_from("1234")), max_size=5)
STEPS = st.lists(st.tuples(st.sampled_from("abc"), st.one_of(st.none(), SETS)), max_size=12)


@settings(derandomize=True, max_examples=80, deadline=None)
@given(SETS, STEPS)
def test_the_roster_is_what_a_naive_reading_of_the_rules_gives(
    fixed: list[tuple[str, str]], steps: list[tuple[str, list[tuple[str, str]] | None]]
) -> None:
    roster = Roster([replica(name, host) for name, host in fixed], "abc")
    last: dict[str, list[tuple[str, str]]] = {"": fixed, "a": [], "b": [], "c": []}
    for source, text in steps:
        before = labels(roster)
        if text is None:
            assert not roster.take(Failed(source, "why"))
            assert labels(roster) == before
        else:
            roster.take(Found(source, tuple(replica(name, host) for name, host in text)))
            last[source] = text
        naive: list[tuple[str, str]] = []
        for name, host in (one for words in last.values() for one in words):
            if name not in [n for n, _ in naive] and host not in [h for _, h in naive]:
                naive.append((name, host))
        kept, left_out = roster.merged()
        assert [(one.label, one.address.host) for one in kept] == naive
        assert len(kept) + len(left_out) == sum(len(words) for words in last.values())
