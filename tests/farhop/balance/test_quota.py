"""Quotas: by hand, and in random worlds of lost messages, partitions, crashes, skewed clocks and moves of the root."""

from __future__ import annotations

import os
from itertools import count
from math import inf
from random import Random
from typing import Any

import pytest

from farhop.balance import quota_root
from farhop.balance.quota import DRIFT, EACH, LEASE_S, LOST_S, Bucket, LeaseReply, LeaseRequest, Quota, Want
from farhop.balance.quota_holder import Holder, Holding, SlotsHeld, new_holding
from farhop.balance.quota_root import POOL_S, Root

B = "b"


def root(quota: Quota = Quota(60.0, 1.0), marks: dict[str, int] | None = None) -> Root:  # noqa: B008
    made = Root(marks or {}, 0.0, 1)
    made.configure({B: quota}, 0.0)
    return made


def written(made: Root, now: float = 0.0) -> Root:
    made.snapshot(now)
    made.written()
    return made


def holder(quota: Quota = Quota(60.0, 1.0), safe: Quota | None = None) -> Holder:  # noqa: B008
    made = Holder()
    made.holdings[B] = Holding(B, quota, safe, 0.0)
    return made


def ask(*wants: Want, lease: int = 0, number: int = 1) -> LeaseRequest:
    return LeaseRequest(lease, number, wants, 0.0)


def exchange(one: Holder, lender: Root, now: float, name: str = "h") -> None:
    ask = one.asked(now)
    written(lender, now)
    one.on_reply(lender.exchange(name, ask, now), ask, now)


def test_bucket_leaks_at_its_rate_and_not_when_the_clock_steps_back() -> None:
    one = Bucket(Quota(10.0, 1.0), 5.0, 10.0)
    assert one.leak(4.0) == 10.0
    assert not one.fits(1, 5.5)
    assert one.fits(1, 6.0)
    one.give(20, 6.0)
    assert one.level == 0.0


def test_root_lends_nothing_before_its_snapshot_is_stored() -> None:
    lender, one = root(), holder()
    one.holdings[B].waiting = 5
    found: Any = lender.exchange("h", one.asked(0.0), 0.0)
    assert (found.grants[0].granted, found.grants[0].soon, lender.runs_out) == (0, True, True)
    exchange(one, lender, 0.0)
    assert one.holdings[B].available >= 5


def test_quota_lent_to_one_holder_is_not_lent_to_another_and_unspent_quota_returns() -> None:
    lender, one, other = written(root(Quota(10.0, 0.17))), holder(Quota(10.0, 0.17)), holder(Quota(10.0, 0.17))
    one.holdings[B].waiting = 8
    exchange(one, lender, 0.0, "one")
    one.holdings[B].waiting = 0
    other.holdings[B].waiting = 5
    exchange(other, lender, 0.1, "other")
    assert one.holdings[B].available == 8
    assert other.holdings[B].available == 2
    assert other.holdings[B].lacks_s(5, 0.1) == pytest.approx(3 / 0.17)
    for now in (2.0, 4.0, 6.0, 8.0, 9.0):
        exchange(one, lender, now, "one")
    exchange(other, lender, 9.0, "other")
    assert other.holdings[B].available == 5


def test_lease_ends_without_its_root_and_the_safe_part_stays() -> None:
    lender = written(root(Quota(60.0, 1.0)))
    one = holder(Quota(60.0, 1.0), Quota(6.0, 0.1))
    mine = one.holdings[B]
    mine.waiting = 10
    exchange(one, lender, 0.0)
    assert one.alive(LEASE_S)
    assert mine.fits(10, LEASE_S)
    assert not one.alive(LEASE_S + 0.1)
    assert not mine.fits(10, LEASE_S + 0.1)
    assert not mine.fits(2, LEASE_S + 0.1), "its own part begins full"
    assert mine.fits(2, 25.0)
    assert mine.take(2) is False
    mine.settle(2, 1, False, 25.0)
    assert lender.levels(LEASE_S * (1 + DRIFT))[B]["lent"] == 10
    lender.exchange("other", ask(Want(B, wanted=1)), LEASE_S * (1 + DRIFT) + 0.1)
    assert lender.levels(10.2)[B]["used"] == pytest.approx(10, abs=0.2), "what it lost sight of counts as spent"


def test_settlement_refunds_unused_units_and_owes_excess_ones() -> None:
    lender, one = root(Quota(100.0, 1e-9)), holder(Quota(100.0, 1e-9))
    mine = one.holdings[B]
    mine.waiting = 80
    while not mine.fits(80, 0.0):
        exchange(one, lender, 0.0)
    mine.waiting = 0
    assert mine.take(60)
    mine.settle(60, 10, True, 1.0)
    assert mine.take(20)
    mine.settle(20, 25, True, 1.0)
    exchange(one, lender, 1.0)
    assert lender.levels(1.0)[B]["used"] == pytest.approx(35)


