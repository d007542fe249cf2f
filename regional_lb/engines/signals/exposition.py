"""Finds single series in a page of Prometheus' text format (0.0.4, and OpenMetrics where they agree).

Only the lines of the names asked for are looked at: a page has a thousand others, and is read twice a second from every
replica. Names match whole, never as a prefix. Never judges a value, and never knows what a name means.
"""

from __future__ import annotations

import re

# What follows a name: labels whose values may hold anything but a bare quote, a value, and perhaps a timestamp.
_VALUE = rb'"(?:[^"\\\n]++|\\.)*+"'
_LABELS_AND_VALUE = re.compile(rb"(?:\{((?:[^\"{}\n]++|" + _VALUE + rb")*+)\})?[ \t]+(\S+)")
# Begins where a word begins, and gives nothing back: 16 KB of letters without `=` took 4 s, 128 KB 64 times as long.
_LABEL = re.compile(rb"(?<!\w)(\w++)[ \t]*+=[ \t]*+(" + _VALUE + rb")")
_AFTER_NAME = frozenset(b"{ \t")
_SAME_BYTES = 32  # fewer than a line with its labels has
_TRUSTED_PAGES = 64
_NEAR_BYTES = 256
LINES_MAX = 512  # of one name: ranks by ranks. Each takes 2 to 3 us
_ALIKE_MAX = 8192  # that begin with it; a page has about as many of adapters, which are never taken off it
_LINE_BYTES_MAX = 128 * 1024  # to the value: names of adapters


class PageError(Exception):
    """A page without a required value. `reason` is a fixed word to count by; the text names the metric."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Places:
    """Where the lines of each name were on a page that was searched whole: on the engine's next pages only the places
    around these are looked at. `labels`: those read by then, since a line's are the same on the next page.

    Trusted for pages of about the same length (a line more or less changes it by more), and a limited number of times.
    """

    __slots__ = ("_left", "_size", "labels", "of")

    def __init__(self) -> None:
        self.of: dict[bytes, list[int]] = {}
        self.labels: dict[bytes, dict[bytes, bytes]] = {}
        self._size, self._left = 0, 0

    def expect(self, size: int) -> None:
        """A page of this many bytes is about to be read."""
        self._left -= 1
        if self._left < 0 or abs(size - self._size) > _SAME_BYTES:
            self.of.clear()
            self.labels.clear()
            self._size, self._left = size, _TRUSTED_PAGES


class Page:
    """One page, whole. Raises PageError if it does not end where a page ends: `waiting 4` may have been `42`.

    `places`, kept from page to page of one source, spare a search of the whole for each name.
    """

    __slots__ = ("_places", "_text")

    def __init__(self, text: bytes, places: Places | None = None) -> None:
        if text and not text.endswith(b"\n"):
            raise PageError("cut", "the page does not end with a line feed: it was cut short, or is no metrics page")
        self._text = text
        self._places = places or Places()
        self._places.expect(len(text))

    def series(self, name: bytes) -> list[tuple[bytes, bytes]]:
        """Labels (unparsed) and value of each line of exactly this name, at most LINES_MAX. Raises PageError."""
        text, known = self._text, self._places.of
        before = known.get(name)
        ends = self._near(name, before) if before is not None else None
        if ends is None:
            ends = known[name] = self._ends(name, 0, len(text), LINES_MAX)
        return [self._line(name, end) for end in ends]

    def newest(self, name: bytes) -> bytes | None:
        """Labels of its line with the greatest value; None: it has none. Each takes 1 us. Raises PageError."""
        text, best, place = self._text, -1.0, -1
        ends = self._ends(name, 0, len(text), _ALIKE_MAX)
        for end in ends:
            stop = text.find(b"\n", end)
            words = text[text.rfind(b"}", end, stop) + 1 : stop].split(None, 1)
            try:
                value = float(words[0])
            except (ValueError, IndexError):
                continue
            if value > best:
                best, place = value, end
        if ends and place < 0:
            raise PageError("value", f"{name.decode()}: none of its lines has a valid value")
        return self._line(name, place)[0] if ends else None

    def _line(self, name: bytes, end: int) -> tuple[bytes, bytes]:
        match = _LABELS_AND_VALUE.match(self._text, end, end + _LINE_BYTES_MAX)
        if match is None or match.end() == end + _LINE_BYTES_MAX:
            raise PageError("line", f"{name.decode()}: not a line of metrics")
        return match[1] or b"", match[2]

    def labels(self, text: bytes) -> dict[bytes, bytes]:
        """As `labels_of`, cached for texts that repeat. Do not change the result."""
        known = self._places.labels.get(text)
        if known is None:
            known = self._places.labels[text] = labels_of(text)
        return known

    def _ends(self, name: bytes, start: int, stop: int, most: int) -> list[int]:
        """Where the name ends in each of its lines that begins within a part of the page. Raises PageError where there
        are more than so many, or of longer names."""
        text, line = self._text, b"\n" + name
        ends: list[int] = []
        if not start and text.startswith(name) and text[len(name)] in _AFTER_NAME:
            ends.append(len(name))
        at, left = text.find(line, start, stop), _ALIKE_MAX
        while at >= 0:
            end, left = at + len(line), left - 1
            if text[end] in _AFTER_NAME:
                ends.append(end)
            if left < 0 or len(ends) > most:
                raise PageError("lines", f"{name.decode()}: more than {most} lines")
            at = text.find(line, end, stop)
        return ends

    def _near(self, name: bytes, before: list[int]) -> list[int] | None:
        """The same of the whole page, if there are as many as before, each near where it was; else None."""
        ends: list[int] = []
        reached = 0
        for end in before:
            start, reached = max(reached, end - _NEAR_BYTES, 0), end + _NEAR_BYTES
            ends += self._ends(name, start, reached, LINES_MAX)
        return ends if len(ends) == len(before) else None


def labels_of(text: bytes) -> dict[bytes, bytes]:
    """Labels by name; escapes in their values are left as they are."""
    return {name: value[1:-1] for name, value in _LABEL.findall(text)}
