"""The announcer's machine: playbooks, and what holds for any order of events."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entry_anycast.announcing.budget import BudgetConfig
from entry_anycast.announcing.machine import (
    Acknowledged,
    Announcer,
    Command,
    Distrusted,
    DrainChanged,
    Event,
    Exit,
    Fitness,
    KillSpeaker,
    MachineConfig,
    Observed,
    OthersChanged,
    Phase,
    Probed,
    SendUpdate,
    SetTimer,
    SpeakerLost,
    SpeakerStarted,
    StartSpeaker,
    StopAsked,
    TimerFired,
)

FIT, LEAVING, DEAD = (Probed(one, one) for one in Fitness)
CONFIG = MachineConfig(rise=2, fall=2, drain_s=30.0, settle_s=2.0)


@dataclass
class Play:
    """The machine on virtual time, with a speaker that does as it is told unless it is told not to."""

    config: MachineConfig = CONFIG
    willing: bool = True
    now: float = 1000.0
    machine: Announcer = field(init=False)
    phases_at: list[tuple[float, Phase]] = field(default_factory=list)
    log: list[tuple[float, Command]] = field(default_factory=list)
    timer: float = inf

    def __post_init__(self) -> None:
        self.machine = Announcer(self.config)

    def give(self, *events: Event) -> list[Command]:
        """What they made it command, timers apart."""
        found: list[Command] = []
        for event in events:
            commands = self.machine.handle(event, self.now)
            self.timer = inf
            for one in commands:
                self.log.append((self.now, one))
                if isinstance(one, SetTimer):
                    self.timer = one.at
                    continue
                found.append(one)
                if isinstance(one, SendUpdate):
                    self.phases_at.append((self.now, one.phase))
            for one in commands:
                if isinstance(one, StartSpeaker):
                    found += self.give(SpeakerStarted())
                elif isinstance(one, SendUpdate) and self.willing:
                    found += self.give(Acknowledged(one.number))
                elif isinstance(one, KillSpeaker):
                    found += self.give(SpeakerLost(one.why))
        return found

    def wait(self, seconds: float) -> list[Command]:
        """Let time go by, with its timers."""
        end, found = self.now + seconds, []
        while self.timer <= end:
            self.now = max(self.now, self.timer)
            found += self.give(TimerFired())
        self.now = end
        return found

    def phases(self) -> list[Phase]:
        return [phase for _, phase in self.phases_at]


def announced(config: MachineConfig = CONFIG, others: int | None = 2) -> Play:
    play = Play(config)
    play.give(OthersChanged(others), FIT, FIT)
    assert play.machine.phase is Phase.ANNOUNCED
    return play


def test_an_entry_is_announced_and_withdrawn_by_consecutive_probes() -> None:
    play = Play()
    assert play.give(FIT) == [StartSpeaker()]
    assert play.give(DEAD, FIT) == []
    assert play.give(FIT) == [SendUpdate(1, Phase.ANNOUNCED)]
    assert play.give(OthersChanged(1), DEAD, FIT, DEAD) == []
    assert not play.machine.healthy
    assert play.give(DEAD) == [SendUpdate(2, Phase.WITHDRAWN)]  # the dead are not drained


def test_one_probe_without_an_answer_in_time_withdraws_and_one_refusal_does_not() -> None:
    assert announced().give(DEAD) == [], "refused once"
    play = announced()
    assert play.give(Probed(Fitness.DEAD, "it does not answer", silent=True)) == [SendUpdate(2, Phase.WITHDRAWN)]


def test_an_entry_that_leaves_is_drained_then_withdrawn() -> None:
    play = announced()
    assert play.give(LEAVING, LEAVING) == [SendUpdate(2, Phase.DRAINING)]
    assert play.wait(29.9) == []
    assert play.wait(0.2) == [SendUpdate(3, Phase.WITHDRAWN)]


def test_an_operators_drain_comes_and_goes() -> None:
    play = announced()
    assert play.give(DrainChanged("new kernel")) == [SendUpdate(2, Phase.DRAINING)]
    assert play.machine.why_not == "drained: new kernel"
    assert play.give(DrainChanged(None)) == [SendUpdate(3, Phase.ANNOUNCED)]
    # The window's changes are used up: the next drain is not announced; it only waits, and may be undone unseen.
    assert play.give(DrainChanged("again"), DrainChanged(None)) == []
    assert play.give(DrainChanged("again")) == []
    assert play.wait(31.0) == [SendUpdate(4, Phase.WITHDRAWN)]


def test_a_withdrawn_entry_is_announced_when_its_hold_is_over_and_each_time_later() -> None:
    play = announced()
    went = []
    for _ in range(4):
        play.give(DEAD, DEAD)
        went.append(play.now)
        assert play.give(FIT, FIT) == []
        held = play.machine.held_s(play.now)
        assert [one.phase for one in play.wait(held + 0.1)] == [Phase.ANNOUNCED]
        went.append(held)
    assert went[1::2] == pytest.approx([900.0, 1800.0, 3600.0, 7200.0], abs=1.0)
    play.wait(1000.0)  # it was stable: everything is forgotten
    play.give(DEAD, DEAD)
    assert play.machine.held_s(play.now) == pytest.approx(900.0)


def test_the_last_healthy_site_stays_by_policy() -> None:
    play = announced(others=0)
    assert play.give(DEAD, DEAD, DrainChanged("x")) == []
    assert play.machine.kept_as_last
    assert play.give(OthersChanged(1)) == [SendUpdate(2, Phase.WITHDRAWN)]
    # No other site is left: the hold is skipped, once in a window.
    assert play.give(DrainChanged(None), FIT, FIT, OthersChanged(0)) == [SendUpdate(3, Phase.ANNOUNCED)]
    assert play.give(OthersChanged(1), DEAD, DEAD) == [SendUpdate(4, Phase.WITHDRAWN)]
    assert play.give(FIT, FIT, OthersChanged(0)) == []
    assert [one.phase for one in play.wait(900.0)] == [Phase.ANNOUNCED]


@pytest.mark.parametrize(
    ("policy", "others", "kept"),
    [
        ("withdraw", 0, False),
        ("keep", 0, True),
        ("keep", None, False),
        ("keep", 1, False),
        ("keep_unknown", None, True),
    ],
)
def test_the_last_sites_policy_decides_when_other_sites_are_unknown(policy, others, kept) -> None:
    play = announced(MachineConfig(rise=2, fall=2, last_site=policy), others)
    assert bool(play.give(DEAD, DEAD)) is not kept


def test_a_stop_drains_withdraws_settles_and_exits() -> None:
    play = announced(others=0)  # also the last one: an ending process takes its routes along
    assert play.give(StopAsked()) == [SendUpdate(2, Phase.DRAINING)]
    assert play.wait(30.0) == [SendUpdate(3, Phase.WITHDRAWN)]
    assert play.wait(1.9) == []
    assert play.wait(0.2) == [Exit()]
    assert play.wait(1e6) == []
    assert Play().give(StopAsked()) == [Exit()]


def test_a_speaker_that_does_not_acknowledge_is_killed() -> None:
    play = announced()
    play.willing = False
    play.give(DEAD, DEAD)
    assert play.wait(0.9) == []
    play.willing = True
    assert play.wait(0.2)[0] == KillSpeaker("it did not acknowledge within 1 s")
    assert play.wait(10.0) == [StartSpeaker()]


def test_the_announced_state_is_compared_with_the_wanted_one() -> None:
    play = announced()
    assert play.give(Observed(Phase.ANNOUNCED, 1)) == []
    assert play.machine.differs_since is None
    play.give(Observed(Phase.ANNOUNCED, 0))  # no session: no neighbour hears it. No reason to kill a process.
    assert play.machine.differs_since == play.now
    play.give(DEAD, DEAD, Observed(Phase.ANNOUNCED, 1))
    assert play.machine.speaker == "up"  # the withdrawal may take its time
    play.wait(1.5)
    assert isinstance(play.give(Observed(Phase.ANNOUNCED, 1))[0], KillSpeaker)


def test_a_lost_speaker_takes_the_route_and_the_hold_counts() -> None:
    play = announced()
    play.give(SpeakerLost("killed"))
    assert play.machine.phase is Phase.WITHDRAWN
    assert play.wait(5.0) == [StartSpeaker()]
    assert play.machine.held_s(play.now) == pytest.approx(895.0)
    assert isinstance(play.give(Distrusted("silent"))[0], KillSpeaker)


EVENTS = st.one_of(
    st.sampled_from([FIT, FIT, FIT, LEAVING, DEAD, DrainChanged("x"), DrainChanged(None)]),
    st.sampled_from([OthersChanged(0), OthersChanged(1), OthersChanged(None)]),
    st.sampled_from([SpeakerLost("x"), Distrusted("x"), Observed(Phase.ANNOUNCED, 1), Observed(Phase.WITHDRAWN, 0)]),
)
STEPS = st.lists(st.tuples(EVENTS, st.sampled_from([0.0, 0.0, 0.5, 20.0, 40.0, 300.0, 1000.0])), max_size=80)


@given(STEPS, st.sampled_from(["withdraw", "keep", "keep_unknown"]), st.booleans())
@settings(max_examples=250, deadline=None, derandomize=True)
def test_budget_guard_and_fitness_hold_for_any_order(steps, policy, willing) -> None:
    play = Play(MachineConfig(rise=1, fall=1, last_site=policy))
    play.willing = willing
    for event, wait_s in steps:
        before = len(play.phases_at)
        play.give(event)
        _holds(play, before)
        before = len(play.phases_at)
        play.wait(wait_s)
        _holds(play, before)
    window_s = play.config.budget.window_s
    for start, _ in play.phases_at:
        within = [phase for at, phase in play.phases_at if start <= at < start + window_s]
        gone = within.count(Phase.WITHDRAWN)
        assert gone <= (1 if policy == "withdraw" else 2)
        assert len(within) <= 2 * gone + 4


def _holds(play: Play, before: int) -> None:
    machine = play.machine
    if machine.last:
        assert Phase.WITHDRAWN not in play.phases()[before:]
    if machine.fitness is Fitness.DEAD and not machine.last and machine.speaker == "up":
        assert machine.phase is Phase.WITHDRAWN


@given(STEPS)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_stop_always_ends(steps) -> None:
    play = Play(MachineConfig(rise=1, fall=1))
    for event, wait_s in steps:
        play.give(event)
        play.wait(wait_s)
    play.willing = False
    play.give(StopAsked())
    config = play.config
    play.wait(config.drain_s + config.settle_s + 3 * config.ack_s)
    assert play.machine.exited
    assert play.machine.phase is Phase.WITHDRAWN


def test_a_flapping_probe_makes_few_updates() -> None:
    play = announced(MachineConfig(rise=1, fall=1))
    for n in range(4 * 3600):
        play.give(DEAD if n % 2 else FIT)
        play.wait(1.0)
    # Four hours: held for 15, 30, 60 and 120 minutes, and gone again each time at once.
    assert play.phases().count(Phase.WITHDRAWN) <= 5


def test_a_hold_of_the_process_before_still_counts() -> None:
    play = Play()
    play.machine.budget.remember(600.0, 1, play.now)
    assert play.give(OthersChanged(1), FIT, FIT) == [StartSpeaker()]
    assert play.wait(599.0) == []
    assert [one.phase for one in play.wait(2.0)] == [Phase.ANNOUNCED]


def test_without_changes_a_drain_only_waits() -> None:
    play = announced(MachineConfig(rise=1, fall=1, budget=BudgetConfig(changes=0)))
    assert play.give(DrainChanged("x")) == []
    assert play.wait(31.0) == [SendUpdate(2, Phase.WITHDRAWN)]
