"""Which requests get a kept answer, follow or lead: never another tenant's answer, never against the present law."""

from __future__ import annotations

from dataclasses import replace as with_
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from farhop.balance.machine import Request, Usage
from global_lb.routing.answer_cache import Alone, AnswerCache, Follow, Hit, Lead, StoredAnswer
from global_lb.routing.policy import RouteConfig
from topology import load
from topology.law import Law
from topology.model import Residency, Rule, Tenant

KEYS = (b"k1", b"k2")
KEEPS, SHARES = RouteConfig(keep_answers_s=60.0), RouteConfig(coalesce=True)
BOTH = RouteConfig(keep_answers_s=60.0, coalesce=True)


LAW = Law(load.parse(load.shipped("three-regions").read_text(), "test"))
NAMES = sorted(LAW.topology.tenants)
REGIONS = sorted(LAW.topology.regions)


def request(tenant: str = "anywhere", **more: Any) -> Request:
    return Request("1", tenant, "m", 100, 200, (), **({"deadline": 600.0} | more))


def kept(region: str = "virginia", made_at: float = 0.0, size: int = 10) -> StoredAnswer:
    return StoredAnswer(False, b"", (b"x" * size,), b"", b"", region, "d1", made_at, Usage(1, 2))


def filled(at: str = "virginia", **more: Any) -> AnswerCache[str]:
    cache: AnswerCache[str] = AnswerCache(1 << 20, at)
    cache.under(LAW)
    assert cache.keep("anywhere", b"k1", kept(**more), LAW, LAW)
    return cache


def test_a_kept_answer_is_given_until_it_expires() -> None:
    cache = filled()
    found = cache.decide(request(), b"k1", KEEPS, LAW, 59.0)
    assert isinstance(found, Hit)
    assert (found.age_s, found.answer.decision) == (59.0, "d1")
    assert cache.decide(request(), b"k2", KEEPS, LAW, 59.0) == Lead(None, keeps=True)
    assert cache.decide(request(), b"k1", KEEPS, LAW, 59.0, gives=False) == Lead(None, keeps=True)
    assert cache.decide(request(), b"k1", KEEPS, LAW, 60.0) == Lead(None, keeps=True)
    assert len(cache.store) == 0  # no request can use it


def test_a_client_may_want_a_younger_one() -> None:
    cache = filled()
    assert isinstance(cache.decide(request(), b"k1", KEEPS, LAW, 5.0, age_s_max=5.0), Hit)
    assert cache.decide(request(), b"k1", KEEPS, LAW, 5.0, age_s_max=4.0) == Lead(None, keeps=True)
    assert cache.decide(request(), b"k1", BOTH, LAW, 5.0, renew=True) == Lead(None, keeps=True)
    assert len(cache.store) == 1


def test_present_law_decides_where_a_stored_answer_may_be_from_and_be_kept() -> None:
    # eu-only may neither be computed in Virginia nor have a record or a hint there.
    assert filled().decide(request("eu-only"), b"k1", KEEPS, LAW, 1.0) == Alone("law")
    assert filled().decide(request("eu-only"), b"k1", BOTH, LAW, 1.0) == Lead(
        ("eu-only", b"k1", False, "", "", (), None, 0, ""), keeps=False
    )
    narrowed = request(narrow=(("eu",),))
    assert filled(at="frankfurt").decide(narrowed, b"k1", KEEPS, LAW, 1.0) == Lead(None, keeps=True)
    assert isinstance(filled(region="frankfurt", at="frankfurt").decide(narrowed, b"k1", KEEPS, LAW, 1.0), Hit)
    by_token = request(lawful=frozenset({"tokyo"}))
    assert filled().decide(by_token, b"k1", KEEPS, LAW, 1.0) == Lead(None, keeps=True)


def test_an_answer_is_kept_only_where_the_law_of_its_alias_allows() -> None:
    """A name that stands for several models may have a rule of its own."""
    anyone = Tenant(
        "anyone", residency=Residency(processing=Rule(allow=("world",))),
        models={"auto": Rule(allow=("world",), deny=("jp",))},
    )  # fmt: skip
    law = Law(with_(LAW.topology, tenants={"anyone": anyone}))
    named = request("anyone", alias="auto", lawful=law.verdict("anyone", "auto").lawful)
    for region, may in (("tokyo", False), ("virginia", True)):
        cache: AnswerCache[str] = AnswerCache(1 << 20, region)
        assert cache.decide(named, b"k1", KEEPS, law, 1.0) == (Lead(None, keeps=True) if may else Alone("law"))
        assert cache.decide(request("anyone"), b"k1", KEEPS, law, 1.0) == Lead(None, keeps=True)


