"""The connection to etcd: failing over, TLS, logging in, and errors that name endpoint and remedy."""

import asyncio
import contextlib
import socket
from pathlib import Path
from random import Random

import aetcd.rpc
import grpc.aio
import pytest

from farhop.store.contract import StoreError, StoreUnreachable
from farhop.store.etcd import EtcdStore
from farhop.store.etcd_link import EtcdClient, EtcdLink
from farhop.store.etcd_settings import EtcdSettings
from farhop_lab.world.certs import Authority
from farhop_lab.world.etcd import EmbeddedEtcd


@contextlib.asynccontextmanager
async def opened(*endpoints, timeout_s=5.0, **fields):
    store = EtcdStore(EtcdSettings(endpoints, timeout_s=timeout_s, **fields), Random(1))
    try:
        await store.open()
        yield store
    finally:
        await store.close()


@contextlib.contextmanager
def refused():
    """An endpoint nobody listens on: bound, so that nobody else takes it, and not listening."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


@contextlib.contextmanager
def black_hole():
    """An endpoint that takes connections and never says a word."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield f"127.0.0.1:{held.getsockname()[1]}"


async def test_an_unreachable_etcd_is_one_clear_line_in_time(monkeypatch):
    """All endpoints together are given the time of one call: what they are given is counted, not what they took."""
    given_s, timeout = [], asyncio.timeout

    def counted(delay):
        given_s.append(delay)
        return timeout(delay)

    with refused() as first, black_hole() as second:
        monkeypatch.setattr(asyncio, "timeout", counted)
        with pytest.raises(StoreUnreachable) as caught:
            async with opened(first, second, timeout_s=0.5):
                pass
        monkeypatch.undo()
    assert first in str(caught.value)
    assert second in str(caught.value)
    assert "is it running" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(given_s) == 2
    assert sum(given_s) <= 0.5


async def test_a_name_that_does_not_resolve_is_unreachable():
    with pytest.raises(StoreUnreachable, match=r"nowhere\.invalid:2379"):
        async with opened("nowhere.invalid:2379"):
            pass


async def test_dead_endpoints_are_passed_over():
    async with EmbeddedEtcd() as etcd:
        with refused() as first, black_hole() as second:
            async with opened(first, second, etcd.endpoint, timeout_s=1.0) as store:
                await store.put("/a", b"1")
                assert (await store.get("/a")).value == b"1"


async def test_the_proxy_of_the_environment_is_not_asked(monkeypatch):
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with EmbeddedEtcd() as etcd, opened(etcd.endpoint, timeout_s=5.0) as store:
        await store.put("/a", b"1")


async def test_call_on_a_closed_store_raises_store_error():
    async with EmbeddedEtcd() as etcd:
        async with opened(etcd.endpoint) as store:
            pass
        with pytest.raises(StoreError, match="closed"):
            await store.get("/a")
        await store.open()
        assert await store.get("/a") is None
        await store.close()


async def connected(link):
    """Until the link has a client; its first call is made in the same step."""
    async with asyncio.timeout(60.0):
        while link.client is None:
            await asyncio.sleep(0)


async def test_the_connection_given_up_fails_its_calls_without_cancelling_their_callers():
    with black_hole() as endpoint:
        link = EtcdLink(EtcdSettings((endpoint,), timeout_s=5.0))
        calling = asyncio.create_task(link.call("kvstub", "Range", aetcd.rpc.RangeRequest(key=b"a")))
        await connected(link)
        link.retire(link.client)
        with pytest.raises(StoreUnreachable, match="given up"):
            await calling
        # A caller's own cancellation stays a cancellation.
        calling = asyncio.create_task(link.call("kvstub", "Range", aetcd.rpc.RangeRequest(key=b"a")))
        await connected(link)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        await link.close()


async def test_a_call_that_ended_before_it_was_written_to_has_lost_its_server():
    with black_hole() as endpoint:
        link = EtcdLink(EtcdSettings((endpoint,), timeout_s=5.0))
        with pytest.raises(StoreUnreachable, match="already finished"):
            async with link.session() as client:
                call = client.watchstub.Watch()
                call.cancel()
                await call.write(aetcd.rpc.WatchRequest(progress_request=aetcd.rpc.WatchProgressRequest()))
        assert link.client is None  # the next call makes another
        await link.close()


async def test_one_question_a_second_proves_all_watches_of_a_connection_and_its_silence_ends_them(monkeypatch):
    async with EmbeddedEtcd() as etcd, opened(etcd.endpoint, timeout_s=0.4) as store:
        asked = asyncio.Queue()
        watches = [store.watch(f"/{n}") for n in range(6)]
        for watch in watches:
            await anext(watch)
        waiting = [asyncio.create_task(anext(watch)) for watch in watches]
        client = store.link.client
        one = client.kvstub.Range

        def question(request, **more):
            asked.put_nowait(request.serializable)
            return one(request, **more)

        monkeypatch.setattr(client.kvstub, "Range", question)
        assert [await asked.get() for _ in range(3)] == [True] * 3
        assert len({task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("prove")}) == 1
        assert not any(task.done() for task in waiting)
        etcd.pause()
        assert {(await task).kind.name for task in waiting} == {"LOST"}  # each, though only one was requested
        etcd.resume()
        for watch in watches:
            assert (await anext(watch)).kind.name == "SNAPSHOT"
            await watch.aclose()


