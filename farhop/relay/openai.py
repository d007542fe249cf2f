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

# Bytes that UTF-8 never uses (RFC 3629 §1), so that no text can imitate them and no two prompts collide.
_ITEM, _FIELD, _PART, _MEDIA, _TOOLS, _TOKENS = b"\xff", b"\xfe", b"\xfd", b"\xfc", b"\xfb", b"\xfa"
_TOKEN_MAX = (1 << 31) - 1  # so that a token's first byte is none of them
_USAGE_TOKENS_MAX = 1 << 31  # an engine that says more is not believed


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
_raw = msgspec.json.Decoder(dict[str, msgspec.Raw])
_maybe_raw = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)
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
    if "missing required field `" in problem:
        missing = problem.split("`")[1]
        param = f"{param}.{missing}" if param else missing
    return BodyError(outcome.INVALID_FIELD, f"{problem}{f' (at {param})' if param and path else ''}", param)


def _read_chat(body: _Chat) -> Prompt:
    if not body.messages:
        raise BodyError(outcome.INVALID_FIELD, "`messages` must hold at least one message", "messages")
    parts: list[bytes] = []
    media_bytes = 0
    if body.tools:
        parts += (_TOOLS, _sorted_json.encode(body.tools), _ITEM)
    for message in body.messages:
        media_bytes += _spell(message, parts)
    # The last message is open: its next turn, or its continuation, goes on from here.
    parts.pop()
    limit, param = body.max_tokens, "max_tokens"
    if body.max_completion_tokens is not None:
        limit, param = body.max_completion_tokens, "max_completion_tokens"
    return _prompt(body, b"".join(parts), limit, param, media_bytes)


def _spell(message: _Message, parts: list[bytes]) -> int:
    """Add a message to the canonical text; returns how much media it has, in bytes."""
    media_bytes = 0
    parts += (message.role.encode(), _FIELD)
    if isinstance(message.content, str):
        parts.append(message.content.encode())
    elif message.content:
        for i, part in enumerate(message.content):
            text, size = _content_part(part)
            parts += (_PART, text) if i else (text,)
            media_bytes += size
    # One field more, two or three: which are there can be told from their number.
    if message.name or message.tool_call_id:
        parts += (_FIELD, (message.name or "").encode(), _FIELD, (message.tool_call_id or "").encode())
    if message.tool_calls:
        parts += (_FIELD, _sorted_json.encode(message.tool_calls))
    parts.append(_ITEM)
    return media_bytes


def _content_part(part: dict[str, Any]) -> tuple[bytes, int]:
    text = part.get("text")
    if isinstance(text, str) and part.get("type") in ("text", "input_text"):
        return text.encode(), 0
    blob = _sorted_json.encode(part)
    return _MEDIA + xxhash.xxh3_128_hexdigest(blob).encode(), len(blob)


def _read_completion(body: _Completion) -> Prompt:
    prompt = body.prompt
    if not prompt:
        raise BodyError(outcome.INVALID_FIELD, "`prompt` must not be empty", "prompt")
    canonical = prompt.encode() if isinstance(prompt, str) else _ITEM.join(_prompt_item(p) for p in _items(prompt))
    return _prompt(body, canonical, body.max_tokens, "max_tokens", 0)


def _items(prompt: list[Any]) -> list[Any]:
    """A list of token ids is one prompt; anything else is a list of prompts."""
    return [prompt] if isinstance(prompt[0], int) else prompt


def _prompt_item(item: object) -> bytes:
    if isinstance(item, str):
        return item.encode()
    if isinstance(item, list) and all(type(t) is int and 0 <= t <= _TOKEN_MAX for t in item):
        # Four bytes each, so that equal ids give equal prefixes.
        return _TOKENS + b"".join(t.to_bytes(4, "big") for t in item)
    detail = f"`prompt` must be a string, a list of strings, or lists of token ids within 0..{_TOKEN_MAX}"
    raise BodyError(outcome.INVALID_FIELD, detail, "prompt")


def _prompt(body: _Body, canonical: bytes, limit: int | None, param: str, media_bytes: int) -> Prompt:
    if limit is not None and limit < 1:
        raise BodyError(outcome.INVALID_FIELD, f"`{param}` must be at least 1", param)
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
    # The rare case: options are there, without usage. Every other value is kept as it was written.
    document = _raw.decode(body)
    options = _maybe_raw.decode(document.get("stream_options", b"null")) or {}
    options["include_usage"] = msgspec.Raw(b"true")
    document["stream_options"] = msgspec.Raw(msgspec.json.encode(options))
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
    if usage is None:
        return None
    if not (0 <= usage.prompt_tokens <= _USAGE_TOKENS_MAX and 0 <= (usage.completion_tokens or 0) <= _USAGE_TOKENS_MAX):
        return None
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None
    if cached is not None and not 0 <= cached <= usage.prompt_tokens:
        cached = None
    return Usage(usage.prompt_tokens, usage.completion_tokens or 0, cached)
