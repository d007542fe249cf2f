"""Reading OpenAI-shaped bodies and answers: chats, completions, embeddings; the usage that an engine reports.

The canonical text is in the order in which an engine sees it (tools, then each message's role and decoded content, or
the prompt), so key order, escapes and spacing do not matter, and a conversation's next turn extends it byte for byte.
Never changes a body but by `change`: for the usage, which accounting needs, and the salt that keeps caches apart.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from farhop.balance import outcome
from farhop.balance.machine import Usage
from farhop.relay.formats import field_guard
from farhop.relay.formats.field_guard import json_reader
from farhop.relay.formats.lenient import truth
from farhop.relay.formats.paths import Kind
from farhop.relay.formats.prompt import (
    ASSISTANT_TURN,
    FIELD,
    ITEM,
    NO_OUTPUT,
    PART,
    TOOLS,
    AnswerText,
    BodyError,
    Prompt,
    Sized,
    generated,
    in_order,
    invalid,
    json_decoder,
    medium,
    without_output,
)
from farhop.relay.formats.shape import MARK
from farhop.relay.formats.texts import texts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farhop.relay.formats.field_guard import Guard
    from farhop.relay.formats.shape import Outline

_ANSWER_IN_CHAT = AnswerText("content", ASSISTANT_TURN)  # a message of its own
_ANSWER_CONTINUED = AnswerText("content", b"")  # the last message goes on
_ANSWER_IN_COMPLETION = AnswerText("text", b"")
# Of these it is known that engines take a salt, or may (`messages`). A client's own must not reach them then: what ours
# are can be worked out from tenants' names.
_SALTED = frozenset((
    Kind.CHAT, Kind.CHAT_BATCH, Kind.COMPLETION, Kind.EMBEDDINGS, Kind.GENERATIVE_SCORE, Kind.MESSAGES, Kind.RERANK,
    Kind.RESPONSES, Kind.SCORE,
))  # fmt: skip
_SALT_DIGITS = 32  # 128 bits: no collisions can be found
_UNLIMITED = (-1, 0)  # llama.cpp's; SGLang's, for which 0 means unset. Engines that accept neither say so
MEDIA_MAX = 2048  # a part that is no text takes 2 us to look at, and 1 us to hash; no engine takes as many
_USAGE_TOKENS_MAX = 1 << 31  # an engine that says more is not believed


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Message(msgspec.Struct):
    """One message of a chat: the fields that are read."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None


class _Body(Sized, kw_only=True):
    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | msgspec.UnsetType | None = msgspec.UNSET
    max_tokens: int | None = None
    cache_salt: str | msgspec.UnsetType | None = msgspec.UNSET
    prompt_logprobs: Any = None  # vLLM: from the engine that computes the prompt, like an echo


class _Chat(_Body, kw_only=True):
    messages: list[Message]
    echo: Any = None
    tools: list[Any] | None = None
    continue_final_message: Any = None


class _Batch(_Body, kw_only=True):
    """vLLM's: chats side by side, each answered once, and nothing else in common than how."""

    messages: list[list[Message]]


class _Completion(_Body, kw_only=True):
    prompt: msgspec.Raw
    echo: Any = None
    logprobs: Any = None


class _Embeddings(msgspec.Struct, kw_only=True):
    """vLLM takes a chat, too, in place of the input."""

    model: str | None = None
    input: msgspec.Raw = msgspec.Raw(b"null")
    messages: list[Message] | None = None
    cache_salt: str | msgspec.UnsetType | None = msgspec.UNSET


# What reading what somebody else wrote may raise: no JSON, of another type, not UTF-8, nested too deeply.
UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)

_raw = msgspec.json.Decoder(dict[str, msgspec.Raw])
_maybe_raw = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)


def _read_chat(body: _Chat, guard: Guard, texts: Sequence[memoryview] = ()) -> Prompt:
    """`texts` are those that `body` has the marks of (shape.Outline)."""
    if not body.messages:
        raise invalid("messages", "`messages` must hold at least one message")
    for message in body.messages:
        if not isinstance(message.content, str):
            guard.media(message.content, "messages")
    if body.tools:
        field_guard.tools([tool.get("type") for tool in body.tools if isinstance(tool, dict)])
    canonical, media_bytes = canonical_chat(body.messages, body.tools, texts)
    # vLLM answers an echo in a chat with the prompt's log probabilities.
    goes_on = body.continue_final_message is not None and truth(body.continue_final_message)
    answer = _answer_text(body) if goes_on else _ANSWER_IN_CHAT
    echo = body.echo is not None and truth(body.echo) is True
    return _prompt(body, canonical, media_bytes, answer, recomputed=echo)


