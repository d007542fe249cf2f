"""What an engine's answer says about the engine itself: out of GPU memory, its GPU or itself broken, a failure in a
stream, or that it has no such path or model, cannot hold such a long request (another engine may), or takes no
`cache_salt`; and whether its report of a failure is fit for clients.

Only answers that are failures are looked at: bodies of a 5xx (and 424, as TGI words a failed generation), error events
of a stream, and the refusals that RefusalTap is made for. Invariants: bounded bytes; of a failure, what a client or a
model wrote is never taken for an engine's word (an event counts only if `error` is a member of its outermost object);
no text is kept.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from farhop.balance import outcome
from farhop.balance.outcome import Outcome
from farhop.relay.formats.event_stream import each, is_crowded
from farhop.relay.formats.prompt import any_json

if TYPE_CHECKING:
    from collections.abc import Callable

BODY_BYTES_MAX = 16 * 1024
REFUSAL_BYTES_MAX = 4096

# As PyTorch, CUDA, ROCm's HIP, cuBLAS and TensorRT-LLM word it, and engines pass it on; in small letters.
_MEMORY = re.compile(rb"outofmemoryerror|error_out_of_memory|status_alloc_failed")
_NO_ROOM, _NEAR_BYTES = b"out of memory", 204  # in a line about a GPU, which is named as near before it
_GPU = re.compile(rb"\b(?:cuda|hip|xpu|gpu)\b")
_BROKEN = re.compile(
    rb"cuda(?: runtime| driver| kernel)? error|hip(?: runtime| driver| kernel)? error"
    rb"|device-side assert|illegal memory access|uncorrectable ecc"
    rb"|unspecified launch failure|cudnn_status_|cublas_status_|nccl (?:error|failure)"
    rb"|nccl(?:unhandled|system|internal)|fallen off the bus"
    rb"|enginedeaderror|enginecore encountered an issue|background loop (?:is not running|has errored)",
)
FAULT_STATUSES = frozenset((424, *range(500, 600)))
"""HTTP statuses of answers whose body is an engine's account of a failure."""


def in_text(text: bytes) -> Outcome | None:
    """The outcome that an error's text implies; None if the text names no broken engine."""
    text = text.lower()
    if _MEMORY.search(text) or _has_no_room(text):
        return outcome.ENGINE_OUT_OF_MEMORY
    return outcome.ENGINE_BROKEN if _BROKEN.search(text) else None


def _has_no_room(text: bytes) -> bool:
    at = text.find(_NO_ROOM)
    while at >= 0:
        start = max(0, at - _NEAR_BYTES)
        start = max(start, text.rfind(b'"', start, at), text.rfind(b"\n", start, at))
        if _GPU.search(text, start, at):
            return True
        at = text.find(_NO_ROOM, at + 1)
    return False


def in_event(event: bytes) -> Outcome | None:
    """What an event of a stream says, if it is an error: ENGINE_ERROR for a 5xx that names nothing broken."""
    start = event.find(b"{")
    if len(event) > BODY_BYTES_MAX:
        return None  # an error is small, and what is large is not taken apart
    try:
        body: Any = any_json(event[start:].rstrip()) if start >= 0 else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(body, dict) or not body.get("error"):
        return None
    error = body["error"]
    found = in_text(msgspec.json.encode(error)[:BODY_BYTES_MAX])
    code = error.get("code") if isinstance(error, dict) else None
    if found is None and isinstance(code, int) and code >= 500:
        return outcome.ENGINE_ERROR
    return found


# What engines' web frameworks answer for a path that they do not have. An engine that has the path says what was not
# found.
_NOWHERE = (
    {"detail": "Not Found"}, {"detail": "Method Not Allowed"}, {"error": "Not Found"}, {"error": {"code": 404}},
)  # fmt: skip


