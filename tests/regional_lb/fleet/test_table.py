"""Columns of numbers: which replicas have room, and parts of a table."""

from __future__ import annotations

from math import inf

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import replica, replicas_of

from farhop.balance.ledger import Load, Reservation
from regional_lb.fleet.table import Columns, Line, ReducedCapacity, ScoreInputs, Subset, Table
from regional_lb.fleet.view import Sample

OUTPUT_TOKENS = 100.0
SHORT = Line(requests=2, prompt_tokens=100.0, uncached_tokens=100.0, answer_tokens=OUTPUT_TOKENS)


def sample(waiting: int, at: float) -> Sample:
    return Sample(at=at, waiting=waiting, running=0, kv_usage=0.0)


def rows(*replicas, reserved=()) -> Table:
    return replicas_of(*replicas, reserved=reserved).whole


@pytest.mark.parametrize(
    ("reserved", "uncached", "fits"),
    [
        ((), 1e9, True),  # idle
        (((0, 500),), 256.0, True),
        (((0, 250), (0, 250)), 256.0, False),  # both slots taken
        (((1999, 1999),), 256.0, True),  # of a step of 2000 tokens something is left
        (((1999, 1999),), 5000.0, True),  # in chunks, if need be
        (((2000, 2000),), 256.0, False),
        (((0, 1745),), 5000.0, True),  # nothing is being prefilled: one may exceed the bound
        (((0, 9644),), 256.0, True),  # all of 10,000
        (((0, 9645),), 256.0, False),
    ],
)
def test_which_requests_have_room_at_a_replica(reserved, uncached: float, fits: bool) -> None:
    busy = rows(replica("r"), reserved=[Reservation("r", *tokens) for tokens in reserved])
    assert busy.room(uncached, OUTPUT_TOKENS, now=0.0).tolist() == [fits]


@pytest.mark.parametrize(
    ("backlog", "tpot_ms", "alone", "several"),
    [
        (1_499, 20.0, True, True),
        (1_500, 20.0, True, False),  # two steps of 75 ms
        (1_999, 100.0, True, True),  # a step takes 100 ms anyway
        (2_000, 100.0, False, False),
    ],
)
def test_where_several_wait_steps_are_filled_for_no_longer_than_they_need(backlog, tpot_ms, alone, several) -> None:
    slow = replica("r1", prefill_ms_per_token=0.1, tpot_ms=tpot_ms)
    busy = rows(slow, reserved=[Reservation("r1", backlog, backlog)])
    assert [busy.room(0.0, 0.0, 0.0, line).tolist() for line in (None, SHORT)] == [[alone], [several]]


def test_where_several_wait_a_fast_engine_is_given_two_steps_worth() -> None:
    for backlog, room in ((3_900, True), (4_100, False)):
        fast = rows(replica("r1", prefill_ms_per_token=0.01), reserved=[Reservation("r1", backlog, backlog)])
        assert fast.room(0.0, 0.0, 0.0).tolist() == [False]
        assert fast.room(0.0, 0.0, 0.0, SHORT).tolist() == [room]
        assert rows(replica("r1")).room(1e9, 0.0, 0.0, SHORT).all()  # idle: it accepts anything


@pytest.mark.parametrize(("requests", "uncached"), [(40, 200.0), (40, 1_000.0), (400, 200.0)])
def test_a_long_line_is_given_the_steps_by_which_it_begins_soonest(requests, uncached) -> None:
    line = Line(requests, prompt_tokens=2_000.0, uncached_tokens=uncached, answer_tokens=50.0)
    one = replica("r1", prefill_ms_per_token=0.5, tpot_ms=100.0, kv_tokens=10**9, prefill_tokens_max=10**6)

    def mean_wait(step: float) -> float:  # in the time of a token
        return requests * uncached * (1.0 + 200.0 / step) / 2.0 + step / 2.0

    best = min(range(300, 10_000), key=mean_wait)
    for backlog, room in ((best - 2, True), (best + 2, False)):
        busy = rows(one, reserved=[Reservation("r1", backlog, backlog)])
        busy.tpot_ms[:] = 100.0  # whatever the batch adds
        assert busy.room(0.0, 0.0, 0.0, line).tolist() == [room]


