"""A stream that can go on from another engine: what is asked for beside, what is kept of it, and how it is continued.

Exact: the engine is asked for token ids (vLLM's `return_token_ids`), which are taken out of what the client gets; a
stream that breaks is continued from prompt ids and the ids whose text the client has, as a completion, whose chunks are
spelled as those of the first stream. So no character is lost, doubled or altered at the seam. The same as without a
break is more than that: it also takes an engine that answers alike each time. By text alone: `text_resumption`.

What cannot be continued honestly is not (`Unresumable`): grammars, penalties, several answers, log probabilities,
tools, reasoning, media. Stop strings are the business of `stops`. Pure; never decides whether and where one goes on.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from farhop.balance.machine import Usage
from farhop.relay.formats import stops
from farhop.relay.formats.openai import UNREADABLE
from farhop.relay.formats.stops import Stops

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farhop.balance import machine

PROMPT_BYTES_MAX = 256 * 1024  # the engine repeats its tokens in the stream's first event
EVENT_BYTES_MAX = 4 * 1024 * 1024
TOKENS_MAX = 1 << 19  # kept of one stream, prompt and answer
CHAT, TARGET = b"/v1/chat/completions", b"/v1/completions"
ASKS = b'"return_token_ids":true,'  # goes into the body behind its first brace

_raw = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ids = msgspec.json.Decoder(list[int])
_IDS = re.compile(rb'"(prompt_token_ids|token_ids)"\s*:\s*(\[[0-9,\s]*\])')
_SAYS = re.compile(rb'"(?:content|text)"\s*:\s*"(?!")')
_ENDS = re.compile(rb'"finish_reason"\s*:\s*"')
_UNTOLD = re.compile(rb'"(?:tool_calls"\s*:\s*\[\s*\{|(?:reasoning|reasoning_content|refusal)"\s*:\s*"(?!"))')
_ID, _PROMPT_ID, _GOES_ON, _QUOTE = b'"token_ids":[', b'"prompt_token_ids":[', b'"finish_reason":null', ord('"')
_CONTENT, _TEXT = b'"content":"', b'"text":"'
_TOOLS, _REASONS_TOLD, _REFUSAL = b'"tool_calls"', b'"reasoning', b'"refusal"'
_ID_BYTES, _ID_DIGITS = len(_ID), 12
_NO_IDS, _NO_PROMPT_IDS = b'"token_ids":null', b'"prompt_token_ids":null'
_DONE = re.compile(rb"^data:\s*\[DONE\]", re.M)
_USAGE = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_ANY_END = re.compile(rb"\r?\n\r?\n")
_MEDIA = (b'"image_url"', b'"input_audio"', b'"audio_url"', b'"video_url"', b'"image_embeds"', b'"prompt_embeds"')
_NOTHING = (b"null", b"false", b"[]", b"{}", b'""', b"0", b"0.0")
# Of a body, what a completion takes as the first stream had it.
_KEPT = frozenset((
    "model", "temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "stop_token_ids", "ignore_eos",
    "skip_special_tokens", "spaces_between_special_tokens", "cache_salt", "priority", "user", "allowed_token_ids",
))  # fmt: skip
# What a continuation would get wrong, and the reason by which it is counted.
_REFUSED = {
    "structured": ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
                   "guided_grammar", "guided_decoding_backend", "structural_tag", "json_schema", "regex", "ebnf"),
    "penalties": ("presence_penalty", "frequency_penalty", "repetition_penalty", "bad_words",
                  "thinking_token_budget", "repetition_detection"),
    "answers": ("best_of", "use_beam_search"),
    "logprobs": ("logprobs", "top_logprobs", "prompt_logprobs", "return_tokens_as_token_ids"),
    "tools": ("tools", "functions"),
    "echo": ("echo", "suffix"),
    "divided": ("kv_transfer_params", "bootstrap_room"),
    "logits_processors": ("logits_processors", "vllm_xargs", "custom_logit_processor"),
    "stop_strings": ("stop_regex",),
}  # fmt: skip
_REASONS = {name: reason for reason, names in _REFUSED.items() for name in names}
_NEUTRAL = {"repetition_penalty": (b"1", b"1.0"), "response_format": (b'{"type":"text"}', b'{"type": "text"}')}


class Unresumable(ValueError):  # noqa: N818 - it is what a stream is, not what went wrong
    """A stream that cannot be continued; the text is the reason by which it is counted."""


class Plan(msgspec.Struct, frozen=True):
    """How a request's stream would be continued."""

    chat: bool
    kept: dict[str, msgspec.Raw]
    max_tokens: int | None
    min_tokens: int
    stops: tuple[str, ...] = ()
    hides_stop: bool = True  # the client is not to see the one that ends it
    text: bool = False  # it may go on by its text where no ids are told


