"""Continuing a stream by its token ids: the ids of prompt and answer, and those of which the client has the text.

A stream that breaks is continued from prompt ids and the ids whose text the client has, as a completion, whose chunks
are spelled like those of the first stream. Ids are removed from what a client gets; a tier above gets the ids of the
text that it gets, so that it can continue by them itself. A chat without any text yet is sent again as it was: only an
engine's chat parser can tell whether its first tokens are text or reasoning. Pure; never decides whether and where a
stream continues.
"""

from __future__ import annotations

import re
from array import array
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from farhop.balance.machine import Usage
from farhop.relay.formats.event_stream import each
from farhop.relay.formats.resumption import CHAT, TARGET, TOKENS_MAX, Progress, asking

if TYPE_CHECKING:
    from farhop.balance import machine
    from farhop.relay.formats.resumption import Plan

_ids = msgspec.json.Decoder(list[int])
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NONE = array("I")  # never written to
_IDS = re.compile(rb'"(prompt_token_ids|token_ids)"\s*:\s*(\[[0-9,\s]*\])')
_SAYS_MORE = re.compile(rb'"usage"\s*:\s*\{|"finish_reason"\s*:\s*"|"error"')  # what a stream's tap looks for
_HAS_TEXT = re.compile(rb'"(?:content|text)"\s*:\s*"(?!")')
_ID, _PROMPT_ID, _GOES_ON, _QUOTE = b'"token_ids":[', b'"prompt_token_ids":[', b'"finish_reason":null', ord('"')
_CONTENT, _TEXT = b'"content":"', b'"text":"'
_TOOLS, _REASONING, _REFUSAL = b'"tool_calls"', b'"reasoning', b'"refusal"'
_ID_BYTES, _ID_DIGITS = len(_ID), 12
_SHORT_BYTES = 256  # ids of a prompt are not packed below this
_BEHIND_BYTES_MAX = 512  # of an event behind its text, where its form is remembered
_NO_IDS, _NO_PROMPT_IDS = b'"token_ids":null', b'"prompt_token_ids":null'


class _Behind(NamedTuple):
    """The bytes after the text in events that bring one token each: all of an engine's events have the same, except for
    the id.
    """

    middle: bytes  # from its quote to the bracket before the id
    tail: bytes  # from the bracket behind it
    passed: bytes  # what replaces it, from the bracket before it


