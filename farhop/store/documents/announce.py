"""The document that an entry's anycast announcer publishes in etcd, under a lease: the wanted and the actual
announcement.

Operators read it, and so do the announcers of other entries: each must know whether it is the last healthy site.
Unknown fields are ignored. Never decides whether to announce.
"""

from __future__ import annotations

import msgspec

from farhop.store.documents.document import DocumentError, check_name, check_size, check_text, read

DOCUMENT_LIMIT_BYTES = 16 * 1024
TEXT_LIMIT = 256
WHY_LIMIT = 1024
PREFIXES_LIMIT = 64
SECONDS_MAX = 1e11  # the year 5138: what a date is made of, here and in other languages


class AnnounceReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one announcer.

    `wanted`, `actual`: a phase each: "withdrawn", "announced" or "draining"; `actual` is "" if the BGP speaker's state
    is unknown or none of the three. `differs`: the two do not agree. `healthy`: other announcers may rely on this site.
    `held_s`: seconds for which the update budget (flap protection) still keeps it withdrawn. `since`: when `wanted`
    last changed, in seconds since 1970 by the announcer's clock; 0 if unknown. `sessions`: by BGP peer, whether its
    session is up.
    """

    entry: str
    region: str
    instance: str
    prefixes: tuple[str, ...]
    speaker: str
    wanted: str
    actual: str = ""
    differs: bool = False
    healthy: bool = False
    why: str = ""
    held_s: float = 0.0
    since: float = 0.0
    sessions: dict[str, bool] = {}


_DECODER = msgspec.json.Decoder(AnnounceReport)


def encode(report: AnnounceReport) -> bytes:
    """The report as JSON, at most DOCUMENT_LIMIT_BYTES. Raises DocumentError if `decode` would refuse it."""
    check(report)
    document = msgspec.json.encode(report)
    check_size(len(document), DOCUMENT_LIMIT_BYTES)
    return document


def decode(document: bytes) -> AnnounceReport:
    """The report in a JSON document. Raises DocumentError, naming the field."""
    report = read(_DECODER, document, "report", DOCUMENT_LIMIT_BYTES)
    check(report)
    return report


def check(report: AnnounceReport) -> None:
    """Raise DocumentError at the first field outside its domain."""
    for field in ("entry", "region", "instance", "speaker", "wanted"):
        check_name(field, getattr(report, field), TEXT_LIMIT)
    if not 0 < len(report.prefixes) <= PREFIXES_LIMIT:
        raise DocumentError("prefixes", f"must be 1 to {PREFIXES_LIMIT}")
    for text in (*report.prefixes, *report.sessions):
        check_text("prefixes", text, TEXT_LIMIT)
    if report.why:
        check_text("why", report.why, WHY_LIMIT)
    for field, seconds in (("held_s", report.held_s), ("since", report.since)):
        if not 0.0 <= seconds <= SECONDS_MAX:
            raise DocumentError(field, f"must be 0 to {SECONDS_MAX:g} seconds")
