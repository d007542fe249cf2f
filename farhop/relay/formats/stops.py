"""Stop strings of a stream that may be continued elsewhere: found across a seam, and hidden from a client that must not
see them.

An engine silently holds back text that could begin a stop string, and looks for one only in its own output. So it is
asked to hold nothing (`include_stop_str_in_output`): each token's text comes with its id. Text is held back and cut off
here instead, where it outlives the engine; after a seam a string is also looked for in the text before it. A whole one
is held back until the next event says whether the engine ended by it: that may be an event without text. Found as vLLM
finds it (`check_stop_strings`): the first of the list that ends in the new text. Pure; never gives a character that an
unbroken stream would not.
"""

from __future__ import annotations

import re

import msgspec

NAMES = ("include_stop_str_in_output", "no_stop_trim")  # vLLM's word for it, and SGLang's; each ignores the other's
SHOWN_BY = tuple(b'"%b"' % name.encode() for name in NAMES)
SHOWS = SHOWN_BY[0] + b":true,"  # goes into the body behind its first brace
LONGEST_CHARS_MAX = 1024  # of one: what a stream keeps of its text for it
_TEXT = re.compile(rb'"(?:content|text)"\s*:\s*("[^"\\]*+(?:\\.[^"\\]*+)*+")')
_NAMES, _GOES_ON = (b'"content":"', b'"text":"'), b'"finish_reason":null'
# Where an end without text takes what was held back: many engines end a chat by an event of its own, with nulls.
_NULL = re.compile(rb'"(?:content|text)"\s*:\s*(null)')
_MUTE = re.compile(rb'"delta"\s*:\s*\{\s*()(\})?')
_ENDS = re.compile(rb'"finish_reason"\s*:\s*(null|"[^"]*")')
_STOPPED_BY = re.compile(rb'"(?:stop_reason|matched_stop)"\s*:\s*(null|[0-9]+|"[^"\\]*+(?:\\.[^"\\]*+)*+")')
_text = msgspec.json.Decoder(str)
_TEXTS = msgspec.json.Decoder(str | list[str] | None)


def named(value: bytes) -> tuple[str, ...]:
    """The texts of a body's `stop`, () for none. Raises msgspec.DecodeError, UnicodeDecodeError."""
    texts = _TEXTS.decode(value)
    return (texts,) if isinstance(texts, str) and texts else tuple(texts or ())


