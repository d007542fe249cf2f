"""Answers of our own: an Outcome becomes a status, an OpenAI-shaped error body and, where it helps, `Retry-After`.

The one place where outcomes meet HTTP. Never shows a stack trace, an address inside the fleet, or a prompt.
"""

from __future__ import annotations

import math
from enum import StrEnum
from http import HTTPStatus

import msgspec

from farhop.balance import outcome
from farhop.balance.outcome import Outcome


class Dialect(StrEnum):
    """The error format that a path's clients understand."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    RESPONSES = "responses"  # OpenAI's, but for the errors of a stream
    KSERVE = "kserve"  # the Open Inference Protocol's, where an error is a text: Triton's clients read nothing else


# What the protocol and Triton have under /v2, where Cohere's API is, too.
_KSERVE = (
    b"/v2/models", b"/v2/health", b"/v2/repository", b"/v2/systemsharedmemory", b"/v2/cudasharedmemory", b"/v2/logging",
    b"/v2/trace",
)  # fmt: skip


def dialect(path: bytes) -> Dialect:
    """The error format for the clients of a path, even if the path is refused."""
    if path.startswith(b"/v1/messages"):
        return Dialect.ANTHROPIC
    if path == b"/v2" or path.startswith(_KSERVE):
        return Dialect.KSERVE
    return Dialect.RESPONSES if path == b"/v1/responses" else Dialect.OPENAI


# status, OpenAI's error `type`
_STATUS: dict[Outcome, tuple[int, str]] = {
    outcome.SERVED: (200, ""),
    outcome.REFUSED_BY_ENGINE: (400, "invalid_request_error"),  # as below: its own status is relayed
    outcome.ENGINE_ERROR: (502, "server_error"),  # an engine's own status is relayed; this is for one without
    outcome.ENGINE_OUT_OF_MEMORY: (502, "server_error"),
    outcome.ENGINE_BROKEN: (502, "server_error"),
    outcome.MALFORMED_HTTP: (400, "invalid_request_error"),
    outcome.HEAD_TOO_LARGE: (431, "invalid_request_error"),
    outcome.BODY_TOO_LARGE: (413, "invalid_request_error"),
    outcome.REQUEST_TIMEOUT: (408, "invalid_request_error"),
    outcome.METHOD_NOT_ALLOWED: (405, "invalid_request_error"),
    outcome.PATH_NOT_ALLOWED: (404, "invalid_request_error"),
    outcome.INVALID_JSON: (400, "invalid_request_error"),
    outcome.INVALID_FIELD: (400, "invalid_request_error"),
    outcome.UNKNOWN_MODEL: (404, "invalid_request_error"),
    outcome.MISSING_KEY: (401, "authentication_error"),
    outcome.UNKNOWN_KEY: (401, "authentication_error"),
    outcome.KEY_NOT_VALID: (401, "authentication_error"),
    outcome.KEY_SCOPE: (403, "permission_error"),
    outcome.CLIENT_LEFT: (499, "client_closed_request"),
    outcome.TOO_MANY_CONNECTIONS_OF_CLIENT: (429, "rate_limit_error"),
    outcome.HOP_MISSING: (401, "authentication_error"),
    outcome.HOP_FORGED: (401, "authentication_error"),
    outcome.HOP_EXPIRED: (401, "authentication_error"),
    outcome.HOP_MISADDRESSED: (421, "authentication_error"),
    outcome.HOP_USED: (401, "authentication_error"),
    outcome.REDIRECT_TOKEN_FORGED: (401, "authentication_error"),
    outcome.REDIRECT_TOKEN_OVER: (403, "authentication_error"),
    outcome.REDIRECT_TOKEN_MISADDRESSED: (403, "authentication_error"),
    outcome.REDIRECTED: (307, ""),
    outcome.ADVISED: (200, ""),
    outcome.UNLAWFUL: (451, "residency_error"),
    outcome.ENTRY_FORBIDDEN: (451, "residency_error"),
    outcome.UNLAWFUL_HERE: (451, "residency_error"),
    outcome.UNLAWFUL_UNREAD: (451, "residency_error"),
    outcome.NO_REGION: (503, "overloaded_error"),
    outcome.NO_BUFFER: (503, "overloaded_error"),
    outcome.ACCOUNTS_NOT_WRITABLE: (503, "overloaded_error"),
    outcome.TOO_MANY_CONNECTIONS: (503, "overloaded_error"),
    outcome.UPSTREAM_FULL: (503, "overloaded_error"),
    outcome.TENANT_OVER_SHARE: (429, "rate_limit_error"),
    outcome.RATE_LIMITED: (429, "rate_limit_error"),  # its type says of what, as OpenAI's does (service.limits)
    outcome.ENDED_TWO_PROCESSES: (503, "server_error"),
    outcome.DEADLINE: (504, "timeout_error"),
    outcome.WHOLE_ANSWER_TIMEOUT: (504, "timeout_error"),
    outcome.STOPPING: (503, "overloaded_error"),
    outcome.INTERNAL: (500, "server_error"),
    outcome.NO_REPLICA: (503, "overloaded_error"),
    outcome.QUEUE_FULL: (429, "overloaded_error"),
    outcome.QUEUE_TIMEOUT: (503, "overloaded_error"),
    outcome.HOP_REJECTED: (502, "server_error"),
    outcome.PATH_UNSUPPORTED: (501, "invalid_request_error"),
    outcome.TOO_LONG: (400, "invalid_request_error"),
    outcome.MODEL_NOT_HERE: (404, "invalid_request_error"),
    outcome.MODEL_NOT_SERVED: (404, "invalid_request_error"),
    outcome.REFUSED_BY_OPERATOR: (503, "overloaded_error"),
    outcome.FOREIGN_FULL: (503, "overloaded_error"),
    outcome.BROKEN_PROMISE: (503, "overloaded_error"),
    outcome.CONNECT_FAILED: (502, "server_error"),
    outcome.CONNECT_TIMEOUT: (504, "timeout_error"),
    outcome.FIRST_BYTE_TIMEOUT: (504, "timeout_error"),
    outcome.DIED_BEFORE_START: (502, "server_error"),
    outcome.LOST: (502, "server_error"),
    outcome.KEPT_CLOSED: (502, "server_error"),
    outcome.ENGINE_KEY_REFUSED: (502, "server_error"),
    outcome.ENGINE_REDIRECTS: (502, "server_error"),
    outcome.NO_ENGINE_THERE: (502, "server_error"),
    outcome.ENGINE_UNAVAILABLE: (503, "overloaded_error"),
    outcome.ENGINE_BUSY: (429, "overloaded_error"),
    outcome.DIED_MID_STREAM: (502, "server_error"),
    outcome.STALLED: (504, "timeout_error"),
    outcome.PREFILL_FAILED: (502, "server_error"),
    outcome.BAD_FRAMING: (502, "server_error"),
}

# Clients rely on these codes: LiteLLM takes any other 404 for a bad request.
_CODES = {outcome.UNKNOWN_MODEL: "model_not_found"}

STOPPING_DETAIL = "this balancer is stopping and could not wait any longer: ask again"

# RFC 9110's, where older Pythons have other words.
_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus} | {
    413: b"Content Too Large",
    422: b"Unprocessable Content",
}


class _StatusLines(dict[int, bytes]):
    def __missing__(self, status: int) -> bytes:
        return b"HTTP/1.1 %d Status\r\n" % status


STATUS_LINES = _StatusLines({status: b"HTTP/1.1 %d %b\r\n" % (status, phrase) for status, phrase in _PHRASES.items()})
"""By status: `HTTP/1.1 200 OK` and its line end."""


def status_of(reason: Outcome) -> int:
    """The HTTP status of an outcome."""
    return _STATUS[reason][0]


class Reply(msgspec.Struct, frozen=True):
    """A complete answer of our own. `extra`: header lines ready to send. `wait_ms`: how long the request would have
    waited here, for the tier above.
    """

    status: int
    body: bytes
    outcome: Outcome
    extra: bytes = b""
    content_type: bytes = b"application/json"
    wait_ms: float | None = None


def stopping() -> Reply:
    """The answer to requests still open when this process stops. The tier above knows that another instance can take
    them."""
    return refusal(outcome.STOPPING, STOPPING_DETAIL, retry_after_s=1.0)


def error_body(reason: Outcome, detail: str, param: str | None = None, kind: str = "", code: str = "") -> bytes:
    """OpenAI's error document: the code is the outcome's reason, but for those of OpenAI's own (_CODES). `kind` is the
    error's type, `code` its code, where they are not always the same."""
    code = code or _CODES.get(reason, reason.reason)
    error = {"message": detail, "type": kind or _STATUS[reason][1], "param": param, "code": code}
    return msgspec.json.encode({"error": error})


