"""Shares are kept, draws are stable, and what one region loses or gains moves its own keys only."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import candidates, request

from global_lb.routing.policy.shares import ConsistentHash, Weighted


def homes(policy, regions, asked) -> list[str]:
    return [
        each.names[policy.score(each).argmin()] for each in (candidates(one, 100.0, "", **regions) for one in asked)
    ]


def sessions(count: int):
    return [request(f"q{n}", 0, session=n * 7919 + 1) for n in range(count)]


@pytest.mark.parametrize("with_session", [True, False])
def test_each_region_gets_its_weights_share_of_requests(with_session: bool) -> None:
    asked = sessions(2000) if with_session else [request(f"q{n}", 0) for n in range(2000)]
    went = Counter(homes(Weighted({"a": 6.0, "b": 3.0, "c": 1.0}), {"a": {}, "b": {}, "c": {}, "d": {}}, asked))
    for name, share in (("a", 0.6), ("b", 0.3), ("c", 0.1)):
        assert abs(went[name] / 2000 - share) < 4.0 * (share * (1 - share) / 2000) ** 0.5
    assert went["d"] == 0


def test_a_draw_holds_for_the_session_and_for_all_attempts_of_a_request() -> None:
    policy, regions = Weighted({"a": 1.0, "b": 1.0}), {"a": {}, "b": {}}
    assert len(set(homes(policy, regions, [request(f"q{n}", session=9) for n in range(20)]))) == 1
    assert len(set(homes(policy, regions, [request("same") for _ in range(20)]))) == 1


def test_a_region_without_a_weight_is_used_if_there_is_no_other() -> None:
    assert homes(Weighted({"a": 1.0}), {"x": {}}, sessions(2)) == ["x", "x"]
    by_slots = Counter(homes(Weighted({}), {"a": {"slots_total": 30}, "b": {"slots_total": 10}}, sessions(2000)))
    assert 0.71 < by_slots["a"] / 2000 < 0.79


@given(st.sets(st.sampled_from("abcdefgh"), min_size=2), st.data())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_only_the_keys_of_a_region_that_leaves_move(names: set[str], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(sorted(names)))
    policy, asked = ConsistentHash(1024), sessions(60)
    before = homes(policy, {name: {"slots_total": 8} for name in names}, asked)
    after = homes(policy, {name: {"slots_total": 8} for name in names - {gone}}, asked)
    assert all(now == was for was, now in zip(before, after, strict=True) if was != gone)


def test_a_region_that_grows_takes_keys_and_loses_none() -> None:
    policy, asked = ConsistentHash(1024), sessions(600)
    before = homes(policy, {"a": {"slots_total": 10}, "b": {"slots_total": 10}, "c": {"slots_total": 10}}, asked)
    after = homes(policy, {"a": {"slots_total": 20}, "b": {"slots_total": 10}, "c": {"slots_total": 10}}, asked)
    assert {now for was, now in zip(before, after, strict=True) if was != now} == {"a"}
    assert before.count("a") / 600 == pytest.approx(1 / 3, abs=0.06)
    assert after.count("a") / 600 == pytest.approx(1 / 2, abs=0.06)


def test_without_a_session_it_uses_the_tenant_and_the_beginning_of_the_prompt() -> None:
    regions = {name: {} for name in "abcdefgh"}
    policy = ConsistentHash(1024)
    turns = [request(f"q{n}", 2048 + 512 * n, prefix="alice") for n in range(5)]
    assert len(set(homes(policy, regions, turns))) == 1
    assert len(set(homes(policy, regions, [request(f"q{n}", 2048) for n in range(40)]))) > 4
    short = [request(f"q{n}", 100, tenant=tenant) for n, tenant in enumerate(["x"] * 5)]
    assert len(set(homes(policy, regions, short))) == 1
