"""Which regions are candidates, and what is known of regions across views."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import MODEL, OTHER_MODEL, capacity, instance, request, seen

from farhop.balance import outcome
from farhop.balance.estimate.drift import AGE_MAX_S, SILENT_MS_PER_S
from farhop.balance.health.pilot_light import PilotConfig
from farhop.balance.health.reading import State
from farhop.balance.health.region import LivenessConfig
from farhop.balance.machine import Usage
from global_lb.fleet.regions import CALIBRATION_MIN, MODELS_MAX, Regions, Spill
from global_lb.fleet.table import Scored
from global_lb.fleet.view import View

ALL = frozenset({"frankfurt", "london", "tokyo"})
NOBODY: frozenset[str] = frozenset()


@pytest.fixture
def regions() -> Regions:
    known = Regions(1 << 20, LivenessConfig())
    known.adopt(seen(*(instance(region) for region in sorted(ALL))).view, 0.0)
    for region in ALL:
        known.liveness_of(region).channel(True, 0.0)
        known.liveness_of(region).reported(0.0)
    return known


def offered(regions: Regions, now: float = 0.0, lawful=ALL, without=NOBODY, **fields):
    candidates = regions.candidates(request("a", **fields), 100.0, lawful, now, without)
    return list(candidates.names), candidates.absent


def test_candidates_are_the_lawful_regions_that_serve(regions: Regions) -> None:
    assert offered(regions) == (["frankfurt", "london", "tokyo"], {})
    assert offered(regions, lawful=frozenset({"tokyo"})) == (["tokyo"], {})
    assert offered(regions, without=frozenset({"tokyo"})) == (["frankfurt", "london"], {"tokyo": "tried already"})
    assert offered(regions, model=OTHER_MODEL)[0] == []


def test_why_the_others_are_not_offered(regions: Regions) -> None:
    regions.liveness_of("frankfurt").channel(False, 0.0)
    regions.liveness_of("oslo").channel(True, 0.0)
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
    assert "mars" not in regions.liveness  # reading changes nothing


def test_full_regions_are_known_from_report_to_report(regions: Regions) -> None:
    for tokens, wanted in ((1e9, []), (0.0, ["tokyo"]), (1e9, [])):
        others = (instance("frankfurt"), instance("london"))
        regions.adopt(seen(instance("tokyo", headroom_foreign_tokens=tokens), *others).view, 0.0)
        for without in (NOBODY, frozenset({"london"})):
            candidates = regions.candidates(request("a"), 100.0, ALL, 0.0, without)
            assert [candidates.names[place] for place in candidates.full()] == wanted
            assert candidates.any_full == bool(wanted)
            assert [candidates.only([place], "").full() for place in range(len(candidates))].count([0]) == len(wanted)


def test_an_offer_is_of_the_instance_that_waits_least_with_what_was_sent(regions: Regions) -> None:
    a, b = instance("london", "a", wait_ms=5.0), instance("london", "b", wait_ms=9.0)
    regions.adopt(seen(a, b).view, 0.0)
    assert regions.best_instance("london", MODEL) == a
    regions.load_of(a).sent(4096)  # 1024 tokens at 0.05 ms
    assert regions.best_instance("london", MODEL) == b
    assert regions.best_instance("london", OTHER_MODEL) is None
    assert regions.best_instance("mars", MODEL) is None


def test_equal_instances_take_turns_and_one_with_fewer_free_slots_does_not(regions: Regions) -> None:
    """One process would carry all streams of a region otherwise: they count in nobody's wait once they have begun."""
    equal = [instance("london", name, wait_ms=5.0, usable_share=1.0) for name in "abc"]
    regions.adopt(seen(*equal).view, 0.0)

    def sent_to() -> str:
        best = regions.best_instance("london", MODEL)
        assert best is not None
        load = regions.load_of(best)
        load.sent(400, 0.0)  # cached there: nothing to wait for
        load.answered(400, 0.0)  # and it began at once
        return best.name

    assert [sent_to() for _ in range(6)] == list("abcabc")
    regions.load_of(equal[0]).sent(400, 0.0)  # not begun yet: one slot less
    assert [sent_to() for _ in range(4)] == list("bcbc")


