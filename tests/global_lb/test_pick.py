"""Offers, choice among them, and what is known of the regions across views."""

from __future__ import annotations

from random import Random

import pytest
from worlds import MODEL, OTHER_MODEL, capacity, instance, law, request, seen

from farhop.balance.health import LivenessConfig
from farhop.balance.machine import Address
from global_lb import admission
from global_lb.pick import RESIDENCE_MIN, Regions, pick
from global_lb.policy import Predictive
from global_lb.view import View

ALL = frozenset({"frankfurt", "london", "tokyo"})
NOBODY: frozenset[str] = frozenset()


@pytest.fixture
def regions() -> Regions:
    known = Regions(1 << 20, LivenessConfig())
    known.adopt(seen(*(instance(region) for region in sorted(ALL))).view, 0.0)
    for region in ALL:
        known.liveness_of(region).channel(True)
        known.liveness_of(region).reported(0.0)
    return known


def offered(regions: Regions, now: float = 0.0, lawful=ALL, without=NOBODY, **fields):
    offers, absent = regions.offers(request("a", **fields), lawful, now, without)
    return [o.region for o in offers], absent


def test_whoever_is_lawful_and_serves_is_offered(regions: Regions) -> None:
    assert offered(regions) == (["frankfurt", "london", "tokyo"], {})
    assert offered(regions, lawful=frozenset({"tokyo"})) == (["tokyo"], {})
    assert offered(regions, without=frozenset({"tokyo"})) == (["frankfurt", "london"], {"tokyo": "tried already"})
    assert offered(regions, model=OTHER_MODEL)[0] == []


def test_why_the_others_are_not_offered(regions: Regions) -> None:
    regions.liveness_of("frankfurt").channel(False)
    regions.liveness_of("oslo").channel(True)
    regions.liveness_of("oslo").reported(0.0)
    regions.adopt(seen(instance("london", replicas_ready=0), instance("frankfurt"), instance("tokyo")).view, 0.0)
    names, absent = offered(regions, lawful=ALL | {"oslo", "mars"})
    assert names == ["tokyo"]
    assert absent == {
        "frankfurt": "suspect: channel broken",
        "london": "no ready replica of this model",
        "mars": "down: no recent report and channel broken",
        "oslo": "never heard of",
    }
    assert "mars" not in regions.liveness  # to look changes nothing


def test_an_offer_is_of_the_instance_that_waits_least_with_what_was_sent(regions: Regions) -> None:
    a, b = instance("london", "a", wait_ms=5.0), instance("london", "b", wait_ms=9.0)
    regions.adopt(seen(a, b).view, 0.0)
    assert regions.best_instance("london", MODEL) == a
    regions.reckoning_of(a).sent(4096)  # 1024 tokens at 0.05 ms
    assert regions.best_instance("london", MODEL) == b
    assert regions.best_instance("london", OTHER_MODEL) is None
    assert regions.best_instance("mars", MODEL) is None


def test_counts_of_an_instance_that_left_are_forgotten(regions: Regions) -> None:
    regions.reckoning_of(instance("london")).sent(1000)
    regions.adopt(View({}), 0.0)
    assert regions._reckonings == {}
    regions.adopt(seen(instance("london")).view, 0.0)
    assert regions.reckoning_of(instance("london")).outstanding_bytes == 0.0


def test_models_once_offered_exist(regions: Regions) -> None:
    regions.adopt(seen(instance("london", models={OTHER_MODEL: capacity()})).view, 0.0)
    assert [regions.may_exist(m) for m in (MODEL, OTHER_MODEL, "nowhere")] == [True, True, False]
    assert Regions(1, LivenessConfig()).may_exist("nowhere")  # nobody has said anything yet


def test_residence_stays_within_its_bounds(regions: Regions) -> None:
    regions.caches("london", request("a", 4096).chain)
    regions.caches("unheard-of", request("a", 4096).chain)
    (offer,), _ = regions.offers(request("a", 4096), frozenset({"london"}), 0.0, NOBODY)
    (scored,) = Predictive().score(request("a", 4096), 1.0, [offer])
    assert (scored.believed_tokens, scored.hit_tokens) == (1024.0, 1024.0)
    for _ in range(300):
        regions.compare(scored, 0)
    low = regions.residence["london"].value
    assert low == pytest.approx(RESIDENCE_MIN, abs=1e-3)
    regions.compare(scored, 10**9)
    assert low < regions.residence["london"].value <= 1.0
    regions.compare(None, 5)


