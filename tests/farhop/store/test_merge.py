"""The rule by which several hubs are one, step by step and over random histories."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhop.store.contract import Change, ChangeKind, KeyValue
from farhop.store.merge import Merged, chosen, stamp

PUT, DELETE, SNAPSHOT, LOST = ChangeKind.PUT, ChangeKind.DELETE, ChangeKind.SNAPSHOT, ChangeKind.LOST


def listing(**values: str) -> Change:
    entries = tuple(KeyValue(key, value.encode(), n) for n, (key, value) in enumerate(values.items(), 1))
    return Change(SNAPSHOT, 7, entries=entries)


def put(key: str, value: str) -> Change:
    return Change(PUT, 8, key, value.encode())


def kinds(changes: list[Change]) -> list[tuple[ChangeKind, object]]:
    return [
        (c.kind, {e.key: e.value.decode() for e in c.entries} if c.kind is SNAPSHOT else (c.key, c.value.decode()))
        for c in changes
    ]


def both(**values: str) -> Merged:
    merged = Merged(("a", "b"))
    merged.take("a", listing(**values))
    merged.take("b", listing(**values))
    return merged


def test_the_first_snapshot_waits_for_every_hub_that_may_answer() -> None:
    merged = Merged(("a", "b"))
    assert merged.take("a", listing(k="1")) == []
    assert merged.take("a", put("k", "2")) == []
    assert kinds(merged.take("b", listing(l="3"))) == [(SNAPSHOT, {"k": "2", "l": "3"})]
    merged = Merged(("a", "b"))
    assert merged.take("b", Change(LOST, why="gone")) == []
    assert kinds(merged.take("a", listing(k="1"))) == [(SNAPSHOT, {"k": "1"})]


def test_a_change_in_two_hubs_is_reported_once() -> None:
    merged = both()
    assert kinds(merged.take("b", put("k", "1"))) == [(PUT, ("k", "1"))]
    assert merged.take("a", put("k", "1")) == []
    assert merged.take("a", Change(DELETE, 9, "k")) == []
    assert kinds(merged.take("b", Change(DELETE, 9, "k"))) == [(DELETE, ("k", ""))]
    assert merged.take("b", Change(DELETE, 9, "never")) == []


def test_a_lost_hub_ends_nothing_and_its_return_brings_nothing_back_that_it_does_not_hold() -> None:
    merged = Merged(("a", "b"))
    merged.take("a", listing(k="1"))
    merged.take("b", listing())
    assert merged.take("a", Change(LOST, why="down")) == []
    assert kinds(merged.take("b", put("l", "2"))) == [(PUT, ("l", "2"))]
    assert kinds(merged.take("b", listing(l="2"))) == [(SNAPSHOT, {"k": "1", "l": "2"})]
    assert kinds(merged.take("a", listing())) == [(SNAPSHOT, {"l": "2"})]  # it was wiped


def test_a_key_deleted_elsewhere_is_not_kept_alive_by_a_lost_hub() -> None:
    merged = both(k="1")
    merged.take("a", Change(LOST, why="down"))
    assert kinds(merged.take("b", Change(DELETE, 9, "k"))) == [(DELETE, ("k", ""))]
    # A wiped hub deletes nothing: the state of the lost one remains.
    merged = both(k="1")
    merged.take("a", Change(LOST, why="down"))
    assert kinds(merged.take("b", listing())) == [(SNAPSHOT, {"k": "1"})]


def test_lost_is_reported_once_when_no_hub_is_left_and_ends_with_a_snapshot() -> None:
    merged = both(k="1")
    merged.take("a", Change(LOST, why="down"))
    (lost,) = merged.take("b", Change(LOST, why="frozen"))
    assert (lost.kind, lost.why) == (LOST, "a: down; b: frozen")
    assert merged.take("a", Change(LOST, why="still")) == []
    assert kinds(merged.take("b", listing(k="2"))) == [(SNAPSHOT, {"k": "2"})]


@pytest.mark.parametrize(
    ("a", "b", "counts"),
    [
        ('{"epoch": 3}', '{"epoch": 2}', "a"),
        ('{"epoch": 2}', '{"epoch": 3}', "b"),
        ('{"incarnation": 5, "seq": 9}', '{"incarnation": 6, "seq": 1}', "b"),
        ('{"incarnation": 6, "seq": 2}', '{"incarnation": 6, "seq": 1}', "a"),
        ("not json", '{"any": "thing"}', "b"),
        ('{"any": 1}', '{"any": 2}', "a"),  # neither document says: the first by name
        ('{"epoch": "three"}', "{}", "b"),
    ],
)
def test_where_hubs_differ_the_newer_document_counts_and_never_by_a_clock(a: str, b: str, counts: str) -> None:
    entries = {"a": KeyValue("k", a.encode(), 1), "b": KeyValue("k", b.encode(), 99)}
    for order in (("a", "b"), ("b", "a")):
        assert chosen((hub, entries[hub]) for hub in order) is entries[counts]


def test_a_hub_in_contact_goes_before_one_that_is_not_unless_that_one_held_a_newer_document() -> None:
    one, other = KeyValue("k", b"{}", 1), KeyValue("k", b'{"why": "other"}', 1)
    assert chosen((("a", one), ("b", other)), lost={"a"}) is other
    newer = KeyValue("k", b'{"epoch": 1}', 1)
    assert chosen((("a", newer), ("b", other)), lost={"a"}) is newer
    assert chosen(()) is None
    assert stamp(b"\xff") < stamp(b"{}") < stamp(b'{"seq": 1}')


KEYS, VALUES = st.sampled_from("xyz"), st.sampled_from(("{}", '{"epoch":1}', '{"epoch":2}', "?"))
STEPS = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.one_of(
            st.builds(put, KEYS, VALUES),
            st.builds(lambda key: Change(DELETE, 9, key), KEYS),
            st.builds(lambda values: listing(**values), st.dictionaries(KEYS, VALUES)),
            st.just(Change(LOST, why="lost")),
        ),
    ),
    max_size=40,
)


@given(STEPS)
def test_the_merged_watch_agrees_with_the_merge_rule_over_all_hubs(steps: list[tuple[str, Change]]) -> None:
    """Against a model that keeps each hub's listing and asks the rule anew after each step."""
    merged = Merged("abc")
    model: dict[str, dict[str, KeyValue]] = {hub: {} for hub in "abc"}
    lost: set[str] = set()
    begun, known, revision, found = False, dict[str, bytes](), 0, set[str]()
    for hub, change in [(hub, listing()) for hub in "abc"] + steps:
        found.add(hub)
        if hub in lost and change.kind not in (LOST, SNAPSHOT):
            continue  # a watch continues with a snapshot
        out = merged.take(hub, change)
        lost = lost | {hub} if change.kind is LOST else lost - {hub}
        if change.kind is SNAPSHOT:
            model[hub] = {entry.key: entry for entry in change.entries}
        elif change.kind is PUT:
            model[hub][change.key] = KeyValue(change.key, change.value, 8)
        elif change.kind is DELETE:
            for other in (hub, *lost):
                model[other].pop(change.key, None)
        for step in out:
            if step.kind is LOST:
                assert lost == set("abc")
                continue
            assert step.revision > revision
            revision, begun = step.revision, True
            if step.kind is SNAPSHOT:
                known = {entry.key: entry.value for entry in step.entries}
            elif step.kind is PUT:
                known[step.key] = step.value
            else:
                del known[step.key]
        assert begun == (len(found) == 3)
        copies = {key: [(h, listed[key]) for h, listed in model.items() if key in listed] for key in "xyz"}
        standing = {key: [entry.value for _, entry in held] for key, held in copies.items() if held}
        if begun:
            assert known.keys() == standing.keys()
            for key, value in known.items():
                newest = max(map(stamp, standing[key]))
                assert stamp(value) == newest
