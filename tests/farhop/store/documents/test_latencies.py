"""What entries say of client networks: trusted whole, or refused with the field; and never more than its bound."""

from __future__ import annotations

import msgspec
import pytest

from farhop.balance.estimate.network_latencies import Latency
from farhop.store.documents.document import DocumentError
from farhop.store.documents.latencies import (
    DOCUMENT_LIMIT_BYTES,
    NETWORKS_LIMIT,
    LatencyReport,
    decode,
    encode,
)

GOOD = LatencyReport(
    region="tokyo", instance="g1", networks={"8.8.8.0/24": Latency(12.3, 8), "2600::/48": Latency(3.0, 4)}
)


def test_a_latency_report_is_read_as_it_was_written() -> None:
    assert decode(encode(GOOD)) == GOOD


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("region", "a/b"),
        ("instance", ""),
        ("networks", {"10.0.0.0/24": Latency(1.0, 4)}),
        ("networks", {"8.8.8.0/25": Latency(1.0, 4)}),
        ("networks", {"8.8.8.0/24": Latency(-1.0, 4)}),
        ("networks", {"8.8.8.0/24": Latency(1.0, 0)}),
        ("networks", {f"8.{n >> 8}.{n & 255}.0/24": Latency(1.0, 1) for n in range(NETWORKS_LIMIT + 1)}),
    ],
)
def test_a_field_outside_its_domain_is_refused(field: str, value: object) -> None:
    bad = msgspec.structs.replace(GOOD, **{field: value})
    with pytest.raises(DocumentError) as error:
        encode(bad)
    assert error.value.field == field
    with pytest.raises(DocumentError):
        decode(msgspec.json.encode(bad))


def test_the_most_that_is_reported_fits() -> None:
    wide = {f"2600:{n:x}:ffff::/48": Latency(9999.9, 1 << 30) for n in range(4096, 4096 + NETWORKS_LIMIT)}
    assert len(encode(LatencyReport(region="tokyo", instance="g1", networks=wide))) <= DOCUMENT_LIMIT_BYTES
