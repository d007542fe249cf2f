"""Preble: exploit and explore, and its books are in order whatever is asked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhop.balance.machine import Request, Usage
from farhop_lab.sim.baselines.preble import E2, TPOT_S, WINDOW_S
from farhop_lab.sim.baselines.router import Ended
from tests.farhop_lab.sim.baselines.pools import L4, Pool, words


def sends(router: E2, pool: Pool, text: bytes, now: float = 0.0, max_tokens: int | None = None) -> tuple[Request, str]:
    request = pool.ask(text, max_tokens=max_tokens)
    name = router.choose(request, pool.names, pool.state, now)
    router.sent(request, name, pool.state, now)
    return request, name


def test_preble_exploits_what_is_mostly_known_and_explores_by_load() -> None:
    pool = Pool(3)
    router = E2(pool.pools)
    tool = words("tool", 1000)
    _, home = sends(router, pool, tool + words(0, 50))
    assert {sends(router, pool, tool + words(n, 50))[1] for n in range(1, 6)} == {home}, (
        "the larger part is known there"
    )
    _, other = sends(router, pool, tool[:800] + words("long question", 900))
    assert other != home, "the larger part is new: the least loaded"
    _, third = sends(router, pool, words("another tool", 1000))
    assert third not in (home, other)


def test_preble_counts_work_under_way_by_the_answers_that_there_were() -> None:
    pool = Pool(2)
    router = E2(pool.pools)
    request, home = sends(router, pool, words("tool", 1000), max_tokens=200)
    (away,) = set(pool.names) - {home}
    loads = router.loads(pool.names, pool.state)
    assert loads[away] == 0.0
    assert loads[home] == pytest.approx(1000 * L4.prefill_ms_per_token / 1e3 + 200 * TPOT_S)
    router.ended(Ended(request.id, home, 0.5, 3.0, Usage(1000, 100)))
    assert router.loads(pool.names, pool.state)[home] == pytest.approx(1000 * L4.prefill_ms_per_token / 1e3)
    router.forget(WINDOW_S + 1.0)
    assert router.loads(pool.names, pool.state) == dict.fromkeys(pool.names, 0.0)
    assert sends(router, pool, words("tool", 1000), WINDOW_S + 1.0)[1] in pool.names


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40), st.integers(0, 9), st.booleans()), max_size=25))
def test_prebles_tree_and_byte_counts_stay_consistent(asked: list[tuple[str, int, int, bool]]) -> None:
    pool = Pool(2)
    router = E2(pool.pools)
    open_: list[tuple[Request, str]] = []
    for n, (tool, tokens, question, ends) in enumerate(asked):
        open_.append(sends(router, pool, words(tool, 40)[: 4 * tokens] + words(question, question), 20.0 * n))
        if ends:
            request, name = open_.pop(0)
            router.ended(Ended(request.id, name))
        nodes, stack = [], [router.root]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            nodes += [node] if node.parent is not None else []
        assert all(node.before == (node.parent.end if node.parent else 0) for node in nodes)
        for name in pool.names:
            assert router.held_bytes.get(name, 0) == sum(len(node.label) for node in router.held.get(name, ()))
            at_root = sum(node.active.get(name, 0) for node in router.root.children.values())
            assert at_root == sum(region == name for _, region in open_)
        assert sum(node.requests for node in nodes) == len(router.window)
    for request, name in open_:
        router.ended(Ended(request.id, name))
    assert not any(any(node.active.values()) for node in router.held.get(pool.names[0], ()))
