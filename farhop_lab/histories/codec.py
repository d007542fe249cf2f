"""Values as columns: each field of each type is kept in a column of its own, which compresses ten times better.

Only positions and short tags are kept, no names of fields, classes or modules. `farhop_lab.histories.names` defines
what a tag stands for. Lossless, except that -0.0 comes back as 0.0 if a column holds binary fractions alone.
"""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

GRID = 1 << 20
"""Times on this grid of some microseconds are kept as integers."""

_NONE, _TRUE, _FALSE, _INT, _FLOAT, _TEXT, _BYTES, _TUPLE, _LIST, _SET, _DICT, _MADE, _BIG, _AGAIN = range(14)
_TAG = 32
_FIELDS_MAX = 64
_ELEMENT, _KEY, _VALUE = -1, -2, -3
_SEQUENCES = {_TUPLE: tuple, _LIST: list, _SET: frozenset}
_CONSTANTS = (None, True, False)  # by _NONE, _TRUE, _FALSE
_SMALL = 1 << 53


class Tag(NamedTuple):
    """How a type of value is taken apart and made again. `fields` name the parts for people. An object that is `shared`
    is kept once.
    """

    fields: tuple[str, ...]
    parts: Callable[[Any], tuple[Any, ...]]
    make: Callable[..., Any]
    shared: bool = False


@cache
def made_up(n: int) -> int:
    """The n-th of the 64-bit numbers that stand for hashes in a recording: kept as n, since hashes do not compress."""
    return xxh3_64_intdigest(n.to_bytes(8, "little")) or 1


class _Node:
    """One column: the types of its entries, their integers and floats, and the columns below. `made`: how entries of a
    tag are made, whether they are shared, and the columns of their parts, once looked up.
    """

    __slots__ = ("at", "floats", "ints", "kids", "kinds", "made")

    def __init__(self) -> None:
        self.kinds = bytearray()
        self.ints: Any = []
        self.floats: Any = []
        self.kids: dict[int, _Node] = {}
        self.made: dict[int, tuple[Callable[..., Any], bool, list[_Node]]] = {}
        self.at = 0

    def kid(self, key: int) -> _Node:
        kid = self.kids.get(key)
        if kid is None:
            kid = self.kids[key] = _Node()
        return kid


class Writer:
    """Writes values one after the other. `tag_of` returns a value's tag; `made` the number of those ints that are
    `made_up`.
    """

    def __init__(
        self, tags: Mapping[int, Tag], tag_of: Callable[[Any], int], made: Mapping[int, int] | None = None
    ) -> None:
        self._tags, self._tag_of, self._made = tags, tag_of, made or {}
        self._root = _Node()
        self._texts: dict[str, int] = {}
        self._bytes: dict[bytes, int] = {}
        self._bigs: dict[int, int] = {}
        self._known: dict[int, tuple[int, Any]] = {}  # with the object, so that its id is not reused

    def put(self, value: Any, column: int = 0) -> None:
        """Write a value to one of the outermost columns."""
        self._put(self._root.kid(column), value)

    def _put(self, node: _Node, value: Any) -> None:
        kinds = node.kinds
        if value is None:
            kinds.append(_NONE)
        elif value is True:
            kinds.append(_TRUE)
        elif value is False:
            kinds.append(_FALSE)
        elif type(value) is int or isinstance(value, np.integer):
            self._int(node, int(value))
        elif isinstance(value, float):
            kinds.append(_FLOAT)
            node.floats.append(float(value))
        elif isinstance(value, str):
            kinds.append(_TEXT)
            node.ints.append(self._texts.setdefault(str(value), len(self._texts)))
        elif isinstance(value, bytes):
            kinds.append(_BYTES)
            node.ints.append(self._bytes.setdefault(value, len(self._bytes)))
        elif isinstance(value, Mapping):
            kinds.append(_DICT)
            node.ints.append(len(value))
            for key, of in value.items():
                self._put(node.kid(_KEY), key)
                self._put(node.kid(_VALUE), of)
        elif type(value) in (tuple, list, set, frozenset):
            kinds.append(_TUPLE if type(value) is tuple else _LIST if type(value) is list else _SET)
            node.ints.append(len(value))
            element = node.kid(_ELEMENT)
            for one in sorted(value) if isinstance(value, set | frozenset) else value:
                self._put(element, one)
        else:
            self._tagged(node, value)

    def _int(self, node: _Node, value: int) -> None:
        if -_SMALL < value < _SMALL:
            node.kinds.append(_INT)
            node.ints.append(value)
        elif value in self._made:
            node.kinds.append(_MADE)
            node.ints.append(self._made[value])
        else:
            node.kinds.append(_BIG)
            node.ints.append(self._bigs.setdefault(value, len(self._bigs)))

    def _tagged(self, node: _Node, value: Any) -> None:
        number = self._tag_of(value)
        tag = self._tags[number]
        if tag.shared:
            known = self._known.get(id(value))
            if known is not None:
                node.kinds.append(_AGAIN)
                node.ints.append(known[0])
                return
            self._known[id(value)] = len(self._known), value
        node.kinds.append(_TAG + number)
        for place, part in enumerate(tag.parts(value)):
            self._put(node.kid(number * _FIELDS_MAX + place), part)

    def packed(self) -> list[Any]:
        """All columns as plain data."""
        bigs = [(big % (1 << 64)).to_bytes(8, "little") for big in self._bigs]
        return [list(self._texts), list(self._bytes), b"".join(bigs), _packed(self._root)]