def refusal(
    reason: Outcome,
    detail: str,
    *,
    param: str | None = None,
    retry_after_s: float | None = None,
    extra: bytes = b"",
    wait_ms: float | None = None,
    kind: str = "",
    code: str = "",
) -> Reply:
    """The answer that says an outcome to a client. `kind` and `code` as in `error_body`."""
    if retry_after_s is not None:
        extra += b"retry-after: %d\r\n" % max(1, math.ceil(retry_after_s))
    if status_of(reason) == 401:
        extra += b"www-authenticate: Bearer\r\n"
    return Reply(status_of(reason), error_body(reason, detail, param, kind, code), reason, extra, wait_ms=wait_ms)


_ENGINE_FAILED = (
    "the engine failed, and its message is not for clients; the operator's logs have it under the id in "
    "`x-farhop-decision`"
)


def engine_failure(reason: Outcome, path: bytes) -> bytes:
    """The body of an engine's failure on this path, where the engine's own is none that a client can read, or may."""
    status = status_of(reason)
    return in_dialect(Reply(status, error_body(reason, _ENGINE_FAILED), reason), dialect(path)).body


_REDIRECTED = b"cache-control: no-store\r\nreferrer-policy: no-referrer\r\n"  # the URL is good for one use


def redirect(url: str, reason: Outcome, extra: bytes = b"") -> Reply:
    """307: same method, same body, another entry. The body names that, not the whole URL, which may hold a token. It
    says what to do, as few clients can follow: most do not send their key to another host.
    """
    entry = "/".join(url.split("/", 3)[:3])
    detail = f"this entry may not read the request: give the client the address of one that may, {entry}"
    if reason is outcome.REDIRECTED:
        detail, extra = "the region in `Location` answers; send it the same request", extra + _REDIRECTED
    return Reply(307, error_body(reason, detail), reason, b"location: " + url.encode("latin-1") + b"\r\n" + extra)