def test_holder_in_debt_waits_and_others_do_not() -> None:
    quotas = {B: Quota(100.0, 1.0), "other": Quota(10.0, 1.0), "pooled": Quota(100.0, 1.0, "p")}
    quotas["idle"] = Quota(100.0, 1.0, "p")
    lender, one = Root({}, 0.0, 1), Holder()
    lender.configure(quotas, 0.0)
    one.holdings = {name: new_holding(name, quota, None, 0.0) for name, quota in quotas.items()}
    for name in (B, "pooled"):
        one.holdings[name].waiting = 50
    for now in (0.0, 0.1):
        exchange(one, lender, now)
    for name in (B, "pooled"):
        one.holdings[name].waiting = 0
        assert one.holdings[name].take(50)
        one.holdings[name].settle(50, 500, True, 0.2)
    one.holdings["other"].waiting = 4
    exchange(one, lender, 0.2)
    assert one.holdings["other"].available >= 4
    assert lender.levels(0.2)[B]["used"] == pytest.approx(500, abs=1)
    assert lender.levels(0.2)["pooled"]["used"] == pytest.approx(500, abs=1), "not paid of what others may still have"
    exchange(one, lender, 9.0)
    assert lender.levels(9.0)["pooled"]["borrowed"] == 0.0
    assert (one.holdings[B].available, one.holdings["pooled"].available) == (0, 0)


def test_reply_under_an_abandoned_lease_is_ignored() -> None:
    lender, one = root(), holder()
    one.holdings[B].waiting = 5
    exchange(one, lender, 0.0)
    assert one.holdings[B].take(5)
    found = one.asked(LEASE_S - 0.1)
    assert not one.alive(LEASE_S + 0.1)
    one.on_reply(lender.exchange("h", found, LEASE_S), found, LEASE_S + 0.2)
    assert one.holdings[B].available == 0


def test_repeated_or_late_totals_are_counted_once() -> None:
    lender = written(root(Quota(100.0, 2.0)))
    first = lender.exchange("h", ask(Want(B, wanted=50, least=50)), 0.0)
    later = Want(B, spent=30, returned=10, wanted=0)
    for number, want in ((3, later), (3, later), (2, Want(B, spent=5)), (4, later)):
        found = lender.exchange("h", ask(want, lease=first.lease, number=number), 0.0)
    assert isinstance(found, LeaseReply)
    assert lender.levels(0.0)[B] == {"depth": 100.0, "used": 30.0, "lent": 10}


def test_successor_starts_from_the_marks_and_leaks_only_after_old_leases_end() -> None:
    lender = root(Quota(1000.0, 1000 / 86_400))
    marks = lender.snapshot(0.0)
    assert marks[B] == 20, "of a day's limit it may lend 2 % ahead"
    lender.written()
    lender.exchange("h", ask(Want(B, wanted=500, least=500)), 0.0)
    assert lender.levels(0.0)[B]["lent"] == 20
    after = root(Quota(1000.0, 1.0), marks)
    assert after.levels(LEASE_S)[B]["used"] == 20
    assert after.levels(LEASE_S * (1 + DRIFT) + 5)[B]["used"] == 15


def test_debt_outlives_its_root_and_ends_with_its_limit() -> None:
    quota = Quota(60.0, 1.0)
    lender, one = written(root(quota)), holder(quota)
    one.holdings[B].waiting = 60
    exchange(one, lender, 0.0)
    assert one.holdings[B].take(60)
    one.holdings[B].settle(60, 460, True, 0.0)
    exchange(one, lender, 0.1)
    assert lender.levels(0.1)[B]["used"] == pytest.approx(460, abs=0.2)
    marks = lender.snapshot(0.1)
    assert root(quota, marks).levels(0.0)[B]["used"] == pytest.approx(460, abs=1.0), "a new root is no pardon"
    lower = Quota(10.0, 1.0)
    lender.configure({B: lower}, 0.1)
    after = root(lower, lender.snapshot(0.1))
    after.configure({B: quota}, 0.0)
    assert after.levels(0.0)[B]["used"] == pytest.approx(460, abs=1.0), "nor is a lower limit meanwhile"
    lender.configure({}, 0.1)
    lender.configure({B: quota}, 0.1)
    assert lender.levels(0.1)[B]["used"] <= 60, "one that is unset and set again counts as used up at most"


def test_a_debt_beyond_all_numbers_is_one_that_can_be_written_down() -> None:
    lender = written(root())
    lender.exchange("h", ask(Want(B, owed=1)), 0.0)
    lender.exchange("h", ask(Want(B, owed=2**53), lease=1, number=2), 0.0)
    lender.exchange("g", ask(Want(B, owed=1)), 0.0)
    lender.exchange("g", ask(Want(B, owed=2**53), lease=2, number=2), 0.0)
    assert lender.snapshot(0.0)[B] == 2**53


@pytest.mark.parametrize("owed", [0, 400])
def test_retry_time_is_exact_for_a_successor_and_for_a_holder_in_debt(owed: int) -> None:
    """Of a limit of 60 a minute. After a root was killed nothing leaks until what it lent is over."""
    marks = {B: 60} if not owed else {}
    lender, one = root(marks=marks), holder()
    mine = one.holdings[B]
    for now in (0.0, 0.1):
        mine.waiting = 60
        exchange(one, lender, now)
    mine.waiting = 0
    if owed:
        assert mine.take(60)
        mine.settle(60, 60 + owed, True, 0.1)
    exchange(one, lender, 0.2)
    assert not mine.fits(3, 0.2)
    again_s = mine.lacks_s(3, 0.2)
    assert again_s == pytest.approx(owed + 3 if owed else LEASE_S * (1 + DRIFT) + 3 - 0.2, abs=0.2)
    mine.waiting = 3
    for now in (0.2 + again_s - 0.3, 0.2 + again_s + 0.1):
        assert not mine.fits(3, now)
        one.lease_until = now  # as requested every 2 s
        exchange(one, lender, now)
    assert mine.fits(3, now)


