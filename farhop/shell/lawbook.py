"""Which law is in force in this process: the topology's at first, then the newest that stood in etcd. Never decides.

Invariants: the epoch only moves forward, whatever etcd holds after a wipe or a restore; a document that does not parse,
or speaks of what this world lacks, changes nothing, and the last good law stands; whatever is passed over is counted,
logged and shown; losing etcd changes nothing. Authors' clocks are shown and never compared.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from farhop.store.contract import LAW_KEY, ChangeKind
from topology import policy
from topology.law import Law
from topology.problems import TopologyError

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.store.contract import Change, Store
    from farhop.telemetry.logs import Throttled
    from farhop.telemetry.metrics import TierMetrics
    from topology.policy import Policy

INLINE_BYTES_MAX = 16 * 1024  # read at once, in some 20 ms; a larger one beside the loop, which goes on meanwhile
PROBLEMS_TOLD_MAX = 20
BEGIN_S = 5.0


class LawBook:
    """See the module's head. `law` is the topology's, whose map stays; `adopt` is given each new one.

    `refused` counts what is not believed, by reason.
    """

    def __init__(
        self,
        store: Store | None,
        law: Law,
        adopt: Callable[[Law], None],
        refused: Callable[[str], None],
        log: Throttled | None = None,
    ) -> None:
        self._store, self._adopt, self._refused, self._log = store, adopt, refused, log
        self.law, self._world = law, law.topology
        self._policy: Policy | None = None
        self._document = self._seen = b""
        self._revision = 0
        self._lost: str | None = None
        self.trouble: tuple[str, ...] = ()
        self._told = asyncio.Event()

    async def follow(self) -> None:
        """Until cancelled, or the store is closed."""
        assert self._store is not None
        async with contextlib.aclosing(self._store.watch(LAW_KEY)) as changes:
            async for change in changes:
                found = self._news(change)
                if found is not None:
                    large = len(found[0]) > INLINE_BYTES_MAX
                    judged = await asyncio.to_thread(self._judge, found[0]) if large else self._judge(found[0])
                    self._take(*found, judged)
                self._told.set()

    async def begun(self) -> None:
        """Until etcd has told what stands there; not for long, as etcd may have gone at this very moment."""
        with contextlib.suppress(TimeoutError):  # then the topology's law is in force until it tells
            await asyncio.wait_for(self._told.wait(), BEGIN_S)

    def changed(self, change: Change) -> None:
        """Take one step of the watch, at once."""
        found = self._news(change)
        if found is not None:
            self._take(*found, self._judge(found[0]))

    def _news(self, change: Change) -> tuple[bytes, int] | None:
        """What stands there now (b"": nothing) and its revision; None if that is no news."""
        document, revision = b"", 0
        if change.kind is ChangeKind.LOST:
            self._lost = change.why
            return None
        if change.kind is ChangeKind.SNAPSHOT:
            self._lost = None
            for entry in change.entries:
                if entry.key == LAW_KEY:
                    document, revision = entry.value, entry.revision
        elif change.key != LAW_KEY:
            return None
        elif change.kind is ChangeKind.PUT:
            document, revision = change.value, change.revision
        if document == self._seen:
            self._revision = revision if document == self._document else self._revision
            return None  # listed anew after a gap
        self._seen = document
        return document, revision

    def _judge(self, document: bytes) -> Policy | TopologyError | None:
        try:
            return policy.read(document, self._world, LAW_KEY) if document else None
        except TopologyError as error:
            return error

    def _take(self, document: bytes, revision: int, judged: Policy | TopologyError | None) -> None:
        epoch, self.trouble = self.law.epoch, ()
        if isinstance(judged, TopologyError):
            self._pass_over("law_malformed", [str(problem) for problem in judged.problems])
        elif judged is None:
            if self._policy is not None:
                self._pass_over("law_gone", [f"etcd holds no law any more; set that of epoch {epoch} anew"])
        elif document == self._document:
            self._revision = revision  # it is back
        elif judged.epoch < epoch:
            problem = f"etcd holds a law of epoch {judged.epoch}, older than this; set what is to hold anew"
            self._pass_over("law_older", [problem])
        else:
            self._newer_or_same(document, revision, judged)

    def _newer_or_same(self, document: bytes, revision: int, read: Policy) -> None:
        held = self.law.topology
        if read.epoch > self.law.epoch:
            self.law = Law(read.over(self._world))
        elif read.tenants != held.tenants or read.models != held.models:
            problem = f"etcd holds another law of epoch {read.epoch}, too; set what is to hold under a new epoch"
            self._pass_over("law_differs", [problem])
            return
        self._policy, self._document, self._revision = read, document, revision
        if self._log is not None:
            said = {"epoch": read.epoch, "author": read.author, "why": read.why}
            self._log.warning("law in force", str(read.epoch), **said)
        self._adopt(self.law)

    def _pass_over(self, reason: str, problems: list[str]) -> None:
        """Loudly: the last good law stands."""
        more = len(problems) - PROBLEMS_TOLD_MAX
        self.trouble = (*problems[:PROBLEMS_TOLD_MAX], *((f"and {more} more",) if more > 0 else ()))
        self._refused(reason)
        if self._log is not None:
            self._log.error("law passed over", reason, reason=reason, in_force=self.law.epoch, problems=self.trouble)

    def told(self) -> dict[str, Any]:
        """The law in force, where it came from, and what is wrong with what stands in etcd, for people."""
        read = self._policy
        told: dict[str, Any] = {
            "epoch": self.law.epoch,
            "source": f"topology {self._world.name}" if read is None else "etcd",
            "revision": None if read is None else self._revision,
            "trouble": list(self.trouble),
            "etcd_out_of_reach": self._lost,
        }
        signed = ("author", "why", "at")
        return {**told, **{name: None if read is None else getattr(read, name) for name in signed}}

    def document(self) -> dict[str, Any]:
        """The law in force, whole. Of keys it holds the hashes."""
        return {**self.told(), **policy.document_of(self.law.topology)}

    def observe(self, metrics: TierMetrics) -> None:
        """Show it."""
        metrics.gauge("law_epoch", "Epoch of the law in force.", lambda: float(self.law.epoch))
        metrics.gauge("law_passed_over", "1 if etcd holds what cannot be the law.", lambda: float(bool(self.trouble)))