def test_a_new_law_empties_the_answer_cache() -> None:
    cache = filled()
    cache.leads(("anywhere", b"k1", False, "", "", (), None, 0, ""), "one", 600.0)
    later = Law(with_(LAW.topology, epoch=LAW.epoch + 1))
    assert cache.decide(request(), b"k1", BOTH, later, 1.0) == Lead(
        ("anywhere", b"k1", False, "", "", (), None, 0, ""), keeps=True
    )
    assert not cache.keep("anywhere", b"k1", kept(), LAW, later)  # it was requested under the law before
    assert len(cache.store) == 0


def test_only_an_equal_request_of_the_same_caller_follows_a_lead() -> None:
    cache: AnswerCache[str] = AnswerCache(1 << 20, "virginia")
    lead = cache.decide(request(), b"k1", SHARES, LAW, 0.0)
    assert isinstance(lead, Lead)
    assert lead.share is not None
    assert not lead.keeps
    cache.leads(lead.share, "one", 600.0)
    assert cache.decide(request(), b"k1", SHARES, LAW, 1.0) == Follow("one")
    for other in (
        request("not-us"), request(key="k"), request(narrow=(("eu",),)), request(stream=True), request(priority=1),
        request(deadline=2_000.0), request(lawful=frozenset({"tokyo"})), request(alias="name"),
    ):  # fmt: skip
        found = cache.decide(other, b"k1", SHARES, LAW, 1.0)
        assert isinstance(found, Lead), other
    assert isinstance(cache.decide(request(), b"k1", SHARES, LAW, 1.0, key_id="another issued key"), Lead)
    assert cache.decide(request(), b"k1", KEEPS, LAW, 1.0) == Lead(None, keeps=True)  # its route does not say so
    assert cache.decide(request(), b"k1", SHARES, LAW, 1.0, renew=True) == Lead(None, keeps=False)
    cache.stop_sharing(lead.share, "another")
    assert cache.decide(request(), b"k1", SHARES, LAW, 1.0) == Follow("one")
    cache.stop_sharing(lead.share, "one")
    assert isinstance(cache.decide(request(), b"k1", SHARES, LAW, 1.0), Lead)


def test_without_room_nothing_is_kept() -> None:
    assert AnswerCache[str](0, "virginia").decide(request(), b"k1", KEEPS, LAW, 0.0) == Alone("room")


class Givings(RuleBasedStateMachine):
    """Any order of answers kept, asked for and laws changed: what is given is what that tenant's same request got,
    under the law that is in force, made where the one who asks may be computed, no older than its route says."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: AnswerCache[str] = AnswerCache(1 << 16, "virginia")
        self.law, self.now = LAW, 0.0
        self.made: dict[int, tuple[str, bytes, Law]] = {}

    @rule(seconds=st.floats(0.0, 100.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def change_the_law(self) -> None:
        self.law = Law(with_(self.law.topology, epoch=self.law.epoch + 1))

    @rule(
        tenant=st.sampled_from(NAMES), key=st.sampled_from(KEYS), region=st.sampled_from(REGIONS), stale=st.booleans()
    )
    def keep(self, tenant: str, key: bytes, region: str, stale: bool) -> None:
        answer = replace(kept(region, self.now, 100), decision=str(len(self.made)))
        self.made[len(self.made)] = tenant, key, LAW if stale else self.law
        self.cache.keep(tenant, key, answer, LAW if stale else self.law, self.law)

    @rule(
        tenant=st.sampled_from(NAMES), key=st.sampled_from(KEYS), ttl_s=st.floats(0.001, 100.0),
        narrow=st.sampled_from([(), (("eu",),), (("us", "jp"),)]),
    )  # fmt: skip
    def ask(self, tenant: str, key: bytes, ttl_s: float, narrow: tuple[tuple[str, ...], ...]) -> None:
        asked, route = request(tenant, narrow=narrow, deadline=1e9), RouteConfig(keep_answers_s=ttl_s)
        found = self.cache.decide(asked, key, route, self.law, self.now)
        if isinstance(found, Hit):
            assert self.made[int(found.answer.decision)] == (tenant, key, self.law)
            assert found.answer.region in self.law.verdict(tenant, "m", narrow=narrow).lawful
            assert self.now - found.answer.made_at < ttl_s

    @invariant()
    def bounded(self) -> None:
        assert self.cache.store.stored <= 1 << 16


TestGivings = Givings.TestCase
