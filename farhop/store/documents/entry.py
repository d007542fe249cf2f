"""The document that a global balancer publishes about itself in etcd: that it exists, and where its admin port is.

Only operators' commands read it: no balancer and no routing decision uses it. Unknown fields are ignored: newer
balancers may add some.
"""

from __future__ import annotations

import msgspec

from farhop.store.documents.document import check_name, check_size, check_text, read
from farhop.store.documents.report import check_address

DOCUMENT_LIMIT_BYTES = 16 * 1024
TEXT_LIMIT = 256  # characters


class EntryReport(msgspec.Struct, frozen=True, kw_only=True):
    """One global balancer instance.

    `admin_address`: host:port of its admin port, for operators' commands, with TLS if `admin_tls`; "" if it has none.
    `version`: the version of its build.
    """

    region: str
    instance: str
    admin_address: str = ""
    admin_tls: bool = False
    version: str = ""


_DECODER = msgspec.json.Decoder(EntryReport)


def encode(report: EntryReport) -> bytes:
    """The report as JSON, at most DOCUMENT_LIMIT_BYTES. Raises DocumentError if `decode` would refuse it."""
    check(report)
    document = msgspec.json.encode(report)
    check_size(len(document), DOCUMENT_LIMIT_BYTES)
    return document


def decode(document: bytes) -> EntryReport:
    """The report in a JSON document. Raises DocumentError, naming the field."""
    report = read(_DECODER, document, "report", DOCUMENT_LIMIT_BYTES)
    check(report)
    return report


def check(report: EntryReport) -> None:
    """Raise DocumentError at the first field outside its domain."""
    check_name("region", report.region, TEXT_LIMIT)
    check_name("instance", report.instance, TEXT_LIMIT)
    if report.admin_address:
        check_address("admin_address", report.admin_address)
    if report.version:
        check_text("version", report.version, TEXT_LIMIT)
