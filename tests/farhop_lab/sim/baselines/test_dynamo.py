"""Dynamo: the costs of its documentation, and nothing of a request is left when it is over."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhop_lab.sim.baselines.dynamo import QUEUE_THRESHOLD, KvRouter
from farhop_lab.sim.baselines.router import Ended
from tests.farhop_lab.sim.baselines.pools import BLOCK, L4, Pool, words


def test_dynamo_weighs_prefill_against_decode_as_its_documentation_does() -> None:
    """Of ten blocks 2, 5 and 8 are cached, so that 8, 5 and 2 are to be computed; ten are active with this request, and
    nine of others besides where the most is cached: not that one, nor the idle one that knows least."""
    pool = Pool(3)
    prompt = words("the prompt", 10 * BLOCK)
    router = KvRouter(pool.pools, Random(1))
    for name, cached in zip(pool.names, (2, 5, 8), strict=True):
        pool.holds(name, prompt[: 4 * cached * BLOCK])
    other = pool.ask(words("other", 9 * BLOCK + 1))
    router.sent(other, pool.names[2], pool.state, 0.0)
    router.began(other.id)
    request = pool.ask(prompt + b"last")
    costs = router.costs(request, pool.names, pool.state)
    # One token more than ten blocks, since the last token is always computed.
    assert list(costs.values()) == pytest.approx([8 + 10, 5 + 10, 2 + 10 + 9], abs=0.1)
    assert router.choose(request, pool.names, pool.state, 0.0) == pool.names[1]
    # Blocks that several running requests share are active once.
    router.sent(pool.ask(prompt), pool.names[1], pool.state, 0.0)
    assert router.costs(request, pool.names, pool.state)[pool.names[1]] == pytest.approx(10 + 5 + 10 - 5, abs=1.1)


def test_dynamo_counts_what_is_to_be_computed_until_the_first_token_and_blocks_until_the_end() -> None:
    pool = Pool(2)
    router = KvRouter(pool.pools, Random(1))
    one, probe = pool.ask(words(1, 20 * BLOCK + 1)), pool.ask(words(2, BLOCK + 1))
    idle = router.costs(probe, pool.names, pool.state)[pool.names[0]]
    router.sent(one, pool.names[0], pool.state, 0.0)
    sent = router.costs(probe, pool.names, pool.state)[pool.names[0]]
    router.began(one.id)
    begun = router.costs(probe, pool.names, pool.state)[pool.names[0]]
    router.ended(Ended(one.id, pool.names[0]))
    assert (round(sent - idle), round(begun - idle)) == (40, 20)
    assert router.costs(probe, pool.names, pool.state)[pool.names[0]] == idle


def test_dynamo_queues_while_every_engine_has_batches_to_compute() -> None:
    pool = Pool(2)
    router = KvRouter(pool.pools, Random(1))
    enough = words(3, int(QUEUE_THRESHOLD * L4.prefill_tokens_per_step) + 1)
    assert not router.busy(pool.names, pool.state, 0.0)
    router.sent(pool.ask(enough), pool.names[0], pool.state, 0.0)
    assert not router.busy(pool.names, pool.state, 0.0)
    last = pool.ask(enough)
    router.sent(last, pool.names[1], pool.state, 0.0)
    assert router.busy(pool.names, pool.state, 0.0)
    router.began(last.id)
    assert not router.busy(pool.names, pool.state, 0.0)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1), st.booleans()), max_size=20))
def test_dynamo_forgets_what_is_over(sent: list[tuple[int, int, bool]]) -> None:
    pool = Pool(2)
    router = KvRouter(pool.pools, Random(1))
    probe = pool.ask(words("probe", 40))
    idle = router.costs(probe, pool.names, pool.state)
    asked = [(pool.ask(words(text, 50 + 30 * text)), pool.names[at], begins) for text, at, begins in sent]
    for request, name, begins in asked:
        router.sent(request, name, pool.state, 0.0)
        if begins:
            router.began(request.id)
    for request, name, _ in asked:
        router.ended(Ended(request.id, name))
    assert router.costs(probe, pool.names, pool.state) == idle
