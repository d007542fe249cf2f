"""Replays a history on the present machine and reports which decisions differ.

Numbers agree within a relative 1e-9; a timer is compared by its distance from now, not by the clock.
"""

from __future__ import annotations

from math import isclose
from typing import TYPE_CHECKING, Any, NamedTuple

from farhop_lab.histories import names, recorder
from farhop_lab.histories.codec import Reader, Tag

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TOLERANCE = 1e-9
SHOWN = 3
TEXT_MAX = 1500


class Divergence(NamedTuple):
    """One entry with another result. `position` counts from 0."""

    history: str
    position: int
    done: str
    expected: str
    given: str

    def __str__(self) -> str:
        return (
            f"{self.history}, entry {self.position}: {self.done[:TEXT_MAX]}\n"
            f"  expected {self.expected[:TEXT_MAX]}\n"
            f"  given    {self.given[:TEXT_MAX]}"
        )


class Replayed(NamedTuple):
    """The result of one history: the number of entries, how many of them differ, and the first of those. After an entry
    that raises, comparison ends.
    """

    history: str
    entries: int
    diverging: int
    first: tuple[Divergence, ...]


class _Made(NamedTuple):
    """A value as its parts, so that commands can be compared."""

    tag: int
    parts: tuple[Any, ...]

    def __repr__(self) -> str:
        fields = names.TAGS[self.tag].fields
        shown = ", ".join(f"{name}={part!r}" for name, part in zip(fields, self.parts, strict=False))
        return f"{names.NAMES[self.tag]}({shown})"


def _plain_tags() -> Mapping[int, Tag]:
    def making(number: int) -> Any:
        return lambda *parts: _Made(number, parts)

    return {number: tag._replace(make=making(number)) for number, tag in names.TAGS.items()}


_PLAIN = _plain_tags()


_PLAIN_TYPES = frozenset((type(None), str, bytes, bool, int, float))  # nearly all values are of one


def plain(value: Any) -> Any:
    """A value as it is in a history."""
    if type(value) in _PLAIN_TYPES:
        return value
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return tuple([one if type(one) in _PLAIN_TYPES else plain(one) for one in value])
    if value is None or isinstance(value, str | bytes | bool | int | float):
        return value
    if isinstance(value, set | frozenset):
        return tuple(sorted(value))
    if hasattr(value, "items"):
        return {plain(key): plain(of) for key, of in value.items()}
    number = names.tag_of(value)
    return _Made(number, plain(tuple(names.TAGS[number].parts(value))))


def same(a: Any, b: Any, now: float) -> bool:
    """Whether two plain values agree; `a` is the history's."""
    if isinstance(a, tuple | str | int) and a == b:
        return True  # most do, to the last bit
    if isinstance(a, _Made) and isinstance(b, _Made):
        if a.tag != b.tag:
            return False
        if names.NAMES[a.tag] == "SetTimer":
            return bool(a.parts[0] == b.parts[0]) and same(a.parts[1] - now, b.parts[1] - now, now)
        return same(a.parts, b.parts[: len(a.parts)], now)  # of the last fields a history from before them says nothing
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(same(x, y, now) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) or isinstance(b, float):
        return (
            isinstance(a, float | int)
            and isinstance(b, float | int)
            and isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        )
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(of, b[key], now) for key, of in a.items())
    return bool(a == b)


def replay(path: Path) -> list[Replayed]:
    """All histories of a file."""
    return [_replayed(f"{path.stem}: {name}", count, packed) for name, count, packed in recorder.read(path)]


def amended(path: Path) -> list[recorder.HistoryRecorder]:
    """All histories of a file with the present reports. ValueError if anything but a report differs: what came after it
    would be another run, and must be recorded.
    """
    return [_amended(f"{path.stem}: {name}", name, count, packed) for name, count, packed in recorder.read(path)]


def _amended(history: str, name: str, count: int, packed: list[Any]) -> recorder.HistoryRecorder:
    inputs, expectations = Reader(packed, names.TAGS), Reader(packed, _PLAIN, flat=True)
    genesis = inputs.get(recorder.GENESIS)
    anew = recorder.HistoryRecorder(name, genesis)
    rig = names.Rig(genesis)
    for position in range(count):
        call, now = inputs.get(recorder.CALL), inputs.get(recorder.NOW)
        given = inputs.get(recorder.GIVEN + call)
        expected = expectations.get(recorder.CAME + call)
        anew.call(call, now, given)
        came = rig.do(call, now, given)
        if call != names.REPORT and not same(expected, plain(came), now):
            raise ValueError(f"{history}, entry {position}: another decision; record it anew instead")
        anew.came(call, came)
    return anew


def _replayed(history: str, count: int, packed: list[Any]) -> Replayed:
    # The two readers make shared objects differently, so each reads every column.
    inputs, expectations = Reader(packed, names.TAGS), Reader(packed, _PLAIN, flat=True)
    rig = names.Rig(inputs.get(recorder.GENESIS))
    diverging, first = 0, list[Divergence]()
    for position in range(count):
        call, now = inputs.get(recorder.CALL), inputs.get(recorder.NOW)
        given = inputs.get(recorder.GIVEN + call)
        expected = expectations.get(recorder.CAME + call)
        try:
            came = plain(rig.do(call, now, given))
        except Exception as error:  # noqa: BLE001 - whatever it raises, it is told
            came = f"{type(error).__name__}: {error}"
        if not same(expected, came, now):
            diverging += 1
            if len(first) < SHOWN:
                done = f"{names.CALLS[call]} at {now:.6f}: {plain(given)!r}"
                first.append(Divergence(history, position, done, repr(expected), repr(came)))
            if isinstance(came, str):
                break
    return Replayed(history, count, diverging, tuple(first))