def test_retry_time_is_that_of_the_safe_part_if_it_has_room_first() -> None:
    lender, one = root(marks={B: 60}), holder(safe=Quota(12.0, 0.5))
    mine = one.holdings[B]  # its part begins full: how much of it was spent is not known
    mine.waiting = 2
    for now in (0.0, 0.1):
        exchange(one, lender, now)
    assert mine.lacks_s(2, 0.1) == pytest.approx(3.9)
    assert not mine.fits(2, 3.8)
    assert mine.fits(2, 4.1)
    assert mine.lacks_s(13, 0.1) == pytest.approx(LEASE_S * (1 + DRIFT) + 13, abs=0.2), "more than its own part holds"


def test_awaited_units_are_lent_in_few_writes_and_the_mark_falls_afterwards() -> None:
    lender, one = root(Quota(1000.0, 1e-9)), holder(Quota(1000.0, 1e-9))
    mine = one.holdings[B]
    mine.waiting = 450
    rounds = 0
    while not mine.fits(450, 0.0):
        exchange(one, lender, 0.0)
        rounds += 1
        assert rounds <= 7, "a tenth at a time, not a fiftieth"
    mine.waiting = 0
    exchange(one, lender, 1.0)
    level = lender.levels(1.0)[B]
    assert lender.snapshot(1.0)[B] <= level["used"] + level["lent"] + 20, "2 % ahead again"


def test_refund_of_units_lent_by_a_predecessor_is_ignored() -> None:
    lender = root(Quota(60.0, 1.0), {B: 60})
    found = lender.exchange("h", ask(Want(B)), 0.0)
    lender.exchange("h", ask(Want(B, refunded=50), lease=found.lease), 0.0)
    assert lender.levels(0.0)[B]["used"] == 60, "its predecessor may have lent that to others"


def test_a_holder_that_refunds_more_than_it_spent_frees_no_quota_of_others() -> None:
    """A balancer that was taken over: without it 1,600 of these 100 were spent."""
    lender = written(root(Quota(100.0, 0.1)))
    liar, lies, honest, spent = lender.exchange("global tokyo/l", ask(Want(B)), 0.0).lease, 0, 0, 0
    total = 0
    for n in range(1, 200):
        written(lender)
        reply = lender.exchange(
            "global paris/h", ask(Want(B, spent=spent, wanted=100, least=100), lease=honest, number=n), 0.0
        )
        honest, before = reply.lease, spent
        spent = reply.grants[0].granted
        total += spent - before
        lies += 50
        lender.exchange("global tokyo/l", ask(Want(B, refunded=lies), lease=liar, number=n + 1), 0.0)
    assert total == 100


def test_refund_frees_at_most_what_remains_of_the_places_own_part() -> None:
    lender, leases = root(Quota(1000.0, 40.0)), {}
    for place, n in (("a", 100), ("b", 300)):
        lender.snapshot(0.0)
        lender.written()
        found = lender.exchange(f"{place}/1", ask(Want(B, wanted=n, least=n)), 0.0)
        leases[place] = found.lease
        lender.exchange(f"{place}/1", ask(Want(B, spent=n), lease=found.lease, number=2), 0.0)
    assert lender.levels(5.0)[B]["used"] == 200, "half has leaked, of both"
    lender.exchange("a/1", ask(Want(B, spent=100, refunded=100), lease=leases["a"], number=3), 5.0)
    assert lender.levels(5.0)[B]["used"] == 150
    lender.exchange("a/2", ask(Want(B, refunded=100)), 5.0)
    lender.exchange("b/1", ask(Want(B, spent=300, refunded=300), lease=leases["b"], number=3), 5.0)
    assert lender.levels(5.0)[B]["used"] == 0


# -- slots


def slots(n: float = 10.0, safe: Quota | None = None) -> Holder:
    made = Holder()
    made.holdings[B] = new_holding(B, Quota(n, 0.0), safe, 0.0)
    return made


def test_slot_is_reused_by_its_holder_and_returned_if_not_needed() -> None:
    lender, one = root(Quota(10.0, 0.0)), slots()
    mine = one.holdings[B]
    mine.waiting = 4
    exchange(one, lender, 0.0)
    mine.waiting = 0
    assert mine.available >= 4
    for _ in range(100):  # one after the other: no more than were lent at first
        assert mine.take(1)
        mine.settle(1, 1, True, 1.0)
    for _ in range(3):
        assert mine.take(1)
    exchange(one, lender, 1.0)
    assert lender.levels(1.0)[B] == {"depth": 10.0, "used": 3.0, "lent": mine.available}
    for _ in range(3):
        mine.settle(1, 1, True, 2.0)
    for now in (3.0, 5.0, 7.0, 9.0):
        exchange(one, lender, now)
    assert lender.levels(9.0)[B] == {"depth": 10.0, "used": 0.0, "lent": 0}
    assert one.asked(9.0).wants == (), "there is nothing more to tell"


