"""A global balancer's document about itself: written and read again, refused whole if it is absurd."""

import msgspec
import pytest

from farhop.store.documents import entry
from farhop.store.documents.document import DocumentError
from farhop.store.documents.entry import EntryReport

WHOLE = EntryReport(region="tokyo", instance="g1", admin_address="[fd00::7]:8082", admin_tls=True, version="0.1.0")


def test_an_entrys_report_is_read_as_it_was_written():
    assert entry.decode(entry.encode(WHOLE)) == WHOLE
    assert entry.decode(entry.encode(EntryReport(region="tokyo", instance="g1"))).admin_address == ""


def test_a_newer_balancer_may_say_more():
    document = msgspec.json.encode({**msgspec.to_builtins(WHOLE), "zone": "b"})
    assert entry.decode(document) == WHOLE


@pytest.mark.parametrize(
    ("field", "value"),
    [("region", ""), ("region", "a/b"), ("instance", "\x00"), ("admin_address", "nowhere"), ("version", "x" * 300)],
)
def test_a_field_outside_its_domain_is_refused(field, value):
    bad = msgspec.structs.replace(WHOLE, **{field: value})
    with pytest.raises(DocumentError) as refused:
        entry.encode(bad)
    assert refused.value.field == field
    with pytest.raises(DocumentError):
        entry.decode(msgspec.json.encode(bad))
