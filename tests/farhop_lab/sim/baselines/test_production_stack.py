"""The two rules of vLLM's production-stack."""

from __future__ import annotations

from random import Random

from farhop_lab.sim.baselines.production_stack import RATE_WINDOW_S, KvAware, PrefixAware
from tests.farhop_lab.sim.baselines.pools import Pool, words


def test_kvaware_goes_where_all_but_2000_tokens_are_held_and_else_by_session_and_rate() -> None:
    pool = Pool(3)
    router, (a, b, c) = KvAware(pool.pools), pool.names
    long = words("long", 3000)
    pool.holds(b, long[: 4 * 1000])
    assert router.choose(pool.ask(long), pool.names, pool.state, 0.0) == a, "2,008 are missing: 992 count as held"
    pool.holds(b, long[: 4 * 1040])
    assert router.choose(pool.ask(long), pool.names, pool.state, 0.0) == b
    assert router.choose(pool.ask(long[:400] + words("other", 100)), pool.names, pool.state, 0.0) == b, (
        "any match of it"
    )
    for at, name in ((0.0, a), (1.0, a), (2.0, b)):
        router.sent(pool.ask(b"x"), name, pool.state, at)
    fresh = words("fresh", 300)
    assert router.choose(pool.ask(fresh), pool.names, pool.state, 2.0) == c, "none in a minute"
    router.sent(pool.ask(b"x"), c, pool.state, 3.0)
    router.sent(pool.ask(b"x"), c, pool.state, 3.0)
    assert router.choose(pool.ask(fresh), pool.names, pool.state, 3.0) == b
    assert router.choose(pool.ask(fresh), pool.names, pool.state, 1.5 + RATE_WINDOW_S) == a, "its two are forgotten"
    homes = {router.choose(pool.ask(words(n, 30), session=7), pool.names, pool.state, 3.0) for n in range(9)}
    assert len(homes) == 1


def test_prefixaware_follows_the_longest_prefix_sent_at_any_load() -> None:
    pool = Pool(3)
    router = PrefixAware(Random(1))
    first, same = words("a", 64), words("b", 64)
    router.sent(pool.ask(first + same), pool.names[1], pool.state, 0.0)
    for _ in range(50):
        pool.state.in_flight[pool.names[1]] += 1
        assert router.choose(pool.ask(first + words("c", 99)), pool.names, pool.state, 0.0) == pool.names[1]
    assert {router.choose(pool.ask(words(n, 64)), pool.names, pool.state, 0.0) for n in range(40)} == set(pool.names)
