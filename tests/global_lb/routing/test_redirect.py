"""Which requests are redirected, where to, and what counts as sent meanwhile."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from playbook import Expected, Playbook
from worlds import REGIONS, instance, law, request, seen, sent_elsewhere, worldwide

from farhop.balance import outcome
from farhop.balance.machine import AttemptFailed, Redirect, RequestArrived
from global_lb.routing import redirect
from global_lb.routing.flow import GlobalFlow
from global_lb.routing.policy import RouteConfig
from global_lb.routing.redirect import REDIRECTED_S
from global_lb.routing.routes import Routes, RoutesChanged
from topology.model import Residency, Rule

URL = "https://{}-a.example"


def flow(route: RouteConfig | None = None, **more: object) -> GlobalFlow:
    routes = Routes({("", ""): route or RouteConfig(answer="redirect")})
    view = seen(*(instance(name, client_url=URL.format(name)) for name in REGIONS))
    return worldwide(routes=routes, **{"view": view, **more})


def redirected(request_id: str, region: str) -> Expected:
    return Expected(
        Redirect,
        id=request_id,
        url=URL.format(region),
        outcome=outcome.REDIRECTED,
        forward=lambda forward: forward.target == region and forward.reasons.chosen.region == region,
    )


def test_a_client_is_sent_to_the_region_and_forgotten() -> None:
    machine = flow()
    Playbook(machine).on(RequestArrived(request("a"))).expect(redirected("a", "london")).on(
        RequestArrived(request("b", tenant="german"))
    ).expect(redirected("b", "frankfurt")).finished()
    assert machine.under_way == 0


def test_the_token_allows_no_more_than_the_law_of_arrival_and_of_now() -> None:
    (command,) = flow().handle(RequestArrived(request("a", tenant="european")), 0.0)
    assert isinstance(command, Redirect)
    assert command.forward is not None
    assert command.forward.lawful == {"frankfurt", "london"}


@pytest.mark.parametrize(("body_bytes", "goes"), [(9_999, False), (10_000, True)])
def test_small_requests_are_relayed_where_only_large_ones_are_redirected(body_bytes: int, goes: bool) -> None:
    machine = flow(RouteConfig(answer="redirect", redirect_bytes=10_000))
    commands = machine.handle(RequestArrived(request("a", body_bytes=body_bytes)), 0.0)
    assert isinstance(commands[-1], Redirect) is goes


def test_redirection_follows_changed_routes_without_a_restart() -> None:
    machine = flow(RouteConfig())
    assert sent_elsewhere(machine.handle(RequestArrived(request("a")), 0.0)) is None
    machine.handle(RoutesChanged({("anyone", ""): RouteConfig(answer="redirect")}), 0.0)
    assert sent_elsewhere(machine.handle(RequestArrived(request("b")), 0.0)) in REGIONS
    assert sent_elsewhere(machine.handle(RequestArrived(request("c", tenant="other")), 0.0)) is None


def test_a_request_relayed_once_is_not_redirected_later() -> None:
    machine = flow(RouteConfig())
    machine.handle(RequestArrived(request("a")), 0.0)
    machine.handle(RoutesChanged({("", ""): RouteConfig(answer="redirect")}), 0.0)
    again = machine.handle(AttemptFailed("a", 1, outcome.CONNECT_FAILED), 0.0)
    assert again
    assert sent_elsewhere(again) is None


def test_no_client_is_redirected_to_a_region_without_a_client_url_or_from_tls_to_plaintext() -> None:
    closed = seen(*(instance(name) for name in REGIONS))
    assert sent_elsewhere(flow(view=closed).handle(RequestArrived(request("a")), 0.0)) is None
    plain = seen(*(instance(name, client_url=f"http://{name}.example") for name in REGIONS))
    assert sent_elsewhere(flow(view=plain).handle(RequestArrived(request("a")), 0.0)) == "london"
    assert sent_elsewhere(flow(view=plain, https_only=True).handle(RequestArrived(request("a")), 0.0)) is None
    assert sent_elsewhere(flow(https_only=True).handle(RequestArrived(request("a")), 0.0)) == "london"


def test_no_client_is_redirected_where_the_law_forbids_reading_the_body() -> None:
    rule = Residency(processing=Rule(allow=("world",)), entry=Rule(allow=("eu",)))
    machine = flow(under=law(picky=rule))
    commands = machine.handle(RequestArrived(request("a", tenant="picky")), 0.0)
    assert sent_elsewhere(commands) is None, "London may serve it, but not be the one that is sent the body"


def test_no_request_is_redirected_to_a_region_without_quota_of_its_tenant() -> None:
    instances = [replace(instance(name, client_url=URL.format(name)), hop_version=2) for name in REGIONS]
    views = [seen(*instances), seen(*(replace(one, hop_version=3) for one in instances))]
    homes = {"anyone": "frankfurt", "german": "frankfurt"}
    older, machine = flow(view=views[0]), flow(view=views[1])
    machine.redirects.homes = older.redirects.homes = homes
    german = RequestArrived(request("b", tenant="german"))
    assert sent_elsewhere(older.handle(german, 0.0)) is None, "an older build charges nobody"
    assert sent_elsewhere(older.handle(RequestArrived(request("c", tenant="other")), 0.0)) == "london"
    assert sent_elsewhere(machine.handle(RequestArrived(request("a")), 0.0)) is None, "London is chosen, and relayed to"
    assert sent_elsewhere(machine.handle(german, 0.0)) == "frankfurt"
    assert sent_elsewhere(machine.handle(RequestArrived(request("c", tenant="other")), 0.0)) == "london"


def test_a_redirected_request_counts_as_sent_for_a_while() -> None:
    machine = flow()
    view = machine.regions.view
    load = machine.regions.load_of(view.regions["london"].instances[0])
    machine.handle(RequestArrived(request("a", 40_000)), 0.0)
    assert load.outstanding_bytes == 40_000
    waits = machine.consider(request("b"), 0.0).ranked
    assert next(s for s in waits if s.region == "london").wait_ms > 5.0
    machine.redirects.expire(machine.regions, REDIRECTED_S - 0.01)
    assert load.outstanding_bytes == 40_000
    machine.redirects.expire(machine.regions, REDIRECTED_S)
    assert load.outstanding_bytes == 0
    assert next(s for s in machine.consider(request("b"), 0.0).ranked if s.region == "london").wait_ms == 5.0


def test_a_new_view_ends_redirected_and_there_are_never_more_than_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redirect, "REDIRECTED_MAX", 2)
    machine = flow()
    instances = {name: one.instances[0] for name, one in machine.regions.view.regions.items()}
    for n in range(4):
        machine.handle(RequestArrived(request(f"q{n}", 1000)), 0.0)
    sent = sum(machine.regions.load_of(one).outstanding_bytes for one in instances.values())
    assert sent == 2000
    machine.handle(seen(*instances.values()), REDIRECTED_S)
    assert sum(machine.regions.load_of(one).outstanding_bytes for one in instances.values()) == 0


@pytest.mark.parametrize(
    ("asked", "goes"),
    [
        ({"by_anycast": True, "stream": True, "max_tokens": 500}, True),
        ({"by_anycast": True, "stream": True, "max_tokens": None}, True),
        ({"by_anycast": True, "stream": True, "max_tokens": 499}, False),
        ({"by_anycast": True, "stream": False, "max_tokens": 500}, False),
        ({"by_anycast": False, "stream": True, "max_tokens": 500}, False),
    ],
)
def test_long_streams_that_came_by_anycast_go_to_the_entrys_own_name(asked: dict[str, object], goes: bool) -> None:
    machine = flow(RouteConfig(unicast_tokens=500))
    machine.config = replace(machine.config, unicast_url="https://own.example")
    (first, *_) = machine.handle(RequestArrived(replace(request("a"), **asked)), 0.0)
    assert isinstance(first, Redirect) is goes
    if goes:
        assert first == Redirect("a", "https://own.example", outcome.REDIRECTED, own=True)
        assert machine.under_way == 0
