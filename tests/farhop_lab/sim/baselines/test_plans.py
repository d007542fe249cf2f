from __future__ import annotations

import pytest

from farhop_lab.sim.baselines.plans import PLANS
from farhop_lab.sim.baselines.process import EngineRoom
from farhop_lab.sim.scenery import Reporting, Watching, flat, gpus
from farhop_lab.sim.stage import Stage

HOME, AWAY = ["us/gpu-0", "us/gpu-1"], ["eu/gpu-0", "eu/gpu-1"]


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("region-local", HOME),
        ("central-least-load", HOME + AWAY),
        ("spill-sglang", HOME + AWAY),
        ("waterfall", HOME + AWAY),
        ("skywalker", [*HOME, "eu"]),
        ("skywalker-blind", HOME),
        ("gorgo", HOME + AWAY),
        ("gorgo-distributed", [*HOME, "eu"]),
        ("local-llm-d", HOME),
        ("omniscient", HOME + AWAY),
    ],
)
def test_a_router_reaches_what_its_plan_says(name: str, targets: list[str]) -> None:
    stage = Stage(1, flat(["us", "eu"], 90.0), Reporting(), Watching())
    rooms = {region: EngineRoom(stage, region, gpus("l4", 2)) for region in ("us", "eu")}
    board = PLANS[name].router(stage, "us", rooms).board
    assert list(board.targets) == targets
    assert board.rtt_ms["eu"] == 90.0
    assert {target.prefill_ms_per_token for target in board.targets.values()} == {0.59}


def test_the_published_constants() -> None:
    skywalker = PLANS["skywalker"]
    assert (skywalker.watch.probe_s, skywalker.pace_s, skywalker.each) == (0.1, 0.01, True)
    assert PLANS["gorgo"].watch.rtt_s == 30.0
    assert PLANS["central-llm-d"].watch.probe_s < 0.2, "older metrics would count as saturated"
    assert not any(plan.each for name, plan in PLANS.items() if name.startswith("central-"))
