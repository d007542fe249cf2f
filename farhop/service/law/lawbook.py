"""The law in force in this process: the topology's at first, then the newest that the process ever received.

A law comes from a hub, from this process's own disk, or from a balancer that has a later one. Invariants: the epoch
only moves forward, whatever etcd holds after a wipe or a restore, and also through restarts if there is a disk to keep
the newest epoch on (until a law of that epoch is here, nothing is lawful); a document that is not signed as configured,
does not parse, or names things that this topology lacks changes nothing, and the last good law stays in force; every
ignored document is counted, logged and shown; losing etcd changes nothing. A hub that holds an older law than ours, or
none, is given ours by compare-and-set. The map under the law changes only if the new map fits the law and widens
nothing (topology.remap). Authors' clocks are shown and never compared. Never decides about a request.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from farhop.store.contract import LAW_KEY, ChangeKind, StoreError
from farhop.store.envelope import NO_KEYS, EnvelopeError, bare
from farhop.store.merge import stamp
from farhop.store.state import StateError
from topology import law_document
from topology.law import Law
from topology.problems import Problem, TopologyError
from topology.remap import fits

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from random import Random

    from farhop.store.contract import Change, Store
    from farhop.store.envelope import Keys
    from farhop.store.state import StateDir
    from farhop.telemetry.logs import Throttled
    from farhop.telemetry.metrics import TierMetrics
    from topology.law_document import LawDocument
    from topology.model import Region, Topology

INLINE_BYTES_MAX = 16 * 1024  # read on the loop, in about 20 ms; a larger document is read in a thread
PROBLEMS_SHOWN_MAX = 20
BEGIN_S = 5.0
MEND_S = 0.2  # another balancer may be repairing the hub now: wait a random time up to this
MEND_AGAIN_S = 5.0
AHEAD_MAX = 64
STATE_NAME = "law"
_HUB = "etcd"


class _Read(msgspec.Struct, frozen=True):
    """A law as written, and as read; `key` is the name of the key that signed it."""

    written: bytes
    document: LawDocument
    key: str


class _Hub:
    """A hub's law document (b"": none) and its problems. `behind`: the hub needs our law."""

    __slots__ = ("answered", "behind", "lost", "revision", "seen", "trouble")

    def __init__(self) -> None:
        self.seen, self.revision = b"", 0
        self.lost: str | None = None
        self.answered = self.behind = False
        self.trouble: tuple[str, ...] = ()


