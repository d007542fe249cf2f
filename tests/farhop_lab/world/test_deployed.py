"""Faults in what a platform runs: its own commands, by labels alone, and as many afterwards as there were before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from farhop_lab.world.deployed import Containers, FaultsFile, Pods, command, describe, described
from farhop_lab.world.faults import FaultCommand, FaultError, Faults


class Platform:
    """What it was told, and what it answers to what begins so."""

    def __init__(self, **says: str) -> None:
        self.commands: list[str] = []
        self.says = {"docker ps --filter": "paris\nvirginia\n", **says}
        self.fails = ""

    async def __call__(self, *words: str) -> str:
        line = " ".join(words)
        self.commands.append(line)
        if self.fails and self.fails in line:
            raise FaultError("it cannot")
        return next((text for begins, text in self.says.items() if line.startswith(begins)), "")

    def acted(self) -> list[str]:
        return [one for one in self.commands if not one.startswith(("docker ps", "kubectl --namespace fleet get"))]


def wanted(do: str, region: str = "paris", **more: str) -> FaultCommand:
    return FaultCommand(do=do, lease_s=60.0, for_s=120.0, region=region, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "broken", "mended"),
    [
        (wanted("kill-engines"), ["docker kill a b"], ["docker start a b"]),
        (wanted("stop-engines"), ["docker pause a b"], ["docker unpause a"]),  # b is gone in the meantime
        (wanted("stop-etcd", "", hub="paris"), ["docker pause a b"], ["docker unpause a"]),
    ],
)
async def test_containers_are_broken_and_mended(one: FaultCommand, broken: list[str], mended: list[str]) -> None:
    platform = Platform(**{"docker ps -q --no-trunc --filter status=paused": "a\n", "docker ps -q": "a\nb\n"})
    faults = Faults(Containers("here", platform))
    await faults.make("f", one)
    assert platform.acted() == broken
    assert all("label=com.docker.compose.project=here" in each for each in platform.commands if "status" not in each
               and each.startswith("docker ps"))  # fmt: skip
    await faults.mend("f")
    assert platform.acted() == [*broken, *mended]
    assert faults.active == []


async def test_pods_come_back_as_many_as_they_were() -> None:
    platform = Platform(
        **{"kubectl --namespace fleet get": "Deployment/regional 2\nStatefulSet/engines 3\nDeployment/off 0\n"}
    )
    faults = Faults(Pods("fleet", run=platform))
    await faults.make("f", wanted("kill-region"))
    scale, delete = platform.acted()
    assert scale == "kubectl --namespace fleet scale --replicas=0 deployment/regional statefulset/engines"
    assert delete.startswith("kubectl --namespace fleet delete pods --selector farhop.dev/region=paris,")
    assert "--grace-period=0 --force" in delete
    await faults.mend_all()
    assert platform.acted()[2:] == [
        "kubectl --namespace fleet scale --replicas=2 deployment/regional",
        "kubectl --namespace fleet scale --replicas=3 statefulset/engines",
    ]


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (wanted("freeze-link", to="virginia"), "is not made in containers"),
        (wanted("kill-engines", "atlantis"), "no region 'atlantis'"),
        (wanted("kill-engines", ""), "give a region"),
        (wanted("kill-engines"), "nothing of that runs"),
    ],
)
async def test_impossible_fault_is_refused_before_any_change(one: FaultCommand, why: str) -> None:
    platform = Platform()
    faults = Faults(Containers("here", platform))
    with pytest.raises(FaultError, match=why):
        await faults.make("f", one)
    assert (platform.acted(), faults.active) == ([], [])


async def test_a_platform_that_runs_nothing_of_a_fleet_is_named_at_once() -> None:
    assert await Containers("here", Platform()).regions() == ["paris", "virginia"]
    assert await Pods("fleet", run=Platform(**{"kubectl --namespace fleet get": "paris\nparis\n"})).regions() == [
        "paris"
    ]
    with pytest.raises(FaultError, match="compose project typo: no running container with the label"):
        await Containers("typo", Platform(**{"docker ps --filter": "\n"})).regions()
    with pytest.raises(FaultError, match="namespace typo: no deployment or stateful set"):
        await Pods("typo", run=Platform()).regions()


async def test_partly_failed_fault_is_rolled_back() -> None:
    platform = Platform(**{"docker ps -q": "a\nb\n"})
    platform.fails = "docker kill"
    faults = Faults(Containers("here", platform))
    with pytest.raises(FaultError, match="it cannot"):
        await faults.make("f", wanted("kill-engines"))
    assert platform.acted() == ["docker kill a b", "docker start a b"]
    assert faults.active == []


async def test_failed_command_raises_a_one_line_reason() -> None:
    with pytest.raises(FaultError, match="No such file"):
        await command("no-such-command-here")
    with pytest.raises(FaultError, match=r"cannot access|No such file"):
        await command("ls", "/no/such/folder")
    assert await command("echo", "yes") == "yes\n"


def test_the_fault_process_is_found_while_it_runs_and_for_its_own_fleet(tmp_path: Path) -> None:
    path = tmp_path / "x" / "faults.json"
    assert described(path, "prod") is None
    describe(path, FaultsFile(os.getpid(), "prod", "http://127.0.0.1:1", "t"))
    assert path.stat().st_mode & 0o777 == 0o600
    assert described(path, "prod") == FaultsFile(os.getpid(), "prod", "http://127.0.0.1:1", "t")
    assert described(path, "staging") is None
    describe(path, FaultsFile(2**22 + 1, "prod", "http://127.0.0.1:1", "t"))
    assert described(path, "prod") is None
    path.write_text("{")
    assert described(path, "prod") is None
