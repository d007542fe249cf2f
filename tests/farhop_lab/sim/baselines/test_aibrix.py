"""AIBrix: its own end-to-end test, request by request."""

from __future__ import annotations

from random import Random

from farhop_lab.sim.baselines.aibrix import PrefixCache, whole_blocks
from tests.farhop_lab.sim.baselines.pools import Pool


def test_aibrix_goes_the_way_of_its_own_test() -> None:
    """Test_PrefixCacheE2E: four pods, blocks of four characters, requests that do not end."""
    pool = Pool(4)
    router, state = PrefixCache(Random(1), block=4), pool.state

    def route(text: bytes) -> str:
        request = pool.ask(text)
        name = router.choose(request, pool.names, state, 0.0)
        router.sent(request, name, state, 0.0)
        state.sent(request, name)
        return name

    p4 = route(b"abcdefgh")
    p3 = route(b"wxyz")
    assert p3 != p4, "no match: the fewest requests"
    assert route(b"abcdefgh") == p4, "a match, and the load is even enough"
    p2 = route(b"abcd")
    assert p2 not in (p3, p4), "a match where there are more than mean + deviation: the fewest requests"
    assert route(b"abcdefghijkl") == p2, "the shorter match, since the longer one is too busy"
    assert route(b"abcdefgh") in (p2, p4)
    for _ in range(6):
        state.sent(pool.ask(b"abcdefgh"), p2)
    (p1,) = set(pool.names) - {p2, p3, p4}
    assert route(b"abcdefgh") == p1, "severely uneven: only who has the fewest counts"


def test_aibrix_counts_whole_blocks() -> None:
    assert [whole_blocks(depth, 300, 128) for depth in (0, 127, 128, 299, 300)] == [0, 0, 1, 2, 3]
