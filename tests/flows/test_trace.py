"""One request, one trace: over both tiers and the engine, with correct parents, through a real OTLP receiver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farhop_lab.world.collector import SpanRecord

if TYPE_CHECKING:
    from tests.conftest import RunningWorld


def _spans(running: RunningWorld, trace_id: str, count: int) -> list[SpanRecord]:
    return running.call(running.world.collector.wait_for(trace_id, spans=count, timeout_s=60.0))


def _path(spans: list[SpanRecord], name: str) -> list[tuple[str, str]]:
    by_id = {span.span_id: span for span in spans}
    at = next(span for span in spans if span.name == name)
    path = [(at.service, at.name)]
    while at.parent_id in by_id:
        at = by_id[at.parent_id]
        path.append((at.service, at.name))
    return path[::-1]


def test_a_trace_spans_both_tiers_and_the_engine_under_the_clients_own_span(running: RunningWorld) -> None:
    trace_id, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    result = running.ask("virginia", "anywhere", "trace me", headers={"traceparent": f"00-{trace_id}-{parent}-01"})
    assert result.ok
    spans = _spans(running, trace_id, 7)
    assert _path(spans, "llm_request") == [
        ("farhop-global", "farhop.global"),
        ("farhop-global", "farhop.relay"),
        ("farhop-regional", "farhop.regional"),
        ("farhop-regional", "farhop.relay"),
        ("engine", "llm_request"),
    ]
    assert _path(spans, "farhop.global.decide")[-2:] == [
        ("farhop-global", "farhop.global"),
        ("farhop-global", "farhop.global.decide"),
    ]
    assert _path(spans, "farhop.regional.pick")[-2][1] == "farhop.regional"
    root = next(span for span in spans if span.name == "farhop.global")
    assert root.parent_id == parent
    assert root.attributes["gen_ai.request.model"] == "llama-3.1-8b"
    assert root.attributes["farhop.decision"] == result.headers["x-farhop-decision"]
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        assert span.start_ns <= span.end_ns
        if span.parent_id in by_id and by_id[span.parent_id].service == span.service:
            assert by_id[span.parent_id].start_ns <= span.start_ns
            assert span.end_ns <= by_id[span.parent_id].end_ns


def test_an_unsampled_request_leaves_no_span(running: RunningWorld) -> None:
    trace_id = "1" * 32
    assert running.ask("virginia", "anywhere", "no trace", headers={"traceparent": f"00-{trace_id}-{'2' * 16}-00"}).ok
    assert running.ask("virginia", "anywhere", "trace", headers={"traceparent": f"00-{'3' * 32}-{'2' * 16}-01"}).ok
    _spans(running, "3" * 32, 7)  # the later request's spans are all here: the earlier one's would be, too
    assert running.world.collector.trace(trace_id) == []


def test_requests_are_not_recorded_where_the_law_forbids_it(running: RunningWorld) -> None:
    """eu-only's records stay in the EU: asked in Tokyo, only Frankfurt's balancer and engine have spans."""
    trace_id = "4" * 32
    result = running.ask("tokyo", "eu-only", "quietly", headers={"traceparent": f"00-{trace_id}-{'5' * 16}-01"})
    assert result.headers["x-farhop-region"] == "frankfurt"
    spans = _spans(running, trace_id, 4)
    assert {span.service for span in spans} == {"farhop-regional", "engine"}


def test_no_prompt_enters_a_span(running: RunningWorld) -> None:
    secret, trace_id = "xyzzy-plugh-secret", "6" * 32
    assert running.ask("virginia", "anywhere", secret, headers={"traceparent": f"00-{trace_id}-{'7' * 16}-01"}).ok
    assert secret not in repr(_spans(running, trace_id, 7))
