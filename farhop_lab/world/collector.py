"""A small OTLP/HTTP collector: takes the spans of both tiers on this machine and prints them as trees.

For `farhop up`, `farhop ask` and tests; a deployment has its own collector. Invariants: it holds a bounded number of
traces and of spans in each (the oldest trace goes first), and a payload it cannot read changes nothing.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec
from aiohttp import web
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

TRACES_MAX = 1024
SPANS_PER_TRACE_MAX = 512
PAYLOAD_BYTES_MAX = 16 * 1024 * 1024  # after decompression
PROTOBUF = "application/x-protobuf"

Value: TypeAlias = str | bool | int | float | list[object] | None

_STATUS = {Status.STATUS_CODE_UNSET: "unset", Status.STATUS_CODE_OK: "ok", Status.STATUS_CODE_ERROR: "error"}
_KINDS = {number: name.removeprefix("SPAN_KIND_").lower() for name, number in Span.SpanKind.items()}
_NO_PARENT = ""


class SpanRecord(msgspec.Struct, frozen=True):
    """One span as received. Ids are hex; `parent_id` is "" for a root. Times are epoch nanoseconds of the sender.

    `status` is unset, ok or error; `resource` holds the sending process's attributes (service.name apart).
    """

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    kind: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Value]
    status: str
    status_text: str = ""
    resource: dict[str, Value] = {}

    @property
    def duration_ms(self) -> float:
        """Its duration, by the sender's clock."""
        return (self.end_ns - self.start_ns) / 1e6


class PayloadError(ValueError):
    """An export that cannot be read; the text is one line."""


class TooLargeError(Exception):
    """A body whose content exceeds the bound."""


class Collector:
    """Receives on POST /v1/traces (protobuf, plain or gzip); answers GET /traces/{id} and GET /healthz."""

    def __init__(self, traces_max: int = TRACES_MAX) -> None:
        self._traces_max = traces_max
        self._traces: dict[str, dict[str, SpanRecord]] = {}
        self._runner: web.AppRunner | None = None
        self._arrived = asyncio.Event()
        self.endpoint = ""
        self.received = 0
        self.dropped = 0

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen; port 0 takes a free one. `endpoint` is then what OTEL_EXPORTER_OTLP_ENDPOINT should hold.

        Raises OSError if the port is taken.
        """
        app = web.Application(client_max_size=PAYLOAD_BYTES_MAX)
        app.router.add_post("/v1/traces", self._receive)
        app.router.add_get("/traces", self._list)
        app.router.add_get("/traces/{trace_id}", self._show)
        app.router.add_get("/healthz", self._health)
        # aiohttp's own decompression logs a stack trace for every broken body, after answering it.
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, auto_decompress=False)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError:
            await runner.cleanup()
            raise
        self._runner = runner
        bound = runner.addresses[0]
        self.endpoint = f"http://{f'[{bound[0]}]' if ':' in bound[0] else bound[0]}:{bound[1]}"

    async def stop(self) -> None:
        """Stop listening; what was received can still be read. Safe to call twice."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def trace_ids(self) -> list[str]:
        """The traces held, oldest first."""
        return list(self._traces)

    def trace(self, trace_id: str) -> list[SpanRecord]:
        """The spans of a trace so far, by start; empty if it is unknown or was dropped."""
        return sorted(self._traces.get(trace_id, {}).values(), key=lambda span: (span.start_ns, -span.end_ns))

    async def wait_for(self, trace_id: str, spans: int = 1, timeout_s: float = 60.0) -> list[SpanRecord]:
        """The trace once it has this many spans, or as it is at the timeout: exporters batch."""
        try:
            async with asyncio.timeout(timeout_s):
                while len(self._traces.get(trace_id, ())) < spans:
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            pass  # the spans so far are the answer: the caller sees how many they are
        return self.trace(trace_id)

    def take(self, payload: bytes) -> int:
        """Keep the spans of one ExportTraceServiceRequest; returns how many were dropped at a bound. Raises
        PayloadError.
        """
        spans = list(decode(payload))
        dropped = sum(not self._hold(span) for span in spans)
        self.received += len(spans)
        self.dropped += dropped
        self._arrived.set()
        return dropped

    def _hold(self, span: SpanRecord) -> bool:
        trace = self._traces.get(span.trace_id)
        if trace is None:
            if len(self._traces) >= self._traces_max:
                del self._traces[next(iter(self._traces))]
            trace = self._traces[span.trace_id] = {}
        if len(trace) >= SPANS_PER_TRACE_MAX and span.span_id not in trace:
            return False
        trace[span.span_id] = span  # an exporter's retry sends the same span twice
        return True

    async def _receive(self, request: web.Request) -> web.Response:
        if request.content_type != PROTOBUF:
            return _refusal(415, f"content-type {request.content_type!r} is not taken; send {PROTOBUF}")
        encoding = request.headers.get("content-encoding", "identity").lower()
        if encoding not in ("identity", "gzip"):
            return _refusal(415, f"content-encoding {encoding!r} is not taken; send gzip or none")
        try:
            body = await request.read()
            dropped = self.take(unpacked(body) if encoding == "gzip" else body)
        except PayloadError as error:
            return _refusal(400, str(error))
        except (TooLargeError, web.HTTPRequestEntityTooLarge):
            return _refusal(413, f"more than {PAYLOAD_BYTES_MAX} bytes; lower OTEL_BSP_MAX_EXPORT_BATCH_SIZE")
        answer = ExportTraceServiceResponse()
        if dropped:
            answer.partial_success.rejected_spans = dropped
            answer.partial_success.error_message = f"a trace holds at most {SPANS_PER_TRACE_MAX} spans"
        return web.Response(body=answer.SerializeToString(), content_type=PROTOBUF)

    async def _show(self, request: web.Request) -> web.Response:
        trace_id = request.match_info["trace_id"].lower()
        spans = self.trace(trace_id)
        if not spans:
            return _refusal(404, "no such trace here; it was not sampled, not exported yet, or pushed out")
        return _json({"trace_id": trace_id, "spans": spans, "tree": tree(spans)})

    async def _list(self, _request: web.Request) -> web.Response:
        return _json({"traces": self.trace_ids()})

    async def _health(self, _request: web.Request) -> web.Response:
        return _json({"traces": len(self._traces), "received": self.received, "dropped": self.dropped})


