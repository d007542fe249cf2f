"""The difference between two pictures, and a ring with the last hour of them: for viewers that resume or look back.

A picture is a tree of dicts without None, in which a list is a single value. A patch is the tree of new values, with
None for each value that was removed. Invariant: `apply(old, diff(old, new)) == new`. The ring is bounded in time and
bytes; the oldest entries go first. Pure; never interprets a picture.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Generator
from typing import Any, NamedTuple

import msgspec

Picture = dict[str, Any]
AT_ONCE = 200  # values or rows compared in a turn: a third of a millisecond, or one with replicas
CHUNK = 60  # pictures between two that are kept whole
STEP_BYTES = 16 * 1024  # compressed at once: half a millisecond
HISTORY_S = 3600
HISTORY_BYTES_MAX = 16 * 1024 * 1024
RESUME_MAX = 120  # patches that a viewer who was away is given; else it begins anew


def diff(old: Picture, new: Picture) -> Picture:
    """The patch from one picture to another."""
    patch: Picture = {key: None for key in old if key not in new}
    for key, value in new.items():
        if key not in old:
            patch[key] = value
            continue
        was = old[key]
        if was is value:
            continue
        if isinstance(value, dict) and isinstance(was, dict):
            if inner := diff(was, value):
                patch[key] = inner
        elif was != value or type(was) is not type(value):
            # A dict in the place of another value is applied to nothing, so that none of the old is left in it.
            patch[key] = value
    return patch


def diff_in_turns(old: Picture, new: Picture) -> Generator[None, None, Picture]:
    """As `diff`, as a generator: at each yield other tasks may run. Its return value is the patch."""
    patch: Picture = {key: None for key in old if key not in new}
    for key, value in new.items():
        was = old.get(key)
        if isinstance(value, dict) and isinstance(was, dict) and value is not was:
            inner: Picture = {name: None for name in was if name not in value}
            compared = 0
            for name, one in value.items():
                inner |= diff({name: was[name]} if name in was else {}, {name: one})
                compared += len(one) if isinstance(one, dict) else 1
                if compared >= AT_ONCE:
                    compared = 0
                    yield
            if inner:
                patch[key] = inner
        else:
            patch |= diff({key: was} if key in old else {}, {key: value})
    return patch


def apply(old: Picture, patch: Picture) -> Picture:
    """The picture after a patch. Neither is changed."""
    new = {key: value for key, value in old.items() if not (key in patch and patch[key] is None)}
    for key, value in patch.items():
        if value is None:
            continue
        was = old.get(key)
        new[key] = apply(was if isinstance(was, dict) else {}, value) if isinstance(value, dict) else value
    return new


_BEGINS, _ENDS = b'{"picture":%b,"patches":[', b"]}"  # of a chunk


class Chunk(NamedTuple):
    """A picture and the patches after it, compressed; times in ms since 1970."""

    number: int
    from_ms: int
    to_ms: int
    blob: bytes


class _Packing:
    """A chunk that is compressed while it grows, an equal share with each picture: all at its end held the loop for
    50 ms with 1,000 replicas."""

    def __init__(self, begins: bytes) -> None:
        self._pending, self._left = bytearray(begins), CHUNK
        self._compressor, self._packed = zlib.compressobj(6), list[bytes]()

    def add(self, data: bytes) -> None:
        """Add data; and do a share of the work."""
        self._pending += data
        size = max(STEP_BYTES, -(-len(self._pending) // self._left))
        self._left = max(1, self._left - 1)
        self._packed.append(self._compressor.compress(self._pending[:size]))
        del self._pending[:size]

    def whole(self) -> bytes:
        """The complete chunk, compressed."""
        self._packed += (self._compressor.compress(self._pending), self._compressor.flush())
        return b"".join(self._packed)


class Ring:
    """The last hour. Pictures come a second apart, with numbers that rise by one."""

    def __init__(self, seconds: int = HISTORY_S, bytes_max: int = HISTORY_BYTES_MAX) -> None:
        self._seconds, self._bytes_max = seconds, bytes_max
        self._closed: deque[Chunk] = deque()
        self._bytes = 0
        self._frame, self._patches, self._packing = b"", list[bytes](), _Packing(b"")
        self._number = self._from_ms = self._to_ms = 0
        self._recent: deque[tuple[int, bytes]] = deque(maxlen=RESUME_MAX)

    def add(self, number: int, at_ms: int, picture: Picture, patch: bytes) -> None:
        """The newest picture, and the patch (as JSON) that leads to it from the one before."""
        self._recent.append((number, patch))
        if self._frame and len(self._patches) + 1 < CHUNK:
            self._packing.add(b"," + patch if self._patches else patch)
            self._patches.append(patch)
        else:
            self._close()
            self._number, self._from_ms = number, at_ms
            self._frame, self._patches = msgspec.json.encode(picture), []
            self._packing = _Packing(_BEGINS % self._frame)
        self._to_ms = at_ms

    def _close(self) -> None:
        if not self._frame:
            return
        self._packing.add(_ENDS)
        blob = self._packing.whole()
        self._closed.append(Chunk(self._number, self._from_ms, self._to_ms, blob))
        self._bytes += len(blob)
        while self._closed and (self._bytes > self._bytes_max or len(self._closed) * CHUNK > self._seconds):
            self._bytes -= len(self._closed.popleft().blob)

    def _encoded(self) -> bytes:
        return b"".join((_BEGINS % self._frame, b",".join(self._patches), _ENDS))

    @property
    def held_bytes(self) -> int:
        """Bytes of compressed pictures held."""
        return self._bytes

    def chunks(self) -> list[dict[str, int]]:
        """The chunks that can be replayed, oldest first; the last one is still open."""
        found = [{"number": one.number, "from_ms": one.from_ms, "to_ms": one.to_ms} for one in self._closed]
        if self._frame:
            found.append({"number": self._number, "from_ms": self._from_ms, "to_ms": self._to_ms})
        return found

    def chunk(self, number: int) -> bytes | None:
        """A chunk as JSON, `{"picture": …, "patches": […]}`; None if it is gone or never was."""
        if self._frame and number == self._number:
            return self._encoded()
        found = next((one for one in self._closed if one.number == number), None)
        return zlib.decompress(found.blob) if found is not None else None

    def past(self, from_ms: int) -> bytes:
        """All that is kept since then, from the beginning of a chunk, as JSON: `{"chunks": [chunk, …]}`."""
        chunks = [zlib.decompress(one.blob) for one in self._closed if one.to_ms >= from_ms]
        return b'{"chunks":[%b]}' % b",".join([*chunks, self._encoded()] if self._frame else chunks)

    def since(self, number: int) -> list[tuple[int, bytes]] | None:
        """The patches after this picture; None if that is too long ago, or was never one."""
        if not self._recent or not self._recent[0][0] - 1 <= number <= self._recent[-1][0]:
            return None
        return [one for one in self._recent if one[0] > number]
