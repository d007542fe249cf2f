"""A request whose alias has several models, at a region's own port: another model instead of a refusal."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from worlds import law, regional, replica, request

from farhop.balance import machine, outcome
from farhop.balance.machine import (
    Answer,
    AttemptBegan,
    AttemptEnded,
    AttemptFailed,
    AttemptRefused,
    FallBack,
    Forward,
    Hold,
    Request,
    RequestArrived,
    SetTimer,
    TimerFired,
    Tokens,
)
from regional_lb.fleet.view import ReplicaProbed
from regional_lb.scheduler.flow import RegionalFlow
from regional_lb.scheduler.refusals import OrderedRefusal, RefusalsChanged
from topology.law import Law
from topology.model import Rule

BIG, SMALL, TINY = "big", "small", "tiny"


def fleet(slots: dict[str, int], **config: Any) -> RegionalFlow:
    """One replica for each model, with so many slots."""
    return regional(*(replica(of, models=frozenset({of}), slots=most) for of, most in slots.items()), **config)


def auto(request_id: str, *models: str, **more: Any) -> Request:
    """A request for the first of the models, which its name stands for with the others."""
    return request(request_id, model=models[0], alias="auto", fallbacks=models[1:], **more)


def fallen(commands: list[machine.Command]) -> FallBack:
    (command,) = (one for one in commands if not isinstance(one, SetTimer))
    assert isinstance(command, FallBack)
    return command


def sent_to(commands: list[machine.Command]) -> str:
    forward = commands[-1]
    assert isinstance(forward, Forward)
    return forward.target


def test_a_full_queue_is_passed_over_for_a_model_with_room() -> None:
    flow = fleet({BIG: 1, SMALL: 1}, queue_requests_max=1)
    assert sent_to(flow.handle(RequestArrived(request("a", model=BIG)), 0.0)) == BIG
    assert isinstance(flow.handle(RequestArrived(request("b", model=BIG)), 0.0)[0], Hold)
    of_big = Tokens(bytes(12))
    instead = fallen(flow.handle(RequestArrived(auto("c", BIG, SMALL, tokens=of_big)), 0.0))
    assert (instead.request.model, instead.request.alias, instead.request.fallbacks) == (SMALL, "auto", ())
    assert (instead.request.alias_why, instead.request.chain, instead.request.tokens) == ("big: queue_full", (), None)
    assert flow.under_way == 2
    assert sent_to(flow.handle(RequestArrived(instead.request), 0.0)) == SMALL


def test_the_first_with_room_goes_before_the_first_that_is_served() -> None:
    flow = fleet({BIG: 1, SMALL: 1, TINY: 1}, queue_requests_max=1)
    for name, model in (("a", BIG), ("b", BIG), ("c", SMALL)):
        flow.handle(RequestArrived(request(name, model=model)), 0.0)
    assert fallen(flow.handle(RequestArrived(auto("d", BIG, SMALL, TINY)), 0.0)).request.model == TINY
    flow.handle(RequestArrived(request("e", model=TINY)), 0.0)
    instead = fallen(flow.handle(RequestArrived(auto("f", BIG, "absent", SMALL, TINY)), 0.0)).request
    assert (instead.model, instead.fallbacks) == (SMALL, ("absent", TINY))


def test_requests_that_waited_too_long_or_lost_their_replica_fall_back_to_another_model() -> None:
    flow = fleet({BIG: 1, SMALL: 1}, queue_wait_s=2.0)
    flow.handle(RequestArrived(request("a", model=BIG)), 0.0)
    commands = flow.handle(RequestArrived(auto("b", BIG, SMALL)), 0.0)
    due = next(one.at for one in commands if isinstance(one, SetTimer))
    instead = None
    while instead is None and due < 10.0:
        commands = flow.handle(TimerFired("b"), due)
        instead = next((one for one in commands if isinstance(one, FallBack)), None)
        due = next((one.at for one in commands if isinstance(one, SetTimer)), due + 1.0)
    assert instead is not None
    assert instead.request.alias_why == "big: queue_timeout"

    flow = fleet({BIG: 1, SMALL: 1})
    flow.handle(RequestArrived(auto("a", BIG, SMALL)), 0.0)
    commands = flow.handle(AttemptFailed("a", 1, outcome.CONNECT_FAILED), 0.1)
    while isinstance(commands[-1], Forward):  # the same replica again, within the retry rules
        commands = flow.handle(AttemptFailed("a", commands[-1].attempt, outcome.CONNECT_FAILED), 0.1)
    if not any(isinstance(one, FallBack) for one in commands):  # it waits for that replica: it is out
        commands = flow.handle(ReplicaProbed(BIG, False), 0.2) or flow.handle(TimerFired("a"), 30.0)
    instead = fallen(commands)
    assert (instead.request.model, instead.request.attempted) == (SMALL, 1)
    forward = flow.handle(RequestArrived(instead.request), 30.0)[-1]
    assert isinstance(forward, Forward)
    assert forward.attempt == 2  # no number twice under one decision


def test_model_refused_by_the_operator_falls_back_to_another() -> None:
    flow = fleet({BIG: 1, SMALL: 1})
    flow.handle(RefusalsChanged({BIG: OrderedRefusal(1.0, 100.0, "a drill", "ann")}), 0.0)
    assert fallen(flow.handle(RequestArrived(auto("a", BIG, SMALL)), 1.0)).request.model == SMALL
    (answer,) = flow.handle(RequestArrived(request("b", model=BIG)), 1.0)
    assert isinstance(answer, Answer)


def test_path_refusal_does_not_fall_back_to_another_model() -> None:
    flow = fleet({BIG: 1, SMALL: 1})
    flow.handle(RequestArrived(auto("a", BIG, SMALL)), 0.0)
    (answer,) = flow.handle(AttemptRefused("a", 1, outcome.PATH_UNSUPPORTED), 0.1)
    assert isinstance(answer, Answer)
    assert answer.outcome is outcome.PATH_UNSUPPORTED


def test_fallback_never_circumvents_the_law() -> None:
    flow = fleet({BIG: 1, SMALL: 1}, queue_requests_max=1)
    (answer,) = flow.handle(RequestArrived(auto("a", BIG, SMALL, lawful=frozenset({"tokyo"}))), 0.0)
    assert isinstance(answer, Answer)
    narrower = replace(law().topology, epoch=9, models={SMALL: Rule(allow=("jp",))})
    flow.handle(machine.LawChanged(Law(narrower)), 0.0)
    flow.handle(RequestArrived(request("b", model=BIG)), 0.0)
    flow.handle(RequestArrived(request("c", model=BIG)), 0.0)
    (answer,) = flow.handle(RequestArrived(auto("d", BIG, SMALL)), 0.0)
    assert isinstance(answer, Answer)
    assert answer.outcome is outcome.QUEUE_FULL


@given(st.integers(0, 2**32 - 1))
def test_each_fallback_model_is_tried_and_concluded_at_most_once(seed: int) -> None:
    rng = Random(seed)
    models = (BIG, SMALL, TINY)
    flow = fleet({of: rng.choice((1, 2)) for of in models}, queue_requests_max=2, queue_wait_s=1.0)
    open_: dict[str, tuple[Request, int, bool]] = {}  # the running request, its attempt and whether that began
    asked: dict[str, list[str]] = {}
    now, over = 0.0, 0

    def carried_out(commands: list[machine.Command]) -> None:
        nonlocal over
        for one in commands:
            if isinstance(one, Forward):
                open_[one.id] = (open_[one.id][0], one.attempt, False)
                assert one.target == open_[one.id][0].model
            elif isinstance(one, Answer):
                del open_[one.id]
                over += 1
            elif isinstance(one, FallBack):
                assert not open_[one.id][2], "nothing of an answer was there"
                assert one.request.model not in asked[one.id]
                asked[one.id].append(one.request.model)
                open_[one.id] = (one.request, 0, False)
                carried_out(flow.handle(RequestArrived(one.request), now))

    for n in range(40):
        now += rng.expovariate(4.0)
        mine = list(rng.sample(models, rng.randint(1, 3)))
        name = str(n)
        asked[name] = mine[:1]
        open_[name] = (auto(name, *mine), 0, False)
        carried_out(flow.handle(RequestArrived(open_[name][0]), now))
        for other, (_, attempt, began) in list(open_.items()):
            if other not in open_ or open_[other][1] != attempt or not attempt or rng.random() < 0.5:
                continue
            if began:
                del open_[other]
                carried_out(flow.handle(AttemptEnded(other, attempt, 200, None), now))
            elif rng.random() < 0.4:
                reason = rng.choice((outcome.CONNECT_FAILED, outcome.FIRST_BYTE_TIMEOUT))
                carried_out(flow.handle(AttemptFailed(other, attempt, reason), now))
            else:
                open_[other] = (open_[other][0], attempt, True)
                carried_out(flow.handle(AttemptBegan(other, attempt, 200), now))
        for other in list(open_):
            if other in open_ and not open_[other][1]:
                carried_out(flow.handle(TimerFired(other), now))
        assert flow.under_way == len(open_)
    assert len(flow.replicas.ledger) <= len(open_)