def _read_batch(body: _Batch, guard: Guard) -> Prompt:
    if not body.messages or not all(body.messages):
        raise invalid("messages", "`messages` must hold at least one chat, each with at least one message")
    if body.stream:
        raise invalid("stream", "a batch of chats is answered in one piece: leave `stream` out")
    chats = []
    for chat in body.messages:
        _check_media(chat, guard)
        chats.append(canonical_chat(chat, None))
    canonical, media_bytes = ITEM.join(text for text, _ in chats), sum(size for _, size in chats)
    return _prompt(body, canonical, media_bytes, None, divisible=False, prompts=len(body.messages))


def _check_media(messages: list[Message], guard: Guard) -> None:
    for message in messages:
        if not isinstance(message.content, str):
            guard.media(message.content, "messages")


def _answer_text(body: _Chat) -> AnswerText | None:
    """How the answer continues the last message, for a chat that does so; else None."""
    last = body.messages[-1]  # its further fields, if it has any, come after its text
    plain = isinstance(last.content, str) and not (last.name or last.tool_call_id or last.tool_calls)
    return _ANSWER_CONTINUED if plain else None


def canonical_chat(
    messages: list[Message], tools: list[Any] | None, texts: Sequence[memoryview] = ()
) -> tuple[bytes, int]:
    """The canonical text of a chat, and how much media it has, in bytes. `messages` is not empty; `texts` are those
    that it has the marks of (shape.Outline)."""
    parts: list[bytes | memoryview] = []
    media = media_bytes = 0
    if tools:
        parts += (TOOLS, in_order(tools), ITEM)
    for message in messages:
        text = message.content
        if not isinstance(text, str) or message.name or message.tool_call_id or message.tool_calls:
            count, size = _add_canonical(message, parts, texts)
            media, media_bytes = media + count, media_bytes + size
        elif texts and text[:1] == MARK:
            parts += (message.role.encode(), FIELD, texts[int(text[1:])], ITEM)
        else:  # as most are
            parts += (message.role.encode(), FIELD, text.encode(), ITEM)
    if media > MEDIA_MAX:
        detail = f"the body has too many parts that are no text: at most {MEDIA_MAX}; send it in several requests"
        raise BodyError(outcome.INVALID_FIELD, detail)
    # The last message is open: its next turn, or its continuation, goes on from here.
    parts.pop()
    return b"".join(parts), media_bytes


def _add_canonical(message: Message, parts: list[bytes | memoryview], texts: Sequence[memoryview]) -> tuple[int, int]:
    """Add a message to the canonical text; returns how many media it has, and of how many bytes."""
    media = media_bytes = 0
    parts += (message.role.encode(), FIELD)
    if isinstance(message.content, str):
        marked = texts and message.content[:1] == MARK
        parts.append(texts[int(message.content[1:])] if marked else message.content.encode())
    elif message.content:
        for i, part in enumerate(message.content):
            text, size = _content_part(part)
            parts += (PART, text) if i else (text,)
            if size:
                media, media_bytes = media + 1, media_bytes + size
    # One field more, two or three: which are there can be told from their number.
    if message.name or message.tool_call_id:
        parts += (FIELD, (message.name or "").encode(), FIELD, (message.tool_call_id or "").encode())
    if message.tool_calls:
        parts += (FIELD, in_order(message.tool_calls))
    parts.append(ITEM)
    return media, media_bytes


def _content_part(part: dict[str, Any]) -> tuple[bytes, int]:
    text = part.get("text")
    if isinstance(text, str) and part.get("type") in ("text", "input_text"):
        return text.encode(), 0
    return medium(part)


def _read_completion(body: _Completion, _guard: Guard) -> Prompt:
    prompt = texts(body.prompt, "prompt")
    echo = body.echo is not None and truth(body.echo) is True
    more = body.max_completion_tokens is not None or body.n_predict is not None
    if body.max_tokens == NO_OUTPUT and echo and not more:  # what the prompt itself scores
        opaque_bytes = -prompt.surplus_bytes
        scored = _prompt(body, prompt.canonical, opaque_bytes, None, divisible=False)
        return replace(scored, max_tokens=NO_OUTPUT)
    answer = _ANSWER_IN_COMPLETION if prompt.is_text else None  # not of token ids
    divisible = prompt.items == 1 and not echo
    surplus = -prompt.surplus_bytes
    return _prompt(
        body,
        prompt.canonical,
        surplus,
        answer,
        divisible=divisible,
        recomputed=echo and body.logprobs is not None,
        prompts=prompt.items,
    )


