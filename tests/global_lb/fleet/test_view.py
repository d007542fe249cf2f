"""What a report becomes in the view, and the models on offer in a set of regions."""

from __future__ import annotations

import pytest
from worlds import MODEL, OTHER_MODEL, capacity, instance, seen

from farhop.balance.machine import Address
from farhop.store.documents.report import ModelReport, RegionReport
from global_lb.fleet.view import instance_of, pooled

MODEL_REPORT = ModelReport(
    "m", replicas_ready=1, replicas_total=2, slots_total=4, slots_free=3, kv_tokens_total=9, kv_tokens_free=5,
    wait_ms=1.0, prefill_ms_per_token=0.1, tpot_ms=20.0, bytes_per_token=4.0, bases=("base",),
)  # fmt: skip
REPORT = RegionReport(
    region="tokyo", instance="r1", incarnation=7, seq=3, clock_ms=5_000.0, tier_address="h:1", control_address="h:2",
    draining=True, hop_version=3, accepted_bytes={"me": 11.0, "you": 22.0},
    models=(MODEL_REPORT,),
)  # fmt: skip


def test_instance_has_the_values_of_its_report() -> None:
    tier = Address("far", 1)
    one = instance_of(REPORT, tier, 100.0, None, "me")
    assert (one.name, one.region, one.tier, one.incarnation) == ("r1", "tokyo", tier, 7)
    assert (one.received_at, one.draining, one.accepted, one.hop_version) == (100.0, True, 11.0, 3)
    assert (one.models, one.lineage) == ({"m": MODEL_REPORT}, {"m": frozenset({"base"})})


@pytest.mark.parametrize(("by_pings", "offset_ms"), [(None, 5_000.0 - 100_000.0), (-3.5, -3.5), (0.0, 0.0)])
def test_its_clock_is_known_by_pings_and_before_the_first_by_the_reports_stamp(
    by_pings: float | None, offset_ms: float
) -> None:
    assert instance_of(REPORT, Address("far", 1), 100.0, by_pings, "me").clock_offset_ms == offset_ms


def test_a_sender_without_accepted_bytes_is_acknowledged_none() -> None:
    assert instance_of(REPORT, Address("far", 1), 100.0, None, "third").accepted == 0.0


def test_the_models_of_regions_are_those_of_all_their_instances() -> None:
    both = {OTHER_MODEL: capacity(), MODEL: capacity(replicas_ready=0)}
    view = seen(instance("london"), instance("london", "b", models=both), instance("tokyo", models={})).view
    assert view.models(frozenset({"london", "tokyo", "mars"})).keys() == {MODEL, OTHER_MODEL}
    assert not view.models(frozenset({"tokyo"}))


def test_what_instances_share_is_the_sum_of_what_each_reports() -> None:
    one = instance(
        "london", "a", replicas_ready=2, slots_free=3, slots_total=8, headroom_foreign_tokens=10.0, wait_ms=1
    )
    two = instance("london", "b", replicas_ready=0, slots_free=0, headroom_foreign_tokens=0.0, wait_ms=2)
    three = instance("london", "c", replicas_ready=1, slots_free=4, slots_total=4, headroom_foreign_tokens=5.0)
    gone = instance("london", "d", draining=True, replicas_ready=1, slots_free=4, slots_total=4)
    pool = pooled(seen(one, two, three, gone).view.regions["london"])
    assert {name for name, _ in pool} == {"a", "b", "c", "d"}
    for capacity_ in pool.values():
        assert (capacity_.replicas_ready, capacity_.slots_free, capacity_.slots_total) == (3, 7, 12)
        assert capacity_.headroom_foreign_tokens == 15.0
    assert [pool[name, MODEL].wait_ms for name in "ab"] == [1, 2]  # its own
    assert pooled(seen(one).view.regions["london"]) == {}
