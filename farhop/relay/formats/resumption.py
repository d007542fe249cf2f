"""A stream that can be continued at another engine: which streams can, what is asked of the engine for it, and their
state.

Exact: the engine is asked for token ids (vLLM's `return_token_ids`), by which the stream is continued
(`exact_resumption`). So no character is lost, doubled or altered at the seam. To equal an unbroken stream as a whole,
it would also take an engine that gives the same answer each time. By text alone: `text_resumption`.

What cannot be continued honestly is not (`Unresumable`): grammars, penalties, several answers, log probabilities,
tools, reasoning, media. Stop strings are handled by `stops`. Pure; never decides whether and where a stream continues.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import msgspec

from farhop.balance.machine import Usage
from farhop.relay.formats import stops
from farhop.relay.formats.event_stream import SAYS, each
from farhop.relay.formats.openai import UNREADABLE
from farhop.relay.formats.prompt import any_json
from farhop.relay.formats.stops import Stops

if TYPE_CHECKING:
    from farhop.balance import machine

PROMPT_BYTES_MAX = 256 * 1024  # the engine repeats its tokens in the stream's first event
EVENT_BYTES_MAX = 16 * 1024  # of other events: searching a larger one would take 2 ms
# A plan is kept as long as its stream, in addition to what is counted for that: 60,000 stop strings would be 3.4 MB.
_MEMBERS_BYTES_MAX, _STOPS_BYTES_MAX, _STOPS_MAX = 8192, 8192, 64
TOKENS_MAX = 1 << 19  # kept of one stream, prompt and answer
CHAT, TARGET = b"/v1/chat/completions", b"/v1/completions"
ASKS = b'"return_token_ids":true,'  # goes into the body behind its first brace

_raw = msgspec.json.Decoder(dict[str, msgspec.Raw])
_maybe_raw = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)


class _Named(msgspec.Struct, frozen=True, gc=False):
    """What every event of one stream repeats. The first has all ids of its prompt beside: nothing is made of them."""

    id: Any = None
    created: Any = None
    model: Any = None


_named = msgspec.json.Decoder(_Named)
_ENDS = re.compile(rb'"finish_reason"\s*:\s*"')
_NOT_CONTINUABLE = re.compile(rb'"(?:tool_calls"\s*:\s*\[\s*\{|(?:reasoning|reasoning_content|refusal)"\s*:\s*"(?!"))')
_DONE = re.compile(rb"^data:\s*\[DONE\]", re.M)
_USAGE = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_DATA = re.compile(rb"^data:(.*?)\r?$", re.M)  # other lines of an event name it, or are comments
# In one pass, a fifth of what a search for each takes of 32 KB.
_MEDIA = re.compile(rb'"(?:(?:image|audio|video)_url|input_audio|(?:image|prompt)_embeds)"')
_NOTHING = (b"null", b"false", b"[]", b"{}", b'""', b"0", b"0.0")
# Of a body, what a completion takes as the first stream had it.
_CONTINUED = frozenset((
    "model", "temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "stop_token_ids", "ignore_eos",
    "skip_special_tokens", "spaces_between_special_tokens", "cache_salt", "user", "allowed_token_ids",
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
# Here 0 has a meaning: log probabilities of the chosen token only.
_COUNTED = ("logprobs", "prompt_logprobs")


class Unresumable(ValueError):  # noqa: N818 - it is what a stream is, not what went wrong
    """A stream that cannot be continued; the text is the reason by which it is counted."""


class Plan(msgspec.Struct, frozen=True, gc=False):
    """How a request's stream would be continued."""

    chat: bool
    members: bytes  # those of its body that a continuation has, too, as one document
    max_tokens: int | None
    min_tokens: int
    stops: tuple[str, ...] = ()
    hides_stop: bool = True  # the client is not to see the one that ends it
    text: bool = False  # it may be continued by its text if no ids are sent
    usage_each: bool = False  # the client wants usage with each event


