from __future__ import annotations

from collections.abc import Sequence

from farhop.balance import machine, outcome
from farhop.balance.machine import Answer, Command, Forward, Hold, Request, SetTimer, Tokens, Usage
from farhop_lab.sim.baselines import router as routers
from farhop_lab.sim.baselines.router import (
    BalancerSeen,
    EnginesSeen,
    Router,
    RouterState,
    Sample,
    Target,
    WireMeasured,
    forwarded,
    key_of,
    text_of,
)
from farhop_lab.sim.baselines.rules import LeastLoad


class Free:
    """Whom it may ask: engines where nothing waited."""

    def candidates(self, request: Request, state: RouterState, now: float) -> Sequence[str]:
        return [name for name in state.serving(state.engines) if state.pending(name) == 0]


def make(pause_s: float = 0.0, smoothing: float = 1.0) -> Router:
    state = RouterState(
        "us", [Target("us/0", "us"), Target("us/1", "us"), Target("eu", "eu", balancer=True)], {"eu": 90.0}
    )
    return Router(state, Free(), LeastLoad(), pause_s=pause_s, smoothing=smoothing)


def ask(name: str, deadline: float = 100.0, lawful: frozenset[str] | None = None) -> Request:
    return Request(name, "t", "m", 400, 600, (), deadline, tokens=Tokens(b"x" * 400), lawful=lawful)


def arrive(
    made: Router, name: str, now: float = 0.0, deadline: float = 100.0, lawful: frozenset[str] | None = None
) -> list[str]:
    return words(made.handle(machine.RequestArrived(ask(name, deadline, lawful)), now))


def words(commands: list[Command]) -> list[str]:
    seen = []
    for command in commands:
        if isinstance(command, Forward):
            seen.append(f"{command.id} > {command.target} #{command.attempt}")
        elif isinstance(command, Answer):
            seen.append(f"{command.id} {command.outcome.reason}")
        elif isinstance(command, SetTimer):
            seen.append(f"{command.id} at {command.at:g}")
        else:
            assert isinstance(command, Hold)
            seen.append(f"{command.id} holds")
    return seen


def waits(made: Router, first: int, second: int, now: float = 0.0) -> list[str]:
    samples = {"us/0": Sample(first, 1, 0.1), "us/1": Sample(second, 1, 0.1)}
    return words(made.handle(EnginesSeen("us", samples), now))


def test_eligible_request_goes_at_once_to_the_picked_replica() -> None:
    made = make()
    assert arrive(made, "a") == ["a at 100", "a at 100", "a > us/0 #1"]
    assert arrive(made, "b") == ["b at 100", "b at 100", "b > us/1 #1"]
    assert made.handle(machine.AttemptBegan("a", 1, 200), 1.0) == []
    assert made.state.running_tokens["us/0"] == 100
    assert made.handle(machine.AttemptEnded("a", 1, 200, Usage(100, 5)), 2.0) == []
    assert made.state.in_flight == {"us/0": 0, "us/1": 1, "eu": 0}


def test_head_of_line_blocks_the_queue_until_a_probe() -> None:
    made = make()
    assert waits(made, 1, 1) == []
    assert arrive(made, "a") == ["a at 100", "a holds"]
    assert arrive(made, "b") == ["b at 100", "b holds"]
    assert made.state.queued == 2
    assert waits(made, 1, 0, 3.0) == ["a at 100", "a > us/1 #1", "b at 100", "b > us/1 #1"]
    assert made.state.queued == 0


def test_requests_leave_the_queue_one_pause_apart() -> None:
    made = make(pause_s=0.01)
    assert arrive(made, "a", 5.0)[-1] == "a > us/0 #1"
    assert arrive(made, "b", 5.004) == ["b at 100", "b at 5.01", "b holds"]
    assert arrive(made, "c", 5.005) == ["c at 100", "b at 5.01", "c holds"]
    fired = words(made.handle(machine.TimerFired("b"), 5.0101))
    assert fired == ["b at 100", "b at 100", "b > us/1 #1", "c at 5.0201"]


def test_an_early_timer_of_the_head_does_not_take_its_deadline() -> None:
    made = make(pause_s=0.01)
    arrive(made, "a", 5.0)
    arrive(made, "b", 5.0)
    waits(made, 1, 1, 5.005)
    assert words(made.handle(machine.TimerFired("b"), 5.02)) == ["b at 100"]
    assert words(made.handle(machine.TimerFired("b"), 100.1)) == ["b queue_timeout"]


def test_a_deadline_ends_what_has_not_begun_and_nothing_else() -> None:
    made = make()
    arrive(made, "a", deadline=10.0)
    arrive(made, "b", deadline=10.0)
    made.handle(machine.AttemptBegan("b", 1, 200), 9.0)
    assert words(made.handle(machine.TimerFired("a"), 10.0)) == ["a deadline_exceeded"]
    assert made.handle(machine.TimerFired("b"), 10.0) == []
    assert made.state.in_flight == {"us/0": 0, "us/1": 1, "eu": 0}


def test_a_baseline_router_never_retries() -> None:
    made = make()
    arrive(made, "a")
    arrive(made, "b")
    assert words(made.handle(machine.AttemptFailed("a", 1, outcome.CONNECT_FAILED), 1.0)) == ["a connect_failed"]
    assert words(made.handle(machine.AttemptRefused("b", 1, outcome.QUEUE_FULL), 1.0)) == ["b queue_full"]
    assert made.state.in_flight.total() == 0