class Reader:
    """Returns the values in the order of each outermost column. `tags` may make other types than were written. `flat`:
    every sequence is a tuple.
    """

    def __init__(self, packed: list[Any], tags: Mapping[int, Tag], *, flat: bool = False) -> None:
        self._sequences = dict.fromkeys(_SEQUENCES, tuple) if flat else _SEQUENCES
        self._texts, self._bytes = packed[0], packed[1]
        self._bigs = [int.from_bytes(packed[2][at : at + 8], "little") for at in range(0, len(packed[2]), 8)]
        self._packed: dict[str, list[Any]] = packed[3][-1]
        self._columns: dict[int, _Node] = {}  # the outermost ones that were read: of many nobody asks
        self._tags = {_TAG + number: (number * _FIELDS_MAX, tag) for number, tag in tags.items()}
        self._known: list[Any] = []

    def get(self, column: int = 0) -> Any:
        """The next value of a column. IndexError past its end."""
        node = self._columns.get(column)
        if node is None:
            node = self._columns[column] = _unpacked(self._packed[str(column)])
        return self._get(node)

    def _get(self, node: _Node) -> Any:
        kind = node.kinds[node.at]
        node.at += 1
        if kind == _FLOAT:
            return next(node.floats)
        if kind == _INT:
            return next(node.ints)
        if kind == _TEXT:
            return self._texts[next(node.ints)]
        if kind >= _TAG:
            make, shared, kids = node.made.get(kind) or self._made(node, kind)
            place, get = len(self._known), self._get
            if shared:
                self._known.append(None)
            parts: list[Any] = []
            for kid in kids:  # most are plain, and read without a call of their own
                part = kid.kinds[kid.at]
                if part > _FLOAT:
                    parts.append(get(kid))
                    continue
                kid.at += 1
                parts.append(
                    next(kid.floats) if part == _FLOAT else next(kid.ints) if part == _INT else _CONSTANTS[part]
                )
            value = make(*parts)
            if shared:
                self._known[place] = value
            return value
        if kind == _MADE:
            return made_up(next(node.ints))
        if kind in _SEQUENCES:
            length, made = next(node.ints), self._sequences[kind]
            if not length:
                return made()
            element, get = node.kids[_ELEMENT], self._get
            if element.kinds.count(_INT, element.at, element.at + length) == length:  # as of most: blocks, fingerprints
                element.at += length
                return made(islice(element.ints, length))
            return made([get(element) for _ in range(length)])
        if kind == _DICT:
            pairs = range(next(node.ints))
            return {self._get(node.kids[_KEY]): self._get(node.kids[_VALUE]) for _ in pairs}
        if kind == _AGAIN:
            return self._known[next(node.ints)]
        if kind == _BYTES:
            return self._bytes[next(node.ints)]
        if kind == _BIG:
            return self._bigs[next(node.ints)]
        return _CONSTANTS[kind]

    def _made(self, node: _Node, kind: int) -> tuple[Callable[..., Any], bool, list[_Node]]:
        first, tag = self._tags[kind]
        # What was recorded before a tag got another last field has no column for it.
        kids = [node.kids[key] for key in range(first, first + len(tag.fields)) if key in node.kids]
        made = node.made[kind] = tag.make, tag.shared, kids
        return made


