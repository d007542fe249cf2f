"""Reads OpenAI answers as a client: streams of events, whole answers, errors. Pure: bytes in, text out.

Never trusts its input: a malformed one becomes a Failure that says so, and memory is bounded by one event.
"""

from __future__ import annotations

import msgspec

EVENT_BYTES_MAX = 4 * 1024 * 1024
_MESSAGE_CHARS_MAX = 2000


class Usage(msgspec.Struct, frozen=True):
    """Tokens as the engine counted them; `cached_tokens` is None if it does not report them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


class Failure(msgspec.Struct, frozen=True):
    """Why there is no answer, or an incomplete one. `code` is the balancer's reason, or this client's own."""

    message: str
    code: str = ""
    type: str = ""
    param: str | None = None


class Piece(msgspec.Struct, frozen=True):
    """An answer or a part of it."""

    text: str
    usage: Usage | None = None


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Message | None = None
    message: _Message | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _UsageRead(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None


class _ErrorRead(msgspec.Struct):
    message: str = ""
    type: str | None = None
    param: str | None = None
    code: str | int | None = None


class _Document(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _UsageRead | None = None
    error: _ErrorRead | None = None


_document = msgspec.json.Decoder(_Document)


class EventReader:
    """Server-sent events, fed as they come. `usage` and `error` hold what has come so far."""

    def __init__(self) -> None:
        self.tail = b""
        self._done = False
        self.usage: Usage | None = None
        self.error: Failure | None = None

    def feed(self, data: bytes) -> list[str]:
        """The texts of the events that these bytes complete. Empty texts (the role's chunk, the last) are left out."""
        *lines, self.tail = (self.tail + data).split(b"\n")
        if len(self.tail) > EVENT_BYTES_MAX:
            self.tail = b""
            self.error = self.error or Failure(f"an event is longer than {EVENT_BYTES_MAX} bytes", "bad_stream")
        return [text for line in lines if (text := self._line(line.rstrip(b"\r")))]

    def end(self) -> Failure | None:
        """The error at the end of the connection: a stream without an end marker was cut."""
        if self.error is None and not self._done:
            return Failure("the stream ended without saying so: it was cut", "stream_cut")
        return self.error

    def _line(self, line: bytes) -> str:
        field, _, value = line.partition(b":")
        value = value.strip()
        if field != b"data" or self._done:
            return ""
        if value == b"[DONE]":
            self._done = True
            return ""
        read = read_answer(value)
        if isinstance(read, Failure):
            self.error = self.error or read
            return ""
        self.usage = read.usage or self.usage
        return read.text


def read_answer(document: bytes) -> Piece | Failure:
    """The text and usage of one answer, or of one event of it."""
    try:
        read = _document.decode(document)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Failure(f"the answer cannot be read: {error}", "bad_answer")
    if read.error is not None:
        return _failure(read.error)
    messages = (choice.delta or choice.message or _Message(choice.text) for choice in read.choices)
    text = "".join((one.reasoning_content or "") + (one.content or "") for one in messages)
    return Piece(text, _usage(read.usage) if read.usage is not None else None)


def read_failure(status: int, body: bytes) -> Failure:
    """The failure in an answer with a status other than 200."""
    try:
        read = _document.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        read = None
    if read is not None and read.error is not None:
        return _failure(read.error)
    return Failure(f"status {status}: {body[:200].decode(errors='replace').strip() or 'no text'}", f"http_{status}")


def _usage(read: _UsageRead) -> Usage:
    details = read.prompt_tokens_details
    return Usage(read.prompt_tokens, read.completion_tokens or 0, details.cached_tokens if details else None)


def _failure(read: _ErrorRead) -> Failure:
    code = "" if read.code is None else str(read.code)
    return Failure(read.message[:_MESSAGE_CHARS_MAX], code, read.type or "", read.param)
