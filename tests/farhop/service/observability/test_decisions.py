from __future__ import annotations

from farhop.service.observability.decisions import Decisions


def test_a_record_is_built_on_demand() -> None:
    built: list[str] = []
    decisions = Decisions()
    decisions.put("a", lambda: {"n": len(built), "id": built.append("a")})
    assert built == []
    assert decisions.get("a") == {"n": 0, "id": None}
    assert built == ["a"]
    assert decisions.get("b") is None


def test_the_oldest_goes_first() -> None:
    decisions = Decisions(most=3)
    for name in "abcd":
        decisions.put(name, lambda name=name: {"id": name})
    assert len(decisions) == 3
    assert decisions.get("a") is None
    assert [decisions.get(name) for name in "bcd"] == [{"id": name} for name in "bcd"]
    assert decisions.newest(2) == ["d", "c"]


def test_one_decision_reported_twice_is_one_record() -> None:
    decisions = Decisions(most=2)
    for n in range(5):
        decisions.put("a", lambda n=n: {"n": n})
    decisions.put("b", lambda: {"n": 9})
    assert decisions.get("a") == {"n": 4}
    assert len(decisions) == 2


def test_no_record_that_may_not_stay_is_read_before_it_was_judged() -> None:
    decisions = Decisions()
    for name in "abcdef":
        decisions.put(name, lambda name=name: {"id": name})
    work = decisions.forget_unless(lambda record: record()["id"] not in "be")
    assert decisions.get("b") is None
    assert decisions.last(2) == [{"id": "f"}]
    assert decisions.newest(9) == ["f", "d", "c", "a"]
    decisions.put("b", lambda: {"id": "b", "n": 2})  # the law is asked before it is put here
    assert len(list(work)) == 0
    assert decisions.get("b") == {"id": "b", "n": 2}
    assert len(decisions) == 5


def test_records_not_yet_judged_under_one_law_are_dropped_when_the_next_arrives() -> None:
    decisions = Decisions()
    for name in "abcd":
        decisions.put(name, lambda name=name: {"id": name})
    first = decisions.forget_unless(lambda _: True)
    next(first)  # the newest first
    assert len(list(decisions.forget_unless(lambda _: True))) == 1
    assert list(first) == []
    assert decisions.newest(9) == ["d"]
