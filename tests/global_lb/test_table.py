"""Columns: what they compute for all at once is what the plain formulas say of each, and no block is ever rewritten."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import field, request

from farhop.balance.drift import Drift
from global_lb.row import Row
from global_lb.table import Table


def row(wait_ms: float) -> Row:
    return Row(**{**dict.fromkeys(Row.__struct_fields__, 1.0), "wait_ms": wait_ms, "full": 0.0, "drift_use": 0.0})


def test_a_block_that_was_handed_out_is_not_written() -> None:
    table = Table(("a", "b"), "a")
    before = table.block
    table.write([("b", row(7.0))])
    assert before[1].tolist() == [0.0, 0.0]
    assert table.block[1].tolist() == [0.0, 7.0]
    assert (table.here, table.moving, table.full) == (0, {"b"}, set())


def test_a_part_of_a_field_is_the_same_for_those_in_it() -> None:
    told = field(request("a"), london={"depth": 2}, frankfurt={"depth": 1}, tokyo={"wait_ms": 50.0})
    told.penalty_ms, told.hot = np.array([0.0, 1.0, 2.0]), frozenset({1, 2})
    part = told.only([1, 2], "out")
    assert (part.names, part.here, part.absent) == (("london", "tokyo"), 0, {"frankfurt": "out"})
    assert part.hot == {0, 1}
    for place, whole in ((0, 1), (1, 2)):
        assert part.scored(place, 1.0) == told.scored(whole, 1.0)
    assert part.predicted_ms().tolist() == told.predicted_ms()[1:].tolist()
    nobody = told.only([], "nobody")
    assert (len(nobody), nobody.here, sorted(nobody.absent)) == (0, None, ["frankfurt", "london", "tokyo"])


@given(st.floats(0, 3000), st.integers(0, 50), st.floats(0, 40), st.integers(0, 64), st.floats(0.05, 20))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_doubt_is_that_of_a_drift(wait_ms: float, left: int, age_s: float, slots: int, gap_s: float) -> None:
    drift = Drift()
    drift.reported(10.0, 50, 1.0)
    drift.reported(wait_ms, left, 1.0 + gap_s)
    told = field(request("a"), london={
        "wait_ms": wait_ms, "slots_free": left, "slots_total": slots, "rates": drift.rates,
    })  # fmt: skip
    now = 1.0 + gap_s + age_s
    slot_ms = 100.0 * 20.0 / max(1, slots)
    wanted = drift.doubt_ms(now, told.headroom().item(0), slot_ms)
    assert told.doubt_ms(now).item(0) == pytest.approx(wanted)


def test_headroom_is_what_slots_and_foreign_tokens_leave() -> None:
    asked = request("a", 4096)  # 1024 tokens
    told = field(
        asked, 100.0, "london", london={"headroom_foreign_tokens": 1.0}, tokyo={"headroom_foreign_tokens": 2048.0},
        frankfurt={"unacknowledged_bytes": 100.0},
    )  # fmt: skip
    assert dict(zip(told.names, told.headroom().tolist(), strict=True)) == {
        "frankfurt": 15.0, "london": 16.0, "tokyo": 2.0,
    }  # fmt: skip
    assert [told.scored(place, 0.0).headroom for place in range(3)] == told.headroom().tolist()
    assert told.full() == []
    assert field(asked, 1.0, "x", tokyo={"headroom_foreign_tokens": 0.0}).full() == [0]