class ExactProgress(Progress):
    """By ids: its prompt's and answer's tokens, and how much of these the client has as text. The prompt's come with
    the first token, before which nothing is done with them: they are kept as they came, and read at a seam."""

    __slots__ = ("_begins", "_body", "_form", "_prompt", "_prompt_json", "_sure", "_tokens_left", "ids")

    def __init__(self, plan: Plan, body: bytes, tokens_max: int = TOKENS_MAX) -> None:
        """`body`: the request body as engines get it."""
        super().__init__(plan)
        self._body = body if plan.chat else b""  # until it has sent text
        self._tokens_left = tokens_max
        self._prompt, self.ids = _NONE, array("I")
        self._prompt_json = b""  # the same, until they are needed; packed by `compact`
        self._sure = 0  # of the ids, those whose text the client has, wholly
        self._begins = _CONTENT if plan.chat else _TEXT  # what comes before an event's text
        self._form: tuple[bytes, _Behind] | None = None  # of this stream's events: to the text, and behind it

    @property
    def held_bytes(self) -> int:
        """See Progress."""
        return len(self._body) + len(self._prompt_json) + 4 * (len(self._prompt) + len(self.ids))

    @property
    def prompt(self) -> array[int]:
        """Its prompt's tokens; none where the engine did not say, or cannot be read."""
        if self._prompt_json:
            listed, self._prompt_json = self.prompt_listed, b""
            try:
                self._prompt = array("I", _ids.decode(listed))
            except (msgspec.DecodeError, OverflowError):
                self._lost("unreadable")
        return self._prompt

    @property
    def prompt_listed(self) -> bytes:
        """The prompt's token ids, as JSON."""
        told = self._prompt_json
        return told if told[:1] == b"[" else _unpacked(told) if told else _listed(self._prompt)

    def compact(self) -> None:
        """See Progress."""
        if len(self._prompt_json) > _SHORT_BYTES and self._prompt_json[:1] == b"[":
            self._prompt_json = _packed(self._prompt_json)

    @property
    def tokens(self) -> int:
        """See Progress."""
        return len(self.ids)

    @property
    def carried_by(self) -> machine.Carrier:
        """See Progress."""
        return "ids"

    @property
    def target(self) -> bytes:
        """See Progress. Whatever it was, a completion takes ids."""
        return CHAT if self._said_nothing else TARGET

    @property
    def _said_nothing(self) -> bool:
        return self.plan.chat and not self._sure

    @property
    def can_resume(self) -> bool:
        """See Progress."""
        return not self.why_not and not self.finished and bool(self.prompt) and bool(self._head)

    def bounded(self, context_tokens: int) -> bool:
        """See Progress. Without either it is unknown: a completion's default is another than a chat's."""
        return self.plan.max_tokens is not None or context_tokens > 0

    @property
    def counts(self) -> bool:
        """See Progress."""
        return bool(self._prompt_json or self._prompt)

    def token(self, events: bytes) -> tuple[bytes, bytes] | None:
        """Take an event with one token, in the form of the last event, as nearly all are: what is passed on of it, and
        its text as JSON spells it. Nothing else is in it: no usage, no end, no error. None, and nothing is taken, for
        any other event."""
        if self._form is None:
            return None
        head, (middle, tail, passed) = self._form
        behind = len(events) - len(tail)
        id_at = events.rfind(b"[", behind - _ID_DIGITS, behind) + 1
        number, middle_at = events[id_at:behind], id_at - len(middle)
        alike = events.startswith(head) and events.startswith(middle, middle_at) and events.endswith(tail)
        if not alike or not number.isdigit() or self._tokens_left <= 0 or self.why_not:
            return None
        text = events[len(head) : middle_at]
        if b'"' in text or b"\n" in text:  # it is more than one event, or says a quote
            return None
        self._tokens_left -= 1
        ids = self.ids
        try:
            ids.append(int(number))
        except OverflowError:
            self._lost("unreadable")
            return events[: id_at - 1] + passed, text
        if text:
            self._sure = len(ids)
        return events[: id_at - 1] + passed, text

    def take(self, events: bytes) -> bytes:
        """See Progress."""
        known = self.token(events)  # five times as fast as a search
        return known[0] if known is not None else self._search(events)

    def _search(self, events: bytes) -> bytes:
        at = events.find(_ID)
        if at >= 0 and self._head and _PROMPT_ID not in events:
            end = events.find(b"]", at)
            digits = events[at + _ID_BYTES : end]
            plain = digits.isdigit() and _GOES_ON in events and events.find(_ID, end) < 0 and self._tokens_left > 0
            if plain and not (_TOOLS in events or _REASONING in events or _REFUSAL in events or self.why_not):
                self._tokens_left -= 1
                passed = events[: at + _ID_BYTES - 1] + b"null" + events[end + 1 :]
                try:
                    self.ids.append(int(digits))
                except (OverflowError, ValueError):  # int reads 4,300 digits
                    self._lost("unreadable")
                    return passed
                begins = self._begins
                text_at = events.find(begins)
                if text_at >= 0 and events[text_at + len(begins)] != _QUOTE:
                    self._sure, self._body = len(self.ids), b""
                    said = _SAYS_MORE.search(events) is not None or events.count(begins) != 1
                    self._form = None if said else _form(events, text_at + len(begins), at + _ID_BYTES, end)
                return passed
        return self._take(events)

    def _take(self, events: bytes) -> bytes:
        if not self._head:
            self._begin(events)
        self._note(events)
        pieces: list[bytes] = []
        start = since = 0
        for found in _IDS.finditer(events):
            pieces += (events[start : found.start(2)], b"null")
            start = found.end(2)
            listed = found[2]
            if found[1] == b"prompt_token_ids":
                if not self.counts:
                    self._keep_prompt(listed)
            else:
                self._keep(listed)
                # A token that ends within a character has no text yet: it comes with the next one's.
                if _HAS_TEXT.search(events, since, found.start()) is not None:
                    self._sure = len(self.ids)
                since = start
        if not pieces and not self.why_not and _HAS_TEXT.search(events) is not None:
            self.why_not = "untold"  # the client has text without known ids: it would be repeated
        if self._sure or self.why_not:
            self._body = b""
        if not pieces:
            return events
        pieces.append(events[start:])
        return b"".join(pieces)

    def _keep_prompt(self, listed: bytes) -> None:
        self._tokens_left -= listed.count(b",") + 1
        if self._tokens_left < 0:
            self._lost("too_long")
        elif len(listed) > 2:
            self._prompt_json = listed

    def _keep(self, listed: bytes) -> None:
        try:
            tokens = _ids.decode(listed)
            self._tokens_left -= len(tokens)
            if self._tokens_left >= 0:
                self.ids.extend(tokens)
            else:
                self._lost("too_long")
        except (msgspec.DecodeError, OverflowError):
            self._lost("unreadable")

    def _lost(self, why: str) -> None:
        """The stream cannot be continued any more: drop all that was kept of it."""
        self.why_not = self.why_not or why
        self._body = self._prompt_json = b""
        self._prompt = _NONE
        del self.ids[:]

    def left(self, context_tokens: int) -> int:
        """See Progress."""
        room = context_tokens - len(self.prompt) - self._sure if context_tokens else 0
        if self.plan.max_tokens is None:
            return max(0, room)
        left = max(0, self.plan.max_tokens - self._sure)
        return min(left, room) if context_tokens else left

    def continuation_body(self, context_tokens: int) -> bytes:
        """See Progress."""
        dropped = len(self.ids) - self._sure
        self.recomputed += len(self.prompt) + len(self.ids)
        del self.ids[self._sure :]
        self._tokens_left += dropped
        self.resumed += 1
        self._seam, self._form, plan = len(self.ids), None, self.plan
        if self._said_nothing:
            if self.stops is not None:
                self.stops.break_off(may_stop=self.tokens > self.plan.min_tokens)
            return asking(self._body, plan)
        self._begins = _TEXT  # whatever it was, a completion continues it
        document: dict[str, Any] = {
            **_members.decode(plan.members),
            "prompt": [*self.prompt, *self.ids],
            "max_tokens": self.left(context_tokens),
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": plan.usage_each},
            "return_token_ids": True,
        }
        if self.stops is not None:
            self.stops.break_off(may_stop=self.tokens > self.plan.min_tokens)
            document |= {"stop": plan.stops, "include_stop_str_in_output": True}
        if plan.min_tokens > len(self.ids):
            document["min_tokens"] = plan.min_tokens - len(self.ids)
        return msgspec.json.encode(document)

    @property
    def usage(self) -> Usage:
        """See Progress. How much was cached at first is unknown."""
        return Usage(len(self.prompt), len(self.ids))

    def _tokens_by(self, event: bytes, tokens: int) -> int:
        return tokens + sum(ids[2].count(b",") + 1 for ids in _IDS.finditer(event) if ids[1] == b"token_ids")

    def _continued(self, document: dict[str, Any]) -> bytes:
        choice, usage = document["choices"][0], self._usage_so_far(document)
        if isinstance(delta := choice.get("delta"), dict):  # it was asked anew
            begins = delta.pop("role", None) is not None
            if begins and not delta.get("content") and choice.get("finish_reason") is None:
                return b""  # that it begins, which it did before
        elif self.plan.chat:
            return self._chunk(str(choice.get("text") or ""), choice, usage)
        if usage is not None:
            document["usage"] = usage
        return self._renamed(document)


