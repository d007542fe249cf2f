"""The one place that holds the OpenTelemetry SDK: a trace's records become its spans, exported by a thread.

Imported only where spans are exported. Invariants: `export` never waits and never fails on what a request carries;
closing is bounded, whatever the collector does; every attribute passes the gate of `attributes`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode

from farhop.telemetry import attributes, context, export
from farhop.telemetry.export import SpanRecord
from farhop.telemetry.release import release

_KINDS = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT}
_SCOPE = InstrumentationScope("farhop")
_WELL = Status(StatusCode.UNSET)


class TraceExporter:
    """Exports spans of one process by OTLP `protocol`. Raises whatever the SDK does on a bad OTEL_* value."""

    def __init__(self, protocol: str, service: str, region: str, instance: str) -> None:
        self.skipped = 0
        self._resource = _resource(service, region, instance)
        self._limits = SpanLimits()
        self._exporter = export.exporter(protocol)
        self._processor = BatchSpanProcessor(self._exporter)

    def export(
        self,
        trace_id_hex: bytes,
        parent: context.Parent | None,
        tracestate: bytes | None,
        flags: int,
        records: Iterable[SpanRecord],
    ) -> None:
        """Queue a finished trace: the first record is the root, below `parent`; all others are its children.

        Spans are built as ReadableSpan rather than through a Tracer: their ids went upstream long before, and it costs
        11 us a span against 39.
        """
        trace_id, bits = int(trace_id_hex, 16), TraceFlags(flags)
        state = TraceState.from_header([tracestate.decode("ascii")]) if tracestate else None
        above = SpanContext(trace_id, int(parent.span_id, 16), True, bits, state) if parent is not None else None
        latest_ns = 0
        root: SpanContext | None = None
        for record in records:
            own = SpanContext(trace_id, int(record.span_id, 16), False, bits, state)
            latest_ns = latest_ns or record.end_ns or record.start_ns
            self._processor.on_end(self._span(record, own, root or above, latest_ns))
            root = root or own

    def _span(self, record: SpanRecord, own: SpanContext, above: SpanContext | None, latest_ns: int) -> ReadableSpan:
        """The SDK's form of a record. One still open ends with the request; none ends before it began."""
        admitted, refused = attributes.admit(record.attributes) if record.attributes else ({}, 0)
        self.skipped += refused
        status = _WELL
        if record.error is not None:
            admitted[attributes.ERROR_TYPE] = reason = record.error[: attributes.TEXT_CHARS_MAX]
            status = Status(StatusCode.ERROR, reason)
        limits = self._limits
        return ReadableSpan(
            name=record.name,
            context=own,
            parent=above,
            resource=self._resource,
            attributes=BoundedAttributes(
                limits.max_span_attributes, admitted, immutable=True, max_value_len=limits.max_span_attribute_length
            ),
            kind=_KINDS[record.kind],
            status=status,
            start_time=record.start_ns,
            end_time=max(record.start_ns, latest_ns if record.end_ns is None else record.end_ns),
            instrumentation_scope=_SCOPE,
        )

    async def flush(self, timeout_s: float) -> bool:
        """Export all that is queued; False if it took longer than `timeout_s`."""
        return await _bounded(self._processor.force_flush, "farhop-trace-flush", timeout_s)

    async def close(self, timeout_s: float) -> bool:
        """Export all that is queued and stop; past `timeout_s` the export under way is broken off."""
        done = await _bounded(self._processor.shutdown, "farhop-trace-close", timeout_s)
        if not done:
            self._exporter.shutdown()  # wakes a worker that sleeps between retries
        return done


async def _bounded(work: Callable[[], object], name: str, timeout_s: float) -> bool:
    """Run blocking work in a daemon thread; whether it ended in time. A pool's thread would hold up the exit."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def run() -> None:
        try:
            work()
        finally:
            if not loop.is_closed():
                loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        async with asyncio.timeout(timeout_s):
            await ended.wait()
    except TimeoutError:
        return False
    return True


def _resource(service: str, region: str, instance: str) -> Resource:
    """The process as spans name it. What OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES say wins over our own words."""
    given = OTELResourceDetector().detect().attributes
    own: dict[str, str] = {
        "service.name": service,
        "service.namespace": "farhop",
        "service.instance.id": instance,
        "service.version": release(),
        "cloud.region": region,
        "farhop.region": region,
    }
    return Resource.create({name: value for name, value in own.items() if name not in given})
