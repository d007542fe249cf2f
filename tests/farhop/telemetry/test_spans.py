"""A request's trace: what goes upstream, what is kept until it ends, and what a mute leaves behind.

The cost of an unsampled request is measured by hand (stated in the module's report), never timed here.
"""

import random
import subprocess
import sys

import pytest

from farhop.telemetry import spans
from farhop.telemetry.spans import RequestTrace, Tracing

TRACE, SPAN = b"0af7651916cd43dd8448eb211c80319c", b"b7ad6b7169203331"
SAMPLED = b"00-%b-%b-01" % (TRACE, SPAN)
UNSAMPLED = b"00-%b-%b-00" % (TRACE, SPAN)


class Shelf:
    """Stands where the SDK would: keeps what was handed over."""

    def __init__(self):
        self.traces = []
        self.skipped = 0

    def export(self, trace_id, parent, tracestate, flags, pieces):
        self.traces.append((trace_id, parent, tracestate, flags, list(pieces)))


def tracing(monkeypatch, sampler: str | None = None, arg: str | None = None) -> tuple[Tracing, Shelf]:
    if sampler:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    if arg:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", arg)
    made = Tracing("farhop-global", "virginia", "g1")
    made.exporter = shelf = Shelf()
    return made, shelf


def begin(made: Tracing, traceparent=None, tracestate=None, seed=1) -> RequestTrace:
    return made.begin(traceparent, tracestate, "farhop.global", 1_000, random.Random(seed))


def test_an_unsampled_request_sends_a_valid_context_on_and_nothing_else(monkeypatch):
    made, shelf = tracing(monkeypatch, "always_off")
    trace = begin(made)
    assert not trace.sampled
    assert trace.traceparent == b"00-%b-%b-00" % (trace.trace_id.encode(), trace.traceparent[36:52])
    assert trace.tracestate is None
    assert trace.open("farhop.relay", 2_000) is trace
    trace.child("farhop.global.decide", 1, 2)
    trace.end(3_000)
    assert shelf.traces == []


def test_ids_come_from_the_rng_given(monkeypatch):
    made, _ = tracing(monkeypatch, "always_off")
    assert begin(made, seed=5).traceparent == begin(made, seed=5).traceparent
    assert begin(made, seed=5).traceparent != begin(made, seed=6).traceparent


@pytest.mark.parametrize("header", [b"", b"garbage", b"00-" + b"0" * 32 + b"-" + SPAN + b"-01", SAMPLED.upper()])
def test_a_malformed_parent_is_none_and_takes_its_tracestate_along(monkeypatch, header):
    made, _ = tracing(monkeypatch, "always_off")
    trace = begin(made, header, b"a=b")
    assert trace.traceparent == begin(made).traceparent
    assert trace.tracestate is None


def test_an_unsampled_parent_goes_on_unchanged(monkeypatch):
    made, shelf = tracing(monkeypatch, "parentbased_always_on")
    trace = begin(made, UNSAMPLED, b"a=b")
    trace.end(2)
    assert (trace.traceparent, trace.tracestate, trace.trace_id) == (UNSAMPLED, b"a=b", TRACE.decode())
    assert shelf.traces == []


def test_a_sampled_parent_is_respected_even_if_the_sampler_would_not(monkeypatch):
    made, shelf = tracing(monkeypatch, "parentbased_always_off")
    trace = begin(made, SAMPLED, b"a=b")
    assert trace.sampled
    assert trace.trace_id == TRACE.decode()
    trace.end(2)
    assert shelf.traces[0][1].span_id == SPAN
    assert shelf.traces[0][2] == b"a=b"


def test_a_sampler_that_does_not_follow_parents_does_not(monkeypatch):
    off, _ = tracing(monkeypatch, "always_off")
    assert begin(off, SAMPLED).traceparent == UNSAMPLED
    on, _ = tracing(monkeypatch, "always_on")
    trace = begin(on, UNSAMPLED)
    assert trace.sampled
    assert trace.traceparent.endswith(b"-01")


def test_a_hundredth_is_sampled_by_default_and_by_trace_id_alone(monkeypatch):
    made, _ = tracing(monkeypatch)
    rng = random.Random(11)
    traces = [made.begin(None, None, "farhop.global", 1, rng) for _ in range(20_000)]
    sampled = [trace.trace_id for trace in traces if trace.sampled]
    assert 140 <= len(sampled) <= 260  # 200 expected, 4 sigma = 57
    assert all(int(trace_id[16:], 16) < 2**64 / 100 for trace_id in sampled)


def test_the_ratio_given_is_kept(monkeypatch):
    made, _ = tracing(monkeypatch, "traceidratio", "0.5")
    assert begin(made, b"00-%b-%b-00" % (b"f" * 16 + b"7" + b"f" * 15, SPAN)).sampled
    assert not begin(made, b"00-%b-%b-01" % (b"f" * 16 + b"8" + b"0" * 15, SPAN)).sampled


