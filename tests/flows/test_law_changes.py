"""A law that changes while requests are held, under way or queued; and answers when no region serves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_struct
from playbook import Expected, answered, held, sent, timer
from worlds import MODEL, instance, law, regional, replica, report_in, request, seen, worldwide

from farhop.balance import outcome
from farhop.balance.machine import (
    AttemptBegan,
    AttemptEnded,
    AttemptFailed,
    AttemptRefused,
    LawChanged,
    Recall,
    RequestArrived,
    Resume,
    TimerFired,
)
from global_lb.fleet.regions import OPENS_MAX_S, OPENS_S
from global_lb.fleet.view import ChannelChanged, RegionForced, RegionKnown, RegionReported
from topology.law import Law
from topology.model import Residency, Rule


def to(epoch: int, **rules: Rule | Residency) -> LawChanged:
    return LawChanged(law(epoch, **rules))


def recalled(request_id: str, attempt: int = 1) -> Expected:
    """What was not sent whole is to be taken back."""
    return Expected(Recall, id=request_id, attempt=attempt)


ALL, TOKYO = frozenset({"london", "frankfurt", "tokyo"}), frozenset({"tokyo"})
EU = Rule(allow=("eu",))
JP = Rule(allow=("JP",))


# -- the global tier


def test_the_next_attempt_must_be_lawful_by_both_laws(play) -> None:
    flow = worldwide()
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "london", lawful=ALL))
        .on(RequestArrived(request("b", tenant="german"))).expect(sent("b", "frankfurt"))
        .on(to(2, anyone=JP, german=Rule(allow=("world",)))).expect(recalled("a"))
        .on(AttemptRefused("a", 1, outcome.QUEUE_FULL)).expect(sent("a", "tokyo", attempt=2, lawful=TOKYO))
        .on(AttemptRefused("b", 1, outcome.QUEUE_FULL)).expect(answered("b", outcome.NO_REGION))  # it came under DE
        .on(RequestArrived(request("c", tenant="german"))).expect(sent("c", "london"))
    )  # fmt: skip


def test_request_recalled_by_a_change_of_law_goes_elsewhere_without_blame(play) -> None:
    flow = worldwide()
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "london"))
        .on(RequestArrived(request("b", tenant="other"))).expect(sent("b", "frankfurt"))
        .on(to(2, anyone=JP)).expect(recalled("a"))
        .on(AttemptFailed("a", 1, outcome.UNLAWFUL_HERE)).expect(sent("a", "tokyo", attempt=2, lawful=TOKYO))
        .on(to(3, anyone=Rule(allow=("atlantis",)))).expect(recalled("a", 2))
        .on(AttemptFailed("a", 2, outcome.UNLAWFUL_HERE)).expect(answered("a", outcome.UNLAWFUL))
        .on(AttemptBegan("b", 1, 200)).expect()
        .on(AttemptEnded("b", 1, 200, None)).expect()
    )  # fmt: skip
    assert all(flow.regions.liveness_of(region).read(0.0).state == "up" for region in ("london", "tokyo"))
    assert len(flow.ledger) == 0


def test_stream_continues_elsewhere_if_the_law_now_forbids_the_chosen_region(play) -> None:
    flow = worldwide()
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "london"))
        .on(AttemptBegan("a", 1, 200)).expect()
        .on(AttemptFailed("a", 1, outcome.DIED_MID_STREAM, resumable=True))
        .expect(timer("a"), Expected(Resume, id="a", target="frankfurt", attempt=2))
        .on(to(2, anyone=Rule(allow=("uk", "JP")))).expect(recalled("a", 2))
        .on(AttemptFailed("a", 2, outcome.UNLAWFUL_HERE))
        .expect(timer("a"), Expected(Resume, id="a", target="tokyo", attempt=3))
    )  # fmt: skip


@pytest.mark.parametrize("event", ["known", "reported", "channel"])
def test_rule_of_a_base_model_applies_once_a_region_reports_the_base(play, event: str) -> None:
    """By reports alone it was learned and bound nothing until the next law: the region refused what had come to it."""
    plain = law().topology
    bound = replace(plain.tenants["anyone"], models={"base": JP})
    flow = worldwide(under=Law(replace(plain, tenants={**plain.tenants, "anyone": bound})))
    adapted = replace_struct(instance("london"), lineage={MODEL: frozenset({"base"})})
    london = seen(adapted).view.regions["london"]
    told = {
        "known": RegionKnown("london", london),
        "reported": RegionReported("london", known=london),
        "channel": ChannelChanged("london", True, london),
    }
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "london"))
        .on(told[event]).expect(recalled("a"))
        .on(RequestArrived(request("b"))).expect(sent("b", "tokyo"))
    )  # fmt: skip


def test_the_law_of_arrival_forbids_by_what_is_learned_of_a_models_base_after_another_law_came(play) -> None:
    """It was judged once, at the arrival, by what was known then (world 7000494 of `farhop bench law`)."""
    plain = law().topology
    bound = replace(plain.tenants["anyone"], models={"base": JP})
    flow = worldwide(under=Law(replace(plain, tenants={**plain.tenants, "anyone": bound})))
    adapted = replace_struct(instance("london"), lineage={MODEL: frozenset({"base"})})
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "london"))
        .on(to(2)).expect()
        .on(RegionReported("london", known=seen(adapted).view.regions["london"])).expect(recalled("a"))
        .on(AttemptFailed("a", 1, outcome.UNLAWFUL_HERE)).expect(sent("a", "tokyo", attempt=2, lawful=TOKYO))
    )  # fmt: skip


def test_an_older_law_changes_nothing(play) -> None:
    flow = worldwide(under=law(5, anyone=JP))
    play(flow).on(to(4)).expect().on(to(5)).expect().on(RequestArrived(request("a"))).expect(sent("a", "tokyo"))
    assert flow.law.epoch == 5


def test_held_request_is_answered_at_once_if_no_region_remains_lawful(play) -> None:
    flow = worldwide(patience_s=30.0, view=seen(instance("london", replicas_ready=0)))
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(held("a"))
        .on(RequestArrived(request("b", tenant="other"))).expect(held("b"))
        .on(to(2, anyone=Rule(allow=("atlantis",)))).expect(answered("a", outcome.UNLAWFUL,
            detail=lambda value: "allows only atlantis" in value))
    )  # fmt: skip


def test_a_held_request_goes_where_both_the_present_law_and_that_of_its_arrival_allow(play) -> None:
    flow = worldwide(patience_s=30.0, under=law(1, anyone=Rule(allow=("eu", "JP"))), view=seen(instance("london")))
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(held("a"))
        .on(to(2)).expect()  # London is lawful now, and was not when it came
        .on(seen(instance("london"), instance("tokyo"))).expect()
        .on(ChannelChanged("tokyo", True)).expect(sent("a", "tokyo"))
    )  # fmt: skip


def test_a_held_request_is_answered_at_once_by_a_rule_on_the_name_that_it_alone_came_by(play) -> None:
    """Others like it, which came by the model's own name, wait on."""
    flow = worldwide(patience_s=30.0, view=seen(instance("london", replicas_ready=0)))
    ruled = law(2)
    tenants = dict(ruled.topology.tenants)
    tenants["anyone"] = replace(tenants["anyone"], models={"nick": Rule(allow=("JP",), deny=("JP",))})
    by_name = LawChanged(Law(replace(ruled.topology, tenants=tenants)))
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(held("a"))
        .on(RequestArrived(request("b", alias="nick"))).expect(held("b"))
        .on(by_name).expect(answered("b", outcome.UNLAWFUL, detail=lambda value: "model nick" in value))
    )  # fmt: skip


