"""The override document: the same after a journey, and refused whole when anything in it is absurd."""

import json
import math
from datetime import UTC, datetime, timedelta, timezone

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.store.contract import override_key
from farhop.store.override import (
    DOCUMENT_LIMIT_BYTES,
    FOR_LIMIT_S,
    Override,
    OverrideError,
    decode,
    encode,
    region_of,
)

AT = datetime(2026, 5, 1, 12, 30, tzinfo=UTC)
WORD = Override(region="tokyo", why="kernel update", author="ann@ops", at=AT, for_s=1800.0, over_s=10.0)


def but(**fields: object) -> bytes:
    return json.dumps({**json.loads(encode(WORD)), **fields}).encode()


def test_it_comes_back_as_it_was_and_is_readable_with_etcdctl() -> None:
    assert decode(encode(WORD)) == WORD
    told = json.loads(encode(WORD))
    assert told["at"] == "2026-05-01T12:30:00Z"
    assert (told["action"], told["author"], told["why"], told["for_s"]) == ("drain", "ann@ops", "kernel update", 1800.0)
    assert WORD.until == AT + timedelta(minutes=30)


def test_another_zone_is_written_as_utc() -> None:
    there = msgspec.structs.replace(WORD, at=AT.astimezone(timezone(timedelta(hours=9))))
    assert encode(there) == encode(WORD)


def test_fields_of_newer_versions_are_ignored() -> None:
    assert decode(but(ticket="OPS-1")) == WORD


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("region", ""), ("region", "a/b"), ("region", "x" * 129), ("action", "pin"), ("why", " "), ("why", "a\nb"),
        ("why", "x" * 257), ("author", ""), ("author", "\x1b[2J"), ("for_s", 0.5), ("for_s", FOR_LIMIT_S + 1),
        ("for_s", -1), ("for_s", "long"), ("over_s", -1), ("over_s", 1e9), ("at", "2026-05-01T12:30:00"), ("at", "now"),
        ("at", None),
    ],
)  # fmt: skip
def test_what_is_absurd_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(OverrideError) as refused:
        decode(but(**{field: value}))
    assert refused.value.field == field


@pytest.mark.parametrize("document", [b"", b"{", b"[]", b"\xff", b"[" * 5000, but(why="x" * DOCUMENT_LIMIT_BYTES)])
def test_what_is_no_override_is_refused(document: bytes) -> None:
    with pytest.raises(OverrideError):
        decode(document)


@pytest.mark.parametrize("field", ["for_s", "over_s"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nobody_writes_what_nobody_would_read(field: str, value: float) -> None:
    with pytest.raises(OverrideError) as refused:
        encode(msgspec.structs.replace(WORD, **{field: value}))
    assert refused.value.field == field


@given(st.binary(max_size=200) | st.text(max_size=60).map(lambda t: but(why=t)))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_only_one_error_comes_of_reading(document: bytes) -> None:
    try:
        word = decode(document)
    except OverrideError:
        return
    assert decode(encode(word)) == word


def test_keys_name_their_region() -> None:
    assert region_of(override_key("tokyo")) == "tokyo"
    for key in ("/farhop/v1/override/", "/farhop/v1/override/a/b", "/farhop/v1/region/tokyo/lb/a", ""):
        assert region_of(key) is None