def asking(body: bytes, plan: Plan, asks: bytes = ASKS) -> bytes:
    """A body that asks for ids beside, or for what `asks` says, and for no text to be held back."""
    if plan.stops and plan.hides_stop:
        if any(word in body for word in stops.SHOWN_BY):  # it may say that it does not want what we want
            document = _raw.decode(body)
            for name in stops.NAMES:
                document.pop(name, None)
            body = msgspec.json.encode(document)
        asks += b"".join(word + b":true," for word in stops.SHOWN_BY) if plan.text and asks != ASKS else stops.SHOWS
    at = body.index(b"{") + 1
    return body[:at] + asks + body[at:]


def plan(path: bytes, body: bytes, *, text: bool = False) -> Plan:
    """A plan for this body as engines get it; `text`: it may go on by its text. Raises Unresumable.

    No seed is added where the client named none: a seam is exact without, vLLM keys its noise by no position, so that a
    seed would make a resumed answer no more like an unbroken one, and a seed costs there (a generator for each request,
    its faster samplers off; its CPU build dies of a seed whose prompt is computed in pieces).
    """
    if path not in (CHAT, TARGET):
        raise Unresumable("path")
    if len(body) > PROMPT_BYTES_MAX:
        raise Unresumable("too_long")
    try:
        document = _raw.decode(body)
    except UNREADABLE:
        raise Unresumable("unreadable") from None
    if "return_token_ids" in document:
        raise Unresumable("asks_for_ids")
    for name in document.keys() & _REASONS.keys():
        if not _is_neutral(name, document[name]):
            raise Unresumable(_REASONS[name])
    if bytes(document.get("n", b"1")) not in (b"1", b"null"):
        raise Unresumable("answers")
    if any(word in body for word in _MEDIA):
        raise Unresumable("media")
    chat = path == CHAT
    if not chat and not _is_one(document.get("prompt")):
        raise Unresumable("answers")
    kept = {name: document[name] for name in document.keys() & _KEPT}
    limit = _number(document, "max_completion_tokens") if chat else None
    limit = _number(document, "max_tokens") if limit is None else limit
    if not chat and "max_tokens" not in document:
        limit = 16  # the API's default for a completion; null is no limit
    texts = _stops(document)
    hides = all(bytes(document.get(name, b"false")) != b"true" for name in stops.NAMES)
    return Plan(chat, kept, limit, _number(document, "min_tokens") or 0, texts, hides, text)


def _stops(document: dict[str, msgspec.Raw]) -> tuple[str, ...]:
    try:
        texts = stops.named(bytes(document.get("stop", b"null")))
    except UNREADABLE:
        raise Unresumable("unreadable") from None
    if any(not 0 < len(text) <= stops.LONGEST_CHARS_MAX for text in texts):
        raise Unresumable("stop_strings")
    return texts


def _is_neutral(name: str, value: msgspec.Raw) -> bool:
    said = bytes(value)
    return said in _NOTHING or said in _NEUTRAL.get(name, ())


def _is_one(prompt: msgspec.Raw | None) -> bool:
    """One text, or one list of ids."""
    said = bytes(prompt or b"").lstrip()
    return said[:1] == b'"' or (said[:1] == b"[" and said[1:].lstrip()[:1].isdigit())


