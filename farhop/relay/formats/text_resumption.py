"""Continuing a stream by its text, if its engine reports no token ids: never called exact.

Continued as the same request with the answer's text so far: after a completion's prompt, in a chat as the last message,
which the engine has to continue (`continue_final_message`; vLLM wants `add_generation_prompt: false` with it, SGLang
does not know that field and ignores it). No character is lost or repeated. But the engine tokenizes the text again,
perhaps into other tokens than were generated: so the rest need not be that of an unbroken stream. Tokens are counted by
events, or by an event's usage if it has any: an engine may put several into one (`packs`; `counting` is what such an
engine is asked for). A tier above counts in the same way: after a seam it gets usage with each event, since tokens
without text are sent again there. Text that a chat template could trim is marked (`carried_by`). Pure.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from farhop.balance.machine import Usage
from farhop.relay.formats import stops
from farhop.relay.formats.event_stream import SAYS, each
from farhop.relay.formats.openai import UNREADABLE
from farhop.relay.formats.resumption import CHAT, TARGET, TOKENS_MAX, Progress, Unresumable

if TYPE_CHECKING:
    from farhop.balance.machine import Carrier
    from farhop.relay.formats.resumption import Plan

TEXT_BYTES_MAX = 1024 * 1024  # kept of one answer, as JSON spells it
ASKS = b""  # nothing but that no text is held back
_TEXT_FIELD = re.compile(rb'"(?:content|text)"\s*:\s*"([^"\\]*+(?:\\.[^"\\]*+)*+)"')
_USES = re.compile(rb'"usage"\s*:\s*\{')
_COUNTED = re.compile(rb'"completion_tokens"\s*:\s*([0-9]{1,9})[,}\s]')
_PROMPT = re.compile(rb'"prompt_tokens"\s*:\s*([0-9]{1,9})[,}\s]')
_USAGE_MEMBER = re.compile(rb',\s*"usage"\s*:\s*\{(?:[^{}]|\{[^{}]*\})*\}')  # a text's own quotes are escaped
_INDEX = re.compile(rb'"index"\s*:')
_ROLE = re.compile(rb'"role"\s*:\s*"')
_UNKNOWN = "\ufffd"  # what engines write for bytes that are no character
_raw = msgspec.json.Decoder(dict[str, msgspec.Raw])
_list = msgspec.json.Decoder(list[msgspec.Raw])
_string = msgspec.json.Decoder(str)
_message = msgspec.json.Decoder(dict[str, Any])
_LIMITS = ("max_completion_tokens", "max_tokens")
_PACKED, _PACKED_MORE = 1.25, 4  # beyond what characters of several tokens, and the token that ends it, make of events


class TextProgress(Progress):
    """What is known of such a stream: its request, and the text that the client has, or will get."""

    __slots__ = (
        "_body",
        "_counts_usage",
        "_form_begins",
        "_form_ends",
        "_mute",
        "_prompt_tokens",
        "_text",
        "_tokens",
        "sends_usage",
        "strips",
        "usage_received",
    )  # fmt: skip

    def __init__(self, plan: Plan, body: bytes, *, sends_usage: bool) -> None:
        """`body`: the request body as engines get it; `sends_usage`: the client asked for the usage. Raises
        Unresumable.
        """
        super().__init__(plan)
        _check(plan, body)
        self._body, self.sends_usage = body, sends_usage
        self._text = bytearray()
        self._form_begins = self._form_ends = b""  # what all events that have only text have in common
        self._tokens = self._mute = 0  # of the answer; those since the last text, without text yet
        self._counts_usage = False  # events report how many tokens there are
        self._prompt_tokens: int | None = None  # as the first engine reported, if it did
        self.strips = not plan.usage_each  # its client must not see usage that only the balancer asked for
        self.usage_received: Usage | None = None  # from the engine that answers now

    @property
    def held_bytes(self) -> int:
        """See Progress."""
        return len(self._body) + len(self._text)

    @property
    def tokens(self) -> int:
        """See Progress."""
        return self._tokens

    @property
    def _tokens_so_far(self) -> int:
        return self._tokens + self._mute

    @property
    def carried_by(self) -> Carrier:
        """See Progress."""
        text = self._decoded()
        return "solid" if not self.plan.chat or text == text.strip() else "text"

    @property
    def target(self) -> bytes:
        """See Progress."""
        return CHAT if self.plan.chat else TARGET

    @property
    def hindrance(self) -> str:
        """See Progress. No engine can continue after half a character, and usage is unknown unless an engine reports
        it."""
        if self.why_not:
            return self.why_not
        try:
            text = self._decoded()
        except UNREADABLE:
            return "unreadable"
        if text.endswith(_UNKNOWN):
            return "character"
        usage_due = self.sends_usage and self._usage_due and self.usage is None
        return "usage" if usage_due and (self.finished or not self.left(0)) else ""

    @property
    def can_resume(self) -> bool:
        """See Progress."""
        return bool(self._head) and not self.finished and not self.hindrance

    @property
    def can_end(self) -> bool:
        """See Progress."""
        return super().can_end and not (self.sends_usage and self._usage_due and self.usage is None)

    def bounded(self, context_tokens: int) -> bool:  # noqa: ARG002
        """See Progress. Where the client set no limit the engine's own room is one."""
        return True

    def left(self, context_tokens: int) -> int:  # noqa: ARG002
        """See Progress. A request whose length was right at first is as long when it goes on."""
        limit = self.plan.max_tokens
        return TOKENS_MAX if limit is None else max(0, limit - self._tokens)

    def adds(self, event: bytes) -> bool:
        """Take data if it is a single event of the usual form; returns whether it was. Such an event passes
        unchanged.
        """
        begins, ends = self._form_begins, self._form_ends
        if self.why_not or len(self._text) > TEXT_BYTES_MAX:
            return False  # the longer way lets go of what was kept
        if not begins or not event.startswith(begins) or not event.endswith(ends):
            return False
        text = event[len(begins) : -len(ends)]
        if b'"' in text or not text:  # more than one event, or a quote, or a token whose text is still to come
            return False
        self._text += text
        self._tokens += 1
        return True

    def take(self, events: bytes) -> bytes:
        """See Progress."""
        stripped = list[bytes]()
        for event in each(events):
            if not self.adds(event):
                self._search(event)
                if self._counts_usage and self.strips and _INDEX.search(event) is not None:
                    event = _USAGE_MEMBER.sub(b"", event, 1)
            stripped.append(event)
        if len(self._text) > TEXT_BYTES_MAX:
            self.why_not = self.why_not or "too_long"
        if self.why_not:
            self._text, self._body, self._form_begins = bytearray(), b"", b""
        return b"".join(stripped) if self._counts_usage else events

    def _search(self, event: bytes) -> None:
        if (says := SAYS.search(event)) is None:
            return
        if event.startswith(b":"):
            event = event[says.start() :]  # of a comment its client hears nothing, whatever it looks like
        self._form_begins = b""
        if not self._head:
            self._begin(event)
        self._note(event)
        goes_on = not self.finished and _INDEX.search(event) is not None
        found = _TEXT_FIELD.search(event)
        if self._counted(event, has_text=found is not None and bool(found[1])):
            self._text += found[1] if found is not None else b""
            return
        if found is None or not found[1]:
            self._mute += goes_on and _ROLE.search(event) is None
            return
        self._text += found[1]
        self._tokens += 1 + self._mute
        self._mute = 0
        if goes_on and self.stops is None and _USES.search(event) is None and b"\r" not in event:
            self._form_begins, self._form_ends = event[: found.start(1)], event[found.end(1) :]

    def _counted(self, event: bytes, *, has_text: bool) -> bool:
        """Whether it reports how many tokens there are by now; the text of some may still come."""
        if _USES.search(event) is None or _INDEX.search(event) is None:
            return False
        if (counted := _COUNTED.search(event)) is None:
            return False
        self._counts_usage = True
        if self._prompt_tokens is None and not self.resumed and (prompt := _PROMPT.search(event)) is not None:
            self._prompt_tokens = int(prompt[1])
        known = self._seam + int(counted[1])
        self._mute = max(0, known - self._tokens)
        if has_text:
            self._tokens, self._mute = max(known, self._tokens), 0
        return True

    @property
    def packs(self) -> bool:
        """Of a stream that ended whole, and never broke: whether its engine put several tokens into an event."""
        usage, events = self.usage_received, self._tokens + self._mute
        if usage is None or self.resumed or self._counts_usage or not self.finished or self.stops is not None:
            return False
        return usage.completion_tokens > _PACKED * events + _PACKED_MORE

    def _decoded(self) -> str:
        return _string.decode(b'"' + self._text + b'"')

    def continuation_body(self, context_tokens: int) -> bytes:  # noqa: ARG002
        """See Progress."""
        text, document = self._decoded(), _raw.decode(self._body)
        self.resumed += 1
        self.recomputed += self._mute
        self._seam, self._mute, self._form_begins, self.usage_received = self._tokens, 0, b"", None
        if self.stops is not None:
            self.stops.break_off(may_stop=self.tokens > self.plan.min_tokens)
            document |= dict.fromkeys(stops.NAMES, msgspec.Raw(b"true"))
        if text and self.plan.chat:
            document |= _written_on(document, text)
        elif text:
            document["prompt"] = _json(_string.decode(document["prompt"]) + text)
        if self.plan.max_tokens is not None:
            by_new_name = self.plan.chat and bytes(document.get(_LIMITS[0], b"null")) != b"null"
            document[_LIMITS[0] if by_new_name else _LIMITS[1]] = _json(self.left(0))
        if document.pop("min_tokens", None) is not None and self.plan.min_tokens > self._tokens:
            document["min_tokens"] = _json(self.plan.min_tokens - self._tokens)
        document["stream_options"] = _json({"include_usage": True, "continuous_usage_stats": True})
        return msgspec.json.encode(document)

    @property
    def usage(self) -> Usage | None:
        """See Progress. The engine that went on counts the text before the seam as part of the prompt: in tokens of its
        own, which may be more or fewer than were generated, so the first engine's count of the prompt has
        precedence."""
        usage, seam = self.usage_received, self._seam
        if usage is None or not self.resumed:
            return usage
        ended = self.stops is not None and self.stops.ended  # which the engine does not know: it has gone on
        return Usage(self._prompt_of(usage.prompt_tokens), self._tokens if ended else seam + usage.completion_tokens)

    @property
    def _wants_usage_each(self) -> bool:
        return not self.strips

    def _prompt_of(self, prompt_tokens: int) -> int:
        return super()._prompt_of(prompt_tokens) if self._prompt_tokens is None else self._prompt_tokens

    def set_usage(self, usage: Usage | None) -> None:
        """Set the usage that the current engine has reported."""
        if usage is not None and self.usage_received is None and self.resumed:
            self.recomputed += usage.prompt_tokens
        self.usage_received = usage

    def _tokens_by(self, event: bytes, tokens: int) -> int:
        text = _TEXT_FIELD.search(event)
        if _INDEX.search(event) is None or (_ROLE.search(event) is not None and (text is None or not text[1])):
            return tokens
        counted = _COUNTED.search(event) if _USES.search(event) is not None else None
        return tokens + 1 if counted is None else self._seam + int(counted[1])

    def _continued(self, document: dict[str, Any]) -> bytes:
        if document.get("usage") is not None:
            document["usage"] = self._usage_so_far(document)  # with each event, since we asked for it
        choice = document["choices"][0]
        delta = choice.get("delta")
        if isinstance(delta, dict) and delta.pop("role", None) is not None and not delta.get("content"):
            return b""  # that it begins, which it did before
        return self._renamed(document)


