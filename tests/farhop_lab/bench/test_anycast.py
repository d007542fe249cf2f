from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from farhop_lab.bench import anycast
from farhop_lab.bench.anycast import Sample
from farhop_lab.bench.anycast_client import ConnectionResult


def test_astray_counts_connections_served_by_the_site_after_the_event_and_lost_those_without_answer() -> None:
    seen = [
        ConnectionResult(9.0, "tokyo"), ConnectionResult(9.9, "frankfurt"), ConnectionResult(10.2, "tokyo"),
        ConnectionResult(10.3, "frankfurt"), ConnectionResult(10.1, ""), ConnectionResult(9.95, ""),
        ConnectionResult(10.5, "tokyo"),
    ]  # fmt: skip
    found = anycast.sample(seen, "frankfurt", 10.0, 10.25)
    assert (round(found.route_ms), round(found.astray_ms), found.lost) == (250, 300, 2)
    assert anycast.sample(seen[:3], "frankfurt", 10.0, 10.25).astray_ms == 0.0


def test_a_row_has_medians_and_the_maximum() -> None:
    samples = [Sample(1.0, 10.0, 3), Sample(5.0, 30.0, 0), Sample(2.0, 11.0, 1)]
    assert anycast.row("drain", "b", samples) == anycast.Row("drain", "BIRD", 2.0, 11.0, 30.0, 3, 3)


def test_missing_root_or_bird_is_reported(monkeypatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert anycast.missing() == "network namespaces take root"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name.startswith("bird") else f"/sbin/{name}")
    assert anycast.missing() == "bird, birdc not installed (Debian: iproute2, bird2)"
    with pytest.raises(anycast.BenchError, match="bird, birdc not installed"):
        anycast.measure(1, lambda _: None)


@pytest.mark.root
@pytest.mark.skipif(bool(anycast.missing()), reason="no bird2, ExaBGP or etcd here")
def test_benchmark_measures_and_cleans_up() -> None:
    events = tuple(one for one in anycast.EVENTS if one.name in ("announcer killed", "host silent"))
    rows = anycast.measure(1, lambda _: None, events)
    assert [(one.event, one.speaker) for one in rows] == [
        (event.name, speaker) for event in events for speaker in ("ExaBGP", "BIRD")
    ]
    for killed, silent in zip(rows[:2], rows[2:], strict=True):
        # In the first only packets on the way are lost: the entry lives. The neighbour is not told of the second: its
        # hold timer ends, which in BIRD takes 6.75 to 9 s (RFC 4271 §10's jitter), of which up to 3 have passed.
        assert killed.lost < silent.lost
        assert silent.route_ms > 3700.0
    left = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert f"fh{os.getpid() % 100_000}" not in left
