"""Load that several balancers of one region have under way together, whose turn it is, and who owns what."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import MODEL, OTHER_MODEL, replica, request

from farhop.balance.estimate.estimates import Estimates
from farhop.balance.health.replica import HealthConfig
from farhop.balance.ledger import Load, Reservation
from regional_lb.fleet.recent import Cached
from regional_lb.fleet.replicas import Replicas
from regional_lb.fleet.shares import HEAD_START_S, TURNS, PeerLoad, PeerReported, PeersChanged, Shares, TurnTimerFired
from regional_lb.fleet.view import ReplicaProbed, view_of

NAMES = ("g1", "g2", "g3")


def replicas_of(instance: str = "a", names: tuple[str, ...] = NAMES) -> Replicas:
    known = Replicas(HealthConfig(rise=1), Estimates(), Shares(instance))
    known.adopt(view_of([replica(name, slots=2) for name in names]))
    for name in names:
        known.handle(ReplicaProbed(name, True), 0.0)
    return known


@pytest.fixture
def here() -> Replicas:
    return replicas_of()


def shares_of(known: Replicas) -> Shares:
    assert known.shares is not None
    return known.shares


def load(name: str, *counts: int, known: bool = True) -> PeerLoad:
    return PeerLoad(str(replica(name).address), *counts, known=known)


def peer_report(peer: str, loads: dict[str, PeerLoad], queued: int = 0, model: str = MODEL, **more) -> PeerReported:
    return PeerReported(peer, loads, {model: queued} if queued else {}, **more)


def all_idle(peer: str, names: tuple[str, ...] = NAMES) -> PeerReported:
    return peer_report(peer, {name: load(name) for name in names}, whole=True)


def room(known: Replicas, name: str) -> bool:
    return bool(known.whole.room(1.0, 1.0, 0.0)[known.whole.of.at[name]])


def take(known: Replicas, name: str, n: int = 1) -> None:
    for _ in range(n):
        known.ledger.reserve(f"q{len(known.ledger)}", Reservation(name, 0, 10))


def turn(known: Replicas, name: str) -> None:
    """One that is over at once."""
    known.ledger.reserve("turn", Reservation(name, 0, 10))
    known.ledger.release("turn")


# -- loads


def test_a_replica_is_full_when_all_together_fill_it(here: Replicas) -> None:
    take(here, "g1")
    assert room(here, "g1")
    assert here.handle(peer_report("b", {"g1": load("g1", 1, 30, 40, 1)}), 0.0) == "g1"  # the one that changed
    assert not room(here, "g1")
    row = here.whole.of.at["g1"]
    whole = here.whole
    assert (whole.in_flight[row], whole.backlog_tokens[row], whole.kv_taken_tokens[row]) == (2, 30, 50)
    assert here.handle(peer_report("b", {"g1": load("g1", 0, 0, 0, 1)}), 0.0) == "g1"
    assert room(here, "g1")
    assert here.handle(peer_report("b", {}), 0.0) == ""  # a heartbeat wakes no request


def test_load_of_departed_peers_and_other_addresses_does_not_count(here: Replicas) -> None:
    here.handle(peer_report("b", {"g1": load("g1", 2), "g2": PeerLoad("another-host:1", 2)}, whole=True), 0.0)
    assert not room(here, "g1")
    assert room(here, "g2")  # the same name, but another engine
    here.handle(peer_report("b", {"g3": load("g3", 2)}, whole=True), 0.0)
    assert room(here, "g1")  # a first message is everything that there is
    here.handle(PeersChanged(frozenset({"b"}), frozenset()), 0.0)
    assert room(here, "g3")  # no peer hears it any more
    assert not shares_of(here).contended


def test_a_swap_keeps_what_the_others_have_under_way(here: Replicas) -> None:
    here.handle(peer_report("b", {"g1": load("g1", 2), "g9": load("g9", 2)}), 0.0)
    here.adopt(view_of([replica("g1", slots=2), replica("g9", slots=2)]))
    assert not room(here, "g1")
    assert not room(here, "g9")  # it was reported before we knew it


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("b", "c", "d")),
            st.dictionaries(st.sampled_from(NAMES), st.integers(0, 9), max_size=3),
            st.sampled_from(("news", "whole", "gone", "own")),
        ),
        max_size=40,
    )
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_load_is_the_sum_of_own_and_live_peers_last_reports(steps) -> None:
    here = replicas_of()
    fields: dict[str, dict[str, int]] = {}
    for peer, counts, what in steps:
        if what == "gone":
            fields.pop(peer, None)
            here.handle(PeersChanged(frozenset(), frozenset(fields)), 0.0)
        elif what == "own":
            for name, count in counts.items():
                (take if count % 2 else turn)(here, name)
        else:
            before = {} if what == "whole" else fields.get(peer, {})
            fields[peer] = before | counts
            loads = {name: load(name, n, n, n) for name, n in counts.items()}
            here.handle(peer_report(peer, loads, whole=what == "whole"), 0.0)
        for name in NAMES:
            theirs = sum(counts.get(name, 0) for counts in fields.values())
            own, row = here.ledger.load(name), here.whole.of.at[name]
            assert here.whole.in_flight[row] == own.in_flight + theirs
            assert here.whole.backlog_tokens[row] == own.prefill_tokens + theirs
            assert here.whole.kv_taken_tokens[row] == own.kv_tokens + theirs >= 0


def test_only_what_moved_is_sent_and_what_left_is_sent_once(here: Replicas) -> None:
    shares = shares_of(here)
    shares.watched = True
    change, names = shares.moved(0)
    assert sorted(names) == list(NAMES)
    take(here, "g2", 2)
    change, names = shares.moved(change)
    assert names == ["g2"]
    assert shares.own("g2", here.ledger.load("g2")) == load("g2", 2, 0, 20, 2)
    here.adopt(view_of([replica("g1", slots=2), replica("g2", slots=2)]))
    change, names = shares.moved(change)
    assert names == ["g3"]
    assert not shares.own("g3", Load()).known
    assert shares.moved(change) == (change, [])


def test_a_single_instance_records_no_changes_and_sends_its_whole_share_to_the_first_peer(here: Replicas) -> None:
    shares = shares_of(here)
    begun, _ = shares.moved(0)
    take(here, "g2", 2)
    assert shares.moved(begun) == (begun, [])
    shares.watched = True
    assert sorted(shares.moved(0)[1]) == list(NAMES)
    assert shares.own("g2", here.ledger.load("g2")).in_flight == 2


def test_names_that_left_long_ago_are_not_kept() -> None:
    here = replicas_of()
    for n in range(2000):
        here.adopt(view_of([replica(f"x{n}")]))
    assert len(shares_of(here).moved(0)[1]) < 1200
    assert "x1999" in shares_of(here).moved(0)[1]


# -- turns


def test_a_balancer_reuses_its_freed_slot_a_bounded_number_of_times_while_a_peer_waits(here: Replicas) -> None:
    take(here, "g1")
    here.handle(peer_report("b", {"g1": load("g1")}, queued=5), 0.0)
    for _ in range(TURNS):
        assert room(here, "g1")
        turn(here, "g1")
    assert not room(here, "g1")
    assert room(here, "g2")  # it has not reported there that it dispatches
    here.handle(peer_report("b", {"g1": load("g1", 0, 0, 0, 1)}, queued=5), 0.0)
    assert room(here, "g1")  # it had its turn
    turn(here, "g1")
    assert not room(here, "g1")
    here.handle(peer_report("b", {}), 0.0)
    assert room(here, "g1")  # it does not wait any more


def test_peers_request_for_another_model_does_not_delay_own_requests(here: Replicas) -> None:
    here.handle(peer_report("b", {"g1": load("g1")}, queued=5, model=OTHER_MODEL), 0.0)
    take(here, "g1")
    for _ in range(3 * TURNS):
        turn(here, "g1")
    assert room(here, "g1")


def test_an_instance_that_does_not_use_its_turn_loses_it_until_its_next_request(here: Replicas) -> None:
    here.handle(peer_report("b", {"g1": load("g1")}, queued=5), 0.0)
    take(here, "g1", 2)
    for _ in range(TURNS):
        turn(here, "g1")
    here.handle(TurnTimerFired(), 9.0)
    here.handle(TurnTimerFired(), 10.0)
    assert not room(here, "g1")  # nothing was free there all the time
    here.ledger.release("q0")
    assert not room(here, "g1")  # ours, if b were not there
    assert here.handle(TurnTimerFired(), 11.0) == ""
    assert here.handle(TurnTimerFired(), 11.0 + HEAD_START_S / 2) == ""
    assert here.handle(TurnTimerFired(), 11.01 + HEAD_START_S) == "g1"
    assert room(here, "g1")
    turn(here, "g1")
    assert room(here, "g1")
    for _ in range(50):
        turn(here, "g1")
    here.handle(peer_report("b", {"g1": load("g1", 0, 0, 0, 1)}, queued=5), 11.2)  # it is there after all
    for taken in (2, 3, 4):
        for _ in range(TURNS if taken == 2 else 1):
            assert room(here, "g1")
            turn(here, "g1")
        assert not room(here, "g1")  # in turn, and not fifty of theirs for one of ours
        here.handle(peer_report("b", {"g1": load("g1", 0, 0, 0, taken)}, queued=5), 11.3)


def test_two_waiting_balancers_share_freed_slots() -> None:
    a, b = replicas_of("a", ("g1",)), replicas_of("b", ("g1",))
    taken = {"a": 0, "b": 0}

    def tell() -> None:
        for speaker, listener, name in ((a, b, "a"), (b, a, "b")):
            own = shares_of(speaker).own("g1", speaker.ledger.load("g1"))
            listener.handle(peer_report(name, {"g1": own}, queued=9), 0.0)

    take(a, "g1", 2)  # a was there first
    tell()
    for round_ in range(40):
        # The holder of a slot frees one, and would take it again at once; the other hears of it a little later.
        for name, known in (("a", a), ("b", b)) if round_ % 2 else (("b", b), ("a", a)):
            held = next((q for q in ("q0", "q1", "mine") if known.ledger.held(q) is not None), None)
            if held is None:
                continue
            known.ledger.release(held)
            for who, other in ((name, known), *((n, k) for n, k in (("a", a), ("b", b)) if k is not known)):
                if room(other, "g1") and other.ledger.held("mine") is None:
                    other.ledger.reserve("mine", Reservation("g1", 0, 10))
                    taken[who] += 1
                tell()
            assert a.ledger.load("g1").in_flight + b.ledger.load("g1").in_flight <= 2
    assert min(taken.values()) > 0.6 * max(taken.values()), taken


def test_waiting_elsewhere_is_counted_by_model_and_bounded(here: Replicas) -> None:
    shares = shares_of(here)
    here.handle(peer_report("b", {}, queued=5), 0.0)
    here.handle(peer_report("c", {}, queued=50), 0.0)
    assert (shares.queued(MODEL), shares.queued(MODEL, 10), shares.queued(OTHER_MODEL)) == (55, 15, 0)
    assert shares.status() == [("b", 0, 5), ("c", 0, 50)]


# -- ownership


def owned(known: Replicas) -> set[str]:
    return {name for name in known.view.replicas if shares_of(known).owns(name)}


@given(st.sets(st.sampled_from("abcde"), min_size=1), st.sampled_from("abcde"), st.booleans())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_every_replica_has_one_owner_and_few_move(members, other, drains) -> None:
    names = tuple(f"gpu-{n}" for n in range(12))

    def divided(live: set[str], draining: frozenset[str] = frozenset()) -> dict[str, str]:
        owners: dict[str, str] = {}
        for me in live | draining:
            known = replicas_of(me, names)
            for peer in (live | draining) - {me}:
                known.handle(all_idle(peer, names), 0.0)
            others = frozenset(live - {me})
            known.handle(PeersChanged(others, others, serving=me not in draining), 0.0)
            for name in owned(known):
                assert owners.setdefault(name, me) == me
        assert set(owners) == set(names)
        return owners

    before = divided(set(members))
    if other in members and len(members) == 1:
        return
    left = set(members) - {other}
    if other not in members:
        after, mover = divided(members | {other}), other
        assert all(after[name] in (before[name], mover) for name in names)
    else:
        after = divided(left, frozenset({other}) if drains else frozenset())
        assert all(before[name] in (after[name], other) for name in names)


def test_a_replica_that_no_serving_peer_has_at_the_same_address_is_owned_here(here: Replicas) -> None:
    assert owned(here) == set(NAMES)  # alone
    loads = {"g1": load("g1"), "g2": PeerLoad("another-host:1"), "g3": load("g3", known=False)}
    here.handle(peer_report("b", loads, whole=True), 0.0)
    assert owned(here) == set(NAMES)  # it reported something, but does not take part
    here.handle(PeersChanged(frozenset({"b"}), frozenset({"b"})), 0.0)
    assert {"g2", "g3"} <= owned(here)
    here.handle(PeersChanged(frozenset({"b"}), frozenset({"b"}), serving=False), 0.0)
    assert owned(here) == set()
    assert len(here.owned(here.able(MODEL, 0.0))) == 0


def test_a_silent_peer_that_still_reports_keeps_its_replicas(here: Replicas) -> None:
    here.handle(all_idle("b"), 0.0)
    here.handle(PeersChanged(frozenset({"b"}), frozenset({"b"})), 0.0)
    divided = owned(here)
    assert set() < divided < set(NAMES)
    here.handle(PeersChanged(frozenset({"b"}), frozenset()), 0.0)
    assert owned(here) == divided
    here.handle(PeersChanged(frozenset(), frozenset()), 0.0)
    assert owned(here) == set(NAMES)


# -- prefixes


def test_prefixes_cached_by_a_peer_are_known_and_passed_on_only_to_new_readers(here: Replicas) -> None:
    chain = request("p", 4096).chain
    here.handle(peer_report("b", {"g1": load("g1"), "g2": PeerLoad("another-host:1")}, whole=True), 0.0)
    cached = (Cached("g1", chain, None), Cached("g2", chain, None), Cached("unheard-of", chain, None))
    here.handle(peer_report("b", {}, cached=cached, epoch=1), 0.0)
    assert here.trie.match(chain) == {"g1": len(chain)}
    recent = shares_of(here).recent
    assert recent.read(0, 0, 100)[1] == []
    assert recent.read(0, recent.seq, 100)[1] == [Cached("g1", chain, None)]


def test_what_the_law_keeps_from_a_region_is_kept_from_it_by_every_instance(here: Replicas) -> None:
    here.journal.listen()
    begun = here.journal.seq
    chains = [request(name, 4096).chain for name in "xyz"]
    here.handle(peer_report("b", {"g1": load("g1")}, whole=True), 0.0)
    cached = tuple(Cached("g1", c, a) for c, a in zip(chains, (None, frozenset({"london"}), frozenset()), strict=True))
    here.handle(peer_report("b", {}, cached=cached, epoch=1), 0.0)

    def nodes_for(region: str) -> set[int]:
        return {node for change in here.journal.read(begun, region, 10**6)[1] for node in getattr(change, "nodes", ())}

    assert nodes_for("london") == {*chains[0], *chains[1]} - (set(chains[2]) - set(chains[0]) - set(chains[1]))
    assert not nodes_for("tokyo") & (set(chains[1]) - set(chains[0]))
    assert not nodes_for("london") & (set(chains[2]) - set(chains[0]) - set(chains[1]))
