"""A view as one file, from which every worker answers: written whole beside the one in use, then mapped.

    8 bytes: length of the head · head (MessagePack) · tables, each array at a multiple of 8 bytes

A worker parses the head, which grows with names and entries alone, and names only when they changed; client networks
stay in the file, however many there are. Never decides what is answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from entry_dns.answers.prepare import Table


class Records(msgspec.Struct, frozen=True):
    """Records that are the same for every client. Rdata in wire form, canonical."""

    ttl: int
    rdatas: tuple[bytes, ...]


class Name(msgspec.Struct, frozen=True):
    """A name, in wire form and lower case. `tables`: by record type, the index of its table of answers; `records`:
    those that are the same for all clients, except an SOA's rdata, which is in its zone as it changes with each view;
    `guarded`: by record type, the table whose entries must not be empty for it to exist.
    """

    wire: bytes
    zone: int
    tables: dict[int, int] = {}
    records: dict[int, Records] = {}
    guarded: dict[int, int] = {}


class Zone(msgspec.Struct, frozen=True):
    """A zone. `soa` is that record's rdata, `negative_ttl` the TTL of a denial (RFC 2308)."""

    wire: bytes
    soa: bytes
    negative_ttl: int


class EntryAnswer(msgspec.Struct, frozen=True):
    """An entry's answers: its addresses as rdata, and their TTL."""

    name: str
    ipv4: tuple[bytes, ...]
    ipv6: tuple[bytes, ...]
    ttl: int


class _Array(msgspec.Struct, frozen=True):
    at: int
    count: int


class _Table(msgspec.Struct, frozen=True):
    starts: dict[int, _Array]
    groups: dict[int, _Array]
    orders: _Array
    index: _Array
    width: int
    uniform: bool
    fallback: int
    shared: int


class Head(msgspec.Struct, frozen=True):
    """The head of a view. `ready`: whether entries' states are known; otherwise every answer is SERVFAIL.
    `by_resolver`: whether a resolver's own address decides for a question without a client subnet, even if networks are
    confined.
    """

    zones: tuple[Zone, ...]
    names: tuple[Name, ...]
    entries: tuple[EntryAnswer, ...]
    tables: tuple[_Table, ...] = ()
    ready: bool = True
    by_resolver: bool = False


class _Packed(msgspec.Struct, frozen=True):
    """A head as written: names apart, which stay the same from one view to the next."""

    zones: tuple[Zone, ...]
    names: msgspec.Raw
    entries: tuple[EntryAnswer, ...]
    tables: tuple[_Table, ...]
    ready: bool
    by_resolver: bool


class Lookup(msgspec.Struct, frozen=True):
    """A table as used by a worker, by family: starts, groups. `orders`: `width` indices of entries for each group.
    `fallback`, `shared`: as in a prepared table.

    `index`: for the first 16 bits of an IPv4 address, how many intervals begin at or before them, and for the next.
    """

    starts: dict[int, Sequence[int]]
    groups: dict[int, Sequence[int]]
    orders: Sequence[int]
    index: Sequence[int]
    width: int
    uniform: bool
    fallback: int
    shared: int


_KINDS: dict[int, tuple[str, Literal["I", "Q"]]] = {4: ("<u4", "I"), 6: ("<u8", "Q")}


def encode(head: Head, tables: Sequence[Table]) -> bytes:
    """The view file's content: an 8-byte length, the head as msgpack, then the tables' arrays. `decode` reads it."""
    body, tables_made = bytearray(), []

    def put(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]], kind: str) -> _Array:
        body.extend(bytes(-len(body) % 8))
        at = len(body)
        body.extend(array.astype(kind).tobytes())
        return _Array(at, int(array.size))

    for one in tables:
        starts = {family: put(space.starts, _KINDS[family][0]) for family, space in one.spaces.items()}
        groups = {family: put(space.values, "<u4") for family, space in one.spaces.items()}
        also = one.fallback, one.shared
        width = int(one.orders.shape[1]) if one.orders.ndim == 2 else 0
        tables_made.append(
            _Table(starts, groups, put(one.orders, "<u2"), put(_index(one), "<u4"), width, one.uniform, *also)
        )
    names = msgspec.Raw(msgspec.msgpack.encode(head.names))
    packed = msgspec.msgpack.encode(
        _Packed(head.zones, names, head.entries, tuple(tables_made), head.ready, head.by_resolver)
    )
    packed += b"\xc0" * (-len(packed) % 8)  # nil: what follows the head is not parsed
    return len(packed).to_bytes(8, "little") + packed + bytes(body)


def _index(table: Table) -> npt.NDArray[np.int64]:
    """Where to search an IPv4 address: between the intervals that contain the first of its /16 and of the next."""
    marks = np.arange(0, (1 << 16) + 1, dtype=np.uint64) << np.uint64(16)
    return np.searchsorted(table.spaces[4].starts, marks, side="right")


def decode(data: memoryview) -> tuple[Head, tuple[Lookup, ...]]:
    """The head of a view, and its tables in place. Names equal to those of the previous view are the same object: a
    worker with thousands must not stop for them each time that an entry's share changes.
    """
    length = int.from_bytes(data[:8], "little")
    found = _decoder.decode(bytes(data[8 : 8 + length]).rstrip(b"\xc0"))
    head = Head(found.zones, _names(bytes(found.names)), found.entries, found.tables, found.ready, found.by_resolver)
    body = data[8 + length :]

    def at(array: _Array, kind: Literal["H", "I", "Q"], size: int) -> Sequence[int]:
        return body[array.at : array.at + size * array.count].cast(kind)

    tables = tuple(
        Lookup(
            {family: at(array, _KINDS[family][1], 4 if family == 4 else 8) for family, array in one.starts.items()},
            {family: at(array, "I", 4) for family, array in one.groups.items()},
            at(one.orders, "H", 2),
            at(one.index, "I", 4),
            one.width,
            one.uniform,
            one.fallback,
            one.shared,
        )
        for one in head.tables
    )
    return head, tables


@lru_cache(maxsize=1)
def _names(packed: bytes) -> tuple[Name, ...]:
    return _names_decoder.decode(packed)


_decoder = msgspec.msgpack.Decoder(_Packed)
_names_decoder = msgspec.msgpack.Decoder(tuple[Name, ...])
