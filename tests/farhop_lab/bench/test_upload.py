"""Round trips of a large prompt: what is charged, what counts as warm, and a run over a real wire."""

from __future__ import annotations

import os

import pytest

from farhop_lab.bench import upload
from farhop_lab.bench.harness import BenchError
from farhop_lab.bench.upload import Row
from farhop_lab.bench.upload_client import BESIDE, COOL, KEPT, NEW, RESTED


def test_the_cost_model_charges_slow_start_from_the_first_window() -> None:
    assert [upload.charged_trips(n) for n in (14_600, 14_601, 200_000)] == [1.0, 2.0, 4.0]


def test_a_warm_connection_takes_a_round_trip_but_where_bbr_paces_it() -> None:
    trips = {NEW: 5.0, COOL: 5.0, KEPT: 1.1, BESIDE: 1.2, RESTED: 4.0}
    assert upload.is_warm(Row("cubic", True, trips))
    assert not upload.is_warm(Row("cubic", True, trips | {BESIDE: 5.0}))
    assert not upload.is_warm(Row("cubic", True, trips | {KEPT: 1.4}))
    assert upload.is_warm(Row("bbr", True, trips | {KEPT: 1.6}))


async def test_missing_root_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert upload.missing() == "network namespaces take root"
    with pytest.raises(BenchError, match="network namespaces take root"):
        await upload.measure(1)


@pytest.mark.root
@pytest.mark.skipif(bool(upload.missing()), reason="no TUN devices or namespaces here")
async def test_over_a_long_wire_a_warm_connection_takes_one_round_trip_and_a_new_one_slow_start() -> None:
    # Longer than any ocean, so that a busy machine's own delays are a small share of a round trip.
    cold, kept = await upload.measure(1, rtt_ms=400.0, idle_s=3.0, congestions=upload.controls()[:1])
    assert (cold.slow_start_after_idle, kept.slow_start_after_idle) == (True, False)
    for row in (cold, kept):
        assert max(row.trips[KEPT], row.trips[BESIDE]) < 2.0
        assert min(row.trips[NEW], row.trips[COOL]) > 2.5
    assert cold.trips[RESTED] > 2.5  # its learned window is forgotten
    assert kept.trips[RESTED] < 2.0