def test_slots_of_a_silent_holder_count_until_it_is_considered_lost() -> None:
    lender, one, other = root(Quota(4.0, 0.0)), slots(4.0), slots(4.0)
    one.holdings[B].waiting = 3
    exchange(one, lender, 0.0, "one")
    for _ in range(3):
        assert one.holdings[B].take(1)
    assert not one.alive(LEASE_S + 0.1)
    assert not one.holdings[B].fits(1, LEASE_S + 0.1), "what it had beyond those is given up"
    for now, free in ((LEASE_S * 2, 1), (LEASE_S + LOST_S - 1, 1), ((LEASE_S + LOST_S) * (1 + DRIFT) + 1, 4)):
        other.holdings[B].waiting = 4
        for _ in range(3):
            exchange(other, lender, now, "other")
        assert other.holdings[B].available == free
    other.holdings[B].waiting = 0
    exchange(one, lender, 90.0, "one")
    assert lender.levels(90.0)[B]["used"] == 3, "it is back, and what it has counts again"


def test_new_root_learns_slots_in_use_from_the_holders() -> None:
    lender, one = root(Quota(10.0, 0.0)), slots()
    mine = one.holdings[B]
    mine.waiting = 6
    for _ in range(2):
        exchange(one, lender, 0.0)
    mine.waiting = 0
    for _ in range(6):
        mine.take(1)
    after = root(Quota(10.0, 0.0), lender.snapshot(1.0))
    assert after.levels(1.0)[B]["used"] == 10
    exchange(one, after, 1.0)
    assert mine.available == 0
    assert after.levels(2.0)[B]["used"] == 10, "of the rest nobody told yet"
    assert after.levels((LEASE_S + LOST_S) * (1 + DRIFT) + 1)[B]["used"] == 6


def test_late_or_repeated_messages_change_nothing() -> None:
    lender = written(root(Quota(10.0, 0.0)))
    lender.exchange("h", ask(Want(B, wanted=5, least=5)), 0.0)
    found = ask(Want(B, spent=2, held=2), number=3)
    for number in (3, 2, 3):
        lender.exchange("h", ask(*found.wants, number=number), 0.0)
        lender.exchange("h", ask(Want(B, wanted=5, least=5), number=2), 0.0)
    assert lender.levels(0.0)[B] == {"depth": 10.0, "used": 2.0, "lent": 0}
    lender.exchange("h", ask(number=4), 0.0)
    assert lender.levels(0.0)[B]["used"] == 0, "what is not named is let go"
    lender.exchange("h", ask(Want(B, wanted=5, least=5), number=5), 0.0)
    lender.configure({}, 0.0)
    lender.exchange("h", ask(number=6), 0.0)
    lender.configure({B: Quota(10.0, 0.0)}, 1.0)
    assert lender.levels(1.0)[B]["used"] == 4, "the limit was away: what its mark says"


def test_safe_share_of_slots_is_usable_after_other_leases_end() -> None:
    one = slots(8.0, Quota(2.0, 0.0))
    mine = one.holdings[B]
    assert not mine.fits(1, LEASE_S)
    assert mine.fits(2, LEASE_S + 1)
    assert mine.take(1) is False
    assert not mine.fits(2, LEASE_S + 1)
    mine.settle(1, 1, False, LEASE_S + 1)
    assert mine.fits(2, LEASE_S + 1)


def test_leaving_holder_returns_all_slots_and_waiting_ones_learn_the_rate() -> None:
    lender, one, other = root(Quota(4.0, 0.0)), slots(4.0), slots(4.0)
    one.holdings[B].waiting = 4
    exchange(one, lender, 0.0, "one")
    for _ in range(4):
        one.holdings[B].take(1)
    one.holdings[B].waiting = 1
    exchange(one, lender, 1.0, "one")
    assert 0 < one.holdings[B].lacks_s(1, 1.0) <= 1.0
    for n in range(4):
        one.holdings[B].settle(1, 1, True, 1.0 + n / 5)
    assert one.holdings[B].lacks_s(1, 2.0) == 0.0
    lender.exchange("one", one.leaves(2.0), 2.0)
    other.holdings[B].waiting = 4
    for _ in range(3):
        exchange(other, lender, 2.0, "other")
    assert other.holdings[B].available == 4


# -- users


def test_user_buckets_are_created_on_demand_and_evicted_least_recently_used_first(monkeypatch: Any) -> None:
    monkeypatch.setattr(quota_root, "USERS_MAX", 2)
    lender, limit = Root({}, 0.0, 1), f"limit{EACH}"
    lender.configure({limit: Quota(10.0, 1e-9)}, 0.0)
    assert lender.exchange("h", ask(Want(limit, wanted=5, least=5)), 0.0).grants == ()

    def lend(user: str, number: int) -> int:
        found = lender.exchange("h", ask(Want(limit + user, wanted=7, least=7), number=number), 0.0)
        return found.grants[0].granted

    assert [lend("ann", 1), lend("bob", 2), lend("ann", 3), lend("ann", 4)] == [7, 7, 3, 0]
    assert lender.levels(0.0).keys() == {f"{limit}ann", f"{limit}bob"}
    assert lend("cid", 5) == 7
    assert [lend("ann", 6), lend("bob", 7)] == [0, 7], "bob was forgotten, and begins anew"
    assert lender.snapshot(0.0) == {}, "users are not written down"
    lender.configure({limit: Quota(20.0, 1e-9)}, 0.0)
    assert {one["depth"] for one in lender.levels(0.0).values()} == {20.0}
    lender.configure({}, 0.0)
    assert lender.levels(0.0) == {}