def test_an_instance_without_replicas_is_used_and_offers_those_of_all(regions: Regions) -> None:
    owner = instance("london", "a", wait_ms=50.0, slots_free=7, slots_total=8, usable_share=1.0, used_share=0.9)
    other = instance("london", "b", wait_ms=5.0, replicas_ready=0, slots_free=0, usable_share=1.0, used_share=0.9)
    regions.adopt(seen(owner, other).view, 1.0)
    assert regions.best_instance("london", MODEL) == other  # in the region with the shortest wait
    asked = request("q"), 100.0, frozenset({"london"}), 1.0
    london = regions.candidates(*asked).scored(0, 0.0)
    assert (london.slots_free, london.wait_ms, london.headroom) == (7, 5.0, 7.0)
    regions.load_of(other).sent(400)  # still the better one, and one slot less
    assert regions.candidates(*asked).scored(0, 0.0).headroom == 6.0
    # 100 tokens at 0.05 ms, prefilled by the one replica that they share.
    assert regions.candidates(*asked).scored(0, 0.0).wait_ms == pytest.approx(10.0)


@pytest.mark.parametrize("draining", [False, True])
def test_requests_sent_to_any_instance_take_slots_of_the_region(regions: Regions, draining: bool) -> None:
    """They share their replicas, and each counts all slots as free until the next report."""
    a = instance("london", "a", wait_ms=5.0, slots_free=4, slots_total=8, usable_share=1.0)
    b = instance("london", "b", wait_ms=9.0, slots_free=4, slots_total=8, usable_share=1.0)
    asked = request("q"), 100.0, frozenset({"london"}), 1.0
    regions.adopt(seen(a, b).view, 1.0)
    assert regions.candidates(*asked).scored(0, 0.0).headroom == 8.0
    for _ in range(3):
        regions.load_of(b).sent(400)
    london = regions.candidates(*asked).scored(0, 0.0)
    assert (london.headroom, regions.best_instance("london", MODEL)) == (5.0, a)
    # 300 tokens at 0.05 ms, prefilled by the two replicas that both can send to.
    assert london.wait_ms == pytest.approx(5.0 + 300 * 0.05 / 2)
    if draining:  # its earlier requests still run there, though its replicas belong to the other now
        handed = instance("london", "a", wait_ms=5.0, slots_free=8, slots_total=8, usable_share=1.0)
        regions.adopt(seen(handed, msgspec.structs.replace(b, draining=True)).view, 2.0)
        assert regions.candidates(*asked).scored(0, 0.0).headroom == 5.0
    regions.load_of(b).answered(400)
    assert regions.candidates(*asked).scored(0, 0.0).headroom == 6.0


def test_a_region_is_as_hot_as_its_instances_report_whichever_owns_the_slots(regions: Regions) -> None:
    busy = {"used_share": 0.95, "usable_share": 1.0}
    for at in range(8):
        one = instance("london", "a", slots_total=8, received_at=float(at), **busy)
        two = instance("london", "b", slots_total=0, replicas_ready=0, received_at=float(at), **busy)
        regions.adopt(seen(*((one, two) if at % 2 else (two,))).view, float(at))
    assert regions.guards["london", MODEL].hot


def test_counts_of_an_instance_that_left_are_forgotten(regions: Regions) -> None:
    regions.load_of(instance("london")).sent(1000)
    regions.adopt(View({}), 0.0)
    assert regions.loads == {}
    regions.adopt(seen(instance("london")).view, 0.0)
    assert regions.load_of(instance("london")).outstanding_bytes == 0.0


def test_sent_bytes_are_acknowledged_by_an_earlier_incarnation_too(regions: Regions) -> None:
    """A clock set back between two starts: what the later one had counted says nothing of this one."""
    later = msgspec.structs.replace(instance("london", "a"), incarnation=5, accepted=1000.0)
    earlier = msgspec.structs.replace(later, incarnation=1, accepted=0.0)
    regions.adopt(seen(later).view, 1.0)
    regions.adopt(seen(earlier).view, 2.0)
    regions.load_of(earlier).sent(100)
    assert regions.load_of(earlier).outstanding_bytes == 100.0
    regions.adopt(seen(msgspec.structs.replace(earlier, accepted=100.0)).view, 3.0)
    assert regions.load_of(earlier).outstanding_bytes == 0.0