def unpacked(body: bytes) -> bytes:
    """A gzip body's content. PayloadError if it is not gzip, or truncated; TooLargeError for more than 16 MiB of
    content.
    """
    stream = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        content = stream.decompress(body, PAYLOAD_BYTES_MAX + 1)
    except zlib.error as error:
        raise PayloadError("the body is not gzip, though content-encoding says so; send gzip") from error
    if len(content) > PAYLOAD_BYTES_MAX:
        raise TooLargeError
    if not stream.eof:
        raise PayloadError("the gzip body is cut short; send it whole")
    return content


def decode(payload: bytes) -> Iterable[SpanRecord]:
    """The spans of a serialized ExportTraceServiceRequest. PayloadError that names the error."""
    try:
        message = ExportTraceServiceRequest.FromString(payload)
    except DecodeError as error:
        raise PayloadError("the body is not an OTLP ExportTraceServiceRequest; send protobuf") from error
    for group in message.resource_spans:
        resource = _attributes(group.resource.attributes)
        service = str(resource.pop("service.name", "unknown"))
        for scope in group.scope_spans:
            for span in scope.spans:
                yield _record(span, service, resource)


def _record(span: Span, service: str, resource: dict[str, Value]) -> SpanRecord:
    if len(span.trace_id) != 16 or len(span.span_id) != 8 or len(span.parent_span_id) not in (0, 8):
        raise PayloadError(
            f"span {span.name[:64]!r} has ids of a wrong length; 16 bytes a trace and 8 a span are needed"
        )
    return SpanRecord(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex() if any(span.parent_span_id) else _NO_PARENT,
        name=span.name,
        service=service,
        kind=_KINDS.get(span.kind, "unspecified"),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        status=_STATUS.get(span.status.code, "unset"),
        status_text=span.status.message,
        resource=resource,
    )


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Value]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Value:
    match value.WhichOneof("value"):
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "int_value":
            return value.int_value
        case "double_value":
            return value.double_value
        case "array_value":
            return [_value(item) for item in value.array_value.values]
        case "bytes_value":
            return value.bytes_value.hex()
        case "kvlist_value":
            return str(_attributes(value.kvlist_value.values))
    return None


def _refusal(status: int, text: str) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode({"error": {"message": text}}), content_type="application/json"
    )


def _json(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def tree(spans: Sequence[SpanRecord]) -> list[str]:
    """A trace as lines of text: children below their parent by start, each with service, duration and attributes.

    A span whose parent is missing (unsampled, muted, or the client's own) is a root.
    """
    here = {span.span_id for span in spans}
    children: dict[str, list[SpanRecord]] = {}
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        children.setdefault(span.parent_id if span.parent_id in here else _NO_PARENT, []).append(span)
    lines: list[str] = []
    pending = [(root, "", "") for root in reversed(children.pop(_NO_PARENT, []))]
    # A list of children is removed when printed: spans that name each other as parents become roots, and the loop ends.
    while pending or children:
        if not pending:
            pending = [(span, "", "") for span in reversed(children.pop(next(iter(children))))]
        span, stem, branch = pending.pop()
        lines.append(stem + branch + _line(span))
        below = stem + {"": "", "├─ ": "│  ", "└─ ": "   "}[branch]
        nested = children.pop(span.span_id, [])
        marks = ["├─ "] * (len(nested) - 1) + ["└─ "] * bool(nested)
        pending.extend((child, below, mark) for child, mark in reversed(list(zip(nested, marks, strict=True))))
    return lines


def _line(span: SpanRecord) -> str:
    shown = " ".join(f"{_shown(name)}={_text(value)}" for name, value in sorted(span.attributes.items()))
    failed = f"  ERROR {span.status_text}".rstrip() if span.status == "error" else ""
    return f"{span.name}  {span.duration_ms:.1f} ms  [{span.service}]{failed}{'  ' + shown if shown else ''}"


def _shown(name: str) -> str:
    return name.removeprefix("farhop.").removeprefix("gen_ai.")


def _text(value: Value) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
