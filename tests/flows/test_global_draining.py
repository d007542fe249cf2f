"""The global machine while a region is drained at a pace, and as it comes back."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from playbook import sent
from worlds import REGIONS, report_in, request, worldwide

from farhop.balance import outcome
from farhop.balance.machine import Answer, AttemptEnded, AttemptFailed, RequestArrived
from global_lb.fleet.view import ChannelChanged, RegionForced, RegionReported
from global_lb.routing.flow import GlobalFlow


def taken(flow: GlobalFlow, now: float, count: int = 400, **fields: object) -> Counter[str]:
    """Where so many requests go, one after the other."""
    report_in(flow, REGIONS, now)
    served: Counter[str] = Counter()
    for i in range(count):
        name = f"{now}-{i}"
        *_, last = flow.handle(RequestArrived(request(name, deadline=now + 60.0, **fields)), now)
        served[getattr(last, "target", "nowhere")] += 1
        if not isinstance(last, Answer):
            flow.handle(AttemptEnded(name, 1, 500, None), now)
    return served


@pytest.fixture
def draining() -> GlobalFlow:
    flow = worldwide()
    flow.handle(RegionForced("london", True, "new racks", over_s=10.0), 0.0)
    return flow


def test_drained_regions_share_falls_to_zero_without_refusals(draining) -> None:
    shares = [taken(draining, now) for now in (0.0, 2.5, 5.0, 7.5, 10.0)]
    assert all(sum(share.values()) == 400 and not share["nowhere"] for share in shares)
    kept = [share["london"] / 400 for share in shares]
    assert kept[0] == 1.0
    assert kept[-1] == 0.0
    for expected, share in zip((0.75, 0.5, 0.25), kept[1:-1], strict=True):
        assert share == pytest.approx(expected, abs=0.08)


def test_a_request_without_another_lawful_region_is_served_until_the_end(draining) -> None:
    assert taken(draining, 9.9, 50, tenant="german") == {"frankfurt": 50}
    draining.handle(RegionForced("frankfurt", True, "x", over_s=10.0), 9.9)
    assert taken(draining, 19.8, 50, tenant="german") == {"frankfurt": 50}
    assert taken(draining, 20.0, 50, tenant="german") == {"nowhere": 50}


def test_repeated_drain_does_not_restore_the_share(draining) -> None:
    draining.handle(RegionForced("london", True, "still", over_s=10.0), 9.0)
    assert taken(draining, 9.0)["london"] < 80
    assert taken(draining, 10.0)["london"] == 0
    draining.handle(RegionForced("london", True, "still", over_s=3600.0), 10.0)
    assert taken(draining, 11.0)["london"] == 0


def test_drain_without_pace_stops_new_requests_immediately() -> None:
    flow = worldwide()
    flow.handle(RegionForced("london", True, "fire"), 0.0)
    assert taken(flow, 0.0)["london"] == 0


def test_dead_region_is_not_asked_while_its_drain_fades(draining) -> None:
    assert draining.regions.liveness["london"].read(1.0).share > 0.8
    draining.handle(ChannelChanged("london", False), 5.0)
    for region in ("frankfurt", "tokyo"):
        draining.handle(RegionReported(region), 5.0)
    (*_, forward) = draining.handle(RequestArrived(request("a")), 5.0)
    assert forward.target == "frankfurt"
    assert draining.regions.liveness["london"].read(5.0).share == 0.0


def test_drain_expires_and_the_next_one_starts_from_the_full_share() -> None:
    flow = worldwide()
    flow.handle(RegionForced("london", True, "x", until=5.0, over_s=1.0), 0.0)
    assert taken(flow, 4.9)["london"] == 0
    assert taken(flow, 500.0)["london"] > 0
    flow.handle(RegionForced("london", True, "x", until=900.0, over_s=10.0), 600.0)
    assert flow.regions.liveness["london"].read(600.0).share == 1.0


def test_requests_in_flight_finish_in_a_drained_region_and_retries_go_elsewhere(play) -> None:
    flow = worldwide()
    (
        play(flow)
        .on(RequestArrived(request("a", 64))).expect(sent("a", "london"))
        .on(RequestArrived(request("b", 64))).expect(sent("b", "london"))
        .on(RegionForced("london", True, "new racks")).expect()
        .on(AttemptEnded("a", 1, 200, None)).expect()
        .on(AttemptFailed("b", 1, outcome.DIED_BEFORE_START)).expect(sent("b", "frankfurt", attempt=2))
        .on(AttemptEnded("b", 2, 200, None)).expect()
    )  # fmt: skip
    assert flow.under_way == 0


def test_session_moves_once_at_a_drain_and_once_at_its_end(draining) -> None:
    """Whoever is drawn at each request would meet another cache at every turn of a conversation."""
    rng = Random(5)
    sessions = [rng.getrandbits(64) for _ in range(60)]

    def at(now: float, turn: str) -> list[bool]:
        report_in(draining, REGIONS, now)
        here = []
        for n, session in enumerate(sessions):
            name = f"{turn}-{n}"
            forward = draining.handle(RequestArrived(request(name, session=session, deadline=now + 60.0)), now)[-1]
            here.append(forward.target == "london")
            draining.handle(AttemptEnded(name, 1, 500, None), now)
        return here

    leaving = [at(now, f"l{now}") for now in (0.0, 2.0, 4.0, 5.0, 6.0, 8.0, 10.0)]
    assert all(leaving[0])
    assert not any(leaving[-1])
    assert 10 < sum(leaving[3]) < 50, "paced, one session after another"
    for earlier, later in pairwise(leaving):
        assert all(before or not after for before, after in zip(earlier, later, strict=True)), "nobody flaps"
    draining.handle(RegionForced("london", False), 20.0)
    coming = [at(now, f"c{now}") for now in (20.0, 25.0, 30.0, 40.0)]
    assert sum(coming[0]) < 10
    assert 15 < sum(coming[2]) < 50
    assert all(coming[-1])
    for earlier, later in pairwise(coming):
        assert all(after or not before for before, after in zip(earlier, later, strict=True))