def test_users_of_one_limit_however_many_evict_none_of_another_s_part(monkeypatch: Any) -> None:
    """Else a tenant's made-up users would give another's back what they used up."""
    monkeypatch.setattr(quota_root, "USERS_MAX", 6)
    lender, crowded, other = Root({}, 0.0, 1), f"crowded{EACH}", f"other{EACH}"
    lender.configure({crowded: Quota(10.0, 1e-9), other: Quota(10.0, 1e-9)}, 0.0)
    numbers = count(1)

    def lend(name: str) -> int:
        asked = ask(Want(name, wanted=7, least=7), number=next(numbers))
        return lender.exchange("h", asked, 0.0).grants[0].granted

    assert [lend(f"{other}{user}") for user in ("ann", "bob", "cid")] == [7, 7, 7]
    assert [lend(f"{crowded}{user}") for user in range(20)] == [7] * 20
    assert [lend(f"{other}{user}") for user in ("ann", "bob", "cid")] == [3, 3, 3]
    assert len(lender.levels(0.0)) == 6
    assert lend(f"{other}dan") == 7, "one of its own gives way"
    assert lend(f"{other}ann") == 7


def test_idle_quotas_are_left_out_and_a_forgotten_one_starts_again() -> None:
    lender, one = root(Quota(100.0, 1e-9)), holder(Quota(100.0, 1e-9))
    mine = one.holdings[B]
    mine.waiting = 4
    exchange(one, lender, 0.0)
    mine.waiting = 0
    mine.take(3)
    mine.settle(3, 2, True, 0.0)
    for now in range(1, 9):
        exchange(one, lender, float(now))
    assert mine.idle
    assert one.asked(9.0).wants == ()
    one.holdings[B] = mine = Holding(B, Quota(100.0, 1e-9), None, 9.0)
    mine.waiting = 4
    exchange(one, lender, 9.0)
    assert mine.take(4)
    exchange(one, lender, 10.0)
    assert lender.levels(10.0)[B]["used"] == pytest.approx(6)


# -- pools


class Pooled:
    """Three limits of one pool, of 10 a second but the last, each asked for by a holder of its own."""

    def __init__(self) -> None:
        self.quotas = {name: Quota(100.0, rate, "p") for name, rate in (("a", 10.0), ("b", 10.0), ("c", 1.0))}
        self.root = Root({}, 0.0, 1)
        self.root.configure(self.quotas, 0.0)
        self.holders = {name: Holder() for name in self.quotas}
        for name, one in self.holders.items():
            one.holdings[name] = Holding(name, self.quotas[name], None, 0.0)

    def spend(self, name: str, now: float, most: int = 1000) -> int:
        """How much it gets, if it asks for all that it can get."""
        mine, got = self.holders[name].holdings[name], 0
        for _ in range(30):
            mine.waiting = min(100, most - got)
            exchange(self.holders[name], self.root, now, name)
            n = min(mine.available, most - got)
            if n > 0:
                mine.take(n)
                mine.settle(n, n, True, now)
            got += n
        mine.waiting = 0
        exchange(self.holders[name], self.root, now, name)
        return got

    def level(self, name: str, now: float) -> dict[str, float]:
        return self.root.levels(now)[name]


def test_idle_quota_of_a_pool_is_lent_and_each_member_keeps_its_own() -> None:
    one = Pooled()
    assert one.spend("a", 0.0) == 100
    got = [one.spend("a", float(now)) for now in range(1, 31)]
    assert sum(got) == pytest.approx(30 * 21, abs=2), "its own 10 a second, and what b and c do not use"
    assert one.level("a", 30.0)["borrowed"] == pytest.approx(30 * 11, abs=2)
    assert one.spend("b", 30.0) == 100, "all that is its own, whatever others borrowed"
    later = [(one.spend("a", float(now)), one.spend("b", float(now))) for now in range(31, 61)]
    assert sum(a for a, _ in later) + sum(b for _, b in later) == pytest.approx(30 * 21, abs=2)
    assert sum(b for _, b in later) >= 30 * 10 - 1
    assert "borrowed" not in written(root()).levels(0.0)[B]


def test_refill_of_a_partly_used_limit_is_not_lent_to_its_pool() -> None:
    one = Pooled()
    assert (one.spend("a", 0.0), one.spend("b", 0.0, 50)) == (100, 50)
    assert one.spend("a", 4.0) == pytest.approx(40 + 4, abs=1)
    assert one.spend("a", 8.0) == pytest.approx(40 + 4 + 30, abs=1), "b was whole again after 5 s"
    assert one.spend("b", 8.0) == 100


def test_idle_quota_is_kept_for_some_seconds_and_a_tenant_that_leaves_the_pool_borrows_none() -> None:
    one = Pooled()
    assert one.spend("a", 0.0) == 100
    assert one.spend("a", 1000.0) == 100 + POOL_S * 21
    one.root.configure({**one.quotas, "a": Quota(100.0, 10.0)}, 1000.0)
    assert one.spend("a", 1010.0) == 100
    one.root.configure(one.quotas, 1010.0)
    assert one.spend("a", 1011.0) == pytest.approx(10 + POOL_S * 11, abs=25)
    after = Root(one.root.snapshot(1012.0), 1012.0, 1 << 40)
    after.configure(one.quotas, 1012.0)
    one.root = after
    assert one.spend("a", 1013.0) == 0, "of what idled under another root nothing is known"


# -- random worlds