def test_no_line_makes_a_step_longer_than_the_engine_takes() -> None:
    line = Line(4_000, prompt_tokens=2_000.0, uncached_tokens=200.0, answer_tokens=50.0)
    one = replica("r1", prefill_ms_per_token=0.5, tpot_ms=100.0, kv_tokens=10**9, prefill_tokens_max=1_000)
    for backlog, room in ((998, True), (1_002, False)):
        busy = rows(one, reserved=[Reservation("r1", backlog, backlog)])
        assert busy.room(0.0, 0.0, 0.0, line).tolist() == [room]


def test_of_a_line_only_what_the_kv_cache_has_room_for_makes_steps_longer() -> None:
    line = Line(400, prompt_tokens=2_000.0, uncached_tokens=200.0, answer_tokens=50.0)
    one = replica("r1", prefill_ms_per_token=0.5, tpot_ms=100.0, kv_tokens=10**6, prefill_tokens_max=10**6)
    full = rows(one, reserved=[Reservation("r1", 600, 10**6 - 100)])
    assert full.room(0.0, 0.0, 0.0).tolist() == [True]
    assert full.room(0.0, 0.0, 0.0, line).tolist() == [False]
    assert rows(one, reserved=[Reservation("r1", 600, 600)]).room(0.0, 0.0, 0.0, line).tolist() == [True]


def test_an_engine_that_queues_has_no_room_while_its_sample_is_fresh() -> None:
    both = rows(replica("r", sample=sample(waiting=1, at=10.0)), replica("s", sample=sample(waiting=0, at=10.0)))
    assert both.room(0.0, 0.0, now=12.9).tolist() == [False, True]
    assert both.room(0.0, 0.0, now=13.0).tolist() == [True, True]
    assert not rows().room(0.0, 0.0, now=0.0).any()


def test_only_the_part_of_a_backlog_not_computed_yet_counts() -> None:
    """A step takes in the prompts that are there when it begins, and ends with their first tokens."""
    known, table = replica("r", prefill_ms_per_token=0.1, tpot_ms=20.0), rows(replica("r", prefill_ms_per_token=0.1))

    def left(*at: float) -> list[float]:
        return [table.backlog_left(now).item(0) for now in at]

    table.write_load(0, known, Load(1, 1000, 1000, 1), 5.0)  # 100 ms of an idle engine
    assert left(4.0, 5.0, 5.025, 5.1, 9.0) == pytest.approx([1000.0, 1000.0, 750.0, 0.0, 0.0], abs=1e-6)
    table.write_load(0, known, Load(3, 3000, 3000, 3), 5.05)  # two more: they wait for the next step
    assert left(5.05, 5.1, 9.0) == pytest.approx([2500.0, 2000.0, 2000.0])
    table.write_load(0, known, Load(3, 2000, 3000, 2, decoding=1), 5.12)  # the first has begun to answer
    assert left(5.12, 5.22, 9.0) == pytest.approx([2000.0, 1000.0, 0.0], abs=1e-6)
    table.write_load(0, known, Load(3, 0, 3000, 0, decoding=3), 5.4)
    assert left(5.4, 9.0) == [0.0, 0.0]
    step_s = table.tpot_ms.item(0) / 1e3
    table.write_load(
        0, known, Load(4, 500, 3500, 1, decoding=3), 6.0
    )  # half a step of decoding comes first, in the mean
    table.write_load(0, known, Load(5, 800, 3800, 2, decoding=3), 6.001)  # and takes this one along
    assert left(6.0 + 0.5 * step_s, 6.0 + 0.5 * step_s + 0.04) == pytest.approx([800.0, 400.0])


@given(
    st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(0, 5_000), st.integers(0, 3)), min_size=1, max_size=30),
    st.floats(0.0, 60.0),
)
def test_a_backlog_is_never_less_than_nothing_nor_more_than_what_was_sent(
    changes: list[tuple[float, int, int]], later_s: float
) -> None:
    known, table, now = replica("r"), rows(replica("r")), 0.0
    for gap_s, tokens, decoding in changes:
        now += gap_s
        table.write_load(0, known, Load(decoding + (tokens > 0), tokens, tokens, 1, decoding=decoding), now)
        assert 0.0 <= table.computing_tokens.item(0) <= tokens
        soon, late = (table.backlog_left(at).item(0) for at in (now, now + later_s))
        assert 0.0 <= late <= soon <= tokens


