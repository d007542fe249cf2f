"""Which requests may get an earlier answer again, when two requests are the same, and converting an answer between a
stream and one piece.

Two requests are the same if engines would see the same: JSON with its members in any order, without those that name the
client or only say how the answer is sent. Sampled answers may be repeated at temperature 0, or where the client says so
by a key of its own. Whatever is not understood counts as different, and is not converted. Never keeps anything.
"""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Any, NamedTuple, TypeAlias

import msgspec

from farhop.relay.formats.event_stream import each
from farhop.relay.formats.openai import UNREADABLE
from farhop.relay.formats.paths import Kind
from farhop.relay.formats.prompt import any_json, invalid
from farhop.relay.formats.shape import MEMBERS_MAX

KEY_HEADER = b"x-farhop-cache-key"
BODY_BYTES_MAX = 256 * 1024  # reading a body again and writing it in order takes 2 ms at most
CONVERTED_BYTES_MAX = 256 * 1024  # some 1,500 events, at 4.5 us each to put together: 7 ms
_KEY = re.compile(rb"[!-~]{1,256}")
_AGE = re.compile(rb"max-age=([0-9]{1,10})")
_SAMPLED = frozenset((Kind.CHAT, Kind.COMPLETION, Kind.MESSAGES))
_COMPUTED = frozenset((Kind.EMBEDDINGS, Kind.RERANK, Kind.SCORE))  # the same every time
_CONVERTIBLE = frozenset((Kind.CHAT, Kind.COMPLETION))
# Members that name the client or what it files the request under: no engine's answer depends on them.
_LEFT_OUT = ("user", "safety_identifier", "metadata")
_OF_DIALECT = (b"anthropic-beta:", b"anthropic-version:")  # header lines by which engines answer otherwise

Document: TypeAlias = dict[str, Any]


class CacheLookup(NamedTuple):
    """How to look up a request that may be answered from the cache. `key`: 32 bytes, equal for equal requests. `renew`:
    do not use a stored answer (`no-cache`). `age_s_max`: nor one older than this; None: any age."""

    key: bytes
    renew: bool = False
    age_s_max: float | None = None


def asked(
    kind: Kind, target: bytes, lines: bytes, body: bytes, version: str, named: bytes | None, *, stream: bool
) -> CacheLookup | str:
    """The lookup for a request, or the reason, in a word, why it may not be answered from the cache. `target` is the
    request's target with its query, `lines` its header lines and `body` its body as sent upstream, `version` the
    requested version of the model, `named` the client's own key (KEY_HEADER). Raises BodyError if that is malformed.
    """
    if named is not None and not _KEY.fullmatch(named):
        name = KEY_HEADER.decode()
        raise invalid(name, f"header `{name}` must be 1 to 256 visible ASCII characters; give another, or leave it out")
    controls = _controls(lines)
    if b"no-store" in controls:
        return "no_store"
    if kind not in _SAMPLED and kind not in _COMPUTED:
        return "path"
    if len(body) > BODY_BYTES_MAX:
        return "size"
    try:
        document = any_json(body)
    except UNREADABLE:
        return "body"
    if not isinstance(document, dict):
        return "body"
    biases = document.get("logit_bias")
    if isinstance(biases, dict) and len(biases) > MEMBERS_MAX:  # dear to put in order
        return "body"
    if named is None and kind in _SAMPLED and not _certain(document):
        return "sampled"
    _canonical(document, drops_stream=kind in _CONVERTIBLE)
    parts = (
        kind.encode(), target, version.encode(), named or b"",
        b"\n".join(sorted(line for line in lines.split(b"\r\n") if line.startswith(_OF_DIALECT))),
        b"" if kind in _CONVERTIBLE else b"%d" % stream,
        msgspec.json.encode(document, order="sorted"),
    )  # fmt: skip
    digest = sha256(b"".join(b"%d:%b" % (len(part), part) for part in parts)).digest()
    ages = [float(found[1]) for control in controls if (found := _AGE.fullmatch(control))]
    return CacheLookup(digest, b"no-cache" in controls, min(ages, default=None))


def _controls(lines: bytes) -> frozenset[bytes]:
    """The directives of `Cache-Control`."""
    if b"cache-control:" not in lines:
        return frozenset()
    values = [line.partition(b":")[2] for line in lines.split(b"\r\n") if line.startswith(b"cache-control:")]
    return frozenset(directive.strip().lower() for value in values for directive in value.split(b","))


