from __future__ import annotations

from farhop_lab.sim.context import SimContext
from farhop_lab.sim.sites import Reporting, Watching, flat


def context(seed: int = 1) -> SimContext:
    return SimContext(seed, flat(["a"]), Reporting(), Watching())


def test_every_part_has_its_own_random_generator_derived_from_the_seed() -> None:
    first, second = context().rng("region a"), context().rng("region b")
    assert first.random() != second.random()
    assert context().rng("region a").random() == context().rng("region a").random()
    assert context(1).rng("region a").random() != context(2).rng("region a").random()


def test_periodic_work_stays_on_its_time_grid() -> None:
    world = context()
    seen: list[float] = []
    world.every(0.1, lambda: seen.append(world.timeline.now))
    world.timeline.run(100.05)
    assert len(seen) == 1001
    assert all(abs(at - n * 0.1) < 1e-9 for n, at in enumerate(seen))


def test_a_world_that_has_stood_begins_before_zero_and_keeps_its_grid() -> None:
    world = SimContext(1, flat(["a", "b"], 100.0), Reporting(), Watching(), stood_s=5.0)
    seen: list[float] = []
    came: list[float] = []
    world.every(0.5, lambda: seen.append(world.timeline.now))
    world.wire.send("a", "b", lambda: came.append(world.timeline.now))
    world.timeline.run(1.0)
    assert seen == [n / 2 for n in range(-10, 3)]
    assert came == [-4.95]
