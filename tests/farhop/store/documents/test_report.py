"""The report: the same through JSON and protobuf, and refused whole when anything in it is absurd."""

import json
import math
import tracemalloc

import msgspec
import pytest
from farhop_wire import region_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.store.documents.document import DocumentError
from farhop.store.documents.report import (
    COUNT_LIMIT,
    DOCUMENT_LIMIT_BYTES,
    INCARNATION_LIMIT,
    WAIT_LIMIT_MS,
    ModelReport,
    RegionReport,
    check,
    decode,
    encode,
    from_wire,
    to_wire,
)

MODEL = ModelReport(
    model="meta-llama/Llama-3.1-8B",
    version="v2",
    replicas_ready=3,
    replicas_total=4,
    slots_total=256,
    slots_free=200,
    kv_tokens_total=400_000,
    kv_tokens_free=100_000,
    in_flight=56,
    queued_requests=2,
    queued_tokens=9000,
    wait_ms=12.5,
    prefill_ms_per_token=0.05,
    tpot_ms=18.0,
    bytes_per_token=4.2,
    usable_share=0.75,
    headroom_foreign_tokens=50_000,
    gpu_types=("H100-80GB", "L40S"),
)
REPORT = RegionReport(
    region="frankfurt",
    instance="lb-0",
    incarnation=1_700_000_000_000_000_000,
    seq=42,
    clock_ms=123456.75,
    tier_address="10.0.0.7:8201",
    control_address="10.0.0.7:8202",
    admin_address="[fd00::7]:8290",
    draining=True,
    models=(MODEL,),
    accepted_bytes={"global-tokyo-0": 1234.5},
    client_url="https://eu.example:8443",
    hop_version=3,
)

counts = st.integers(0, COUNT_LIMIT)
texts = st.text(st.characters(codec="utf-8", categories=["L", "N", "P"]), min_size=1, max_size=40)


@st.composite
def models(draw):
    parts = {whole: draw(counts) for whole in ("replicas_total", "slots_total", "kv_tokens_total")}
    return ModelReport(
        model=draw(texts),
        version=draw(st.just("") | texts),
        replicas_ready=draw(st.integers(0, parts["replicas_total"])),
        slots_free=draw(st.integers(0, parts["slots_total"])),
        kv_tokens_free=draw(st.integers(0, parts["kv_tokens_total"])),
        in_flight=draw(counts),
        queued_requests=draw(counts),
        queued_tokens=draw(counts),
        wait_ms=draw(st.floats(0, WAIT_LIMIT_MS)),
        foreign_wait_ms=draw(st.floats(0, WAIT_LIMIT_MS)),
        prefill_ms_per_token=draw(st.floats(0, 100)),
        tpot_ms=draw(st.floats(0, 1000)),
        bytes_per_token=draw(st.floats(0.1, 100)),
        usable_share=draw(st.floats(0, 1)),
        headroom_foreign_tokens=draw(counts),
        gpu_types=tuple(draw(st.lists(texts, max_size=3))),
        max_model_len=draw(counts),
        root=draw(st.just("") | texts),
        parent=draw(st.just("") | texts),
        **parts,
    )


reports = st.builds(
    RegionReport,
    region=st.from_regex(r"[a-z][a-z0-9-]{0,20}", fullmatch=True),
    instance=st.from_regex(r"[a-z][a-z0-9.-]{0,20}", fullmatch=True),
    incarnation=st.integers(0, INCARNATION_LIMIT),
    seq=counts,
    clock_ms=st.floats(0, 1e15),
    tier_address=st.sampled_from(["a:1", "10.1.2.3:65535", "[::1]:80", "lb-0.lb.svc.cluster.local:8201"]),
    control_address=st.sampled_from(["a:2", "[::1]:81"]),
    admin_address=st.sampled_from(["", "b:2"]),
    draining=st.booleans(),
    models=st.lists(models(), max_size=3, unique_by=lambda model: (model.model, model.version)).map(tuple),
    accepted_bytes=st.dictionaries(texts, st.floats(0, 1e12), max_size=3),
    client_url=st.sampled_from(["", "http://a", "https://a.b-c_d:1", "https://[fd00::1]:8443"]),
    hop_version=st.integers(0, 2**31 - 1),
)


@given(reports)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_sound_report_comes_back_as_it_was(report):
    assert decode(encode(report)) == report
    message = to_wire(report)
    assert from_wire(region_pb2.Report.FromString(message.SerializeToString())) == report


def test_json_fields_are_the_proto_fields_in_its_order():
    for struct, descriptor, streamed in (
        (RegionReport, region_pb2.Report.DESCRIPTOR, {"outputs"}),  # for new readers, over gRPC only: never in etcd
        (ModelReport, region_pb2.ModelCapacity.DESCRIPTOR, set()),
    ):
        assert set(struct.__struct_fields__) | streamed == {field.name for field in descriptor.fields}
    document = json.loads(encode(REPORT))
    assert list(document) == list(RegionReport.__struct_fields__)
    assert list(document["models"][0]) == list(ModelReport.__struct_fields__)
    assert document["models"][0]["gpu_types"] == ["H100-80GB", "L40S"]


def test_fields_of_a_newer_balancer_are_ignored():
    document = json.loads(encode(REPORT))
    document["colour"] = document["models"][0]["colour"] = "green"
    assert decode(json.dumps(document).encode()) == REPORT


