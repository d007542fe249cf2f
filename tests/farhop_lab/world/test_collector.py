"""The lab's collector: real OTLP over HTTP in, bounded traces and text trees out, bad payloads refused unharmed."""

import asyncio
import gzip
import socket

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from farhop_lab.world import collector as module
from farhop_lab.world.collector import PROTOBUF, Collector, PayloadError, SpanRecord, decode, tree

TRACE = "0af7651916cd43dd8448eb211c80319c"
MS = 1_000_000


def payload(*spans: dict, service: str = "farhop-global") -> bytes:
    """An export of spans given as protobuf fields; ids are filled in where missing."""
    message = ExportTraceServiceRequest()
    group = message.resource_spans.add()
    group.resource.attributes.add(key="service.name").value.string_value = service
    for number, fields in enumerate(spans, 1):
        ids = {"trace_id": bytes.fromhex(TRACE), "span_id": number.to_bytes(8, "big")}
        group.scope_spans.add().spans.add(**{**ids, **fields})
    return message.SerializeToString()


def record(span_id: str, parent_id: str = "", start_ms: int = 0, end_ms: int = 10, **more) -> SpanRecord:
    fields = {"name": span_id, "service": "s", "kind": "internal", "attributes": {}, "status": "unset", **more}
    return SpanRecord(TRACE, span_id, parent_id, start_ns=start_ms * MS, end_ns=end_ms * MS, **fields)


@pytest.fixture
async def collector():
    made = Collector()
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def client(collector):
    async with aiohttp.ClientSession(collector.endpoint) as session:
        yield session


async def post(client, body: bytes, **headers: str) -> tuple[int, bytes]:
    sent = {"content-type": PROTOBUF, **{name.replace("_", "-"): value for name, value in headers.items()}}
    async with client.post("/v1/traces", data=body, headers=sent) as answer:
        return answer.status, await answer.read()


@pytest.mark.parametrize("compressed", [False, True])
async def test_spans_come_in_and_can_be_read_back(collector, client, compressed):
    body = payload({"name": "farhop.global", "kind": 2, "start_time_unix_nano": 5, "end_time_unix_nano": 9})
    if compressed:
        status, answer = await post(client, gzip.compress(body, mtime=0), content_encoding="gzip")
    else:
        status, answer = await post(client, body)
    assert status == 200
    assert not ExportTraceServiceResponse.FromString(answer).HasField("partial_success")
    (span,) = collector.trace(TRACE)
    assert (span.name, span.service, span.kind, span.parent_id) == ("farhop.global", "farhop-global", "server", "")
    assert (span.start_ns, span.end_ns, span.status) == (5, 9, "unset")
    assert collector.trace_ids() == [TRACE]


async def test_a_trace_is_shown_as_json(collector, client):
    await post(client, payload({"name": "root", "end_time_unix_nano": 2 * MS}))
    async with client.get(f"/traces/{TRACE.upper()}") as answer:
        shown = await answer.json()
    assert shown["tree"] == ["root  2.0 ms  [farhop-global]"]
    assert shown["spans"][0]["span_id"] == "0000000000000001"
    async with client.get("/traces") as answer:
        assert await answer.json() == {"traces": [TRACE]}
    async with client.get("/healthz") as answer:
        assert await answer.json() == {"traces": 1, "received": 1, "dropped": 0}


async def test_an_unknown_trace_is_404_with_the_likely_reasons(client):
    async with client.get("/traces/none") as answer:
        assert answer.status == 404
        assert "not sampled" in (await answer.json())["error"]["message"]


@pytest.mark.parametrize(
    ("body", "headers", "status", "says"),
    [
        (b"\xff\xff\xff\xff", {}, 400, b"not an OTLP"),
        (payload({"trace_id": b"short"}), {}, 400, b"wrong length"),
        (payload({"parent_span_id": b"abc"}), {}, 400, b"wrong length"),
        (b"{}", {"content_type": "application/json"}, 415, b"send application/x-protobuf"),
        (b"x", {"content_encoding": "br"}, 415, b"send gzip or none"),
        (b"not gzip at all", {"content_encoding": "gzip"}, 400, b"not gzip"),
        (gzip.compress(payload({}), mtime=0)[:-12], {"content_encoding": "gzip"}, 400, b"cut short"),
    ],
)
async def test_a_bad_payload_is_refused_and_changes_nothing(collector, client, body, headers, status, says):
    got, answer = await post(client, body, **headers)
    assert (got, says in answer) == (status, True), answer
    assert collector.trace_ids() == []
    assert (await post(client, payload({"name": "next"})))[0] == 200


async def test_one_bad_span_refuses_the_whole_export(collector):
    with pytest.raises(PayloadError, match="'second'"):
        collector.take(payload({"name": "first"}, {"name": "second", "span_id": b""}))
    assert collector.trace_ids() == []


