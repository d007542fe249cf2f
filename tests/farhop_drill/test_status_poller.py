"""What balancers say, put together."""

from __future__ import annotations

import asyncio
from typing import Any

from farhop_drill.status_poller import StatusPoller, seen


def status(state: str, used: float, epoch: int) -> dict[str, Any]:
    instance = {"models": {"m": {"used_share": used}, "n": {"used_share": 0.1}}}
    return {"law_epoch": epoch, "regions": [{"region": "tokyo", "state": state, "instances": [instance]}]}


def test_the_worst_state_and_the_fullest_share_count() -> None:
    look = seen([status("up", 0.2, 1), status("suspect", 0.4, 2), status("up", 0.3, 2)], 5.0)
    assert look is not None
    assert (look.states, look.used, look.epochs) == ({"tokyo": "suspect"}, {"tokyo": 0.4}, (1, 2, 2))
    assert seen([], 1.0) is None
    paced = status("up", 0.2, 1)
    paced["regions"][0]["admitted_share"] = 0.3
    back = seen([paced, status("up", 0.2, 1)], 5.0)
    assert back is not None
    assert back.states == {"tokyo": "returning"}
    paced["regions"][0]["admitted_share"] = 0.0
    begins = seen([paced], 5.0)
    assert begins is not None
    assert begins.states == {"tokyo": "returning"}, "none of what would go there does"


def test_a_pilot_light_is_awake_once_no_balancer_reports_it_asleep() -> None:
    def piloted(state: str) -> dict[str, Any]:
        found = status("up", 0.0, 1)
        found["regions"][0] |= {"pilot_light": {"state": state}, "admitted_share": 0.0 if state == "asleep" else 1.0}
        return found

    for states, awake in ((("asleep", "waking"), False), (("waking", "awake"), True)):
        look = seen([*map(piloted, states), status("up", 0.2, 1)], 0.0)
        assert look is not None
        assert (look.pilots, look.states) == ({"tokyo": awake}, {"tokyo": "up"})


async def test_a_balancer_that_does_not_answer_delays_no_other_and_its_status_is_dropped() -> None:
    now = [0.0]

    async def silent() -> None:
        await asyncio.Event().wait()

    async def read_status() -> dict[str, Any]:
        return status("up", 0.2, 1)

    poller = StatusPoller([silent, read_status], lambda: now[0])
    poller.begin()
    while (look := poller.look(0.0)) is None:
        await asyncio.sleep(0)
    assert look.states == {"tokyo": "up"}
    now[0] = 60.0
    assert poller.look(0.0) is None
    await poller.close()