def test_children_hang_below_the_root_and_upstream_below_the_open_span(monkeypatch):
    made, shelf = tracing(monkeypatch, "always_on")
    trace = begin(made)
    trace.child("farhop.global.decide", 1_100, 1_200, {"farhop.region": "tokyo"})
    relay = trace.open("farhop.relay", 1_300)
    assert relay.traceparent[3:35] == trace.traceparent[3:35]
    assert relay.traceparent[36:52] != trace.traceparent[36:52]
    assert shelf.traces == []  # nothing is exported before the end
    relay.end(1_400, {"farhop.attempt": 1}, "connect_failed")
    relay.end(9_999, None, None)
    trace.end(1_500, error="connect_failed")
    trace.end(1_600)
    ((trace_id, parent, _, flags, pieces),) = shelf.traces
    assert (trace_id.decode(), parent, flags) == (trace.trace_id, None, 1)
    assert [(piece.name, piece.kind, piece.start_ns, piece.end_ns, piece.error) for piece in pieces] == [
        ("farhop.global", "server", 1_000, 1_500, "connect_failed"),
        ("farhop.global.decide", "internal", 1_100, 1_200, None),
        ("farhop.relay", "client", 1_300, 1_400, "connect_failed"),
    ]
    assert pieces[2].span_id == relay.traceparent[36:52]


def test_the_random_flag_of_a_parent_is_kept(monkeypatch):
    made, _ = tracing(monkeypatch)
    trace = begin(made, b"00-%b-%b-03" % (TRACE, SPAN))
    assert trace.traceparent.endswith(b"-03")
    assert trace.open("farhop.relay", 2).traceparent.endswith(b"-03")


@pytest.mark.parametrize("when", range(5))
def test_a_mute_at_any_step_leaves_no_record_and_still_sends_the_context_on(monkeypatch, when):
    made, shelf = tracing(monkeypatch)
    trace = begin(made, SAMPLED, b"a=b")
    held = []
    steps = [
        lambda: trace.child("farhop.global.decide", 1, 2),
        lambda: held.append(trace.open("farhop.relay", 3)),
        lambda: [span.end(4) for span in held],
        lambda: trace.child("late", 5, 6),
    ]
    for step in steps[:when]:
        step()
    trace.mute()
    for step in steps[when:]:
        step()
    assert not trace.sampled
    assert trace.open("farhop.relay", 7).traceparent == SAMPLED
    assert trace.tracestate == b"a=b"
    trace.end(8)
    assert shelf.traces == []


def test_a_mute_without_a_parent_keeps_the_trace_id(monkeypatch):
    made, shelf = tracing(monkeypatch, "always_on")
    trace = begin(made)
    trace_id = trace.trace_id
    trace.mute()
    trace.end(2)
    assert trace.open("farhop.relay", 3).traceparent[3:35].decode() == trace_id
    assert shelf.traces == []


def test_spans_of_one_request_are_bounded_and_the_rest_counted(monkeypatch):
    made, shelf = tracing(monkeypatch, "always_on")
    trace = begin(made)
    for at in range(spans.SPANS_MAX + 9):
        trace.child("farhop.regional.pick", at, at)
    assert trace.open("farhop.relay", 1).traceparent == trace.traceparent
    trace.end(2)
    assert len(shelf.traces[0][4]) == spans.SPANS_MAX
    assert made.skipped == 11


def test_without_an_exporter_the_choice_still_goes_on(monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    made = Tracing("farhop-global", "virginia", "g1")
    trace = begin(made)
    assert made.exporter is None
    assert not trace.sampled
    assert trace.traceparent.endswith(b"-01")
    assert begin(made, SAMPLED, b"a=b").traceparent == SAMPLED


def test_a_disabled_sdk_passes_everything_through(monkeypatch):
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    made = Tracing("farhop-global", "virginia", "g1")
    assert made.exporter is None
    assert begin(made).traceparent.endswith(b"-00")
    assert begin(made, SAMPLED, b"a=b").traceparent == SAMPLED
    assert begin(made, UNSAMPLED).traceparent == UNSAMPLED


def test_a_process_without_an_exporter_does_not_load_the_sdk():
    code = (
        "import sys; from farhop.telemetry.spans import Tracing; Tracing('s', 'r', 'i'); "
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "value", "protocol", "says"),
    [
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json", "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/json"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon", "grpc", "soon"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip", "grpc", "OTEL_EXPORTER_OTLP_COMPRESSION"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nowhere/ca.pem", "grpc", "OTEL_EXPORTER_OTLP_CERTIFICATE=/nowhere/ca.pem"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "1", "http/protobuf", "max_export_batch_size"),
    ],
)
async def test_problems_are_logged_and_cost_only_the_spans(monkeypatch, name, value, protocol, says):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv(name, value)
    made = Tracing("farhop-global", "virginia", "g1")
    assert made.exporter is None
    assert says in made.problems[0]
    assert begin(made).trace_id
    assert await made.flush()
    assert await made.close()
