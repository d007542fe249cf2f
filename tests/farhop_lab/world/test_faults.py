"""Faults under leases, on a world that only notes what is done to it; tests/drills has them on real processes."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from farhop_lab.world.child import ChildError
from farhop_lab.world.faults import Control, FaultCommand, FaultError, Faults, LocalWorld


class Piece:
    """A child, a hub, or the ocean."""

    def __init__(self, name: str, did: list[str]) -> None:
        self.name, self.did, self.pid = name, did, 1

    async def kill(self) -> None:
        self.pid = None  # type: ignore[assignment]
        self.did.append(f"kill {self.name}")

    def signal(self, number: signal.Signals) -> None:
        self.did.append(f"{number.name} {self.name}")

    def __getattr__(self, what: str) -> Any:
        return lambda *to: self.did.append(" ".join((what, self.name, *filter(None, to))))


class Noted:
    """A world of two regions."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.broken_starts = 0
        self.regions = {
            name: SimpleNamespace(
                engines=[Piece(f"{name}/0", self.did)], regional=Piece(f"{name}-regional", self.did),
                global_=Piece(f"{name}-global", self.did), engine_urls=["http://127.0.0.1:9"],
            )
            for name in ("tokyo", "virginia")
        }  # fmt: skip
        self.hubs = {"main": Piece("main", self.did)}
        self.network = Piece("ocean", self.did)

    async def start_engine(self, region: str, index: int) -> None:
        if self.broken_starts:
            self.broken_starts -= 1
            raise ChildError("did not start")
        self.regions[region].engines[index].pid = 2
        self.did.append(f"start {region}/{index}")

    async def start_regional(self, region: str) -> None:
        self.did.append(f"start {region}-regional")

    async def start_global(self, region: str) -> None:
        self.did.append(f"start {region}-global")


def wanted(do: str, region: str = "tokyo", **changed: Any) -> FaultCommand:
    return FaultCommand(**({"do": do, "lease_s": 60.0, "for_s": 120.0, "region": region} | changed))


@pytest.mark.parametrize(
    ("one", "broken", "mended"),
    [
        (wanted("kill-region"), {"kill tokyo/0", "kill tokyo-regional", "kill tokyo-global"},
         {"start tokyo/0", "start tokyo-regional", "start tokyo-global"}),
        (wanted("kill-engines"), {"kill tokyo/0"}, {"start tokyo/0"}),
        (wanted("kill-global"), {"kill tokyo-global"}, {"start tokyo-global"}),
        (wanted("stop-engines"), {"SIGSTOP tokyo/0"}, {"SIGCONT tokyo/0"}),
        (wanted("freeze-link", to="virginia"), {"freeze ocean tokyo virginia"}, {"heal ocean tokyo virginia"}),
        (wanted("cut-link", to="virginia"), {"cut ocean tokyo virginia"}, {"heal ocean tokyo virginia"}),
        (wanted("stop-etcd", region=""), {"pause main"}, {"resume main"}),
    ],
)  # fmt: skip
async def test_each_kind_of_fault_is_injected_and_mended(one: FaultCommand, broken: set[str], mended: set[str]) -> None:
    world = Noted()
    faults = Faults(LocalWorld(world))  # type: ignore[arg-type]
    await faults.make("f", one)
    assert (set(world.did), faults.active) == (broken, ["f"])
    world.did.clear()
    await faults.mend("f")
    assert (set(world.did), faults.active) == (mended, [])
    await faults.mend("f")
    assert set(world.did) == mended


async def test_a_fault_that_is_not_renewed_is_mended_and_a_renewed_one_ends_at_its_bound() -> None:
    world = Noted()
    faults = Faults(LocalWorld(world))  # type: ignore[arg-type]
    await faults.make("f", wanted("kill-engines", lease_s=0.05))
    await faults.make("g", wanted("kill-global", lease_s=0.05, for_s=0.2))
    for _ in range(1000):
        if "g" in faults.active:
            faults.renew("g", 60.0)
        if not faults.active:
            break
        await asyncio.sleep(0.01)
    assert faults.active == []
    assert {"start tokyo/0", "start tokyo-global"} <= set(world.did)
    with pytest.raises(FaultError, match="is no longer injected"):
        faults.renew("f", 1.0)


async def test_process_that_does_not_come_back_is_started_again() -> None:
    world = Noted()
    faults = Faults(LocalWorld(world))  # type: ignore[arg-type]
    await faults.make("f", wanted("kill-engines"))
    world.broken_starts = 2
    await faults.mend("f")
    assert world.did[-1] == "start tokyo/0"
    await faults.make("f", wanted("kill-engines"))
    world.broken_starts = 3
    with pytest.raises(FaultError):
        await faults.mend("f")
    assert faults.active == ["f"]
    await faults.mend("f")
    assert faults.active == []


@pytest.mark.parametrize(
    "one",
    [
        wanted("explode"), wanted("kill-region", region="atlantis"), wanted("kill-region", region=""),
        wanted("stop-etcd", hub="other"), wanted("kill-region", lease_s=float("nan")), wanted("kill-region", for_s=0.0),
    ],
)  # fmt: skip
async def test_an_impossible_fault_is_refused_and_nothing_is_injected(one: FaultCommand) -> None:
    world = Noted()
    faults = Faults(LocalWorld(world))  # type: ignore[arg-type]
    with pytest.raises(FaultError):
        await faults.make("f", one)
    assert (world.did, faults.active) == ([], [])


async def test_the_control_port_requires_the_token_and_lists_injected_faults() -> None:
    world = Noted()
    control = Control(Faults(LocalWorld(world)))  # type: ignore[arg-type]
    await control.start("127.0.0.1")
    fault = {"do": "kill-engines", "region": "tokyo", "lease_s": 60, "for_s": 60}
    known = {"authorization": f"Bearer {control.token}"}
    async with aiohttp.ClientSession() as http:
        for headers in ({}, {"authorization": "Bearer x"}):
            async with http.put(f"{control.url}/faults/f", json=fault, headers=headers) as answer:
                assert answer.status == 401
        assert world.did == []
        for questions, status in (([fault], 200), ([fault, {**fault, "do": "explode"}], 400), ([{"do": "x"}], 400)):
            async with http.post(f"{control.url}/faults", json=questions, headers=known) as answer:
                assert (answer.status, world.did) == (status, []), "asked, and not made"
        for method, path, body, status, active in (
            ("PUT", "/faults/f", fault, 200, ["f"]), ("PUT", "/faults/g", {"do": "x"}, 400, None),
            ("POST", "/faults/f/renew", {"lease_s": 5}, 200, ["f"]),
            ("POST", "/faults/g/renew", {"lease_s": 5}, 400, None),
            ("GET", "/faults", None, 200, ["f"]), ("DELETE", "/faults/f", None, 200, []),
        ):  # fmt: skip
            async with http.request(method, control.url + path, json=body, headers=known) as answer:
                assert (answer.status, (await answer.json()).get("faults")) == (status, active), path
    await control.close()
