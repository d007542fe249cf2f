from __future__ import annotations

import pytest

from farhop_lab.sim.scenery import flat
from farhop_lab.sim.timeline import Timeline
from farhop_lab.sim.wire import Wire


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


def test_a_shorter_path_lets_nothing_overtake() -> None:
    sea = Sea()
    sea.send("slow")
    sea.wire.set_rtt("a", "b", 10.0)
    sea.send("fast")
    sea.timeline.run(0.5)
    sea.send("later")
    sea.timeline.run(1.0)
    assert sea.got == [(0.05, "slow"), (0.05, "fast"), (0.505, "later")]
    assert sea.wire.rtt_ms("b", "a") == 10.0


def test_no_such_wire() -> None:
    sea = Sea()
    with pytest.raises(ValueError, match="rtt_ms"):
        sea.wire.set_rtt("a", "b", -1.0)
    with pytest.raises(KeyError):
        sea.send("nowhere", "a", "atlantis")