def dump(content: Any) -> bytes:
    """Plain data (`Writer.packed` within) as a file's bytes."""
    return lzma.compress(msgspec.msgpack.encode(content), preset=9 | lzma.PRESET_EXTREME)


def load(document: bytes) -> Any:
    """The inverse of `dump`."""
    return msgspec.msgpack.decode(lzma.decompress(document), strict=False)


def _packed(node: _Node) -> list[Any]:
    kids = {str(key): _packed(kid) for key, kid in node.kids.items()}
    return [bytes(node.kinds), *_ints(node.ints), *_floats(node.floats), kids]


def _unpacked(packed: list[Any]) -> _Node:
    node = _Node()
    kinds, int_mode, ints, float_mode, floats, kids = packed
    node.kinds = bytearray(kinds)
    node.ints = iter(_ints_again(int_mode, ints))
    node.floats = iter(_floats_again(float_mode, floats))
    node.kids = {int(key): _unpacked(kid) for key, kid in kids.items()}
    return node


def _ints(values: list[int]) -> tuple[str, bytes]:
    """Mode and bytes: `p` plain or `d` differences, then the width; bytes of equal significance stand together."""
    if not values:
        return "", b""
    plain = np.array(values, dtype=np.int64)
    found = {"p": plain, "d": np.diff(plain, prepend=np.int64(0))}
    written = {}
    for mode, array in found.items():
        width = next(w for w in (1, 2, 4, 8) if _fits(array, w))
        written[f"{mode}{width}"] = _planes(array.astype(f"<i{width}"))
    mode = min(written, key=lambda mode: len(zlib.compress(written[mode], 6)))
    return mode, written[mode]


def _fits(array: Any, width: int) -> bool:
    limit = np.iinfo(f"<i{width}")
    return bool(array.min() >= limit.min and array.max() <= limit.max)


def _ints_again(mode: str, data: bytes) -> list[int]:
    if not mode:
        return []
    array = _rows(data, f"<i{mode[1]}").astype(np.int64)
    return (np.cumsum(array) if mode[0] == "d" else array).tolist()  # type: ignore[no-any-return]


def _floats(values: list[float]) -> tuple[str, bytes]:
    """As `_ints`, with `g` before it for floats on the grid; otherwise the width of the smallest float type that holds
    all.
    """
    if not values:
        return "", b""
    array = np.array(values, dtype=np.float64)
    scaled = array * GRID
    if np.isfinite(array).all() and (np.abs(scaled) < 1 << 62).all() and (scaled == np.rint(scaled)).all():
        mode, data = _ints(scaled.astype(np.int64).tolist())
        return f"g{mode}", data
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float32)
    if np.array_equal(narrow.astype(np.float64), array, equal_nan=True):
        return "f4", _planes(narrow.astype("<f4"))
    return "f8", _planes(array.astype("<f8"))


def _floats_again(mode: str, data: bytes) -> list[float]:
    if not mode:
        return []
    if mode[0] == "g":
        return [n / GRID for n in _ints_again(mode[1:], data)]
    return _rows(data, f"<{mode}").astype(np.float64).tolist()  # type: ignore[no-any-return]


def _planes(array: Any) -> bytes:
    return array.view(np.uint8).reshape(len(array), -1).T.tobytes()  # type: ignore[no-any-return]


def _rows(data: bytes, dtype: str) -> Any:
    width = np.dtype(dtype).itemsize
    return np.ascontiguousarray(np.frombuffer(data, np.uint8).reshape(width, -1).T).view(dtype).ravel()