def _prompt(
    body: _Body,
    canonical: bytes,
    opaque_bytes: int,
    answer: AnswerText | None,
    *,
    divisible: bool = True,
    recomputed: bool = False,
    prompts: int = 1,
) -> Prompt:
    options = body.stream_options
    divisible = divisible and body.n in (None, 1) and body.n_cmpl is None and body.prompt_logprobs is None
    limit, param = body.max_tokens, "max_tokens"
    if limit is None:
        limit, param = body.max_completion_tokens, "max_completion_tokens"
    if limit in _UNLIMITED:
        limit = None
    return generated(
        body,
        (canonical, opaque_bytes),
        (limit, param),
        answer if divisible else None,
        hide_usage=bool(body.stream) and not (options and options.include_usage),
        has_options=options is not msgspec.UNSET,
        divisible=divisible,
        recomputed=recomputed or body.prompt_logprobs is not None,
        prompts=prompts,
    )


def _read_embeddings(body: _Embeddings, guard: Guard) -> Prompt:
    if body.messages is not None and bytes(body.input) != b"null":
        raise invalid("messages", "give one of `input` and `messages`: of both, engines read the one or the other")
    if body.messages:
        _check_media(body.messages, guard)
        canonical, opaque_bytes = canonical_chat(body.messages, None)
    elif bytes(body.input) == b"null":
        raise invalid("input", "`input` is missing: give a text, token ids, or a list of either")
    else:
        given = texts(body.input, "input")
        canonical, opaque_bytes = given.canonical, -given.surplus_bytes
    return without_output(body, canonical, opaque_bytes)


chat = json_reader(_Chat, _read_chat)
_chat = json_decoder(_Chat)


def chat_of(outline: Outline, guard: Guard) -> Prompt | None:
    """As `chat`, if all long texts are messages': they are not decoded, and copied only into the canonical text. None
    if that is uncertain, or the body has errors: then all of it has to be read. Raises BodyError."""
    try:
        body = _chat(outline.marked)
    except UNREADABLE:
        return None
    marked = 0
    for message in body.messages:
        text = message.content
        marked += isinstance(text, str) and text[:1] == MARK
    texts = outline.texts() if marked == len(outline.spans.begins) else None
    return None if texts is None else _read_chat(body, guard, texts)


chat_batch = json_reader(_Batch, _read_batch)
completion = json_reader(_Completion, _read_completion)
embeddings = json_reader(_Embeddings, _read_embeddings)


def salt_of(kind: Kind, prompt: Prompt, scope: str | None) -> str:
    """The `cache_salt` for engines, "" for none: tenants that may not share prefixes must not learn of them by timing
    either, and a client's own salt is one only within its tenant. `scope` is the tenant's, None if no engine is
    asked."""
    if scope is None or kind not in _SALTED or not (scope or prompt.cache_salt):
        return ""
    return _salt(scope, prompt.cache_salt) if prompt.cache_salt else _tenants_salt(scope, "")


def _salt(scope: str, own: str) -> str:
    return sha256(f"{len(scope)}:{scope}{own}".encode()).hexdigest()[:_SALT_DIGITS]


_tenants_salt = lru_cache(maxsize=1024)(_salt)  # of prompts without one of their own: as many as tenants


class BodyEdit(msgspec.Struct, frozen=True, array_like=True):
    """How a body is sent on: `insert` goes in at `at`; at -1 it is `whole`, or as it came where that is empty."""

    at: int = -1
    insert: bytes = b""
    whole: bytes = b""

    def of(self, body: bytes) -> bytes:
        """The body as it is sent on: at most one copy."""
        if self.at < 0:
            return self.whole or body
        view = memoryview(body)
        return b"".join((view[: self.at], self.insert, view[self.at :]))


_NONE = BodyEdit()


def change(body: bytes, prompt: Prompt, salt: str) -> BodyEdit:
    """The usage of a stream asked for, and this `cache_salt`, whatever its own, if there is one; the model, where the
    body names none; that nothing be stored, where it does not say. `prompt` is what was read of the body."""
    asks, lacks, lacks_store = prompt.hide_usage, prompt.lacks_model, prompt.lacks_store
    if not (asks or salt or lacks or lacks_store):
        return _NONE
    there = (asks and prompt.has_options) or (salt and prompt.has_salt)
    if there or (lacks and _may_name(body, b'"model"')) or (lacks_store and _may_name(body, b'"store"')):
        # The rare case: the member is there, if only as null. Every other value is kept as it was written.
        document = _raw.decode(body)
        if asks:
            options = _maybe_raw.decode(document.get("stream_options", b"null")) or {}
            options["include_usage"] = msgspec.Raw(b"true")
            options.pop("continuous_usage_stats", None)  # without the other it asks for nothing
            document["stream_options"] = msgspec.Raw(msgspec.json.encode(options))
        if salt:
            document["cache_salt"] = msgspec.Raw(msgspec.json.encode(salt))
        if lacks:
            document["model"] = msgspec.Raw(msgspec.json.encode(prompt.model))
        if lacks_store:
            document["store"] = msgspec.Raw(b"false")
        return BodyEdit(whole=msgspec.json.encode(document))
    added = b'"stream_options":{"include_usage":true},' if asks else b""
    if salt:
        added += b'"cache_salt":"%b",' % salt.encode()
    if lacks:
        added += b'"model":%b,' % msgspec.json.encode(prompt.model)
    if lacks_store:
        added += b'"store":false,'
    return BodyEdit(body.index(b"{") + 1, added)


