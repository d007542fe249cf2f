"""From a client's question to a region's answer, by a real resolver in a namespace, while the region dies."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "dns_chain.py"


@pytest.fixture
def inside() -> Iterator[Callable[..., str]]:
    """Runs a command in a network namespace that has nothing but its loopback."""
    name = f"farhop-chain-{time.monotonic_ns() % 100_000}"

    def run(*command: str) -> str:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    run("ip", "netns", "add", name)
    try:
        run("ip", "netns", "exec", name, "ip", "link", "set", "lo", "up")
        run("ip", "netns", "exec", name, "ip", "addr", "add", "8.8.8.8/32", "dev", "lo")
        yield lambda *command: run("ip", "netns", "exec", name, *command)
    finally:
        run("ip", "netns", "del", name)


@pytest.mark.root
def test_a_client_sent_by_dns_to_a_region_that_dies_is_served_elsewhere(inside) -> None:
    binary = shutil.which("unbound")
    if binary is None or shutil.which("ip") is None:
        pytest.skip("unbound or ip is not installed")
    document = json.loads(inside(sys.executable, str(SCRIPT), binary))
    # A resolver near Frankfurt is known to its entry alone; a tenant whose records stay in the EU is not published.
    assert document["before"][0] == "virginia"
    assert document["after"][0] == "frankfurt"
    assert document["hidden"] == [{}, {}, {}]
    assert [(one["network"], one["before"], one["now"]) for one in document["findings"]] == [
        ("8.8.8.0/24", "", "frankfurt")
    ]
    assert document["first"] == "tokyo"
    assert document["listed"] == ["tokyo", "frankfurt", "virginia"]
    # With the list in the answer, at once; by asking again, when the answer has expired, at most a second later.
    assert (document["retried"], document["retried_by"]) == (200, "frankfurt")
    assert document["retried_s"] < document["ttl_most"], "without waiting for another answer"
    assert document["ttl"] <= document["ttl_most"] == 5
    assert document["next_by"] != "tokyo"
    assert document["next_s"] <= document["ttl_most"] + 1.0