def test_a_held_request_of_a_removed_key_is_answered_unlawful(play) -> None:
    flow = worldwide(patience_s=30.0, view=seen(instance("london", replicas_ready=0)))
    keyless = law(2)
    tenants = dict(keyless.topology.tenants)
    del tenants["anyone"]
    gone = LawChanged(Law(replace(keyless.topology, tenants=tenants)))
    play(flow).on(RequestArrived(request("a", key="front"))).expect(held("a")).on(gone).expect(
        answered("a", outcome.UNLAWFUL)
    )


def test_begun_answer_finishes_after_a_change_of_law_unless_its_request_was_not_fully_sent(play) -> None:
    flow = worldwide()
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "london"))
        .on(AttemptBegan("a", 1, 200)).expect()
        .on(RequestArrived(request("b"))).expect(sent("b", "london"))
        .on(AttemptBegan("b", 1, 200)).expect()
        .on(to(2, anyone=JP)).expect(recalled("a"), recalled("b"))
        .on(AttemptEnded("a", 1, 200, None)).expect()
        .on(AttemptFailed("b", 1, outcome.UNLAWFUL_HERE)).expect(answered("b", outcome.UNLAWFUL_HERE))
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"other": JP}, False),  # its nodes are indistinguishable from those of others
        ({"anyone": Residency(Rule(allow=("world",)), hints=JP)}, False),
        ({"anyone": Residency(EU, hints=Rule(allow=("uk",)))}, True),
        ({"newcomer": EU}, True),
        ({"german": Rule(allow=("world",))}, True),
    ],
)
def test_prefix_hints_are_dropped_when_the_law_forbids_them(play, change, kept) -> None:
    flow = worldwide()
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "london"))
        .on(AttemptBegan("a", 1, 200)).expect()
        .on(AttemptEnded("a", 1, 200, None)).expect()
        .on(to(2, **change)).expect()
    )  # fmt: skip
    assert bool(flow.regions.trie.match(request("a").chain)) is kept