def without_salt(body: bytes) -> bytes:
    """The body without its `cache_salt`, for an engine that refuses one; every other value stays as it was written. The
    same object if it has none."""
    if b'"cache_salt"' not in body:
        return body
    try:
        document = _raw.decode(body)
    except msgspec.DecodeError:
        return body  # a form, which has none
    return msgspec.json.encode(document) if document.pop("cache_salt", None) is not None else body


def _may_name(body: bytes, quoted: bytes) -> bool:
    """Whether it may have a member of this name, if only as null; a letter of the name may be escaped."""
    return quoted in body or b"\\u00" in body


def renamed(body: bytes, model: str) -> bytes:
    """The body asking for this model; every other value is kept as it was written."""
    document = _raw.decode(body)
    document["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(document)


class _AnswerMessage(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    """A choice in an answer to a chat or completion."""

    message: _AnswerMessage | None = None
    text: str | None = None


class _Block(msgspec.Struct):
    """A content block in an answer of Anthropic's API, or of a message in an answer of OpenAI's Responses API."""

    type: str = ""
    text: str | None = None


class _Item(msgspec.Struct):
    """An output item in an answer of OpenAI's Responses API."""

    type: str = ""
    content: list[_Block] | None = None


class _Document(msgspec.Struct):
    choices: list[_Choice] = []
    content: list[_Block] = []
    output: list[_Item] = []


_document = msgspec.json.Decoder(_Document)


def answer_text(document: bytes) -> bytes:
    """The text of the answer in a document that is not a stream; b"" where there is none, or more than one."""
    try:
        answer = _document.decode(document)
    except UNREADABLE:
        return b""
    choices = answer.choices
    if len(choices) != 1:
        blocks = answer.content or [block for item in answer.output for block in item.content or ()]
        return "".join(b.text for b in blocks if b.text and b.type in ("text", "output_text")).encode()
    text = choices[0].message.content if choices[0].message is not None else choices[0].text
    return text.encode() if text else b""


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _OutputDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    """Chats and embeddings name their tokens prompt and completion, transcriptions and Responses input and output; a
    ranking may report only their total, and generates nothing. Anthropic counts input tokens that were cached, or are
    now, separately."""

    prompt_tokens: int | None = None
    input_tokens: int | None = None
    total_tokens: int | None = None
    completion_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    input_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _OutputDetails | None = None
    output_tokens_details: _OutputDetails | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Within(msgspec.Struct):
    """The part of an answer that an event of a stream extends."""

    usage: _Usage | None = None


class _Answer(msgspec.Struct):
    """`response` is of the last event of Responses, `message` of the first of Anthropic's."""

    usage: _Usage | None = None
    response: _Within | None = None
    message: _Within | None = None


_answer = msgspec.json.Decoder(_Answer)


def usage_of(document: bytes | memoryview, before: Usage | None = None) -> Usage | None:
    """The usage in an answer or a stream's chunk; None if there is none, or it makes no sense. `before` is what an
    earlier chunk reported, since Anthropic's last one may have only the output."""
    try:
        answer = _answer.decode(document)
    except UNREADABLE:
        return None
    within = answer.response or answer.message
    usage = answer.usage or (within.usage if within is not None else None)
    if usage is None:
        return None
    output = usage.completion_tokens or usage.output_tokens or 0
    prompt = usage.prompt_tokens if usage.prompt_tokens is not None else usage.input_tokens
    read, created = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
    if prompt is not None and usage.prompt_tokens is None and (read or created):
        prompt += (read or 0) + (created or 0)
    if prompt is None and before is not None and usage.total_tokens is None:
        prompt, read = before.prompt_tokens, before.cached_tokens
    if prompt is None and usage.total_tokens is not None:
        prompt = usage.total_tokens - output
    if prompt is None or not (0 <= prompt <= _USAGE_TOKENS_MAX and 0 <= output <= _USAGE_TOKENS_MAX):
        return None
    details = usage.prompt_tokens_details or usage.input_tokens_details
    cached = details.cached_tokens if details is not None else read
    if cached is not None and not 0 <= cached <= prompt:
        cached = None
    answer_details = usage.completion_tokens_details or usage.output_tokens_details
    thought = answer_details.reasoning_tokens if answer_details is not None else None
    return Usage(prompt, output, cached, thought if thought is None or 0 <= thought <= output else None)
