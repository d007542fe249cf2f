"""From a query's bytes to its answer's bytes: a fast path for ordinary questions, a strict one for all others.

The strict path (`message.read`) understands any query, and remembers what it learned about repeated bytes: everything
after the question except the client's network. The fast path recognises those bytes, finds the network in a table and
assembles a prepared answer; it parses nothing itself. Invariants: an answer is positive and for the client's network,
or, if the law leaves no entry, SERVFAIL with an extended error: never NODATA or REFUSED, which resolvers would give to
other networks, too; an answer that a resolver may give to all of its clients is lawful for all of them; the answer to a
malformed query is never larger than the query; question bytes are echoed unchanged (0x20). Pure: the time and the
sender's address are arguments.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from ipaddress import ip_address
from typing import NamedTuple

from entry_dns.answers import message
from entry_dns.answers.cookies import Cookies
from entry_dns.answers.message import AAAA, ANY, DNSKEY, DS, HINFO, HTTPS, IN, NS, NSEC, NXNAME, RRSIG, SOA, A
from entry_dns.answers.prepare import ASK_RESOLVER, NO_ENTRY
from entry_dns.answers.signing import AGAIN_S, BACK_S, ZoneKeys, delegation, nsec
from entry_dns.answers.snapshot import Head, Lookup, Name, Records, Zone
from entry_dns.fleet.networks import BITS, scope

ADDRESSES_MAX = 8  # in one answer
ANY_TTL_S = 3600
KEY_TTL_S = 3600
BUCKETS = 1 << 14
ASKERS_MAX = 16_384
TAILS_MAX = 8192
SENDER_S = 3600.0
SPAN_MAX = 1024  # networks within one client subnet that are looked at; a wider one gets what is lawful for all

QUERIES, ODD, MALFORMED, DROPPED, SERVFAILS, NEGATIVE = range(6)
REFUSALS, TRUNCATED, LIMITED, SLIPPED, WITH_ECS, PROVEN = range(6, 12)
COUNTERS = (
    "queries", "odd", "malformed", "dropped", "servfail", "negative", "refused", "truncated", "limited", "slipped",
    "client_subnet", "cookie_proven",
)  # fmt: skip

_POINTER = b"\xc0\x0c"
_SUBNET = b"\0\x08\0"  # how the option of a client subnet begins: its code, and a length of less than 256
_BYTE = tuple(bytes((n,)) for n in range(256))
# Of an address's bytes, by the prefix length.
_OCTETS = {b"": 0, **{byte: (n + 7) >> 3 for n, byte in enumerate(_BYTE)}}
_number = int.from_bytes  # big-endian
_OPT = b"\0\0\x29\x04\xd0\0\0"


def _extended(code: int, text: bytes) -> bytes:
    """An extended DNS error (RFC 8914) as an option."""
    return b"\0\x0f" + (2 + len(text)).to_bytes(2, "big") + code.to_bytes(2, "big") + text


_LAWLESS = _extended(18, b"the law leaves this network no entry for this name")  # Prohibited
_UNREADY = _extended(14, b"nothing is known of the entries yet")  # Not Ready
_IN4, _IN6 = BITS[4], BITS[6]


class Prepared:
    """An answer without the parts that depend on the query: `heads` are flags and counts by (EDNS, RD), `body` what
    follows the question, `size` its bytes, `first` the entry it leads to (-1: none), `error` an extended error for the
    OPT record (b"" if it leads to an entry).
    """

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
    """A question with answers: its name, its type, the table of networks, and the answers prepared so far.

    `starts`, `groups`, `index` are the table's for IPv4, `last` its last row; without `starts` all are answered alike.
    `without_subnet`: the group of a question that has no client subnet, -1 if the resolver's own address decides.
    `remembers_senders`: resolvers that send subnets are remembered, since without one they ask for all clients.
    `joined`: orders of entries that are no group of the table, by their group's number from the table's count on.
    """

    __slots__ = (
        "groups", "index", "joined", "kind", "last", "name", "plain", "remembers_senders", "signed", "starts", "table",
        "without_subnet",
    )  # fmt: skip

    def __init__(self, name: Name, kind: int, table: Lookup | None, by_resolver: bool) -> None:
        self.name, self.kind, self.table = name, kind, table
        self.starts: Sequence[int] | None = None
        confines = table is not None and table.shared >= 0
        self.remembers_senders = confines and by_resolver
        self.without_subnet = -1
        if table is None or table.uniform:
            self.without_subnet = 0
        else:
            self.starts, self.groups, self.index = table.starts[4], table.groups[4], table.index
            self.last = len(self.starts) - 1
            if confines and not by_resolver:
                self.without_subnet = table.shared
        self.plain: dict[int, Prepared] = {}
        self.signed: dict[int, Prepared] = {}
        self.joined: list[tuple[int, ...]] = []

    def order(self, group: int) -> tuple[int, ...]:
        """The entries that a group is answered with, best first."""
        table = self.table
        assert table is not None
        if table.width and group >= len(table.orders) // table.width:
            return self.joined[group - len(table.orders) // table.width]
        return tuple(at for at in table.orders[group * table.width : (group + 1) * table.width] if at != NO_ENTRY)

    def join(self, groups: Sequence[int]) -> int:
        """The group with those entries of the first group that all of these have; `shared` if there are none."""
        table = self.table
        assert table is not None
        orders = [self.order(group) for group in groups]
        order = tuple(at for at in orders[0] if all(at in other for other in orders))
        if not order:
            return table.shared
        if order == orders[0]:
            return groups[0]
        if order not in self.joined:  # at most the parts of the table's few orders
            self.joined.append(order)
        return len(table.orders) // table.width + self.joined.index(order)


class _Tail(NamedTuple):
    """What was parsed from the bytes around a question (flags and counts before it, all after it except the client's
    network), and what answers need for them. `size`: of all after the question; `owner`: the client whose verified
    cookie is in them, None if any client may send them; `head`: EDNS and RD, as in Prepared.heads; `room`: bytes an
    answer may have for its question and its records.

    `family`: of the client subnet, 0 without any; `source`: its prefix length, `stray`: bits that must not be set;
    `shift`: turns its bytes into an IPv4 address. An answer ends with `opt`, the scope, the network as it came,
    `after`.
    """

    size: int
    owner: bytes | None
    head: int
    signed: bool
    room: int
    family: int
    source: int
    stray: int
    shift: int
    opt: bytes
    after: bytes


class Responder:
    """Answers from one view at a time. `cookies`: None for none; `nsid`: this server's identifier, b"" for none;
    `rate`: answers a second for a network (/24, /64) that proves nothing, 0 for any number; every `slip`-th beyond is
    truncated, to come by TCP; `keys`: zones' keys by the zone's name in wire form."""

    def __init__(
        self,
        cookies: Cookies | None = None,
        nsid: bytes = b"",
        rate: int = 0,
        slip: int = 2,
        keys: dict[bytes, ZoneKeys] | None = None,
    ) -> None:
        self._cookies, self._nsid, self.rate, self._slip = cookies, nsid, rate, slip
        self._keys = keys or {}
        self._seen = [0] * BUCKETS
        self._signed = 0  # signatures so far
        self._signed_of = [0] * BUCKETS  # by network: answers of this second that took some, to valid cookies
        self.askers: dict[str, tuple[bytes, int]] = {}
        self.tails: dict[bytes, _Tail] = {}
        self._subnet_senders: dict[
            bytes, float
        ] = {}  # senders of a client subnet for a name whose lawful entries differ by network, and when
        self.counts = [0] * len(COUNTERS)
        self.led: list[int] = []
        self.now = 0.0
        self._listed: tuple[Name, ...] | None = None
        self.adopt(Head((), (), (), ready=False), ())

    def adopt(self, head: Head, tables: Sequence[Lookup]) -> None:
        """From now on answer from this view. The cost does not depend on the number of client networks, nor on that of
        names if they did not change: the rest is prepared when a question is first asked.
        """
        if head.names is not self._listed:
            self._listed = head.names
            self._names = {name.wire: name for name in head.names}
            self._above = {above for name in head.names for above in _above(name.wire)}
        self.head, self._tables = head, tables
        self.led = [0] * len(head.entries)
        self._zones = {zone.wire: zone for zone in head.zones}
        self._slots: dict[bytes, _Slot] = {}

    def _slot(self, wired: bytes, kind: int) -> _Slot | None:
        """The slot of a name's records of a type; None if it has none."""
        question = wired + kind.to_bytes(2, "big") + b"\0\1"
        found = self._slots.get(question)
        name = self._names.get(wired)
        if found is not None or name is None:
            return found
        at = name.tables.get(kind, name.guarded.get(kind, -1))
        if (
            at < 0
            and kind not in name.records
            and not (kind == DNSKEY and wired in self._keys and wired in self._zones)
        ):
            return None
        made = _Slot(name, kind, self._tables[at] if 0 <= at < len(self._tables) else None, self.head.by_resolver)
        self._slots[question] = made
        return made

    def tick(self, now: float) -> None:
        """A second has passed: rates are counted anew. `now`: seconds since 1970."""
        if int(now) // 60 != int(self.now) // 60:
            self.tails.clear()  # cookies grow old
        self.now = now
        self._seen, self._signed_of = [0] * BUCKETS, [0] * BUCKETS

    # -- the fast path

    def answer(self, data: bytes, host: str, udp: bool = True) -> bytes | None:
        """The answer to a message from this address; None: send nothing.

        Written for speed: a call costs about one look into a table, so everything that a question needs is in this
        function. The bytes that make the key are certain: the network's location and length are determined by the bytes
        before it.
        """
        counts = self.counts
        counts[0] += 1
        asker, bucket = self.askers.get(host) or self._sender(host)
        end = data.find(b"\0", 12) + 5
        question = data[12:end]
        at = end + 19 if data[end + 11 : end + 14] == _SUBNET else data.find(_SUBNET, end + 11) + 8
        if at > 7:
            stop = at + _OCTETS[data[at - 2 : at - 1]]
            network = data[at:stop]
            tail = self.tails.get(data[2:12] + data[end:at] + data[stop:])
        else:
            tail = self.tails.get(data[2:12] + data[end:])
        slot = self._slots.get(question)
        if slot is None:
            slot = self._slots.get(data[12 : end - 4].lower() + data[end - 4 : end])
        if slot is None or tail is None or not udp:
            return self._strict(data, asker, bucket, udp)
        size, owner, head, signed, room, family, source, stray, shift, opt, after = tail
        if owner != asker:
            if owner is not None:
                return self._strict(data, asker, bucket, udp)
            seen = self._seen[bucket]
            if seen >= self.rate > 0:
                return self._strict(data, asker, bucket, udp)
            self._seen[bucket] = seen + 1
        else:
            counts[11] += 1
        if family:
            value = _number(network)
            if value & stray or size != len(data) - end:
                return self._strict(data, asker, bucket, udp)
            counts[10] += 1
            starts = slot.starts
            if family == 1 and source and starts is not None:
                address, index = value << shift, slot.index
                high = address >> 16
                row = bisect_right(starts, address, index[high], index[high + 1]) - 1
                group, apart = slot.groups[row], 0xFFFFFFFF  # as in networks.scope
                if row:
                    apart = address ^ (starts[row] - 1)
                if row < slot.last:
                    behind = address ^ starts[row + 1]
                    if behind < apart:
                        apart = behind
                length = 33 - apart.bit_length()
                if length > source or group == ASK_RESOLVER:
                    group = self._group_of_subnet(slot, 4, source, address, row, asker)
                if slot.remembers_senders:
                    self._remember_sender(asker)
            else:
                group, length = self._group(slot, (family, source, network), asker)
            opt = opt + _BYTE[length] + network
        else:
            group = self._group_without_subnet(slot, asker)
        known = None if signed else slot.plain.get(group)
        if known is None:
            known = self._prepared(slot, group, signed)
        if known.error or end + known.size > room:
            return self._assembled(data, end, known, head, room, opt, after)
        first = known.first
        if first >= 0:
            self.led[first] += 1
        return b"".join((data[:2], known.heads[head], question, known.body, opt, after))

    def _sender(self, host: str) -> tuple[bytes, int]:
        """A sender's address in bytes, and the count of its network's rate."""
        if len(self.askers) >= ASKERS_MAX:
            self.askers.clear()
        asker = ip_address(host.partition("%")[0]).packed
        met = self.askers[host] = asker, hash(asker[:3] if len(asker) == 4 else asker[:8]) % BUCKETS
        return met

    def _assembled(
        self, data: bytes, end: int, prepared: Prepared, head: int, room: int, opt: bytes, after: bytes
    ) -> bytes:
        """The answer's bytes; without its records if they do not fit."""
        if prepared.first >= 0:
            self.led[prepared.first] += 1
        elif prepared.rcode == message.SERVFAIL:
            self.counts[SERVFAILS] += 1
        error = prepared.error if opt else b""
        if error:
            opt = opt[:9] + (int.from_bytes(opt[9:11], "big") + len(error)).to_bytes(2, "big") + opt[11:]
        if end + prepared.size + len(error) > room:
            self.counts[TRUNCATED] += 1
            flags = prepared.heads[head]
            cut = bytes((flags[0] | 2, flags[1], 0, 1, 0, 0, 0, 0, 0, flags[9]))
            return data[:2] + cut + data[12:end] + opt + after + error
        return data[:2] + prepared.heads[head] + data[12:end] + prepared.body + opt + after + error

    # -- which networks decide

    def _group(self, slot: _Slot, ecs: tuple[int, int, bytes], asker: bytes) -> tuple[int, int]:
        """The group of a client subnet, and the scope of its answer. A resolver may give the answer to a subnet of no
        bits to all of its clients (scope 0), so it must be lawful for all of them.
        """
        table = slot.table
        family, source, given = ecs
        if table is None or table.uniform:
            return 0, 0
        if slot.remembers_senders:
            self._remember_sender(asker)
        if source == 0:
            return (table.shared if table.shared >= 0 else self._group_of(slot, asker)), 0
        if family == 1:
            starts, bits = table.starts[4], _IN4
            address = int.from_bytes(given, "big") << (32 - 8 * len(given))
        else:
            starts, bits = table.starts[6], _IN6
            address = int.from_bytes(given[:8], "big") << (64 - 8 * min(len(given), 8))
        at = bisect_right(starts, address) - 1
        length = scope(starts, at, address, bits)
        return self._group_of_subnet(slot, 4 if family == 1 else 6, source, address, at, asker), length or 1

    def _group_of_subnet(self, slot: _Slot, family: int, source: int, address: int, at: int, asker: bytes) -> int:
        """The group of a client subnet that begins at this address, in the table's interval `at`.

        A resolver gives the answer to the whole subnet that it sent, even if the scope says that a longer one decides
        (RFC 7871, 7.3.1). So if networks are confined, a subnet of several networks gets only the entries of the first
        one that all of them have.
        """
        table = slot.table
        assert table is not None
        starts, groups, group = table.starts[family], table.groups[family], table.groups[family][at]
        if table.shared >= 0:
            end = address + (1 << max(0, (_IN4 if family == 4 else _IN6) - source)) - 1
            last = bisect_right(starts, end, at) - 1
            if last - at >= SPAN_MAX:
                return table.shared
            if last > at:
                found = dict.fromkeys(groups[at : last + 1])
                return slot.join([self._group_of(slot, asker) if one == ASK_RESOLVER else one for one in found])
        return self._group_of(slot, asker) if group == ASK_RESOLVER else group

    def _remember_sender(self, asker: bytes) -> None:
        if len(self._subnet_senders) >= ASKERS_MAX:
            self._subnet_senders.clear()
        self._subnet_senders[asker] = self.now

    def _group_without_subnet(self, slot: _Slot, asker: bytes) -> int:
        """The group of a question without a client subnet. Its answer may be given to all clients of the resolver, so
        if networks are confined it is the answer that is lawful for all. If the resolver's own address is to decide, it
        does, except for resolvers that otherwise send subnets: unbound asks without one after another server of the
        zone refused."""
        if slot.without_subnet >= 0:
            return slot.without_subnet
        table = slot.table
        if slot.remembers_senders and table is not None and self._subnet_senders.get(asker, 0.0) > self.now - SENDER_S:
            return table.shared
        return self._group_of(slot, asker)

    def _group_of(self, slot: _Slot, asker: bytes) -> int:
        """The group of the sender's own address, used if no client subnet decides."""
        table = slot.table
        if table is None or table.uniform:
            return 0
        if len(asker) == 16 and asker[:12] == b"\0\0\0\0\0\0\0\0\0\0\xff\xff":
            asker = asker[12:]
        family = 4 if len(asker) == 4 else 6
        starts, groups = table.starts[family], table.groups[family]
        group = groups[bisect_right(starts, int.from_bytes(asker[:8], "big")) - 1]
        return table.fallback if group == ASK_RESOLVER else group

    # -- preparing answers

    def _prepared(self, slot: _Slot, group: int, signed: bool) -> Prepared:
        if signed:
            keys = self._keys.get(self.head.zones[slot.name.zone].wire)
            if keys is not None:
                found = slot.signed.get(group)
                # Also made anew after the wall clock was set back before the beginning of the signatures.
                if found is None or not -BACK_S < self.now - found.made_at <= AGAIN_S:
                    found = slot.signed[group] = self._make(slot, group, keys)
                return found
        found = slot.plain.get(group)
        if found is None:
            found = slot.plain[group] = self._make(slot, group, None)
        return found

    def _make(self, slot: _Slot, group: int, keys: ZoneKeys | None) -> Prepared:
        head, kind, table = self.head, slot.kind, slot.table
        zone = head.zones[slot.name.zone]
        if not head.ready and (kind in slot.name.tables or kind in slot.name.guarded):
            return Prepared(message.SERVFAIL, 0, 0, b"", self.now, error=_UNREADY, authoritative=False)
        first = -1
        if table is not None:
            order = slot.order(group)
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
        elif kind == SOA:
            rdatas, ttl = [zone.soa], zone.negative_ttl
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
        self._signed += 1
        return b"".join(fixed + len(rrsig).to_bytes(2, "big") + rrsig for rrsig in made), len(made)

    # -- the strict path

    def _strict(self, data: bytes, asker: bytes, bucket: int, udp: bool) -> bytes | None:
        self.counts[ODD] += 1
        try:
            query = message.read(data)
        except message.Drop:
            self.counts[DROPPED] += 1
            return None
        except message.RefusedError as error:
            self.counts[MALFORMED] += 1
            return None if udp and self._limited(bucket) else self._refusal(data, error)
        if not query.name:
            return self._cookie_alone(data, query, asker, bucket, udp)
        after, proven = b"", False
        if query.cookie is not None and self._cookies is not None:
            whole, proven = self._cookies.verify(query.cookie, asker, int(self.now))
            self.counts[PROVEN] += proven
            after = b"\0\x0a\0\x18" + whole
        if udp and (self._signed_too_often(query, bucket) if proven else self._limited(bucket)):
            return self._slipped(data, query)
        if query.nsid and self._nsid:
            after += b"\0\x03" + len(self._nsid).to_bytes(2, "big") + self._nsid
        tail = self._read(data, query, asker if proven else None, after, udp)
        # A cookie that proves nothing comes once: its sender comes back with the one that it got.
        if udp and (proven or query.cookie is None or self._cookies is None):
            self._keep(data, query, tail)
        before = self._signed
        prepared, length = self._found(query, asker)
        if udp and proven:  # who proves nothing, and may be spoofed, uses up nothing of who does
            self._signed_of[bucket] += self._signed > before
        opt = tail.opt
        if query.ecs is not None:
            opt += _BYTE[length] + query.ecs[2]
            self.counts[WITH_ECS] += 1
        return self._assembled(data, query.end, prepared, tail.head, tail.room, opt, after)

    def _cookie_alone(self, data: bytes, query: message.Query, asker: bytes, bucket: int, udp: bool) -> bytes | None:
        """The answer to a query for a cookie alone (RFC 7873, 5.4). A sender with a valid cookie is treated
        accordingly."""
        if self._cookies is None or query.cookie is None:
            self.counts[MALFORMED] += 1
            return None if udp and self._limited(bucket) else self._refusal(data, message.RefusedError(message.FORMERR))
        whole, proven = self._cookies.verify(query.cookie, asker, int(self.now))
        self.counts[PROVEN] += proven
        if udp and not proven and self._limited(bucket):
            return None
        opt = _OPT + b"\0\0" + (4 + len(whole)).to_bytes(2, "big") + b"\0\x0a\0\x18" + whole
        return data[:2] + bytes((0x80 | data[2] & 1, 0)) + b"\0\0\0\0\0\0\0\1" + opt

    @staticmethod
    def _read(data: bytes, query: message.Query, owner: bytes | None, after: bytes, udp: bool) -> _Tail:
        family, source, given = query.ecs or (0, 0, b"")
        size, opt = len(after), b""
        if family:
            subnet = b"\0\x08" + (4 + len(given)).to_bytes(2, "big") + family.to_bytes(2, "big") + bytes((source,))
            size += len(subnet) + 1 + len(given)
        if query.edns:
            opt = _OPT + (b"\x80\0" if query.dnssec else b"\0\0") + size.to_bytes(2, "big")
            size += len(opt)
            opt += subnet if family else b""
        limit = min(query.payload, message.PAYLOAD_MAX) if udp else 0xFFFF
        return _Tail(
            len(data) - query.end, owner, 2 * query.edns | data[2] & 1, query.dnssec, limit - size, family, source,
            (1 << (-source & 7)) - 1, 32 - 8 * len(given), opt, after,
        )  # fmt: skip

    def _keep(self, data: bytes, query: message.Query, tail: _Tail) -> None:
        """Remember these bytes, if the fast path finds the question's end and the network in them."""
        end = data.find(b"\0", 12) + 5
        at = data.find(_SUBNET, end + 11) + 8
        if end != query.end or at != max(query.ecs_at, 7):
            return
        if len(self.tails) >= TAILS_MAX:
            self.tails.clear()
        behind = data[end:] if tail.family == 0 else data[end:at] + data[at + len(query.ecs[2]) :] if query.ecs else b""
        self.tails[data[2:12] + behind] = tail

    def _refusal(self, data: bytes, error: message.RefusedError) -> bytes:
        flags = bytes((0x80 | data[2] & 0x79, error.rcode & 15))
        asked = error.question_end > 12
        opt = b"\0\0\x29\x04\xd0" + bytes((error.rcode >> 4, 0, 0, 0, 0, 0)) if error.edns else b""
        counts = bytes((0, asked, 0, 0, 0, 0, 0, bool(opt)))
        return data[:2] + flags + counts + data[12 : error.question_end] + opt

    def _found(self, query: message.Query, asker: bytes) -> tuple[Prepared, int]:
        """The answer to a parsed query, and its scope."""
        zone = self._zone_of(query.name)
        if query.class_ != IN or zone is None or query.type in message.TRANSFERS:
            self.counts[REFUSALS] += 1
            return Prepared(message.REFUSED, 0, 0, b"", self.now, authoritative=False), 0
        if query.type == NXNAME:  # a mark in denials, and never a question (RFC 9824, 3.5)
            self.counts[MALFORMED] += 1
            return Prepared(message.FORMERR, 0, 0, b"", self.now, authoritative=False), 0
        if query.type == DS and query.name in self._zones:
            outer = next((found for one in _above(query.name) if (found := self._zones.get(one)) is not None), None)
            if outer is not None:
                return self._delegated(query, outer), 0
        slot = self._slot(query.name, query.type)
        if slot is not None:
            if query.ecs is None:
                return self._prepared(slot, self._group_without_subnet(slot, asker), query.dnssec), 0
            group, length = self._group(slot, query.ecs, asker)
            return self._prepared(slot, group, query.dnssec), length
        name = self._names.get(query.name)
        if name is not None and query.type == ANY:
            return self._minimal(query, zone), 0
        if query.type in (NSEC, RRSIG) and zone.wire in self._keys and (name is not None or query.dnssec):
            return self._own_denial(query, zone, name), 0
        self.counts[NEGATIVE] += 1
        return self._denied(query, zone, name), 0

    def _delegated(self, query: message.Query, outer: Zone) -> Prepared:
        """What a zone here says of one within it that is here, too: its DS records, or that it has none."""
        inner, keys = self._keys.get(query.name), self._keys.get(outer.wire) if query.dnssec else None
        if inner is None:
            self.counts[NEGATIVE] += 1
            return self._denied(query, outer, Name(query.name, 0, {}, {NS: Records(0, ())}))
        rdatas = [delegation(query.name, dnskey) for dnskey in inner.entry_points]
        fixed = _POINTER + DS.to_bytes(2, "big") + b"\0\1" + KEY_TTL_S.to_bytes(4, "big")
        body = b"".join(fixed + len(rdata).to_bytes(2, "big") + rdata for rdata in rdatas)
        signatures, signed = b"", 0
        if keys is not None:
            signatures, signed = self._signatures(keys, query.name, DS, KEY_TTL_S, rdatas, outer)
        return Prepared(message.NOERROR, len(rdatas) + signed, 0, body + signatures, self.now)

    def _minimal(self, query: message.Query, zone: Zone) -> Prepared:
        """The answer to a question for everything (RFC 8482, 4.2), signed like any other."""
        rdata = b"\x07RFC8482\0"
        fixed = _POINTER + HINFO.to_bytes(2, "big") + b"\0\1" + ANY_TTL_S.to_bytes(4, "big")
        body, signed = fixed + len(rdata).to_bytes(2, "big") + rdata, 0
        keys = self._keys.get(zone.wire) if query.dnssec else None
        if keys is not None:
            signatures, signed = self._signatures(keys, query.name, HINFO, ANY_TTL_S, [rdata], zone)
            body += signatures
        return Prepared(message.NOERROR, 1 + signed, 0, body, self.now)

    def _own_denial(self, query: message.Query, zone: Zone, name: Name | None) -> Prepared:
        """The answer to a question for a name's NSEC record, or for its signatures, of which these are some.

        Every name of a signed zone has both, as its NSEC record says itself: they cannot be denied.
        """
        keys, denial = self._keys[zone.wire], self._nsec(query, zone, name)
        body, signed = b"", 0
        if query.dnssec or query.type == RRSIG:
            body, signed = self._signatures(keys, query.name, NSEC, zone.negative_ttl, [denial], zone)
        if query.type == NSEC:
            fixed = _POINTER + NSEC.to_bytes(2, "big") + b"\0\1" + zone.negative_ttl.to_bytes(4, "big")
            body, signed = fixed + len(denial).to_bytes(2, "big") + denial + body, signed + 1
        return Prepared(message.NOERROR, signed, 0, body, self.now)

    def _zone_of(self, name: bytes) -> Zone | None:
        """The most specific zone that contains a name."""
        return next((zone for one in (name, *_above(name)) if (zone := self._zones.get(one)) is not None), None)

    def _denied(self, query: message.Query, zone: Zone, name: Name | None) -> Prepared:
        exists = name is not None or query.name in self._above
        pointer = (0xC000 | 12 + len(query.name) - len(zone.wire)).to_bytes(2, "big")
        ttl = zone.negative_ttl.to_bytes(4, "big")
        soa = pointer + SOA.to_bytes(2, "big") + b"\0\1" + ttl + len(zone.soa).to_bytes(2, "big") + zone.soa
        keys = self._keys.get(zone.wire) if query.dnssec else None
        if keys is None:
            return Prepared(message.NOERROR if exists else message.NXDOMAIN, 0, 1, soa, self.now)
        denial = self._nsec(query, zone, name)
        signatures, signed = self._signatures(keys, zone.wire, SOA, zone.negative_ttl, [zone.soa], zone, pointer)
        soa += signatures + _POINTER + NSEC.to_bytes(2, "big") + b"\0\1" + ttl + len(denial).to_bytes(2, "big") + denial
        soa += self._signatures(keys, query.name, NSEC, zone.negative_ttl, [denial], zone)[0]
        return Prepared(
            message.NOERROR, 0, 2 + 2 * signed, soa, self.now
        )  # RFC 9824, 2: that the name does not exist is in the record alone

    def _nsec(self, query: message.Query, zone: Zone, name: Name | None) -> bytes:
        """The NSEC record's rdata of the queried name, which denies all types that it does not have."""
        kinds: set[int] = set()
        if name is not None:
            kinds = {*name.tables, *name.records, *name.guarded} | ({DNSKEY} if name.wire == zone.wire else set())
        return nsec(query.name, kinds, zone.wire, exists=name is not None or query.name in self._above)

    # -- rate limit

    def _limited(self, bucket: int) -> bool:
        """Whether a sender without a valid cookie exceeds its network's rate; counts the query."""
        seen = self._seen[bucket]
        if seen >= self.rate > 0:
            self.counts[LIMITED] += 1
            return True
        self._seen[bucket] = seen + 1
        return False

    def _signed_too_often(self, query: message.Query, bucket: int) -> bool:
        """Whether an answer may have to be signed for a network for which as many were, in this second, as it may ask
        without a cookie. What a name has is signed once and kept; that another does not exist is signed each time, for
        0.1 ms and more, and there are names without end.
        """
        if not (query.dnssec or query.type == RRSIG) or not self._signed_of[bucket] >= self.rate > 0:
            return False
        if self._slot(query.name, query.type) is not None:
            return False
        self.counts[LIMITED] += 1
        return True

    def _slipped(self, data: bytes, query: message.Query) -> bytes | None:
        """Of those, every `slip`-th is truncated, to come by TCP."""
        if self._slip == 0 or self.counts[LIMITED] % self._slip:
            return None
        self.counts[SLIPPED] += 1
        return data[:2] + bytes((0x82 | data[2] & 1, 0, 0, 1, 0, 0, 0, 0, 0, 0)) + data[12 : query.end]


def _above(name: bytes) -> list[bytes]:
    """The names in wire form above a name, the nearest first, the root last."""
    found, at = [], 0
    while name[at]:
        at += 1 + name[at]
        found.append(name[at:])
    return found


def wire(name: str) -> bytes:
    """A name such as `eu.api.example.com` in wire form, in lower case. ValueError for an invalid one."""
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
