"""Overload in virtual time, on the live engine's physics: goodput stays flat where sending blindly loses most of it.

Good is what is answered whole within its deadline. Two L4s, prompts of 512 tokens, answers of 100: 4.3 a second by
what a request takes on average, 4.7 with full batches. Sent blindly 3 times as much, over the seeds 1 to 6: none.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import msgspec
from worlds import until_concluded

from farhop.balance.quota import Quota
from farhop.balance.quota_holder import Holder, new_holding
from farhop.balance.quota_root import Root
from farhop_lab.sim.measures import quantile
from farhop_lab.sim.sites import flat, gpus
from farhop_lab.sim.world import World
from topology.model import Rule

CAPACITY_PER_S, DEADLINE_S, LONG_S, WARM_S = 4.3, 20.0, 66.0, 26.0


class Run(msgspec.Struct):
    good_per_s: float
    ttft_p90_ms: float
    waiting_per_engine: float
    violations: int
    by_tenant: dict[str, float]


def topology():
    """Two tenants, one of them in a higher band."""
    made = flat(["paris"], tenants={"t": Rule(("world",)), "high": Rule(("world",))})
    return replace(made, tenants={**made.tenants, "high": replace(made.tenants["high"], priority=5)})


@cache
def run(load: float, *, blind: bool = False, high_share: float = 0.0, deadline_s: float = DEADLINE_S) -> Run:
    site = gpus("l4", 2, seed=1)
    if blind:  # every request goes to an engine as it comes, and waits there
        everything = {"slots": 100_000, "kv_tokens": 10**9, "prefill_tokens_max": 10**9, "prefill_ms_per_token": 1e-6}
        site = msgspec.structs.replace(site, replica=msgspec.structs.replace(site.replica, **everything))
    world = World(5, topology(), {"paris": site}, balancers={})
    world.journal.violations_only()
    waiting: list[int] = []
    for tenant, share in (("t", 1.0 - high_share), ("high", high_share)):
        if share:
            world.stream(load * CAPACITY_PER_S * share, lambda t=tenant: ask(world, t, deadline_s), until=LONG_S)
    for second in range(int(WARM_S), int(LONG_S)):
        world.at(float(second), lambda: waiting.append(sum(e.metrics()[0] for e in engines(world))))
    measures = until_concluded(world, LONG_S, LONG_S + deadline_s + 1.0)
    good = [record for record in measures.records if record.outcome == "served" and record.arrived_at >= WARM_S]
    came = {
        tenant: sum(f.tenant == tenant and f.arrived_at >= WARM_S for f in measures.records) for tenant in ("t", "high")
    }
    # None ends after its deadline: it is given up then. Those that end later had the capacity of the time after it.
    ended = sum(record.outcome == "served" and WARM_S <= record.ended_at < LONG_S for record in measures.records)
    print(
        f"\n{load:g} times{', blind' if blind else ''}: {ended / (LONG_S - WARM_S):.2f} answers a second in time",
        end="",
    )
    return Run(
        good_per_s=ended / (LONG_S - WARM_S),
        ttft_p90_ms=quantile(measures.ttft_ms(since=WARM_S), 0.9),
        waiting_per_engine=sum(waiting) / len(waiting) / len(engines(world)),
        violations=measures.violations,
        by_tenant={t: sum(f.tenant == t for f in good) / n for t, n in came.items() if n},
    )


def ask(world: World, tenant: str, deadline_s: float) -> None:
    world.arrive("paris", tenant, 2048, answer_tokens=100, deadline_s=deadline_s, direct=True)


def engines(world: World):
    return world.regions["paris"].engines.values()


def test_goodput_stays_flat_at_three_times_the_capacity() -> None:
    assert run(0.9).good_per_s > 0.85 * CAPACITY_PER_S
    for load in (1.5, 3.0):
        assert run(load).good_per_s > 0.93 * CAPACITY_PER_S, load
        assert run(load).ttft_p90_ms < 5_000.0
        assert run(load).violations == 0


def test_requests_queue_in_the_balancer_and_not_in_an_engine() -> None:
    here, blind = run(3.0).waiting_per_engine, run(3.0, blind=True).waiting_per_engine
    assert here < 1.0  # that waits for its engine's next step
    assert blind > max(3.0, 5.0 * here)


def test_sending_blindly_loses_more_than_two_thirds_of_the_capacity() -> None:
    assert run(3.0, blind=True).good_per_s < CAPACITY_PER_S / 3


def test_overload_by_a_lower_priority_does_not_delay_a_higher_one() -> None:
    """A fifth of all that comes is of the higher band, 0.6 of the capacity; every fourth turn is the oldest's."""
    shares = run(3.0, high_share=0.2, deadline_s=40.0).by_tenant
    assert shares["high"] == 1.0
    # A sixth of them while it lasts: the rest of the capacity. In the 30 s after it, those that stepped back have all
    # of that: no more than another 0.21 of all requests that came.
    assert shares["t"] < 0.38


