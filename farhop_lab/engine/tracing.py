"""The engine's span of each request, as vLLM exports it, and the provider for it if OTLP is configured.

Imported only when tracing is on. Never contains a prompt or an answer. The parent's sampled flag decides
(parent-based).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

    from farhop_lab.engine.core.sequence import Sequence


def provider() -> TracerProvider:
    """A provider that exports by OTLP over HTTP to the standard variables' endpoint. Shut it down at the end."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    made = TracerProvider(resource=Resource.create({"service.name": "engine"}))
    made.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return made


class RequestSpans:
    """Writes one `llm_request` span per finished request."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    def record(
        self,
        carrier: Mapping[str, str],
        request_id: str,
        model: str,
        sequence: Sequence,
        began_ns: int,
        ttft_s: float | None,
    ) -> None:
        """Record a request that ended now. `began_ns` is its arrival in Unix nanoseconds."""
        context = self._propagator.extract(carrier)
        span = self._tracer.start_span("llm_request", context, SpanKind.SERVER, start_time=began_ns)
        if span.is_recording():
            span.set_attributes(
                {
                    "gen_ai.request.id": request_id,
                    "gen_ai.request.model": model,
                    "gen_ai.request.max_tokens": sequence.max_tokens,
                    "gen_ai.usage.prompt_tokens": sequence.prompt_tokens,
                    "gen_ai.usage.completion_tokens": sequence.output_tokens,
                    "gen_ai.usage.cached_tokens": sequence.cached_tokens,
                    "gen_ai.response.finish_reasons": [sequence.finished or "abort"],
                }
            )
            if ttft_s is not None:
                span.set_attribute("gen_ai.latency.time_to_first_token", ttft_s)
            if sequence.queued_until is not None:
                queued_s = sequence.queued_until - sequence.submitted_at
                span.set_attribute("gen_ai.latency.time_in_queue", queued_s)
        span.end()
