from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop_lab.workloads.arrivals import Burst
from farhop_lab.workloads.places import by_weight, uniform
from farhop_lab.workloads.program import Ask, Program, Start, WorkloadError, one
from farhop_lab.workloads.prose import common
from farhop_lab.workloads.traces import AzureRow, Histogram, Limits, MooncakeRow, Recorded, azure, mooncake, servegen

PLACE = uniform(["a", "b", "c"])
ROWS = [
    MooncakeRow(0, 1000, 20, (0, 1)),
    MooncakeRow(0, 1100, 30, (0, 2, 3)),
    MooncakeRow(0, 1536, 40, (0, 1, 4)),
    MooncakeRow(6000, 600, 10, (0, 1)),
]


def ask_of(start: Start) -> Ask:
    (ask,) = next(start.make())
    return ask


def asked(schedule: Iterable[Start]) -> list[Ask]:
    return [ask_of(start) for start in schedule]


def test_mooncake_prompts_share_the_very_blocks_that_the_trace_says() -> None:
    first, second, third, _ = asked(mooncake(ROWS, PLACE, Random(1)))
    assert [len(ask.prompt) for ask in (first, second, third)] == [4000, 4400, 6144]
    assert common(first.prompt, third.prompt) == 4000  # 0 and all there is of 1
    assert 2048 <= common(first.prompt, second.prompt) < 2048 + 32  # block 0 is everybody's
    assert (second.answer_tokens, second.max_tokens) == (30, 30)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=2, max_size=5), st.integers(0, 9))
def test_common_prefixes_are_those_of_the_hashes(names: list[list[int]], seed: int) -> None:
    rows = [MooncakeRow(0, 512 * len(ids), 5, tuple(ids)) for ids in names]
    prompts = [ask.prompt for ask in asked(mooncake(rows, PLACE, Random(seed)))]
    for (a, one_), (b, other) in pairwise(zip(names, prompts, strict=True)):
        same = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert 2048 * same <= common(one_, other) < 2048 * same + 32


def test_mooncake_buckets_are_spread_over_their_three_seconds_in_order() -> None:
    rows = [MooncakeRow(bucket * 3000, 512, 5, (n,)) for bucket in range(3) for n in range(400)]
    starts = list(mooncake(rows, PLACE, Random(4)))
    moments = [start.at for start in starts]
    assert moments == sorted(moments)
    for bucket in range(3):
        mine = moments[bucket * 400 : (bucket + 1) * 400]
        assert 3 * bucket <= mine[0] < 3 * bucket + 0.1
        assert 3 * bucket + 2.9 < mine[-1] < 3 * bucket + 3
    assert [start.at for start in mooncake(rows, PLACE, Random(4))] == moments


def test_a_mooncake_conversation_stays_where_it_is() -> None:
    rows = [MooncakeRow(n * 3000, 1536, 5, (0, talk, 100 + n)) for n in range(20) for talk in range(1, 30)]
    starts = list(mooncake(rows, PLACE, Random(1)))
    regions: dict[int, set[str]] = {}
    for start in starts:
        regions.setdefault(ask_of(start).session, set()).add(start.region)
    assert len(regions) == 29
    assert all(len(where) == 1 for where in regions.values())
    assert set().union(*regions.values()) == {"a", "b", "c"}


def test_what_is_too_long_is_cut_at_its_end() -> None:
    limits = Limits(context_tokens=900, max_tokens=25, tenant="u")
    cut, *_ = asked(mooncake(ROWS, PLACE, Random(1), limits))
    whole, *_ = asked(mooncake(ROWS, PLACE, Random(1)))
    assert len(cut.prompt) == 4 * 880
    assert whole.prompt.startswith(cut.prompt)
    (_, long, *_) = asked(mooncake(ROWS, PLACE, Random(1), limits))
    assert long.answer_tokens == 25
    assert long.tenant == "u"
    with pytest.raises(WorkloadError, match="max_tokens 900"):
        Limits(context_tokens=900, max_tokens=900)


def test_azure_shares_nothing() -> None:
    rows = [AzureRow(0.0, 374, 44), AzureRow(4.3, 396, 109), AzureRow(4.3, 0, 0)]
    starts = list(azure(rows, PLACE))
    prompts = asked(starts)
    assert [start.at for start in starts] == [0.0, 4.3, 4.3]
    assert [len(ask.prompt) for ask in prompts] == [4 * 374, 4 * 396, 4]
    assert [ask.answer_tokens for ask in prompts] == [44, 109, 1]
    assert common(prompts[0].prompt, prompts[1].prompt) < 32


FEW, MANY = Histogram((10, 20), (0.5, 1.0)), Histogram((1000,), (0.7,))
CLIENTS = [
    Recorded("x", (Burst(0.0, 600.0, 2.0), Burst(600.0, 600.0, 0.5)), ((0.0, FEW, FEW), (600.0, MANY, FEW))),
    Recorded("y", (Burst(0.0, 600.0, 0.0), Burst(600.0, 600.0, 3.0, 2.0)), ((0.0, MANY, FEW),)),
]


def test_servegen_clients_keep_their_rates_their_lengths_and_their_region() -> None:
    starts = list(servegen(CLIENTS, by_weight({"a": 1.0}), 1, until=1200.0))
    assert [start.at for start in starts] == sorted(start.at for start in starts)
    assert sum(start.at < 600 for start in starts) == pytest.approx(1200, rel=0.1)
    assert sum(start.at >= 600 for start in starts) == pytest.approx(2100, rel=0.2)
    lengths = {(start.at < 600, len(ask_of(start).prompt) // 4) for start in starts}
    assert lengths == {(True, 10), (True, 20), (False, 1000)}
    assert {ask.answer_tokens for ask in asked(starts[:100])} == {10, 20}
    twice = list(servegen(CLIENTS, by_weight({"a": 1.0}), 1, until=1200.0, scale=2.0))
    assert len(twice) == pytest.approx(2 * len(starts), rel=0.15)


def test_a_window_of_the_record_begins_at_0() -> None:
    starts = list(servegen(CLIENTS, PLACE, 1, since=900.0, until=1200.0))
    assert 0.0 <= starts[0].at < 5.0
    assert starts[-1].at < 300.0
    assert len(starts) == pytest.approx(300 * 3.5, rel=0.3)
    assert {len(ask_of(start).prompt) for start in starts} == {4000}


def test_rates_without_lengths_need_to_be_told_what_to_ask() -> None:
    bare = [Recorded("z", (Burst(0.0, 60.0, 1.0),))]
    with pytest.raises(WorkloadError, match="client z was recorded without lengths"):
        next(iter(servegen(bare, PLACE, 1, until=60.0)))

    def make(name: str, _rng: Random) -> Program:
        return one(Ask(prompt=name.encode()))

    names = [ask.prompt for ask in asked(servegen(bare, PLACE, 1, make=make, until=60.0))]
    assert len(names) == len(set(names)) > 20
