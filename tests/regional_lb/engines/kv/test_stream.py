"""What becomes of numbered batches: in order, repeated, missing, of another process; whatever is lost on the way."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from regional_lb.engines.kv.stream import Follower
from regional_lb.fleet.kv_events import Cleared, Lost


def batch(n: int, life: int = 0) -> bytes:
    return f"{life}:{n}".encode()


def applied(follower: Follower, *seqs: int, life: int = 0) -> list[object]:
    out: list[object] = []
    for seq in seqs:
        got, missing = follower.on_batch(seq, batch(seq, life))
        out += got
        if missing:
            out.append("?")
    return out


def replay(follower: Follower, kept: list[bytes], first: int = 0) -> list[object]:
    """As often as it asks, all that is kept, which begins with number `first`."""
    out: list[object] = []
    for _ in range(5):
        start = follower.ask()
        for seq, payload in enumerate(kept, first):
            if seq < start:
                continue
            got, again = follower.replayed(seq, payload)
            out += got
            if again:
                break
        else:
            return out + follower.replay_ended()
    raise AssertionError("it asks for ever")


def test_from_the_first_event_on_all_is_known() -> None:
    follower = Follower()
    assert applied(follower, 0, 1, 2) == [Cleared(), batch(0), batch(1), batch(2)]


def test_a_late_subscriber_without_a_replay_has_lost_the_earlier_events() -> None:
    follower = Follower()
    assert applied(follower, 5) == ["?"]
    assert follower.give_up(5, batch(5)) == [Lost(), batch(5)]
    assert applied(follower, 6) == [batch(6)]


def test_a_replay_fills_a_gap_and_what_then_comes_twice_counts_once() -> None:
    follower = Follower()
    applied(follower, 0, 1)
    assert applied(follower, 4) == ["?"]
    assert replay(follower, [batch(n) for n in range(7)]) == [batch(n) for n in range(2, 7)]
    assert follower.give_up(4, batch(4)) == []
    assert applied(follower, 5, 6, 7) == [batch(7)]


def test_a_gap_that_is_not_kept_any_more_is_lost() -> None:
    follower = Follower()
    applied(follower, 0, 1)
    assert replay(follower, [batch(8), batch(9)], first=8) == [Lost(), batch(8), batch(9)]
    assert applied(follower, 10) == [batch(10)]


def test_numbers_that_fall_are_another_process() -> None:
    follower = Follower()
    applied(follower, 0, 1, 2)
    assert applied(follower, 0, 1, life=1) == [Cleared(), batch(0, 1), batch(1, 1)]
    assert applied(follower, 1, life=2) == [Cleared(), "?"]  # and its first message was missed
    assert replay(follower, [batch(0, 2), batch(1, 2)]) == [batch(0, 2), batch(1, 2)]


def test_another_process_that_has_published_as_much_is_found_out_by_its_events() -> None:
    follower = Follower()
    applied(follower, 0, 1)
    assert replay(follower, [batch(n, 1) for n in range(4)]) == [Cleared(), *(batch(n, 1) for n in range(4))]


def test_a_new_engine_process_without_events_holds_nothing() -> None:
    follower = Follower()
    applied(follower, 0, 1)
    assert replay(follower, []) == [Cleared()]
    assert replay(follower, []) == []
    assert applied(follower, 0, life=1) == [batch(0, 1)]


def test_the_same_process_after_a_cut_goes_on() -> None:
    follower = Follower()
    applied(follower, 0, 1)
    assert replay(follower, [batch(0), batch(1)]) == []
    assert applied(follower, 2) == [batch(2)]


def test_an_engine_without_events_holds_nothing() -> None:
    assert replay(Follower(), []) == [Cleared()]


def test_events_that_a_replay_drops_are_requested_again() -> None:
    follower = Follower()
    follower.ask()
    assert follower.replayed(0, batch(0)) == ([Cleared(), batch(0)], False)
    assert follower.replayed(3, batch(3)) == ([], True)
    assert follower.ask() == 0
    assert replay(follower, [batch(n) for n in range(4)]) == [batch(1), batch(2), batch(3)]


def test_without_a_replay_a_new_link_knows_nothing() -> None:
    follower = Follower()
    applied(follower, 0, 1)
    assert follower.lost() == [Lost()]
    assert applied(follower, 2) == ["?"]


_steps = st.lists(
    st.tuples(st.sampled_from(["say", "say", "say", "drop", "drop", "restart", "relink"]), st.integers(0, 3)),
    max_size=40,
)


@given(_steps, st.integers(1, 12), st.booleans())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_accepted_batches_are_those_of_the_engines_present_process(steps, keeps, replays) -> None:
    """Apart from restarts that nobody could notice, the batches believed are an end of its own, without a gap; and if
    no `Lost` came since `Cleared`, they are all of them."""
    follower = Follower()
    life, sent = 0, 0
    believed: list[bytes] = []
    whole = False

    def take(out: list[object]) -> None:
        nonlocal whole
        for one in out:
            if isinstance(one, bytes):
                believed.append(one)
            else:
                believed.clear()
                whole = isinstance(one, Cleared)

    def catch_up() -> None:
        first = max(0, sent - keeps)
        take(replay(follower, [batch(n, life) for n in range(first, sent)], first))

    for what, times in steps:
        if what in ("restart", "relink"):
            if what == "restart":
                life, sent = life + 1, 0
            # The link was cut, and is up again.
            if replays:
                catch_up()
            else:
                take(follower.lost())
            continue
        for _ in range(times):
            seq, sent = sent, sent + 1
            if what == "say":
                out, missing = follower.on_batch(seq, batch(seq, life))
                take(out)
                if missing:
                    if replays:
                        catch_up()
                    take(follower.give_up(seq, batch(seq, life)))
                assert believed == [batch(n, life) for n in range(sent - len(believed), sent)]
                assert believed
                assert not whole or len(believed) == sent