def test_answer_is_unlawful_if_every_region_refuses_by_law(play) -> None:
    """The regions know of an epoch that this balancer does not."""
    flow = worldwide(patience_s=30.0, view=seen(instance("london"), instance("tokyo")))
    (
        play(flow)
        .on(RequestArrived(request("a", narrow=(("uk", "JP"),)))).expect(sent("a", "london"))
        .on(AttemptRefused("a", 1, outcome.UNLAWFUL_HERE)).expect(sent("a", "tokyo", attempt=2))
        .on(AttemptRefused("a", 2, outcome.UNLAWFUL_HERE)).expect(answered("a", outcome.UNLAWFUL, retry_after_s=None))
    )  # fmt: skip


# -- how long


def test_retry_after_is_a_full_regions_expected_wait(play) -> None:
    flow = worldwide(view=seen(instance("london"), instance("tokyo")))
    (
        play(flow)
        .on(RequestArrived(request("a", narrow=(("uk", "JP"),)))).expect(sent("a", "london"))
        .on(AttemptRefused("a", 1, outcome.QUEUE_FULL, 9_000.0)).expect(sent("a", "tokyo", attempt=2))
        .on(AttemptRefused("a", 2, outcome.QUEUE_FULL, 7_500.0)).expect(
            answered("a", outcome.NO_REGION, retry_after_s=7.5))
    )  # fmt: skip


@pytest.mark.parametrize(("left_s", "says_s"), [(40.0, 40.0), (0.3, 1.0), (7 * 86_400.0, OPENS_MAX_S)])
def test_retry_after_a_drain_is_its_end(play, left_s: float, says_s: float) -> None:
    flow = worldwide()
    (
        play(flow)
        .on(RegionForced("frankfurt", True, "racks", left_s)).expect()
        .on(RequestArrived(request("a", tenant="german"))).expect(
            answered("a", outcome.NO_REGION, retry_after_s=pytest.approx(says_s)))
    )  # fmt: skip


def test_a_request_is_held_while_a_lawful_region_is_only_silent(play) -> None:
    flow = worldwide(patience_s=3.0, view=seen(instance("london")))
    report_in(flow, ["london"], 0.0)
    (
        play(flow)
        .on(RequestArrived(request("a", tenant="german"))).expect(held("a", until=3.0))
        .at(3.0).on(TimerFired("a")).expect(answered("a", outcome.NO_REGION, retry_after_s=OPENS_S))
    )  # fmt: skip


# -- the regional tier


