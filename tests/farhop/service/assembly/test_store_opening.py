"""Processes that start before their etcd does, with a real one: each waits, says why, and begins when it answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import structlog
import yaml
from inprocess import HOP_KEY, until
from structlog.testing import capture_logs

from entry_anycast.app.config import AnycastConfig
from entry_anycast.app.main import AnycastProcess
from entry_dns.app.config import DnsConfig
from entry_dns.app.main import DnsServer
from farhop.config import load
from farhop.service.admin.server import AdminServer
from farhop.service.assembly import store_opening, stores
from farhop.store.contract import StoreError
from farhop.store.etcd import EtcdStore
from farhop.store.etcd_settings import EtcdSettings
from farhop.telemetry import logs
from farhop_lab.world.etcd import EmbeddedEtcd
from farhop_lab.world.ports import free_ports
from global_lb.app.config import GlobalConfig
from global_lb.app.main import GlobalBalancer
from regional_lb.app.config import RegionalConfig
from regional_lb.app.main import RegionalBalancer
from topology.load import shipped

if TYPE_CHECKING:
    from farhop.service.process.lifecycle import Daemon

ZONE = {"zone": "entry.example", "servers": ["ns1.entry.example"], "addresses": {"ns1.entry.example": ["192.0.2.53"]},
        "names": [{"name": "api.entry.example", "families": ["ipv4"]}]}  # fmt: skip
OF_EACH: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "regional": (RegionalConfig, RegionalBalancer, {
        "tier": {"port": 0}, "control": {"port": 0}, "replicas": [{"url": "http://127.0.0.1:9", "models": ["m"]}],
    }),
    "global": (GlobalConfig, GlobalBalancer, {"listen": {"port": 0}}),
    "dns": (DnsConfig, DnsServer, {"listen": {"port": 0}, "zones": [ZONE], "probe": {"every_s": 60.0}}),
    "anycast": (AnycastConfig, AnycastProcess, {
        "entry": "tokyo", "speaker": {"bird": {"socket": "/nonexistent/bird.ctl", "file": "/nonexistent/routes.conf"}},
        "probe": {"url": "http://127.0.0.1:9/readyz"},
    }),
}  # fmt: skip


def written(folder: Path, tier: str, etcd: str, admin: int, **more: Any) -> Path:
    """The configuration file of one process of Tokyo, and its map."""
    world = yaml.safe_load(shipped("three-regions").read_text())
    world["hubs"] = {name: [etcd] for name in world["hubs"]}
    world["entries"] = [
        {"name": "tokyo", "region": "tokyo", "ipv4": ["192.0.2.1"]},
    ]
    (folder / "map.yaml").write_text(yaml.safe_dump(world))
    hop = {"hop": {"keys": {"k1": "env:FARHOP_TEST_HOP"}, "active": "k1"}} if tier in ("regional", "global") else {}
    document = {
        "region": "tokyo", "instance": tier, "admin": {"port": admin}, "topology": str(folder / "map.yaml"),
        "etcd": {"endpoints": [etcd]}, **hop, **OF_EACH[tier][2], **more,
    }  # fmt: skip
    path = folder / f"{tier}.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


async def asked(port: int, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as answer:
        return answer.status, await answer.text()


async def waits(port: int, etcd: str) -> None:
    """Until the process says that it waits for this etcd; it is alive, and not ready."""
    async with asyncio.timeout(60.0):
        while True:
            with contextlib.suppress(aiohttp.ClientConnectionError):
                status, text = await asked(port, "/readyz")
                assert (status, text.splitlines()[0]) == (503, "not ready")
                if "waiting for etcd" in text:
                    break
            await asyncio.sleep(0.02)
    assert f"etcd at {etcd}: " in text
    assert "is it running, and is the address right?" in text
    assert await asked(port, "/healthz") == (200, "alive\n")
    status, text = await asked(port, "/status")
    assert (status, "waiting for etcd" in text) == (503, True)
    assert (await asked(port, "/metrics"))[0] == 200


@pytest.mark.parametrize("tier", ["regional", "global", "dns", "anycast"])
async def test_a_process_waits_for_its_etcd(tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    port, admin = free_ports(2)
    etcd = EmbeddedEtcd(port=port, folder=tmp_path / "etcd")
    kind, process, _ = OF_EACH[tier]
    config = load(kind, written(tmp_path, tier, etcd.endpoint, admin))
    daemon: Daemon = process(config, stores.topology_of(config), Random(1))
    with capture_logs() as lines:
        opening = asyncio.create_task(daemon.open())
        try:
            await waits(admin, etcd.endpoint)
            assert not opening.done()
            if tier in ("regional", "global"):
                assert (await asked(admin, "/console"))[0] == 503
            async with etcd:
                if tier == "anycast":  # goes on to its BGP daemon, which there is none of here
                    with pytest.raises(Exception, match="speaker"):
                        await opening
                else:
                    await opening
                    assert "waiting" not in (await asked(admin, "/readyz"))[1]
                    assert (await asked(admin, "/status"))[0] == 200
        finally:
            opening.cancel()
            await asyncio.wait((opening,))
            await daemon.close()
    told = [line["event"] for line in lines if "etcd" in line["event"]]
    assert told[0] == "waiting for etcd"
    assert told[-1] == "etcd answers"
    assert told.count("etcd answers") == 1


async def test_a_process_that_waits_for_etcd_stops_at_once(tmp_path: Path) -> None:
    port, admin = free_ports(2)
    path = written(tmp_path, "global", f"127.0.0.1:{port}", admin)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "farhop_cli", "global", "--config", str(path),
        env={**os.environ, "FARHOP_TEST_HOP": HOP_KEY}, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        await waits(admin, f"127.0.0.1:{port}")
        process.send_signal(signal.SIGTERM)
        _, printed = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0
    assert "stopped" in printed.decode().splitlines()[-1]


class _Admin(AdminServer):
    def __init__(self) -> None:
        self.starting = "starting"


async def test_an_error_that_retrying_cannot_mend_ends_the_start() -> None:
    async with EmbeddedEtcd() as etcd:
        settings = EtcdSettings((etcd.endpoint,), username="nobody", password="wrong")
        store, admin = EtcdStore(settings, Random(1)), _Admin()
        with pytest.raises(StoreError, match="check username and password"):
            await store_opening.opened(store, admin, logs.get("test"), Random(2))
        await store.close()
    assert admin.starting == "starting"


async def test_each_reason_for_waiting_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TLS that is not trusted is another matter than an etcd that is not there yet."""
    told: list[str] = []
    monkeypatch.setattr(store_opening.Notifier, "starting", lambda _self, why: told.append(why))
    (port,) = free_ports(1)
    etcd = EmbeddedEtcd(port=port)
    store, admin = EtcdStore(EtcdSettings((etcd.endpoint,), timeout_s=5.0), Random(1)), _Admin()
    with capture_logs() as lines:
        opening = asyncio.create_task(
            store_opening.opened(store, admin, structlog.get_logger(), Random(2)), name="open the store"
        )
        await until(lambda: len(told) >= 3)
        async with etcd:
            await opening
            await store.close()
    reasons = [line["why"] for line in lines if line["event"] == "waiting for etcd"]
    assert len(reasons) == len(set(reasons))
    assert set(told) == {f"waiting for etcd: {why}" for why in reasons}
    assert admin.starting == "starting"