def event_of(reason: Outcome, detail: str, dialect: Dialect = Dialect.OPENAI, number: int = 0) -> bytes:
    """The last event of a stream that broke, in the form of the client's API; `number` is its own, where that has one.

    A Responses event says the error twice: as OpenAI documents it and as it sends it. Clients read one or the other,
    and OpenAI's SDKs end the stream as a whole answer unless there is an `error`.
    """
    if dialect is Dialect.ANTHROPIC:
        return b"event: error\ndata: " + _in_anthropic(status_of(reason), reason.reason, detail) + b"\n\n"
    if dialect is Dialect.RESPONSES:
        said = {"code": reason.reason, "message": detail, "param": None}
        nested = {"type": _STATUS[reason][1], **said}
        error = {"type": "error", "sequence_number": number, **said, "error": nested}
        return b"event: error\ndata: " + msgspec.json.encode(error) + b"\n\n"
    if dialect is Dialect.KSERVE:
        return b"data: " + _in_kserve(reason.reason, detail) + b"\n\n"
    return b"data: " + error_body(reason, detail) + b"\n\n"


# Anthropic's `type` by status; others are api_error.
_ANTHROPIC = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "timeout_error", 413: "request_too_large", 421: "authentication_error",
    429: "rate_limit_error", 431: "invalid_request_error", 451: "permission_error", 501: "not_found_error",
    503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def _in_anthropic(status: int, code: str, message: str, param: str | None = None) -> bytes:
    error = {"type": _ANTHROPIC.get(status, "api_error"), "message": message, "code": code, "param": param}
    return msgspec.json.encode({"type": "error", "error": error})


def _in_kserve(code: str, message: str, param: str | None = None) -> bytes:
    return msgspec.json.encode({"error": message, "code": code, "param": param})


def in_dialect(reply: Reply, dialect: Dialect) -> Reply:
    """The same answer, its error in the words of another API: few are errors, so what was written is read again."""
    if dialect not in (Dialect.ANTHROPIC, Dialect.KSERVE) or reply.status < 300 or not reply.body:
        return reply
    error = msgspec.json.decode(reply.body)["error"]
    code, message, param = error["code"], error["message"], error["param"]
    if dialect is Dialect.ANTHROPIC:
        body = _in_anthropic(reply.status, code, message, param)
    else:
        body = _in_kserve(code, message, param)
    return msgspec.structs.replace(reply, body=body)


_TOKEN_REFUSALS = (
    outcome.HOP_MISSING, outcome.HOP_FORGED, outcome.HOP_EXPIRED, outcome.HOP_MISADDRESSED, outcome.HOP_USED,
)  # fmt: skip


def hop_outcome(reason: Outcome, wait_ms: float | None) -> bytes:
    """The header by which only a tier listener shows the tier above that it refused a request."""
    wait = b"" if wait_ms is None else b"; wait_ms=%d" % max(0, int(wait_ms))
    return b"x-farhop-outcome: " + reason.reason.encode() + wait + b"\r\n"


def read_hop_outcome(value: bytes) -> tuple[Outcome, float | None]:
    """The outcome that the tier below reported. An unknown word counts as an internal error there, and is not
    retryable.

    A region that rejects our token says nothing about the client's credentials: to us it is a refusal like others.
    """
    name, _, rest = value.partition(b";")
    wait = rest.strip().removeprefix(b"wait_ms=")
    known = outcome.by_reason(name.strip().decode("latin-1")) or outcome.INTERNAL
    if known in _TOKEN_REFUSALS:
        known = outcome.HOP_REJECTED
    return known, float(wait) if wait.isdigit() else None
