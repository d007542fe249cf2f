"""The wire's arithmetic in virtual time: order, delay, jitter, bandwidth, freeze."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop_lab.wan.shaper import CHUNK_OVERHEAD_BYTES, TAKE_BYTES_MAX, Direction, LinkSettings, Shaper, Signal


def shaper(wire: LinkSettings, direction: Direction | None = None) -> Shaper:
    return Shaper(wire, direction or Direction(), Random(3))


def test_a_chunk_leaves_after_the_delay_and_not_before() -> None:
    one = shaper(LinkSettings(0.1, 0.0))
    one.put(b"a", 5.0)
    assert one.due == pytest.approx(5.1)
    assert one.take(5.0999) is None
    assert one.take(5.1001) == b"a"
    assert one.take(9.0) is None
    assert one.queued_bytes == 0


def test_chunks_due_together_leave_together_but_not_past_a_mark() -> None:
    one = shaper(LinkSettings(0.1, 0.0))
    for item in (b"a", b"b", Signal.END, b"c"):
        one.put(item, 0.0)
    assert [one.take(1.0) for _ in range(4)] == [b"ab", Signal.END, b"c", None]


def test_burst_of_the_shaper_is_bounded() -> None:
    one = shaper(LinkSettings(0.0, 0.0))
    for _ in range(5):
        one.put(bytes(TAKE_BYTES_MAX // 2), 0.0)
    sizes = []
    while (item := one.take(1.0)) is not None:
        assert isinstance(item, bytes)
        sizes.append(len(item))
    assert sizes == [TAKE_BYTES_MAX, TAKE_BYTES_MAX, TAKE_BYTES_MAX // 2]


def test_the_overhead_of_tiny_chunks_counts_towards_the_queue() -> None:
    one = shaper(LinkSettings(1.0, 0.0))
    for _ in range(100):
        one.put(b"x", 0.0)
    assert one.queued_bytes == 100 * (1 + CHUNK_OVERHEAD_BYTES)
    one.clear()
    assert one.queued_bytes == 0
    assert one.due is None


def test_jitter_is_uniform_around_the_delay() -> None:
    one = shaper(LinkSettings(0.1, 0.01))
    delays = []
    for now in range(2000):  # a second apart: none waits for the one before
        one.put(b"x", float(now))
        due = one.due
        assert due is not None
        delays.append(due - now)
        one.take(due)
    assert min(delays) >= 0.09 - 1e-9
    assert max(delays) <= 0.11 + 1e-9
    assert sum(delays) / len(delays) == pytest.approx(0.1, abs=0.001)
    assert sum(d < 0.095 for d in delays) == pytest.approx(500, abs=75)


def test_jitter_beyond_the_delay_does_not_go_back_in_time() -> None:
    one = shaper(LinkSettings(0.001, 1.0))
    for now in range(50):
        one.put(b"x", float(now * 10))
        assert one.due is not None
        assert one.due >= now * 10
        one.take(one.due)


def test_a_shorter_delay_does_not_overtake() -> None:
    wire = LinkSettings(0.2, 0.0)
    one = shaper(wire)
    one.put(b"slow", 0.0)
    wire.delay_s = 0.01
    one.put(b"fast", 0.05)
    assert one.take(0.1) is None
    assert one.take(0.2) == b"slowfast"


def test_bandwidth_is_shared_by_the_connections_of_a_line() -> None:
    wire, direction = LinkSettings(0.1, 0.0, bytes_per_s=1000.0), Direction()
    first, second = shaper(wire, direction), shaper(wire, direction)
    first.put(bytes(500), 0.0)
    second.put(bytes(500), 0.0)
    assert first.due == pytest.approx(0.6)
    assert second.due == pytest.approx(1.1)
    second.put(bytes(100), 10.0)  # the wire has long been free again
    assert second.take(1.2) == bytes(500)
    assert second.due == pytest.approx(10.2)


def test_frozen_shaper_holds_everything_and_sends_it_when_thawed() -> None:
    wire = LinkSettings(0.1, 0.0)
    one = shaper(wire)
    one.put(b"before", 0.0)
    wire.frozen = True
    one.put(b"within", 0.5)
    assert one.due is None
    assert one.take(100.0) is None
    wire.frozen = False
    one.thaw(3.0)
    assert one.due == pytest.approx(3.1)
    one.put(b"after", 3.05)
    assert one.take(3.12) == b"beforewithin"
    assert one.take(3.2) == b"after"


def test_a_thawed_link_delivers_nothing_earlier_than_due() -> None:
    wire = LinkSettings(1.0, 0.0)
    one = shaper(wire)
    one.put(b"x", 0.0)
    wire.delay_s = 0.01
    one.thaw(0.5)
    assert one.due == pytest.approx(1.0)


def test_a_lost_connection_delivers_nothing_after_a_thaw() -> None:
    wire = LinkSettings(0.1, 0.0)
    one = shaper(wire)
    one.lost = True
    one.put(b"x", 0.0)
    one.thaw(1.0)
    assert one.due is None
    assert one.take(9.0) is None


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.binary(min_size=1, max_size=40)),
        st.tuples(st.just("signal"), st.sampled_from([Signal.OPEN, Signal.ANSWER])),
        st.tuples(st.just("take"), st.just(0)),
        st.tuples(st.just("delay"), st.floats(0.0, 0.5)),
        st.tuples(st.just("jitter"), st.floats(0.0, 0.5)),
        st.tuples(st.just("rate"), st.sampled_from([None, 100.0, 1e6])),
        st.tuples(st.just("freeze"), st.just(0)),
        st.tuples(st.just("heal"), st.just(0)),
        st.tuples(st.just("wait"), st.floats(0.0, 0.3)),
    ),
    max_size=80,
)


@given(STEPS, st.integers(0, 2**32))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_output_equals_input_under_any_changes(steps: list[tuple[str, object]], seed: int) -> None:
    wire = LinkSettings(0.05, 0.01)
    one = Shaper(wire, Direction(), Random(seed))
    now, put, took = 0.0, [], []

    def taken() -> None:
        while (item := one.take(now)) is not None:
            assert not wire.frozen
            took.append(item)

    for step, value in steps:
        match step, value:
            case (("put" | "signal"), (bytes() | Signal())):
                put.append(value)
                one.put(value, now)
                assert one.due is None or one.due >= now or len(put) > 1
            case "take", _:
                taken()
            case "delay", float():
                wire.delay_s = value
            case "jitter", float():
                wire.jitter_s = value
            case "rate", (None | float()):
                wire.bytes_per_s = value
            case "freeze", _:
                wire.frozen = True
            case "heal", _ if wire.frozen:
                wire.frozen = False
                one.thaw(now)
            case "wait", float():
                now += value
        assert flat(took) == flat(put)[: len(flat(took))]
    if wire.frozen:
        wire.frozen = False
        one.thaw(now)
    now += 1e6
    taken()
    assert flat(took) == flat(put)
    assert one.queued_bytes == 0


def flat(items: list[object]) -> list[object]:
    return [part for item in items for part in (item if isinstance(item, bytes) else [item])]  # type: ignore[attr-defined]
