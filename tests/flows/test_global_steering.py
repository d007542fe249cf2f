"""Routes, biases and pins that change while requests are on hold or under way; failover that comes back at a pace."""

from __future__ import annotations

from collections import Counter

from playbook import answered, held, sent
from worlds import everywhere, instance, report_in, request, seen, worldwide

from farhop.balance import outcome
from farhop.balance.machine import AttemptBegan, AttemptEnded, AttemptFailed, AttemptRefused, Forward, RequestArrived
from global_lb.fleet.regions import Spill
from global_lb.fleet.view import ChannelChanged, RegionReported
from global_lb.routing.policy import Bias, OperatorOverrides, OverridesChanged, Pin, RouteConfig
from global_lb.routing.routes import Routes, RoutesChanged


def by(route: RouteConfig) -> RoutesChanged:
    return RoutesChanged({("", ""): route})


def pinned(region: str, *, strict: bool = False, until: float = 100.0, tenant: str = "anyone") -> OverridesChanged:
    return OverridesChanged(OperatorOverrides(pins={("tenant", tenant): Pin(region, strict, "gpu test", "ann", until)}))


def decided_by(policy: str):
    return lambda decision: decision.route.policy.name == policy


def test_a_policy_changed_at_work_decides_the_next_request_and_the_next_attempt(play) -> None:
    flow = worldwide()
    order = RouteConfig(policy="failover", regions=("tokyo", "frankfurt"))
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "london", reasons=decided_by("predictive")))
        .on(by(order)).expect()  # requests under way are left alone
        .on(RequestArrived(request("b"))).expect(sent("b", "tokyo", reasons=decided_by("failover")))
        .on(AttemptFailed("a", 1, outcome.CONNECT_FAILED)).expect(sent("a", "tokyo", attempt=2))
        .on(AttemptRefused("b", 1, outcome.FOREIGN_FULL, 50.0)).expect(sent("b", "frankfurt", attempt=2))
        .on(AttemptBegan("b", 2, 200)).expect().on(AttemptEnded("b", 2, 200, None)).expect()
        .on(RoutesChanged({})).expect()
        .on(RequestArrived(request("c"))).expect(sent("c", "london"))
    )  # fmt: skip


def test_request_held_by_a_strict_pin_is_sent_when_the_pin_is_lifted(play) -> None:
    flow = worldwide(patience_s=30.0, view=seen(instance("london"), instance("frankfurt")))
    (
        play(flow)
        .on(pinned("tokyo", strict=True)).expect()
        .on(RequestArrived(request("a"))).expect(held("a", until=30.0))
        .on(RequestArrived(request("b", tenant="other"))).expect(sent("b", "london"))
        .at(1.0).on(OverridesChanged(OperatorOverrides())).expect(sent("a", "frankfurt"))  # London has b's prompt to do
    )  # fmt: skip


def test_a_request_held_by_a_route_s_quota_is_sent_once_the_route_has_none(play) -> None:
    flow = worldwide(
        patience_s=30.0, view=seen(instance("frankfurt")), routes=Routes({("", ""): RouteConfig(foreign_quota=0)})
    )
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(held("a"))
        .on(by(RouteConfig())).expect(sent("a", "frankfurt"))
    )  # fmt: skip


def test_a_request_over_quota_that_may_not_wait_is_answered(play) -> None:
    flow = worldwide(view=seen(instance("frankfurt")), routes=Routes({("", ""): RouteConfig(foreign_quota=0)}))
    found = "frankfurt: the foreign quota of 0 is used up"
    play(flow).on(RequestArrived(request("a"))).expect(
        answered("a", outcome.NO_REGION, detail=lambda detail: found in detail)
    )


def test_a_pin_narrows_within_the_law_and_falls_back(play) -> None:
    flow = worldwide()
    (
        play(flow)
        .on(pinned("tokyo", tenant="german", strict=True)).expect()
        .on(RequestArrived(request("a", tenant="german"))).expect(answered("a", outcome.NO_REGION))
        .on(pinned("tokyo", tenant="german")).expect()
        .on(RequestArrived(request("b", tenant="german"))).expect(sent("b", "frankfurt"))
        .on(pinned("tokyo", until=5.0)).expect()
        .on(RequestArrived(request("c"))).expect(
            sent("c", "tokyo", reasons=lambda d: d.notes == ("pinned to tokyo by ann: gpu test",)))
        .on(AttemptRefused("c", 1, outcome.NO_REPLICA)).expect(sent("c", "london", attempt=2))
        .at(2.9).on(RegionReported("london")).expect().on(RegionReported("tokyo")).expect()
        .at(5.0).on(RequestArrived(request("d"))).expect(sent("d", "london"))  # it has ended by itself
    )  # fmt: skip


def test_bias_moves_requests_that_it_outweighs_and_is_shown(play) -> None:
    flow = worldwide()
    word = OverridesChanged(OperatorOverrides({"london": Bias("london", 15.0, "why", "ann", 100.0)}))
    (
        play(flow)
        .on(word).expect()
        .on(RequestArrived(request("a"))).expect(
            sent("a", "frankfurt", reasons=lambda d: d.notes == ("bias in ms: london +15",)))
        .on(OverridesChanged(OperatorOverrides())).expect()
        .on(RequestArrived(request("b"))).expect(sent("b", "london"))
    )  # fmt: skip


def test_failover_returns_to_the_active_region_gradually() -> None:
    flow = worldwide(spill=Spill(ramp_per_s=0.1), routes=Routes({("", ""): RouteConfig(policy="failover", regions=(
        "tokyo", "frankfurt"))}))  # fmt: skip

    def shares(now: float, count: int = 300) -> Counter[str]:
        went: Counter[str] = Counter()
        report_in(flow, [] if now == 1.0 else ["tokyo"], now)
        report_in(flow, ["london", "frankfurt"], now)
        for n in range(count):
            forward = flow.handle(RequestArrived(request(f"{now}-{n}", 0)), now)[-1]
            assert isinstance(forward, Forward)
            went[forward.target] += 1
            flow.handle(AttemptBegan(forward.id, 1, 200), now)
            flow.handle(AttemptEnded(forward.id, 1, 200, None), now)
        return went

    assert shares(0.5) == {"tokyo": 300}
    flow.handle(ChannelChanged("tokyo", False), 0.6)
    flow.handle(everywhere(received_at=4.0), 4.0)
    report_in(flow, ["london", "frankfurt"], 4.0)
    flow.handle(RegionReported("london"), 4.0)
    went = [flow.handle(RequestArrived(request(f"x{n}", 0)), 4.0)[-1].target for n in range(20)]
    assert set(went) == {"frankfurt"}  # silent and cut
    back = [shares(5.0 + n)["tokyo"] / 300 for n in range(0, 12, 3)]
    assert back[0] < 0.2
    assert back == sorted(back)
    assert 0.3 < back[1] < 0.5
    assert back[-1] == 1.0
