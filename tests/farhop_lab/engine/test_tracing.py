"""The engine's span: under the caller's, only if the caller's is sampled, and without a word of the prompt."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from farhop_lab.engine.tracing import provider

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_leaves_one_span(replica: Callable[..., Awaitable[Any]], sampled: bool, stream: bool) -> None:
    exporter, made = InMemorySpanExporter(), TracerProvider()
    made.add_span_processor(SimpleSpanProcessor(exporter))
    client = await replica(tracer=made.get_tracer("test"))
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-0{int(sampled)}", "X-Request-Id": "mine"}
    async with client.post(
        "/v1/completions", prompt="secret words", max_tokens=4, ignore_eos=True, stream=stream, headers=headers
    ) as response:
        await response.read()
    spans = exporter.get_finished_spans()
    assert len(spans) == int(sampled)
    for span in spans:
        assert (span.name, span.kind) == ("llm_request", SpanKind.SERVER)
        assert f"{span.context.trace_id:032x}" == TRACE
        assert f"{span.parent.span_id:016x}" == PARENT
        attributes = dict(span.attributes)
        assert 0 < attributes.pop("gen_ai.latency.time_to_first_token") < 5
        assert 0 <= attributes.pop("gen_ai.latency.time_in_queue") < 5
        assert attributes == {
            "gen_ai.request.id": "cmpl-mine",
            "gen_ai.request.model": "llama-3.1-8b",
            "gen_ai.request.max_tokens": 4,
            "gen_ai.usage.prompt_tokens": 3,
            "gen_ai.usage.completion_tokens": 4,
            "gen_ai.usage.cached_tokens": 0,
            "gen_ai.response.finish_reasons": ("length",),
        }
        assert "secret" not in span.to_json()
    made.shutdown()


def test_the_provider_names_the_service() -> None:
    made = provider()
    try:
        assert made.resource.attributes["service.name"] == "engine"
    finally:
        made.shutdown()