class World:
    """One bucket, some holders, a root that moves, a network that loses, delays and doubles. Time is true time; each
    process has a clock of its own. What was spent is put into one bucket: it must not overflow."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        depth = self.depth_of(rng)
        self.quota = Quota(float(depth), depth / rng.choice((5.0, 20.0, 60.0, 86_400.0)))
        self.share, self.busy = rng.choice((0.0, 0.0, 0.0, 0.0, 0.3)), rng.choice((0.3, 1.0, 1.0))
        self.greedy = rng.random() < 0.5  # always wants everything
        self.faulty = rng.choice((0.0, 0.05, 0.15, 0.15))
        self.now, self.name = 0.0, B
        self.level = self.most = self.borrowed = 0.0
        self.lent = self.quota.part(1 - self.share)
        self.clocks: dict[Any, tuple[float, float]] = {}
        count = rng.choice((1, 2, 2, 3, 4))
        self.safe = self.quota.part(self.share / count) if self.share else None
        self.holders = [self.fresh(n) for n in range(count)]
        self.life, self.idle_until = [0] * count, [0.0] * count
        self.lossy = [rng.choice((0.0, 0.0, 0.1, 0.4)) for _ in range(count)]
        self.asks: list[tuple[float, int, int, Any]] = []  # due time, owner, incarnation, event
        self.open: list[tuple[float, int, int, int, int, bool, str]] = []
        self.root: Root | None = None
        self.root_until = -inf
        self.marks: dict[str, int] = {}
        self.leases = self.terms = 0
        self.free_at = 0.0  # when another may take over

    def depth_of(self, rng: Random) -> int:
        return rng.choice((1, 10, 60, 1000, 100_000))

    def sizes(self) -> dict[str, Quota]:
        """What the root lends out."""
        return {B: self.lent}

    def depth_at(self, mine: Holding) -> float:
        """What a request may take at most."""
        return self.quota.depth

    def clock(self, who: Any) -> float:
        offset, pace = self.clocks.setdefault(
            who, (self.rng.uniform(-1e6, 1e6), self.rng.uniform(1 - DRIFT / 3, 1 + DRIFT / 3))
        )
        return offset + self.now * pace

    def fresh(self, n: int) -> Holder:
        made = Holder()
        for name, size in self.sizes().items():
            made.holdings[name] = new_holding(name, size, self.safe, self.clock(n))
        return made

    def pass_s(self, seconds: float) -> None:
        self.now += seconds
        self.level = max(0.0, self.level - seconds * self.quota.rate * (1 + DRIFT))

    def spend(self, n: int) -> None:
        self.level += n
        self.most = max(self.most, self.level - self.quota.depth)

    # the possible events

    def request(self, n: int) -> None:
        """Requests that come to a holder: some take all that there is."""
        one, now, name = self.holders[n], self.clock(n), self.name
        mine = one.holdings[name]
        depth = self.depth_at(mine)
        one.alive(now)
        for _ in range(self.rng.choice((0, 1, 3))):
            units = self.rng.randint(1, max(1, int(depth / self.rng.choice((1, 3, 50)))))
            mine.waiting = 0 if mine.fits(units, now) else units
            if mine.waiting or self.greedy:
                units = mine.available
            if units > 0:
                lent = mine.take(units)
                self.spend(units)
                over_at = self.now + self.rng.choice((0.1, 3.0, 40.0))
                used = self.rng.choice((0, units, units, self.rng.randint(0, units)))
                self.open.append((over_at, n, self.life[n], units, used, lent, name))
        if self.greedy:
            mine.waiting = int(depth)

    def settle(self) -> None:
        for one in [one for one in self.open if one[0] <= self.now]:
            self.open.remove(one)
            _, n, life, taken, used, lent, name = one
            if life == self.life[n]:
                mine = self.holders[n].holdings[name]
                now, safe = self.clock(n), mine.safe
                before = safe.leak(now) if safe is not None else 0.0
                mine.settle(taken, used, lent, now)
                if not lent and safe is not None:
                    self.level = max(0.0, self.level - (before - safe.level))

    def ask(self, n: int, *, well: bool = False) -> None:
        found = self.holders[n].asked(self.clock(n))
        for _ in range(1 + (self.rng.random() < self.lossy[n] / 5)):
            if self.rng.random() >= self.lossy[n]:
                late_s = self.rng.choice((0.0, 0.0, 0.0, 0.05, 0.9)) if self.rng.random() < 0.95 else 30.0
                late_s = 0.0 if well else late_s
                self.asks.append((self.now + late_s, n, self.life[n], found))

    def deliver(self) -> None:
        for one in [one for one in self.asks if one[0] <= self.now]:
            self.asks.remove(one)
            _, n, life, found = one
            now = self.clock(("root", self.terms))
            if self.root is None or now > self.root_until:
                continue
            text = self.root.exchange(f"h{n}.{life}", found, now)
            in_time = self.clock(n) <= found.at + 1.0 or self.rng.random() < 0.2
            if life == self.life[n] and in_time and self.rng.random() >= self.lossy[n]:
                self.holders[n].on_reply(text, found, self.clock(n))
                self.deliver_reply(n)

    def deliver_reply(self, n: int) -> None:
        """A holder took an answer."""

    def write(self) -> None:
        """The root writes its marks; it may fail, or seem to, or be cut off for good."""
        now = self.clock(("root", self.terms))
        if self.root is not None and now <= self.root_until:
            marks = self.root.snapshot(now)
            how = self.rng.choice((*["well"] * 8, "lost", "unheard"))
            if how != "lost":
                self.marks, self.free_at = marks, self.now + 18.0
            if how == "well":
                self.root.written()
                self.root_until = now + 15.0
        elif self.now >= self.free_at:
            self.take_over()

    def take_over(self) -> None:
        self.terms += 1
        now = self.clock(("root", self.terms))
        self.leases += 1 << 40
        self.root = Watched(self, self.marks, now, self.leases)
        self.root.configure(self.sizes(), now)
        self.marks, self.root_until, self.free_at = self.root.snapshot(now), now + 15.0, self.now + 18.0
        self.root.written()

    def root_dies(self) -> None:
        self.root = None
        if self.rng.random() < 0.7:
            self.pass_s(max(0.0, self.free_at - self.now))
            self.write()

    def root_hands_over(self) -> None:
        now = self.clock(("root", self.terms))
        if self.root is not None and now <= self.root_until:
            self.marks, self.root, self.free_at = self.root.snapshot(now), None, self.now
            self.write()

    def holder_dies(self) -> None:
        n = self.rng.randrange(len(self.holders))
        self.life[n] += 1
        self.holders[n] = self.fresh(n)

    def partition(self) -> None:
        n = self.rng.randrange(len(self.holders))
        self.lossy[n] = self.rng.choice((0.0, 0.1, 1.0))

    def strand(self) -> None:
        """A holder borrows all that it can, is cut off, and wakes up later; the root may move meanwhile, and the
        others take all that is left."""
        n = self.rng.randrange(len(self.holders))
        full_s = self.quota.depth / self.quota.rate if self.quota.rate else 60.0
        quiet_s = self.rng.choice((0.0, 1.0, 2.0)) * min(full_s, 60.0)
        for _ in range(int(quiet_s / 5) + 1):  # so that there is something to borrow
            self.pass_s(min(quiet_s, 5.0))
            self.write()
        self.lossy, self.greedy = [0.0] * len(self.holders), True
        mine = self.holders[n].holdings[B]
        mine.waiting = int(self.lent.depth * self.rng.choice((0.5, 1.0)))
        self.ask(n, well=True)
        self.deliver()
        self.lossy[n], self.idle_until[n] = 1.0, self.now + self.rng.choice((1.0, 5.0, 9.0, 9.0, 15.0, 30.0))
        how = self.rng.random()
        if how < 0.5:
            (self.root_dies if how < 0.2 else self.root_hands_over)()

    def run(self, steps: int = 80) -> None:
        self.take_over()
        faults = (self.root_dies, self.root_hands_over, self.holder_dies, self.partition, *[self.strand] * 4)
        for _ in range(steps):
            for n in range(len(self.holders)):
                if self.rng.random() < self.busy and self.now >= self.idle_until[n]:
                    self.request(n)
                if self.rng.random() < 0.6:
                    self.ask(n)
            if self.rng.random() < 0.5:
                self.write()
            self.greedy ^= self.rng.random() < 0.03
            if self.rng.random() < self.faulty:
                self.rng.choice(faults)()
            self.deliver()
            self.settle()
            self.pass_s(self.rng.choice((0.0, 0.1, 0.3, 0.3, 1.0, 3.0 if self.busy < 1.0 else 0.3)))


class Watched(Root):
    """A root whose buckets tell the world what they were given back."""

    def __init__(self, world: World, marks: dict[str, int], now: float, first_lease: int) -> None:
        super().__init__(marks, now, first_lease)
        self._world = world

    def configure(self, quotas: dict[str, Quota], now: float) -> None:
        super().configure(quotas, now)
        for bucket in self._buckets.values():
            bucket.__class__ = _checked(type(bucket), self._world)


def _checked(kind: type, world: World) -> type:
    class Told(kind):  # type: ignore[misc]
        __slots__ = ()

        def give(self, n: float, now: float) -> None:
            before = self.leak(now)
            super().give(n, now)
            world.level = max(0.0, world.level - (before - self.level))

        def borrow(self, n: float) -> None:
            super().borrow(n)
            world.borrowed += n

    return Told


class SlotsWorld(World):
    """The same of slots: what is under way is counted, but for what outlived its holder's lease by LOST_S."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        depth, count = self.rng.choice((1, 3, 10, 100)), len(self.holders)
        own = int(depth * self.share / count)
        self.quota, self.lent = Quota(float(depth), 0.0), Quota(float(depth - own * count), 0.0)
        self.safe = Quota(float(own), 0.0) if own else None
        self.holders = [self.fresh(n) for n in range(count)]
        self.under_way: list[list[Any]] = []  # until, owner, incarnation, lent, whether it outlived its lease
        self.lease_until = [-inf] * count  # in true time
        self.begun = 0

    def mine(self, n: int) -> SlotsHeld:
        one = self.holders[n].holdings[B]
        assert isinstance(one, SlotsHeld)
        return one

    def request(self, n: int) -> None:
        now, mine = self.clock(n), self.mine(n)
        self.holders[n].alive(now)
        for _ in range(self.rng.choice((0, 1, 3)) if not self.greedy else mine.available):
            mine.waiting = 0 if mine.fits(1, now) else 1
            if not mine.waiting:
                over_at = self.now + self.rng.choice((0.0, 0.1, 3.0, 40.0, 200.0))
                self.under_way.append([over_at, n, self.life[n], mine.take(1), False])
                self.begun += 1
        if self.greedy:
            mine.waiting = int(self.quota.depth)
        self.count()

    def deliver_reply(self, n: int) -> None:
        self.count()
        _, pace = self.clocks[n]
        self.lease_until[n] = self.now + (self.holders[n].lease_until - self.clock(n)) / pace

    def settle(self) -> None:
        for one in [one for one in self.under_way if one[0] <= self.now or one[2] != self.life[one[1]]]:
            self.under_way.remove(one)
            _, n, life, lent, _ = one
            if life == self.life[n]:
                self.mine(n).settle(1, 1, lent, self.clock(n))

    def count(self) -> None:
        for one in self.under_way:
            one[4] |= one[3] and self.now > self.lease_until[one[1]] + LOST_S
        counted = sum(not one[4] and one[2] == self.life[one[1]] for one in self.under_way)
        self.most = max(self.most, counted - self.quota.depth)

    def heal(self) -> int:
        """How many one holder may have, once all is over and well."""
        self.lossy, self.greedy = [0.0] * len(self.holders), False
        self.under_way = [[self.now, *one[1:]] for one in self.under_way]
        self.settle()
        for step in range(120):
            for _ in range(3):
                self.write()
            for n in range(len(self.holders)):
                self.mine(n).waiting = self.mine(n).most = 0
                if n == 0 and step > 60:
                    self.mine(0).waiting = int(self.lent.depth)
                self.ask(n, well=True)
            self.deliver()
            self.pass_s(2.0)
        return self.mine(0).available