def test_a_client_that_leaves_at_the_head_makes_way() -> None:
    made = make()
    waits(made, 1, 1)
    arrive(made, "a")
    arrive(made, "b")
    assert made.handle(machine.ClientLeft("a"), 1.0) == []
    assert waits(made, 0, 1, 2.0) == ["b at 100", "b > us/0 #1"]
    assert made.handle(machine.ClientLeft("b"), 3.0) == []
    assert made.state.in_flight.total() == 0
    assert made.handle(machine.TimerFired("b"), 100.0) == []


def test_router_refuses_if_its_queue_is_full() -> None:
    made = make()
    waits(made, 1, 1)
    bound, routers.QUEUE_MAX = routers.QUEUE_MAX, 1
    try:
        arrive(made, "a")
        assert arrive(made, "b") == ["b queue_full"]
    finally:
        routers.QUEUE_MAX = bound


def test_pings_are_smoothed_and_peers_are_measured() -> None:
    made = make(smoothing=0.3)
    made.handle(WireMeasured("eu", 190.0), 0.0)
    assert made.state.rtt_ms["eu"] == 0.7 * 90.0 + 0.3 * 190.0
    made.handle(BalancerSeen("eu", 3, True), 0.0)
    assert made.state.balancers["eu"].queued == 3


def asked(name: str, text: bytes = b"", session: int = 0, issuer: str = "") -> Request:
    return Request(name, "t", "m", len(text), len(text), (), 100.0, session=session, issuer=issuer, tokens=Tokens(text))


def router_state() -> RouterState:
    targets = [Target("us/0", "us"), Target("us/1", "us"), Target("eu/0", "eu"), Target("asia", "asia", balancer=True)]
    return RouterState("us", targets, {"us": 1.0, "eu": 91.0, "asia": 166.0})


def test_targets_are_distinguished_by_place_and_kind() -> None:
    seen = router_state()
    assert (seen.engines, seen.local, seen.peers) == (["us/0", "us/1", "eu/0"], ["us/0", "us/1"], ["asia"])
    assert seen.by_region == {"us": ["us/0", "us/1"], "eu": ["eu/0"]}


def test_a_request_is_queued_then_running_then_forgotten_once() -> None:
    seen = router_state()
    seen.sent(asked("r1", b"x" * 401), "eu/0")
    assert (seen.in_flight["eu/0"], seen.queued_tokens["eu/0"], seen.running_tokens["eu/0"]) == (1, 101, 0)
    assert not seen.begun("r1")
    seen.began("r1")
    seen.began("r1")
    assert (seen.in_flight["eu/0"], seen.queued_tokens["eu/0"], seen.running_tokens["eu/0"]) == (1, 0, 101)
    assert seen.begun("r1")
    assert seen.over("r1")
    assert not seen.over("r1")
    assert (seen.in_flight["eu/0"], seen.queued_tokens["eu/0"], seen.running_tokens["eu/0"]) == (0, 0, 0)


def test_an_engine_that_is_down_gets_no_requests_until_it_answers_again() -> None:
    seen = router_state()
    assert seen.pending("us/0") == 0
    seen.on_engines(EnginesSeen("us", {"us/0": Sample(3, 1, 0.5), "us/1": Sample(0, 0, 0.0)}), 5.0)
    assert (seen.pending("us/0"), seen.seen["us/0"]) == (3, (Sample(3, 1, 0.5), 5.0))
    seen.on_engines(EnginesSeen("us", None), 6.0)
    seen.on_balancer(BalancerSeen("asia", 0, False, up=False))
    assert seen.serving([*seen.engines, *seen.peers]) == ["eu/0"]
    seen.on_engines(EnginesSeen("us", {"us/0": Sample(0, 0, 0.0), "us/1": Sample(0, 0, 0.0)}), 7.0)
    seen.on_balancer(BalancerSeen("asia", 0, True))
    assert seen.serving([*seen.engines, *seen.peers]) == ["us/0", "us/1", "eu/0", "asia"]


def test_a_key_is_the_session_or_else_the_first_characters() -> None:
    first, second = asked("a", b"p" * 100 + b"one"), asked("b", b"p" * 100 + b"two")
    assert key_of(first) == key_of(second) != key_of(asked("c", b"q" * 100 + b"one"))
    assert key_of(asked("d", b"whatever", session=7)) == 7


def test_a_router_reads_the_text_and_knows_forwarded_requests() -> None:
    assert text_of(asked("a", b"hello")) == b"hello"
    assert not forwarded(asked("a"))
    assert forwarded(asked("a", issuer="eu"))


def test_one_that_only_its_region_may_compute_waits_for_room_there_and_holds_up_nobody_else() -> None:
    state = RouterState("us", [Target("us/0", "us"), Target("eu/0", "eu")], {"eu": 90.0})
    made = Router(state, Free(), LeastLoad())
    made.handle(EnginesSeen("eu", {"eu/0": Sample(1, 1, 0.5)}), 0.0)
    eu, both = frozenset({"eu"}), frozenset({"us", "eu"})
    assert arrive(made, "a", lawful=eu) == ["a at 100", "a holds"]
    assert arrive(made, "b", lawful=both) == ["b at 100", "b at 100", "b > us/0 #1"]
    assert (state.queued, state.in_flight["us/0"]) == (1, 1)
    freed = words(made.handle(EnginesSeen("eu", {"eu/0": Sample(0, 1, 0.5)}), 1.0))
    assert freed == ["a at 100", "a > eu/0 #1"]
    assert (state.queued, state.in_flight["eu/0"]) == (0, 1)