def _certain(document: Document) -> bool:
    """Whether an engine takes the likeliest token each time, of one answer."""
    temperature = document.get("temperature")
    greedy = isinstance(temperature, int | float) and not isinstance(temperature, bool) and temperature == 0
    return greedy and all(document.get(name) in (None, 1) for name in ("n", "best_of", "n_cmpl"))


def _canonical(document: Document, *, drops_stream: bool) -> None:
    for name in _LEFT_OUT:
        document.pop(name, None)
    if not drops_stream:
        return
    document.pop("stream", None)
    options = document.get("stream_options")
    if isinstance(options, dict):
        options.pop("include_usage", None)  # it is available to every request
    if not options:
        document.pop("stream_options", None)


# -- a stream's events


def has_usage(event: bytes) -> bool:
    """Whether this event of a chat or completion holds the usage and nothing else."""
    if b'"usage"' not in event:
        return False
    chunk = _chunk(event)
    return chunk is not None and chunk.get("choices") == [] and isinstance(chunk.get("usage"), dict)


def _chunk(event: bytes) -> Document | None:
    start = event.find(b"{")
    return _document(event[start:].rstrip()) if start >= 0 and event.startswith(b"data:") else None


_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ERRORS_MAX = 64  # to look at one takes 2 us
_GIVEN_UP = re.compile(rb'"finish_reason"\s*:\s*"(?:abort|error)"')


def complete(kind: Kind, body: bytes, *, stream: bool) -> bool:
    """Whether a fully received answer is good: it has its regular end, and holds no error."""
    body = body.strip()
    if stream:
        ends = b'"message_stop"' in body[-64:] if kind is Kind.MESSAGES else body.endswith(b"[DONE]")
    else:
        ends = _is_object(body)
    return ends and not _has_error(body, stream=stream) and _GIVEN_UP.search(body) is None


def _is_object(body: bytes) -> bool:
    """Whether it is JSON to its end: an engine that ends its answers by closing may have closed too soon."""
    try:
        _members.decode(body)  # 3 ms a megabyte of numbers
    except UNREADABLE:
        return False
    return True


def _has_error(body: bytes, *, stream: bool) -> bool:
    """Whether an answer holds an error. In a text it would be escaped, but another member may have this name, too."""
    if body.count(b'"error"') > _ERRORS_MAX:
        return True  # no good answer has that many members of this name
    at = body.find(b'"error"')
    while at >= 0:
        begin, end = (body.rfind(b"\n\n", 0, at), body.find(b"\n\n", at)) if stream else (0, -1)
        candidate = body[max(0, begin) : end if end >= 0 else len(body)].lstrip()
        document = _chunk(candidate) if stream else _document(candidate)
        if document is None or document.get("error") is not None:
            return True
        at = body.find(b'"error"', end) if end >= 0 else -1
    return False


def _document(text: bytes) -> Document | None:
    if len(text) > CONVERTED_BYTES_MAX:
        return None
    try:
        document = any_json(text)
    except UNREADABLE:
        return None
    return document if isinstance(document, dict) else None


# -- conversion


class _NotUnderstoodError(Exception):
    """A part of an answer that cannot be converted with certainty."""


def whole(kind: Kind, stream: bytes) -> bytes | None:
    """The JSON document equivalent to a complete stream of a chat or completion, usage included; None if it cannot be
    derived with certainty.
    """
    if kind not in _CONVERTIBLE or len(stream) > CONVERTED_BYTES_MAX:
        return None
    document: Document = {}
    choices: dict[int, Document] = {}
    named: Document = {}
    ended = False
    for event in each(stream):
        ended = ended or event.startswith((b"data: [DONE]", b"data:[DONE]"))
        if not event.startswith(b"data:") or b"{" not in event:
            continue
        chunk = _chunk(event)
        if chunk is None or "error" in chunk:
            return None
        try:
            for choice in chunk.pop("choices", ()):
                index = choice.get("index", 0)
                _add(choices.setdefault(index, {"index": index}), choice)
        except (_NotUnderstoodError, KeyError, TypeError, AttributeError):
            return None
        if chunk != named:  # nearly all say the same of the answer
            named = chunk
            document.update({name: value for name, value in chunk.items() if value is not None or name not in document})
    if not (ended and choices):
        return None
    if kind is Kind.CHAT:
        document["object"] = "chat.completion"
    try:
        document["choices"] = [_closed(choices[index], kind) for index in sorted(choices)]
    except (TypeError, AttributeError):
        return None
    return msgspec.json.encode(document)


