from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop_lab.workloads.arrivals import Burst, thinned
from farhop_lab.workloads.places import by_weight, uniform
from farhop_lab.workloads.program import Ask, Program, Start, WorkloadError, one, run
from farhop_lab.workloads.prose import common
from farhop_lab.workloads.traces import (
    AzureRow,
    Histogram,
    Limits,
    LogRow,
    MooncakeRow,
    Recorded,
    SessionRow,
    Turn,
    azure,
    log,
    mooncake,
    servegen,
    sessions,
    sessions_of,
)

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
    assert common(first.prompt, third.prompt) == 4000  # 0 and all of 1
    assert 2048 <= common(first.prompt, second.prompt) < 2048 + 32  # block 0 is shared by all
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


@pytest.mark.parametrize(
    ("moments_ms", "spread"),
    [
        ([0, 1000, 2999, 3001, 4500], False),
        ([4500, 0, 3001, 1000, 2999], False),
        ([0, 0, 2998, 3001, 6000, 6002], False),  # clocks that jitter
        ([0, 10_535, 27_482], False),  # few requests, far apart
        ([0, 3000, 9000], True),
        ([0, 3000, 3000, 5999, 9000, 12_003], True),  # as in the published conversations
        ([27_482, 27_482, 30_535, 30_535], True),  # the buckets of Mooncake's first trace
    ],
)
def test_mooncake_moments_stay_where_they_are_finer_than_three_seconds(moments_ms: list[int], spread: bool) -> None:
    starts = list(mooncake([MooncakeRow(at_ms, 512, 5, (0,)) for at_ms in moments_ms], PLACE, Random(4)))
    recorded = sorted(at_ms / 1e3 for at_ms in moments_ms)
    moved = [start.at - at for start, at in zip(starts, recorded, strict=True)]
    assert all(0.0 < by < 3.0 for by in moved) if spread else not any(moved)