def test_a_report_repeated_with_another_regions_is_no_second_report(regions: Regions) -> None:
    london = instance("london", "a")
    first = seen(london).view
    regions.adopt(first, 1.0)
    regions.load_of(london).sent(500)
    regions.load_of(london).answered(500)  # answered; the next report will count it
    for now in (2.0, 3.0):
        regions.adopt(seen(london, instance("tokyo", received_at=now)).view, now)
    regions.load_of(london).sent(10)
    counted = msgspec.structs.replace(london, accepted=500.0, received_at=4.0)
    regions.adopt(seen(counted).view, 4.0)
    assert regions.load_of(counted).outstanding_bytes == 10.0


def test_models_once_offered_exist(regions: Regions) -> None:
    regions.adopt(seen(instance("london", models={OTHER_MODEL: capacity()})).view, 0.0)
    assert [regions.may_exist(m) for m in (MODEL, OTHER_MODEL, "nowhere")] == [True, True, False]
    assert Regions(1, LivenessConfig()).may_exist("nowhere")  # no region has reported yet


def test_cache_hit_calibration_stays_within_its_bounds(regions: Regions) -> None:
    regions.caches("london", request("a", 4096).chain)
    regions.caches("unheard-of", request("a", 4096).chain)
    asked = request("a", 4096), 1.0, frozenset({"london"})
    scored = regions.candidates(*asked, 0.0).scored(0, 0.0)
    assert (scored.predicted_tokens, scored.hit_tokens) == (1024.0, 1024.0)
    for _ in range(300):
        regions.compare(asked[0], scored, Usage(1024, 1, 0), 0.0)
    low = regions.cache_hit_calibration["london"].value
    assert low == pytest.approx(CALIBRATION_MIN, abs=1e-3)
    regions.compare(asked[0], scored, Usage(1024, 1, 10**9), 0.0)
    assert low < regions.cache_hit_calibration["london"].value <= 1.0
    regions.compare(asked[0], None, Usage(1024, 1, 5), 0.0)


def test_what_is_promised_is_corrected_by_what_came_and_no_score_is(regions: Regions) -> None:
    def predicted() -> tuple[Scored, float]:
        candidates = regions.candidates(request("a", 4096), 1.0, frozenset({"london"}), 0.0)
        return candidates.scored(0, 0.0), candidates.predicted_ms().item(0)

    before, score_ms = predicted()
    assert before.residual_ms == 0.0
    regions.began(MODEL, before, before.ttft_ms + 25.0)
    regions.adopt(seen(*(instance(region, accepted=1.0) for region in sorted(ALL))).view, 0.0)
    after, same_ms = predicted()
    assert (after.residual_ms, after.ttft_ms) == (pytest.approx(25.0), pytest.approx(before.ttft_ms + 25.0))
    assert same_ms == score_ms
    regions.began(MODEL, after, after.ttft_ms)  # it was right: the same is promised again
    regions.adopt(seen(*(instance(region, accepted=2.0) for region in sorted(ALL))).view, 0.0)
    assert predicted()[0].residual_ms == pytest.approx(25.0)
    regions.take("london", None)
    regions.began(MODEL, after, 1e3)  # of a region that is gone: nothing is learned
    regions.adopt(seen(*(instance(region) for region in sorted(ALL))).view, 1.0)
    assert predicted()[0].residual_ms == 0.0


def test_predicted_hits_of_a_region_recover_while_no_requests_are_sent_there(regions: Regions) -> None:
    regions.caches("london", request("a", 4096).chain)
    asked = request("a", 4096), 1.0, frozenset({"london"})
    scored = regions.candidates(*asked, 0.0).scored(0, 0.0)
    for _ in range(100):
        regions.compare(asked[0], scored, Usage(1024, 1, 0), 0.0)
    hits = [regions.candidates(*asked, now).scored(0, 0.0).hit_tokens for now in (0.1, 30.0, 60.0, 120.0, 600.0)]
    assert hits[0] < 150.0
    assert hits == sorted(hits)
    assert hits[3] > 0.8 * 1024.0
    assert hits[4] == pytest.approx(1024.0, rel=1e-3)


def anew(regions: Regions, asked, lawful, now: float, without) -> list:
    """The candidates with nothing kept from before."""
    regions._known_eligible.clear()
    regions._tables.clear()
    regions._stale.clear()
    candidates = regions.candidates(asked, 100.0, lawful, now, without)
    return states(candidates)


def states(found) -> list:
    return [found.names, dict(found.absent), found.block.tolist(), found.sent.tolist(), found.here, found.hot,
            found.any_wait, None if found.penalty_ms is None else found.penalty_ms.tolist()]  # fmt: skip


