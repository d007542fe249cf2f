"""A replica's process in virtual time: its engine, and faults of the process: paused, stopped, refusing, broken.

The counterpart of SIGSTOP, SIGKILL, a closed listener and the engine's own `/lab/fault`. Invariants: each job gets its
last callback unless it was aborted; a paused process does nothing and loses nothing, and does what came meanwhile in
order once it resumes; a stopped one comes back idle, with an empty cache. Never routes.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, Protocol

from farhop_lab.sim.engines import Gpu, Job

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop_lab.engine.core.faults import Fault
    from farhop_lab.sim.engines import Engine
    from farhop_lab.sim.timeline import Timeline


MENDED_S = 5.0  # for this long after it was mended, effects of a fault may still arrive


class ReplicaFaultError(Exception):
    """A fault that this kind of replica cannot have."""


class RefusableJob(Job, Protocol):
    """A job that its replica may refuse."""

    def refused(self, status: int, text: str = "") -> None:
        """Refused with this HTTP status; `text` is the engine's error message about itself, if any."""


class ReplicaProcess:
    """See the module's head. `make` builds an engine, idle and empty."""

    def __init__(self, timeline: Timeline, make: Callable[[Timeline], Engine]) -> None:
        self._timeline, self._make = timeline, make
        self.engine = make(timeline)
        self.paused = self.stopped = self.refusing = False
        self._mail: list[tuple[Callable[..., None], Any]] = []
        self._quiet_since: float | None = None
        self._broken, self._mended_at = False, -inf

    # -- seen from outside

    @property
    def listens(self) -> bool:
        """Whether a connection can be opened; a paused process's kernel still accepts them."""
        return not (self.stopped or self.refusing)

    @property
    def answers(self) -> bool:
        """Whether its pages answer."""
        return self.listens and not self.paused

    @property
    def healthy(self) -> bool:
        """The result of its /health, if it answers."""
        return not isinstance(self.engine, Gpu) or self.engine.faults.healthy

    @property
    def xid(self) -> int:
        """The XID that its GPU's exporter reports, whatever the state of its process."""
        return self.engine.faults.xid if isinstance(self.engine, Gpu) else 0

    @property
    def quiet_since(self) -> float | None:
        """Since when it has generated no token though it has work; None if it generates."""
        return self._quiet_since

    @property
    def whole(self) -> bool:
        """Whether it has no fault, and had none when requests that are answered now were sent."""
        self._note()
        return not self._broken and self._timeline.now - self._mended_at > MENDED_S

    # -- jobs

    def take(self, job: RefusableJob) -> None:
        """A request arrived on a connection."""
        if self.paused:
            self._mail.append((self.take, job))
            return
        refusal = self.engine.faults.refusal if isinstance(self.engine, Gpu) else ""
        status = 500 if refusal else self.engine.submit(job)
        if status != 200:
            job.refused(status, refusal)

    def abort(self, job_id: str) -> None:
        """The job's client is gone; does nothing for a job that has ended."""
        if self.paused:
            self._mail = [(act, of) for act, of in self._mail if getattr(of, "id", "") != job_id]
            self._mail.append((self.abort, job_id))
        else:
            self.engine.abort(job_id)

    def generated(self, job_id: str) -> bytes | None:
        """The text generated for a job that is, or was to the last, served here; None if there is none or it is
        unknown.
        """
        engine = self.engine
        return (engine.generated(job_id) or engine.lost.get(job_id)) if isinstance(engine, Gpu) else None

    # -- faults

    def command(self, fault: Fault | None) -> None:
        """As the engine's `/lab/fault`: it has this fault now instead of any other; None mends it. ReplicaFaultError if
        the replica's engine has no faults.
        """
        gpu = self._gpu()
        for job in gpu.command(fault):
            job.broke(gpu.faults.refusal)
        self._note()

    def pause(self) -> None:
        """SIGSTOP. Idempotent."""
        self._gpu().pause()
        self.paused = True
        self._note()

    def resume(self) -> None:
        """SIGCONT. Idempotent."""
        if self.paused:
            self.paused = False
            self._gpu().resume()
            mail, self._mail = self._mail, []
            for act, of in mail:
                act(of)
            self._note()

    def refuse(self, *, refusing: bool) -> None:
        """Its listener is closed, or open again; open connections stay."""
        self.refusing = refusing
        self._note()

    def stop(self) -> None:
        """SIGKILL: connected clients notice. Idempotent."""
        if self.stopped:
            return
        self.stopped, self.paused, mail = True, False, self._mail
        self._mail = []
        for job in self._gpu().break_off():
            job.broke("")
        for act, of in mail:
            if act == self.take:
                of.broke("")
        self._note()

    def start(self) -> None:
        """A new process. Idempotent."""
        if self.stopped:
            self.stopped, self.engine = False, self._make(self._timeline)
            self._note()

    def _gpu(self) -> Gpu:
        if not isinstance(self.engine, Gpu):
            raise ReplicaFaultError("a station of fixed service cannot break; give the site GPUs (sites.gpus)")
        return self.engine

    def _note(self) -> None:
        broken = self.paused or self.stopped or self.refusing
        broken |= isinstance(self.engine, Gpu) and self.engine.faults.now is not None
        if self._broken and not broken:
            self._mended_at = self._timeline.now
        self._broken = broken
        silent = self.paused or (isinstance(self.engine, Gpu) and self.engine.faults.stretch() > 1e9)
        if not silent:
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = self._timeline.now
