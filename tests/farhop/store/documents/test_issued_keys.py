"""A key that was issued, as a document: written and read the same, and refused by the name of what is at fault."""

from datetime import UTC, datetime, timedelta

import pytest

from farhop.store.documents import issued_keys
from farhop.store.documents.document import DocumentError
from farhop.store.documents.issued_keys import IssuedKey

NOW = datetime(2026, 11, 23, tzinfo=UTC)
GOOD = {"id": "k1", "sha256": "0" * 64, "tenant": "acme", "author": "ann", "why": "test", "at": NOW}


def test_an_issued_key_is_read_as_it_was_written():
    scoped = {"models": ("m",), "paths": ("/v1/x",), "within": ("eu",), "expires": NOW, "seq": 7}
    for more in ({}, {"explain": True}, scoped):
        one = IssuedKey(**GOOD, **more)
        assert issued_keys.decode(issued_keys.encode(one)) == one
        assert one.key == "/farhop/v1/key/k1"
        assert (b"explain" in issued_keys.encode(one)) == one.explain  # builds that do not know it read all other keys


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", "a/b"), ("id", ""), ("replaces", "a/b"), ("sha256", "0" * 63), ("sha256", "A" * 64), ("tenant", ""),
        ("author", " "), ("why", ""), ("models", ("",)), ("models", ("m",) * 65), ("paths", ("v1",)),
        ("expires", NOW - timedelta(days=1)),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(field, value):
    with pytest.raises(DocumentError) as caught:
        issued_keys.encode(IssuedKey(**{**GOOD, "not_before": NOW, field: value}))
    assert caught.value.field == field


@pytest.mark.parametrize("document", [b"", b"[]", b"{}", b'{"id":1}', b"\xff", b"[" * 100_000])
def test_garbage_is_refused(document):
    with pytest.raises(DocumentError):
        issued_keys.decode(document)