def test_shared_long_prompt_is_counted_once() -> None:
    """One A100 and a system prompt of 1,500 tokens before 170 of one's own: 20 a second are some 170 at once,
    where 74 whole prompts would fit. Counted by marks alone they wait for up to two seconds."""
    world = World(5, flat(["paris"]), {"paris": gpus("a100", 1, seed=1)}, balancers={})
    world.journal.violations_only()
    system, rng = b"You are a helpful assistant. " * 207, world.rng("questions")
    until = 25.0

    def ask() -> None:
        text = system + rng.randbytes(340).hex().encode()
        world.arrive("paris", "t", text=text, direct=True, answer_tokens=180)

    world.stream(20.0, ask, until=until)
    measures = until_concluded(world, until, until + 20.0)
    assert set(measures.outcomes) == {"served"}
    assert quantile(measures.ttft_ms(since=10.0), 0.9) < 1000.0


TENANTS, EACH_PER_S, ABUSIVE = 100, 0.11, 200  # seven tenths of the answers to short ones


class Limited:
    """A tenant's limit of what each asks for, lent by its root as a balancer has it."""

    def __init__(self, world: World) -> None:
        self._world, size = world, Quota(60 * EACH_PER_S, EACH_PER_S)
        self._root, self._holder = Root({}, 0.0, 1), Holder()
        self._root.configure({"b": size}, 0.0)
        self._mine = self._holder.holdings["b"] = new_holding("b", size, None, 0.0)
        self.refused = 0

    def lets_in(self) -> bool:
        now, mine = self._world.now, self._mine
        self._holder.alive(now)
        if not mine.fits(1, now):
            mine.waiting = 1
            asked = self._holder.asked(now)
            self._root.snapshot(now)
            self._root.written()
            self._holder.on_reply(self._root.exchange("h", asked, now), asked, now)
            mine.waiting = 0
        if not mine.fits(1, now):
            self.refused += 1
            return False
        mine.settle(1, 1, mine.take(1), now)
        return True


def others(times: int, limit: bool, until: float, deadline_s: float) -> tuple[list[Any], int]:
    """What became of the requests of all tenants but the first, which asks so many times as often as each of them and
    may be held to as much as they ask for; and how many of its requests were refused by that."""
    names = [f"t{n}" for n in range(TENANTS)]
    law = flat(["paris"], tenants={name: Rule(("world",)) for name in names})
    world = World(5, law, {"paris": gpus("l4", 2, seed=1)}, balancers={})
    world.journal.violations_only()
    limited = Limited(world)

    def ask(tenant: str) -> None:
        if tenant != names[0] or not limit or limited.lets_in():
            world.arrive("paris", tenant, 512, answer_tokens=20, deadline_s=deadline_s, direct=True)

    for n, name in enumerate(names):
        rng, at = Random(n), 0.0
        while (at := at + rng.expovariate(EACH_PER_S * (times if n == 0 else 1))) < until:
            world.at(at, ask, name)
    records = until_concluded(world, until, until + deadline_s + 1.0).records
    return [record for record in records if record.tenant != names[0]], limited.refused


def others_ttft_ms(times: int) -> tuple[float, int]:
    """The 99th percentile of their time to the first token while it is held to its limit, and its refusals."""
    records, refused = others(times, limit=True, until=LONG_S, deadline_s=30.0)
    assert all(record.outcome == "served" for record in records)
    return quantile(sorted(record.ttft_ms for record in records if record.ttft_ms is not None), 0.99), refused


def test_other_tenants_are_unaffected_by_one_at_two_hundred_times_its_limit() -> None:
    (calm_ms, none), (abused_ms, refused) = others_ttft_ms(1), others_ttft_ms(ABUSIVE)
    assert none == 0
    assert refused > 1000
    assert abused_ms <= 1.1 * calm_ms


def test_a_flood_without_a_limit_hardly_delays_others() -> None:
    """Twice what the region can do is asked of it, two thirds by one tenant. Of the others, who ask for less than their
    share, 0.64 were served while all who waited stood before each, and who had never been answered was refused for the
    length of an answer that was a guess."""
    records, _ = others(ABUSIVE, limit=False, until=40.0, deadline_s=60.0)
    served = sum(record.outcome == "served" for record in records)
    assert served > 0.96 * len(records)  # 0.965 to 0.982 of them with three seeds
