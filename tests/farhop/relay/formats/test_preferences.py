"""A residency is read as it is written or refused: nothing that a client says of it is left out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhop.relay.formats import preferences
from farhop.relay.formats.prompt import NO_PREFERENCES, BodyError


@given(st.sampled_from(preferences.RESIDENCY), st.none() | st.integers() | st.text(max_size=80) | st.lists(st.text()))
def test_a_residency_is_read_or_refused_and_never_left_out(field: str, value: Any) -> None:
    readable = isinstance(value, str) and 0 < len(value) <= 64 and value.isascii() and value.isprintable()
    if value is None or readable:
        read = preferences.read({field: value, "model": "m"})
        assert read.residency == (() if value is None else ((field, value.strip().lower()),))
        return
    with pytest.raises(BodyError) as caught:
        preferences.read({field: value, "model": "m"})
    assert caught.value.param == field


def test_both_residency_fields_and_both_user_fields_are_read() -> None:
    read = preferences.read({"inference_geo": "EU", "data_residency": "de", "user": "u", "service_tier": "flex"})
    assert read.residency == (("inference_geo", "eu"), ("data_residency", "de"))
    assert (read.geo, read.user, read.tier) == ("eu", "u", "flex")
    assert preferences.read({"safety_identifier": "s"}).user == "s"
    assert preferences.read({"user": "u", "safety_identifier": "s"}).user == "u"
    assert preferences.read({"user": 7, "safety_identifier": "s"}).user == "s"


@pytest.mark.parametrize("fields", [None, [], {}, {"model": "m"}, "x"])
def test_a_request_without_preferences_costs_nothing(fields: Any) -> None:
    assert preferences.read(fields) is NO_PREFERENCES