@settings(max_examples=100, deadline=None)
@given(
    st.one_of(
        st.lists(st.integers(0, 20_000), min_size=1, max_size=30),
        st.lists(st.integers(0, 9).map(lambda n: n * 3000), min_size=1, max_size=30),
        st.lists(st.sampled_from([0, 3000, 5999, 9000, 11_997, 15_000]), min_size=1, max_size=30),
        st.lists(st.integers(0, 9).map(lambda n: 17 + n * 3053), min_size=1, max_size=30),
    ),
    st.integers(0, 9),
)
def test_mooncake_starts_are_ordered_and_complete_for_any_times(moments_ms: list[int], seed: int) -> None:
    rows = [MooncakeRow(at_ms, 16 + n, 5, (0,)) for n, at_ms in enumerate(moments_ms)]
    starts = list(mooncake(rows, PLACE, Random(seed)))
    assert [start.at for start in starts] == sorted(start.at for start in starts)
    came = {len(ask_of(start).prompt) // 4 - 16: start.at for start in starts}
    assert sorted(came) == list(range(len(rows)))
    assert len(starts) == len(rows)
    assert all(moments_ms[n] / 1e3 <= at <= moments_ms[n] / 1e3 + 3.0 for n, at in came.items())


def test_a_mooncake_bucket_that_ends_early_is_spread_up_to_its_end() -> None:
    rows = [MooncakeRow(at_ms, 512, 5, (at_ms,)) for at_ms in (0, 2995, 6000) for _ in range(4000)]
    starts = list(mooncake(rows, PLACE, Random(4)))
    moments = [start.at for start in starts]
    assert moments == sorted(moments)
    assert 2.98 < moments[3999] < 2.995 <= moments[4000] < 3.0
    assert 5.98 < moments[7999] < 5.995  # no wider than 3 s, as the record says about the others


def test_a_mooncake_conversation_stays_where_it_is() -> None:
    rows = [MooncakeRow(n * 3000, 1536, 5, (0, talk, 100 + n)) for n in range(20) for talk in range(1, 30)]
    starts = list(mooncake(rows, PLACE, Random(1)))
    regions: dict[int, set[str]] = {}
    for start in starts:
        regions.setdefault(ask_of(start).session, set()).add(start.region)
    assert len(regions) == 29
    assert all(len(those) == 1 for those in regions.values())
    assert set().union(*regions.values()) == {"a", "b", "c"}


def test_too_long_prompt_is_cut_at_its_end() -> None:
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


def test_requests_of_an_azure_trace_share_no_prefix() -> None:
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


def test_rates_without_lengths_need_lengths_to_be_given() -> None:
    bare = [Recorded("z", (Burst(0.0, 60.0, 1.0),))]
    with pytest.raises(WorkloadError, match="client z was recorded without lengths"):
        next(iter(servegen(bare, PLACE, 1, until=60.0)))

    def make(name: str, _rng: Random) -> Program:
        return one(Ask(prompt=name.encode()))

    names = [ask.prompt for ask in asked(servegen(bare, PLACE, 1, make=make, until=60.0))]
    assert len(names) == len(set(names)) > 20


# -- logs and sessions


def row(at_s: float, input_tokens: int, output_tokens: int = 10, **more: Any) -> LogRow:
    return LogRow(at_s=at_s, input_tokens=input_tokens, output_tokens=output_tokens, **more)


def test_a_log_shares_its_blocks_and_what_its_sessions_answered() -> None:
    rows = [
        row(0, 100, session="a", blocks=(("tools", 64),)),
        row(1, 100, session="b", blocks=(("tools", 64),)),
        row(2, 150, session="a", blocks=(("tools", 64),)),
        row(3, 30, blocks=(("tools", 64),)),
        row(4, 100),
        row(5, 100),
    ]
    first, other, again, short, alone, apart = asked(log(rows, PLACE))
    assert [len(ask.prompt) for ask in (first, again, short)] == [400, 600, 120]
    assert 256 <= common(first.prompt, other.prompt) < 256 + 32
    assert common(first.prompt, again.prompt) >= 399
    assert common(first.prompt, short.prompt) >= 119
    assert first.session == again.session != other.session
    assert common(alone.prompt, apart.prompt) < 32
    assert alone.session != apart.session


def test_regions_as_recorded() -> None:
    rows = [row(0, 10, region="b"), row(1, 10, region="a")]
    assert [start.region for start in log(rows, None)] == ["b", "a"]
    assert [start.region for start in sessions(sessions_of(rows), None)] == ["b", "a"]


def test_requests_with_tools_have_them_in_both_loops() -> None:
    rows = [row(0, 10, session="s", tools=True), row(1, 10)]
    for starts in (log(rows, PLACE), sessions(sessions_of(rows), PLACE)):
        assert [ask.tools for start in starts for ask in next(start.make())] == [True, False]


def test_session_continues_with_the_answers_received() -> None:
    talk = SessionRow(session="s", at_s=3.0, prefix=(("tools", 40),), turns=(Turn(20, 5), Turn(10, 6, 1.5)))
    (start,) = sessions([talk], PLACE)
    (one_,), (two,) = run(start.make(), lambda ask: b"A" * (4 * (ask.answer_tokens or 0)))
    assert (start.at, len(one_.prompt), one_.answer_tokens, one_.think_s) == (3.0, 240, 5, 0.0)
    assert two.prompt.startswith(one_.prompt + b"A" * 20)
    assert (len(two.prompt), two.answer_tokens, two.think_s) == (240 + 20 + 40, 6, 1.5)


def test_turn_with_an_unknown_pause_starts_at_its_recorded_time() -> None:
    rows = [row(1, 10, 20, session="s"), row(9, 40, 5, session="s"), row(11, 60, 5, session="s", pause_s=0.5)]
    (talk,) = sessions_of(rows)
    assert [(turn.pause_s, turn.since_s) for turn in talk.turns] == [(0.0, 0.0), (0.0, 8.0), (0.5, 0.0)]
    (start,) = sessions([talk], PLACE)
    batches = run(start.make(), lambda ask: b"A" * (4 * (ask.answer_tokens or 0)))
    assert [(ask.think_s, ask.since_s) for (ask,) in batches] == [(0.0, 0.0), (0.0, 8.0), (0.5, 0.0)]


def test_a_session_whose_context_began_anew_stays_one_session() -> None:
    """It keeps its region, is thinned whole, and only its texts are others."""
    rows = [row(at, tokens, session=f"s{n}") for n in range(40) for at, tokens in ((0, 100), (5, 60), (9, 30))]
    starts = list(sessions(sessions_of(rows), uniform(["a", "b", "c"])))
    kept = list(thinned(iter(starts), 0.5, Random(1)))
    assert len(starts) == 120
    assert 20 < len(kept) < 100
    for group in (starts, kept):
        by_name = {name: [one_ for one_ in group if one_.session == name] for name in {one_.session for one_ in group}}
        assert {len(parts) for parts in by_name.values()} == {3}
        assert {len({one_.region for one_ in parts}) for parts in by_name.values()} == {1}
        first, other, _ = (ask_of(part) for part in by_name[kept[0].session])
        assert first.session == other.session
        assert common(first.prompt, other.prompt) < 32


def test_a_session_ends_where_the_context_is_full() -> None:
    talk = SessionRow(session="s", at_s=0.0, turns=(Turn(60, 20), Turn(5, 20), Turn(50, 20), Turn(1, 1)))
    (start,) = sessions([talk], PLACE, Limits(context_tokens=120, max_tokens=20))
    batches = run(start.make(), lambda ask: b"A" * (4 * (ask.answer_tokens or 0)))
    assert [len(ask.prompt) for (ask,) in batches] == [240, 340]
    full = SessionRow(session="s", at_s=0.0, turns=(Turn(500, 20),))
    (long,) = sessions([full], PLACE, Limits(context_tokens=120, max_tokens=20))
    assert len(ask_of(long).prompt) == 400


LOGS = st.lists(
    st.tuples(
        st.floats(0, 100),
        st.integers(0, 300),
        st.integers(0, 60),
        st.sampled_from(["", "a", "b"]),
        st.one_of(st.none(), st.floats(0, 5)),
    ).map(lambda t: row(t[0], t[1], t[2], session=t[3], pause_s=t[4], blocks=(("tools", 40),))),
    min_size=1,
    max_size=12,
).map(lambda rows: sorted(rows, key=lambda one_: one_.at_s))


@settings(max_examples=60, deadline=None)
@given(LOGS)
def test_a_closed_loop_asks_what_was_asked_if_answers_are_as_long_as_they_were(rows: list[LogRow]) -> None:
    """Nothing is lost or made up: the same lengths in each session, and a later prompt holds all before it."""
    made = sessions_of(rows)
    assert [one_.at_s for one_ in made] == sorted(one_.at_s for one_ in made)
    lengths = []
    for start in sessions(made, PLACE):
        batches = run(start.make(), lambda ask: b"A" * (4 * (ask.answer_tokens or 0)))
        before = b""
        for (ask,) in batches:
            lengths.append((len(ask.prompt) // 4, ask.answer_tokens))
            assert ask.prompt.startswith(before)
            before = ask.prompt
    # An answer has at least one token, and so has a prompt: the next prompt is longer by as much.
    assert len(lengths) == len(rows)
    if all(one_.input_tokens and one_.output_tokens for one_ in rows):
        assert sorted(lengths) == sorted((one_.input_tokens, one_.output_tokens) for one_ in rows)
