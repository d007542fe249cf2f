from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from farhop.balance.outcome import CLIENT_LEFT, QUEUE_FULL, SERVED
from farhop_lab.sim.clients import ClientPool
from farhop_lab.sim.measures import RequestRecord
from farhop_lab.sim.sites import flat, gpus
from farhop_lab.sim.timeline import Call, Timeline
from farhop_lab.sim.world import World
from farhop_lab.workloads.program import Ask, Program, Start, WorkloadError, one


class FakeService:
    """A world that answers each text by a script: after so many seconds, or no, at once."""

    def __init__(self, takes_s: dict[bytes, float] | None = None, default_s: float = 1.0) -> None:
        self.timeline = Timeline()
        self.takes_s, self.default_s = takes_s or {}, default_s
        self.refuses: set[bytes] = set()
        self.asked: list[tuple[float, str, bytes]] = []
        self.left: list[tuple[float, bytes]] = []
        self.wire_s = 0.0
        self._open: dict[str, tuple[bytes, Callable[[RequestRecord, bytes], None], Call]] = {}

    def near_s(self, entry: str, /) -> float:
        return self.wire_s

    def arrive(
        self,
        entry: str,
        tenant: str,
        /,
        *,
        text: bytes,
        on_done: Callable[[RequestRecord, bytes], None],
        **_options: object,
    ) -> str:
        now = self.timeline.now
        self.asked.append((now, entry, text))
        name = f"r{len(self.asked)}"
        if text in self.refuses:
            on_done(record(name, QUEUE_FULL.reason), b"")
        else:
            call = self.timeline.after(self.takes_s.get(text, self.default_s), self._answer, name)
            self._open[name] = (text, on_done, call)
        return name

    def _answer(self, name: str) -> None:
        text, on_done, _ = self._open.pop(name)
        on_done(record(name, SERVED.reason), b"<" + text + b">")

    def leave(self, name: str) -> None:
        text, on_done, call = self._open.pop(name)
        call.cancel()
        self.left.append((self.timeline.now, text))
        on_done(record(name, CLIENT_LEFT.reason), b"")

    def clients(self, until: float = 100.0, **options: float) -> ClientPool:
        return ClientPool(self, until=until, **options)


def record(name: str, outcome: str) -> RequestRecord:
    return RequestRecord(
        id=name, tenant="t", entry="a", region="a", outcome=outcome, arrived_at=0, ended_at=0, ttft_ms=1.0, attempts=1
    )


def asks(*texts: bytes, think_s: float = 0.0) -> tuple[Ask, ...]:
    return tuple(Ask(prompt=text, think_s=think_s) for text in texts)


def talk(name: bytes = b"hi") -> Program:
    (first,) = yield asks(name)
    yield asks(name + first + b"more", think_s=2.0)


def test_a_second_turn_holds_the_first_answer_after_its_thinking() -> None:
    service = FakeService()
    clients = service.clients()
    clients.closed("a", iter([talk()]))
    service.timeline.run(50.0)
    assert service.asked == [(0.0, "a", b"hi"), (3.0, "a", b"hi<hi>more")]
    assert (clients.counts.programs, clients.counts.finished, clients.counts.asked) == (1, 1, 2)


def test_between_an_answer_and_what_follows_lies_the_client_s_own_round_trip() -> None:
    service = FakeService()
    service.wire_s = 0.25
    service.clients().closed("a", iter([talk()]))
    service.timeline.run(50.0)
    assert [at for at, _, _ in service.asked] == [0.25, 3.5]


@pytest.mark.parametrize(("took_s", "second"), [(1.0, 8.0), (30.0, 30.25)])
def test_a_turn_timed_from_the_last_request_also_waits_for_its_answer(took_s: float, second: float) -> None:
    def traced() -> Program:
        yield asks(b"hi")
        yield (Ask(prompt=b"more", since_s=8.0),)
        yield (Ask(prompt=b"at once", since_s=0.5),)

    service = FakeService(default_s=took_s)
    service.wire_s = 0.25
    service.clients().closed("a", iter([traced()]))
    service.timeline.run(95.0)
    first, then, last = (at for at, _, _ in service.asked)
    assert (first, then) == (0.25, second + 0.25)
    assert last == then + took_s + 0.25, "its own round trip, as for everybody"


def test_a_tree_waits_for_its_whole_batch() -> None:
    def tree() -> Program:
        found = yield asks(b"quick", b"slow")
        yield asks(*found)

    service = FakeService({b"slow": 7.0})
    service.clients().closed("a", iter([tree()]))
    service.timeline.run(50.0)
    assert service.asked == [(0.0, "a", b"quick"), (0.0, "a", b"slow"), (7.0, "a", b"<quick>"), (7.0, "a", b"<slow>")]


def test_a_closed_client_runs_its_programs_one_after_another_and_two_clients_side_by_side() -> None:
    service = FakeService(default_s=3.0)
    clients = service.clients()
    clients.closed("a", iter([one(*asks(b"1")), one(*asks(b"2"))]))
    clients.closed("b", iter([one(*asks(b"3"))]), since=1.0)
    service.timeline.run(50.0)
    assert service.asked == [(0.0, "a", b"1"), (1.0, "b", b"3"), (3.0, "a", b"2")]