STEPS = st.one_of(
    st.tuples(st.sampled_from(["heard", "cut", "joined", "failed", "worked", "drained", "lifted", "asked"]),
              st.sampled_from(sorted(ALL))),
    st.tuples(st.just("seen"), st.sets(st.sampled_from(sorted(ALL)))),
    st.tuples(st.just("sent"), st.sampled_from(sorted(ALL))),
    st.tuples(st.just("refused"), st.sampled_from(sorted(ALL))),
)  # fmt: skip


@given(st.lists(st.tuples(STEPS, st.floats(0, 1.5)), max_size=25))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_cached_region_state_equals_recomputed_state(steps) -> None:
    """Two that hear the same: one that keeps, and one that forgets before each question."""
    pair = [Regions(1 << 20, LivenessConfig(), here="london") for _ in range(2)]
    asked, now = request("a"), 0.0
    for n, ((what, whom), pause_s) in enumerate([(("seen", ALL), 0.0), *steps]):
        now += pause_s
        for regions in pair:
            happens(regions, what, whom, now, n)
        for lawful, without in ((ALL, NOBODY), (frozenset({"london", "tokyo"}), NOBODY), (ALL, frozenset({"tokyo"}))):
            kept = pair[0].candidates(asked, 100.0, lawful, now, without)
            assert states(kept) == anew(pair[1], asked, lawful, now, without), (what, whom)


def happens(regions: Regions, what: str, whom, now: float, n: int) -> None:
    if what == "seen":
        regions.adopt(
            seen(
                *(
                    instance(
                        name,
                        received_at=now,
                        wait_ms=5.0 + n,
                        used_share=(n % 5) / 4,
                        headroom_foreign_tokens=1000.0 * (n % 3),
                    )
                    for name in sorted(whom)
                )
            ).view,
            now,
        )
    elif what in ("sent", "refused"):
        known = regions.best_instance(whom, MODEL)
        if known is not None and what == "sent":
            regions.load_of(known).sent(1000.0)
        elif known is not None:
            regions.refused(known, MODEL, outcome.FOREIGN_FULL, 70.0)
    elif what != "asked":
        liveness = regions.liveness_of(whom)
        {
            "heard": lambda: liveness.reported(now), "cut": lambda: liveness.channel(False, now),
            "joined": lambda: liveness.channel(True, now), "failed": lambda: liveness.relay_failed(now),
            "worked": liveness.relay_succeeded, "lifted": liveness.forced.lift,
            "drained": lambda: liveness.forced.force(State.DRAINING, "why", now + 2.0, now=now, over_s=1.0),
        }[what]()  # fmt: skip
        regions.update_guards(whom, now)


KNOWN_ANEW = st.lists(
    st.tuples(
        st.sampled_from(sorted(ALL)),
        st.lists(st.sampled_from("ab"), unique=True, max_size=2),
        st.booleans(),
        st.integers(0, 8),
        st.booleans(),
    ),
    max_size=12,
)


@given(KNOWN_ANEW)
@settings(deadline=None, max_examples=60)
def test_updating_regions_one_by_one_equals_adopting_a_whole_view(steps) -> None:
    """Whatever is asked on the way, nothing is left over of how a region was known before."""
    grown, latest = Regions(1 << 20, LivenessConfig()), {}
    for at, (name, instances, draining, ready, other) in enumerate(steps, 1):
        models = {MODEL: capacity(replicas_ready=ready, slots_free=ready)} | (
            {OTHER_MODEL: capacity()} if other else {}
        )
        made = [instance(name, i, draining=draining, models=models, received_at=float(at)) for i in instances]
        latest[name] = seen(*made).view.regions.get(name)
        grown.take(name, latest[name])
        grown.update_guards(name, float(at))
        grown.candidates(request("q"), 100.0, ALL, float(at))
    view = View({name: known for name, known in latest.items() if known is not None})
    fresh = Regions(1 << 20, LivenessConfig())
    fresh.adopt(view, 20.0)
    assert grown.view == view
    for known in (grown, fresh):
        for name in ALL:
            known.liveness_of(name).channel(True, 0.0)
            known.liveness_of(name).reported(20.0)
    for model in (MODEL, OTHER_MODEL):
        fields = [known.candidates(request("q", model=model), 100.0, ALL, 20.0) for known in (grown, fresh)]
        assert fields[0].names == fields[1].names
        assert fields[0].absent == fields[1].absent
        for place in range(len(fields[0])):
            assert fields[0].scored(place, 0.0) == fields[1].scored(place, 0.0)
    assert grown.loads.keys() == fresh.loads.keys()
    assert grown.drifts.keys() == fresh.drifts.keys()