def test_region_refuses_by_its_own_law_despite_a_valid_token(play) -> None:
    flow = regional(replica("r1"))
    token = {"lawful": frozenset({"london", "tokyo"}), "issuer": "tokyo/g1"}
    (
        play(flow)
        .on(RequestArrived(request("a", **token))).expect(sent("a", "r1"))
        .on(to(2, anyone=JP)).expect(recalled("a"))
        .on(RequestArrived(request("b", **token))).expect(
            answered("b", outcome.UNLAWFUL_HERE, detail=lambda value: "allows only JP" in value))
        .on(AttemptFailed("a", 1, outcome.CONNECT_FAILED)).expect(answered("a", outcome.UNLAWFUL_HERE))
    )  # fmt: skip
    assert outcome.UNLAWFUL_HERE.retryable


def test_a_queued_request_that_becomes_unlawful_is_answered_at_once(play) -> None:
    flow = regional(replica("r1", slots=1))
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "r1"))
        .on(RequestArrived(request("b"))).expect(held("b"))
        .on(RequestArrived(request("c", tenant="other"))).expect(held("c"))
        .on(to(2, anyone=EU)).expect(answered("b", outcome.UNLAWFUL_HERE), recalled("a"))
        .on(to(1)).expect()
        .on(AttemptEnded("a", 1, 200, None)).expect(sent("c", "r1"))
    )  # fmt: skip


def test_request_not_fully_sent_is_recalled_when_the_law_forbids_it(play) -> None:
    flow = regional(replica("r1"))
    book = play(flow).on(RequestArrived(request("a"))).expect(sent("a", "r1"))
    book.on(to(2, anyone=EU)).expect(recalled("a"))
    book.on(AttemptFailed("a", 1, outcome.UNLAWFUL_HERE)).expect(
        answered("a", outcome.UNLAWFUL_HERE, detail=lambda value: "allows only eu" in value)
    )
    assert (len(flow.replicas.ledger), flow.replicas.health_tracker.read("r1", 0.0).state) == (0, "up")


def test_what_an_engine_answers_before_it_has_all_of_it_is_taken_back_too(play) -> None:
    flow = regional(replica("r1"))
    book = play(flow).on(RequestArrived(request("a"))).expect(sent("a", "r1")).on(AttemptBegan("a", 1, 200)).expect()
    book.on(to(2, anyone=EU)).expect(recalled("a"))
    book.on(AttemptFailed("a", 1, outcome.UNLAWFUL_HERE)).expect(
        answered("a", outcome.UNLAWFUL_HERE, detail=lambda value: "another law" in value)
    )
    assert (len(flow.replicas.ledger), flow.replicas.health_tracker.read("r1", 0.0).state) == (0, "up")


def test_a_token_may_name_regions_that_this_map_lacks(play) -> None:
    """The sender knows another topology: what is unknown here takes nothing away and adds nothing."""
    flow = regional(replica("r1"))
    (
        play(flow)
        .on(RequestArrived(request("a", lawful=frozenset({"london", "atlantis"})))).expect(sent("a", "r1"))
        .on(RequestArrived(request("b", lawful=frozenset({"atlantis"})))).expect(answered("b", outcome.UNLAWFUL_HERE))
    )  # fmt: skip


@pytest.mark.parametrize("tenant", ["stateless", "nobody"])
def test_a_tenant_without_a_policy_is_never_served(play, tenant: str) -> None:
    why = f"tenant {tenant} {'has no residency policy' if tenant == 'stateless' else 'is not in the topology'}"
    lawful = frozenset({"london"})
    play(worldwide(patience_s=9.0)).on(RequestArrived(request("a", tenant=tenant))).expect(
        answered("a", outcome.UNLAWFUL, detail=lambda message: why in message)
    )
    play(regional(replica("r1"))).on(RequestArrived(request("a", tenant=tenant, lawful=lawful))).expect(
        answered("a", outcome.UNLAWFUL_HERE, detail=lambda message: why in message)
    )


def test_a_keys_own_places_bind_the_region_too(play) -> None:
    flow = regional(replica("r1"), under=law())
    play(flow).on(RequestArrived(request("a", key="gone"))).expect(
        answered("a", outcome.UNLAWFUL_HERE, detail=lambda value: "has no key gone" in value)
    )
