"""A region in numbers: what was sent since its report, and what a request costs there."""

from __future__ import annotations

import pytest
from worlds import capacity, field, request

from farhop.balance import cost
from farhop.balance.reckoning import Reckoning
from global_lb.row import reckoned_wait_ms, sent_of
from global_lb.table import STREAM_TOKEN_BYTES


def test_what_was_sent_since_the_report_is_shared_by_the_replicas() -> None:
    assert reckoned_wait_ms(capacity(), 0.0) == 5.0
    assert reckoned_wait_ms(capacity(replicas_ready=2), 4096.0) == pytest.approx(5.0 + 1024 * 0.1 / 2)
    assert reckoned_wait_ms(capacity(replicas_ready=0), 4096.0) == pytest.approx(5.0 + 1024 * 0.1)


def test_what_was_sent_takes_slots_until_it_is_acknowledged() -> None:
    reckoning = Reckoning()
    assert sent_of(capacity(), reckoning) == (5.0, 16.0)
    for _ in range(3):
        reckoning.sent(400.0)
    wait_ms, left = sent_of(capacity(), reckoning)
    assert (wait_ms, left) == (pytest.approx(5.0 + 300 * 0.1 / 2), 13.0)
    reckoning.acknowledged(1, 1200.0)
    assert sent_of(capacity(), reckoning) == (5.0, 16.0)


def test_what_is_cached_there_is_not_waited_for() -> None:
    reckoning = Reckoning()
    reckoning.sent(4000.0, 400.0)
    assert sent_of(capacity(), reckoning) == (pytest.approx(5.0 + 100 * 0.1 / 2), 15.0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_costs_hardware_by_time_and_traffic_by_size(stream: bool) -> None:
    asked = request("a", 4096, stream=stream)
    tokyo = {
        "usd_per_gpu_hour": 3.6, "egress_usd_per_gb": 0.1, "slots_total": 10, "replicas_ready": 2, "depth": 8,
        "residence": 0.5,
    }  # fmt: skip
    told = field(asked, 50.0, "london", london={"egress_usd_per_gb": 0.09}, tokyo=tokyo)
    place = told.at["tokyo"]
    answer_bytes = 50.0 * (STREAM_TOKEN_BYTES if stream else 4.0)
    egress_usd = cost.egress_usd(asked.body_bytes, 0.09) + cost.egress_usd(answer_bytes, 0.1)
    prefill_ms = told.scored(place, 0.0).prefill_ms
    assert told.egress_usd(place) == pytest.approx(egress_usd)
    wanted = egress_usd + cost.gpu_usd(prefill_ms, 50.0, 20.0, 5.0, 3.6)
    assert told.usd().item(place) == pytest.approx(wanted)
    assert told.scored(place, 0.0).usd == pytest.approx(wanted)
    assert told.egress_usd(told.at["london"]) == 0.0
    assert told.usd().item(told.at["london"]) == 0.0
