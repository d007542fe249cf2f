from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from farhop_lab.world import anycast_net
from farhop_lab.world.anycast_net import ROUTER, SITES, VIP, Net, NetError, RouteWatch, run


def test_missing_tools_are_named(monkeypatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "birdc" else f"/sbin/{name}")
    assert anycast_net.lacking() == "birdc"


def test_a_command_that_fails_is_reported() -> None:
    with pytest.raises(NetError, match=r"ls /nowhere: .*No such file"):
        run("ls", "/nowhere")
    assert run("ls", "/nowhere", check=False) == ""


@pytest.mark.root
@pytest.mark.skipif(bool(anycast_net.lacking()), reason="no bird2 or no iproute2 here")
def test_ways_follow_the_router_s_routes_a_silent_site_is_cut_off_and_nothing_stays(tmp_path) -> None:
    net = Net(tmp_path)
    try:
        net.open()
        watch = RouteWatch(net)
        assert net.routed_sites() == frozenset()
        net.ip(ROUTER, "route", "add", VIP, "via", "10.77.2.2")
        net.until_routed("b")
        assert watch.first_after(0.0) > 0.0
        ping = ("ip", "netns", "exec", net.name("b"), sys.executable, "-c", PING)
        assert subprocess.run(ping, timeout=20, check=False).returncode == 0
        net.silence("b")
        assert subprocess.run(ping, timeout=20, check=False).returncode == 1
        net.undo_silence("b")
        assert subprocess.run(ping, timeout=20, check=False).returncode == 0
        with pytest.raises(NetError, match="it sends to"):
            net.until_routed(*SITES, within_s=0.1)
    finally:
        net.close()
    assert net.name("") not in run("ip", "netns")
    assert all(child.poll() is not None for child in net.children)


# BIRD's own port at the router: whether a handshake completes.
PING = """
import socket, sys
try:
    socket.create_connection(("10.77.2.1", 179), 1.0)
except TimeoutError:
    sys.exit(1)
except ConnectionError:
    pass
"""