def test_a_part_keeps_its_order_and_its_numbers() -> None:
    whole = rows(replica("a", slots=1), replica("b", slots=2), replica("c", slots=3))
    part = whole.only(whole.of.without(("b",)))
    assert part.of.names == ("a", "c")
    assert part.of.at == {"a": 0, "c": 1}
    assert part.slots.tolist() == [1.0, 3.0]
    assert whole.only(whole.of.without(())) is whole
    assert len(whole.only(whole.of.without(("a", "b", "c")))) == 0


def test_a_replica_with_reduced_capacity_has_fewer_slots_and_failed_requests_count() -> None:
    table = rows(replica("r", slots=4), reserved=[Reservation("r", 0, 100)])
    known = replicas_of(replica("r", slots=4)).view.replicas["r"]
    for reduced, fits, in_flight, kv_tokens in (
        (None, True, 1.0, 100.0),
        (ReducedCapacity(2), True, 1.0, 100.0),
        (ReducedCapacity(1), False, 1.0, 100.0),
        (ReducedCapacity(4, requests=2, kv_tokens=9000), True, 3.0, 9100.0),
        (ReducedCapacity(4, requests=2, kv_tokens=9801), False, 3.0, 9901.0),
        (ReducedCapacity(3, requests=2), False, 3.0, 100.0),
    ):
        table.write_load(0, known, Load(1, 0, 100), 0.0, reduced)
        assert table.room(0.0, 100.0, now=0.0).tolist() == [fits], reduced
        assert (table.in_flight[0], table.kv_taken_tokens[0]) == (in_flight, kv_tokens)
    table.write_load(0, known, Load(), 0.0, ReducedCapacity(1))
    assert table.room(1e9, 100.0, now=0.0).all()  # idle: it may have its one
    table.allow(0, 3)
    assert table.slots.tolist() == [3.0]


@pytest.mark.parametrize("apart", [(), (7,), (0, 299), tuple(range(0, 300, 2))])
def test_a_large_part_has_the_numbers_of_its_rows(apart: tuple[int, ...]) -> None:
    whole = rows(*(replica(f"r{i}", slots=1 + i, kv_tokens=1000 + i) for i in range(600)))
    part = whole.only(whole.of.without(tuple(f"r{i}" for i in apart)))
    kept = [i for i in range(600) if i not in apart]
    assert part.slots.tolist() == [1 + i for i in kept]
    assert part.kv_tokens.tolist() == [1000 + i for i in kept]
    assert part.speeds().tolist() == whole.speeds()[:, kept].tolist()
    assert part.room(0.0, 0.0, now=0.0).all()
    with pytest.raises(AttributeError):
        _ = part.colour


