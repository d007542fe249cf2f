"""Through the real SDK and real OTLP into a collector: parents hold over two tiers, and closing is bounded."""

import random
import re
import socket

import grpc
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from farhop.telemetry import attributes
from farhop.telemetry.spans import Tracing
from farhop_lab.world.collector import Collector, decode, tree
from tests.conftest import unhindered

NOW_NS = 1_700_000_000_000_000_000
MS = 1_000_000


@pytest.fixture
async def collector(monkeypatch):
    made = Collector()
    await made.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.endpoint)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_on")
    yield made
    await made.stop()


def serve_one(global_tier: Tracing, regional_tier: Tracing, rng: random.Random) -> str:
    """One request through both tiers, as their relays will do it; its trace id."""
    above = global_tier.begin(None, None, "farhop.global", NOW_NS, rng)
    above.child("farhop.global.decide", NOW_NS + MS, NOW_NS + 2 * MS, {attributes.REGION: "frankfurt"})
    hop = above.open("farhop.relay", NOW_NS + 2 * MS)
    below = regional_tier.begin(hop.traceparent, above.tracestate, "farhop.regional", NOW_NS + 50 * MS, rng)
    below.child("farhop.regional.pick", NOW_NS + 51 * MS, NOW_NS + 52 * MS, {attributes.HIT_TOKENS: 640})
    engine = below.open("farhop.relay", NOW_NS + 53 * MS)
    engine.end(NOW_NS + 90 * MS, {attributes.ATTEMPT: 1}, "upstream_died_mid_stream")
    below.end(NOW_NS + 91 * MS, {attributes.OUTPUT_TOKENS: 12, "gen_ai.prompt": "Dear diary"})
    hop.end(NOW_NS + 140 * MS)
    above.end(NOW_NS + 141 * MS, {attributes.REQUEST_MODEL: "llama"})
    return above.trace_id


@pytest.mark.parametrize("compression", ["none", "gzip"])
async def test_spans_of_both_tiers_form_one_tree(collector, monkeypatch, compression):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", compression)
    above = Tracing("farhop-global", "virginia", "g1")
    below = Tracing("farhop-regional", "frankfurt", "r1")
    assert above.problems == below.problems == ()
    trace_id = serve_one(above, below, random.Random(3))
    assert await above.close()
    assert await below.close()
    spans = await collector.wait_for(trace_id, 6)
    assert [re.split(r"  \d", line)[0] for line in tree(spans)] == [
        "farhop.global",
        "├─ farhop.global.decide",
        "└─ farhop.relay",
        "   └─ farhop.regional",
        "      ├─ farhop.regional.pick",
        "      └─ farhop.relay",
    ]
    by_name = {(span.service, span.name): span for span in spans}
    root = by_name["farhop-global", "farhop.global"]
    assert (root.parent_id, root.kind, root.status) == ("", "server", "unset")
    assert root.attributes == {attributes.REQUEST_MODEL: "llama"}
    assert root.resource["service.instance.id"] == "g1"
    assert root.resource["cloud.region"] == "virginia"
    engine = by_name["farhop-regional", "farhop.relay"]
    assert (engine.kind, engine.status, engine.status_text) == ("client", "error", "upstream_died_mid_stream")
    assert engine.attributes == {attributes.ATTEMPT: 1, attributes.ERROR_TYPE: "upstream_died_mid_stream"}
    assert engine.duration_ms == pytest.approx(37.0)
    assert (above.skipped, below.skipped) == (0, 1)


async def test_no_prompt_ever_reaches_the_wire(monkeypatch):
    payloads = []

    async def keep(request):
        payloads.append(await request.read())
        return web.Response(content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", keep)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{runner.addresses[0][1]}")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    both = Tracing("farhop-global", "virginia", "g1")
    serve_one(both, both, random.Random(3))
    assert both.skipped == 1
    assert await both.close()
    await runner.cleanup()
    assert sum(1 for payload in payloads for _ in decode(payload)) == 6
    assert b"Dear diary" not in b"".join(payloads)


async def test_an_open_span_ends_with_its_request_and_none_ends_before_it_began(collector):
    made = Tracing("farhop-global", "virginia", "g1")
    trace = made.begin(None, None, "farhop.global", NOW_NS, random.Random(1))
    trace.open("farhop.relay", NOW_NS + MS)
    trace.child("farhop.global.decide", NOW_NS + 5 * MS, NOW_NS)
    trace.end(NOW_NS + 9 * MS)
    assert await made.flush()
    spans = {span.name: span for span in await collector.wait_for(trace.trace_id, 3)}
    assert spans["farhop.relay"].end_ns == NOW_NS + 9 * MS
    assert spans["farhop.global.decide"].duration_ms == 0
    assert await made.close()


async def test_a_tracestate_is_recorded_and_a_remote_parent_kept(collector):
    made = Tracing("farhop-global", "virginia", "g1")
    parent = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    trace = made.begin(parent, b"congo=t61", "farhop.global", NOW_NS, random.Random(1))
    trace.end(NOW_NS + MS)
    assert await made.close()
    (span,) = await collector.wait_for(trace.trace_id, 1)
    assert span.parent_id == "b7ad6b7169203331"


async def test_a_malformed_tracestate_leaves_nothing_of_itself_in_the_log(collector, caplog):
    made = Tracing("farhop-global", "virginia", "g1")
    parent = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    rng = random.Random(1)
    for header in (b"the patient said that", b",".join(b"k%d=v" % at for at in range(33))):
        trace = made.begin(parent, header, "farhop.global", NOW_NS, rng)
        trace.end(NOW_NS + MS)
    assert await made.close()
    await collector.wait_for(trace.trace_id, 2)
    assert not caplog.records


async def test_spans_go_out_over_grpc_where_asked(monkeypatch):
    held = Collector()

    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        async def Export(self, request, context):
            held.take(request.SerializeToString())
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        made = Tracing("farhop-global", "virginia", "g1")
        trace_id = serve_one(made, made, random.Random(1))
        assert await made.close()
    finally:
        await server.stop(0)
    assert len(held.trace(trace_id)) == 6


async def test_standard_attribute_names_take_precedence(collector, monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "edge")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=pod-7,deployment.environment=test")
    made = Tracing("farhop-global", "virginia", "g1")
    trace = made.begin(None, None, "farhop.global", NOW_NS, random.Random(1))
    trace.end(NOW_NS + MS)
    assert await made.close()
    (span,) = await collector.wait_for(trace.trace_id, 1)
    assert (span.service, span.resource["service.instance.id"]) == ("edge", "pod-7")
    assert span.resource["deployment.environment"] == "test"


async def test_closing_is_bounded_though_the_collector_never_answers(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
        made = Tracing("farhop-global", "virginia", "g1")
        made.begin(None, None, "farhop.global", NOW_NS, random.Random(1)).end(NOW_NS + MS)
        took_s = unhindered()
        assert not await made.close(timeout_s=0.05)
        assert took_s() < 1.8  # below the export's own two seconds
        assert await made.close()
