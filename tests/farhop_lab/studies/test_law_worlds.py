"""Random worlds of laws: none breaks the law, everything happens in them, and a break of the law is seen.

The suite plays some; `farhop bench law --worlds 1000000` plays as many as one likes, and each number is one world.
"""

from __future__ import annotations

from typing import Any

import pytest

from farhop.balance.prefix.journal import Journal
from farhop_lab.studies import law_worlds
from farhop_lab.studies.law_worlds import play, prove
from global_lb.routing.flow import GlobalFlow
from regional_lb.fleet.recent import Recent
from regional_lb.scheduler import admission
from topology import law

WORLDS = 60
BROKEN_ONCE = (7000494, 7018341)  # worlds in which the law was broken: by a router, and by the world that judged it
HAPPENS = (
    "read", "sent", "computed", "told", "told to a peer", "kept", "restarted", "mended", "exchanged",
    "hub wiped", "hub restored", "hub lost", "hub found", "law set", "law older", "law broken", "law unsigned",
    "law forged", "law_unsigned", "law_not_allowed", "law_unknown_key", "law_bad_signature", "law_malformed",
    "law_older", "law_gone", "law_unproven", "unknown_key", "entry_forbidden", "unlawful_here", "no_lawful_region",
    "broken", "resumed by a global balancer", "resumed by a regional balancer",
)  # fmt: skip


def test_no_byte_is_sent_where_the_law_forbids_it() -> None:
    seen, violations = play(range(WORLDS))
    assert violations == []
    assert play(BROKEN_ONCE)[1] == []
    assert [what for what in HAPPENS if not seen[what]] == [], "a test of what never happens"


def _wakes_only(self: Any, under: Any, now: float) -> Any:
    self.law = under
    return self._wake(now)


_changed = GlobalFlow._changed


def _binds_nothing(self: Any, region: str, change: Any, now: float) -> Any:
    """What reports tell of bases is known, and its rules hold only from the next law on."""
    before = self.law
    commands = _changed(self, region, change, now)
    self.law = before
    return commands


@pytest.mark.parametrize(
    ("whose", "what", "instead"),
    [
        (law._Reach, "lost_by_keys", lambda *_, same_map: 0),
        (law.Law, "knowing", lambda under, _lineage: under),
        (law.Law, "_relearned", lambda *_: []),
        (law_worlds.Disk, "load", lambda *_: None),
        (law_worlds, "KEYS", law_worlds.NO_KEYS),
        (Journal, "narrowed", lambda _journal: None),
        (Recent, "narrowed", lambda _recent: None),
        (GlobalFlow, "_apply_law", _wakes_only),
        (GlobalFlow, "_changed", _binds_nothing),
        (admission, "unlawful", lambda *_: None),
    ],
)
def test_violations_of_the_law_are_detected(
    monkeypatch: pytest.MonkeyPatch, whose: Any, what: str, instead: Any
) -> None:
    monkeypatch.setattr(whose, what, instead)
    assert any(play([number])[1] for number in range(WORLDS))


def test_a_law_world_is_determined_by_its_number() -> None:
    assert play(range(7, 9)) == play(range(7, 9))


def test_many_are_played_by_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(law_worlds, "SLICE", 2)
    events: list[str] = []
    played, seen, violations = prove(0, 4, 1, events.append)
    assert (played, violations, events) == (4, [], ["2 of 4 worlds", "4 of 4 worlds"])
    assert seen == play(range(4))[0]