async def test_a_payload_that_unpacks_past_the_bound_is_refused(client):
    bomb = gzip.compress(bytes(module.PAYLOAD_BYTES_MAX + 1))
    status, answer = await post(client, bomb, content_encoding="gzip")
    assert status == 413, answer


async def test_the_collector_keeps_only_the_newest_traces():
    held = Collector(traces_max=2)
    for number in range(1, 4):
        held.take(payload({"trace_id": number.to_bytes(16, "big")}))
    assert held.trace_ids() == [f"{number:032x}" for number in (2, 3)]


async def test_spans_of_a_trace_are_bounded_and_the_sender_is_answered(collector, client, monkeypatch):
    monkeypatch.setattr(module, "SPANS_PER_TRACE_MAX", 3)
    _, answer = await post(client, payload(*[{"name": str(number)} for number in range(5)]))
    assert ExportTraceServiceResponse.FromString(answer).partial_success.rejected_spans == 2
    assert len(collector.trace(TRACE)) == 3
    assert collector.dropped == 2


async def test_a_span_sent_twice_is_held_once(collector):
    collector.take(payload({"name": "a"}))
    collector.take(payload({"name": "a"}))
    assert len(collector.trace(TRACE)) == 1


async def test_waiting_ends_when_the_spans_are_there_or_the_time_is_over(collector):
    waiting = asyncio.create_task(collector.wait_for(TRACE, 2))
    await asyncio.sleep(0)
    collector.take(payload({"name": "a"}))
    collector.take(payload({"name": "b", "span_id": b"12345678"}))
    assert {span.name for span in await waiting} == {"a", "b"}
    assert await collector.wait_for("none", timeout_s=0.01) == []


async def test_a_taken_port_is_an_error_and_stopping_twice_is_none(collector):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        await Collector().start(port=taken.getsockname()[1])
    await collector.stop()
    await collector.stop()


def test_attributes_of_every_kind_and_unknown_enums():
    message = ExportTraceServiceRequest()
    span = message.resource_spans.add().scope_spans.add().spans.add(trace_id=b"t" * 16, span_id=b"s" * 8, kind=99)
    span.status.code = 2
    span.status.message = "stalled"
    values = {"text": ("string_value", "x"), "yes": ("bool_value", True), "many": ("int_value", 5),
              "some": ("double_value", 1.5), "raw": ("bytes_value", b"\x01")}  # fmt: skip
    for name, (field, value) in values.items():
        setattr(span.attributes.add(key=name).value, field, value)
    span.attributes.add(key="list").value.array_value.values.add().string_value = "y"
    span.attributes.add(key="map").value.kvlist_value.values.add(key="k").value.int_value = 1
    span.attributes.add(key="nothing")
    (read,) = decode(message.SerializeToString())
    assert read.attributes == {
        "text": "x", "yes": True, "many": 5, "some": 1.5, "raw": "01", "list": ["y"], "map": "{'k': 1}",
        "nothing": None,
    }  # fmt: skip
    assert (read.kind, read.status, read.status_text, read.service) == ("unspecified", "error", "stalled", "unknown")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.binary(max_size=200))
def test_garbage_never_raises_anything_else(body):
    try:
        list(decode(body))
    except PayloadError:
        pass  # refused, as garbage should be
    else:
        ExportTraceServiceRequest.FromString(body)  # it was valid after all


def test_a_tree_shows_durations_errors_and_attributes():
    spans = [
        record("c", "b", 2, 4, attributes={"farhop.region": "tokyo", "gen_ai.usage.output_tokens": 12}),
        record("a", "client-span", 0, 10, service="farhop-global"),
        record("d", "b", 5, 6, status="error", status_text="stalled"),
        record("b", "a", 1, 9, attributes={"farhop.wait_ms": 1.23456, "farhop.lawful": ["tokyo", "paris"]}),
        record("e", "a", 9, 10),
    ]
    assert tree(spans) == [
        "a  10.0 ms  [farhop-global]",
        "├─ b  8.0 ms  [s]  lawful=tokyo,paris wait_ms=1.235",
        "│  ├─ c  2.0 ms  [s]  region=tokyo usage.output_tokens=12",
        "│  └─ d  1.0 ms  [s]  ERROR stalled",
        "└─ e  1.0 ms  [s]",
    ]
    assert tree([]) == []


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-1, 12), st.integers(0, 5)), unique_by=lambda span: span[0]))
def test_every_span_is_in_the_tree_once_for_any_parents(spans):
    records = [record(f"n{own}", f"n{parent}" if parent >= 0 else "", at) for own, parent, at in spans]
    names = sorted(line.lstrip("│├└─ ").split("  ")[0] for line in tree(records))
    assert names == sorted(span.name for span in records)
