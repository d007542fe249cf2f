"""How peers are found, which take part, and what becomes of silent ones."""

from __future__ import annotations

import asyncio
import socket

import grpc
import pytest
from inprocess import HOP_KEY, until
from peer_stage import Other, Stage, stage
from worlds import request

from farhop.balance.machine import RequestArrived
from farhop.store.contract import Change, ChangeKind
from farhop_lab.world.certs import Authority
from regional_lb.mesh import peers


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    monkeypatch.setattr(peers, "SILENT_S", 0.3)
    monkeypatch.setattr(peers, "GONE_S", 0.6)


async def test_a_start_knows_what_the_others_know_and_divides_the_replicas() -> None:
    async with stage(Other("r2"), Other("r3")) as here:
        assert (here.peers.warm, here.peers.up) == (True, 2)
        assert sorted(here.peers.ages_s()) == ["r2", "r3"]
        assert here.owned < 3
        assert here.one()["takes_part"]


async def test_unreachable_and_silent_peers_do_not_delay_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "WARM_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as swallowing:  # the kernel connects, no process reads
        port = swallowing.getsockname()[1]
        async with stage(opened=False, peers={"addresses": ["127.0.0.1:9", f"127.0.0.1:{port}"]}) as here:
            await here.reports("r4", "127.0.0.1:9")
            async with asyncio.timeout(60.0):
                await here.peers.open("127.0.0.1:1")
            assert (here.peers.warm, here.owned) == (True, 3)
            assert not here.one("r4")["takes_part"]  # it reports, but has not told us what it serves


async def test_a_proven_peer_that_follows_us_is_followed_even_without_etcd() -> None:
    other = Other()
    await other.start()
    try:
        async with stage() as here:
            here.peers.met("r3", other.address, proven=True)
            here.peers.met("r9", "nonsense", proven=True)
            await until(lambda: here.one().get("takes_part"))
            assert other.asked[0].control_address == "127.0.0.1:1"
            assert here.refused["peer_address"] == 1
    finally:
        await other.stop()


async def test_what_it_has_under_way_counts_while_it_speaks_and_it_owns_while_it_reports() -> None:
    async with stage(other := Other()) as here:
        divided = here.owned
        other.more.put_nowait({"loads": [other.load("g1", 2), other.load("g2", 2), other.load("g3", 2)]})
        await until(lambda: float(here.flow.replicas.whole.in_flight.sum()) == 6.0)
        other.silent = True  # cut off from us, but not from the store
        seq = 1
        while float(here.flow.replicas.whole.in_flight.sum()):
            seq += 1
            await here.reports("r3", other.address, seq)
            other.says = {"region": "nowhere"}
            await asyncio.sleep(0.02)
            assert seq < 200
        assert here.owned == divided < 3
        assert (here.one()["takes_part"], here.one()["in_flight"]) == (True, 0)
        await until(lambda: here.owned == 3)  # it no longer reports either
        other.says, other.silent = {}, False
        await until(lambda: here.owned == divided)


async def test_a_peer_whose_port_is_closed_does_not_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stage(other := Other()) as here:
        monkeypatch.setattr(peers, "GONE_S", 600.0)  # by its age alone it would be kept
        await until(lambda: here.owned < 3)
        await other.stop()
        await until(lambda: here.owned == 3)
        assert not here.one()["takes_part"]
        other.incarnation = 6
        await other.start()  # the same port: another process
        await until(lambda: here.owned < 3)


async def test_a_draining_peer_owns_no_replica_and_its_load_still_counts() -> None:
    async with stage(other := Other()) as here:
        other.more.put_nowait({"draining": True, "loads": [other.load("g1", 1)]})
        await until(lambda: here.one()["draining"])
        assert (here.owned, here.one()["in_flight"]) == (3, 1)
        here.peers.withdraw()
        assert here.owned == 0
        assert here.peers.feed.draining


async def test_a_slot_that_another_frees_is_taken_by_what_waits_here() -> None:
    async with stage(other := Other()) as here:
        other.more.put_nowait({"loads": [other.load(name, 2) for name in ("g1", "g2", "g3")]})
        await until(lambda: float(here.flow.replicas.whole.in_flight.sum()) == 6.0)
        here.flow.handle(RequestArrived(request("q", deadline=here.clock() + 60)), here.clock())
        assert len(here.flow.queue) == 1
        other.more.put_nowait({"loads": [other.load("g2", 1)], "queued": {"llama": 2}})
        await until(lambda: not len(here.flow.queue))
        assert here.flow.replicas.ledger.load("g2").in_flight == 1
        assert here.flow.wait_estimate.queued_elsewhere("llama") == 2


async def test_turns_pass_while_another_instance_waits() -> None:
    async with stage(other := Other()) as here:
        passed = []
        react, here.peers.react = here.peers.react, lambda event: (passed.append(type(event)), react(event))
        other.more.put_nowait({"queued": {"llama": 1}})
        await until(lambda: peers.TurnTimerFired in passed)


async def test_invalid_or_old_peer_reports_change_nothing() -> None:
    async with stage(other := Other()) as here:
        key = f"{here.peers.prefix}r3"
        here.peers.changed(Change(ChangeKind.PUT, key=key, value=b"{"))
        assert here.refused["peer_report_malformed"] == 1
        await here.reports("r5", "127.0.0.1:9")
        entry = await here.store.get(f"{here.peers.prefix}r5")
        assert entry is not None
        here.peers.changed(Change(ChangeKind.PUT, key=f"{here.peers.prefix}r6", value=entry.value))
        assert here.refused["peer_report_misplaced"] == 1
        at = here.peers.known["r3"].reported_at
        await here.reports("r3", "127.0.0.1:9", seq=99, incarnation=4)  # of the process before
        await here.reports("r1", "127.0.0.1:9", incarnation=99)
        await until(lambda: here.troubles)
        assert here.peers.known["r3"].reported_at == at
        assert here.one()["control"] == other.address
        assert "give each its own" in here.troubles[0]


