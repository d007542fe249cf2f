"""Documents checked by a model: written by hand, or with an author."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.store.documents.authored import DOCUMENT_LIMIT_BYTES, Authorship, split_authorship, with_author
from farhop.store.documents.document import DocumentError

AT = datetime(2026, 11, 21, 9, 30, tzinfo=UTC)
ANN = Authorship("ann@ops", "canary", AT)


def test_a_document_is_read_with_the_author_it_was_written_with() -> None:
    models = {"llama": {"weights": {"v1": 1}}, "": "p2c"}
    by_model, authorship = split_authorship(with_author(models, ANN))
    assert (msgspec.json.decode(by_model), authorship) == (models, ANN)


def test_a_document_written_by_hand_has_no_author() -> None:
    for document in (b"{}", b'{"llama": "p2c"}', b'{"models": "p2c", "author": "p2c", "why": "p2c"}'):
        assert split_authorship(document) == (document, None)


@pytest.mark.parametrize(
    "document",
    [
        b"", b"[]", b"p2c", b'"p2c"', b"\xff", b"[" * 10_000, b"{" * 10_000, b" " * DOCUMENT_LIMIT_BYTES + b"{}",
        b'{"models": [], "author": "a", "why": "b", "at": "2026-11-21T09:30:00Z"}',
        b'{"models": {}, "author": "a", "why": "b", "at": "2026-11-21T09:30:00"}',
        b'{"models": {}, "author": "", "why": "b", "at": "2026-11-21T09:30:00Z"}',
        b'{"models": {}, "author": "a", "why": "\\u001b[2J", "at": "2026-11-21T09:30:00Z"}',
    ],
)  # fmt: skip
def test_a_malformed_document_or_an_invalid_author_is_refused(document: bytes) -> None:
    with pytest.raises(DocumentError):
        split_authorship(document)


def test_a_document_that_readers_would_refuse_is_not_signed() -> None:
    for bad in (Authorship(" ", "w", AT), Authorship("a", "w" * 257, AT), Authorship("a\tb", "w", AT)):
        with pytest.raises(DocumentError, match="printable"):
            with_author({}, bad)
    with pytest.raises(DocumentError, match="at most"):
        with_author({"m": "x" * DOCUMENT_LIMIT_BYTES}, ANN)


@given(st.binary(max_size=100))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_reader_meets_one_kind_of_trouble(document: bytes) -> None:
    try:
        by_model, authorship = split_authorship(document)
    except DocumentError:
        return
    assert authorship is None or by_model
