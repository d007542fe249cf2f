"""The clients' requests in a trial, and the true times of the engines.

A light, symmetric, open load: every region's clients send PER_REPLICA_S requests a second for each of its replicas
(Poisson), every prompt PROMPT_BYTES long and like no other (nothing is ever cached), every answer ANSWER_TOKENS long.
All replicas are one kind of GPU. So the fair share is well defined:

- a region's is what its own clients ask: it has room for all of it, and any other is a round trip away;
- a replica's is an equal part of what its region serves.

Sizes: a prompt takes 96 ms of an A100, long enough that the decode step before it (13 ms) is small beside it; an answer
takes some 0.5 s, so that a replica has half a request in the mean, and a prefill is under way 10 % of the time. Never
judges.
"""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from farhop_lab.chaos.schedule import WARM_S
from farhop_lab.engine.core.profiles import PROFILES
from farhop_lab.sim.sites import flat, gpus
from farhop_lab.sim.world import World

if TYPE_CHECKING:
    from collections.abc import Iterable

    from farhop_lab.chaos.schedule import Schedule
    from farhop_lab.sim.engines import Timing

TENANT = "t"
GPU = PROFILES["a100"]
RTT_MS = 60.0
PROMPT_BYTES, PROMPT_TOKENS, ANSWER_TOKENS = 4000, 1000, 32
PER_REPLICA_S = 1.0
SERVED_WITHIN_S = 10.0  # an answer takes 0.5 s; a request that is open for this long is not being served
STOOD_S = 5.0


class EngineTimings:
    """The true times of the engines, by region and replica, of answers to requests sent since `since_s`."""

    def __init__(self) -> None:
        self.since_s = WARM_S
        self.by: dict[tuple[str, str], list[Timing]] = {}

    def timed(self, region: str, replica: str, timing: Timing) -> None:
        """Add an answer."""
        if timing.sent_at >= self.since_s:
            self.by.setdefault((region, replica), []).append(timing)

    def forget(self, since_s: float) -> None:
        """From now on only requests sent later count."""
        self.since_s = since_s
        self.by.clear()

    def count(self, region: str, replica: str) -> int:
        """Answers of one replica."""
        return len(self.by.get((region, replica), ()))


def tpot_ms(answers: Iterable[Timing]) -> float:
    """Milliseconds between tokens in the mean."""
    return fmean((t.ended_at - t.began_at) * 1e3 / (t.usage.completion_tokens - 1) for t in answers)


def service_ms(answers: Iterable[Timing]) -> float:
    """Milliseconds from dispatch to end in the mean."""
    return fmean((t.ended_at - t.sent_at) * 1e3 for t in answers)


def prefill_ms_per_token() -> float:
    """Of such a prompt, alone, by the engine's timing model."""
    return GPU.step_ms(GPU.prefill_ms(PROMPT_TOKENS), 0) / PROMPT_TOKENS


def world_of(schedule: Schedule, truth: EngineTimings) -> World:
    """The schedule's world before its first moment, without faults and requests."""
    names = schedule.names
    return World(
        schedule.seed,
        flat(names, RTT_MS),
        {name: gpus(GPU.name, schedule.replicas, seed=schedule.seed) for name in names},
        stood_s=STOOD_S,
        timed=truth.timed,
    )


class OpenLoad:
    """Sends requests until it is stopped."""

    def __init__(self, world: World, schedule: Schedule) -> None:
        self._world, self._rate = world, PER_REPLICA_S * schedule.replicas
        self._dice = {name: world.rng(f"chaos clients of {name}") for name in schedule.names}
        self._asking = True
        for name in schedule.names:
            self._next(name)

    def stop(self) -> None:
        """Stop sending."""
        self._asking = False

    def _next(self, name: str) -> None:
        self._world.at(max(0.0, self._world.now) + self._dice[name].expovariate(self._rate), self._ask, name)

    def _ask(self, name: str) -> None:
        if self._asking:
            self._world.arrive(name, TENANT, PROMPT_BYTES, max_tokens=ANSWER_TOKENS, answer_tokens=ANSWER_TOKENS)
            self._next(name)
