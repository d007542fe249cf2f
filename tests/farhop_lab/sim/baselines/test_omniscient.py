from __future__ import annotations

from random import Random

import pytest

from farhop_lab.engine.core.profiles import PROFILES
from farhop_lab.engine.core.sequence import EngineRequest, Sequence, TextModel
from farhop_lab.sim.baselines.omniscient import delays_ms, ends_ms, has_room, to_compute
from farhop_lab.sim.baselines.world import RouterWorld, build
from farhop_lab.sim.engines import Gpu
from farhop_lab.sim.sites import MODEL, flat, gpus
from farhop_lab.sim.timeline import Timeline

L4 = PROFILES["l4"]
VOICE = TextModel(MODEL)


class Job:
    """Asks, and notes when it was answered."""

    def __init__(self, timeline: Timeline, name: str, prompt: bytes, tokens: int) -> None:
        self.id, self.prompt, self.max_tokens, self.answer_tokens = name, prompt, tokens, tokens
        self._timeline = timeline
        self.done_at = 0.0

    def first(self) -> None:
        """Nothing to note."""

    def done(self, _usage: object) -> None:
        self.done_at = self._timeline.now


def words(seed: int, tokens: int) -> bytes:
    return Random(seed).randbytes(2 * tokens).hex().encode()[: 4 * tokens]


def work(prompt: bytes, tokens: int) -> Sequence:
    return Sequence("foreseen", EngineRequest(prompt, tokens), VOICE, L4)


@pytest.mark.parametrize(("prompt", "answer", "beside"), [(100, 50, 0), (3000, 20, 0), (2000, 100, 6), (500, 10, 20)])
def test_predicted_end_equals_the_engines(prompt: int, answer: int, beside: int) -> None:
    timeline = Timeline()
    gpu = Gpu(timeline, L4, VOICE)
    for n in range(beside):
        assert gpu.submit(Job(timeline, f"b{n}", words(n, 200), 60 + 5 * n)) == 200
    timeline.run(3.0)
    text = words(99, prompt)
    foreseen_s = ends_ms(gpu, work(text, answer)) / 1e3
    job = Job(timeline, "mine", text, answer)
    assert gpu.submit(job) == 200
    timeline.run(300.0)
    assert job.done_at - 3.0 == pytest.approx(foreseen_s, rel=0.06)


def test_remaining_prefill_of_other_requests_is_predicted() -> None:
    timeline = Timeline()
    gpu = Gpu(timeline, L4, VOICE)
    for n in range(2):
        assert gpu.submit(Job(timeline, f"b{n}", words(n, 6000), 10)) == 200
    timeline.run(1.0)
    assert (len(gpu.core.batch), len(gpu.core.line)) == (1, 1)
    foreseen_s = ends_ms(gpu, work(words(9, 400), 20)) / 1e3
    job = Job(timeline, "mine", words(9, 400), 20)
    assert gpu.submit(job) == 200
    timeline.run(60.0)
    # A step under way is not divided: up to 2,048 tokens, 1.2 s, are already on their way.
    assert job.done_at - 1.0 == pytest.approx(foreseen_s, abs=1.3)


def test_cached_tokens_are_not_counted_as_prefill() -> None:
    timeline = Timeline()
    gpu = Gpu(timeline, L4, VOICE)
    text = words(1, 1600)
    assert to_compute(gpu, work(text, 5)) == 1600
    assert gpu.submit(Job(timeline, "a", text, 5)) == 200
    timeline.run(10.0)
    assert to_compute(gpu, work(text, 5)) == 16, "the last block is never taken from the cache"
    assert to_compute(gpu, work(text[:3200] + words(2, 800), 5)) == 800


def test_cost_to_others_grows_with_their_number_and_shrinks_with_cached_tokens() -> None:
    timeline = Timeline()
    gpu = Gpu(timeline, L4, VOICE)
    mine = work(words(9, 1000), 50)
    assert delays_ms(gpu, mine) == 0.0
    for n in range(2):
        assert gpu.submit(Job(timeline, f"b{n}", words(n, 200), 100)) == 200
    assert delays_ms(gpu, mine) == pytest.approx(2 * L4.prefill_ms(1000) + 2 * 50 * 0.47, rel=0.001)


def test_replica_has_room_while_the_prompts_fit_its_memory() -> None:
    timeline = Timeline()
    gpu = Gpu(timeline, L4, VOICE)
    assert has_room(gpu, work(words(1, 16_000), 100)), "idle"
    assert gpu.submit(Job(timeline, "a", words(1, 16_000), 100)) == 200
    timeline.run(11.0)
    assert gpu.core.batch
    # 1,562 blocks hold 24,992 tokens; 16,000 and its answer are taken.
    assert has_room(gpu, work(words(2, 8_000), 10))
    assert not has_room(gpu, work(words(2, 9_200), 10))
    assert has_room(gpu, work(words(1, 16_000)[:40_000], 10)), "shared memory is not needed twice"


def test_request_goes_where_its_text_is_cached_and_waits_if_it_fits_nowhere() -> None:
    world = build("omniscient", 1, flat(["us", "eu"]), {region: gpus("l4", 1) for region in ("us", "eu")})
    assert isinstance(world, RouterWorld)
    world.at(1.0, lambda: world.arrive("us", "t", 12_000, prefix="shared", answer_tokens=400))
    world.at(10.0, lambda: world.arrive("eu", "t", 14_000, prefix="shared", answer_tokens=20))
    world.run(15.0)
    assert [record.region for record in world.measures.records] == ["us"]
    for n in range(4):
        world.at(50.0, lambda n=n: world.arrive("eu", "t", 60_000, prefix=f"long {n}", answer_tokens=50))
    world.run(50.0)
    assert world.routers["us"].flow.state.queued == 2
    assert world.run(200.0).outcomes == {"served": 6}
