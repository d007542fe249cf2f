"""Documents that are followed: each read once, doubted ones passed over and counted, ended with their keys."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.store.contract import Change, ChangeKind, KeyValue
from farhop.store.follow import Documents, Refused, follow
from farhop_lab.memory_store import MemoryStore


def read(key: str, value: bytes) -> int:
    if value == b"7":
        raise Refused("unlucky", f"{key}: no sevens")
    return int(value)


def snapshot(**values: bytes) -> Change:
    return Change(ChangeKind.SNAPSHOT, 1, entries=tuple(KeyValue(key, value, 1) for key, value in values.items()))


def put(key: str, value: bytes) -> Change:
    return Change(ChangeKind.PUT, 2, key, value)


def delete(key: str) -> Change:
    return Change(ChangeKind.DELETE, 3, key)


def test_what_changed_is_reported_and_what_is_doubted_leaves_what_stood() -> None:
    refused: Counter[str] = Counter()
    documents = Documents(read, lambda reason: refused.update((reason,)), "number")
    assert documents.take(snapshot(b=b"2", a=b"1")) == {"b": 2, "a": 1}
    assert documents.take(snapshot(b=b"2", a=b"1")) == {}  # listed again
    assert documents.take(put("a", b"x")) == documents.take(put("c", b"7")) == {}
    assert (documents.get("a"), documents.get("c"), "c" in documents, list(documents)) == (1, None, False, ["a", "b"])
    assert documents.problems == {"a": "invalid literal for int() with base 10: b'x'", "c": "c: no sevens"}
    assert refused == {"number_malformed": 1, "unlucky": 1}
    assert documents.take(put("a", b"1")) == {}  # unchanged
    assert documents.take(delete("c")) == {}
    assert documents.problems == {}
    assert documents.take(Change(ChangeKind.LOST, why="etcd is down")) == {}
    assert documents.values() == [1, 2]
    assert list(documents.take(snapshot(c=b"3", b=b"4")).items()) == [("a", None), ("c", 3), ("b", 4)]
    assert documents.take(delete("b")) == {"b": None}
    assert documents.take(delete("b")) == {}
    assert len(documents) == 1


def test_only_one_keys_document_counts_where_one_is_named() -> None:
    documents = Documents(read, lambda _reason: None, "number", "a")
    assert documents.take(snapshot(a=b"1", ab=b"2")) == {"a": 1}
    assert documents.take(put("ab", b"3")) == documents.take(delete("ab")) == {}
    assert documents.take(delete("a")) == {"a": None}


_steps = st.lists(
    st.one_of(
        st.builds(put, st.sampled_from("abc"), st.sampled_from((b"1", b"2", b"7", b"x"))),
        st.builds(delete, st.sampled_from("abc")),
        st.dictionaries(st.sampled_from("abc"), st.sampled_from((b"1", b"2", b"7"))).map(lambda d: snapshot(**d)),
        st.just(Change(ChangeKind.LOST, why="gone")),
    )
)


@given(_steps)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_changes_add_up_to_the_present_documents_in_any_order_of_steps(steps: list[Change]) -> None:
    documents, found, there = Documents(read, lambda _reason: None, "number"), dict[str, int](), dict[str, bytes]()
    for step in steps:
        for key in step.ended(list(there)):
            del there[key]
        there.update((entry.key, entry.value) for entry in step.written)
        for key, document in documents.take(step).items():
            if document is None:
                del found[key]
            else:
                found[key] = document
        assert {key: documents.get(key) for key in documents} == found
        assert found.keys() <= there.keys()
        assert documents.problems.keys() == {key for key, value in there.items() if value in (b"7", b"x")}
        assert all(found[key] == int(value) for key, value in there.items() if value in (b"1", b"2"))


async def test_a_watch_is_followed_until_the_store_closes() -> None:
    store, steps = MemoryStore(Random(1)), asyncio.Queue[Change]()
    await store.open()
    await store.put("p/a", b"1")
    following = asyncio.create_task(follow(store, "p/", steps.put_nowait))
    assert [entry.key for entry in (await steps.get()).written] == ["p/a"]
    await store.put("p/b", b"2")
    assert [entry.key for entry in (await steps.get()).written] == ["p/b"]
    await store.close()
    await asyncio.wait_for(following, 60.0)
