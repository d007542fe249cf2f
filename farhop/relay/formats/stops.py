"""Stop strings of a stream that may be continued elsewhere: found across a seam, and hidden from a client that must not
see them.

An engine silently holds back text that could begin a stop string, and looks for one only in its own output. So it is
asked to hold nothing (`include_stop_str_in_output`): each token's text comes with its id. Text is held back and cut off
here instead, where it outlives the engine; after a seam a string is also looked for in the text before it.
Found as vLLM finds it (`check_stop_strings`): the first of the list that ends in the new text. Pure; never gives a
character that an unbroken stream would not.
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
_MUTE = re.compile(rb'"delta"\s*:\s*\{\s*()\}')
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

    __slots__ = ("_ending", "_held", "_hold", "_longest", "_texts", "ended", "hides", "scan_chars")

    def __init__(self, texts: tuple[str, ...], *, hides: bool) -> None:
        self._texts, self.hides = texts, hides
        self._longest = max(map(len, texts))
        self._hold = self._longest - 1 if hides else 0
        self._ending = ""  # last, as much as a stop string may begin in
        self._held = ""  # the part of it that the client has not got
        self.scan_chars = 0
        self.ended = False

    def break_off(self) -> None:
        """The stream goes on at an engine that knows none of its text."""
        self.scan_chars = self._longest - 1

    def apply(self, event: bytes, *, may_stop: bool) -> bytes:
        """An event as its engine wrote it: the same, or how it would have been written by one that knows all text.
        `may_stop`: as many tokens are there as the client wants at least."""
        if self.ended:
            return b""
        found = _text_in(event)
        if found is None:
            return event
        piece = found[2]
        pending = self._ending + piece
        if self.scan_chars and piece:
            since = len(self._ending)
            self.scan_chars = max(0, self.scan_chars - len(piece))
            for text in self._texts if may_stop else ():
                at = pending.find(text, max(0, since + 1 - len(text)))
                if at >= 0:
                    self.ended = True
                    piece = pending[since : at + len(text)]
                    event = _with(event, found, piece)
                    event = _named(event, _ENDS, b"finish_reason", b'"stop"')
                    event = _named(event, _STOPPED_BY, b"stop_reason", msgspec.json.encode(text))
                    break
        self._ending = (self._ending + piece)[1 - self._longest :] if self._longest > 1 else ""
        return event

    def visible(self, event: bytes) -> bytes:
        """An event of one choice as its client gets it."""
        if not self.hides:
            return event
        found, ends = _text_in(event), None
        goes_on = _GOES_ON in event
        if not goes_on:
            ends = _ENDS.search(event)
            goes_on = ends is None or ends[1] == b"null"
        if found is None:
            mute = _MUTE.search(event) if self._held and not goes_on else None
            if mute is None:
                return event
            text, self._held = self._held, ""
            return _with(event, (mute.start(1), mute.end(1), ""), text, b'"content":')
        text, self._held = self._held + found[2], ""
        if goes_on:
            cut = max(0, len(text) - self._hold)
            text, self._held = text[:cut], text[cut:]
        elif ends is not None and ends[1] == b'"stop"':
            stopped = _STOPPED_BY.search(event)
            if stopped is not None and stopped[1][:1] == b'"':
                text = text.removesuffix(_text.decode(stopped[1]))
        return _with(event, found, text)


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


def _with(event: bytes, found: tuple[int, int, str], text: str, name: bytes = b"") -> bytes:
    return event[: found[0]] + name + msgspec.json.encode(text) + event[found[1] :]


def _named(event: bytes, pattern: re.Pattern[bytes], name: bytes, value: bytes) -> bytes:
    found = pattern.search(event)
    if found is not None:
        return event[: found.start(1)] + value + event[found.end(1) :]
    at = event.rindex(b"}]")  # of the only choice
    return event[:at] + b',"' + name + b'":' + value + event[at:]