async def test_a_slow_etcd_keeps_the_connection(monkeypatch):
    timeout_s, slow_s = 0.8, 0.5
    async with EmbeddedEtcd() as etcd, opened(etcd.endpoint, timeout_s=timeout_s) as store:
        watch = store.watch("/a")
        await anext(watch)
        change = asyncio.create_task(anext(watch))
        client, asked = store.link.client, asyncio.Queue()
        one = client.kvstub.Range

        async def slowly(request, *, timeout, **more):
            asked.put_nowait(request)
            await asyncio.sleep(min(slow_s, timeout))
            if timeout < slow_s:
                raise grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, grpc.aio.Metadata(), grpc.aio.Metadata())
            return await one(request, timeout=timeout, **more)

        monkeypatch.setattr(client.kvstub, "Range", slowly)
        async with asyncio.timeout(10.0):
            for _ in range(3):
                await asked.get()
        assert store.link.client is client
        await store.put("/a", b"1")
        assert (await change).kind.name == "PUT"
        await watch.aclose()


async def test_mutual_tls(tmp_path):
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    server, client, intruder = authority.issue("server"), authority.issue("client"), stranger.issue("intruder")
    flags = {"cert-file": server.cert_file, "key-file": server.key_file, "trusted-ca-file": authority.ca_file}
    extra = ("--client-cert-auth", *(f"--{flag}={name}" for flag, name in flags.items()))
    async with EmbeddedEtcd(scheme="https", extra=extra) as etcd:
        good = {"ca_file": Path(authority.ca_file), **files_of(client)}
        async with opened(etcd.endpoint, **good) as store:
            await store.put("/a", b"secret")
            async with contextlib.aclosing(store.watch("/a")) as watch:
                assert (await anext(watch)).entries[0].value == b"secret"
        bad = (
            ({}, None),
            ({"ca_file": good["ca_file"]}, None),
            ({**good, "ca_file": Path(stranger.ca_file)}, "; check ca_file, and cert_file and key_file if"),
            ({**good, **files_of(intruder)}, None),
        )
        for fields, remedy in bad:  # by the side that refuses: etcd may hang up without a reason
            with pytest.raises(StoreUnreachable, match=remedy):
                async with opened(etcd.endpoint, timeout_s=5.0 if remedy else 0.5, **fields):
                    pass
        with pytest.raises(StoreUnreachable, match=r"address right\? If it speaks TLS, give ca_file"):
            async with opened(etcd.endpoint.removeprefix("https://"), timeout_s=0.5):
                pass
        await certificates_are_read_for_every_connection(
            EtcdSettings((etcd.endpoint,), timeout_s=1.0, **good), authority, stranger
        )


async def certificates_are_read_for_every_connection(settings, authority, stranger):
    """Those of `client`, which are renewed under a link that stands."""

    def ask():
        return link.call("kvstub", "Range", aetcd.rpc.RangeRequest(key=b"/a"))

    link = EtcdLink(settings)
    await link.open()
    stranger.issue("client")
    link.retire(link.client)
    with pytest.raises(StoreUnreachable):
        await ask()
    authority.issue("client")
    assert (await ask()).count == 1
    settings.key_file.unlink()  # half renewed: the files that were read last are used
    link.retire(link.client)
    assert (await ask()).count == 1
    await link.close()


def files_of(pair):
    return {"cert_file": Path(pair.cert_file), "key_file": Path(pair.key_file)}


async def test_a_missing_certificate_is_named(tmp_path):
    with pytest.raises(StoreError, match=r"ca_file .*none\.pem: No such file"):
        async with opened("127.0.0.1:1", ca_file=tmp_path / "none.pem"):
            pass


async def enable_login(etcd):
    """Users root (everything) and reader (nothing), both with the password `right`."""
    client = EtcdClient(etcd.endpoint, EtcdSettings((etcd.endpoint,)), None)
    await client.connect()
    try:
        auth = aetcd.rpc.AuthStub(client.channel)
        for name in ("root", "reader"):
            await auth.UserAdd(aetcd.rpc.AuthUserAddRequest(name=name, password="right"))
            await auth.RoleAdd(aetcd.rpc.AuthRoleAddRequest(name=name))
            await auth.UserGrantRole(aetcd.rpc.AuthUserGrantRoleRequest(user=name, role=name))
        await auth.AuthEnable(aetcd.rpc.AuthEnableRequest())
    finally:
        await client.close()


async def test_login_outlives_a_restart_and_refusals_name_the_remedy():
    async with EmbeddedEtcd(extra=("--bcrypt-cost=4",)) as etcd:
        await enable_login(etcd)
        async with opened(etcd.endpoint, username="root", password="right") as store:
            publication = await store.publish("/a", b"1", ttl_s=5.0)
            await etcd.restart()  # it forgets every token it gave out
            async with asyncio.timeout(60.0):
                while not await publication.update(b"2"):
                    await asyncio.sleep(0.02)
            assert (await store.get("/a")).value == b"2"
            # A token that etcd has forgotten while the connection is up does no harm to its user.
            store.link.client.metadata = (("token", "forgotten.1"),)
            assert (await store.get("/a")).value == b"2"
        with pytest.raises(StoreError, match=r"authentication failed.*check username and password") as caught:
            async with opened(etcd.endpoint, username="root", password="wrong"):
                pass
        assert not isinstance(caught.value, StoreUnreachable)
        with pytest.raises(StoreError, match=r"permission denied.*grant"):
            async with opened(etcd.endpoint, username="reader", password="right"):
                pass
        with pytest.raises(StoreError, match="username"):
            async with opened(etcd.endpoint):
                pass
