"""Traces over both tiers: one RequestTrace per request, whose spans the OpenTelemetry SDK exports.

Reads no clock and rolls no dice: times are epoch nanoseconds given, ids come from the `rng` given. Invariants: nothing
is handed to the exporter before `end`, so `mute` at any moment leaves no record here; a valid context goes upstream
whether or not anything is recorded; one trace holds a bounded number of spans; a full export queue drops, never waits.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from farhop.telemetry import context, export
from farhop.telemetry.attributes import Value
from farhop.telemetry.export import Kind, SpanRecord

if TYPE_CHECKING:
    from random import Random

    from farhop.telemetry.trace_exporter import TraceExporter

SPANS_MAX = 64  # per request and tier; a request has some six, and each retry adds one


class Span(msgspec.Struct, eq=False, gc=False):
    """One span. This base class records nothing, and only passes the context on."""

    traceparent: bytes

    def end(self, end_ns: int, attributes: Mapping[str, Value] | None = None, error: str | None = None) -> None:
        """Conclude at `end_ns`. `error` is an outcome's reason (low cardinality), None if all went well. Once only."""


class RequestTrace(Span):
    """The trace of one request in one tier; itself the span that covers it whole. This class records nothing.

    `traceparent` is this request's context, `tracestate` what goes upstream beside it (None: send none). `sampled`:
    whether spans are recorded here; build attributes only if so.
    """

    tracestate: bytes | None = None
    sampled: bool = False

    @property
    def trace_id(self) -> str:
        """32 hex digits, the same on every tier: for logs, answers and `farhop explain`."""
        return context.trace_id(self.traceparent)

    def child(self, name: str, start_ns: int, end_ns: int, attributes: Mapping[str, Value] | None = None) -> None:
        """Record a child span of work that is already over."""

    def open(self, name: str, start_ns: int, kind: Kind = "client") -> Span:  # noqa: ARG002
        """Begin work that calls upstream; send its `traceparent` (and this trace's `tracestate`) along."""
        return self

    def mute(self) -> None:
        """The tenant's logging scope excludes this place: record nothing of this request. The context still goes on."""


class _OpenSpan(Span):
    """A span under way. Ending it fills its record; the record is handed over with the whole trace."""

    _record: SpanRecord

    def end(self, end_ns: int, attributes: Mapping[str, Value] | None = None, error: str | None = None) -> None:
        record = self._record
        if record.end_ns is None:
            record.end_ns, record.attributes, record.error = end_ns, attributes, error


class _RecordedTrace(RequestTrace, kw_only=True):
    """A sampled request: gathers its records, and hands them over when it ends."""

    exporter: TraceExporter | None
    _parent: context.Parent | None
    _flags: int
    _rng: Random
    _root: SpanRecord
    _records: list[SpanRecord]
    _skipped: int = 0

    def child(self, name: str, start_ns: int, end_ns: int, attributes: Mapping[str, Value] | None = None) -> None:
        if self._has_room():
            self._records.append(SpanRecord(name, "internal", _span_id(self._rng), start_ns, end_ns, attributes))

    def open(self, name: str, start_ns: int, kind: Kind = "client") -> Span:
        if not self._has_room():
            return Span(self.traceparent)
        record = SpanRecord(name, kind, _span_id(self._rng), start_ns)
        self._records.append(record)
        return _OpenSpan(context.write(self.traceparent[3:35], record.span_id, self._flags), record)

    def mute(self) -> None:
        self.exporter, self.sampled = None, False
        self._records = []
        if self._parent is not None:  # the next tier's span is below the caller's, not below one that is never exported
            self.traceparent = context.write(self._parent.trace_id, self._parent.span_id, self._flags)

    def end(self, end_ns: int, attributes: Mapping[str, Value] | None = None, error: str | None = None) -> None:
        exporter, self.exporter, self.sampled = self.exporter, None, False
        if exporter is None:
            return
        root = self._root
        root.end_ns, root.attributes, root.error = end_ns, attributes, error
        exporter.export(self.traceparent[3:35], self._parent, self.tracestate, self._flags, self._records)
        exporter.skipped += self._skipped
        self._records = []

    def _has_room(self) -> bool:
        if self.exporter is None:
            return False
        if len(self._records) < SPANS_MAX:
            return True
        self._skipped += 1
        return False


