"""The units: sound, hardened, and answered by a real balancer as systemd wants it."""

from __future__ import annotations

import configparser
import re
import shutil
import socket
import time
from pathlib import Path

import machine
import pytest
import uvloop
import yaml

from farhop_lab.world.child import Child
from farhop_lab.world.etcd import EmbeddedEtcd
from farhop_lab.world.ports import free_ports
from tests.conftest import NO_CERTIFICATES

UNITS = sorted((machine.DEPLOY / "systemd").glob("*.service"))
EXPOSURE_MAX = 2.0
SYSTEMD = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def instance(unit: Path, folder: Path) -> Path:
    """The unit as an instance, with a program that is there: what it is checked with need not have Farhop installed."""
    made = folder / unit.name.replace("@.", "@paris.")
    made.write_text(unit.read_text().replace("/opt/farhop/bin/farhop", "/bin/true"))
    return made


@SYSTEMD
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_is_sound_and_hardened(unit: Path, tmp_path: Path) -> None:
    made = instance(unit, tmp_path)
    verified = machine.run("systemd-analyze", "verify", "--man=no", str(made), check=False)
    assert unit.stem.rstrip("@") not in verified.stdout + verified.stderr
    output = machine.run("systemd-analyze", "security", "--offline=true", "--no-pager", str(made)).stdout
    found = re.search(r"Overall exposure level.*: ([0-9.]+)", output)
    assert found is not None
    assert float(found[1]) <= EXPOSURE_MAX


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_has_time_for_the_drain_and_a_watchdog(unit: Path) -> None:
    from farhop.service.config.process import Limits

    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(unit)
    service = parser["Service"]
    assert service["Type"] == "notify"
    assert float(service["TimeoutStopSec"]) >= Limits().drain_s + 5.0
    assert float(service["WatchdogSec"]) >= 10.0
    assert service["User"] == "farhop"


def test_balancer_notifies_systemd_ready_watchdog_and_stopping(tmp_path: Path) -> None:
    admin, port = free_ports(2)
    notify = tmp_path / "notify"

    async def life(manager: socket.socket) -> list[str]:
        async with EmbeddedEtcd(folder=tmp_path / "etcd") as etcd:
            config = {
                "region": "virginia",
                "instance": "env:INSTANCE",
                "admin": {"port": admin},
                "listen": {"port": port},
                "etcd": {"endpoints": [etcd.endpoint.removeprefix("http://")]},
                "hop": {"keys": {"k1": "env:HOP_KEY"}, "active": "k1"},
            }
            path = tmp_path / "global.yaml"
            path.write_text(yaml.safe_dump(config))
            environment = {
                "HOP_KEY": "x" * 32, "INSTANCE": "global-7", "NOTIFY_SOCKET": str(notify), "WATCHDOG_USEC": "300000",
                **NO_CERTIFICATES,
            }  # fmt: skip
            child = Child("global", ["global", "--config", str(path)], tmp_path / "log", environment)
            line = await child.start()
            seen: list[str] = []
            end = time.monotonic() + 20.0
            while seen.count("WATCHDOG=1") < 3 and time.monotonic() < end:
                seen.append(manager.recv(4096).decode())
            assert await child.stop() == 0
            manager.setblocking(False)
            while "STOPPING=1\nSTATUS=draining" not in seen:
                seen.append(manager.recv(4096).decode())
            return [line, *seen]

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(notify))
        manager.settimeout(20.0)
        line, ready, *rest = uvloop.run(life(manager))
    assert ready == f"READY=1\nSTATUS={line.removeprefix('global: ')}"
    assert rest[:3] == ["WATCHDOG=1"] * 3