def choose(offers, seed=1):
    one = request("a")
    verdict = admission.processing(one, law())
    return pick(one, 100.0, offers, verdict, {"mars": "down"}, Predictive(), Random(seed), 0.0)


def test_a_choice_gives_its_reasons(regions: Regions) -> None:
    offers, _ = regions.offers(request("a"), ALL, 0.0, NOBODY)
    decision = choose(offers)
    assert decision.chosen.region == "london"
    assert [s.region for s in decision.field] == ["london", "frankfurt", "tokyo"]
    assert (decision.verdict.epoch, decision.absent) == (1, {"mars": "down"})
    nothing = choose([])
    assert (nothing.chosen, nothing.field) == (None, ())


def test_near_ties_are_drawn_by_free_slots_and_clear_wins_are_not(regions: Regions) -> None:
    near = {"frankfurt": 1.5}
    view = seen(instance("london", slots_free=0), instance("frankfurt", slots_free=8), rtt_ms=near).view
    regions.adopt(view, 0.0)
    offers, _ = regions.offers(request("a"), ALL, 0.0, NOBODY)
    assert {choose(offers, seed).chosen.region for seed in range(30)} == {"frankfurt"}
    regions.adopt(seen(instance("london", slots_free=2), instance("frankfurt", slots_free=6), rtt_ms=near).view, 0.0)
    offers, _ = regions.offers(request("a"), ALL, 0.0, NOBODY)
    drawn = [choose(offers, seed).chosen.region for seed in range(400)]
    assert 0.6 < drawn.count("frankfurt") / 400 < 0.9
    regions.adopt(seen(instance("london", slots_free=1), instance("frankfurt", slots_free=99)).view, 0.0)  # 11 ms
    offers, _ = regions.offers(request("a"), ALL, 0.0, NOBODY)
    assert {choose(offers, seed).chosen.region for seed in range(30)} == {"london"}


def test_an_offer_names_where_to_connect(regions: Regions) -> None:
    (offer,), _ = regions.offers(request("a"), frozenset({"tokyo"}), 0.0, NOBODY)
    assert offer.instance.tier == Address("tokyo-a.example", 9000)
    assert (offer.rtt_ms, offer.outstanding_bytes, offer.depth, offer.residence) == (220.0, 0.0, 0, 1.0)


def test_who_owns_no_replica_is_asked_all_the_same_and_offers_what_all_have(regions: Regions) -> None:
    owner = instance("london", "a", wait_ms=50.0, slots_free=7, slots_total=8, usable_share=1.0, used_share=0.9)
    other = instance("london", "b", wait_ms=5.0, replicas_ready=0, slots_free=0, usable_share=1.0, used_share=0.9)
    regions.adopt(seen(owner, other).view, 1.0)
    (offer,), _ = regions.offers(request("q"), frozenset({"london"}), 1.0, NOBODY)
    assert offer.instance.name == "b"  # where the wait is least
    assert (offer.capacity.slots_free, offer.capacity.wait_ms) == (7, 5.0)
    blind = instance("london", "b", wait_ms=5.0, replicas_ready=0, slots_free=0, usable_share=0.0)
    regions.adopt(seen(owner, blind).view, 2.0)
    assert regions.best_instance("london", MODEL).name == "a"  # the other sees nobody that it could send to
    # A replica that changes hands, and that nobody reports for a moment.
    regions.adopt(seen(other).view, 3.0)
    assert regions.best_instance("london", MODEL).name == "b"


def test_a_region_is_as_hot_as_its_instances_say_whoever_owns_its_slots(regions: Regions) -> None:
    busy = {"used_share": 0.95, "usable_share": 1.0}
    for at in range(8):
        one = instance("london", "a", slots_total=8, received_at=float(at), **busy)
        two = instance("london", "b", slots_total=0, replicas_ready=0, received_at=float(at), **busy)
        regions.adopt(seen(*((one, two) if at % 2 else (two,))).view, float(at))
    assert regions.guards["london", MODEL].hot
