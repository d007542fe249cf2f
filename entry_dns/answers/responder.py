"""From a query's bytes to its answer's: the short way for ordinary questions, the strict one for all others.

The short way knows a question by its bytes, finds the client's network in a table and puts a prepared answer together;
whatever it is not sure of goes the strict way (`message.read`). Invariants: an answer is positive and for the client's
network, or SERVFAIL with an extended error, where the law leaves no entry: never NODATA and never REFUSED, which
resolvers would give to other networks, too; what is malformed is never answered with more bytes than came; question
bytes are told back as they came (0x20). Pure: the time and the asker's address are arguments.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from ipaddress import ip_address
from struct import Struct

from entry_dns.answers import message
from entry_dns.answers.cookies import Cookies
from entry_dns.answers.message import AAAA, ANY, DNSKEY, HINFO, HTTPS, IN, NSEC, RRSIG, SOA, A
from entry_dns.answers.prepare import ASK_RESOLVER, NOBODY
from entry_dns.answers.signing import AGAIN_S, ZoneKeys, nsec
from entry_dns.answers.snapshot import Head, Lookup, Name, Zone
from entry_dns.fleet.networks import BITS, scope

ADDRESSES_MAX = 8  # in one answer
ANY_TTL_S = 3600
KEY_TTL_S = 3600
BUCKETS = 1 << 14
ASKERS_MAX = 16_384
TELLER_S = 3600.0

QUERIES, ODD, MALFORMED, DROPPED, SERVFAILS, NEGATIVE = range(6)
REFUSALS, TRUNCATED, LIMITED, SLIPPED, WITH_ECS, PROVEN = range(6, 12)
COUNTERS = (
    "queries", "odd", "malformed", "dropped", "servfail", "negative", "refused", "truncated", "limited", "slipped",
    "client_subnet", "cookie_proven",
)  # fmt: skip

_POINTER = b"\xc0\x0c"
_ONE_QUESTION, _ONE_AND_OPT = b"\0\1\0\0\0\0\0\0", b"\0\1\0\0\0\0\0\1"
_OPT, _OPT_DO = b"\0\0\x29\x04\xd0\0\0\0\0", b"\0\0\x29\x04\xd0\0\0\x80\0"
_OPT_OF, _OPTION_OF = Struct(">BHHxBHH").unpack_from, Struct(">HHHBB").unpack_from
_BYTE = tuple(bytes((n,)) for n in range(256))
_LENGTHS = tuple(n.to_bytes(2, "big") for n in range(1024))


def _extended(code: int, text: bytes) -> bytes:
    """An extended DNS error (RFC 8914) as an option."""
    return b"\0\x0f" + (2 + len(text)).to_bytes(2, "big") + code.to_bytes(2, "big") + text


_LAWLESS = _extended(18, b"the law leaves this network no entry for this name")  # Prohibited
_UNREADY = _extended(14, b"nothing is known of the entries yet")  # Not Ready
_IN4, _IN6 = BITS[4], BITS[6]


class Prepared:
    """An answer but for what is the asker's own: `heads` are flags and counts by (EDNS, RD), `body` what follows the
    question, `size` its bytes, `first` the entry it leads to (-1: none), `error` an extended error for the OPT record
    (b"" where it leads to an entry)."""

    __slots__ = ("body", "error", "first", "heads", "made_at", "rcode", "size")

    def __init__(
        self, rcode: int, answers: int, authority: int, body: bytes, made_at: float,
        first: int = -1, error: bytes = b"", authoritative: bool = True,
    ) -> None:  # fmt: skip
        flags = 0x84 if authoritative else 0x80
        self.heads = tuple(
            bytes((flags | rd, rcode & 15, 0, 1))
            + answers.to_bytes(2, "big") + authority.to_bytes(2, "big") + bytes((0, edns))
            for edns in (0, 1) for rd in (0, 1)
        )  # fmt: skip
        self.rcode, self.body, self.first, self.error, self.made_at = rcode, body, first, error, made_at
        self.size = len(body)


class _Slot:
    """A question that has answers: its name, its type, whose networks decide, and what was prepared so far.

    `starts`, `groups`, `index` are the table's for IPv4, `last` its last row; without `starts` all are answered alike.
    `confines`: there is something that not every network may be told.
    """

    __slots__ = ("confines", "groups", "index", "kind", "last", "name", "plain", "signed", "starts", "table")

    def __init__(self, name: Name, kind: int, table: Lookup | None) -> None:
        self.name, self.kind, self.table = name, kind, table
        self.starts: Sequence[int] | None = None
        self.confines = table is not None and table.shared >= 0
        if table is not None and not table.uniform:
            self.starts, self.groups, self.index = table.starts[4], table.groups[4], table.index
            self.last = len(self.starts) - 1
        self.plain: dict[int, Prepared] = {}
        self.signed: dict[int, Prepared] = {}


class Responder:
    """Answers from one view at a time. `cookies`: None for none; `nsid`: what is told of this server, b"" for nothing;
    `rate`: answers a second for a network (/24, /64) that proves nothing, 0 for any number; every `slip`-th beyond is
    told to come by TCP; `keys`: zones' keys by the zone's name in wire form."""

    def __init__(
        self,
        cookies: Cookies | None = None,
        nsid: bytes = b"",
        rate: int = 0,
        slip: int = 2,
        keys: dict[bytes, ZoneKeys] | None = None,
    ) -> None:
        self._cookies, self._nsid, self._rate, self._slip = cookies, nsid, rate, slip
        self._keys = keys or {}
        self._seen = [0] * BUCKETS
        self._askers: dict[str, tuple[bytes, int]] = {}
        self._tellers: dict[bytes, float] = {}  # who told a client subnet for a name that is not lawful alike, and when
        self.counts = [0] * len(COUNTERS)
        self.led: list[int] = []
        self.now = 0.0
        self.adopt(Head((), (), (), ready=False), ())

    def adopt(self, head: Head, tables: Sequence[Lookup]) -> None:
        """Answer from this view from now on."""
        self._head = head
        self.led = [0] * len(head.entries)
        self._names = {name.wire: name for name in head.names}
        self._slots: dict[bytes, _Slot] = {}
        for name in head.names:
            kinds = {*name.tables, *name.records, *name.guarded}
            if head.zones[name.zone].wire == name.wire and name.wire in self._keys:
                kinds.add(DNSKEY)
            for kind in kinds:
                at = name.tables.get(kind, name.guarded.get(kind, -1))
                slot = _Slot(name, kind, tables[at] if 0 <= at < len(tables) else None)
                self._slots[name.wire + kind.to_bytes(2, "big") + b"\0\1"] = slot

    def tick(self, now: float) -> None:
        """A second has passed: rates are counted anew. `now`: seconds since 1970."""
        if int(now) // 60 != int(self.now) // 60 and self._cookies is not None:
            self._cookies.forget()
        self.now = now
        self._seen = [0] * BUCKETS

    # -- the short way

    def answer(self, data: bytes, host: str, udp: bool = True) -> bytes | None:
        """The answer to a message from this address; None: nothing is sent back.

        Written for speed: a call costs as much as a look into a table, so what each question needs stands here, in one
        long function. To cut it by its parts would cost each answer five calls more.
        """
        counts = self.counts
        counts[0] += 1
        met = self._askers.get(host)
        asker, bucket = self._meet(host) if met is None else met
        if udp and self._rate:
            seen = self._seen[bucket]
            if seen >= self._rate:
                return self._limited(data, asker)
            self._seen[bucket] = seen + 1
        end, size = data.find(b"\0", 12) + 5, len(data)
        question = data[12:end]
        slot = self._slots.get(question)
        if slot is None:
            slot = self._slots.get(data[12 : end - 4].lower() + data[end - 4 : end])
        if slot is None or data[2] & 0xFE:
            return self._odd(data, asker, udp)
        if data[4:12] != _ONE_AND_OPT or size < end + 11:
            if size != end or data[4:12] != _ONE_QUESTION:
                return self._odd(data, asker, udp)
            prepared = self._prepared(slot, self._untold(slot, asker), False)
            return self._told(data, end, prepared, data[2] & 1, 512, udp)
        root, kind, payload, version, flags, length = _OPT_OF(data, end)
        at = end + 11
        if root or kind != 41 or version or size != at + length:
            return self._odd(data, asker, udp)
        length, group = 0, -1
        subnet = scoped = network = cookie = b""
        while at < size:
            if at + 8 > size:  # shorter than what is ordinary
                return self._odd(data, asker, udp)
            code, stop, family, source, zero = _OPTION_OF(data, at)
            stop += at + 4
            if stop > size:
                return self._odd(data, asker, udp)
            if code == 8:
                network, starts = data[at + 8 : stop], slot.starts
                octets = (source + 7) >> 3
                if group >= 0 or zero or stop - at != 8 + octets:
                    return self._odd(data, asker, udp)
                if starts is not None and family == 1 and 0 < source <= 32:
                    address = int.from_bytes(network, "big") << (32 - 8 * octets)
                    if address & (0xFFFFFFFF >> source):
                        return self._odd(data, asker, udp)
                    index, high = slot.index, address >> 16
                    row = bisect_right(starts, address, index[high], index[high + 1]) - 1
                    group, told = slot.groups[row], 1
                    if row:
                        told = 33 - (address ^ (starts[row] - 1)).bit_length()
                    if row < slot.last:
                        after = 33 - (address ^ starts[row + 1]).bit_length()
                        if after > told:
                            told = after
                    if group == ASK_RESOLVER:
                        group = self._group_of(slot, asker)
                    if slot.confines:
                        self._teller(asker)
                else:
                    ecs = message.subnet(data[at + 4 : stop])
                    if ecs is None:
                        return self._odd(data, asker, udp)
                    group, told = self._group(slot, ecs, asker)
                subnet, scoped = data[at : at + 7], _BYTE[told]
                length += stop - at
                counts[10] += 1
            elif code == 10 and not cookie:
                if self._cookies is not None:
                    found = self._cookies.kept.get(data[at + 4 : stop] + asker)
                    if found is None:
                        if not (stop - at == 12 or 20 <= stop - at <= 44):
                            return self._odd(data, asker, udp)
                        found = self._cookies.taken(data[at + 4 : stop], asker, int(self.now))
                    cookie = b"\0\x0a\0\x18" + found[0]
                    counts[11] += found[1]
                    length += 28
                elif not (stop - at == 12 or 20 <= stop - at <= 44):
                    return self._odd(data, asker, udp)
            elif code == 3 or code == 10:
                return self._odd(data, asker, udp)
            at = stop
        if group < 0:
            group = self._untold(slot, asker)
        signed = flags & 0x8000
        known = None if signed else slot.plain.get(group)
        prepared = self._prepared(slot, group, signed > 0) if known is None else known
        head, opt = 2 | data[2] & 1, _OPT_DO if signed else _OPT
        first = prepared.first
        if first < 0 or end + prepared.size + length > 501:
            error = prepared.error
            options = b"".join((opt, _LENGTHS[length + len(error)], subnet, scoped, network, cookie, error))
            return self._told(data, end, prepared, head, payload, udp, options)
        self.led[first] += 1
        return b"".join((
            data[:2], prepared.heads[head], question, prepared.body, opt, _LENGTHS[length], subnet, scoped, network,
            cookie,
        ))  # fmt: skip

    def _meet(self, host: str) -> tuple[bytes, int]:
        """An asker's address in bytes, and by which count his network's rate is held."""
        if len(self._askers) >= ASKERS_MAX:
            self._askers.clear()
        asker = ip_address(host.partition("%")[0]).packed
        met = self._askers[host] = asker, hash(asker[:3] if len(asker) == 4 else asker[:8]) % BUCKETS
        return met

    def _told(
        self, data: bytes, end: int, prepared: Prepared, head: int, payload: int, udp: bool, opt: bytes = b""
    ) -> bytes:
        if prepared.first >= 0:
            self.led[prepared.first] += 1
        elif prepared.rcode == message.SERVFAIL:
            self.counts[SERVFAILS] += 1
        body = prepared.body
        if udp and end + len(body) + len(opt) > min(max(payload, message.PAYLOAD_MIN), message.PAYLOAD_MAX):
            self.counts[TRUNCATED] += 1
            flags = prepared.heads[head]
            cut = bytes((flags[0] | 2, flags[1], 0, 1, 0, 0, 0, 0, 0, flags[9]))
            return data[:2] + cut + data[12:end] + opt
        return data[:2] + prepared.heads[head] + data[12:end] + body + opt

    # -- whose networks decide

    def _group(self, slot: _Slot, ecs: tuple[int, int, bytes], asker: bytes) -> tuple[int, int]:
        """The group of a client subnet, and the scope to tell with it."""
        table = slot.table
        family, source, given = ecs
        if table is None or table.uniform:
            return 0, 0
        if table.shared >= 0:
            self._teller(asker)
        if source == 0:
            return self._group_of(slot, asker), 0
        if family == 1:
            starts, groups, bits = table.starts[4], table.groups[4], _IN4
            address = int.from_bytes(given, "big") << (32 - 8 * len(given))
        else:
            starts, groups, bits = table.starts[6], table.groups[6], _IN6
            address = int.from_bytes(given[:8], "big") << (64 - 8 * min(len(given), 8))
        at = bisect_right(starts, address) - 1
        group = groups[at]
        told = scope(starts, at, address, bits)
        return (self._group_of(slot, asker) if group == ASK_RESOLVER else group), told or 1

    def _teller(self, asker: bytes) -> None:
        if len(self._tellers) >= ASKERS_MAX:
            self._tellers.clear()
        self._tellers[asker] = self.now

    def _untold(self, slot: _Slot, asker: bytes) -> int:
        """The group of a question without a client subnet. Who else tells them asks for all of his clients at once:
        unbound does, after another server of the zone refused. Then the answer is what all of them may be told."""
        table = slot.table
        if table is not None and table.shared >= 0 and self._tellers.get(asker, 0.0) > self.now - TELLER_S:
            return table.shared
        return self._group_of(slot, asker)

    def _group_of(self, slot: _Slot, asker: bytes) -> int:
        """The group of who asks, where no client subnet says more."""
        table = slot.table
        if table is None or table.uniform:
            return 0
        if len(asker) == 16 and asker[:12] == b"\0\0\0\0\0\0\0\0\0\0\xff\xff":
            asker = asker[12:]
        family = 4 if len(asker) == 4 else 6
        starts, groups = table.starts[family], table.groups[family]
        group = groups[bisect_right(starts, int.from_bytes(asker[:8], "big")) - 1]
        return table.fallback if group == ASK_RESOLVER else group

    # -- what is prepared

    def _prepared(self, slot: _Slot, group: int, signed: bool) -> Prepared:
        if signed:
            keys = self._keys.get(self._head.zones[slot.name.zone].wire)
            if keys is not None:
                found = slot.signed.get(group)
                if found is None or self.now - found.made_at > AGAIN_S:
                    found = slot.signed[group] = self._make(slot, group, keys)
                return found
        found = slot.plain.get(group)
        if found is None:
            found = slot.plain[group] = self._make(slot, group, None)
        return found

    def _make(self, slot: _Slot, group: int, keys: ZoneKeys | None) -> Prepared:
        head, kind, table = self._head, slot.kind, slot.table
        zone = head.zones[slot.name.zone]
        if not head.ready and (kind in slot.name.tables or kind in slot.name.guarded):
            return Prepared(message.SERVFAIL, 0, 0, b"", self.now, error=_UNREADY, authoritative=False)
        first = -1
        if table is not None:
            order = [at for at in table.orders[group * table.width : (group + 1) * table.width] if at != NOBODY]
            if not order:
                return Prepared(message.SERVFAIL, 0, 0, b"", self.now, error=_LAWLESS, authoritative=False)
            first = order[0]
        if kind in slot.name.tables:
            entries = [head.entries[at] for at in order]
            each = (rdata for one in entries for rdata in (one.ipv4 if kind == A else one.ipv6))
            rdatas = list(dict.fromkeys(each))[:ADDRESSES_MAX]
            ttl = min(one.ttl for one in entries)
        elif kind == DNSKEY and kind not in slot.name.records:
            rdatas, ttl = list(self._keys[zone.wire].dnskeys), KEY_TTL_S
        else:
            records = slot.name.records[kind]
            rdatas, ttl = list(records.rdatas), records.ttl
        fixed = _POINTER + kind.to_bytes(2, "big") + b"\0\1" + ttl.to_bytes(4, "big")
        body = b"".join(fixed + len(rdata).to_bytes(2, "big") + rdata for rdata in rdatas)
        count = len(rdatas)
        if keys is not None:
            signatures, signed = self._signatures(keys, slot.name.wire, kind, ttl, rdatas, zone)
            body += signatures
            count += signed
        return Prepared(message.NOERROR, count, 0, body, self.now, first)

    def _signatures(
        self, keys: ZoneKeys, owner: bytes, kind: int, ttl: int, rdatas: Sequence[bytes], zone: Zone,
        pointer: bytes = _POINTER,
    ) -> tuple[bytes, int]:  # fmt: skip
        """The RRSIG records over a set, and how many."""
        fixed = pointer + RRSIG.to_bytes(2, "big") + b"\0\1" + ttl.to_bytes(4, "big")
        made = keys.rrsigs(owner, kind, ttl, rdatas, zone.wire, int(self.now))
        return b"".join(fixed + len(rrsig).to_bytes(2, "big") + rrsig for rrsig in made), len(made)

    # -- the strict way

    def _odd(self, data: bytes, asker: bytes, udp: bool) -> bytes | None:
        self.counts[ODD] += 1
        try:
            query = message.read(data)
        except message.Drop:
            self.counts[DROPPED] += 1
            return None
        except message.RefusedError as error:
            self.counts[MALFORMED] += 1
            return self._refusal(data, error)
        prepared, told = self._found(query, asker)
        options = b""
        if query.ecs is not None:
            family, source, address = query.ecs
            value = family.to_bytes(2, "big") + bytes((source, told)) + address
            options += b"\0\x08" + len(value).to_bytes(2, "big") + value
            self.counts[WITH_ECS] += 1
        if query.cookie is not None and self._cookies is not None:
            whole, proven = self._cookies.taken(query.cookie, asker, int(self.now))
            self.counts[PROVEN] += proven
            options += b"\0\x0a\0\x18" + whole
        if query.nsid and self._nsid:
            options += b"\0\x03" + len(self._nsid).to_bytes(2, "big") + self._nsid
        options += prepared.error
        opt = b""
        if query.edns:
            flags = b"\x80\0" if query.dnssec else b"\0\0"
            opt = b"\0\0\x29\x04\xd0\0\0" + flags + len(options).to_bytes(2, "big") + options
        return self._told(data, query.end, prepared, 2 * query.edns | data[2] & 1, query.payload, udp, opt)

    def _refusal(self, data: bytes, error: message.RefusedError) -> bytes:
        flags = bytes((0x80 | data[2] & 0x79, error.rcode & 15))
        asked = error.question_end > 12
        opt = b"\0\0\x29\x04\xd0" + bytes((error.rcode >> 4, 0, 0, 0, 0, 0)) if error.edns else b""
        counts = bytes((0, asked, 0, 0, 0, 0, 0, bool(opt)))
        return data[:2] + flags + counts + data[12 : error.question_end] + opt

    def _found(self, query: message.Query, asker: bytes) -> tuple[Prepared, int]:
        """What is answered to a query that was understood, and the scope to tell with it."""
        zone = self._zone_of(query.name)
        if query.class_ != IN or zone is None or query.type in message.TRANSFERS:
            self.counts[REFUSALS] += 1
            return Prepared(message.REFUSED, 0, 0, b"", self.now, authoritative=False), 0
        slot = self._slots.get(query.name + query.type.to_bytes(2, "big") + b"\0\1")
        if slot is not None:
            if query.ecs is None:
                return self._prepared(slot, self._untold(slot, asker), query.dnssec), 0
            group, told = self._group(slot, query.ecs, asker)
            return self._prepared(slot, group, query.dnssec), told
        name = self._names.get(query.name)
        if name is not None and query.type == ANY:
            rdata = b"\x07RFC8482\0"
            fixed = _POINTER + HINFO.to_bytes(2, "big") + b"\0\1" + ANY_TTL_S.to_bytes(4, "big")
            return Prepared(message.NOERROR, 1, 0, fixed + len(rdata).to_bytes(2, "big") + rdata, self.now), 0
        self.counts[NEGATIVE] += 1
        return self._denied(query, zone, name), 0

    def _zone_of(self, name: bytes) -> Zone | None:
        """The narrowest zone that a name is in."""
        within = [zone for zone in self._head.zones if _ends(name, zone.wire)]
        return max(within, key=lambda zone: len(zone.wire), default=None)

    def _denied(self, query: message.Query, zone: Zone, name: Name | None) -> Prepared:
        exists = name is not None or any(_ends(other, query.name) for other in self._names)
        pointer = (0xC000 | 12 + len(query.name) - len(zone.wire)).to_bytes(2, "big")
        ttl = zone.negative_ttl.to_bytes(4, "big")
        soa = pointer + SOA.to_bytes(2, "big") + b"\0\1" + ttl + len(zone.soa).to_bytes(2, "big") + zone.soa
        keys = self._keys.get(zone.wire) if query.dnssec else None
        if keys is None:
            return Prepared(message.NOERROR if exists else message.NXDOMAIN, 0, 1, soa, self.now)
        kinds: set[int] = set()
        if name is not None:
            kinds = {*name.tables, *name.records, *name.guarded} | ({DNSKEY} if name.wire == zone.wire else set())
        kinds.discard(query.type)
        denial = nsec(query.name, kinds, exists=exists)
        signatures, signed = self._signatures(keys, zone.wire, SOA, zone.negative_ttl, [zone.soa], zone, pointer)
        soa += signatures + _POINTER + NSEC.to_bytes(2, "big") + b"\0\1" + ttl + len(denial).to_bytes(2, "big") + denial
        soa += self._signatures(keys, query.name, NSEC, zone.negative_ttl, [denial], zone)[0]
        return Prepared(
            message.NOERROR, 0, 2 + 2 * signed, soa, self.now
        )  # RFC 9824, 2: no such name is told in the record alone

    # -- too many

    def _limited(self, data: bytes, asker: bytes) -> bytes | None:
        """Beyond the rate: whoever proves by a cookie that he is where he says is answered; others are mostly not."""
        counts = self.counts
        try:
            query = message.read(data)
        except (message.Drop, message.RefusedError):
            counts[LIMITED] += 1
            return None
        if query.cookie is not None and self._cookies is not None:
            _, proven = self._cookies.taken(query.cookie, asker, int(self.now))
            if proven:
                return self._odd(data, asker, True)
        counts[LIMITED] += 1
        if self._slip == 0 or counts[LIMITED] % self._slip:
            return None
        counts[SLIPPED] += 1
        return data[:2] + bytes((0x82 | data[2] & 1, 0, 0, 1, 0, 0, 0, 0, 0, 0)) + data[12 : query.end]


def _ends(name: bytes, zone: bytes) -> bool:
    """Whether a name in wire form is in a zone: the zone's labels are its last ones."""
    at = 0
    while len(name) - at > len(zone):
        at += 1 + name[at]
    return name[at:] == zone


def wire(name: str) -> bytes:
    """A name such as `eu.api.example.com` in wire form, in lower case. ValueError for one that is none."""
    labels = [label.encode("ascii").lower() for label in name.rstrip(".").split(".")] if name.rstrip(".") else []
    if any(not 0 < len(label) < 64 for label in labels):
        raise ValueError(f"{name!r} is no name: each label has 1 to 63 bytes")
    made = b"".join(bytes((len(label),)) + label for label in labels) + b"\0"
    if len(made) > 255:
        raise ValueError(f"{name!r} is no name: at most 255 bytes")
    return made


def packed(address: str) -> bytes:
    """An address as rdata."""
    return ip_address(address).packed


__all__ = ["AAAA", "COUNTERS", "HTTPS", "Prepared", "Responder", "packed", "wire"]
