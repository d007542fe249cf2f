from __future__ import annotations

from random import Random

import pytest

from farhop.balance.machine import Usage
from farhop_lab.sim.sites import flat
from farhop_lab.sim.timeline import Timeline
from farhop_lab.sim.wire import STREAMED_BYTES, Wire, answer_bytes


class Sea:
    """A wire between two regions 100 ms apart, and what arrived when."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.wire = Wire(flat(["a", "b"], 100.0), self.timeline)
        self.got: list[tuple[float, str]] = []

    def send(self, what: str, a: str = "a", b: str = "b") -> None:
        self.wire.send(a, b, lambda: self.got.append((round(self.timeline.now, 6), what)))


def test_each_way_takes_half_a_round_trip() -> None:
    sea = Sea()
    sea.send("there")
    sea.send("back", "b", "a")
    sea.send("home", "a", "a")
    sea.timeline.run(1.0)
    assert sea.got == [(0.0005, "home"), (0.05, "there"), (0.05, "back")]


def test_a_frozen_link_keeps_all_and_delivers_it_in_order_when_healed() -> None:
    sea = Sea()
    sea.send("before")
    sea.wire.freeze("a", "b")
    sea.wire.freeze("b", "a")
    sea.send("first")
    sea.send("second")
    sea.send("answer", "b", "a")
    sea.timeline.run(2.0)
    assert sea.got == [(0.05, "before")]
    assert sea.wire.frozen_since("a", "b") == 0.0
    sea.wire.heal("a", "b")
    sea.send("third")
    sea.timeline.run(3.0)
    assert sea.wire.frozen_since("b", "a") is None
    assert [what for at, what in sea.got[1:] if at == 2.05] == ["first", "second", "answer", "third"]


def test_messages_stay_in_order_when_the_path_gets_shorter() -> None:
    sea = Sea()
    sea.send("slow")
    sea.wire.set_rtt("a", "b", 10.0)
    sea.send("fast")
    sea.timeline.run(0.5)
    sea.send("later")
    sea.timeline.run(1.0)
    assert sea.got == [(0.05, "slow"), (0.05, "fast"), (0.505, "later")]
    assert sea.wire.rtt_ms("b", "a") == 10.0


def test_unknown_wires_and_negative_delays_are_refused() -> None:
    sea = Sea()
    with pytest.raises(ValueError, match="rtt_ms"):
        sea.wire.set_rtt("a", "b", -1.0)
    with pytest.raises(KeyError):
        sea.send("nowhere", "a", "atlantis")


def test_a_disturbed_wire_takes_longer_wanders_and_keeps_the_order() -> None:
    timeline = Timeline()
    wire = Wire(flat(["a", "b"], 100.0), timeline)
    wire.disturb(Random(1), 0.5, 0.2, 1.0)
    came: list[tuple[int, float]] = []
    rtts: set[float] = set()
    for n in range(200):
        timeline.at(n * 0.05, lambda n=n: wire.send("a", "b", lambda: came.append((n, timeline.now - n * 0.05))))
        timeline.at(n * 0.05, lambda: rtts.add(wire.rtt_ms("a", "b")))
    timeline.run(20.0)
    assert [n for n, _ in came] == list(range(200))
    assert len(rtts) > 5
    assert all(80.0 <= rtt <= 120.0 for rtt in rtts)
    assert all(0.040 <= took <= 0.0901 for _, took in came)
    assert max(took for _, took in came) > 0.060
    with pytest.raises(ValueError, match="drift"):
        wire.disturb(Random(1), 0.0, 1.0, 1.0)


def test_bytes_are_counted_each_way_where_they_leave_a_region() -> None:
    sea = Sea()
    for a, b, n_bytes in (("a", "b", 700), ("a", "b", 50), ("b", "a", 3), ("a", "a", 10_000)):
        sea.wire.carry(a, b, n_bytes)
    assert sea.wire.carried == {("a", "b"): 750, ("b", "a"): 3}
    assert (answer_bytes(Usage(1000, 20)), answer_bytes(None)) == (20 * STREAMED_BYTES, 0)


def test_a_black_hole_swallows_what_is_sent_and_kills_connections_from_before_its_end() -> None:
    timeline, came = Timeline(), list[str]()
    wire = Wire(flat(["a", "b"], 100.0), timeline)
    wire.send("a", "b", came.append, "under way")
    wire.blackhole("a", "b")
    assert wire.swallows("a", "b")
    assert wire.swallows("b", "a")
    assert wire.frozen_since("b", "a") == 0.0
    wire.send("a", "b", came.append, "swallowed")
    timeline.run(5.0)
    wire.heal("b", "a")
    assert not wire.swallows("a", "b")
    wire.send_on(1.0, "a", "b", came.append, "on a connection from before")
    wire.send_on(5.0, "a", "b", came.append, "on a new one")
    wire.send("b", "a", came.append, "on none")
    timeline.run(9.0)
    assert came == ["under way", "on a new one", "on none"]
