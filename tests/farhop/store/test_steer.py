"""Biases and pins as documents: trusted whole or refused whole, under keys that hold any name."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.store import steer
from farhop.store.override import OverrideError
from farhop.store.steer import BiasWord, PinWord

AT = datetime(2026, 5, 1, tzinfo=UTC)
SAID = {"why": "test", "author": "ann", "at": AT, "for_s": 60.0}


def bias(**fields) -> BiasWord:
    return BiasWord(**{"region": "tokyo", "ms": 5.0, **SAID, **fields})


def pin(**fields) -> PinWord:
    return PinWord(**{"region": "tokyo", "tenant": "acme", **SAID, **fields})


@pytest.mark.parametrize("word", [bias(), bias(ms=-60_000.0), pin(), pin(strict=True), pin(tenant="", model="a/b c")])
def test_a_word_comes_back_as_it_went(word) -> None:
    assert steer.decode(steer.encode(word)) == word
    assert word.until.timestamp() == AT.timestamp() + 60.0


@pytest.mark.parametrize(
    ("word", "field"),
    [
        (bias(ms=60_001.0), "ms"), (bias(ms=float("nan")), "ms"), (bias(region=""), "region"), (bias(why=" "), "why"),
        (bias(author="x" * 129), "author"), (bias(for_s=0.5), "for_s"), (bias(for_s=float("nan")), "for_s"),
        (bias(at=datetime(1960, 1, 1, tzinfo=UTC)), "at"), (pin(tenant=""), "tenant"), (pin(model="m"), "tenant"),
        (pin(tenant="a\nb"), "tenant"), (pin(tenant="", model="m" * 257), "model"),
    ],
)  # fmt: skip
def test_what_is_outside_its_domain_is_refused_by_writer_and_reader(word, field: str) -> None:
    with pytest.raises(OverrideError) as refused:
        steer.encode(word)
    assert refused.value.field == field


@pytest.mark.parametrize(
    "document",
    [b"", b"{}", b"[]", b'{"action": "drain"}', b"\xff", b"[" * 20_000, b'{"action": "bias"}'],
)
def test_what_is_no_word_is_refused(document: bytes) -> None:
    with pytest.raises(OverrideError):
        steer.decode(document)


@given(st.text(min_size=1, max_size=20), st.text(min_size=1, max_size=20))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_two_names_never_share_a_key(one: str, other: str) -> None:
    keys = {steer.pin_key(one, ""), steer.pin_key("", one), steer.pin_key(other, ""), steer.bias_key(one)}
    assert len(keys) == 3 + (one != other)
    assert all(key.startswith("/farhop/v1/steer/") and key.count("/") <= 6 for key in keys)
