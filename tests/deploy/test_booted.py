"""The units on a host that systemd has booted (a container): installed as deploy/README.md says, started, stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import machine
import pytest
import yaml

from farhop_lab.world.etcd import find_binary

if TYPE_CHECKING:
    from testcontainers.core.container import DockerContainer

pytestmark = [pytest.mark.docker]

UNITS = machine.DEPLOY / "systemd"
TIERS = ("regional", "global", "dns")
WATCHDOG_S = 5
READY_S = (
    240.0  # three Pythons start at once, and check their configuration first: on a busy machine that takes minutes
)
WORLD: dict[str, Any] = {
    **yaml.safe_load((machine.DEPLOY / "compose" / "config" / "world.yaml").read_text()),
    "hubs": {"paris": ["127.0.0.1:2379"]},
    "rtt_ms": {},
}
HOP_KEY = "HOP_KEY=a-key-between-the-tiers-of-this-test\n"
ASK = """
import json, urllib.request
body = {"model": "llama-3.1-8b", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
headers = {"authorization": "Bearer sk-farhop-anywhere", "content-type": "application/json"}
asked = urllib.request.Request("http://127.0.0.1:80/v1/chat/completions", json.dumps(body).encode(), headers)
with urllib.request.urlopen(asked, timeout=20) as answer:
    print(answer.status, answer.headers["x-farhop-region"])
"""


def configurations() -> dict[str, dict[str, Any]]:
    common = {"region": "paris", "instance": "env:INSTANCE", "topology": "world.yaml", "state_dir": "/var/lib/farhop"}
    hop = {"hop": {"keys": {"k1": "env:HOP_KEY"}, "active": "k1"}}
    replica = {"url": "http://127.0.0.1:8001", "models": ["llama-3.1-8b"], "name": "gpu-1"}
    regional = {"admin": {"port": 9002}, "tier": {"port": 9000}, "control": {"port": 9001}, "replicas": [replica]}
    zone = yaml.safe_load((machine.DEPLOY / "compose" / "config" / "dns-paris.yaml").read_text())["zones"]
    probe = {"scheme": "http", "families": ["ipv4"], "at": {"paris-1": "127.0.0.1:80"}}
    dns = {"admin": {"port": 8092}, "listen": {"hosts": ["127.0.0.1"], "port": 53}, "zones": zone, "probe": probe}
    return {
        "world.yaml": {
            **WORLD,
            **{key: [one for one in WORLD[key] if "paris" in one["name"]] for key in ("regions", "entries")},
        },
        "paris-regional.yaml": {**common, **hop, **regional},
        "paris-global.yaml": {**common, **hop, "admin": {"port": 8082}, "listen": {"port": 80}},
        "paris-dns.yaml": {**common, **dns},
    }


class Host:
    """A container whose first process is systemd."""

    def __init__(self, container: DockerContainer) -> None:
        self.name = container.get_wrapped_container().name

    def __call__(self, *command: str, check: bool = True, timeout_s: float = 60.0) -> str:
        """Run it there; what it said."""
        return machine.docker("exec", self.name, *command, check=check, timeout_s=timeout_s).stdout.strip()

    def put(self, text: str, at: str) -> None:
        self("python3", "-c", f"open({at!r}, 'w').write({text!r})")

    def shown(self, unit: str) -> dict[str, str]:
        named = "ActiveState,SubState,Result,NRestarts,MainPID,StatusText,ExecMainStatus"
        return dict(line.split("=", 1) for line in self("systemctl", "show", f"--property={named}", unit).splitlines())

    def until(self, true: Callable[[], bool], within_s: float = READY_S) -> None:
        end = time.monotonic() + within_s
        while not true():
            assert time.monotonic() < end, self("journalctl", "--no-pager", "--lines=60", check=False)
            time.sleep(0.5)


@pytest.fixture(scope="module")
def host(image: str) -> Iterator[Host]:
    """Farhop's image, booted as a host would be; etcd is this machine's."""
    groups = "/sys/fs/cgroup"
    new = Path(groups, "cgroup.controllers").exists()
    options: dict[str, Any] = {
        "network_mode": "none", "cap_add": ["SYS_ADMIN"], "tmpfs": ("/run", "/tmp"),
        "security_opt": ["seccomp=unconfined", "apparmor=unconfined"],
        "user": "root", "entrypoint": ["/lib/systemd/systemd"],
        "volumes": [(groups, groups, "rw" if new else "ro"), (str(find_binary()), "/usr/bin/etcd", "ro")],
        **({"cgroupns": "private"} if new else {}),
    }  # fmt: skip
    with machine.container(image, **options) as container:
        made = Host(container)
        made.until(lambda: made("systemctl", "is-system-running", check=False) == "running")
        yield made


def install(host: Host) -> None:
    """As deploy/README.md has it; the packages are those of the image, and a loop that stands is noticed sooner."""
    machine.docker("cp", f"{UNITS}/.", f"{host.name}:/etc/systemd/system/")
    for name, command in (("sysusers", ("systemd-sysusers",)), ("tmpfiles", ("systemd-tmpfiles", "--create"))):
        host("mv", f"/etc/systemd/system/farhop.{name}", f"/usr/lib/{name}.d/farhop.conf")
        host(*command)
    for name, document in configurations().items():
        host.put(yaml.safe_dump(document), f"/etc/farhop/{name}")
    for tier in TIERS:
        host.put(HOP_KEY, f"/etc/farhop/paris-{tier}.env")
        folder = f"/etc/systemd/system/farhop-{tier}@.service.d"
        host("mkdir", folder)
        host.put(f"[Service]\nEnvironment=PYTHONPATH=/opt/farhop\nWatchdogSec={WATCHDOG_S}\n", f"{folder}/test.conf")
    host("sh", "-c", "chgrp farhop /etc/farhop/* && chmod 640 /etc/farhop/*")
    host("systemctl", "daemon-reload")
    engine = ("/opt/farhop/bin/farhop", "engine", "--port", "8001", "--speedup", "100")
    host("systemd-run", "--unit=engine", "--setenv=PYTHONPATH=/opt/farhop", *engine)


def test_the_units_start_serve_are_watched_and_stop(host: Host) -> None:
    install(host)
    units = [f"farhop-{tier}@paris" for tier in TIERS]
    # Who starts before etcd waits for it, and says so; it neither fails nor is started again.
    host("systemctl", "start", "--no-block", *units)
    for unit in units:
        host.until(lambda: host.shown(unit)["StatusText"].startswith("waiting for etcd: "))  # noqa: B023 - used here
        assert (host.shown(unit)["ActiveState"], host.shown(unit)["NRestarts"]) == ("activating", "0")
    host("systemd-run", "--unit=etcd", "/usr/bin/etcd", "--data-dir=/tmp/etcd")
    host("systemctl", "enable", "--now", *units, timeout_s=READY_S)
    for unit in units:  # started is ready, for a unit that notifies
        shown = host.shown(unit)
        assert (shown["ActiveState"], shown["NRestarts"]) == ("active", "0"), shown
        assert shown["StatusText"].startswith("region paris: ")
        document = host("cat", f"/proc/{shown['MainPID']}/status").splitlines()
        status = {key: value.split() for key, _, value in (line.partition(":") for line in document)}
        assert status["NoNewPrivs"] == ["1"]
        assert status["Seccomp"] == ["2"]
        assert status["Uid"][0] == host("id", "--user", "farhop")
        assert int(status["CapEff"][0], 16) in (0, 1 << 10)  # ports below 1024, where a unit has them
    host.until(lambda: host("python3", "-c", ASK, check=False) == "200 paris")
    # Its output is in the journal, and systemd has no complaint about the unit there.
    journal = host("journalctl", "--no-pager", "--output=json", "--unit=farhop-global@paris")
    found = [json.loads(line)["MESSAGE"] for line in journal.splitlines()]
    assert any("paris-global.yaml: fine" in line for line in found), found
    systemd = [line for line in found if not line.startswith("{")]  # the balancer's own lines say that etcd failed it
    assert not [line for line in systemd if "already exists" in line or "Failed" in line], found
    # A loop that stands still is killed and started again.
    stopped = host.shown("farhop-global@paris")["MainPID"]
    host("sh", "-c", f"kill -STOP {stopped}")
    host.until(lambda: host.shown("farhop-global@paris")["NRestarts"] == "1")
    host.until(lambda: host.shown("farhop-global@paris")["ActiveState"] == "active")
    host.until(lambda: host("python3", "-c", ASK, check=False) == "200 paris")
    host("systemctl", "reload", "farhop-global@paris")
    assert host.shown("farhop-global@paris")["ActiveState"] == "active"
    host("systemctl", "stop", *units, timeout_s=120.0)
    for unit in units:
        shown = host.shown(unit)
        assert (shown["SubState"], shown["Result"], shown["ExecMainStatus"]) == ("dead", "success", "0"), (unit, shown)
    # A wrong configuration is refused before anything starts, in one line.
    host.put("region: nowhere\n", "/etc/farhop/paris-global.yaml")
    host("systemctl", "start", "farhop-global@paris", check=False, timeout_s=READY_S)
    assert host.shown("farhop-global@paris")["ActiveState"] != "active"
    journal = host("journalctl", "--no-pager", "--output=cat", "--unit=farhop-global@paris", "--lines=30")
    assert "/etc/farhop/paris-global.yaml" in journal
    assert "Traceback" not in journal
