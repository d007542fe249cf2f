"""deploy/etcd/roles.sh with a real etcd: a region may write only its own keys, which is enough for its balancer."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import machine
import pytest
import uvloop
import yaml

from farhop.store.contract import entry_key, limit_root_key
from farhop_lab.world.child import Child
from farhop_lab.world.etcd import EmbeddedEtcd, find_binary
from farhop_lab.world.ports import free_ports
from tests.conftest import NO_CERTIFICATES

ROLES = machine.DEPLOY / "etcd" / "roles.sh"


class Hub:
    """etcdctl at one etcd, as some user."""

    def __init__(self, endpoint: str) -> None:
        self._environment = {
            **os.environ,
            "PATH": f"{find_binary().parent}:{os.environ['PATH']}",
            "ETCDCTL_ENDPOINTS": endpoint,
            "ETCDCTL_API": "3",
        }

    def roles(self, *arguments: str, password: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(ROLES), *arguments], input=password, env=self._environment, capture_output=True, text=True,
            timeout=30.0, check=False,
        )  # fmt: skip

    def put(self, user: str, key: str) -> bool:
        return self.ran(user, "put", key, "x")

    def get(self, user: str, key: str) -> bool:
        return self.ran(user, "get", key)

    def keys(self, user: str) -> str:
        found = ["etcdctl", "--user", f"{user}:{user}-password", "get", "--prefix", "--keys-only", "/farhop/v1/region/"]
        return subprocess.run(found, env=self._environment, capture_output=True, text=True, check=True).stdout

    def ran(self, user: str, *arguments: str) -> bool:
        command = ["etcdctl", "--user", f"{user}:{user}-password", *arguments]
        ended = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        assert ended.returncode == 0 or "permission denied" in ended.stderr, ended.stderr
        return ended.returncode == 0


def test_a_region_writes_its_own_keys_alone_and_its_balancer_works_with_that(tmp_path: Path) -> None:
    async def drill() -> None:
        async with EmbeddedEtcd(folder=tmp_path / "etcd") as etcd:
            hub = Hub(etcd.endpoint)
            for arguments in (("region", "virginia"), ("region", "tokyo"), ("operators",), ("enable",)):
                user = {"operators": "operators", "enable": "root"}.get(arguments[0], arguments[-1])
                ended = hub.roles(*arguments, password=f"{user}-password\n")
                assert ended.returncode == 0, ended.stderr
            assert hub.put("virginia", "/farhop/v1/region/virginia/lb/x")
            assert hub.put("virginia", "/farhop/v1/replica/virginia/gpu-1")
            assert hub.put("virginia", "/farhop/v1/policy/law")
            assert hub.put("virginia", entry_key("virginia", "g-1"))
            assert hub.put("virginia", limit_root_key("virginia"))
            assert hub.get("virginia", "/farhop/v1/region/tokyo/lb/x")
            for key in ("region/tokyo/lb/x", "region/virginia2/lb/x", "replica/tokyo/gpu-1", "override/drain/virginia",
                        "steer/bias/tokyo", "policy/lawful", "entry/tokyo/g-1", "limit-root/tokyo",
                        "limit-root/virginia2"):  # fmt: skip
                assert not hub.put("virginia", f"/farhop/v1/{key}"), key
            assert not hub.put("virginia", "/another/program")
            assert hub.put("operators", "/farhop/v1/override/drain/virginia")
            assert not hub.put("operators", "/another/program")
            for key in (
                "/farhop/v1/policy/law",
                "/farhop/v1/override/drain/virginia",
                "/farhop/v1/replica/virginia/gpu-1",
            ):
                assert hub.ran("operators", "del", key)
            await _balanced(etcd.endpoint, hub, tmp_path)

    uvloop.run(drill())


async def _balanced(endpoint: str, hub: Hub, folder: Path) -> None:
    """A regional balancer with those rights starts, and its report stands there."""
    (engine,) = free_ports(1)
    config = {
        "region": "virginia",
        "instance": "r-1",
        "admin": {"port": 0},
        "tier": {"port": 0},
        "control": {"port": 0},
        "replicas": [{"url": f"http://127.0.0.1:{engine}", "models": ["m"]}],
        "etcd": {
            "endpoints": [endpoint.removeprefix("http://")],
            "username": "virginia",
            "password": "env:ETCD_PASSWORD",
        },
        "hop": {"keys": {"k1": "env:HOP_KEY"}, "active": "k1"},
    }
    path = folder / "regional.yaml"
    path.write_text(yaml.safe_dump(config))
    environment = {"HOP_KEY": "x" * 32, "ETCD_PASSWORD": "virginia-password", **NO_CERTIFICATES}
    child = Child("regional", ["regional", "--config", str(path)], folder / "log", environment)
    await child.start()
    try:
        assert "/farhop/v1/region/virginia/lb/r-1" in hub.keys("tokyo")
    finally:
        await child.stop()


@pytest.mark.parametrize("arguments", [(), ("region",), ("region", "a b"), ("region", "../x"), ("drop",)])
def test_arguments_that_make_no_sense_are_refused_before_etcd_is_asked(arguments: tuple[str, ...]) -> None:
    ended = subprocess.run([str(ROLES), *arguments], input="", capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("usage: ")