def _add(choice: Document, more: Document) -> None:
    for name, value in more.items():
        if name == "delta":
            message = choice.setdefault("message", {})
            for part, piece in value.items():
                _join(message, part, piece)
        elif name == "text":
            choice["text"] = choice.get("text", "") + value
        elif name == "logprobs" and value is not None:
            known = choice.get("logprobs") or {}
            for part, piece in value.items():
                if not isinstance(piece, list | None):
                    raise _NotUnderstoodError
                known[part] = known[part] + piece if known.get(part) and piece else (piece or known.get(part))
            choice["logprobs"] = known
        elif name != "index" and (value is not None or name not in choice):
            if isinstance(value, list | dict):
                raise _NotUnderstoodError
            choice[name] = value  # such as finish_reason: sent once


def _join(message: Document, part: str, piece: Any) -> None:
    known = message.get(part)
    if part == "role" or known is None or piece is None:
        if part == "tool_calls" and piece is not None:
            message[part] = {}
            _call(message[part], piece)
        elif isinstance(piece, list | dict):
            raise _NotUnderstoodError
        elif piece is not None or part not in message:
            message[part] = piece
    elif part == "tool_calls":
        _call(known, piece)
    elif isinstance(known, str) and isinstance(piece, str):
        message[part] = known + piece
    else:
        raise _NotUnderstoodError


def _call(calls: dict[int, Document], pieces: list[Document]) -> None:
    """Tools that are called come in pieces, by their number."""
    for piece in pieces:
        call = calls.setdefault(piece["index"], {})
        for name, value in piece.items():
            if name == "function":
                function = call.setdefault("function", {"name": "", "arguments": ""})
                for part, text in value.items():
                    function[part] = function.get(part, "") + (text or "")
            elif name != "index" and value is not None:
                call[name] = value


def _closed(choice: Document, kind: Kind) -> Document:
    if kind is Kind.CHAT:
        message = choice.setdefault("message", {})
        message.setdefault("role", "assistant")
        message.setdefault("content", None)
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [calls[number] for number in sorted(calls)]
            message["content"] = message["content"] or None
    choice.setdefault("finish_reason", None)
    return choice


def stream(kind: Kind, document: bytes) -> tuple[bytes, bytes, bytes] | None:
    """A complete answer of a chat or completion as a stream: what comes before its usage, the event with that (b"" if
    it has none), and the end. None if the conversion is not certain."""
    if kind not in _CONVERTIBLE or len(document) > CONVERTED_BYTES_MAX:
        return None
    try:
        answer = any_json(document)
        usage, choices = answer.pop("usage", None), answer.pop("choices")
        if kind is Kind.CHAT:
            answer["object"] = "chat.completion.chunk"
        listed = [event for choice in choices for event in (_in_chat(choice) if kind is Kind.CHAT else [choice])]
        before = b"".join(_event(answer | {"choices": [choice]}) for choice in listed)
    except (*UNREADABLE, KeyError, TypeError, AttributeError):
        return None
    usage_event = _event(answer | {"choices": [], "usage": usage}) if usage is not None else b""
    return before, usage_event, b"data: [DONE]\n\n"


def _in_chat(choice: Document) -> list[Document]:
    index, message = choice.get("index", 0), dict(choice["message"])
    rest = {name: value for name, value in choice.items() if name not in ("index", "message", "logprobs")}
    first = {"role": message.pop("role", "assistant"), "content": None if message.get("content") is None else ""}
    if calls := message.pop("tool_calls", None):
        message["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
    delta = {name: value for name, value in message.items() if value is not None}
    opened = {"index": index, "delta": first, "logprobs": None, "finish_reason": None}
    content = {"index": index, "delta": delta, "logprobs": choice.get("logprobs"), "finish_reason": None}
    return [opened, content, {"index": index, "delta": {}, "logprobs": None, **rest}]


def _event(chunk: Document) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
