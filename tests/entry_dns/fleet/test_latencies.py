"""From measurements to costs: which measurements count, and how far they may correct geography."""

from __future__ import annotations

from ipaddress import ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entry_dns.fleet import latencies
from entry_dns.fleet.latencies import Learned, LearningConfig, judge
from farhop.balance.estimate.network_latencies import Latency
from farhop.store.documents.latencies import LatencyReport
from tests.entry_dns.conftest import NAMES, world

CONFIG = LearningConfig()
NEAR_TOKYO = {"virginia": 164.0, "frankfurt": 141.0, "tokyo": 1.0}
wire_ms = world().rtt_ms


@pytest.mark.parametrize(
    ("predicted", "measured", "best"),
    [
        (NEAR_TOKYO, {"virginia": 20.0, "tokyo": 180.0}, "virginia"),
        (NEAR_TOKYO, {"virginia": 8.0}, "virginia"),
        (NEAR_TOKYO, {"tokyo": 25.0, "virginia": 190.0}, "tokyo"),
        (NEAR_TOKYO, {"tokyo": 230.0}, ""),  # a slow access network, or another location: it cannot be known
        (NEAR_TOKYO, {"virginia": 150.0}, ""),
        (None, {"virginia": 8.0}, "virginia"),
        (None, {"virginia": 170.0}, ""),
        (None, {"virginia": 170.0, "tokyo": 15.0}, "tokyo"),
    ],
)
def test_which_measured_latencies_correct_geography(predicted, measured, best: str) -> None:
    costs, why = judge(NAMES, predicted, measured, wire_ms, CONFIG)
    assert min(costs, key=lambda one: costs[one], default="") == best
    assert bool(why) == (not costs)


def test_a_slow_access_link_alone_moves_no_network() -> None:
    """What a client's own line adds is added to every region, also to those that nobody measured."""
    slow = LearningConfig(far_ms=1.0)
    costs, _ = judge(NAMES, NEAR_TOKYO, {"tokyo": 161.0, "frankfurt": 301.0}, wire_ms, slow)
    assert costs["virginia"] == 164.0 + 160.0


RTT = st.floats(0.1, 400)


@given(
    st.none() | st.fixed_dictionaries(dict.fromkeys(NAMES, RTT)),
    st.dictionaries(st.sampled_from(NAMES), RTT, min_size=1),
    st.floats(0, 300),
)
def test_a_latency_correction_covers_all_entries_and_stays_within_its_bound(predicted, measured, bound: float) -> None:
    costs, why = judge(NAMES, predicted, measured, wire_ms, LearningConfig(correction_max_ms=bound))
    if not costs:
        assert why
        return
    assert costs.keys() == set(NAMES)
    if predicted is not None:
        access = max(0.0, min(ms - predicted[name] for name, ms in measured.items()))
        assert all(abs(costs[name] - predicted[name] - access) <= bound + 1e-6 for name in NAMES)


def report(region: str, ms: float, samples: int = 8, instance: str = "g1", network: str = "8.8.8.0/24"):
    return LatencyReport(region=region, instance=instance, networks={network: Latency(ms, samples)})


def test_latencies_of_a_regions_instances_are_combined_and_forgotten_with_their_keys() -> None:
    learned = Learned(CONFIG)
    learned.reported(report("tokyo", 31.7, 2))
    assert learned.read(0.0) == {}, "too few connections"
    learned.reported(report("tokyo", 12.2, 2, "g2"))
    learned.reported(report("frankfurt", 263.0))
    network = ip_network("8.8.8.0/24")
    assert learned.read(0.0) == {network: {"frankfurt": 265.0, "tokyo": 12.0}}
    learned.reported(report("frankfurt", 264.0))
    assert learned.read(0.0) == {network: {"frankfurt": 265.0, "tokyo": 12.0}}, "not a change that matters"
    learned.gone("frankfurt", "g1")
    assert learned.read(0.0) == {network: {"tokyo": 12.0}}


def test_a_region_with_ever_more_instances_takes_no_places_of_others(monkeypatch) -> None:
    monkeypatch.setattr(latencies, "REGION_INSTANCES_MAX", 2)
    monkeypatch.setattr(latencies, "REPORTS_MAX", 3)
    learned = Learned(CONFIG)
    for name in "abcd":
        learned.reported(report("frankfurt", 30.0, instance=name))
    learned.reported(report("tokyo", 12.0))
    assert learned.read(0.0) == {ip_network("8.8.8.0/24"): {"frankfurt": 30.0, "tokyo": 12.0}}


def test_measurements_expire_only_while_etcd_is_out_of_contact() -> None:
    learned = Learned(LearningConfig(age_s=100.0))
    learned.reported(report("tokyo", 12.0))
    learned.contact(False, 10.0)
    learned.contact(False, 60.0)
    assert learned.read(110.0)
    assert not learned.read(111.0)
    learned.contact(True, 120.0)
    assert learned.read(500.0)