def test_an_open_loop_does_not_wait_for_answers() -> None:
    service = FakeService(default_s=30.0)
    starts = [Start(at, region, lambda: one(*asks(b"x"))) for at, region in ((1.0, "a"), (1.0, "b"), (2.5, "a"))]
    clients = service.clients()
    clients.open(iter(starts))
    service.timeline.run(10.0)
    assert [(at, region) for at, region, _ in service.asked] == [(1.0, "a"), (1.0, "b"), (2.5, "a")]
    assert clients.counts.under_way == 3


def test_a_schedule_out_of_order_is_reported() -> None:
    service = FakeService()
    service.clients().open(iter([Start(5.0, "a", talk), Start(4.0, "a", talk)]))
    with pytest.raises(WorkloadError, match=r"4.0 s comes after 5.0 s; sort"):
        service.timeline.run(10.0)


def test_a_client_that_waits_too_long_leaves_and_runs_the_next_program() -> None:
    service = FakeService({b"hi": 99.0})
    clients = service.clients(timeout_s=10.0, pause_s=2.0)
    clients.closed("a", iter([talk(), one(*asks(b"next"))]))
    service.timeline.run(50.0)
    assert service.left == [(10.0, b"hi")]
    assert service.asked == [(0.0, "a", b"hi"), (12.0, "a", b"next")]
    assert (clients.counts.failed, clients.counts.finished, clients.counts.timeouts) == (1, 1, 1)


def test_one_failure_in_a_batch_ends_its_program_once_the_others_are_done() -> None:
    closed: list[float] = []

    def tree() -> Program:
        try:
            yield asks(b"no", b"yes")
            raise AssertionError("asked on")
        finally:
            closed.append(service.timeline.now)

    service = FakeService(default_s=4.0)
    service.refuses.add(b"no")
    clients = service.clients()
    clients.closed("a", iter([tree()]))
    service.timeline.run(20.0)
    assert closed == [4.0]
    assert (clients.counts.failed, clients.counts.finished) == (1, 0)


def test_immediate_refusals_do_not_loop_at_one_simulated_time() -> None:
    service = FakeService()
    service.refuses.add(b"x")

    def endless() -> Iterator[Program]:
        while True:
            yield one(*asks(b"x"))

    clients = service.clients(until=10.0, pause_s=0.5)
    clients.closed("a", endless())
    service.timeline.run(20.0)
    assert clients.counts.asked == clients.counts.failed == 20


def test_no_request_is_sent_after_the_end_and_those_in_flight_are_cut() -> None:
    service = FakeService(default_s=4.0)
    clients = service.clients(until=5.0)
    clients.closed("a", iter([talk(), talk()]))
    clients.open(iter([Start(6.0, "a", talk)]))
    service.timeline.run(50.0)
    assert [at for at, _, _ in service.asked] == [0.0]
    assert (clients.counts.cut, clients.counts.programs, clients.counts.under_way) == (1, 1, 0)


def test_a_closed_client_sends_nothing_before_it_is_awake() -> None:
    service = FakeService()
    service.clients().closed("a", iter([talk(), talk()]), awake=lambda now: max(now, 20.0))
    service.timeline.run(21.5)
    assert [at for at, _, _ in service.asked] == [20.0]


def test_bad_batches_and_times_are_reported() -> None:
    def nothing() -> Program:
        yield ()

    service = FakeService()
    service.clients().closed("a", iter([nothing()]))
    with pytest.raises(WorkloadError, match="a batch of 0 requests"):
        service.timeline.run(1.0)
    with pytest.raises(WorkloadError, match="timeout_s 0"):
        service.clients(timeout_s=0.0)


def test_second_turn_finds_the_first_in_the_cache_of_a_simulated_world() -> None:
    world = World(1, flat(["a", "b"], 100.0), {"a": gpus("a100", 1), "b": gpus("a100", 1)})
    prompts: list[bytes] = []

    def chat() -> Program:
        prompt = b" tell me all of it." * 100
        for _ in range(3):
            prompts.append(prompt)
            (found,) = yield (Ask(prompt=prompt, answer_tokens=64),)
            assert len(found) == 4 * 64
            prompt += found + b" and then?"

    clients = ClientPool(world, until=100.0)
    clients.closed("a", iter([chat()]), since=2.0)  # regions have reported
    records = world.run(60.0).records
    assert clients.counts.finished == 1
    assert [record.prompt_tokens for record in records] == [-(-len(prompt) // 4) for prompt in prompts]
    assert [record.answer_tokens for record in records] == [64, 64, 64]
    assert records[0].cached_tokens == 0
    for before, after in pairwise(records):
        # All but the last block of the answer, which its last token has not filled.
        assert after.cached_tokens >= before.prompt_tokens + before.answer_tokens - 2 * 16
    assert world.measures.violations == 0


def test_leaving_client_is_counted_in_a_simulated_world() -> None:
    world = World(1, flat(["a"]), {"a": gpus("l4", 1)})
    clients = ClientPool(world, until=30.0, timeout_s=2.0)
    clients.closed("a", iter([one(Ask(prompt=b"x" * 400, answer_tokens=400))]), since=2.0)
    measures = world.run(60.0)
    assert (clients.counts.timeouts, clients.counts.failed) == (1, 1)
    assert measures.outcomes == {"client_left": 1}
    assert measures.open == 0