def _number(document: dict[str, msgspec.Raw], name: str) -> int | None:
    said = bytes(document.get(name, b"null"))
    return int(said) if said.isdigit() else None


class _Form(NamedTuple):
    """What the events of one stream have in common that bring one token each: all but their text and their id."""

    head: bytes  # to the text
    middle: bytes  # from its quote to the bracket before the id
    tail: bytes  # from the bracket behind it
    passed: bytes  # what stands there instead, from the bracket before it


class Progress(ABC):
    """What is known of one stream that can go on elsewhere, whatever it goes on by: ids (`ExactProgress`) or text.

    `why_not` says why it cannot go on any more, "" while it can. `resumed` counts seams, `recomputed` the tokens that
    were computed again there.
    """

    __slots__ = (
        "_head",
        "_tells_done",
        "_tells_usage",
        "counted_bytes",
        "finished",
        "plan",
        "recomputed",
        "resumed",
        "stops",
        "version",
        "why_not",
    )

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.stops = Stops(plan.stops, hides=plan.hides_stop) if plan.stops else None
        self._head: dict[str, Any] = {}
        self.finished = False
        self._tells_usage = self._tells_done = True  # at its end: what the client has not been told of it yet
        self.why_not = ""
        self.resumed = self.recomputed = 0
        self.version = b""  # of the model, as the tier below told with the first answer
        self.counted_bytes = 0  # of what is held, as whoever bounds it has it

    # -- what each kind says

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """What it keeps."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """How many of the answer are known."""

    @property
    @abstractmethod
    def carried_by(self) -> machine.Carrier:
        """What of it an engine must take."""

    @property
    @abstractmethod
    def target(self) -> bytes:
        """The path that continues it."""

    @property
    @abstractmethod
    def can_resume(self) -> bool:
        """Whether it can go on from what is known."""

    @property
    def can_end(self) -> bool:
        """Whether it lacks no more than its end, which can be told."""
        return self.finished and not self.why_not

    @abstractmethod
    def bounded(self, context_tokens: int) -> bool:
        """Whether it can be said how much may still come, where the engine has room for so many; 0: unknown."""

    @abstractmethod
    def left(self, context_tokens: int) -> int:
        """How many tokens may still come, where the engine has room for so many, prompt and answer; 0: none."""

    @abstractmethod
    def take(self, events: bytes) -> bytes:
        """Whole events as the engine wrote them; as one writes them that was not asked for anything."""

    @abstractmethod
    def go_on(self, context_tokens: int) -> bytes:
        """The body that continues it. What the client has no text of is computed again."""

    @property
    @abstractmethod
    def usage(self) -> Usage | None:
        """Of the whole, as if it had never broken; None where that is not known."""

    @property
    def counts(self) -> bool:
        """Whether `usage` tells of a stream that broke what passed."""
        return False

    @abstractmethod
    def _tokens_in(self, event: bytes) -> int:
        """Of the answer, which an event brings."""

    @abstractmethod
    def _continued(self, document: dict[str, Any]) -> bytes:
        """An event of a continuation, which has a choice, as one of the first stream."""

    # -- what is the same for all

    def heard(self, events: bytes) -> bytes:
        """Before they are taken: whole events as an engine would write them that knows what was said before a seam."""
        tokens, pieces = self.tokens, list[bytes]()
        assert self.stops is not None  # else there is nothing to hear
        for event in each(events):
            if self.stops.looks:
                tokens += self._tokens_in(event)
            pieces.append(self.stops.heard(event, may_stop=tokens > self.plan.min_tokens))
        return b"".join(pieces)

    def shown(self, events: bytes) -> bytes:
        """After they were taken: whole events without what a client is not to see of its stop strings."""
        return events if self.stops is None else b"".join(map(self.stops.shown, each(events)))

    def _begin(self, events: bytes) -> None:
        """Name, moment and model, which every event of one stream repeats."""
        at = events.find(b"{")
        try:
            head = msgspec.json.decode(events[at : events.find(b"\n", at)], type=dict[str, Any]) if at >= 0 else {}
        except UNREADABLE:
            head = {}
        self._head = {name: head[name] for name in ("id", "created", "model") if name in head}
        if len(self._head) < 3:
            self.why_not = self.why_not or "unreadable"

    def _note(self, events: bytes) -> None:
        """What else whole events say of the stream: that it cannot go on, that it ends, what was told of its end."""
        if not self.why_not and _UNTOLD.search(events) is not None:
            self.why_not = "tools_or_reasoning"
        if _ENDS.search(events) is not None:
            self.finished = True
        if self.finished and not self.resumed:  # a continuation's end is written by `end`
            self._tells_usage = self._tells_usage and _USAGE.search(events) is None
            self._tells_done = self._tells_done and _DONE.search(events) is None

    def spelled(self, events: bytes, *, tells_usage: bool) -> bytes:
        """Whole events of a continuation as those of the first stream. `tells_usage`: the client asked for it."""
        pieces = [self._spelled(event, tells_usage) for event in events.split(b"\n\n") if event.strip()]
        return self.shown(b"".join(pieces))

    def _spelled(self, event: bytes, tells_usage: bool) -> bytes:
        said = event[5:].strip() if event.startswith(b"data:") else b""
        if said == b"[DONE]":
            return self.end(tells_usage=tells_usage)
        try:
            document = msgspec.json.decode(said, type=dict[str, Any])
            choices = document["choices"]
        except (*UNREADABLE, KeyError):
            return event + b"\n\n"
        return self._continued(document) if choices else b""  # without: usage, which is told at the end, of the whole

    def _chunk(self, text: str, choice: dict[str, Any]) -> bytes:
        ends = choice.get("finish_reason")
        said: dict[str, Any] = {
            "index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": ends,
        }  # fmt: skip
        if ends is not None:
            said["stop_reason"] = choice.get("stop_reason")
        said["token_ids"] = choice.get("token_ids")  # null but for a tier above
        return event({
            "id": self._head["id"], "object": "chat.completion.chunk", "created": self._head["created"],
            "model": self._head["model"], "choices": [said],
        })  # fmt: skip

    def at_limit(self) -> bytes:
        """The event that ends it where all tokens that were asked for are there."""
        self.finished = True
        return self.shown(self._limit())

    def _limit(self) -> bytes:
        if self.plan.chat:
            return self._chunk("", {"finish_reason": "length"})
        choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": "length", "stop_reason": None}
        choice |= {"prompt_token_ids": None, "token_ids": None}
        head = self._head
        return event({
            "id": head["id"], "object": "text_completion", "created": head["created"], "model": head["model"],
            "choices": [choice],
        })  # fmt: skip

    def end(self, *, tells_usage: bool) -> bytes:
        """What follows its last chunk, but for what was told: a connection may break behind that, too."""
        if not self._tells_done:
            return b""
        self._tells_done = False
        usage, head = self.usage, self._head
        if usage is None or not tells_usage or not self._tells_usage:
            return b"data: [DONE]\n\n"
        told = event({
            "id": head["id"], "object": "chat.completion.chunk" if self.plan.chat else "text_completion",
            "created": head["created"], "model": head["model"], "choices": [],
            "usage": {
                "prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens,
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        })  # fmt: skip
        return told + b"data: [DONE]\n\n"


class ExactProgress(Progress):
    """By ids: its prompt's and answer's tokens, and how much of these the client has as text."""

    __slots__ = ("_begins", "_form", "_sure", "_tokens_left", "ids", "prompt")

    def __init__(self, plan: Plan, tokens_max: int = TOKENS_MAX) -> None:
        super().__init__(plan)
        self._tokens_left = tokens_max
        self.prompt, self.ids = array("I"), array("I")
        self._sure = 0  # of the ids, those whose text the client has, wholly
        self._begins = _CONTENT if plan.chat else _TEXT  # what comes before an event's text
        self._form: _Form | None = None

    @property
    def held_bytes(self) -> int:
        """See Progress."""
        return 4 * (len(self.prompt) + len(self.ids))

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
        return TARGET

    @property
    def can_resume(self) -> bool:
        """See Progress."""
        return not self.why_not and not self.finished and bool(self.prompt) and bool(self._head)

    def bounded(self, context_tokens: int) -> bool:
        """See Progress. Without either nobody could say: a completion's default is another than a chat's."""
        return self.plan.max_tokens is not None or context_tokens > 0

    @property
    def counts(self) -> bool:
        """See Progress."""
        return bool(self.prompt)

    def take(self, events: bytes) -> bytes:
        """See Progress."""
        # Nearly always it is one event with one token, in the form of the last one: five times as fast as a search.
        if self._form is not None:
            head, middle, tail, passed = self._form
            behind = len(events) - len(tail)
            id_at = events.rfind(b"[", behind - _ID_DIGITS, behind) + 1
            number, middle_at = events[id_at:behind], id_at - len(middle)
            alike = events.startswith(head) and events.startswith(middle, middle_at) and events.endswith(tail)
            if alike and number.isdigit() and self._tokens_left > 0 and not self.why_not:
                text = events[len(head) : middle_at]
                if b'"' not in text:  # else it is more than one event, or says a quote
                    self._tokens_left -= 1
                    ids = self.ids
                    ids.append(int(number))
                    if text:
                        self._sure = len(ids)
                    return events[: id_at - 1] + passed
        return self._search(events)

    def _search(self, events: bytes) -> bytes:
        at = events.find(_ID)
        if at >= 0 and self._head and _PROMPT_ID not in events:
            end = events.find(b"]", at)
            said = events[at + _ID_BYTES : end]
            plain = said.isdigit() and _GOES_ON in events and events.find(_ID, end) < 0 and self._tokens_left > 0
            if plain and not (_TOOLS in events or _REASONS_TOLD in events or _REFUSAL in events or self.why_not):
                self._tokens_left -= 1
                self.ids.append(int(said))
                begins = self._begins
                says = events.find(begins)
                if says >= 0 and events[says + len(begins)] != _QUOTE:
                    self._sure = len(self.ids)
                    self._form = _form(events, says + len(begins), at + _ID_BYTES, end)
                return events[: at + _ID_BYTES - 1] + b"null" + events[end + 1 :]
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
            said = found[2]
            if found[1] == b"prompt_token_ids":
                if not self.prompt:
                    self._keep(self.prompt, said)
            else:
                self._keep(self.ids, said)
                # A token that ends within a character has no text yet: it comes with the next one's.
                if _SAYS.search(events, since, found.start()) is not None:
                    self._sure = len(self.ids)
                since = start
        if not pieces:
            if not self.why_not and _SAYS.search(events) is not None:
                self.why_not = "untold"  # the client has text of which no ids are known: it would be said again
            return events
        pieces.append(events[start:])
        return b"".join(pieces)

    def _keep(self, where: array[int], said: bytes) -> None:
        try:
            tokens = _ids.decode(said)
            self._tokens_left -= len(tokens)
            if self._tokens_left >= 0:
                where.extend(tokens)
                return
            self.why_not = self.why_not or "too_long"
        except (msgspec.DecodeError, OverflowError):
            self.why_not = self.why_not or "unreadable"
        del self.prompt[:], self.ids[:]

    def left(self, context_tokens: int) -> int:
        """See Progress."""
        room = context_tokens - len(self.prompt) - self._sure if context_tokens else 0
        if self.plan.max_tokens is None:
            return max(0, room)
        left = max(0, self.plan.max_tokens - self._sure)
        return min(left, room) if context_tokens else left

    def go_on(self, context_tokens: int) -> bytes:
        """See Progress."""
        dropped = len(self.ids) - self._sure
        self.recomputed += len(self.prompt) + len(self.ids)
        del self.ids[self._sure :]
        self._tokens_left += dropped
        self.resumed += 1
        self._begins, self._form = _TEXT, None  # whatever it was, a completion continues it
        plan = self.plan
        document: dict[str, Any] = {
            **plan.kept,
            "prompt": [*self.prompt, *self.ids],
            "max_tokens": self.left(context_tokens),
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if self.stops is not None:
            self.stops.break_off()
            document |= {"stop": plan.stops, "include_stop_str_in_output": True}
        if plan.min_tokens > len(self.ids):
            document["min_tokens"] = plan.min_tokens - len(self.ids)
        return msgspec.json.encode(document)

    @property
    def usage(self) -> Usage:
        """See Progress. How much was cached at first, nobody said."""
        return Usage(len(self.prompt), len(self.ids))

    def _tokens_in(self, event: bytes) -> int:
        return sum(told[2].count(b",") + 1 for told in _IDS.finditer(event) if told[1] == b"token_ids")

    def _continued(self, document: dict[str, Any]) -> bytes:
        choice = document["choices"][0]
        if self.plan.chat:
            return self._chunk(str(choice.get("text") or ""), choice)
        return event({**document, **self._head})


class ToldProgress(ExactProgress):
    """The same for a tier above that is to know the ids, too: what it gets has them.

    An event brings the ids of the text that it ends with, and never others: whoever has all events so far can go on
    from their ids, whatever was computed here beside, and whichever engine of ours it came from.
    """

    __slots__ = ("_told", "_told_prompt")

    def __init__(self, plan: Plan, tokens_max: int = TOKENS_MAX) -> None:
        super().__init__(plan, tokens_max)
        if self.stops is not None:
            self.stops.hides = False  # the tier above does
        self._told, self._told_prompt = 0, False

    def take(self, events: bytes) -> bytes:
        """Whole events as the tier above gets them."""
        if events.count(b"\n\n") == 1 and self._told == len(self.ids) and _PROMPT_ID not in events:
            taken = super().take(events)  # nearly always: one event, with the ids of its own text
            if self._told < self._sure == len(self.ids) and not self.why_not:
                self._told = self._sure
                return events
            return self._tell(taken)
        return b"".join([self._tell(super(ToldProgress, self).take(event)) for event in each(events)])

    def _tell(self, event: bytes) -> bytes:
        if self.prompt and not self._told_prompt:
            self._told_prompt = True
            event = event.replace(_NO_PROMPT_IDS, _NO_PROMPT_IDS[:-4] + _listed(self.prompt), 1)
        known = len(self.ids) if self.finished else self._sure
        at = event.rfind(_NO_IDS) if known > self._told else -1
        if at < 0:
            return event
        ids, self._told = _listed(self.ids[self._told : known]), known
        return event[: at + len(_NO_IDS) - 4] + ids + event[at + len(_NO_IDS) :]


def _form(events: bytes, says: int, id_at: int, end: int) -> _Form | None:
    """That of an event whose text begins and whose id begins and ends there; None where that cannot be said."""
    quote = events.find(b'"', says)
    if not says < quote < id_at or b"\\" in events[says:quote] or events.find(b"\n\n") != len(events) - 2:
        return None
    return _Form(events[:says], events[quote:id_at], events[end:], b"null" + events[end + 1 :])


def each(events: bytes) -> Iterator[bytes]:
    """Whole events, one by one."""
    if events.find(b"\n\n") == len(events) - 2:  # nearly always
        yield events
        return
    start = 0
    for end in _ANY_END.finditer(events):
        yield events[start : end.end()]
        start = end.end()
    if start < len(events):
        yield events[start:]


def _listed(ids: array[int]) -> bytes:
    return b"[" + b",".join(b"%d" % one for one in ids) + b"]"


def event(document: dict[str, Any]) -> bytes:
    """It as a server-sent event."""
    return b"data: " + msgspec.json.encode(document) + b"\n\n"
