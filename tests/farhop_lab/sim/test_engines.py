from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.machine import Usage
from farhop_lab.engine.core.profiles import PROFILES
from farhop_lab.engine.core.scheduler import EngineCore
from farhop_lab.engine.core.sequence import TextModel
from farhop_lab.engine.core.text import write_all
from farhop_lab.sim import engines
from farhop_lab.sim.engines import Engine, Gpu, Station, UsageWithText
from farhop_lab.sim.timeline import Timeline


@dataclass
class Recorded:
    """A job that notes what it gets, and when."""

    timeline: Timeline
    id: str
    prompt: bytes = b"x" * 400
    max_tokens: int | None = 50
    answer_tokens: int | None = None
    events: list[tuple[str, float]] = field(default_factory=list)
    usage: Usage | None = None

    def first(self) -> None:
        self.events.append(("first", round(self.timeline.now, 6)))

    def done(self, usage: Usage) -> None:
        self.events.append(("done", round(self.timeline.now, 6)))
        self.usage = usage


def jobs(timeline: Timeline, engine: Engine, count: int, **fields: object) -> list[Recorded]:
    made = [Recorded(timeline, f"j{i}", **fields) for i in range(count)]  # type: ignore[arg-type]
    assert {engine.submit(job) for job in made} <= {200}
    return made


def test_station_serves_as_many_requests_as_it_has_slots() -> None:
    timeline = Timeline()
    station = Station(timeline, slots=2, service_s=4.0, first_s=1.0, answer_tokens=7)
    first, second, third = jobs(timeline, station, 3)
    assert station.metrics() == (1, 2, 1.0)
    timeline.run(20.0)
    assert first.events == second.events == [("first", 1.0), ("done", 4.0)]
    assert third.events == [("first", 5.0), ("done", 8.0)]
    assert third.usage == Usage(100, 7)
    assert station.metrics() == (0, 0, 0.0)


def test_leaving_request_frees_its_slot_and_gets_no_more_events() -> None:
    timeline = Timeline()
    station = Station(timeline, slots=1, service_s=4.0, first_s=1.0, answer_tokens=7)
    running, waiting, last = jobs(timeline, station, 3)
    timeline.run(2.0)
    station.abort(waiting.id)
    station.abort(running.id)
    station.abort("unheard of")
    timeline.run(20.0)
    assert running.events == [("first", 1.0)]
    assert waiting.events == []
    assert last.events == [("first", 3.0), ("done", 6.0)]


def test_a_station_refuses_past_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farhop_lab.sim.engines.WAITING_MAX", 1)
    timeline = Timeline()
    station = Station(timeline, slots=1, service_s=1.0, first_s=0.0, answer_tokens=1)
    jobs(timeline, station, 2)
    assert station.submit(Recorded(timeline, "one too many")) == 503


def test_impossible_station_figures_are_refused() -> None:
    with pytest.raises(ValueError, match="first_s 5"):
        Station(Timeline(), slots=1, service_s=4.0, first_s=5.0, answer_tokens=1)


def test_a_gpu_takes_the_time_its_profile_says_and_remembers_prefixes() -> None:
    timeline, profile = Timeline(), PROFILES["a100"]
    engine = Gpu(timeline, profile, TextModel("llama"))
    (job,) = jobs(timeline, engine, 1, answer_tokens=10, prompt=b"tell me all " * 200)
    timeline.run(0.01)
    assert engine.metrics()[:2] == (0, 1)
    timeline.run(60.0)
    tokens = 600
    assert job.events[0] == ("first", pytest.approx(profile.step_ms(profile.prefill_ms(tokens), 0) / 1e3, abs=1e-6))
    decode_s = sum(profile.step_ms(0, 1, tokens + written) for written in range(1, 10)) / 1e3
    assert job.events[1] == ("done", pytest.approx(job.events[0][1] + decode_s))
    assert job.usage == UsageWithText(tokens, 10, 0, text=write_all(job.prompt, 0, 200.0, 10))
    again = Recorded(timeline, "again", prompt=job.prompt, answer_tokens=10)
    engine.submit(again)
    timeline.run(120.0)
    assert again.usage is not None
    assert again.usage.cached_tokens is not None
    assert again.usage.cached_tokens > 500


