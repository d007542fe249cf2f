"""The benchmark of relays: who is chosen, what is left out, and one real row of ours."""

from __future__ import annotations

import msgspec
import pytest

from farhop_lab.bench import relay, wrk
from farhop_lab.bench.harness import BenchError
from farhop_lab.bench.proxies import Proxy
from farhop_lab.bench.results import QUICK
from tests.conftest import further

TINY = msgspec.structs.replace(QUICK, sizes=(1024,), request_s=0.3, rest_s=0.1, streams=((4, 10.0),), stream_s=0.3)


def test_proxies_are_chosen_by_words_of_their_names() -> None:
    assert [s.name for s in relay.chosen(["envoy", "regional"])] == ["farhop regional", "Envoy"]
    assert [s.name for s in relay.chosen(["farhop"])] == ["farhop regional", "farhop global"]
    assert relay.chosen([]) == list(relay.SUBJECTS)
    with pytest.raises(BenchError, match=r"--only: no proxy is called 'traefik'; there is farhop regional, "):
        relay.chosen(["regional", "traefik"])


def test_more_streams_than_files() -> None:
    relay.check_files(QUICK, 1024)
    with pytest.raises(BenchError, match=r"--streams: 1000 need 2200 open files .* ask for 465 at most"):
        relay.check_files(msgspec.structs.replace(QUICK, idle_streams=1000), 1024)


@pytest.mark.parametrize("tls", further([False, True], True))
async def test_the_relay_benchmark_measures_the_shipped_balancer(monkeypatch: pytest.MonkeyPatch, tls: bool) -> None:
    monkeypatch.setattr(wrk, "find", lambda: None)  # its runs last a second at least
    monkeypatch.setattr(relay, "_SETTLE_S", 0.1)
    found = await relay.measure(msgspec.structs.replace(TINY, tls=tls), ["regional"])
    (row,) = found.rows
    assert row.trouble == ""
    assert row.request_us[1024].errors == row.chunk_us[4].errors == 0
    assert 10.0 < row.request_us[1024].median < 100_000.0
    assert row.chunk_us[4].most != 0.0  # measured; below 0 if the idle time that is subtracted was busier
    assert row.peak_per_s > 1.0
    assert found.load.startswith("farhop's own client")


async def test_a_missing_proxy_is_named_and_a_broken_one_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Proxy("Absent", "pip install absent", lambda: None, relay.PROXIES[0].command)
    broken = Proxy("Broken", "", lambda: "/bin/false", lambda _binary, _place, _port: (["/bin/false"], []))
    monkeypatch.setattr(relay, "SUBJECTS", (absent, broken))
    seen: list[str] = []
    found = await relay.measure(TINY, [], seen.append)
    assert found.absent == {"Absent": "not installed: pip install absent"}
    assert [(row.name, row.request_us) for row in found.rows] == [("Broken", {})]
    assert "Broken: did not start" in found.rows[0].trouble
    assert seen == ["round 1 of 1, Broken"]


async def test_a_relay_benchmark_out_of_time_names_the_option_to_measure_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "SUBJECTS", relay.PROXIES[:1])
    found = await relay.measure(msgspec.structs.replace(TINY, limit_s=-1.0))
    assert found.rounds == 0
    assert "measure fewer at once with --only" in found.rows[0].trouble
