"""Which etcd clusters a process uses, and how: one by name, or the topology's hubs, each by its own credentials."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import aetcd.rpc
import pytest
import yaml

from farhop.config import ConfigError
from farhop.service.assembly import stores
from farhop.service.config.process import Process
from farhop.store.contract import ChangeKind, StoreError
from farhop.store.envelope import NO_KEYS
from farhop.store.etcd_link import EtcdClient
from farhop.store.etcd_settings import EtcdSettings
from farhop.store.hubs import Hubs, store_of
from farhop.store.sealed import Sealed
from farhop.telemetry import logs
from farhop.telemetry.logs import Throttled
from farhop.telemetry.metrics import TierMetrics
from farhop_lab.memory_store import MemoryStore
from farhop_lab.world.certs import Authority
from farhop_lab.world.etcd import EmbeddedEtcd
from topology import load as topologies
from topology.law import Law

if TYPE_CHECKING:
    from topology.model import Topology

ONE = {"endpoints": ["10.9.9.9:1"], "insecure": True}
HOMES = {"virginia": "atlantic", "frankfurt": "europe", "tokyo": "pacific"}
HUBS = {"atlantic": ["10.0.0.1:2379"], "europe": ["10.0.1.1:2379"], "pacific": ["10.0.2.1:2379"]}


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARHOP_TEST_ETCD", "right")


@pytest.fixture
def world(tmp_path: Path) -> Topology:
    return made(tmp_path, HUBS)


def made(folder: Path, hubs: dict[str, list[str]]) -> Topology:
    document: dict[str, Any] = topologies.document(topologies.shipped("three-regions").read_text(), "three-regions")
    document["hubs"] = hubs
    for region in document["regions"]:
        region["hub"] = HOMES[region["name"]]
    path = folder / "world.yaml"
    path.write_text(yaml.safe_dump(document))
    return topologies.load(path)


def process(region: str = "virginia", **more: Any) -> Process:
    hop = {"keys": {"k1": "env:FARHOP_TEST_HOP"}, "active": "k1"}
    return Process.model_validate(
        {"region": region, "instance": "i", "admin": {"port": 0}, "hop": hop, "etcd": {"insecure": True}, **more}
    )


def test_without_an_etcd_of_ones_own_every_hub_is_used(world: Topology) -> None:
    found = stores.hubs(process(), world)
    assert {name: list(one.endpoints) for name, one in found.items()} == HUBS


def test_a_given_etcd_is_the_only_one_and_has_the_hubs_name(world: Topology) -> None:
    found = stores.hubs(process(etcd=ONE), world)
    assert {name: one.endpoints for name, one in found.items()} == {"atlantic": ("10.9.9.9:1",)}
    assert stores.home_hubs(process(etcd=ONE), world, stores.NEAREST) == found


@pytest.mark.parametrize(
    ("region", "remote", "used"),
    [
        ("virginia", "nearest", ["atlantic", "europe"]),  # 91 ms, and 166 to Tokyo
        ("frankfurt", "nearest", ["atlantic", "europe"]),
        ("tokyo", "nearest", ["atlantic", "pacific"]),
        ("virginia", "pacific", ["atlantic", "pacific"]),
        ("virginia", "none", ["atlantic"]),
        ("virginia", "atlantic", ["atlantic"]),
    ],
)
def test_a_region_publishes_at_home_and_at_one_remote(
    world: Topology, region: str, remote: str, used: list[str]
) -> None:
    assert list(stores.home_hubs(process(region), world, remote)) == used


def test_each_hub_has_its_own_way_to_be_reached_and_others_the_common_one(world: Topology) -> None:
    config = process(
        etcd={"ca_file": "/common-ca"},
        hubs={"pacific": {"endpoints": ["https://10.5.5.5:1"], "username": "u", "password": "env:FARHOP_TEST_ETCD"}},
    )
    found = stores.hubs(config, world)
    assert (found["atlantic"].ca_file, found["atlantic"].username) == (Path("/common-ca"), None)
    pacific = found["pacific"]
    assert (pacific.endpoints, pacific.ca_file, pacific.username, pacific.password) == (
        ("https://10.5.5.5:1",), None, "u", "right",
    )  # fmt: skip


def test_a_contradictory_configuration_of_etcd_is_refused_by_name(world: Topology, tmp_path: Path) -> None:
    for config, remote, why in (
        (
            process(hubs={"baltic": {}}),
            "nearest",
            r"^hubs\.baltic: .* has no hub of this name; it has atlantic",
        ),
        (
            process(etcd=ONE, hubs={"europe": {}}),
            "nearest",
            r"^etcd\.endpoints: .*one cluster",
        ),
        (process(), "baltic", r"^remote_hub: no hub 'baltic' with endpoints; there is atlantic, europe, pacific"),
    ):
        with pytest.raises(ConfigError, match=why):
            stores.home_hubs(config, world, remote)
    empty = made(tmp_path, {**HUBS, "atlantic": []})
    with pytest.raises(ConfigError, match="hub 'atlantic' of the topology has none"):
        stores.hubs(process(), empty)
    assert list(stores.hubs(process("tokyo"), empty)) == ["europe", "pacific"]  # no other process needs it


async def login_demanded(endpoint: str) -> None:
    client = EtcdClient(endpoint, EtcdSettings((endpoint,)), None)
    await client.connect()
    try:
        auth = aetcd.rpc.AuthStub(client.channel)
        await auth.UserAdd(aetcd.rpc.AuthUserAddRequest(name="root", password="right"))
        await auth.RoleAdd(aetcd.rpc.AuthRoleAddRequest(name="root"))
        await auth.UserGrantRole(aetcd.rpc.AuthUserGrantRoleRequest(user="root", role="root"))
        await auth.AuthEnable(aetcd.rpc.AuthEnableRequest())
    finally:
        await client.close()


async def test_real_hubs_one_by_client_certificate_and_one_by_password(tmp_path: Path) -> None:
    """And who has the wrong one is served by the other hub, and told which one refuses him, and why."""
    authority = Authority(tmp_path)
    server, client = authority.issue("server"), authority.issue("client")
    flags = (f"--cert-file={server.cert_file}", f"--key-file={server.key_file}")
    trust = ("--client-cert-auth", f"--trusted-ca-file={authority.ca_file}")
    async with (
        EmbeddedEtcd(scheme="https", extra=(*flags, *trust)) as atlantic,
        EmbeddedEtcd(extra=("--bcrypt-cost=4",)) as europe,
    ):
        await login_demanded(europe.endpoint)
        world = made(tmp_path, {"atlantic": [atlantic.endpoint], "europe": [europe.endpoint], "pacific": []})
        tls = {"ca_file": authority.ca_file, "cert_file": client.cert_file, "key_file": client.key_file}
        login = {"username": "root", "password": "env:FARHOP_TEST_ETCD"}
        store = store_of(stores.hubs(process(hubs={"atlantic": tls, "europe": login}), world), Random(1))
        assert isinstance(store, Hubs)
        await store.open()
        try:
            publication = await store.publish("/farhop/v1/x", b"1", 5.0)
            assert await store.put("/farhop/v1/word", b"{}") > 0
            assert store.unreached == {}
            assert await publication.update(b"2")
            watch = store.watch("/farhop/v1/")
            change = await anext(watch)
            assert (change.kind, len(change.entries)) == (ChangeKind.SNAPSHOT, 2)
            await watch.aclose()
        finally:
            await store.close()
        wrong = process(hubs={"atlantic": tls, "europe": {**login, "username": "nobody"}})
        store = store_of(stores.hubs(wrong, world), Random(1))
        assert isinstance(store, Hubs)
        await store.open()
        try:
            await store.put("/farhop/v1/word", b"{}")
            assert list(store.unreached) == ["europe"]
        finally:
            await store.close()
        with pytest.raises(StoreError, match=r"hub atlantic: .*hub europe: "):
            await store_of(stores.hubs(process(), world), Random(1)).open()


def test_the_folder_kept_on_disk_is_named_by_fleet_tier_region_and_instance(world: Topology, tmp_path: Path) -> None:
    assert stores.state(process(), "global") is None
    kept = stores.state(process(state_dir=str(tmp_path), fleet="f1"), "global")
    assert kept is not None
    assert kept.path("law") == tmp_path / "f1" / f"global.{process().region}.{process().instance}" / "law"
    with pytest.raises(ConfigError, match="state_dir: owner"):
        stores.state(process(state_dir=str(tmp_path), instance="x" * 128), "global")


async def test_readers_see_what_is_signed_as_configured_and_the_book_what_was_written(world: Topology) -> None:
    store = stores.sealed(MemoryStore(Random(1)), NO_KEYS, lambda _: None, Random(1))
    assert isinstance(store, Sealed)
    book = stores.law_book(
        process(), "global", store, Law(world), lambda _: None, TierMetrics("global", "tokyo", "g"),
        Throttled(logs.get("test"), 1.0, lambda: 0.0), Random(1),
    )  # fmt: skip
    assert book.status()["source"] == f"topology {world.name}"
    hubs = stores.sealed({"a": EtcdSettings(("127.0.0.1:1",)), "b": EtcdSettings(("127.0.0.1:2",))}, NO_KEYS,
                         lambda _: None, Random(1))  # fmt: skip
    assert isinstance(hubs, Hubs)
    assert all(isinstance(one, Sealed) for one in hubs.stores.values())
    assert stores.ignored(hubs, "a") == []
    (one, _) = hubs.stores.values()
    assert isinstance(one, Sealed)
    one.ignored = {f"/k/{n}": "key_unknown_key" for n in range(20)}
    ((hub, documents, such_as),) = [found.values() for found in stores.ignored(hubs, "a")]
    assert (hub, documents, len(such_as)) == ("a", 20, 8)
    metrics = TierMetrics("global", "paris", "paris-1")
    stores.observe(metrics, hubs, "a")
    assert b"farhop_ignored_documents" in metrics.render()
    assert float(metrics.render().partition(b"\nfarhop_ignored_documents{")[2].partition(b"} ")[2].split()[0]) == 20.0