@pytest.mark.parametrize("n", [5, 300, 2000])
def test_what_is_known_slot_by_slot_is_read_in_a_subsets_order(n: int) -> None:
    rng = np.random.default_rng(n)
    slots = np.roll(np.arange(n + 40), 7)
    slots = np.delete(slots, [3, n // 2])[:n].astype(np.intp)
    some = Subset(tuple(map(str, range(n))), np.arange(n))
    some.place_slots(slots, n + 40, version=1)
    held = rng.random(n + 40) < 0.5
    assert some.of_slots(held).tolist() == [bool(held[slot]) for slot in slots]
    assert [some.by_slot[slot] for slot in slots] == list(range(n))
    assert (some.by_slot < 0).sum() == 40


def test_each_column_is_its_row_of_the_block() -> None:
    table, names = rows(replica("r")), list(Columns.__annotations__)
    table.block[:, 0] = np.arange(len(names))
    assert [getattr(table, name).item(0) for name in names] == list(range(len(names)))
    assert ScoreInputs._fields == tuple(names[: len(ScoreInputs._fields)])


def counted_whole(*replicas) -> Table:
    """Of whom only sums are known, not who has been answered for how long."""
    return Table(rows(*replicas).of)


def shared_prefix(usage: float | None, running: int = 50) -> Table:
    """Fifty requests of which a prompt of 600 tokens and an answer of 100 are counted each, in a cache of 40,000."""
    known = replica("r", slots=256, kv_tokens=40_000)
    table = counted_whole(known)
    table.tpot_alone_ms[:] = 20.0
    table.allow(0, 256)
    table.write_load(0, known, Load(50, 0, 35_000, answer_tokens=5_000), 0.0)
    table.describe(0, msgspec.structs.replace(known, sample=Sample(1.0, waiting=0, running=running, kv_usage=usage)))
    return table


def test_what_an_engine_does_not_hold_of_prompts_that_share_is_room() -> None:
    """1,500 tokens shared by all and 150 of each own, half of an answer: 11,500, where 35,000 are counted."""
    table = shared_prefix(11_500 / 40_000)
    assert table.kv_taken_tokens[0] == pytest.approx(35_000 - (30_000 - 11_500))
    assert table.kv_room_tokens[0] == pytest.approx(40_000 - 16_500)
    known = replica("r", slots=256, kv_tokens=40_000)
    table.write_load(0, known, Load(51, 0, 35_700, answer_tokens=5_100), 0.0)
    assert table.kv_taken_tokens[0] == pytest.approx(16_500 + 700), "who came since counts whole"
    table.write_load(0, known, Load(25, 0, 17_500, answer_tokens=2_500), 0.0)
    assert table.kv_taken_tokens[0] == pytest.approx(8_250), "who left takes its part of it along"
    table.write_load(0, known, Load(), 0.0)
    assert table.room(1e9, 1.0, now=0.0).all()


def test_generated_tokens_do_not_count_as_kv_held_for_prompts() -> None:
    known = replica("r", slots=256, kv_tokens=40_000)
    table = counted_whole(known)
    table.tpot_alone_ms[:] = 20.0
    table.allow(0, 256)
    taken = []
    for ago_s in (0.0, 1.0, 100.0):
        table.write_load(
            0, known, Load(50, 0, 35_000, answer_tokens=5_000, decoding=50, began_s=50 * (200.0 - ago_s)), 0.0
        )
        at_once = Sample(200.0, waiting=0, running=50, kv_usage=11_500 / 40_000)
        table.describe(0, msgspec.structs.replace(known, sample=at_once))
        taken.append(table.kv_taken_tokens.item(0))
    found = 0.75 * 50 * 1000.0 / table.tpot_ms.item(0)
    assert taken[0] == pytest.approx(16_500)
    assert taken[1] == pytest.approx(16_500 - found)
    assert taken[2] == pytest.approx(16_500 - 5_000), "no more than what is counted for answers"


@pytest.mark.parametrize(
    ("usage", "running"),
    [(None, 50), (0.9, 50), (0.75, 50), (0.0, 0)],
    ids=["it does not say", "more is held", "as much is held", "nobody runs yet"],
)
def test_without_a_usable_kv_report_counted_tokens_are_taken(usage: float | None, running: int) -> None:
    table = shared_prefix(usage, running)
    assert (table.kv_taken_tokens[0], table.kv_room_tokens[0]) == (35_000.0, 5_000.0)


def test_requests_that_the_engine_does_not_run_yet_count_in_full() -> None:
    assert shared_prefix(0.1, running=25).kv_taken_tokens[0] == pytest.approx(35_000 - (15_000 - 4_000))


@given(
    st.lists(
        st.tuples(
            st.integers(0, 60), st.integers(0, 900), st.integers(0, 300), st.integers(0, 5_000), st.integers(0, 60)
        ),
        max_size=12,
    ),
    st.lists(st.tuples(st.one_of(st.none(), st.floats(0.0, 1.0)), st.integers(0, 60)), min_size=1, max_size=6),
)
def test_never_more_than_counted_nor_less_than_held_is_taken(
    loads: list[tuple[int, int, int, int, int]], seen: list[tuple[float | None, int]]
) -> None:
    known = replica("r", slots=256, kv_tokens=40_000)
    table = counted_whole(known)
    table.tpot_alone_ms[:] = 20.0
    for n, (requests, prompt, answer, backlog, began) in enumerate(loads):
        decoding, counted = min(began, requests), requests * (prompt + answer)
        load = Load(
            requests, backlog * bool(requests), counted, answer_tokens=requests * answer, decoding=decoding,
            began_s=decoding * (n - 0.5),
        )  # fmt: skip
        table.write_load(0, known, load, 0.0)
        assert load.answer_tokens - 1e-6 <= table.kv_taken_tokens[0] <= load.kv_tokens + 1e-6
        usage, running = seen[n % len(seen)]
        table.describe(0, msgspec.structs.replace(known, sample=Sample(float(n), 0, running, kv_usage=usage)))
        taken = table.kv_taken_tokens.item(0)
        prompts = requests * prompt * min(1.0, running / max(1, requests))
        assert load.kv_tokens - prompts - 1e-3 <= taken <= load.kv_tokens + 1e-6, "answers and the others count whole"
        room = table.kv_room_tokens.item(0)
        assert room in (inf, -inf) or room == pytest.approx(40_000 - taken, abs=1e-3)
