"""Drains, biases and pins as documents: the same after a journey, refused whole when anything in them is absurd."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime, timedelta, timezone

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.store.contract import override_key
from farhop.store.documents.document import DocumentError
from farhop.store.documents.overrides import (
    DOCUMENT_LIMIT_BYTES,
    FOR_LIMIT_S,
    BiasOverride,
    DrainOverride,
    EntryDrainOverride,
    PinOverride,
    RefuseOverride,
    bias_key,
    decode_drain,
    decode_entry_drain,
    decode_refusal,
    decode_routing,
    encode,
    pin_key,
    region_of,
)
from farhop.store.envelope import kind_of

AT = datetime(2026, 5, 1, 12, 30, tzinfo=UTC)
SAID = {"why": "kernel update", "author": "ann@ops", "at": AT, "for_s": 1800.0}
DRAIN = DrainOverride(region="tokyo", **SAID, over_s=10.0)


def bias(**fields) -> BiasOverride:
    return BiasOverride(**{"region": "tokyo", "ms": 5.0, **SAID, **fields})


def pin(**fields) -> PinOverride:
    return PinOverride(**{"region": "tokyo", "tenant": "acme", **SAID, **fields})


def refusal(**fields) -> RefuseOverride:
    return RefuseOverride(**{"region": "tokyo", **SAID, **fields})


def but(**fields: object) -> bytes:
    return json.dumps({**json.loads(encode(DRAIN)), **fields}).encode()


@pytest.mark.parametrize(
    "override", [DRAIN, bias(), bias(ms=-60_000.0), pin(), pin(strict=True), pin(tenant="", model="a/b c")]
)
def test_an_override_is_read_as_it_was_written_and_is_readable_with_etcdctl(override) -> None:
    document = encode(override)
    assert (decode_drain if override is DRAIN else decode_routing)(document) == override
    body = json.loads(document)
    assert (body["at"], body["for_s"]) == ("2026-05-01T12:30:00Z", 1800.0)
    assert (body["author"], body["why"]) == ("ann@ops", "kernel update")
    assert body["action"] in type(override).__name__.lower()
    assert override.until == AT + timedelta(minutes=30)


def test_another_zone_is_written_as_utc() -> None:
    there = msgspec.structs.replace(DRAIN, at=AT.astimezone(timezone(timedelta(hours=9))))
    assert encode(there) == encode(DRAIN)


def test_fields_of_newer_versions_are_ignored_and_a_drain_need_not_say_that_it_is_one() -> None:
    assert decode_drain(but(ticket="OPS-1")) == DRAIN
    bare = {field: value for field, value in json.loads(encode(DRAIN)).items() if field != "action"}
    assert decode_drain(json.dumps(bare).encode()) == DRAIN


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("region", ""), ("region", "a/b"), ("region", "x" * 129), ("action", "pin"), ("why", " "), ("why", "a\nb"),
        ("why", "x" * 257), ("author", ""), ("author", "\x1b[2J"), ("for_s", 0.5), ("for_s", FOR_LIMIT_S + 1),
        ("for_s", -1), ("for_s", "long"), ("over_s", -1), ("over_s", 1e9), ("at", "2026-05-01T12:30:00"), ("at", "now"),
        ("at", None),
    ],
)  # fmt: skip
def test_a_field_outside_its_domain_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(DocumentError) as refused:
        decode_drain(but(**{field: value}))
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("override", "field"),
    [
        (bias(ms=60_001.0), "ms"), (bias(ms=float("nan")), "ms"), (bias(region=""), "region"), (bias(why=" "), "why"),
        (bias(author="x" * 129), "author"), (bias(for_s=0.5), "for_s"), (bias(for_s=float("nan")), "for_s"),
        (bias(at=datetime(1960, 1, 1, tzinfo=UTC)), "at"), (pin(tenant=""), "tenant"), (pin(model="m"), "tenant"),
        (pin(tenant="a\nb"), "tenant"), (pin(tenant="", model="m" * 257), "model"),
        *((msgspec.structs.replace(DRAIN, **{field: value}), field) for field in ("for_s", "over_s")
          for value in (math.nan, math.inf)),
    ],
)  # fmt: skip
def test_a_document_that_balancers_would_refuse_is_not_written(override, field: str) -> None:
    with pytest.raises(DocumentError) as refused:
        encode(override)
    assert refused.value.field == field


@pytest.mark.parametrize("document", [b"", b"{", b"[]", b"{}", b"\xff", b"[" * 20_000, b'{"action": "bias"}'])
@pytest.mark.parametrize("decode", [decode_drain, decode_routing])
def test_a_document_that_is_no_override_is_refused(decode, document: bytes) -> None:
    with pytest.raises(DocumentError):
        decode(document)


def test_no_reader_takes_the_other_kind_or_what_is_too_long() -> None:
    for decode, document in (
        (decode_routing, encode(DRAIN)), (decode_drain, encode(bias())),
        (decode_drain, but(why="x" * DOCUMENT_LIMIT_BYTES)),
    ):  # fmt: skip
        with pytest.raises(DocumentError):
            decode(document)


@given(st.binary(max_size=200) | st.text(max_size=60).map(lambda text: but(why=text)))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_only_one_error_comes_of_reading(document: bytes) -> None:
    try:
        override = decode_drain(document)
    except DocumentError:
        return
    assert decode_drain(encode(override)) == override


def test_keys_name_their_region() -> None:
    assert DRAIN.key == override_key("tokyo")
    assert region_of(override_key("tokyo")) == "tokyo"
    for key in ("/farhop/v1/override/", "/farhop/v1/override/a/b", "/farhop/v1/region/tokyo/lb/a", ""):
        assert region_of(key) is None


@given(st.text(min_size=1, max_size=20), st.text(min_size=1, max_size=20))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_two_names_never_share_a_key(one: str, other: str) -> None:
    keys = {pin_key(one, ""), pin_key("", one), pin_key(other, ""), bias_key(one)}
    assert len(keys) == 3 + (one != other)
    assert all(key.startswith("/farhop/v1/steer/") and key.count("/") <= 6 for key in keys)


def test_an_entry_s_drain_is_stored_under_its_region_so_the_same_operators_may_set_it() -> None:
    drain = EntryDrainOverride(region="tokyo", entry="tokyo-1", **SAID, over_s=10.0)
    assert decode_entry_drain(encode(drain)) == drain
    assert kind_of(drain.key) == ("drain", "tokyo")
    assert drain.key.endswith("/tokyo/tokyo-1")
    for entry in ("", "a/b", "x" * 129):
        with pytest.raises(DocumentError, match=r"^entry: "):
            encode(msgspec.structs.replace(drain, entry=entry))


@pytest.mark.parametrize("override", [refusal(), refusal(model="meta/llama 3", share=0.25)])
def test_a_refusal_comes_back_as_it_was(override: RefuseOverride) -> None:
    assert decode_refusal(encode(override)) == override
    assert kind_of(override.key) == ("drain", "tokyo")
    assert override.key.startswith(refusal().key)


@pytest.mark.parametrize(
    "fields",
    [{"share": 0.0}, {"share": 1.5}, {"share": math.nan}, {"model": "x" * 300}, {"region": "a/b"}, {"why": ""}],
)
def test_an_absurd_refusal_is_none(fields: dict[str, object]) -> None:
    with pytest.raises(DocumentError):
        encode(refusal(**fields))
