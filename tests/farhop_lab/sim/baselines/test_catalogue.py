from __future__ import annotations

from random import Random

import pytest

from farhop_lab.sim.baselines.catalogue import ROUTERS
from farhop_lab.sim.baselines.process import EnginePool
from farhop_lab.sim.context import SimContext
from farhop_lab.sim.sites import Reporting, Watching, flat, gpus

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
    context = SimContext(1, flat(["us", "eu"], 90.0), Reporting(), Watching())
    pools = {region: EnginePool(context, region, gpus("l4", 2)) for region in ("us", "eu")}
    state = ROUTERS[name].router(context, "us", pools, Random(1)).state
    assert list(state.targets) == targets
    assert state.rtt_ms["eu"] == 90.0
    assert {target.prefill_ms_per_token for target in state.targets.values()} == {0.59}


def test_the_published_constants() -> None:
    skywalker = ROUTERS["skywalker"]
    assert (skywalker.probes.probe_s, skywalker.pause_s, skywalker.each) == (0.1, 0.01, True)
    assert (ROUTERS["skywalker-unpaced"].pause_s, ROUTERS["skywalker-unpaced"].probes) == (0.0, skywalker.probes)
    assert ROUTERS["gorgo"].probes.rtt_s == 30.0
    assert ROUTERS["central-llm-d"].probes.probe_s < 0.2, "older metrics would count as saturated"
    assert not any(spec.each for name, spec in ROUTERS.items() if name.startswith("central-"))


def test_every_router_is_built_for_every_place() -> None:
    for name in ("aibrix", "dynamo", "kvaware", "preble", "prefixaware"):
        assert {f"central-{name}", f"local-{name}", f"spill-{name}"} <= ROUTERS.keys()
