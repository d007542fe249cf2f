"""Rows of numbers: who has room, and parts of a table."""

from __future__ import annotations

import numpy as np
import pytest
from worlds import fleet, replica

from farhop.balance.ledger import Load, Reservation
from regional_lb.fleet.table import Columns, Eased, Rates, Subset, Table
from regional_lb.fleet.view import Sample

OUTPUT_TOKENS = 100.0


def sample(waiting: int, at: float) -> Sample:
    return Sample(at=at, waiting=waiting, running=0, kv_usage=0.0)


def rows(*replicas, reserved=()) -> Table:
    return fleet(*replicas, reserved=reserved).whole


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
        (((0, 9144),), 256.0, True),  # 9500 of 10,000
        (((0, 9145),), 256.0, False),
    ],
)
def test_room(reserved, uncached: float, fits: bool) -> None:
    busy = rows(replica("r"), reserved=[Reservation("r", *tokens) for tokens in reserved])
    assert busy.room(uncached, OUTPUT_TOKENS, now=0.0).tolist() == [fits]


def test_an_engine_that_queues_has_no_room_while_its_word_is_fresh() -> None:
    both = rows(replica("r", sample=sample(waiting=1, at=10.0)), replica("s", sample=sample(waiting=0, at=10.0)))
    assert both.room(0.0, 0.0, now=12.9).tolist() == [False, True]
    assert both.room(0.0, 0.0, now=13.0).tolist() == [True, True]
    assert not rows().room(0.0, 0.0, now=0.0).any()


def test_a_part_keeps_its_order_and_its_numbers() -> None:
    whole = rows(replica("a", slots=1), replica("b", slots=2), replica("c", slots=3))
    part = whole.only(whole.of.without(("b",)))
    assert part.of.names == ("a", "c")
    assert part.of.at == {"a": 0, "c": 1}
    assert part.slots.tolist() == [1.0, 3.0]
    assert whole.only(whole.of.without(())) is whole
    assert len(whole.only(whole.of.without(("a", "b", "c")))) == 0


def test_who_is_eased_has_fewer_slots_and_what_failed_counts() -> None:
    table = rows(replica("r", slots=4), reserved=[Reservation("r", 0, 100)])
    known = fleet(replica("r", slots=4)).view.replicas["r"]
    for eased, fits, in_flight, kv_tokens in (
        (None, True, 1.0, 100.0),
        (Eased(2), True, 1.0, 100.0),
        (Eased(1), False, 1.0, 100.0),
        (Eased(4, requests=2, kv_tokens=9000), True, 3.0, 9100.0),
        (Eased(4, requests=2, kv_tokens=9301), False, 3.0, 9401.0),
        (Eased(3, requests=2), False, 3.0, 100.0),
    ):
        table.burden(0, known, Load(1, 0, 100), eased)
        assert table.room(0.0, 100.0, now=0.0).tolist() == [fits], eased
        assert (table.in_flight[0], table.kv_taken_tokens[0]) == (in_flight, kv_tokens)
    table.burden(0, known, Load(), Eased(1))
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
    assert part.rates().tolist() == whole.rates()[:, kept].tolist()
    assert part.rates(np.array([0, 2])).tolist() == whole.rates()[:, [kept[0], kept[2]]].tolist()
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
    table._block[:, 0] = np.arange(len(names))
    assert [getattr(table, name).item(0) for name in names] == list(range(len(names)))
    assert Rates._fields == tuple(names[: len(Rates._fields)])
