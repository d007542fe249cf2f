"""Reading an OpenAI-shaped body: only what routing needs, and the canonical text of the prompt.

The canonical text is in the order in which an engine sees it (tools, then each message's role and decoded content, or
the prompt), so key order, escapes and spacing do not matter, and a conversation's next turn extends it byte for byte.
Never changes a body but for one thing: `ask_for_usage`, which accounting needs.
"""

from __future__ import annotations

from typing import Any

import msgspec
import xxhash

from farhop.balance import outcome
from farhop.balance.machine import Usage
from farhop.balance.outcome import Outcome
from farhop.relay.paths import Kind

_FIELD, _ITEM = b"\x1f", b"\x1e"  # separators that JSON text cannot hold unescaped, so that no two prompts collide


class BodyError(Exception):
    """A body that cannot be routed. `param` names the field; the text names the remedy."""

    def __init__(self, reason: Outcome, detail: str, param: str | None = None) -> None:
        super().__init__(detail)
        self.outcome, self.detail, self.param = reason, detail, param


class Prompt(msgspec.Struct, frozen=True):
    """What routing needs of a body. `media_bytes` counts images and audio, which are hashed, not spelled out."""

    model: str
    canonical: bytes
    stream: bool
    wants_usage: bool
    max_tokens: int | None
    cache_salt: str
    media_bytes: int = 0


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None


class _Body(msgspec.Struct):
    model: str
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    cache_salt: str | None = None


class _Chat(_Body, kw_only=True):
    messages: list[_Message]
    tools: list[Any] | None = None
    max_completion_tokens: int | None = None


class _Completion(_Body, kw_only=True):
    prompt: str | list[Any]


_chat = msgspec.json.Decoder(_Chat)
_completion = msgspec.json.Decoder(_Completion)
_any = msgspec.json.Decoder()
_sorted_json = msgspec.json.Encoder(order="deterministic")


def read(kind: Kind, body: bytes) -> Prompt:
    """Decode a request body. Raises BodyError naming the field."""
    try:
        if kind is Kind.CHAT:
            return _read_chat(_chat.decode(body))
        return _read_completion(_completion.decode(body))
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BodyError(outcome.INVALID_JSON, f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise BodyError(outcome.INVALID_JSON, "the body is nested too deeply") from None


def _invalid_field(text: str) -> BodyError:
    problem, _, path = text.partition(" - at `$")
    param = path.rstrip("`").lstrip(".") or None
    if param is None and "missing required field `" in problem:
        param = problem.split("`")[1]
    return BodyError(outcome.INVALID_FIELD, f"{problem}{f' (at {param})' if param and path else ''}", param)


def _read_chat(body: _Chat) -> Prompt:
    if not body.messages:
        raise BodyError(outcome.INVALID_FIELD, "`messages` must hold at least one message", "messages")
    parts: list[bytes] = []
    media_bytes = 0
    if body.tools:
        parts += (b"tools", _FIELD, _sorted_json.encode(body.tools), _ITEM)
    for message in body.messages:
        parts += (message.role.encode(), _FIELD)
        if isinstance(message.content, str):
            parts.append(message.content.encode())
        elif message.content:
            for part in message.content:
                text, size = _content_part(part)
                parts.append(text)
                media_bytes += size
        if message.name or message.tool_call_id:
            parts += (_FIELD, (message.name or "").encode(), _FIELD, (message.tool_call_id or "").encode())
        if message.tool_calls:
            parts += (_FIELD, _sorted_json.encode(message.tool_calls))
        parts.append(_ITEM)
    # The last message is open: its next turn, or its continuation, goes on from here.
    parts.pop()
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return _prompt(body, b"".join(parts), limit, media_bytes)


def _content_part(part: dict[str, Any]) -> tuple[bytes, int]:
    text = part.get("text")
    if isinstance(text, str):
        return text.encode(), 0
    blob = _sorted_json.encode(part)
    return _FIELD + xxhash.xxh3_128_digest(blob) + _FIELD, len(blob)


def _read_completion(body: _Completion) -> Prompt:
    prompt = body.prompt
    if not prompt:
        raise BodyError(outcome.INVALID_FIELD, "`prompt` must not be empty", "prompt")
    canonical = prompt.encode() if isinstance(prompt, str) else _ITEM.join(_prompt_item(p) for p in _items(prompt))
    return _prompt(body, canonical, body.max_tokens, 0)


def _items(prompt: list[Any]) -> list[Any]:
    """A list of token ids is one prompt; anything else is a list of prompts."""
    return [prompt] if isinstance(prompt[0], int) else prompt


def _prompt_item(item: object) -> bytes:
    if isinstance(item, str):
        return item.encode()
    if isinstance(item, list) and all(type(t) is int and 0 <= t < 1 << 32 for t in item):
        # Four bytes each, so that equal ids give equal prefixes.
        return b"".join(t.to_bytes(4, "big") for t in item)
    detail = "`prompt` must be a string, a list of strings, or lists of token ids within 0..2^32-1"
    raise BodyError(outcome.INVALID_FIELD, detail, "prompt")


def _prompt(body: _Body, canonical: bytes, limit: int | None, media_bytes: int) -> Prompt:
    if limit is not None and limit < 1:
        raise BodyError(outcome.INVALID_FIELD, "`max_tokens` must be at least 1", "max_tokens")
    options = body.stream_options
    return Prompt(
        model=body.model,
        canonical=canonical,
        stream=bool(body.stream),
        wants_usage=bool(options and options.include_usage),
        max_tokens=limit,
        cache_salt=body.cache_salt or "",
        media_bytes=media_bytes,
    )


def ask_for_usage(body: bytes) -> bytes:
    """The same request with `stream_options.include_usage` set. `body` is a valid JSON object that streams."""
    if b'"stream_options"' not in body:
        brace = body.index(b"{") + 1
        return b"".join((body[:brace], b'"stream_options":{"include_usage":true},', body[brace:]))
    # The rare case: options are there, without usage. Re-encode rather than guess where they end.
    document = _any.decode(body)
    options = document.get("stream_options") or {}
    document["stream_options"] = {**options, "include_usage": True}
    return msgspec.json.encode(document)


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_answer = msgspec.json.Decoder(_Answer)


def usage_of(document: bytes | memoryview) -> Usage | None:
    """The usage in an answer or a stream's chunk; None where there is none, or it makes no sense."""
    try:
        usage = _answer.decode(document).usage
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if usage is None or usage.prompt_tokens < 0 or (usage.completion_tokens or 0) < 0:
        return None
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None
    if cached is not None and not 0 <= cached <= usage.prompt_tokens:
        cached = None
    return Usage(usage.prompt_tokens, usage.completion_tokens or 0, cached)
