"""Finds single series in a page of Prometheus' text format (0.0.4, and OpenMetrics where they agree).

Only the lines of the names asked for are looked at: a page has a thousand others, and is read twice a second from every
replica. Names match whole, never as a prefix. Never judges a value, and never knows what a name means.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# What follows a name: labels whose values may hold anything but a bare quote, a value, and perhaps a timestamp.
_VALUE = rb'"(?:[^"\\\n]++|\\.)*+"'
_REST = re.compile(rb"(?:\{((?:[^\"{}\n]++|" + _VALUE + rb")*+)\})?[ \t]+(\S+)")
_LABEL = re.compile(rb"(\w+)[ \t]*=[ \t]*(" + _VALUE + rb")")
_AFTER_NAME = frozenset(b"{ \t")


class PageError(Exception):
    """A page that does not say what it must. `reason` is a fixed word to count by; the text names the metric."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Page:
    """One page, whole. Raises PageError if it does not end where a page ends: `waiting 4` may have been `42`."""

    __slots__ = ("_text",)

    def __init__(self, text: bytes) -> None:
        if text and not text.endswith(b"\n"):
            raise PageError("cut", "the page does not end with a line feed: it was cut short, or is no metrics page")
        self._text = b"\n" + text

    def series(self, name: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Labels (as they stand) and value of each line of exactly this name. Raises PageError."""
        text, start = self._text, b"\n" + name
        at = text.find(start)
        while at >= 0:
            end = at + len(start)
            if text[end] in _AFTER_NAME:
                match = _REST.match(text, end)
                if match is None:
                    raise PageError("line", f"{name.decode()}: not a line of metrics")
                yield match[1] or b"", match[2]
            at = text.find(start, end)


def labels_of(text: bytes) -> dict[bytes, bytes]:
    """Labels by name; escapes in their values are left as they stand."""
    return {name: value[1:-1] for name, value in _LABEL.findall(text)}
