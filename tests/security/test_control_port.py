"""Attacks on the control port and on reports in etcd: every claimed identity must be proven."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from farhop_wire import peers_pb2, peers_pb2_grpc, region_pb2, region_pb2_grpc
from inprocess import Engine, global_config, regional_config, topology
from peer_stage import Other, Stage
from regions import a_report, config, watching

from farhop.identity import certificate_names
from farhop.store.contract import report_key
from farhop.store.documents.report import encode, to_wire
from farhop.store.envelope import Keys, Signer, public_key
from farhop.store.sealed import Sealed
from farhop_lab.memory_store import MemoryCluster, MemoryStore
from farhop_lab.world.certs import Authority, Pair
from regional_lb.app.main import RegionalBalancer
from regional_lb.mesh import report

DENIED = grpc.StatusCode.PERMISSION_DENIED


def private_key() -> bytes:
    return Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def pair(authority: Authority, tier: Any, region: str) -> Pair:
    domain = "farhop.internal"
    found = (certificate_names.host(domain, tier, region), certificate_names.uri(domain, tier, region), "127.0.0.1")
    return authority.issue(f"{tier}-{region}", found)


@contextlib.asynccontextmanager
async def virginia(authority: Authority) -> AsyncIterator[tuple[RegionalBalancer, str]]:
    """A regional balancer whose control port asks for certificates, and where that is."""
    own = pair(authority, "regional", "virginia")
    files = {"cert_file": own.cert_file, "key_file": own.key_file}
    port = {"port": 0, "tls": {**files, "client_ca_file": authority.ca_file}}
    async with Engine().running() as engine:
        made = regional_config(engine, tier=port, control=port, client=None,
                               peers={"tls": {"ca_file": authority.ca_file, **files}})  # fmt: skip
        balancer = RegionalBalancer(made, topology(), Random(1), MemoryStore(Random(2), MemoryCluster()))
        try:
            await balancer.open()
            assert balancer.mesh.reporter is not None
            yield balancer, balancer.mesh.reporter.build().control_address
        finally:
            await balancer.close()


def read(*files: str) -> list[bytes]:
    return [Path(name).read_bytes() for name in files]


@contextlib.asynccontextmanager
async def channel(address: str, authority: Authority, own: Pair) -> AsyncIterator[grpc.aio.Channel]:
    pem = read(authority.ca_file, own.key_file, own.cert_file)
    options = (
        ("grpc.ssl_target_name_override", "virginia.regional.farhop.internal"),
        ("grpc.use_local_subchannel_pool", 1),
    )
    async with grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(*pem), options=options) as made:
        yield made


async def code(call: Any) -> grpc.StatusCode:
    """How a call begins: OK if anything is said."""
    try:
        if hasattr(call, "read"):
            await call.read()
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    finally:
        call.cancel()
    return grpc.StatusCode.OK


async def test_the_certificate_alone_decides_what_a_peer_may_read_and_report(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    asks = {
        "reports": lambda up, _: region_pb2_grpc.RegionStub(up).Reports(region_pb2.ReportsRequest(balancer="x")),
        "prefixes": lambda up, region: region_pb2_grpc.RegionStub(up).Prefixes(
            region_pb2.PrefixesRequest(balancer="x", region=region, law_epoch=1)
        ),
        "follow": lambda up, region: peers_pb2_grpc.PeersStub(up).Follow(
            peers_pb2.FollowRequest(region="virginia", instance="r9", control_address="127.0.0.1:9")
        ),
        "ping": lambda up, _: region_pb2_grpc.RegionStub(up).Ping(region_pb2.PingRequest(nonce=1)),
        "law": lambda up, _: region_pb2_grpc.RegionStub(up).Law(region_pb2.LawExchange(sender="x", epoch=1)),
    }  # fmt: skip
    # By certificate: its permissions. The requested prefixes are Tokyo's, which only Tokyo's global balancer may see.
    may = {
        ("global", "tokyo"): {"reports", "prefixes", "ping", "law"},
        ("global", "frankfurt"): {"reports", "ping", "law"},
        ("regional", "virginia"): {"follow", "ping", "law"},
        ("regional", "tokyo"): {"ping", "law"},
    }
    async with virginia(authority) as (balancer, address):
        for (tier, region), allowed in may.items():
            async with channel(address, authority, pair(authority, tier, region)) as up:
                for what, ask in asks.items():
                    wanted = grpc.StatusCode.OK if what in allowed else DENIED
                    assert await code(ask(up, "tokyo")) is wanted, (tier, region, what)
        async with channel(address, authority, authority.issue("nobody", ("127.0.0.1",))) as up:
            for what, ask in asks.items():
                assert await code(ask(up, "tokyo")) is DENIED, what
        assert "127.0.0.1:9" in balancer.mesh.peers.links, "a proven peer is followed where it says that it is"


async def test_the_balancers_of_one_region_leave_streams_to_those_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "REGION_STREAMS_MAX", 2)
    authority = Authority(tmp_path)
    async with virginia(authority) as (balancer, address), contextlib.AsyncExitStack() as stack:
        tokyo, frankfurt = [
            region_pb2_grpc.RegionStub(
                await stack.enter_async_context(channel(address, authority, pair(authority, "global", region)))
            )
            for region in ("tokyo", "frankfurt")
        ]
        epoch = balancer.flow.law.epoch
        for name, asked in (
            ("Reports", lambda region: region_pb2.ReportsRequest(balancer="g", region=region)),
            ("Prefixes", lambda region: region_pb2.PrefixesRequest(region=region, law_epoch=epoch)),
        ):
            held = [getattr(tokyo, name)(asked("tokyo"), timeout=60.0) for _ in range(2)]
            for one in held:
                await one.read()
            assert await code(getattr(tokyo, name)(asked("tokyo"), timeout=60.0)) is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await code(getattr(frankfurt, name)(asked("frankfurt"), timeout=60.0)) is grpc.StatusCode.OK
            for one in held:
                one.cancel()


async def test_an_unproven_peer_is_not_dialled_and_its_loads_do_not_count() -> None:
    """`Follow` with an address of the attacker's: today's region asked there, and believed a huge load."""
    fake = Other("r9", loads=[peers_pb2.ReplicaLoad(replica="g1", known=True, in_flight=1 << 40)])
    await fake.start()
    try:
        stage = Stage()
        stage.peers.met("r9", fake.address, proven=False)
        assert stage.refused["peer_unproven_address"] == 1
        assert (fake.address in stage.peers.links, fake.asked) == (False, [])
    finally:
        await fake.stop()


async def test_a_report_overwritten_draws_no_prompt_to_its_writer() -> None:
    """Virginia is told that Tokyo is elsewhere; what was known stands."""
    private = Signer("tokyo-1", private_key()), Signer("paris-1", private_key())
    keys = Keys({one.name: (public_key(one.public), (f"report/{one.name[:5]}",)) for one in private})
    etcd = MemoryStore(Random(1), MemoryCluster())
    refused: list[str] = []
    store = Sealed(etcd, keys, refused.append)
    place = report_key("tokyo", "r1")
    genuine, stolen = encode(a_report()), encode(a_report(seq=9, incarnation=9, tier_address="6.6.6.6:80"))
    await etcd.put(place, private[0].seal(place, genuine))
    for attack in (stolen, private[1].seal(place, stolen), private[0].seal(report_key("tokyo", "r2"), stolen)):
        await etcd.put(place, attack)
        assert await store.get(place) is None
    assert refused == ["report_unsigned", "report_not_allowed", "report_bad_signature"]
    await etcd.put(place, private[0].seal(place, genuine))
    kept = await store.get(place)
    assert kept is not None
    assert kept.value == genuine


async def test_an_address_where_no_balancer_of_the_region_may_be_is_refused() -> None:
    hosts = {"tokyo": ["10.0.0.0/8", "*.tokyo.example", "127.0.0.1"]}
    made = config()
    strict = made.model_copy(update={"tier_insecure": False})
    assert not strict.allows("tokyo", "10.0.0.1"), "plaintext, and nothing says where Tokyo is"
    assert strict.allows("tokyo", "127.0.0.1")
    told_where = global_config(region_hosts=hosts)
    for host, allowed in {
        "10.9.9.9": True, "a.tokyo.example": True, "127.0.0.1": True, "6.6.6.6": False, "tokyo.example": False,
        "a.tokyo.example.evil": False, ".tokyo.example": False, "10.evil": False,
    }.items():  # fmt: skip
        assert told_where.allows("tokyo", host) is allowed, host
    async with watching() as (watcher, _, found):
        watcher.config = global_config(region_hosts=hosts)
        assert watcher.on_report(a_report(tier_address="6.6.6.6:80")) == "address_not_allowed"
        assert watcher.on_report(a_report(control_address="6.6.6.6:80")) == "address_not_allowed"
        assert watcher.on_report(a_report(client_url="https://evil.example")) == "address_not_allowed"
        assert found.names() == []
        assert watcher.on_report(a_report()) is None
        assert found.names() == ["r1"]


async def test_clients_are_sent_nowhere_that_only_an_unsigned_report_in_etcd_names(tmp_path: Path) -> None:
    """They would bring their prompts there, whatever the law says, and no certificate stops them."""
    mutual = global_config(tier_tls={"ca_file": Authority(tmp_path).ca_file})
    async with watching() as (watcher, _, found):
        watcher.on_report(a_report())  # its link is there
        watcher.config = mutual

        def sent_to() -> str:
            (one,) = found.view.regions["tokyo"].instances
            return one.client_url

        genuine, stolen = "https://tokyo.example", "https://evil.example"
        assert watcher.on_report(a_report(seq=2, client_url=stolen)) is None
        assert sent_to() == ""
        watcher.on_link_report(to_wire(a_report(seq=3, client_url=genuine)), ("tokyo", "r1"))
        assert sent_to() == genuine
        assert watcher.on_report(a_report(seq=4, client_url=genuine)) is None
        assert sent_to() == genuine
        assert watcher.on_report(a_report(seq=5, client_url=stolen)) is None
        assert sent_to() == ""
