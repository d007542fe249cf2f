"""The load of a trial: symmetric, light, uncached, and what it truly takes."""

from __future__ import annotations

import pytest

from farhop.balance.machine import Usage
from farhop_lab.chaos import workload
from farhop_lab.chaos.schedule import Schedule
from farhop_lab.chaos.workload import EngineTimings, OpenLoad
from farhop_lab.sim.engines import Timing


def test_all_clients_send_alike_until_stopped_and_nothing_is_cached() -> None:
    schedule, truth = Schedule(5, regions=2, replicas=2), EngineTimings()
    world = workload.world_of(schedule, truth)
    load = OpenLoad(world, schedule)
    world.run(30.0)
    load.stop()
    measures = world.run(40.0)
    assert measures.open == 0
    assert set(measures.outcomes) == {"served"}
    asked = {name: sum(record.entry == name for record in measures.records) for name in schedule.names}
    assert all(40 <= count <= 80 for count in asked.values()), "60 are meant, by Poisson"
    tokens = {(f.prompt_tokens, f.cached_tokens, f.answer_tokens) for f in measures.records}
    assert tokens == {(workload.PROMPT_TOKENS, 0, workload.ANSWER_TOKENS)}
    here = sum(count for (entry, region), count in measures.served.items() if entry == region)
    assert here >= 0.95 * measures.concluded
    truth_ms = workload.service_ms(timing for those in truth.by.values() for timing in those)
    assert 500.0 < truth_ms < 650.0, "a prefill of 96 ms and 31 decode steps of 13 ms, and what comes between"


def test_truth_counts_what_was_sent_since_it_began() -> None:
    truth, usage = EngineTimings(), Usage(2000, 11)
    truth.forget(10.0)
    truth.timed("ash", "gpu-0", Timing(9.0, 9.5, 11.0, usage))
    truth.timed("ash", "gpu-0", Timing(10.0, 10.5, 11.0, usage))
    truth.timed("ash", "gpu-0", Timing(11.0, 11.5, 12.5, usage))
    assert (truth.count("ash", "gpu-0"), truth.count("ash", "gpu-1")) == (2, 0)
    assert workload.tpot_ms(truth.by["ash", "gpu-0"]) == pytest.approx(75.0)
    assert workload.service_ms(truth.by["ash", "gpu-0"]) == pytest.approx(1250.0)
    assert workload.prefill_ms_per_token() == pytest.approx(0.0963, rel=0.01)