# As vLLM, SGLang, TGI, TensorRT-LLM and llama.cpp word it, and OpenAI's own API; in small letters.
_TOO_LONG = re.compile(
    rb"context_length_exceeded|exceed_context_size|maximum context length|maximum model length|model's context length"
    rb"|available context size|exceeds the maximum allowed length|exceeds maximum input length|max_seq_len"
    rb"|max_num_tokens|must have less than \d+ tokens|tokens \+ `?max_new_tokens`? must be"
)
# As vLLM, SGLang, LMDeploy, Triton, Ollama, llama.cpp and OpenAI's own API word it; in small letters.
_NO_MODEL = re.compile(rb"model_not_found|unknown model|\bmodel\b[^\n]{0,300}?\b(?:does not exist|not found)\b")
TOO_LONG_STATUSES = frozenset((400, 413, 422))
"""HTTP statuses by which engines refuse a request that is too long."""
SALT_STATUSES = frozenset((400, 422))
"""HTTP statuses by which strict servers refuse a member that they do not know."""
# How servers say that they do not know a member: Hugging Face's `transformers serve`, OpenAI's API and its like, axum,
# Go, pydantic as text. Matched at the start of the message: further on it may repeat a client's own words.
_SALT_UNKNOWN = re.compile(
    r"Unexpected fields in the request: \{[^{}]*'cache_salt'"
    r"|(?:Unrecognized request arguments? supplied: |Unknown parameter: |Extra inputs are not permitted, field: "
    r"|property |json: unknown field |Failed to deserialize the JSON body into the target type: unknown field )"
    r"['\"`]?cache_salt\b"
    r"|\[\{'type': 'extra_forbidden', 'loc': \('body', 'cache_salt'\)"
)


def is_unsupported(body: bytes) -> bool:
    """Whether a 404, 405 or 501 means that the engine has no such path. HTML is from a web server, not an engine."""
    try:
        known: Any = any_json(body) if body else {}
    except (msgspec.DecodeError, UnicodeDecodeError):
        plain = (b"Not Found", b"404 page not found", b"File Not Found", b"404: Not Found")
        return body.strip() in plain or is_page(body)
    if isinstance(known, dict) and isinstance(error := known.get("error"), dict):  # llama.cpp's, and vLLM's own
        nowhere = error.get("message") in ("Not Found", "File Not Found")
        return nowhere or error.get("type") == "not_supported_error"
    return known == {} or known in _NOWHERE


def is_page(body: bytes) -> bool:
    """Whether it begins like HTML."""
    return body.lstrip().startswith(b"<")


def lacks_model(body: bytes) -> bool:
    """Whether a 404 means that the engine does not serve the model."""
    return _NO_MODEL.search(body.lower()) is not None


def is_too_long(body: bytes) -> bool:
    """Whether a refusal is for the request's length. A client whose own words are repeated there may have it seem so:
    it is asked for elsewhere once, then, in vain."""
    return _TOO_LONG.search(body.lower()) is not None


