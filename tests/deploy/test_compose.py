"""deploy/compose as shipped, with the image built here: restarts and a cut network under streaming load."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import machine
import pytest
import yaml

from farhop_lab.world.client import Result, answer
from farhop_lab.world.deployed import Containers
from farhop_lab.world.faults import FaultCommand, Faults
from farhop_lab.world.ports import free_ports

pytestmark = [pytest.mark.docker]

COMPOSE = machine.DEPLOY / "compose" / "docker-compose.yaml"
UP_S = 300.0
CLIENTS = 6
KEY = "sk-farhop-anywhere"


class Compose:
    """The world of docker-compose.yaml, on ports of its own, under a name of its own: what ends one ends no other."""

    def __init__(self, image: str, etcd_image: str, name: str = "world") -> None:
        self.project = f"farhop-test-{os.getpid()}-{name}"
        names = (
            "ETCD_PARIS",
            "ETCD_VIRGINIA",
            "PARIS",
            "PARIS_ADMIN",
            "VIRGINIA",
            "VIRGINIA_ADMIN",
            "DNS_PARIS",
            "DNS_VIRGINIA",
            "PROMETHEUS",
        )
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        self._environment = {
            "FARHOP_IMAGE": image,
            "ETCD_IMAGE": etcd_image,
            "SPEEDUP": "2",  # at 10 the streams take both cores, and the restarts beside them 50 s, not 36
            "COMPOSE_PROJECT_NAME": self.project,
            **{f"{name}_PORT": str(port) for name, port in self.ports.items()},
        }
        self.entries = [f"http://127.0.0.1:{self.ports[region]}" for region in ("PARIS", "VIRGINIA")]

    def __call__(self, *arguments: str, timeout_s: float = 120.0, check: bool = True) -> str:
        command = ("docker-compose", "-f", str(COMPOSE), *arguments)
        return machine.run(*command, timeout_s=timeout_s, environment=self._environment, check=check).stdout

    def observed(self, image: str) -> str:
        """Start the Prometheus of the profile `observe`; its URL."""
        self._environment["PROMETHEUS_IMAGE"] = image
        self("--profile", "observe", "up", "-d", "--no-deps", "prometheus")
        return f"http://127.0.0.1:{self.ports['PROMETHEUS']}"

    def container(self, service: str) -> str:
        return self("ps", "-q", service).strip()

    def ready(self, region: str) -> bool:
        return self._asked(f"http://127.0.0.1:{self.ports[f'{region.upper()}_ADMIN']}/readyz")

    def up_in(self, service: str) -> bool:
        """Whether a balancer or engine without a published port says that it is ready."""
        asked = ("exec", self.container(service), "farhop", "healthcheck", "--ready")
        return machine.docker(*asked, check=False).returncode == 0

    @staticmethod
    def _asked(url: str) -> bool:
        try:
            with urllib.request.urlopen(url, timeout=2.0) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def wait(self, services: tuple[str, ...] = (), within_s: float = UP_S) -> None:
        """Until both entries and these regional balancers are ready."""
        end = time.monotonic() + within_s
        waiting = [
            *(lambda r=r: self.ready(r) for r in ("paris", "virginia")),
            *(lambda s=s: self.up_in(s) for s in services),
        ]
        while waiting:
            waiting = [ready for ready in waiting if not ready()]
            assert time.monotonic() < end, self("logs", "--tail=15")[-6000:]
            if waiting:
                time.sleep(0.3)


REGIONALS = tuple(f"regional-{region}-{number}" for region in ("paris", "virginia") for number in (1, 2))


@pytest.fixture(scope="module")
def compose(image: str, etcd_image: str) -> Iterator[Compose]:
    world = Compose(image, etcd_image)
    try:
        world("up", "-d", timeout_s=UP_S)
        world.wait(REGIONALS)
        yield world
    finally:
        world("down", "--volumes", "--timeout", "3", "--remove-orphans", check=False)


class Load:
    """Clients that stream one answer after another; each knows both entries, in an order of its own."""

    def __init__(self, entries: list[str]) -> None:
        self._entries = entries
        self.results: list[Result] = []
        self._over = asyncio.Event()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(self._client(number))

    def stop(self) -> None:
        self._over.set()

    async def _client(self, number: int) -> None:
        entries = self._entries[:: 1 if number % 2 else -1]
        asked = 0
        while not self._over.is_set():
            asked += 1
            body = {
                "model": "llama-3.1-8b", "stream": True, "max_tokens": 120, "min_tokens": 120,
                "messages": [{"role": "user", "content": f"client {number}, question {asked}"}],
            }  # fmt: skip
            self.results.append(await answer(entries, KEY, body))

    @property
    def lost(self) -> list[str]:
        """Requests that were not answered, though no answer had begun."""
        return [str(one.error) for one in self.results if one.error is not None and one.ttft_ms is None]

    @property
    def cut(self) -> list[str]:
        """Streams that began and broke off."""
        return [str(one.error) for one in self.results if one.error is not None and one.ttft_ms is not None]


def under_load(compose: Compose, cut: tuple[str, ...], mend: tuple[str, ...], cut_s: float) -> tuple[Load, list[str]]:
    """Run two docker commands, so long after each other, while clients stream; what the commands said at fault."""

    async def drill() -> tuple[Load, list[str]]:
        load = Load(compose.entries)
        running = asyncio.create_task(load.run())
        faults: list[str] = []
        await asyncio.sleep(1.0)
        for step, pause_s in ((cut, cut_s), (mend, 2.0)):
            ended = await asyncio.to_thread(machine.docker, *step, timeout_s=90.0, check=False)
            if ended.returncode:
                faults.append(ended.stderr)
            await asyncio.sleep(pause_s)
        load.stop()
        await running
        return load, faults

    return asyncio.run(drill())


def test_an_operators_context_reaches_the_compose_fleet(compose: Compose, tmp_path: Path) -> None:
    """By the context that is shipped with it, its ports those of this world."""
    context = yaml.safe_load((machine.DEPLOY / "compose" / "context.yaml").read_text())
    context["topology"] = str(machine.DEPLOY / "compose" / context["topology"])
    context["admin"]["urls"] = [f"http://127.0.0.1:{compose.ports[f'{r}_ADMIN']}" for r in ("PARIS", "VIRGINIA")]
    for region in ("paris", "virginia"):
        context["hubs"][region]["endpoints"] = [f"127.0.0.1:{compose.ports[f'ETCD_{region.upper()}']}"]
    path = tmp_path / "context.yaml"
    path.write_text(yaml.safe_dump(context))
    own = {"XDG_CONFIG_HOME": str(tmp_path)}
    farhop = (sys.executable, "-m", "farhop_cli")
    machine.run(*farhop, "context", "set", "compose", "--file", str(path), environment=own)
    status = machine.run(*farhop, "status", "--context", "compose", "--json", environment=own, check=False)
    # 3: regional balancers publish no port, and say that their containers' names are their addresses.
    assert status.returncode == 3, status.stdout + status.stderr
    output = json.loads(status.stdout)
    assert sorted(one["region"] for one in output["global"] if one.get("status")) == ["paris", "virginia"], output[
        "global"
    ]
    assert output["down"] == []
    assert len(output["unreachable"]) == len(REGIONALS)
    assert all(any(name in line for line in output["unreachable"]) for name in REGIONALS), output["unreachable"]


def test_the_observers_prometheus_knows_every_balancer_and_its_rules(prometheus_image: str) -> None:
    """It alone, as the profile starts it: its mounts can be read, and its targets are where admin ports are."""
    world = Compose("none", "none", "observed")
    try:
        url = world.observed(prometheus_image)

        def queried(path: str) -> Any:
            with urllib.request.urlopen(f"{url}/api/v1/{path}", timeout=5.0) as answer:
                return json.load(answer)["data"]

        end = time.monotonic() + 120.0
        while True:
            try:
                groups, targets = queried("rules")["groups"], queried("targets")["activeTargets"]
            except OSError:
                groups, targets = [], []
            if targets and groups and all(rule["health"] == "ok" for group in groups for rule in group["rules"]):
                break
            assert time.monotonic() < end, (groups, world("logs", "--tail=15", "prometheus")[-3000:])
            time.sleep(0.5)
    finally:
        world("down", "--volumes", "--timeout", "3", check=False)
    shipped = yaml.safe_load((machine.DEPLOY / "prometheus" / "farhop.rules.yaml").read_text())["groups"]
    assert {group["name"] for group in groups} == {group["name"] for group in shipped}
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    asked = {}
    for name, service in services.items():
        if "FARHOP_CONFIG" in service.get("environment", {}) and not name.startswith("dns-"):
            config = COMPOSE.parent / "config" / Path(service["environment"]["FARHOP_CONFIG"]).name
            asked[f"{name}:{yaml.safe_load(config.read_text())['admin']['port']}"] = "wan" in service["networks"]
    assert {one["discoveredLabels"]["__address__"] for one in targets} == asked.keys()
    assert all(asked.values())  # in its network


@pytest.mark.skipif(shutil.which("dig") is None, reason="dig is not installed")
@pytest.mark.parametrize("way", ["+notcp", "+tcp"])
def test_dns_leads_each_network_to_its_entry_and_names_the_other_behind_it(compose: Compose, way: str) -> None:
    compose.wait(("dns-paris", "dns-virginia"))
    for port in (compose.ports["DNS_PARIS"], compose.ports["DNS_VIRGINIA"]):
        for network, entries in (("198.51.100.0/24", [10, 20]), ("203.0.113.0/24", [20, 10])):
            asked = (
                "@127.0.0.1",
                "-p",
                str(port),
                "api.entry.example",
                f"+subnet={network}",
                way,
                "+short",
                "+tries=5",
            )
            output = machine.run("dig", *asked).stdout.split()
            assert output == [f"192.0.2.{last}" for last in entries], (port, network)


def test_every_container_is_hardened_and_published_on_loopback_alone(compose: Compose) -> None:
    for identity in compose("ps", "-q").split():
        (output,) = json.loads(machine.docker("inspect", identity).stdout)
        for bound in (output["NetworkSettings"]["Ports"] or {}).values():
            assert {each["HostIp"] for each in bound or ()} <= {"127.0.0.1"}
        if "etcd" not in output["Name"]:
            assert output["HostConfig"]["ReadonlyRootfs"], output["Name"]
            assert output["HostConfig"]["CapDrop"] == ["ALL"], output["Name"]
            assert output["Config"]["User"] == "65532:65532"


def test_a_rolling_restart_of_every_balancer_cuts_no_stream(compose: Compose) -> None:
    """One after another, as a rollout does: the next goes once the one before is ready again."""

    async def drill() -> Load:
        load = Load(compose.entries)
        running = asyncio.create_task(load.run())
        await asyncio.sleep(1.0)
        for service in (*REGIONALS, "global-paris", "global-virginia"):
            name = compose.container(service)
            await asyncio.to_thread(machine.docker, "restart", "--time=45", name, timeout_s=90.0)
            await asyncio.to_thread(compose.wait, (service,) if service in REGIONALS else ())
        load.stop()
        await running
        return load

    load = asyncio.run(drill())
    assert (load.cut, load.lost) == ([], [])
    assert Counter(one.status for one in load.results) == {200: len(load.results)}
    assert len(load.results) > 2 * CLIENTS


def test_a_drills_fault_kills_a_regions_engines_and_starts_them_again(compose: Compose) -> None:
    """As `farhop drill faults --compose` does it, which finds them by their labels."""
    engines = [compose.container(f"engine-paris-{number}") for number in (1, 2)]

    def alive() -> list[bool]:
        return [machine.docker("inspect", "-f", "{{.State.Running}}", one).stdout.strip() == "true" for one in engines]

    async def drill() -> tuple[list[bool], list[bool]]:
        faults = Faults(Containers(compose.project))
        await faults.make("f", FaultCommand(do="kill-engines", region="paris", lease_s=60.0, for_s=120.0))
        broken = await asyncio.to_thread(alive)
        await faults.mend("f")
        return broken, await asyncio.to_thread(alive)

    assert asyncio.run(drill()) == ([False, False], [True, True])
    compose.wait(REGIONALS)


CUT_S = 12.0
DEAD_S = 20.0  # about 8 s after its last message a host counts as dead; and the delay that a busy machine adds


def test_a_host_whose_network_is_cut_loses_no_request_that_had_not_begun(compose: Compose) -> None:
    """And what had begun there ends with an error event, in time: no client waits for a dead host."""
    name = compose.container("engine-paris-1")
    network = f"{compose.project}_paris"
    load, faults = under_load(
        compose,
        ("network", "disconnect", network, name),
        ("network", "connect", "--alias=engine-paris-1", network, name),
        CUT_S,
    )
    assert (faults, load.lost) == ([], [])
    assert len(load.results) > CLIENTS
    for one in load.results:
        if one.error is not None:
            assert one.error.code != "stream_broken", one  # it got an error, and did not just lose its connection
            assert one.total_ms / 1e3 < DEAD_S, one
