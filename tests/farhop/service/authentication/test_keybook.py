"""Issued keys: an invalid document authenticates nobody, and no earlier document brings a key back."""

from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhop.service.authentication import keybook
from farhop.service.authentication.keybook import KeyBook
from farhop.store.contract import Change, ChangeKind, KeyValue, issued_key
from farhop.store.documents import issued_keys
from farhop.store.documents.issued_keys import IssuedKey

NOW = datetime(2026, 11, 23, tzinfo=UTC)
HASH = sha256(b"one").hexdigest()


def document(id_: str = "k1", of: str = HASH, **more: Any) -> bytes:
    fields: dict[str, Any] = {"tenant": "acme", "author": "ann", "why": "test", "at": NOW, **more}
    return issued_keys.encode(IssuedKey(id=id_, sha256=of, **fields))


class Followed:
    """A book, and what it counted and told."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        self.changes = 0
        self.book = KeyBook(None, self.refused.append)  # type: ignore[arg-type]
        self.book.changes.append(self._changed)
        self.revision = 0

    def _changed(self) -> None:
        self.changes += 1

    def put(self, value: bytes, id_: str = "k1") -> None:
        self.revision += 1
        self.book.changed(Change(ChangeKind.PUT, self.revision, issued_key(id_), value))

    def delete(self, id_: str = "k1") -> None:
        self.revision += 1
        self.book.changed(Change(ChangeKind.DELETE, self.revision, issued_key(id_)))

    def snapshot(self, *values: bytes) -> None:
        self.revision += 1
        entries = tuple(KeyValue(issued_key("k1"), value, self.revision) for value in values)
        self.book.changed(Change(ChangeKind.SNAPSHOT, self.revision, entries=entries))


def test_a_snapshot_that_lacks_a_key_ends_it_and_a_loss_changes_nothing() -> None:
    one = Followed()
    one.snapshot(document())
    assert one.book.get(HASH) is not None
    one.book.changed(Change(ChangeKind.LOST, why="gone"))
    assert (one.book.get(HASH) is not None, one.changes) == (True, 1)
    one.snapshot(document())
    assert one.changes == 1  # the same: nothing is forgotten
    one.snapshot()
    assert (one.book.get(HASH), one.changes) == (None, 2)


def test_an_unreadable_key_is_revoked_until_it_can_be_read() -> None:
    one = Followed()
    one.put(document())
    one.put(document(seq=2).replace(b'"tenant"', b'"narrower":1,"tenant"'))
    assert (one.book.get(HASH), one.refused) == (None, ["key_malformed"])
    assert list(one.book.status()["problems"]) == [issued_key("k1")]
    one.put(document(seq=3))
    assert one.book.get(HASH) is not None
    assert one.book.status() == {"issued": 1, "last": NOW.isoformat(), "problems": {}}


def test_two_documents_with_one_hash_authenticate_no_client() -> None:
    one = Followed()
    one.put(document())
    one.put(document("k2", tenant="other"), "k2")
    assert (one.book.get(HASH), one.refused) == (None, ["key_twice"])
    one.delete("k2")
    assert one.book.get(HASH) is not None


Documents = st.tuples(st.sampled_from(("k1", "k2", "k3")), st.sampled_from((HASH, "0" * 64, "", None)))


@given(st.lists(Documents, max_size=20))
def test_the_keys_are_those_of_all_documents_present_however_they_came(steps: list[tuple[str, str | None]]) -> None:
    """Written again under another hash, unreadable ("") and deleted (None) in any order: as if read all at once."""
    one, there = Followed(), dict[str, bytes]()
    for seq, (id_, of) in enumerate(steps, 1):
        if of is None:
            there.pop(id_, None)
            one.delete(id_)
        else:
            there[id_] = document(id_, of, seq=seq, tenant=id_) if of else b"{}"
            one.put(there[id_], id_)
        anew = KeyBook(None, lambda _reason: None)  # type: ignore[arg-type]
        entries = tuple(KeyValue(issued_key(key), value, seq) for key, value in there.items())
        anew.changed(Change(ChangeKind.SNAPSHOT, seq, entries=entries))
        assert [one.book.get(of) for of in (HASH, "0" * 64)] == [anew.get(of) for of in (HASH, "0" * 64)]
        assert one.book.status()["issued"] == anew.status()["issued"]


def test_one_of_thousands_of_keys_is_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Followed()
    for n in range(50):
        one.put(document(f"k{n}", f"{n:064x}"), f"k{n}")
    read = list[str]()
    issued = keybook._issued
    monkeypatch.setattr(keybook, "_issued", lambda key: read.append(key.id) or issued(key))
    one.put(document("k50", f"{50:064x}"), "k50")
    one.delete("k7")
    assert read == ["k50"]
    assert one.book.status()["issued"] == 50


Steps = st.lists(st.one_of(st.integers(1, 6), st.none()), max_size=12)


@given(Steps)
def test_a_revoked_key_never_comes_back(steps: list[int | None]) -> None:
    """Documents of every age arrive in any order, deletions between them; from the fourth on it is revoked."""
    one, newest = Followed(), 0
    for seq in steps:
        if seq is None:
            one.delete()
            assert one.book.get(HASH) is None
            continue
        one.put(document(seq=seq, revoked=NOW if seq >= 4 else None))
        newest = max(newest, seq)
        known = one.book.get(HASH)
        assert known is not None
        assert known.revoked == (newest >= 4)