class HopProgress(ExactProgress):
    """The same for a tier above that is to know the ids, too: what it gets has them.

    An event brings the ids of the text that it ends with, and never others: whoever has all events so far can go on
    from their ids, whatever was computed here beside, and whichever engine of ours it came from.
    """

    __slots__ = ("_ids_passed", "_prompt_passed")

    def __init__(self, plan: Plan, body: bytes, tokens_max: int = TOKENS_MAX) -> None:
        super().__init__(plan, body, tokens_max)
        if self.stops is not None:
            self.stops.hides = False  # the tier above does
        self._ids_passed, self._prompt_passed = 0, False

    def token(self, events: bytes) -> tuple[bytes, bytes] | None:
        """See ExactProgress. It passes as it came, with its id, where that is the id of its own text."""
        if self._ids_passed != len(self.ids) or (known := super().token(events)) is None:
            return None
        taken, text = known
        if self._ids_passed < self._sure == len(self.ids) and not self.why_not:
            self._ids_passed = self._sure
            return events, text
        return self._with_ids(taken), text

    def take(self, events: bytes) -> bytes:
        """The events as the tier above gets them."""
        if events.count(b"\n\n") == 1 and self._ids_passed == len(self.ids) and _PROMPT_ID not in events:
            taken = super().take(events)  # nearly always: one event, with the ids of its own text
            if self._ids_passed < self._sure == len(self.ids) and not self.why_not:
                self._ids_passed = self._sure
                return events
            return self._with_ids(taken)
        return b"".join([self._with_ids(super(HopProgress, self).take(event)) for event in each(events)])

    def _with_ids(self, event: bytes) -> bytes:
        if self.counts and not self._prompt_passed:
            self._prompt_passed = True
            event = event.replace(_NO_PROMPT_IDS, _NO_PROMPT_IDS[:-4] + self.prompt_listed, 1)
        known = len(self.ids) if self.finished else self._sure
        at = event.rfind(_NO_IDS) if known > self._ids_passed else -1
        if at < 0:
            return event
        ids, self._ids_passed = _listed(self.ids[self._ids_passed : known]), known
        return event[: at + len(_NO_IDS) - 4] + ids + event[at + len(_NO_IDS) :]


