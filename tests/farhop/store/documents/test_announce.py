"""What announcers say of themselves: trusted whole, or refused with the field."""

from __future__ import annotations

import msgspec
import pytest

from farhop.store.documents.announce import AnnounceReport, decode, encode
from farhop.store.documents.document import DocumentError

GOOD = AnnounceReport(
    entry="t1", region="tokyo", instance="a", prefixes=("192.0.2.1/32",), speaker="bird", wanted="announced"
)


def test_an_announcers_report_is_read_as_it_was_written() -> None:
    assert decode(encode(GOOD)) == GOOD


@pytest.mark.parametrize(
    ("field", "value"),
    [("entry", "a/b"), ("wanted", ""), ("prefixes", ()), ("held_s", -1.0), ("since", 1e12), ("why", "x\n")],
)
def test_a_field_outside_its_domain_is_refused(field: str, value: object) -> None:
    bad = msgspec.structs.replace(GOOD, **{field: value})
    with pytest.raises(DocumentError) as error:
        encode(bad)
    assert error.value.field == field
    with pytest.raises(DocumentError):
        decode(msgspec.json.encode(bad))