class Stops:
    """What one stream's stop strings ask for. `hides`: its client must see neither these nor what could begin one.

    `scan_chars`: within this many further characters one that began before the seam may end; `ended`: one did, which no
    engine can see.
    """

    __slots__ = (
        "_before", "_ended_by", "_ending", "_held", "_hold", "_last", "_longest", "_new_at", "_texts", "ended", "hides",
        "scan_chars",
    )  # fmt: skip

    def __init__(self, texts: tuple[str, ...], *, hides: bool) -> None:
        self._texts, self.hides = texts, hides
        self._longest = max(map(len, texts))
        self._hold = self._longest - 1 if hides else 0
        self._ending = ""  # last, as much as a stop string may begin in
        self._before = self._last = ""  # the newest text, and what was last before it
        self._ended_by = ""  # the stop string before a seam by which the stream had ended, though no event said so
        self._held = ""  # what the client has not got
        self._new_at = 0  # where in it the newest text begins
        self.scan_chars = 0
        self.ended = False

    def break_off(self, *, may_stop: bool) -> None:
        """The stream goes on at an engine that knows none of its text. `may_stop` as in `apply`, of the last token: a
        stop string that ended with it was the end, of which only the event is missing."""
        self.scan_chars = self._longest - 1
        found = self._first_in(self._before + self._last, len(self._before)) if may_stop else None
        self._ended_by = found[1] if found is not None else self._ended_by

    def apply(self, event: bytes, *, may_stop: bool) -> bytes:
        """An event as its engine wrote it: the same, or how it would have been written by one that knows all text.
        `may_stop`: as many tokens are there as the client wants at least."""
        if self.ended:
            return b""
        found = _text_in(event)
        piece = found[2] if found is not None else ""
        if self._ended_by and (piece or _is_end(event)):
            return self._end(event, found, "", self._ended_by)
        if found is None:
            return event
        if self.scan_chars and piece:
            self.scan_chars = max(0, self.scan_chars - len(piece))
            pending, since = self._ending + piece, len(self._ending)
            if may_stop and (stop := self._first_in(pending, since)) is not None:
                at, text = stop
                piece = pending[since : at + len(text)]
                event = self._end(event, found, piece, text)
        self._before, self._last = self._ending, piece  # without text, too: then its engine went on behind the last
        self._ending = (self._ending + piece)[1 - self._longest :] if self._longest > 1 else ""
        return event

    def _first_in(self, text: str, since: int) -> tuple[int, str] | None:
        """The first stop string of the list that ends behind `since`, and where it begins."""
        for stop in self._texts:
            at = text.find(stop, max(0, since + 1 - len(stop)))
            if at >= 0:
                return at, stop
        return None

    def _end(self, event: bytes, found: tuple[int, int, str] | None, piece: str, stop: str) -> bytes:
        """The event that ends the stream by this stop string, with this text."""
        self.ended = True
        event = _with(event, found, piece) if found is not None else event
        event = _named(event, _ENDS, b"finish_reason", b'"stop"')
        return _named(event, _STOPPED_BY, b"stop_reason", msgspec.json.encode(stop))

    def visible(self, event: bytes) -> bytes:
        """An event of one choice as its client gets it."""
        if not self.hides:
            return event
        found, ends = _text_in(event), None
        goes_on = _GOES_ON in event
        if not goes_on:
            ends = _ENDS.search(event)
            goes_on = ends is None or ends[1] == b"null"
        if found is None and (goes_on or not self._held):
            return event
        piece = found[2] if found is not None else ""
        new_at = len(self._held) if piece else self._new_at
        text, self._held = self._held + piece, ""
        if goes_on:
            cut = max(0, len(text) - self._hold) if piece else 0
            for stop in self._texts if piece else ():
                at = text.find(stop, max(0, new_at + 1 - len(stop)), cut + len(stop) - 1)
                cut = at if at >= 0 else cut  # as yet: if another event with text comes, it ended nothing
            text, self._held, self._new_at = text[:cut], text[cut:], max(0, new_at - cut)
        elif ends is not None and ends[1] == b'"stop"':
            stopped = _STOPPED_BY.search(event)
            if stopped is not None and stopped[1][:1] == b'"':
                by = _text.decode(stopped[1])
                at = text.find(by, max(0, new_at + 1 - len(by)))
                text = text[:at] if at >= 0 else text
        return _with(event, found, text) if found is not None else _with_text(event, text)


def _text_in(event: bytes) -> tuple[int, int, str] | None:
    """The start and end of an event's text, its quotes included, and the text; None if the event has none."""
    for name in _NAMES:
        start = event.find(name) + len(name)
        if start >= len(name):
            end = event.find(b'"', start)
            value = event[start:end]
            if b"\\" not in value:  # nearly always, and an expression would take ten times as long
                return start - 1, end + 1, value.decode()
            break
    found = _TEXT.search(event)
    return None if found is None else (found.start(1), found.end(1), _text.decode(found[1]))


def _is_end(event: bytes) -> bool:
    ends = _ENDS.search(event)
    return ends is not None and ends[1] != b"null"


def _with(event: bytes, found: tuple[int, int, str], text: str) -> bytes:
    return event[: found[0]] + msgspec.json.encode(text) + event[found[1] :]


def _with_text(event: bytes, text: str) -> bytes:
    """An event without text, with this one."""
    if (null := _NULL.search(event)) is not None:
        return event[: null.start(1)] + msgspec.json.encode(text) + event[null.end(1) :]
    if (mute := _MUTE.search(event)) is None:
        return event
    at = mute.start(1)
    return event[:at] + b'"content":' + msgspec.json.encode(text) + (b"" if mute[2] else b",") + event[at:]


def _named(event: bytes, pattern: re.Pattern[bytes], name: bytes, value: bytes) -> bytes:
    found = pattern.search(event)
    if found is not None:
        return event[: found.start(1)] + value + event[found.end(1) :]
    at = event.rindex(b"}]")  # of the only choice
    return event[:at] + b',"' + name + b'":' + value + event[at:]
