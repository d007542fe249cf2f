"""The document of an entry's measured round trips to client networks, in etcd under a lease, for DNS servers.

It names only networks (/24 and /48), never addresses or tenants; its counts are powers of two. Unknown fields are
ignored. Never holds a network that is not on the public internet.
"""

from __future__ import annotations

import msgspec

from farhop.balance.estimate.network_latencies import RTT_MS_MAX, Latency, parse
from farhop.store.documents.document import DocumentError, check_name, check_size, read

DOCUMENT_LIMIT_BYTES = 256 * 1024
NETWORKS_LIMIT = 4096
TEXT_LIMIT = 256


class LatencyReport(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of one global balancer instance. `networks`: by client network ("203.0.113.0/24"), the least
    round-trip time (ms) and the number of samples, rounded to a power of two.
    """

    region: str
    instance: str
    networks: dict[str, Latency] = {}


_DECODER = msgspec.json.Decoder(LatencyReport)


def encode(report: LatencyReport) -> bytes:
    """The report as JSON, at most DOCUMENT_LIMIT_BYTES. Raises DocumentError if `decode` would refuse it."""
    check(report)
    document = msgspec.json.encode(report)
    check_size(len(document), DOCUMENT_LIMIT_BYTES)
    return document


def decode(document: bytes) -> LatencyReport:
    """The report in a JSON document. Raises DocumentError, naming the field."""
    report = read(_DECODER, document, "report", DOCUMENT_LIMIT_BYTES)
    check(report)
    return report


def check(report: LatencyReport) -> None:
    """Raise DocumentError at the first field outside its domain."""
    check_name("region", report.region, TEXT_LIMIT)
    check_name("instance", report.instance, TEXT_LIMIT)
    if len(report.networks) > NETWORKS_LIMIT:
        raise DocumentError("networks", f"must be at most {NETWORKS_LIMIT}")
    for text, one in report.networks.items():
        try:
            parse(text)
        except ValueError as error:
            raise DocumentError("networks", str(error)) from None
        if not 0.0 <= one.ms <= RTT_MS_MAX:
            raise DocumentError("networks", f"{text}: ms must be 0 to {RTT_MS_MAX:g}")
        if one.samples < 1:
            raise DocumentError("networks", f"{text}: samples must be 1 or more")