BAD_MODEL = [
    *((name, -1) for name in ("replicas_total", "slots_free", "kv_tokens_free", "in_flight", "queued_requests")),
    *((name, -1) for name in ("queued_tokens", "headroom_foreign_tokens", "replicas_ready", "slots_total")),
    *((name, -0.5) for name in ("wait_ms", "foreign_wait_ms", "prefill_ms_per_token", "tpot_ms", "bytes_per_token")),
    *((name, bad) for name in ("wait_ms", "tpot_ms", "usable_share") for bad in (math.nan, math.inf, -math.inf)),
    *(("foreign_wait_ms", bad) for bad in (math.nan, math.inf, WAIT_LIMIT_MS * 1.01)),
    ("wait_ms", WAIT_LIMIT_MS * 1.01),
    ("kv_tokens_total", COUNT_LIMIT + 1),
    ("bytes_per_token", 0.0),
    ("usable_share", 1.0001),
    ("slots_free", 257),
    ("kv_tokens_free", 400_001),
    ("replicas_ready", 5),
    ("model", ""),
    ("model", "a\nb"),
    ("version", "x" * 300),
    ("gpu_types", ("",)),
    ("gpu_types", ("x",) * 33),
]
BAD_REPORT = [
    ("region", ""),
    ("region", "a/b"),
    ("instance", ""),
    ("instance", "x" * 129),
    ("incarnation", -1),
    ("incarnation", INCARNATION_LIMIT + 1),
    ("seq", -1),
    ("clock_ms", math.nan),
    ("clock_ms", -1.0),
    *(("tier_address", bad) for bad in ("", "nowhere", "host:", ":80", "host:0", "host:65536", "a b:1", "::1:80")),
    ("admin_address", "host:٣"),
    *(
        ("client_url", url)
        for url in (
            "a:1",
            "ftp://a",
            "http://",
            "https://a/b",
            "https://a?b",
            "http://u@a",
            "http://a:1\r\nx: y",
            "http://ä",
        )
    ),
    ("accepted_bytes", {"": 1.0}),
    ("accepted_bytes", {"g": -1.0}),
    ("accepted_bytes", {"g": math.inf}),
    ("models", (MODEL, MODEL)),
    ("models", tuple(msgspec.structs.replace(MODEL, model=str(number)) for number in range(257))),
]


@pytest.mark.parametrize(("field", "value"), BAD_MODEL)
def test_an_absurd_model_is_refused_by_name_on_every_path(field, value):
    report = msgspec.structs.replace(REPORT, models=(msgspec.structs.replace(MODEL, **{field: value}),))
    for path in (check, encode, to_wire):
        with pytest.raises(DocumentError) as caught:
            path(report)
        assert caught.value.field == f"models[0].{field}"


@pytest.mark.parametrize(("field", "value"), BAD_REPORT)
def test_an_absurd_report_is_refused_by_name(field, value):
    report = msgspec.structs.replace(REPORT, **{field: value})
    with pytest.raises(DocumentError) as caught:
        encode(report)
    assert caught.value.field.startswith(field)
    assert caught.value.field in str(caught.value)


@pytest.mark.parametrize(
    ("document", "field"),
    [
        (b"", ""),
        (b"{", ""),
        (b"[]", ""),
        (b"\xff\xfe", ""),
        (b"[" * 100_000, ""),
        (encode(REPORT).replace(b'"seq":42', b'"seq":"42"'), "seq"),
        (encode(REPORT).replace(b'"seq":42,', b""), ""),
        (encode(REPORT).replace(b'"slots_free":200', b'"slots_free":null'), "models[0].slots_free"),
        (encode(REPORT).replace(b'"slots_free":200', b'"slots_free":-200'), "models[0].slots_free"),
        (encode(REPORT).replace(b'"wait_ms":12.5', b'"wait_ms":NaN'), ""),
        (encode(REPORT).replace(b'"wait_ms":12.5', b'"wait_ms":1e999'), "models[0].wait_ms"),
        (encode(REPORT).ljust(DOCUMENT_LIMIT_BYTES + 1), ""),
    ],
)
def test_a_bad_document_is_refused(document, field):
    with pytest.raises(DocumentError) as caught:
        decode(document)
    assert caught.value.field == field


def test_a_bad_message_is_refused():
    message = to_wire(REPORT)
    message.models[0].tpot_ms = math.nan
    with pytest.raises(DocumentError, match="tpot_ms"):
        from_wire(message)
    with pytest.raises(DocumentError, match="region"):
        from_wire(region_pb2.Report())
    message = to_wire(REPORT)
    message.models.extend([message.models[0]] * 300)
    with pytest.raises(DocumentError, match="at most 256"):
        from_wire(message)
    message = to_wire(REPORT)
    message.accepted_bytes.update({str(number): 1.0 for number in range(50_000)})
    tracemalloc.start()
    with pytest.raises(DocumentError, match="at most 4096"):
        from_wire(message)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000, "it is counted before it is copied"


def test_a_report_too_large_is_refused_by_its_sender():
    tokens = {f"{number:0250d}": 1.0 for number in range(2000)}
    with pytest.raises(DocumentError, match="document of"):
        encode(msgspec.structs.replace(REPORT, accepted_bytes=tokens))
