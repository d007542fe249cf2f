"""Replicas in virtual time: the live engine's own scheduler, or a station of fixed service for control experiments.

Invariants: a job hears `first` once and then `done` once, or nothing more after it was aborted; a `Gpu` has the physics
of the live engine, since it is the same core. Never chooses, never refuses but at its bound.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

from farhop.balance.machine import Usage
from farhop_lab.engine.core import EngineCore, EngineFullError
from farhop_lab.engine.sequence import Sequence, Wanted
from farhop_lab.engine.text import token_count

if TYPE_CHECKING:
    from farhop_lab.engine.core import Step
    from farhop_lab.engine.profiles import Profile
    from farhop_lab.engine.sequence import Voice
    from farhop_lab.sim.timeline import Call, Timeline

WAITING_MAX = 8192


class Job(Protocol):
    """Who waits for an answer. `answer_tokens`: how long it will be, None for as long as the model likes."""

    id: str
    prompt: bytes
    max_tokens: int | None
    answer_tokens: int | None

    def first(self) -> None:
        """The first token is out."""

    def done(self, usage: Usage) -> None:
        """The answer is whole."""


class Engine(Protocol):
    """One replica."""

    def submit(self, job: Job) -> bool:
        """Begin, or put it in line; False if the line is full or the job can never fit."""

    def abort(self, job_id: str) -> None:
        """Stop at once; harmless for what has ended."""

    def metrics(self) -> tuple[int, int, float]:
        """What a scrape says: waiting, running, share of the KV cache in use."""


class Station:
    """`slots` servers with one line: the first token after `first_s`, the end after `service_s`, whatever is asked."""

    def __init__(self, timeline: Timeline, slots: int, service_s: float, first_s: float, answer_tokens: int) -> None:
        if slots < 1 or answer_tokens < 1 or not 0.0 <= first_s <= service_s:
            raise ValueError(
                f"slots {slots} and answer_tokens {answer_tokens} must be 1 or more, and first_s {first_s} within 0 "
                f"and service_s {service_s}"
            )
        self._timeline, self._slots = timeline, slots
        self._service_s, self._first_s, self._answer_tokens = service_s, first_s, answer_tokens
        self._waiting: deque[Job] = deque()
        self._running: dict[str, tuple[Call, Call]] = {}

    def submit(self, job: Job) -> bool:
        """See Engine."""
        if len(self._running) < self._slots:
            self._start(job)
        elif len(self._waiting) < WAITING_MAX:
            self._waiting.append(job)
        else:
            return False
        return True

    def _start(self, job: Job) -> None:
        after = self._timeline.after
        self._running[job.id] = (after(self._first_s, job.first), after(self._service_s, self._end, job))

    def _end(self, job: Job) -> None:
        del self._running[job.id]
        self._next()
        job.done(Usage(token_count(job.prompt), job.answer_tokens or self._answer_tokens))

    def _next(self) -> None:
        if self._waiting:
            self._start(self._waiting.popleft())

    def abort(self, job_id: str) -> None:
        """See Engine."""
        calls = self._running.pop(job_id, None)
        if calls is None:
            self._waiting = deque(job for job in self._waiting if job.id != job_id)
            return
        for call in calls:
            call.cancel()
        self._next()

    def metrics(self) -> tuple[int, int, float]:
        """See Engine. The KV cache is taken as its slots."""
        return len(self._waiting), len(self._running), len(self._running) / self._slots


class Gpu:
    """The live engine's core, stepped as its driver steps it."""

    def __init__(self, timeline: Timeline, profile: Profile, voice: Voice) -> None:
        self._timeline, self._profile, self._voice = timeline, profile, voice
        self._core = EngineCore(profile, waiting_max=WAITING_MAX)
        self._jobs: dict[str, tuple[Job, Sequence, bool]] = {}
        self._stepping = False

    def submit(self, job: Job) -> bool:
        """See Engine."""
        exact = job.answer_tokens
        try:
            wanted = Wanted(job.prompt, exact or job.max_tokens, ignore_eos=exact is not None)
            sequence = Sequence(job.id, wanted, self._voice, self._profile)
            self._core.submit(sequence, self._timeline.now)
        except (EngineFullError, ValueError):
            return False
        self._jobs[job.id] = (job, sequence, False)
        if not self._stepping:
            self._stepping = True
            # Not at once: requests that arrive at one moment share the first pass.
            self._timeline.after(0.0, self._begin)
        return True

    def _begin(self) -> None:
        self._stepping = self._core.has_work
        if self._stepping:
            step = self._core.step(self._timeline.now)
            self._timeline.after(step.duration_ms / 1e3, self._end, step)

    def _end(self, step: Step) -> None:
        self._core.settle()
        for emission in step.emissions:
            known = self._jobs.get(emission.id)
            if known is None:
                continue
            job, sequence, begun = known
            if not begun:
                self._jobs[emission.id] = (job, sequence, True)
                job.first()
            if emission.finished is not None and self._jobs.pop(emission.id, None) is not None:
                job.done(Usage(sequence.prompt_tokens, sequence.output_tokens, sequence.cached_tokens))
        self._begin()

    def abort(self, job_id: str) -> None:
        """See Engine."""
        self._jobs.pop(job_id, None)
        self._core.abort(job_id)

    def metrics(self) -> tuple[int, int, float]:
        """See Engine."""
        return self._core.waiting, self._core.running, self._core.kv.usage
