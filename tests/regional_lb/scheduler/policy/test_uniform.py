"""By chance alone."""

from __future__ import annotations

from collections import Counter
from random import Random

from worlds import replica, replicas_of

from farhop.balance.ledger import Reservation
from regional_lb.scheduler.pick import pick
from regional_lb.scheduler.policy import Need
from regional_lb.scheduler.policy.uniform import Uniform, WeightedRandom

NEED = Need(prompt_tokens=256.0, output_tokens=100.0, bytes_per_token=4.0)


def drawn(policy, known) -> Counter[str]:
    policy.adopt(known.whole.of.names)
    rng = Random(1)
    return Counter(pick(NEED, known.whole, (), policy, 0.0, rng).chosen.replica for _ in range(3000))


def test_the_uniform_policy_ignores_load() -> None:
    known = replicas_of(*(replica(name, slots=9) for name in "abc"), reserved=[Reservation("a", 0, 10)] * 5)
    assert all(900 < count < 1100 for count in drawn(Uniform(), known).values())


def test_chances_follow_weights() -> None:
    known = replicas_of(*(replica(name) for name in "abc"))
    counts = drawn(WeightedRandom({"a": 4.0}), known)
    assert 1850 < counts["a"] < 2150
    assert 400 < counts["b"] < 600
