"""Replicas come a warm-up after they were asked for, and go at once."""

from __future__ import annotations

from farhop_lab.sim.autoscaler import LOOK_S, Autoscaler
from farhop_lab.sim.sites import Reporting, flat, station
from farhop_lab.sim.world import World


def test_replicas_start_after_a_delay_and_stop_immediately() -> None:
    world = World(
        1, flat(["paris"]), {"paris": station(8, 1.0, replicas=4)}, balancers={}, reporting=Reporting(every_s=1.0)
    )
    wanted: list[int | None] = [None]
    scaler = Autoscaler(world, "paris", lambda: wanted[0], first=1, warm_up_s=7.0)
    assert scaler.serving() == 1
    world.run(LOOK_S + 1.0)
    assert (scaler.serving(), scaler.history) == (1, [])
    wanted[0] = 3
    world.run(2 * LOOK_S + 6.9)
    assert scaler.serving() == 1  # and replicas that are on their way are not requested again
    world.run(2 * LOOK_S + 7.1)
    assert scaler.serving() == 3
    wanted[0] = 2
    world.run(5 * LOOK_S + 0.1)
    assert scaler.serving() == 2
    assert scaler.history[0] == (2 * LOOK_S, 3, 1)
