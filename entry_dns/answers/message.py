"""Parses DNS queries strictly: the queries that the fast path does not understand come here.

A query is understood completely or refused as the RFCs say: dropped (too short, or itself an answer), FORMERR, NOTIMP
or BADVERS. A refusal is never larger than the query. Never builds an answer, never looks at the sender.
"""

from __future__ import annotations

from dataclasses import dataclass

NOERROR, FORMERR, SERVFAIL, NXDOMAIN, NOTIMP, REFUSED, BADVERS = 0, 1, 2, 3, 4, 5, 16
A, NS, SOA, HINFO, TXT, AAAA, OPT, DS, RRSIG, NSEC, DNSKEY, HTTPS, NXNAME, ANY = (
    1, 2, 6, 13, 16, 28, 41, 43, 46, 47, 48, 65, 128, 255,
)  # fmt: skip
IN = 1
TRANSFERS = frozenset((249, 250, 251, 252, 253, 254))  # TKEY, TSIG, IXFR, AXFR, MAILB, MAILA
OPTION_NSID, OPTION_ECS, OPTION_COOKIE = 3, 8, 10
PAYLOAD_MIN, PAYLOAD_MAX = 512, 1232  # gdnsd, and the flag day of 2020: what passes without fragments
_ADDITIONAL_MAX = 8


class RefusedError(Exception):
    """A query that is answered with an error. `rcode`: the answer's code; `question_end`: the offset at which its
    question ends, 12 if none was read; `edns`: whether the answer needs an OPT record.
    """

    def __init__(self, rcode: int, question_end: int = 12, *, edns: bool = False) -> None:
        super().__init__(rcode)
        self.rcode, self.question_end, self.edns = rcode, question_end, edns


class Drop(Exception):  # noqa: N818 - says what to do
    """The message gets no answer at all."""


@dataclass(slots=True)
class Query:
    """A parsed query. `name` is in wire form and lower case; `end` is the offset of the question's end.

    `ecs` is (family, source prefix length, address bytes), `cookie` the option's bytes, `payload` the size that the
    sender accepts by UDP, `edns` whether there was an OPT record, `ecs_at` the offset of the ECS address (0: none).
    Without a question (RFC 7873, 5.4: only a cookie is asked for) `name` is b"" and `end` the offset where it would
    begin.
    """

    name: bytes
    type: int
    class_: int
    end: int
    edns: bool = False
    payload: int = PAYLOAD_MIN
    dnssec: bool = False
    ecs: tuple[int, int, bytes] | None = None
    cookie: bytes | None = None
    nsid: bool = False
    ecs_at: int = 0


def read(data: bytes) -> Query:
    """The query in a message. Raises Drop or RefusedError."""
    if len(data) < 12 or data[2] & 0x80:
        raise Drop
    if data[2] & 0x78:
        raise RefusedError(NOTIMP)
    counts = [int.from_bytes(data[at : at + 2], "big") for at in (4, 6, 8, 10)]
    if counts[0] > 1:
        raise RefusedError(FORMERR)
    query = _question(data) if counts[0] else Query(b"", 0, IN, 12)
    if counts[1] or counts[2] or counts[3] > _ADDITIONAL_MAX:
        raise RefusedError(FORMERR, query.end)
    at = query.end
    for _ in range(counts[3]):
        at = _additional(data, at, query)
    if at != len(data) or not (counts[0] or query.cookie):
        raise RefusedError(FORMERR, query.end)
    return query


def _question(data: bytes) -> Query:
    end = _name_end(data, 12)
    if end + 4 > len(data):
        raise RefusedError(FORMERR)
    kind, class_ = int.from_bytes(data[end : end + 2], "big"), int.from_bytes(data[end + 2 : end + 4], "big")
    return Query(data[12:end].lower(), kind, class_, end + 4)


def _name_end(data: bytes, at: int) -> int:
    """Where a name that is not compressed ends."""
    start = at
    while at < len(data):
        length = data[at]
        if length > 63 or at + 1 + length - start > 255:
            break
        at += 1 + length
        if length == 0:
            return at
    raise RefusedError(FORMERR)


def _additional(data: bytes, at: int, query: Query) -> int:
    """Parse one additional record into `query`; returns the offset of its end. Records other than OPT are skipped."""
    start = at
    while at < len(data) and 0 < data[at] < 64:
        at += 1 + data[at]
        if at - start > 255:
            break
    if at < len(data) and data[at] >= 192:
        at += 1
    at += 1
    if at + 10 > len(data):
        raise RefusedError(FORMERR, query.end)
    kind, rdata = int.from_bytes(data[at : at + 2], "big"), at + 10
    end = rdata + int.from_bytes(data[at + 8 : at + 10], "big")
    if end > len(data):
        raise RefusedError(FORMERR, query.end)
    if kind == OPT:
        if query.edns or at != start + 1:
            raise RefusedError(FORMERR, query.end)
        query.edns = True
        query.payload = max(PAYLOAD_MIN, int.from_bytes(data[at + 2 : at + 4], "big"))
        query.dnssec = bool(data[at + 6] & 0x80)
        if data[at + 5]:
            raise RefusedError(BADVERS, query.end, edns=True)
        _options(data, rdata, end, query)
    return end


def _options(data: bytes, at: int, end: int, query: Query) -> None:
    refused = RefusedError(FORMERR, query.end, edns=True)
    while at < end:
        if at + 4 > end:
            raise refused
        code, length = int.from_bytes(data[at : at + 2], "big"), int.from_bytes(data[at + 2 : at + 4], "big")
        at += 4
        if at + length > end:
            raise refused
        value = data[at : at + length]
        at += length
        if code == OPTION_ECS:
            if query.ecs is not None or (ecs := subnet(value)) is None:
                raise refused
            query.ecs, query.ecs_at = ecs, at - length + 4
        elif code == OPTION_COOKIE:
            if query.cookie is not None or not (length == 8 or 16 <= length <= 40):
                raise refused
            query.cookie = value
        elif code == OPTION_NSID:
            if value:
                raise refused
            query.nsid = True


def subnet(value: bytes) -> tuple[int, int, bytes] | None:
    """A client subnet option as (family, source prefix length, address bytes); None for what RFC 7871, 7.1.2 refuses:
    an unknown family, a scope, too few or too many octets, bits beyond the prefix."""
    if len(value) < 4 or value[3]:
        return None
    family, source, address = value[0] << 8 | value[1], value[2], value[4:]
    if family not in (1, 2) or source > (32 if family == 1 else 128) or len(address) != (source + 7) >> 3:
        return None
    if source & 7 and address[-1] & (0xFF >> (source & 7)):
        return None
    return family, source, address