@pytest.mark.parametrize("part", range(4))
def test_simulated_worlds_never_exceed_concurrency_and_lose_no_slot(part: int) -> None:
    worlds = max(10, int(50 * float(os.environ.get("FARHOP_EXAMPLES", "1"))))
    begun = 0
    for seed in range(part * worlds, (part + 1) * worlds):
        world = SlotsWorld(seed)
        world.run()
        assert world.most <= 0, f"world {seed}: {world.most} beyond {world.quota}"
        assert world.heal() == world.lent.depth, f"world {seed}"
        begun += world.begun
    assert begun > 10 * worlds


@pytest.mark.parametrize("part", range(4))
def test_simulated_worlds_never_exceed_their_quota(part: int) -> None:
    worlds = max(10, int(50 * float(os.environ.get("FARHOP_EXAMPLES", "1"))))
    served = 0.0
    for seed in range(part * worlds, (part + 1) * worlds):
        world = World(seed)
        world.run()
        assert world.most <= 1e-6, f"world {seed}: {world.most} beyond {world.quota}"
        served += world.terms > 0
    assert served > worlds / 2


class MoneyWorld(World):
    """Microdollars: many, of which a request takes few or very many."""

    def depth_of(self, rng: Random) -> int:
        return rng.choice((1_000_000, 50_000_000, 10**12))


