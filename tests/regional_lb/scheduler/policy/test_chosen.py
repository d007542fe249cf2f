"""What every policy must do, whichever it is: one suite over all of them. And which of them decides for a model."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from worlds import MODEL, regional, replica, replicas_of, request

from farhop.balance.ledger import Reservation
from farhop.balance.machine import AttemptBegan, AttemptEnded, Forward, RequestArrived, Usage
from regional_lb.scheduler.pick import REMEMBERED_MAX, pick
from regional_lb.scheduler.policy import KNOWN, OPTIONS, Need, Policies, PoliciesChanged, PolicyConfig, made

NAMES = sorted(KNOWN)
STICKY = {"prefix", "session", "consistent-hash"}
SIZES = (1, 2, 16, 1000)


def need(n: int = 0) -> Need:
    """Request number n: its own prompt, session and tenant."""
    return Need(256.0, 100.0, 4.0, chain=(n + 1, n + 2), session=n + 1, tenant=f"t{n}")


def ready(name: str, known):
    policy = made(PolicyConfig(name=name))
    policy.adopt(known.whole.of.names)
    return policy


def place(policy, known, asked: Need, rng: Random, now: float = 1.0):
    """Pick, send, answer: what the machine does of it."""
    choice = pick(asked, known.whole, (), policy, now, rng)
    if choice.chosen is not None:
        policy.placed(choice.chosen.replica, "", known.whole)
        policy.answered(choice.chosen.replica, 50.0, now)
    return choice


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", SIZES)
def test_every_policy_works_with_any_number_of_replicas_and_names_its_choice(name: str, size: int) -> None:
    known = replicas_of(*(replica(f"r{i}") for i in range(size)))
    policy, rng = ready(name, known), Random(1)
    for n in range(20):
        choice = place(policy, known, need(n), rng)
        assert choice.chosen is not None
        assert choice.policy.name == name
        assert len(choice.ranked) in (min(size, REMEMBERED_MAX), REMEMBERED_MAX + 1)
        assert choice.chosen.replica in {one.replica for one in choice.ranked}
        remembered = {one.replica: one for one in choice.ranked}[choice.chosen.replica]
        assert remembered == choice.chosen, "what is remembered in bytes is what was scored"


@pytest.mark.parametrize("name", NAMES)
@given(busy=st.lists(st.booleans(), min_size=1, max_size=20), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_a_replica_with_room_is_picked_and_none_without(name: str, busy: list[bool], seed: int) -> None:
    reserved = [Reservation(f"r{i}", 0, 10) for i, full in enumerate(busy) if full for _ in range(2)]
    known = replicas_of(*(replica(f"r{i}") for i in range(len(busy))), reserved=reserved)
    policy, rng = ready(name, known), Random(seed)
    for n in range(10):
        choice = place(policy, known, need(n), rng)
        if all(busy):
            assert choice.chosen is None
        else:
            assert choice.chosen is not None
            assert not busy[int(choice.chosen.replica[1:])]


@pytest.mark.parametrize("name", NAMES)
def test_only_replicas_in_the_given_table_are_picked(name: str) -> None:
    known = replicas_of(*(replica(f"r{i}") for i in range(8)))
    policy, rng = ready(name, known), Random(3)
    some = known.whole.of.without(("r0", "r3", "r7"))
    picked = {pick(need(n), known.table(some), (), policy, 1.0, rng).chosen.replica for n in range(100)}
    assert picked <= set(some.names)


@pytest.mark.parametrize("name", NAMES)
def test_one_seed_gives_one_sequence(name: str) -> None:
    def sequence() -> list[str]:
        known = replicas_of(*(replica(f"r{i}", tpot_ms=10.0 + i) for i in range(7)))
        policy, rng = ready(name, known), Random(5)
        return [place(policy, known, need(n % 9), rng, 1.0 + n).chosen.replica for n in range(60)]

    assert sequence() == sequence()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in STICKY])
def test_every_healthy_replica_is_picked_sometimes(name: str) -> None:
    known = replicas_of(*(replica(f"r{i}", slots=100) for i in range(8)))
    policy, rng = ready(name, known), Random(2)
    picked = {place(policy, known, need(), rng, 1.0 + n).chosen.replica for n in range(400)}
    assert picked == set(known.whole.of.names)


@pytest.mark.parametrize("name", sorted(STICKY))
def test_sticky_policies_keep_equal_requests_together_and_spread_different_ones(name: str) -> None:
    known = replicas_of(*(replica(f"r{i}") for i in range(8)))
    policy, rng = ready(name, known), Random(2)
    homes = [{place(policy, known, need(n), rng).chosen.replica for _ in range(5)} for n in range(200)]
    assert all(len(home) == 1 for home in homes)
    assert set.union(*homes) == set(known.whole.of.names)


@pytest.mark.parametrize("name", NAMES)
def test_a_pick_without_placing_changes_no_state_of_a_policy(name: str) -> None:
    known = replicas_of(*(replica(f"r{i}") for i in range(5)))
    asked, left_alone = ready(name, known), ready(name, known)
    before = known.whole.block.copy()
    for n in range(50):
        pick(need(n), known.whole, (), asked, 1.0, Random(n))
    assert (known.whole.block == before).all()
    one, two = Random(4), Random(4)
    for n in range(30):
        there, here = (place(policy, known, need(n), rng) for policy, rng in ((asked, one), (left_alone, two)))
        assert there.chosen == here.chosen


@pytest.mark.parametrize("name", NAMES)
def test_replicas_may_come_and_go(name: str) -> None:
    policy, rng = made(PolicyConfig(name=name)), Random(6)
    for names in (("a", "b", "c"), ("b", "c"), ("b", "c", "d", "e", "f"), ("f",)):
        known = replicas_of(*(replica(one) for one in names))
        policy.adopt(names)
        assert {place(policy, known, need(n), rng).chosen.replica for n in range(80)} <= set(names)
        policy.answered("gone", 10.0, 2.0)


@pytest.mark.parametrize("name", NAMES)
def test_the_machine_serves_with_it(name: str) -> None:
    flow = regional(*(replica(f"r{i}") for i in range(3)))
    flow.handle(PoliciesChanged({"": PolicyConfig(name=name)}), 1.0)
    for n in range(12):
        commands = flow.handle(RequestArrived(request(f"q{n}", session=n)), 1.0 + n)
        forward = next(c for c in commands if isinstance(c, Forward))
        assert forward.reasons.policy.name == name
        chosen = forward.reasons.chosen  # a prediction in ms, whatever the score is
        assert forward.promised_ttft_ms == pytest.approx(chosen.uncached_tokens * chosen.prefill_ms_per_token)
        flow.handle(AttemptBegan(f"q{n}", 1, 200), 1.1 + n)
        flow.handle(AttemptEnded(f"q{n}", 1, 200, Usage(256, 10)), 1.2 + n)
    assert flow.under_way == 0


def test_a_model_may_have_its_own_policy_and_change_it_without_a_restart() -> None:
    policies = Policies({"": PolicyConfig(name="random"), "big": PolicyConfig(name="session")})
    policies.adopt(("r0", "r1"))
    assert policies.status() == {"": "random", "big": "session"}
    assert (policies.of("big").name, policies.of("other").name, policies.wants_session) == ("session", "random", True)
    policies.override({"": PolicyConfig(name="round-robin"), "big": PolicyConfig(name="prefix", load_factor=2.0)})
    assert policies.status() == {"": "round-robin", "big": "prefix"}
    assert not policies.wants_session
    known = replicas_of(replica("r0"), replica("r1"))
    for model in ("big", "other"):  # they know the requests that came while they were not in force
        assert pick(need(), known.whole, (), policies.of(model), 1.0, Random(1)).chosen is not None
    policies.override({})
    assert policies.status() == {"": "random", "big": "session"}
    assert Policies().status() == {"": "predictive"}


def test_an_unchanged_policy_keeps_its_state() -> None:
    policies = Policies({"": PolicyConfig(name="round-robin")})
    before = policies.of("any")
    policies.override({"big": PolicyConfig(name="p2c")})
    assert policies.of("any") is before
    policies.override({"": PolicyConfig(name="round-robin")})
    assert policies.of("any") is before
    assert policies.status() == {"": "round-robin"}


def test_a_failed_answer_is_no_latency() -> None:
    flow = regional(replica("r1"))
    flow.policies.override({MODEL: PolicyConfig(name="least-latency")})
    seen: list[str] = []
    flow.policies.of(MODEL).answered = lambda name, elapsed_ms, now: seen.append(name)  # type: ignore[method-assign]
    for n, status in enumerate((503, 200)):
        flow.handle(RequestArrived(request(f"q{n}")), 1.0)
        flow.handle(AttemptBegan(f"q{n}", 1, status), 1.1)
        flow.handle(AttemptEnded(f"q{n}", 1, status, None), 1.2)
    assert seen == ["r1"]


# -- as they are written


@pytest.mark.parametrize("name", KNOWN)
def test_a_name_is_enough(name: str) -> None:
    assert PolicyConfig.model_validate(name).name == name


def test_an_option_of_another_policy_is_refused_with_what_it_takes() -> None:
    with pytest.raises(ValidationError, match=r"no option 'weights' of policy prefix; its options: load_factor"):
        PolicyConfig.model_validate({"name": "prefix", "weights": {"a": 1}})
    assert set(OPTIONS) <= set(KNOWN)