def asking(body: bytes, plan: Plan, asks: bytes = ASKS) -> bytes:
    """A body that asks for ids beside, or for what `asks` says, and for no text to be held back."""
    if plan.stops and plan.hides_stop:
        if any(shape in body for shape in stops.SHOWN_BY):  # it may say that it does not want what we want
            document = _raw.decode(body)
            for name in stops.NAMES:
                document.pop(name, None)
            body = msgspec.json.encode(document)
        asks += b"".join(name + b":true," for name in stops.SHOWN_BY) if plan.text and asks != ASKS else stops.SHOWS
    at, view = body.index(b"{") + 1, memoryview(body)
    return b"".join((view[:at], asks, view[at:]))  # one copy: a sum of three makes two


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
    if any(bytes(document.get(name, b"1")) not in (b"1", b"null") for name in ("n", "n_cmpl")):
        raise Unresumable("answers")
    if "n_predict" in document:  # llama.cpp's own, which goes before `max_tokens`
        raise Unresumable("unreadable")
    if bytes(document.get("include_reasoning", b"true")) not in (b"true", b"null"):
        raise Unresumable("tools_or_reasoning")  # reasoning is not sent, nor are its ids, so its progress is unknown
    if _MEDIA.search(body):
        raise Unresumable("media")
    chat = path == CHAT
    if not chat and not _is_one(document.get("prompt")):
        raise Unresumable("answers")
    members = msgspec.json.encode({name: value for name, value in document.items() if name in _CONTINUED})
    if len(members) > _MEMBERS_BYTES_MAX:
        raise Unresumable("too_long")
    limit = _number(document, "max_completion_tokens") if chat else None
    limit = _number(document, "max_tokens") if limit is None else limit
    if not chat and "max_tokens" not in document:
        limit = 16  # the API's default for a completion; null is no limit
    texts = _stops(document)
    hides = not any(_truth(document, name) for name in stops.NAMES)
    each = _wants_each(document)
    return Plan(chat, members, limit, _number(document, "min_tokens") or 0, texts, hides, text, each)


def _wants_each(document: dict[str, msgspec.Raw]) -> bool:
    try:
        options = _maybe_raw.decode(document.get("stream_options", b"null")) or {}
    except UNREADABLE:
        raise Unresumable("unreadable") from None
    return _truth(options, "continuous_usage_stats")


def _stops(document: dict[str, msgspec.Raw]) -> tuple[str, ...]:
    listed = bytes(document.get("stop", b"null"))
    if len(listed) > _STOPS_BYTES_MAX:
        raise Unresumable("stop_strings")
    try:
        texts = stops.named(listed)
    except UNREADABLE:
        raise Unresumable("unreadable") from None
    if len(texts) > _STOPS_MAX or any(not 0 < len(text) <= stops.LONGEST_CHARS_MAX for text in texts):
        raise Unresumable("stop_strings")
    return texts


def _is_neutral(name: str, value: msgspec.Raw) -> bool:
    text = bytes(value)
    if name in _COUNTED and text[:1] == b"0":
        return False
    return text in _NOTHING or text in _NEUTRAL.get(name, ())


def _is_one(prompt: msgspec.Raw | None) -> bool:
    """Whether the prompt is one text, or one list of token ids."""
    text = bytes(prompt or b"").lstrip()
    return text[:1] == b'"' or (text[:1] == b"[" and text[1:].lstrip()[:1].isdigit())


def _number(document: dict[str, msgspec.Raw], name: str) -> int | None:
    """None where there is none. What engines may read as a number all the same (`"6"`, 6.0, -1) is not counted on."""
    text = bytes(document.get(name, b"null"))
    if text != b"null" and not text.isdigit():
        raise Unresumable("unreadable")
    return int(text) if text != b"null" else None


def _truth(document: dict[str, msgspec.Raw], name: str) -> bool:
    """The same of a truth."""
    text = bytes(document.get(name, b"false"))
    if text not in (b"true", b"false", b"null"):
        raise Unresumable("unreadable")
    return text == b"true"