def _form(events: bytes, text_at: int, id_at: int, end: int) -> tuple[bytes, _Behind] | None:
    """The form of an event, given the offsets of its text and of its id; None if it is not the usual one."""
    quote = events.find(b'"', text_at)
    if not text_at < quote < id_at or b"\\" in events[text_at:quote] or events.find(b"\n\n") != len(events) - 2:
        return None
    if len(events) - quote > _BEHIND_BYTES_MAX:
        return None
    return events[:text_at], _behind(events[quote:id_at], events[end:])


@lru_cache(maxsize=64)
def _behind(middle: bytes, tail: bytes) -> _Behind:
    return _Behind(middle, tail, b"null" + tail[1:])


# The characters of a list of numbers differ in their lower four bits: digits, the comma, and padding of the last byte.
_COMMA, _FILLS = ord(","), b"/"
_OF_NIBBLE = b"0123456789??,??/" + bytes(240)


def _packed(listed: bytes) -> bytes:
    """A JSON list of numbers in half of its bytes, of which none is `[`; as it came where it has spaces."""
    halves = listed[1:-1] + _FILLS * (len(listed) % 2)
    letters = np.frombuffer(halves, np.uint8)
    if np.minimum.reduce(letters) < _COMMA:
        return listed
    pairs = letters.view("<u2")
    return ((pairs & 0x0F) | (pairs >> 4 & 0xF0)).astype(np.uint8).tobytes()


def _unpacked(packed: bytes) -> bytes:
    both = np.frombuffer(packed, np.uint8)
    nibbles = np.stack((both & 0x0F, both >> 4), axis=1).tobytes()
    return b"[" + nibbles.translate(_OF_NIBBLE).rstrip(_FILLS) + b"]"


def _listed(ids: array[int]) -> bytes:
    return msgspec.json.encode(ids.tolist())