class LawBook:
    """See the module's docstring. `law` is the topology's law, whose map stays; `adopt` is called with each new law.

    `stores`: each hub's store, with documents as written. `refused` counts rejected documents by reason. `keys`: the
    keys whose signatures count. `state`: the folder that keeps the newest law on disk; None: it is not kept.
    """

    def __init__(
        self,
        stores: Mapping[str, Store],
        law: Law,
        adopt: Callable[[Law], None],
        refused: Callable[[str], None],
        log: Throttled | None = None,
        *,
        keys: Keys = NO_KEYS,
        state: StateDir | None = None,
        rng: Random | None = None,
    ) -> None:
        self._stores, self.adopt, self._refused, self._log = stores, adopt, refused, log
        self._keys, self._state, self._rng = keys, state, rng
        self.law, self._topology = law, law.topology
        self._held: _Read | None = None
        self._source = f"topology {self._topology.name}"
        self._gone: dict[str, Region] = {}  # regions that left the map under this law, in their last state
        self._floor = 0  # nothing is lawful here before a law of this epoch is in force
        self._hubs = {name: _Hub() for name in (stores or (_HUB,))}
        self._ahead: dict[str, int] = {}  # balancers that use a later law than ours, and its epoch
        self._trouble: tuple[str, ...] = ()  # of the disk
        self._unkept = b""  # a law that could not be written to disk: it is tried again
        self._all_answered = asyncio.Event()
        self._uneven = asyncio.Event()  # a hub or the disk lacks our law: `_mend` has work
        self._taking = asyncio.Lock()  # laws are written to disk one at a time: the last one must be the newest

    # -- starting

    def remember(self) -> None:
        """Load the law that this process last had in force; to be called first. Blocks until the disk has answered."""
        if self._state is None:
            return
        try:
            kept = self._state.load(STATE_NAME)
        except StateError as error:
            self._withhold(self.law.epoch + 1, [str(error)])  # there was a law, later than the topology's
            return
        if kept is None:
            return
        epoch = stamp(kept.document)[0]
        if epoch < self.law.epoch:
            return  # the topology's file is newer
        judged = self._parse_law(kept.document)
        if isinstance(judged, _Read):
            if self._is_news(judged):
                self._take_in(judged, "its own disk")
        elif epoch > self.law.epoch:
            self._withhold(epoch, [f"the law of epoch {epoch} on disk: {one}" for one in _problems(judged)])

    def _withhold(self, epoch: int, problems: list[str]) -> None:
        """A law of this epoch was in force and cannot be read: no older law takes its place."""
        self._floor, self._trouble = epoch, self._shortened(problems)
        self.law = Law(replace(self._topology, epoch=epoch, tenants={}, models={}))
        self._source = "nowhere: nothing is lawful until the last law in force, or a later one, is received"
        self._log_problems("law withheld", problems)
        self.adopt(self.law)

    async def begun(self) -> None:
        """Wait until every hub has answered, but not for long: one may have failed just now."""
        with contextlib.suppress(TimeoutError):  # then the law that is known stays in force until the hub answers
            async with asyncio.timeout(BEGIN_S):
                await self._all_answered.wait()

    # -- the map

    async def remap(self, topology: Topology, swap: Callable[[Law], None]) -> None:
        """Switch to another map, and to the law in its file if that is later than ours. `swap` is called once, with the
        law over the new map, and replaces everything before anything else runs; `adopt` is not called. Raises
        TopologyError; then nothing has changed."""
        async with self._taking:
            law = await asyncio.to_thread(self._over, topology)
            if law.epoch > self.law.epoch:
                self._held, self._source, self._floor, self._gone = None, f"topology {topology.name}", 0, {}
                self._ahead = {who: epoch for who, epoch in self._ahead.items() if epoch > law.epoch}
            else:
                left = self.law.topology.regions
                self._gone = {
                    name: one for name, one in (self._gone | dict(left)).items() if name not in topology.regions
                }
                if self._held is None and not self._floor:
                    self._source = f"topology {topology.name}"
            self._topology, self.law = topology, law
            swap(law)
            for name, hub in self._hubs.items():  # a law that did not fit the old map may fit this one
                if hub.answered and hub.lost is None:
                    self._compare(name, await self._judged(hub.seen))

    def _over(self, topology: Topology) -> Law:
        """The law in force over another map, or the law in the map's own file if it is later. Raises TopologyError."""
        filed, epoch, source = self._topology, self.law.epoch, f"topology {topology.name}"
        if topology.epoch < filed.epoch:
            fault = Problem("epoch", f"was {filed.epoch} and is {topology.epoch}", "epochs only increase: raise it")
            raise TopologyError(source, [fault])
        if topology.epoch == filed.epoch and (topology.tenants, topology.models) != (filed.tenants, filed.models):
            remedy = f"raise it above {max(filed.epoch, epoch)}, or set the law with `farhop law set`"
            raise TopologyError(
                source, [Problem("epoch", "is unchanged, though `tenants` or `models` changed", remedy)]
            )
        if filed.epoch < topology.epoch == epoch:
            remedy = f"raise it above {epoch}, or leave it as it was"
            raise TopologyError(source, [Problem("epoch", "another law of this epoch is in force", remedy)])
        if topology.epoch > epoch:
            return Law(topology)
        if self._floor:
            return Law(replace(topology, epoch=epoch, tenants={}, models={}))
        if self._held is None:
            law = Law(topology)
        else:
            law_document.read(
                bare(self._held.written), topology, f"{source}, under the law of epoch {epoch} ({self._source})"
            )
            law = Law(self._held.document.over(topology))
        if problems := fits(self.law, self._gone, law):
            raise TopologyError(source, problems)
        return law

    # -- hubs

    async def follow(self) -> None:
        """Follow the hubs until cancelled, or until the stores are closed."""
        async with asyncio.TaskGroup() as group:
            mending = group.create_task(self._mend(), name="bring hubs up to date")
            following = [group.create_task(self._follow(name, store)) for name, store in self._stores.items()]
            await asyncio.wait(following)
            mending.cancel()

    async def _follow(self, name: str, store: Store) -> None:
        async with contextlib.aclosing(store.watch(LAW_KEY)) as changes:
            async for change in changes:
                if self._news(change, name):
                    async with self._taking:
                        self._compare(name, await self._judged(self._hubs[name].seen))
                if all(hub.answered for hub in self._hubs.values()):
                    self._all_answered.set()

    def changed(self, change: Change, hub: str = _HUB) -> None:
        """Process one change from a hub's watch, at once."""
        if self._news(change, hub):
            judged = self._parse_law(self._hubs[hub].seen)
            if self._is_news(judged):
                self._keep(self._hubs[hub].seen)
                if self._unkept:
                    self._uneven.set()
            self._compare(hub, judged)

    def _news(self, change: Change, name: str) -> bool:
        """Whether the hub holds another document now."""
        hub = self._hubs[name]
        if change.kind is ChangeKind.LOST:
            hub.lost, hub.answered = change.why, True
            return False
        first = change.kind is ChangeKind.SNAPSHOT and not hub.answered
        if change.kind is ChangeKind.SNAPSHOT:
            hub.lost, hub.answered = None, True
        law = next((entry for entry in change.written if entry.key == LAW_KEY), None)
        if law is None and not change.ended((LAW_KEY,)):
            return False
        before, hub.seen, hub.revision = hub.seen, *((law.value, law.revision) if law is not None else (b"", 0))
        return first or hub.seen != before  # otherwise the same document is listed again, after a gap

    def _parse_law(self, written: bytes) -> _Read | TopologyError | EnvelopeError | None:
        """The law in a document, or why it does not count; None if the document is empty."""
        if not written:
            return None
        try:
            opened = self._keys.open(LAW_KEY, written)
            return _Read(written, law_document.read(opened.document, self._topology, LAW_KEY), opened.key)
        except (TopologyError, EnvelopeError) as error:
            return error

    async def _judged(self, written: bytes) -> _Read | TopologyError | EnvelopeError | None:
        """As _parse_law, but reads a large document in a thread, and saves a law that is to come into force to disk."""
        large = len(written) > INLINE_BYTES_MAX
        judged = await asyncio.to_thread(self._parse_law, written) if large else self._parse_law(written)
        if self._is_news(judged) and self._state is not None:
            await asyncio.to_thread(self._keep, written)
            if self._unkept:
                self._uneven.set()
        return judged

    def _is_news(self, judged: _Read | TopologyError | EnvelopeError | None) -> bool:
        """Whether this law should come into force."""
        if not isinstance(judged, _Read):
            return False
        epoch, held = judged.document.epoch, self.law.topology
        if epoch != self.law.epoch or self._floor:
            return epoch >= self.law.epoch
        same = judged.document.tenants == held.tenants and judged.document.models == held.models
        return same and (self._held is None or (bool(judged.key) and not self._held.key))

    def _compare(self, name: str, judged: _Read | TopologyError | EnvelopeError | None) -> None:
        """Compare the document of a hub with our law: adopt it, accept it, or mark the hub as behind."""
        hub, epoch = self._hubs[name], self.law.epoch
        source = f"hub {name}" if len(self._hubs) > 1 else "etcd"
        hub.trouble, hub.behind = (), False
        if judged is None or self._is_older(hub.seen):
            hub.behind = self._held is not None
            remedy = "ours is written there" if hub.behind else "set the law again"
            if judged is not None or hub.seen:
                other = f"a law of epoch {stamp(hub.seen)[0]}, older than the law in force"
                self._pass_over(hub, "law_older", [f"{source} holds {other}; {remedy}"])
            elif hub.behind:
                self._pass_over(hub, "law_gone", [f"{source} no longer holds a law; {remedy}, of epoch {epoch}"])
        elif isinstance(judged, EnvelopeError):
            self._pass_over(hub, f"law_{judged.reason}", [f"{source}: {judged}; sign it with `farhop law sign`"])
        elif isinstance(judged, TopologyError):
            self._pass_over(hub, "law_malformed", _problems(judged))
        elif self._is_news(judged):
            self._take_in(judged, source)
        elif not self._is_ours(judged):
            problem = f"{source} holds a different law of the same epoch {epoch}; set the right one under a new epoch"
            self._pass_over(hub, "law_differs", [problem])
        if hub.behind:
            self._uneven.set()

    def _is_older(self, written: bytes) -> bool:
        """Whether the document's own epoch is below ours; False if the document cannot be read."""
        return bool(written) and 0 < stamp(written)[0] < self.law.epoch

    def _is_ours(self, read: _Read) -> bool:
        held = self.law.topology
        return read.document.epoch == self.law.epoch and (
            read.document.tenants == held.tenants and read.document.models == held.models
        )

    def _take_in(self, read: _Read, source: str) -> None:
        if read.document.epoch > self.law.epoch or self._floor:
            self.law, self._gone = Law(read.document.over(self._topology)), {}
        self._held, self._source, self._floor = read, source, 0
        self._ahead = {who: epoch for who, epoch in self._ahead.items() if epoch > self.law.epoch}
        if self._log is not None:
            fields = {"epoch": read.document.epoch, "author": read.document.author, "why": read.document.why}
            self._log.warning("law in force", str(read.document.epoch), **fields)
        self.adopt(self.law)
        for hub in self._hubs.values():
            # A new law is written to the hubs one by one: a late hub is not a problem yet.
            if hub.answered and hub.lost is None and (not hub.seen or self._is_older(hub.seen)):
                hub.behind = True
                self._uneven.set()

    def _keep(self, written: bytes) -> None:
        """Write the law to disk before it takes effect, so that no restart returns to an earlier one. Blocks."""
        if self._state is None:
            return
        try:
            self._state.save(STATE_NAME, written)
            self._trouble, self._unkept = (), b""
        except StateError as error:
            self._unkept = written
            self._trouble = (f"a restart may fall back to an earlier law: {error}",)
            self._refused("law_not_kept")
            self._log_problems("law not kept", list(self._trouble))

    async def _mend(self) -> None:
        """Give our law to hubs that lack it, and to the disk, for as long as this process lives."""
        while True:
            await self._uneven.wait()
            self._uneven.clear()
            await asyncio.sleep(self._rng.uniform(0.0, MEND_S) if self._rng is not None else MEND_S)
            await self.mend()
            if self._unkept or any(hub.behind for hub in self._hubs.values()):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(MEND_AGAIN_S):
                        await self._uneven.wait()
                self._uneven.set()

    async def mend(self) -> None:
        """Give our law to hubs that lack it: the first balancer writes it, and the others see it and do nothing. Also
        write it to the disk, if that failed before."""
        async with self._taking:
            if self._unkept:
                await asyncio.to_thread(self._keep, self._unkept)
        for name, hub in self._hubs.items():
            if hub.behind and hub.lost is None and self._held is not None:
                await self._put(name, hub, self._held.written)

    async def _put(self, name: str, hub: _Hub, written: bytes) -> None:
        try:
            await self._stores[name].put(LAW_KEY, written, expect_revision=hub.revision)
        except StoreError as error:
            # Another balancer was faster, and the watch will see its write; or the write failed, and is tried again.
            self._log_problems("law not put", [f"hub {name}: {error}"])
        else:
            self._log_problems("law put", [f"hub {name} was given the law of epoch {self.law.epoch}"])

    # -- balancers

    def named(self, who: str, epoch: int) -> bool:
        """Another balancer uses a law of this epoch. Returns whether it is later than ours, and should be requested."""
        if epoch <= self.law.epoch and not self._floor:
            self._ahead.pop(who, None)
            return False
        if who in self._ahead or len(self._ahead) < AHEAD_MAX:
            self._ahead[who] = epoch
        return True

    def left(self, who: str) -> None:
        """A balancer is gone: forget the epoch that it used."""
        self._ahead.pop(who, None)

    def may_believe(self, *, proven: bool) -> bool:
        """Whether a law from another balancer can count: by its signature if a signing key is configured, else only
        from a balancer that is `proven` by mutual TLS."""
        return proven or self._keys.asks(LAW_KEY)

    async def offer(self, written: bytes, who: str, *, proven: bool) -> bool:
        """Another balancer sends its law. Returns whether that law is in force now."""
        if not self.may_believe(proven=proven):
            self._refused("law_unproven")
            self._log_problems(
                "law rejected", [f"{who} offered one, but no signing key is configured, and there is no mutual TLS"]
            )
            return False
        async with self._taking:
            judged = await self._judged(written)
            if not isinstance(judged, _Read):
                self._refused("law_offered_malformed")
                self._log_problems("law rejected", [f"{who} offered one: {one}" for one in _problems(judged)])
            elif self._is_news(judged):
                self._take_in(judged, who)
                return True
        return False

    async def exchanged(self, epoch: int, written: bytes, who: str, *, proven: bool) -> tuple[int, bytes]:
        """Another balancer sends the epoch of its law, and the law itself if ours is older. Returns ours in the same
        form.
        """
        if written:
            await self.offer(written, who, proven=proven)
        self.named(who, epoch)
        return self.law.held_epoch, self.document_after(epoch)

    def document_after(self, epoch: int) -> bytes:
        """The law in force as it was written, if its epoch is above `epoch`; else, or without a law, b""."""
        return self._held.written if self._held is not None and self.law.epoch > epoch else b""

    # -- status

    @property
    def trouble(self) -> tuple[str, ...]:
        """All current problems."""
        ahead = [
            f"{who} uses a law of epoch {epoch}, which has not arrived here yet" for who, epoch in self._ahead.items()
        ]
        hubs = [problem for hub in self._hubs.values() for problem in hub.trouble]
        return (*self._trouble, *hubs, *sorted(ahead))

    def _pass_over(self, hub: _Hub, reason: str, problems: list[str]) -> None:
        """Ignore a hub's document, with a count, a log line and a problem in the status; the last good law stays."""
        hub.trouble = self._shortened(problems)
        self._refused(reason)
        if self._log is not None:
            self._log.error("law rejected", reason, reason=reason, in_force=self.law.epoch, problems=hub.trouble)

    def _log_problems(self, event: str, problems: list[str]) -> None:
        if self._log is not None:
            shown = self._shortened(problems)
            self._log.warning(event, event, in_force=self.law.epoch, problems=shown)

    def _shortened(self, problems: list[str]) -> tuple[str, ...]:
        more = len(problems) - PROBLEMS_SHOWN_MAX
        return (*problems[:PROBLEMS_SHOWN_MAX], *((f"and {more} more",) if more > 0 else ()))

    def status(self) -> dict[str, Any]:
        """For operators: the law in force, its source, and problems of the documents in etcd."""
        read = self._held.document if self._held is not None and not self._floor else None
        lost = [hub.lost if len(self._hubs) == 1 else f"{n}: {hub.lost}" for n, hub in self._hubs.items() if hub.lost]
        fields: dict[str, Any] = {
            "epoch": self.law.epoch,
            "source": self._source,
            "revision": None if read is None else self._revision(),
            "trouble": list(self.trouble),
            "etcd_out_of_reach": "; ".join(filter(None, lost)) if len(lost) == len(self._hubs) else None,
            "signed_by": (self._held.key or None) if self._held is not None else None,
            "must_be_signed": self._keys.asks(LAW_KEY),
            "kept_on_disk": self._state is not None and not self._trouble,
        }
        signed = ("author", "why", "at")
        return {**fields, **{name: None if read is None else getattr(read, name) for name in signed}}

    def _revision(self) -> int | None:
        """The revision at the first hub that holds the law in force."""
        held = self._held.written if self._held is not None else b""
        return next((hub.revision for hub in self._hubs.values() if hub.seen == held), None)

    def document(self) -> dict[str, Any]:
        """The whole law in force, with keys as hashes."""
        return {**self.status(), **law_document.document_of(self.law.topology)}

    def topology(self) -> dict[str, Any]:
        """The topology in use, with its own law, as a document; keys are hashes only."""
        return {**law_document.map_of(self._topology), **law_document.document_of(self._topology)}

    def observe(self, metrics: TierMetrics) -> None:
        """Export the law's epoch and state as metrics."""
        metrics.gauge("law_epoch", "Epoch of the law in force.", lambda: float(self.law.epoch))
        metrics.gauge("law_rejected", "1 if etcd holds what cannot be the law.", lambda: float(bool(self.trouble)))


def _problems(judged: _Read | TopologyError | EnvelopeError | None) -> list[str]:
    if isinstance(judged, TopologyError):
        return [str(problem) for problem in judged.problems]
    return [str(judged) if judged is not None else str(Problem("", "empty", "set a law"))]