def test_gpu_output_is_complete_up_to_the_present() -> None:
    """A stream that goes on elsewhere goes on from there: what is missing would be computed, and told, once more."""
    timeline = Timeline()
    gpu = Gpu(timeline, PROFILES["h100"], TextModel("llama", 1, 200.0))
    (job,) = jobs(timeline, gpu, 1, max_tokens=1000, answer_tokens=1000)
    timeline.run(2.0)
    said = gpu.generated(job.id)
    assert said is not None
    (sequence,) = gpu.core.batch
    assert said == bytes(sequence.text)[len(job.prompt) :]
    assert len(said) // 4 > 200


def test_a_gpu_forgets_what_is_aborted_and_refuses_what_can_never_fit() -> None:
    timeline = Timeline()
    engine = Gpu(timeline, PROFILES["l4"], TextModel("llama"))
    (job,) = jobs(timeline, engine, 1, answer_tokens=100)
    timeline.run(1.0)
    engine.abort(job.id)
    timeline.run(30.0)
    assert [what for what, _ in job.events] == ["first"]
    assert engine.metrics() == (0, 0, 0.0)
    assert engine.submit(Recorded(timeline, "huge", prompt=b"x" * 4_000_000)) == 400


asked = st.tuples(
    st.integers(0, 1_500),  # arrival, milliseconds
    st.integers(1, 3),  # text
    st.integers(1, 900),  # its length, bytes
    st.one_of(st.none(), st.integers(1, 120)),  # answer_tokens
    st.one_of(st.none(), st.integers(0, 3_000)),  # departure, milliseconds after
)


@given(st.lists(asked, min_size=1, max_size=12), st.lists(st.integers(0, 9_000), max_size=6), st.integers(25, 60))
@settings(deadline=None)
def test_leaps_equal_single_steps(asks: list[tuple], looks: list[int], kv_blocks: int) -> None:
    """Batches of 4 and caches so small that some wait for blocks and some are preempted."""
    leaping, passing, stepping = (_life(asks, looks, kv_blocks, how) for how in ("leaps", "passes", "steps"))
    assert leaping == stepping
    assert passing == stepping


def _life(asks: list[tuple], looks: list[int], kv_blocks: int, how: str) -> list[object]:
    with pytest.MonkeyPatch.context() as patch:
        if how != "leaps":
            patch.setattr(engines, "STEPS_MAX", 0)
        if how == "steps":  # as the live engine does it, where each token is events
            patch.setattr(engines, "EngineCore", lambda *args, **how: EngineCore(*args, **(how | {"each_token": True})))
        timeline = Timeline()
        profile = replace(PROFILES["l4"], kv_blocks=kv_blocks, sequences_max=4)
        gpu = Gpu(timeline, profile, TextModel("m", 1, 40.0))
        events = []
        for number, (at_ms, text, size, answer, leaves_ms) in enumerate(asks):
            job = Recorded(timeline, f"j{number}", (f"text {text} " * 100).encode()[:size], 150, answer)
            events.append(job)
            # Off the beat of the steps: an arrival at the very end of a step may be processed before or after it.
            timeline.at(at_ms / 1e3 + 1e-5, gpu.submit, job)
            if leaves_ms is not None:
                timeline.at((at_ms + leaves_ms) / 1e3 + 2e-5, gpu.abort, job.id)
        seen: list[object] = []
        for at_ms in looks:
            timeline.at(at_ms / 1e3 + 3e-5, lambda: seen.append((timeline.now, gpu.metrics())))
        timeline.run(200.0)
        core = gpu.core
        core.kv.check()
        counters = {name: getattr(core.counters, name) for name in core.counters.__struct_fields__}
        return [[(job.events, job.usage) for job in events], sorted(seen, key=str), counters, core.kv.line]