def counting(body: bytes) -> bytes:
    """A body that asks for usage with each event, since this engine puts several tokens into one."""
    document = _raw.decode(body)
    document["stream_options"] = _json({"include_usage": True, "continuous_usage_stats": True})
    return msgspec.json.encode(document)


def can(plan: Plan, body: bytes) -> bool:
    """Whether a stream of this body could go on by its text."""
    try:
        _check(plan, body)
    except Unresumable:
        return False
    return True


def _check(plan: Plan, body: bytes) -> None:
    """Raises Unresumable where text cannot be put behind what was asked."""
    document = _raw.decode(body)
    if "input_ids" in document or (not plan.chat and bytes(document["prompt"]).lstrip()[:1] != b'"'):
        raise Unresumable("prompt_ids")
    if not plan.chat:
        return
    try:
        last = _message.decode(_list.decode(document["messages"])[-1])
    except (*UNREADABLE, KeyError, IndexError):
        raise Unresumable("unreadable") from None
    writes_on = _continues_final(document)
    if (last.get("role") == "assistant") is not writes_on or (writes_on and not isinstance(last.get("content"), str)):
        raise Unresumable("turns")
    if bytes(document.get("add_generation_prompt", b"true")) != b"true" and not writes_on:
        raise Unresumable("turns")


def _written_on(document: dict[str, msgspec.Raw], text: str) -> dict[str, msgspec.Raw]:
    """The fields of a chat to change so that its last message ends in this text and is continued."""
    messages = _list.decode(document["messages"])
    if _continues_final(document):
        last = _message.decode(messages.pop())
        last["content"] += text
    else:
        last = {"role": "assistant", "content": text}
    return {
        "messages": _json([*messages, last]),
        "continue_final_message": _json(True),
        "add_generation_prompt": _json(False),
    }


def _continues_final(document: dict[str, msgspec.Raw]) -> bool:
    return bytes(document.get("continue_final_message", b"false")) == b"true"


def _json(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
