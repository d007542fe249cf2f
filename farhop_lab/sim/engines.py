"""Replicas in virtual time: the emulated engine's scheduler, or a station with fixed service times (control runs).

Invariants: a job's callbacks are `first` once and then `done` once, or `broke`, or none after it was aborted; a `Gpu`
times and answers as the live engine, since it runs the same core; a station generates no text. Faults are the live
engine's own, too (`engine/core/faults.py`). Never routes; refuses only at its own limits.
"""

from __future__ import annotations

from collections import deque
from math import inf, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from farhop.balance.machine import Usage
from farhop_lab.engine.core.faults import Faults
from farhop_lab.engine.core.scheduler import EngineCore, EngineFullError
from farhop_lab.engine.core.sequence import EngineRequest, Sequence
from farhop_lab.engine.core.text import token_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop_lab.engine.core.faults import Fault
    from farhop_lab.engine.core.profiles import Profile
    from farhop_lab.engine.core.scheduler import Step
    from farhop_lab.engine.core.sequence import TextModel
    from farhop_lab.sim.timeline import Call, Timeline

WAITING_MAX = 8192
STEPS_MAX = 256  # the most steps that one leap computes ahead
STUCK_LOOK_S = 0.02  # how often a stuck engine checks whether it still is (engine/driver.py)


class Job(Protocol):
    """A request at an engine. `answer_tokens`: the length of its answer; None: the model decides."""

    id: str
    prompt: bytes
    max_tokens: int | None
    answer_tokens: int | None

    def first(self) -> None:
        """The first token was generated."""

    def done(self, usage: Usage) -> None:
        """The answer is complete."""

    def broke(self, text: str) -> None:
        """It ended incomplete: `text` is the engine's error message, "" if its process is gone."""


class UsageWithText(Usage, frozen=True):
    """Usage, and the generated text. The text passes the machines unseen, as in a relay."""

    text: bytes = b""


class Timing(NamedTuple):
    """The true timing of an answer, measured at the replica: the timeline's seconds, and tokens."""

    sent_at: float
    began_at: float
    ended_at: float
    usage: Usage


class Engine(Protocol):
    """One replica."""

    def submit(self, job: Job) -> int:
        """Start or queue it. Returns an HTTP status: 200, 503 if the queue is full, 400 if the job can never fit."""

    def abort(self, job_id: str) -> None:
        """Stop at once; does nothing for a job that has ended."""

    def metrics(self) -> tuple[int, int, float]:
        """What a scrape reports: requests waiting, requests running, share of the KV cache in use (0..1)."""


class Station:
    """`slots` servers with one queue: the first token after `first_s`, the end after `service_s`, whatever the job."""

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

    def submit(self, job: Job) -> int:
        """See Engine."""
        if len(self._running) < self._slots:
            self._start(job)
        elif len(self._waiting) < WAITING_MAX:
            self._waiting.append(job)
        else:
            return 503
        return 200

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
        """See Engine. Slots represent the KV cache."""
        return len(self._waiting), len(self._running), len(self._running) / self._slots