def refuses_salt(body: bytes) -> bool:
    """Whether a refusal is for the member `cache_salt`, which the server does not know. Nothing that a client wrote may
    make it seem so, since it counts for other tenants' requests, too."""
    try:
        known: Any = any_json(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        known = body.decode(errors="replace")
    for name in ("error", "detail", "message"):
        if isinstance(known, dict) and name in known:
            known = known[name]
    if isinstance(known, list) and known and isinstance(known[0], dict):  # pydantic's
        return known[0].get("type") == "extra_forbidden" and known[0].get("loc") == ["body", "cache_salt"]
    return isinstance(known, str) and _SALT_UNKNOWN.match(known) is not None


# How stack traces of Python, PyTorch's C++, Rust, Go and Java begin, or a line of them; in JSON, quotes are escaped.
_TRACE = re.compile(
    rb"\(most recent call (?:last|first)\)|\bFile \\{0,2}\"[^\"\n]{1,300}\", line \d|\bframe #\d+: |\bstack backtrace:"
    rb"|\bgoroutine \d+ \[|\bat [\w.$]{1,200}\(\w{1,100}\.java:\d"
)
_FRAME = re.compile(rb'\bFile "([\w./<>+-]{1,300})", line (\d{1,7})(?:, in ([\w.<>]{1,100}))?')
_RAISED = re.compile(rb"^((?:[A-Za-z_]\w{0,60}\.){0,8}[A-Za-z_]\w{0,60}(?:Error|Exception))\b", re.MULTILINE)
_TRACE_FILE_CHARS_MAX = 80
_NO_TRACE = "the engine failed"  # in the place of a text with a stack trace


def is_fit(body: bytes) -> bool:
    """Whether the body of a failure is for clients: a JSON object that says what went wrong as OpenAI's API, vLLM,
    SGLang, TGI, Triton or FastAPI do, and no stack trace."""
    try:
        known: Any = any_json(body) if body else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    if not isinstance(known, dict) or _TRACE.search(body) is not None:
        return False
    return any(known.get(name) for name in ("error", "message", "detail"))


def trace_in(body: bytes) -> str:
    """The innermost frame and the type of the error that a Python stack trace in this body names, "" for none: nothing
    of an error's text, which may repeat a prompt."""
    text = body.replace(b"\\n", b"\n").replace(b'\\"', b'"')
    frames, raised = _FRAME.findall(text), _RAISED.findall(text)
    told = [raised[-1].decode()] if raised else []
    if frames:
        file, line, function = (part.decode() for part in frames[-1])
        told.append(f"{file[-_TRACE_FILE_CHARS_MAX:]}:{line} {function}".rstrip())
    return " at ".join(told)


def without_traces(events: bytes) -> bytes:
    """The events of a stream, with every error text that contains a stack trace replaced."""
    if _TRACE.search(events) is None or is_crowded(events):
        return events
    return b"".join(_without_trace(event) for event in each(events))


def _without_trace(event: bytes) -> bytes:
    start = event.find(b"{")
    if start < 0 or _TRACE.search(event) is None:
        return event
    document = event[start:].rstrip()
    try:
        known: Any = any_json(document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return event
    if not isinstance(known, dict) or not known.get("error"):
        return event
    for part in (known, known["error"]):
        for name, value in part.items() if isinstance(part, dict) else ():
            if isinstance(value, str | list) and _TRACE.search(msgspec.json.encode(value)) is not None:
                part[name] = _NO_TRACE
    return event[:start] + msgspec.json.encode(known) + event[start + len(document) :]


class RefusalTap:
    """For the body of an answer that may be no answer yet: held until it shows whether it `means` what it may, then
    `reason` says so; or, if the request may be `salted`, `salt_unknown` says that the engine refuses the salt, and
    `held` is the body. What is longer than such a body passes as it is."""

    __slots__ = ("_means", "_passes", "_salted", "_why", "held", "reason", "salt_unknown")

    usage = fault = None

    def __init__(self, means: Callable[[bytes], bool] | None, why: Outcome | None, *, salted: bool = False) -> None:
        self._means, self._why, self._salted = means, why, salted
        self.held, self._passes = b"", False
        self.reason: Outcome | None = None
        self.salt_unknown = False

    @property
    def held_bytes(self) -> int:
        """Bytes of the answer that are held in memory now."""
        return len(self.held)

    def feed(self, data: bytes) -> bytes:
        """Hold the data back; return all of it once it is longer than any refusal."""
        if self._passes:
            return data
        self.held += data
        if len(self.held) <= REFUSAL_BYTES_MAX:
            return b""
        self._passes, data, self.held = True, self.held, b""
        return data

    def finish(self) -> bytes:
        """The data held back; b"" if it is a refusal, whose `reason` is set."""
        held, self.held = self.held, b""
        if self._passes:
            return b""
        if self._means is not None and self._means(held):
            self.reason = self._why
        else:
            self.salt_unknown = self._salted and refuses_salt(held)
        if self.salt_unknown:
            self.held = held
        return b"" if self.reason is not None or self.salt_unknown else held


class PageTap(RefusalTap):
    """For an answer that calls itself HTML: it is a refusal if it begins so. There are engines that call JSON so."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(is_page, outcome.NO_ENGINE_THERE)

    def feed(self, data: bytes) -> bytes:
        """Hold back what begins like HTML, as far as that is to be known."""
        if self._passes or is_page(self.held):
            return data if self._passes else b""
        self.held += data
        if is_page(self.held) or (not self.held.strip() and len(self.held) <= REFUSAL_BYTES_MAX):
            return b""
        self._passes, data, self.held = True, self.held, b""
        return data


class FaultTap:
    """For the body of a failure: held until it is complete, then passed on as it is if it is an error document without
    a stack trace; else `unfit` is set, nothing is passed on, and `trace` says where the engine failed, as far as the
    body shows. `usage`: there is none."""

    __slots__ = ("fault", "held", "over_bound", "trace", "unfit")

    usage = None

    def __init__(self) -> None:
        self.held = b""
        self.over_bound = False  # more came than any error document holds
        self.unfit, self.trace = False, ""
        self.fault: Outcome | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of the answer that are held in memory now."""
        return len(self.held)

    @property
    def says_nothing(self) -> bool:
        """Whether, once finished, it holds no account of a failure: no error document, broken GPU or stack trace."""
        return self.unfit and self.fault is None and not self.trace

    def feed(self, data: bytes) -> bytes:
        """Hold the data back."""
        room = BODY_BYTES_MAX - len(self.held)
        self.held += data[:room]
        self.over_bound |= len(data) > room
        return b""

    def finish(self) -> bytes:
        """The data held back; b"" if it is `unfit` for clients."""
        held, self.held = self.held, b""
        self.fault = in_text(held)
        self.unfit = self.over_bound or not is_fit(held)
        if not self.unfit:
            return held
        self.trace = trace_in(held)
        return b""
