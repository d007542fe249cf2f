"""Columns: what they compute for all at once is what the plain formulas say of each, and no block is ever rewritten."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import candidates, capacity, request

from farhop.balance.estimate.drift import Drift
from farhop.balance.estimate.unacknowledged import UnacknowledgedLoad
from global_lb.fleet.table import STREAM_TOKEN_BYTES, Row, Table, remaining


def row(wait_ms: float) -> Row:
    return Row(**{**dict.fromkeys(Row.__struct_fields__, 1.0), "wait_ms": wait_ms, "full": 0.0, "drift_use": 0.0})


def test_a_block_that_was_handed_out_is_not_written() -> None:
    table = Table(("a", "b"), "a")
    block, sent = table.block, table.sent
    table.write([("b", row(7.0))])
    assert not block.any()
    assert not sent.any()
    assert table.block[0].tolist() == [0.0, 1.0]
    assert table.sent[0].tolist() == [0.0, 7.0]
    assert (table.here, table.moving, table.full) == (0, {"b"}, set())


def test_what_is_sent_copies_no_more_than_what_changes_by_it() -> None:
    table = Table(("a", "b"), "a")
    table.write([("b", row(7.0))])
    block, before = table.block, table.sent
    table.write([], [("b", 9.0, 3.0, 0.5)])
    assert table.block is block
    assert (before[:, 1].tolist(), table.sent[:, 1].tolist()) == ([7.0, 1.0, 1.0], [9.0, 3.0, 0.5])
    found = Row(*table.sent[:, 1].tolist(), *table.block[:, 1].tolist())
    assert (found.wait_ms, found.slots_left, found.cache_hit_calibration) == (9.0, 3.0, 0.5)


def test_where_requests_wait_is_known_and_where_none_does_no_queue_is_reckoned() -> None:
    table = Table(("a", "b"), "a")
    table.write([("a", row(0.0)), ("b", row(7.0))])
    assert table.waited == {"b"}
    table.write([], [("a", 3.0, 1.0, 1.0), ("b", 0.0, 1.0, 1.0)])
    assert table.waited == {"a"}
    regions = {"london": {"depth": 2, "wait_ms": 0.0}, "tokyo": {"depth": 1, "wait_ms": 0.0}}
    with_queue, without = candidates(request("a"), **regions), candidates(request("a"), **regions)
    without.any_wait = False
    assert without.predicted_ms().tolist() == with_queue.predicted_ms().tolist()


def test_a_subset_of_candidates_keeps_their_figures() -> None:
    found = candidates(request("a"), london={"depth": 2}, frankfurt={"depth": 1}, tokyo={"wait_ms": 50.0})
    found.penalty_ms, found.hot = np.array([0.0, 1.0, 2.0]), frozenset({1, 2})
    part = found.only([1, 2], "out")
    assert (part.names, part.here, part.absent) == (("london", "tokyo"), 0, {"frankfurt": "out"})
    assert part.hot == {0, 1}
    for place, whole in ((0, 1), (1, 2)):
        assert part.scored(place, 1.0) == found.scored(whole, 1.0)
    assert part.predicted_ms().tolist() == found.predicted_ms()[1:].tolist()
    nobody = found.only([], "nobody")
    assert (len(nobody), nobody.here, sorted(nobody.absent)) == (0, None, ["frankfurt", "london", "tokyo"])


@given(st.floats(0, 3000), st.integers(0, 50), st.floats(0, 40), st.integers(0, 64), st.floats(0.05, 20))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_uncertainty_of_a_wait_is_that_of_its_drift(
    wait_ms: float, left: int, age_s: float, slots: int, gap_s: float
) -> None:
    drift = Drift()
    drift.reported(10.0, 50, 1.0)
    drift.reported(wait_ms, left, 1.0 + gap_s)
    found = candidates(request("a"), london={
        "wait_ms": wait_ms, "slots_free": left, "slots_total": slots, "rates": drift.rates,
    })  # fmt: skip
    now = 1.0 + gap_s + age_s
    slot_ms = 100.0 * 20.0 / max(1, slots)
    wanted = drift.uncertainty_ms(now, found.headroom().item(0), slot_ms)
    assert found.uncertainty_ms(now).item(0) == pytest.approx(wanted)


def test_headroom_is_what_slots_and_foreign_tokens_leave() -> None:
    asked = request("a", 4096)  # 1024 tokens
    found = candidates(
        asked, 100.0, "london", london={"headroom_foreign_tokens": 1.0}, tokyo={"headroom_foreign_tokens": 2048.0},
        frankfurt={"unacknowledged_bytes": 100.0},
    )  # fmt: skip
    assert dict(zip(found.names, found.headroom().tolist(), strict=True)) == {
        "frankfurt": 15.0, "london": 16.0, "tokyo": 2.0,
    }  # fmt: skip
    assert [found.scored(place, 0.0).headroom for place in range(3)] == found.headroom().tolist()
    assert found.full() == []
    assert candidates(asked, 1.0, "x", tokyo={"headroom_foreign_tokens": 0.0}).full() == [0]


@pytest.mark.parametrize(("replicas", "shared_by"), [(2, 2), (0, 1)])
def test_bytes_sent_since_the_report_are_shared_by_the_replicas(replicas: int, shared_by: int) -> None:
    load = UnacknowledgedLoad()
    load.sent(4096.0)
    wait_ms, _ = remaining(capacity(replicas_ready=replicas), load, foreign=False)
    assert wait_ms == pytest.approx(5.0 + 1024 * 0.1 / shared_by)


def test_sent_requests_take_slots_until_acknowledged() -> None:
    load = UnacknowledgedLoad()
    assert remaining(capacity(), load, foreign=False) == (5.0, 16.0)
    for _ in range(3):
        load.sent(400.0)
    wait_ms, slots_left = remaining(capacity(), load, foreign=False)
    assert (wait_ms, slots_left) == (pytest.approx(5.0 + 300 * 0.1 / 2), 13.0)
    load.acknowledged(1, 1200.0)
    assert remaining(capacity(), load, foreign=False) == (5.0, 16.0)


def test_cached_prompt_bytes_add_no_wait() -> None:
    load = UnacknowledgedLoad()
    load.sent(4000.0, 400.0)
    assert remaining(capacity(), load, foreign=False) == (pytest.approx(5.0 + 100 * 0.1 / 2), 15.0)


def test_reported_foreign_wait_applies_to_foreign_requests_only() -> None:
    load = UnacknowledgedLoad()
    for reported_ms, foreign, wait_ms in ((900.0, True, 900.0), (900.0, False, 5.0), (1.0, True, 5.0)):
        assert remaining(capacity(foreign_wait_ms=reported_ms), load, foreign=foreign)[0] == wait_ms
    load.sent(4000.0)
    assert remaining(capacity(foreign_wait_ms=900.0), load, foreign=True)[0] == pytest.approx(900.0 + 1000 * 0.1 / 2)
    waits = candidates(request("a"), 1.0, "london", london={"foreign_wait_ms": 900.0}, tokyo={"foreign_wait_ms": 900.0})
    assert [waits.scored(place, 0.0).wait_ms for place in range(2)] == [5.0, 900.0]


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_costs_hardware_by_time_and_traffic_by_size(stream: bool) -> None:
    asked = request("a", 4096, stream=stream)
    tokyo = {
        "usd_per_gpu_hour": 3.6, "egress_usd_per_gb": 0.1, "slots_total": 10, "replicas_ready": 2, "depth": 8,
        "cache_hit_calibration": 0.5,
    }  # fmt: skip
    found = candidates(asked, 50.0, "london", london={"egress_usd_per_gb": 0.09}, tokyo=tokyo)
    place = found.at["tokyo"]
    answer_bytes = 50.0 * (STREAM_TOKEN_BYTES if stream else 4.0)
    egress_usd = (asked.body_bytes * 0.09 + answer_bytes * 0.1) / 1e9
    prefill_ms = found.scored(place, 0.0).prefill_ms
    assert found.egress_usd(place) == pytest.approx(egress_usd)
    wanted = egress_usd + (prefill_ms + 50.0 * 20.0 / 5.0) * 3.6 / 3.6e6
    assert found.usd().item(place) == pytest.approx(wanted)
    assert found.scored(place, 0.0).usd == pytest.approx(wanted)
    assert found.egress_usd(found.at["london"]) == 0.0
    assert found.usd().item(found.at["london"]) == 0.0
