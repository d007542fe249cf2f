"""Many balancers, old reports: no herding, no flapping, and a paced return. Both tiers' machines in virtual time."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from farhop.balance import machine
from farhop.balance.machine import Address, Command, Event
from farhop_lab.sim.measures import Measures, quantile
from farhop_lab.sim.sites import MODEL, Reporting, Watching, flat, station
from farhop_lab.sim.world import World
from global_lb.fleet.view import Region, RegionReported, View
from tests.conftest import further
from topology.law import Law

# FIELD §4: 20 balancers, 4 regions of 100 slots, 8 s of service. Base loads are served in their region; 15 requests
# a second more (120 slots) come from a place whose own region can take none. In total 325 of 400 slots.
BASE = {"r40": 40, "r50": 50, "r55": 55, "r60": 60}
SLOTS, SERVICE_S, SPILL_PER_S, BALANCERS = 100, 8.0, 15.0, 20
SPILLS_AT, MEASURED_FROM, UNTIL = 10.0, 20.0, 36.0
BOTTOMLESS = 10_000
SHORT = 200  # bytes of a prompt, less than a block: no prefix of it is known, and caches play no part here


class Naive:
    """A control: a balancer that goes by the last report alone."""

    def __init__(self, region: str, _law: Law, _rng: Random) -> None:
        self.region = region
        self.view = View({})

    def handle(self, event: Event, _now: float) -> list[Command]:
        """Forward where `choose` says; whatever comes back is the answer."""
        if isinstance(event, RegionReported) and event.known is not None:
            self.view = self.view.put(event.region, event.known)
        elif isinstance(event, machine.RequestArrived):
            request, target = event.request, self.choose()
            forward = machine.Forward(request.id, 1, target, Address(target, 1), 0.0, frozenset(self.view.regions))
            return [machine.SetTimer(request.id, request.deadline), forward]
        elif isinstance(event, machine.AttemptRefused | machine.AttemptFailed):
            return [machine.Answer(event.id, event.outcome, "")]
        return []

    def choose(self) -> str:
        """The region to go to."""
        raise AssertionError("say where")


def slots_free(region: Region) -> int:
    return region.instances[0].models[MODEL].slots_free


class Greedy(Naive):
    """The least loaded by the last report."""

    def choose(self) -> str:
        return max(self.view.regions.values(), key=slots_free).name


# -- herding


def spilling(age_s: float, *, greedy: bool, seed: int = 4) -> World:
    """The world of FIELD §4. Under the greedy control nobody is refused and nothing waits: its choice alone shows."""
    site = station(BOTTOMLESS if greedy else SLOTS, SERVICE_S, replicas=4)
    world = World(
        seed,
        flat(["spill", *BASE], 50.0),
        dict.fromkeys(BASE, site),
        balancers={"spill": BALANCERS},
        reporting=Reporting(every_s=age_s),
        watching=Watching(report_age_s=max(3.0, 3.0 * age_s)),
        make_global=Greedy if greedy else None,
    )
    world.journal.violations_only()  # nothing else of the journal is read: here and below
    for region, slots in BASE.items():
        own = slots / SERVICE_S
        world.stream(own, lambda region=region: world.arrive(region, "t", SHORT, direct=True), until=UNTIL, even=True)
    world.stream(SPILL_PER_S, lambda: world.arrive("spill", "t", SHORT), since=SPILLS_AT, until=UNTIL)
    return world


def peaks(world: World) -> dict[str, float]:
    """The most that each region was used, its 100 slots being 1; beyond that, work waits."""
    scale = {name: world.regions[name].site.slots / SLOTS for name in BASE}
    return {name: world.measures.peak(name, MEASURED_FROM) * scale[name] for name in BASE}


def figures(name: str, world: World, measures: Measures) -> str:
    shown = " ".join(f"{region} {peak:.2f}" for region, peak in peaks(world).items())
    ttft_ms = measures.ttft_ms(since=MEASURED_FROM)
    return (
        f"{name}: peak {max(peaks(world).values()):.2f} ({shown}), refused {sum(measures.refusals.values())} of "
        f"{measures.arrived}, TTFT p50 {quantile(ttft_ms, 0.5):.0f} p99 {quantile(ttft_ms, 0.99):.0f} ms"
    )


def played(age_s: float, *, greedy: bool) -> World:
    world = spilling(age_s, greedy=greedy)
    measures = world.run(UNTIL)
    print(f"\nreports every {age_s:g} s, {figures('greedy' if greedy else 'ours', world, measures)}", end="")
    assert measures.violations == 0, measures.journal.first_violations
    assert set(measures.outcomes) == {"served"}, measures.outcomes
    return world


@pytest.mark.parametrize(("age_s", "ours_at_most"), further([(2.0, 1.0), (5.0, 1.02), (10.0, 1.03)], (5.0, 1.02)))
def test_many_balancers_with_old_reports_do_not_herd(age_s: float, ours_at_most: float) -> None:
    assert max(peaks(played(age_s, greedy=False)).values()) <= ours_at_most


def test_a_greedy_choice_by_old_reports_herds() -> None:
    """The control: else those above show nothing. It peaks at 1.09 by reports of 2 s, and at 1.81 by those of 10 s."""
    assert max(peaks(played(5.0, greedy=True)).values()) >= 1.25


# -- hysteresis


class Threshold(Naive):
    """Away while the region here is used for 0.90 or more, here below it: no memory, no hysteresis."""

    def choose(self) -> str:
        here = self.view.regions[self.region]
        return "far" if 1.0 - slots_free(here) / 40 >= 0.9 else "near"


SWINGS, SWING_S = 12, 6.0


def oscillating(*, naive: bool) -> World:
    """`near` swings around 0.90: its own 32 to 36 of 40 slots, and 4 more unless they go to `far`, which is idle."""
    small, large = station(40, 2.0, replicas=4), station(400, 2.0, replicas=4)
    world = World(
        3,
        flat(["near", "far"], 60.0),
        {"near": small, "far": large},
        balancers={"near": 4},
        make_global=Threshold if naive else None,
    )
    world.journal.violations_only()
    for n in range(SWINGS):
        per_s = (16.0, 18.0)[n % 2]
        at, until = n * SWING_S, (n + 1) * SWING_S
        world.stream(per_s, lambda: world.arrive("near", "t", SHORT, direct=True), since=at, until=until, even=True)
    world.stream(2.0, lambda: world.arrive("near", "t", SHORT), since=5.0, until=SWINGS * SWING_S, even=True)
    return world


def sent_far(world: World, since: float, until: float, stretch_s: float) -> list[float]:
    """What share of those that came to a balancer was answered far away, in each stretch of time."""
    far: list[list[bool]] = [[] for _ in range(int((until - since) / stretch_s))]
    for record in world.measures.records:
        index = int((record.arrived_at - since) // stretch_s)
        if not record.direct and record.region and 0 <= index < len(far):
            far[index].append(record.region == "far")
    return [sum(those) / len(those) for those in far]


def moves(shares: list[float]) -> int:
    """How often the most of them changed sides."""
    return sum((a > 0.5) != (b > 0.5) for a, b in pairwise(shares))


def test_a_region_that_swings_around_its_threshold_is_left_once() -> None:
    """Without its guests the region is at 0.80 to 0.90, with them at 0.90 to 1.00: left above 0.90, back below 0.75."""
    shares = {}
    for name, naive in (("threshold", True), ("ours", False)):
        world = oscillating(naive=naive)
        measures = world.run(SWINGS * SWING_S + 10.0)
        assert measures.violations == 0, measures.journal.first_violations
        shares[name] = sent_far(world, 2 * SWING_S, SWINGS * SWING_S, SWING_S / 2)
        print(f"\n{name}: {moves(shares[name])} moves, {sum(shares[name]) / len(shares[name]):.2f} sent far", end="")
    assert moves(shares["threshold"]) >= 8, "else the control shows nothing"
    assert moves(shares["ours"]) <= 1
    assert min(shares["ours"][10:]) > 0.9, "it is left, and stays left"


# -- coming back

RAMP_PER_S = 0.05
BACK_AT = 16.0


def test_a_region_comes_back_from_an_outage_step_by_step() -> None:
    """At most 5 % a second more, and one second's worth to begin with; the draw's own spread aside."""
    world = World(
        4,
        flat(["near", "far"], 60.0),
        dict.fromkeys(("near", "far"), station(200, 1.0, replicas=8)),
        balancers={"near": 4},
    )
    world.journal.violations_only()
    world.stream(60.0, lambda: world.arrive("near", "t", SHORT), since=5.0, until=BACK_AT + 28.0)
    world.at(10.0, world.kill, "near")
    world.at(BACK_AT, world.revive, "near")
    measures = world.run(BACK_AT + 30.0)
    assert measures.violations == 0, measures.journal.first_violations
    assert 1.0 - sent_far(world, 6.0, 10.0, 4.0)[0] > 0.99, "before, all is served here"
    back = [1.0 - far for far in sent_far(world, BACK_AT, BACK_AT + 28.0, 4.0)]
    print("\nback, by 4 s: " + " ".join(f"{share:.2f}" for share in back), end="")
    for n, share in enumerate(back):
        most = min(1.0, RAMP_PER_S * (4.0 * (n + 1) + 1.0))
        spread = 4.0 * (most * (1.0 - most) / 240.0) ** 0.5
        assert share <= most + spread, f"stretch {n}: {share:.2f} of the requests are back"
    assert min(back[-2:]) > 0.97, "and in the end all are"