class Progress(ABC):
    """What is known of one stream that can go on elsewhere, whatever it goes on by: ids (`ExactProgress`) or text.

    `why_not` says why it cannot go on any more, "" while it can. `resumed` counts seams, `recomputed` the tokens that
    were computed again there. `context_tokens` is the context length of the last engine that answered and says it, 0
    for none.
    """

    __slots__ = (
        "_done_due",
        "_head",
        "_seam",
        "_usage_due",
        "context_tokens",
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
        self._head = b""  # a _Named, as JSON takes less than half as much
        self.finished = False
        self._usage_due = self._done_due = True  # at its end: what the client has not been sent yet
        self.why_not = ""
        self.resumed = self.recomputed = 0
        self._seam = 0  # tokens before the last one
        self.version = b""  # of the model, as the tier below reported with the first answer
        self.context_tokens = 0
        self.counted_bytes = 0  # of what is held, as last counted against its bound

    # -- what each kind says

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Bytes held for this stream."""

    def compact(self) -> None:  # noqa: B027 - text has nothing of the kind
        """The first events have passed: what is held of them may be stored more compactly from now on."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """The number of known tokens of the answer."""

    @property
    def _tokens_so_far(self) -> int:
        """The number of known tokens, plus those received whose text has not come yet."""
        return self.tokens

    @property
    @abstractmethod
    def carried_by(self) -> machine.Carrier:
        """What an engine must accept to continue the stream: token ids, or text."""

    @property
    @abstractmethod
    def target(self) -> bytes:
        """The request path that continues the stream."""

    @property
    @abstractmethod
    def can_resume(self) -> bool:
        """Whether the stream can be continued from what is known."""

    @property
    def hindrance(self) -> str:
        """Why the stream could not be continued if it broke now; "" if it could. If `why_not` is set it is that, and
        final; otherwise the next token may remove it.
        """
        return self.why_not

    @property
    def can_end(self) -> bool:
        """Whether only the stream's last event is missing, and can be written here."""
        return self.finished and not self.why_not

    @abstractmethod
    def bounded(self, context_tokens: int) -> bool:
        """Whether the number of remaining tokens is bounded. `context_tokens`: the context length of the engine, 0 if
        unknown.
        """

    @abstractmethod
    def left(self, context_tokens: int) -> int:
        """The most tokens that may still come. `context_tokens`: the context length of the engine (prompt and answer),
        0 if unknown.
        """

    @abstractmethod
    def take(self, events: bytes) -> bytes:
        """Take complete events as the engine wrote them. Returns them without what only the balancer had asked for."""

    @abstractmethod
    def continuation_body(self, context_tokens: int) -> bytes:
        """The request body that continues the stream. Tokens whose text the client has not received are generated
        again.
        """

    @property
    @abstractmethod
    def usage(self) -> Usage | None:
        """The usage of the whole stream, as if it had never broken; None if it is unknown."""

    @property
    def counts(self) -> bool:
        """Whether `usage` is known although the stream broke before its engine reported it."""
        return False

    @abstractmethod
    def _tokens_by(self, event: bytes, tokens: int) -> int:
        """The number of tokens of the answer after this event; `tokens`: the number before it."""

    @abstractmethod
    def _continued(self, document: dict[str, Any]) -> bytes:
        """An event of a continuation, with a choice, in the form of the first stream."""

    # -- what is the same for all

    def apply_stops(self, events: bytes) -> bytes:
        """Apply stop strings to complete events, before `take`: as an engine would that knows the text before the
        break.
        """
        tokens, pieces = self._tokens_so_far, list[bytes]()
        assert self.stops is not None  # else there is nothing to hear
        for event in each(events):
            if self.stops.scan_chars:
                tokens = self._tokens_by(event, tokens)
            pieces.append(self.stops.apply(event, may_stop=tokens > self.plan.min_tokens))
        return b"".join(pieces)

    def visible(self, events: bytes) -> bytes:
        """Remove from complete events, after `take`, what the client must not see of its stop strings."""
        return events if self.stops is None else b"".join(map(self.stops.visible, each(events)))

    def _begin(self, events: bytes) -> None:
        """Keep the id, time and model, which every event of a stream repeats. An event without content does not
        count.
        """
        if (says := SAYS.search(events)) is None:
            return
        at = events.find(b"{", says.end())
        try:
            named = _named.decode(memoryview(events)[at : events.find(b"\n", at)]) if at >= 0 else _Named()
        except UNREADABLE:
            named = _Named()
        if None in (named.id, named.created, named.model):
            self.why_not = self.why_not or "unreadable"
        self._head = msgspec.json.encode(named)

    def _note(self, events: bytes) -> None:
        """Note what else complete events say: that the stream cannot be continued, that it ends, and what its end
        holds.
        """
        if not self.why_not and _NOT_CONTINUABLE.search(events) is not None:
            self.why_not = "tools_or_reasoning"
        if _ENDS.search(events) is not None:
            self.finished = True
        if self.finished and not self.resumed:  # a continuation's end is written by `end`
            self._usage_due = self._usage_due and _USAGE.search(events) is None
            self._done_due = self._done_due and _DONE.search(events) is None

    def rewritten(self, events: bytes, *, sends_usage: bool) -> bytes:
        """Complete events of a continuation, in the form of the first stream. `sends_usage`: the client asked for the
        usage.
        """
        pieces = [self._rewritten(event, sends_usage) for event in each(events) if event.strip()]
        return self.visible(b"".join(pieces))

    def _rewritten(self, event: bytes, sends_usage: bool) -> bytes:
        data = b"\n".join(_DATA.findall(event)).strip()
        if data == b"[DONE]":
            return self.end(sends_usage=sends_usage)
        try:
            document = any_json(data)
            choices = document["choices"]
        except (*UNREADABLE, KeyError):
            return event
        if not choices:
            return b""  # usage, which is told at the end, of the whole
        if not isinstance(choices, list) or not isinstance(choices[0], dict):
            return event  # as what cannot be read
        return self._continued(document)

    def _chunk(self, text: str, choice: dict[str, Any], usage: dict[str, Any] | None = None) -> bytes:
        ends = choice.get("finish_reason")
        made: dict[str, Any] = {
            "index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": ends,
        }  # fmt: skip
        if ends is not None:
            made["stop_reason"] = choice.get("stop_reason")
        made["token_ids"] = choice.get("token_ids")  # null but for a tier above
        document = self._document("chat.completion.chunk", [made])
        return event(document if usage is None else document | {"usage": usage})

    def _document(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        """A new event of the balancer, in the form of the first stream."""
        head = _named.decode(self._head)  # without which nothing goes on
        return {"id": head.id, "object": kind, "created": head.created, "model": head.model, "choices": choices}

    def _renamed(self, document: dict[str, Any]) -> bytes:
        """An event of a continuation with the first stream's id, time and model."""
        return event({**document, **msgspec.json.decode(self._head)})

    def _usage_so_far(self, document: dict[str, Any]) -> dict[str, Any] | None:
        """The usage in an event of a continuation, for the whole stream; None if the client does not want it with each
        event. A continuation's prompt includes the answer before the break.
        """
        usage = document.get("usage")
        if not self._wants_usage_each or not isinstance(usage, dict):
            return None
        prompt, answer = (usage.get(name) for name in ("prompt_tokens", "completion_tokens"))
        if not isinstance(prompt, int) or not isinstance(answer, int):
            return None
        prompt, answer = self._prompt_of(prompt), self._seam + answer
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}

    @property
    def _wants_usage_each(self) -> bool:
        """Whether each event of a continuation holds the usage."""
        return self.plan.usage_each

    def _prompt_of(self, prompt_tokens: int) -> int:
        """The prompt's tokens, given the number that a continuation's engine reported, which includes the answer so
        far.
        """
        return max(0, prompt_tokens - self._seam)

    def at_limit(self) -> bytes:
        """The event that ends it where all tokens that were asked for are there."""
        self.finished = True
        return self.visible(self._limit())

    def _limit(self) -> bytes:
        if self.plan.chat:
            return self._chunk("", {"finish_reason": "length"})
        choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": "length", "stop_reason": None}
        choice |= {"prompt_token_ids": None, "token_ids": None}
        return event(self._document("text_completion", [choice]))

    def end(self, *, sends_usage: bool) -> bytes:
        """What follows its last chunk, but for what was told: a connection may break behind that, too."""
        if not self._done_due:
            return b""
        self._done_due = False
        usage = self.usage
        if usage is None or not sends_usage or not self._usage_due:
            return b"data: [DONE]\n\n"
        told = {
            "prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }  # fmt: skip
        kind = "chat.completion.chunk" if self.plan.chat else "text_completion"
        return event({**self._document(kind, []), "usage": told}) + b"data: [DONE]\n\n"


def event(document: dict[str, Any]) -> bytes:
    """A document as a server-sent event."""
    return b"data: " + msgspec.json.encode(document) + b"\n\n"