class Gpu:
    """The live engine's core, stepped as its driver steps it; a run of decode-only steps is one leap.

    A leap is carried out only up to the present whenever somebody reads or submits, so it cannot be told from steps.
    """

    def __init__(self, timeline: Timeline, profile: Profile, text_model: TextModel) -> None:
        self._timeline, self._profile, self._text_model = timeline, profile, text_model
        self._core = EngineCore(profile, waiting_max=WAITING_MAX, each_token=False)
        self.faults = Faults(lambda: timeline.now)
        self._paused = False
        self._due: tuple[Callable[..., None], tuple[Any, ...]] | None = None  # the callback that a pause delays
        self._jobs: dict[str, tuple[Job, Sequence, bool]] = {}
        self._stepping = False
        self._leap: _Leap | None = None
        self.lost: dict[str, bytes] = {}  # what the jobs that broke off last had generated

    @property
    def core(self) -> EngineCore:
        """The engine's true state."""
        self._catch_up()
        return self._core

    @property
    def text_model(self) -> TextModel:
        """Determines its generated texts and prefix hashes."""
        return self._text_model

    def submit(self, job: Job) -> int:
        """See Engine."""
        exact = job.answer_tokens
        self._interrupt()
        try:
            wanted = EngineRequest(job.prompt, exact or job.max_tokens, ignore_eos=exact is not None)
            sequence = Sequence(job.id, wanted, self._text_model, self._profile)
            self._core.submit(sequence, self._timeline.now)
        except EngineFullError:
            return 503
        except ValueError:
            return 400
        self._jobs[job.id] = (job, sequence, False)
        if not self._stepping:
            self._stepping = True
            # Not at once: requests that arrive at the same moment share the first step.
            self._timeline.after(0.0, self._begin)
        return 200

    def _begin(self) -> None:
        if self._paused:
            self._due = self._begin, ()
            return
        self._stepping = self._core.has_work
        if not self._stepping:
            return
        stretch = self.faults.stretch()
        if stretch == inf:
            self._timeline.after(STUCK_LOOK_S, self._begin)
            return
        steps = self._core.calm(STEPS_MAX)
        if steps > 1:
            first_ms, more_ms = self._core.calm_ms()
            self._leap = _Leap(self._timeline.now, stretch * first_ms / 1e3, stretch * more_ms / 1e3, steps)
            self._leap.end = self._timeline.at(self._leap.over_at(steps), self._landed)
            return
        step = self._core.step(self._timeline.now)
        self._timeline.after(stretch * step.duration_ms / 1e3, self._end, step)

    def _end(self, step: Step) -> None:
        if self._paused:
            self._due = self._end, (step,)
            return
        self._core.end_step()
        for emission in step.emissions:
            known = self._jobs.get(emission.id)
            if known is None:
                continue
            job, sequence, begun = known
            if not begun:
                self._jobs[emission.id] = (job, sequence, True)
                job.first()
            if emission.finished is not None and self._jobs.pop(emission.id, None) is not None:
                generated = bytes(memoryview(sequence.text)[len(job.prompt) :])
                used = sequence.prompt_tokens, sequence.output_tokens, sequence.cached_tokens
                job.done(UsageWithText(*used, text=generated))
        self._begin()

    # -- faults

    def command(self, fault: Fault | None) -> list[Job]:
        """From the next step on the engine has this fault instead of any other; None mends it. Returns the jobs that
        broke off.
        """
        self._interrupt()
        self.faults.command(fault)
        return self.break_off() if self.faults.kind == "oom" else []

    def generated(self, job_id: str) -> bytes | None:
        """What a job under way has generated; None if it has not begun or is unknown."""
        self._catch_up()
        job, sequence, begun = self._jobs.get(job_id, (None, None, False))
        if job is None or sequence is None or not begun:
            return None
        return bytes(memoryview(self._core.caught_up(sequence).text)[len(job.prompt) :])

    def break_off(self) -> list[Job]:
        """Forget all jobs under way and return them; they are not told."""
        self._interrupt()
        self.lost = {job_id: generated for job_id in self._jobs if (generated := self.generated(job_id)) is not None}
        jobs = [job for job, _, _ in self._jobs.values()]
        for job in jobs:
            self._core.abort(job.id)
        self._jobs.clear()
        return jobs

    def pause(self) -> None:
        """Nothing more happens until it resumes; the step under way ends then, if it is due. Idempotent."""
        self._interrupt()
        self._paused = True

    def resume(self) -> None:
        """Continue after a pause. Idempotent."""
        self._paused = False
        due, self._due = self._due, None
        if due is not None:
            self._timeline.after(0.0, due[0], *due[1])

    # -- leaps

    def _landed(self) -> None:
        leap, self._leap = self._leap, None
        assert leap is not None, "a leap that was interrupted does not land"
        self._core.leap(leap.steps - leap.done)
        self._begin()

    def _catch_up(self) -> None:
        """Carry out the steps of the leap that have begun by now."""
        leap = self._leap
        if leap is not None:
            begun = leap.begun(self._timeline.now)
            if begun > leap.done:
                self._core.leap(begun - leap.done)
                leap.done = begun

    def _interrupt(self) -> None:
        """The leap ends with the step under way, because something is about to change."""
        self._catch_up()
        leap, self._leap = self._leap, None
        if leap is not None:
            leap.end.cancel()
            self._timeline.at(leap.over_at(leap.done), self._begin)

    def abort(self, job_id: str) -> None:
        """See Engine."""
        self._interrupt()
        self._jobs.pop(job_id, None)
        self._core.abort(job_id)

    def metrics(self) -> tuple[int, int, float]:
        """See Engine."""
        self._catch_up()
        return self._core.waiting, self._core.running, self._core.kv.usage


class _Leap:
    """`steps` steps from `since` on, the first of `first_s` seconds, each next one `more_s` longer; the core has
    carried out `done` of them.
    """

    __slots__ = ("_first_s", "_more_s", "_since", "done", "end", "steps")

    end: Call

    def __init__(self, since: float, first_s: float, more_s: float, steps: int) -> None:
        self._since, self._first_s, self._more_s, self.steps = since, first_s, more_s, steps
        self.done = 0

    def begun(self, now: float) -> int:
        """How many of them have begun by now: at least one, since a step's work is done as it begins."""
        passed_s, more_s = now - self._since, self._more_s
        # The root of over_at(n) = now, in the form that loses no digits where `more_s` is next to nothing.
        b = self._first_s - more_s / 2.0
        over = int(2.0 * passed_s / (b + sqrt(b * b + 2.0 * more_s * passed_s)))
        return min(self.steps, over + 1)

    def over_at(self, steps: int) -> float:
        """When this many of them are over."""
        return self._since + steps * self._first_s + self._more_s * (steps * (steps - 1) / 2.0)