async def test_the_number_of_known_peers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PEERS_MAX", 2)
    async with stage() as here:
        for n in range(4):
            here.peers.met(f"x{n}", f"127.0.0.1:{n + 1}", proven=True)
        assert len(here.peers.links) == 2
        assert here.refused["peer_too_many"] == 2


async def test_a_peer_that_is_gone_is_forgotten_but_configured_addresses_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stage(other := Other(), peers={"addresses": ["127.0.0.1:9"]}) as here:
        await other.stop()
        await until(lambda: not here.peers.up)
        monkeypatch.setattr(peers, "FORGET_S", 0.0)
        await until(lambda: not here.peers.known)
        await until(lambda: list(here.peers.links) == ["127.0.0.1:9"])


async def test_where_our_own_port_is_encrypted_peers_need_their_part_of_the_configuration(tmp_path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("server")
    files = {"cert_file": pair.cert_file, "key_file": pair.key_file}
    listen = {"port": 0, "tls": files}
    other = Other()
    await other.start()
    try:
        async with stage(opened=False, tier=listen, control=listen) as here:
            await here.reports("r3", other.address)
            await here.peers.open("127.0.0.1:1")
            assert "peers.tls" in here.troubles[0]
            assert (other.asked, here.owned) == ([], 3)
        with pytest.raises(ValueError, match=r"peers\.tls: control\.tls is not given"):
            Stage(peers={"tls": {"ca_file": authority.ca_file}})
    finally:
        await other.stop()


# -- following one address


async def test_a_silent_stream_is_given_up_and_goes_on_from_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "SILENT_S", 0.4)
    async with stage(other := Other(cached_seq=11)) as here:
        assert here.one()["connected"]
        other.more.put_nowait({"cached_seq": 12})
        other.silent = True
        await until(lambda: len(other.asked) > 1)
        assert (other.asked[0].known_incarnation, other.asked[0].known_cached_seq) == (0, 0)
        assert (other.asked[1].known_incarnation, other.asked[1].known_cached_seq) == (5, 12)
        other.silent = False
        await until(lambda: here.one()["connected"])


async def test_a_gap_or_an_absurd_message_restarts_the_stream() -> None:
    async with stage(other := Other()) as here:
        for fields, why in (
            ({"seq": 99}, "peer_gap"),
            ({"queued": {f"m{n}": 1 for n in range(300)}}, "peer_too_many"),
            ({"instance": "r8"}, "peer_misplaced"),
            ({"incarnation": 6}, "peer_misplaced"),
        ):
            n_asked = len(other.asked)
            other.more.put_nowait(fields)
            await until(lambda n=n_asked: len(other.asked) > n)
            assert here.refused[why] >= 1
        await until(lambda: here.one()["connected"])
        assert here.one("r8") == {}


async def test_a_message_that_is_larger_than_it_can_be_is_not_read() -> None:
    """gRPC builds it before anybody may judge it: 4 MiB of small fields held the loop for 0.1 s, of a map up to 1.7."""
    async with stage(other := Other()) as here:
        too_large = {"queued": {"m" * peers.UPDATE_BYTES_MAX: 1}}  # many fields take seconds to write
        while not here.refused:
            # On a busy machine a stream may be given up as silent before it is written, which counts as no refusal.
            other.more.put_nowait(too_large)
            n_asked = len(other.asked)
            await until(lambda n_asked=n_asked: len(other.asked) > n_asked)
        assert dict(here.refused) == {"peer_resource_exhausted": 1}
        await until(lambda: here.one()["connected"])


async def test_a_peer_of_another_region_is_refused() -> None:
    other = Other()
    other.region = "tokyo"
    async with stage(other) as here:
        await until(lambda: here.refused["peer_misplaced"] > 0)
        assert here.owned == 3


async def test_ourselves_and_an_older_build_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = Other("r1", incarnation=7)
    older = grpc.aio.server()
    port = older.add_insecure_port("127.0.0.1:0")
    await older.start()
    try:
        await mirror.start()
        addresses = [mirror.address, f"127.0.0.1:{port}"]
        async with stage(peers={"addresses": addresses}) as here:
            assert here.peers.warm
            assert (here.peers.up, here.owned, dict(here.refused), here.troubles) == (0, 3, {}, [])
            await asyncio.sleep(0)
            assert len(mirror.asked) == 1
    finally:
        await mirror.stop()
        await older.stop(None)


async def test_a_namesake_is_logged_and_not_followed() -> None:
    async with stage(peers={"addresses": ["127.0.0.1:1"]}) as here:
        async with _running(Other("r1", incarnation=8)) as other:
            here.peers.met("r3", other.address, proven=True)
            await until(lambda: here.troubles)
        assert "give each its own" in here.troubles[0]
        assert here.refused["peer_namesake"] == 1
        assert here.owned == 3


async def test_one_peer_at_two_addresses_is_followed_once() -> None:
    async with stage(other := Other(), peers={"addresses": []}) as here, _running(Other()) as twin:
        here.peers.met("r3", twin.address, proven=True)
        await until(lambda: twin.asked)
        await until(lambda: here.peers.links[twin.address].settled)
        assert here.peers.up == 1
        assert here.one()["control"] == other.address


class _running:  # noqa: N801 - reads as a word
    def __init__(self, other: Other) -> None:
        self._other = other

    async def __aenter__(self) -> Other:
        await self._other.start()
        return self._other

    async def __aexit__(self, *_: object) -> None:
        await self._other.stop()