def _span_id(rng: Random) -> bytes:
    return b"%016x" % (rng.getrandbits(64) or 1)


class Tracing:
    """The tracing of one tier's process, configured by the OTEL_* variables as they stand when it is made.

    `service` names it unless OTEL_SERVICE_NAME does (`farhop-global`, `farhop-regional`). `problems` are lines for the
    log: values that were not understood. Make it after any fork, and `await close()` it before the process ends.
    """

    def __init__(self, service: str, region: str, instance: str) -> None:
        settings = export.settings(os.environ)
        self.problems = settings.problems
        self._follows_parent = settings.sampler.follows_parent
        self._bound = settings.sampler.bound
        self._passes_through = settings.disabled
        self._skipped = 0
        self.exporter: TraceExporter | None = None
        if settings.protocol is None:
            return
        from farhop.telemetry.trace_exporter import (
            TraceExporter,  # 0.3 s of imports, paid only where spans are exported
        )

        try:
            self.exporter = TraceExporter(settings.protocol, service, region, instance)
        except Exception as error:  # noqa: BLE001 - exporters raise classes of their own on a bad variable
            self.problems += (f"OTEL_EXPORTER_OTLP_*: spans are not exported: {error}; correct the variable",)

    @property
    def skipped(self) -> int:
        """Attributes refused and spans beyond the bound of their trace, since the start."""
        return self._skipped + (self.exporter.skipped if self.exporter is not None else 0)

    def begin(
        self, traceparent: bytes | None, tracestate: bytes | None, name: str, now_ns: int, rng: Random
    ) -> RequestTrace:
        """The trace of a request that came with these headers (None: absent), its root span `name` begun at `now_ns`.

        Without a valid parent a trace id is drawn from `rng`; the sampler decides by it, or by the parent if told to.
        """
        if traceparent and self._follows_parent and context.plainly_unsampled(traceparent):
            return RequestTrace(traceparent, context.state(tracestate) if tracestate else None)
        parent = context.read(traceparent) if traceparent else None
        if parent is None:
            trace_id = rng.getrandbits(128) or 1
            if (trace_id & export.LOW_64) >= self._bound:
                return RequestTrace(b"00-%032x-%016x-00" % (trace_id, rng.getrandbits(64) or 1), None)
            return self._sampled(None, b"%032x" % trace_id, None, name, now_ns, rng)
        onward = context.state(tracestate) if tracestate else None
        if self._samples(parent):
            return self._sampled(parent, parent.trace_id, onward, name, now_ns, rng)
        if self._passes_through or not parent.flags & context.SAMPLED:
            return RequestTrace(parent.text, onward)
        return RequestTrace(context.write(parent.trace_id, parent.span_id, parent.flags & ~context.SAMPLED), onward)

    async def flush(self, timeout_s: float = 5.0) -> bool:
        """Send what is queued now; False if that took longer (it then goes on in the background)."""
        return self.exporter is None or await self.exporter.flush(timeout_s)

    async def close(self, timeout_s: float = 5.0) -> bool:
        """Send what is queued and stop; False if the collector did not take it in time. Safe to call twice."""
        exporter, self.exporter = self.exporter, None
        if exporter is None:
            return True
        self._skipped += exporter.skipped
        return await exporter.close(timeout_s)

    def _samples(self, parent: context.Parent) -> bool:
        if self._follows_parent:
            return bool(parent.flags & context.SAMPLED)
        return int(parent.trace_id[16:], 16) < self._bound

    def _sampled(
        self,
        parent: context.Parent | None,
        trace_id: bytes,
        tracestate: bytes | None,
        name: str,
        now_ns: int,
        rng: Random,
    ) -> RequestTrace:
        flags = context.SAMPLED if parent is None else parent.flags | context.SAMPLED
        if self.exporter is None:
            # Nothing is kept here, but the sampling choice holds: the tiers below may well export.
            span_id = _span_id(rng) if parent is None else parent.span_id
            return RequestTrace(context.write(trace_id, span_id, flags), tracestate)
        root = SpanRecord(name, "server", _span_id(rng), now_ns)
        traceparent = context.write(trace_id, root.span_id, flags)
        return _RecordedTrace(
            traceparent, tracestate, True, exporter=self.exporter, _parent=parent, _flags=flags, _rng=rng,
            _root=root, _records=[root],
        )  # fmt: skip
