"""What documents have in common: one error, and one rule for text."""

from __future__ import annotations

import msgspec
import pytest

from farhop.store.documents.document import DocumentError, check_text, read


class Inner(msgspec.Struct):
    count: int


class Outer(msgspec.Struct):
    parts: list[Inner]


@pytest.mark.parametrize(
    ("document", "field", "says"),
    [
        (b'{"parts": [{"count": 1}, {"count": "x"}]}', "parts[1].count", "Expected `int`, got `str`"),
        (b"{}", "", "missing required field `parts`"),
        (b"{", "", "not a JSON thing"), (b"\xff", "", "not a JSON thing"),
        (b" " * 100, "", "document of 100 bytes, at most 64"),
    ],
)  # fmt: skip
def test_an_unreadable_document_is_refused_by_the_path_of_the_fault(document: bytes, field: str, says: str) -> None:
    with pytest.raises(DocumentError, match=says) as refused:
        read(msgspec.json.Decoder(Outer), document, "thing", 64)
    assert refused.value.field == field


def test_text_is_printable_and_not_blank_unless_that_is_fine() -> None:
    check_text("why", "a b", 3)
    check_text("gpu", "  ", 3, blank=True)
    for text in ("", "  ", "four", "a\nb"):
        with pytest.raises(DocumentError, match="why: must be 1 to 3 printable characters"):
            check_text("why", text, 3)