@pytest.mark.parametrize("part", range(4))
def test_simulated_worlds_never_exceed_a_money_budget(part: int) -> None:
    worlds = max(4, int(20 * float(os.environ.get("FARHOP_EXAMPLES", "1"))))
    for seed in range(part * worlds, (part + 1) * worlds):
        world = MoneyWorld(seed)
        world.run()
        # Floats of 10^12 are exact to 10^-4, and a few hundred are added: far below the one unit that would matter.
        assert world.most < 0.5, f"world {seed}: {world.most} beyond {world.quota}"


class PoolWorld(World):
    """Two limits of one pool, now and then one of them idle. What both spend is put into one bucket."""

    other: Quota | None = None

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        one, depth = self.lent, float(self.depth_of(self.rng))
        self.lent = Quota(one.depth, one.rate, "p")
        self.other = Quota(depth, depth / self.rng.choice((5.0, 20.0, 60.0, 86_400.0)), "p")
        rate = self.lent.rate + self.other.rate
        self.quota = Quota(self.lent.depth + self.other.depth + POOL_S * rate * (1 + DRIFT), rate)
        self.safe, self.leaning = None, 0.5
        self.holders = [self.fresh(n) for n in range(len(self.holders))]

    def sizes(self) -> dict[str, Quota]:
        return {B: self.lent} if self.other is None else {B: self.lent, "other": self.other}

    def depth_at(self, mine: Holding) -> float:
        return mine.quota.depth

    def request(self, n: int) -> None:
        if self.rng.random() < 0.05:
            self.leaning = self.rng.choice((0.0, 0.0, 0.5, 1.0))
        self.name = B if self.rng.random() >= self.leaning else "other"
        super().request(n)


@pytest.mark.parametrize("seed", [20_432, 53_370])
def test_idle_units_are_lent_only_up_to_the_bound_of_the_pool(seed: int) -> None:
    """Worlds, two of 10^5, in which 0.09 and 0.02 s of the pool's rate were."""
    world = PoolWorld(seed)
    world.run()
    assert world.most <= 1e-6


@pytest.mark.parametrize("part", range(4))
def test_simulated_worlds_never_exceed_the_sum_of_a_pools_limits(part: int) -> None:
    worlds = max(10, int(50 * float(os.environ.get("FARHOP_EXAMPLES", "1"))))
    borrowed = 0
    for seed in range(part * worlds, (part + 1) * worlds):
        world = PoolWorld(seed)
        world.run()
        assert world.most <= 1e-6, f"world {seed}: {world.most} beyond {world.quota}"
        assert world.root is None or all(one.spare >= -1e-9 for one in world.root.pools.values())
        borrowed += world.borrowed > 0
    assert borrowed > worlds / 8