def test_last_reports_of_silent_regions_are_uncertain(regions: Regions) -> None:
    """Their channels stand, nobody reports: they are asked since there is nobody better, and by draw before long."""
    assert not regions.candidates(request("q"), 100.0, ALL, 1.0).moving
    candidates = regions.candidates(request("q"), 100.0, ALL, 30.0)
    assert candidates.moving
    known = Regions(1 << 20, LivenessConfig())
    known.adopt(seen(*(instance(name, received_at=5.0) for name in sorted(ALL))).view, 5.0)
    for name in ALL:
        known.liveness_of(name).channel(True, 0.0)
    silent = known.candidates(request("q"), 100.0, ALL, 5.0 + AGE_MAX_S + 2.0)
    assert silent.uncertainty_ms(5.0 + AGE_MAX_S + 2.0).tolist() == pytest.approx([2.0 * SILENT_MS_PER_S] * 3)


def piloted(**loads: float) -> Regions:
    """Tokyo is a pilot light of two replicas at least."""
    known = Regions(1 << 20, LivenessConfig(), pilots={"tokyo": PilotConfig(sleep_after_s=20.0)})
    known.remap(ALL)
    bounds = {"replicas_min": 4, "replicas_max": 9}
    view = seen(*(instance(r, load_replicas=loads.get(r, 1.0), replicas_needed=2, **bounds) for r in sorted(ALL))).view
    known.adopt(view, 0.0)
    for region in ALL:
        known.liveness_of(region).channel(True, 0.0)
        known.liveness_of(region).reported(0.0)
    for region in ALL:
        known.update_guards(region, 1.0)
    return known


def test_a_sleeping_pilot_light_is_a_candidate_only_if_no_other_region_is_up() -> None:
    regions = piloted()
    assert offered(regions, 1.1) == (["frankfurt", "london"], {"tokyo": "pilot-light: asleep"})
    assert offered(regions, 1.1, lawful=frozenset({"tokyo"}))[0] == ["tokyo"]  # a tenant that no other region may serve
    assert offered(regions, 1.1, without=ALL - {"tokyo"})[0] == ["tokyo"]
    for region in ALL - {"tokyo"}:
        regions.liveness_of(region).channel(False, 0.0)  # suspect
    assert offered(regions, 1.2)[0] == ["tokyo"]
    assert regions.admitted_share("tokyo", 1.2) == 0.0


def test_a_pilot_light_that_wakes_is_admitted_what_is_there_at_the_pace_of_a_return() -> None:
    regions = piloted()
    london = regions.liveness_of("london")
    london.channel(False, 0.0)
    for region in ALL - {"london"}:
        regions.liveness_of(region).reported(4.0)
    regions.update_guards("frankfurt", 4.0)  # whichever instance reports it
    assert regions.scaling.status("tokyo")["state"] == "waking"
    assert offered(regions, 4.1)[0] == ["frankfurt", "tokyo"]
    assert 0.0 < regions.admitted_share("tokyo", 4.1) < 0.1  # 5 % a second
    for region in ALL - {"london"}:
        regions.liveness_of(region).reported(30.0)
        regions.update_guards(region, 30.0)
    assert regions.admitted_share("tokyo", 30.0) == 0.5  # two replicas of four
    # It is no longer one: from now on it is like any other region.
    regions.reconfigure(Spill(), {}, {})
    regions.update_guards("tokyo", 30.5)
    assert regions.admitted_share("tokyo", 30.5) == 1.0


def test_what_is_usually_left_of_a_prompt_is_learned_from_what_was_sent(regions: Regions) -> None:
    for _ in range(100):
        regions.asked(MODEL, 4000.0)
    for _ in range(100):
        regions.asked(MODEL, 1000.0)
    usual = regions.candidates(request("a"), 1.0, frozenset(), 1.0).mean_work_bytes
    assert usual == pytest.approx(1000.0, rel=0.05)
    for n in range(2 * MODELS_MAX):
        regions.asked(f"model-{n}", 1.0)
    assert (
        regions.candidates(request("a"), 1.0, frozenset(), 1.0).mean_work_bytes is None
    )  # forgotten, for lack of room
