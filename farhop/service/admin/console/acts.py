"""The console's actions: drain or bias a region, split a model's traffic there, undo that, start or stop a drill.

It writes the same documents under the same keys as the commands do, with author and reason, by compare-and-set against
the state that the dry run showed. Invariants: nothing is written that was not shown first; nothing that would leave a
tenant without a region is written unless the operator confirms it; nothing is retried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import msgspec

from farhop.service.law import effect
from farhop.store.contract import DRILL_PREFIX, LAW_HISTORY_PREFIX, LAW_KEY, Conflict, StoreError, split_key
from farhop.store.documents import authored, overrides, splits
from farhop.store.documents.authored import Authorship
from farhop.store.documents.document import DocumentError
from farhop.store.documents.overrides import BiasOverride, DrainOverride
from farhop.store.envelope import bare
from topology import law_document
from topology.problems import TopologyError

if TYPE_CHECKING:
    from farhop.store.contract import KeyValue, Store
    from topology.law import Law
    from topology.model import Topology

STOP_S = 3600.0  # the lifetime of an order to stop a drill
DRILL_WHY_LIMIT = 128  # an override holds the name of the run beside it
HISTORY_SHOWN_MAX = 40
LAWS_MAX, MOVES_SHOWN_MAX = 12, 24
_LOCK, _EMERGENCY_STOP, _STOP = f"{DRILL_PREFIX}lock", f"{DRILL_PREFIX}lever", f"{DRILL_PREFIX}stop/"
_HISTORY, _SCHEDULES = f"{DRILL_PREFIX}history/", f"{DRILL_PREFIX}schedule/"


NO_DRILLS = (
    "drills cannot be started from here: this port has no clients to measure with; "
    "use `farhop console` or `farhop drill run`"
)

UNKNOWN_THERE = "which versions that region's replicas have is not known here: `farhop console` asks its balancers"

Statuses: TypeAlias = Sequence[Mapping[str, Any]]


class ActError(Exception):
    """An action that cannot be done; the text gives reason and remedy. `status` is the HTTP status."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class Act(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A requested action. `target`: a region, a drill's run or, to start a drill, its name; `values`: the drill's
    parameters; `model`, `weights` (`v1=95,v2=5`): of a split. `revision`: the revision that the dry run showed (0: no
    document). `confirm`: the target's name again. `force`: accept that a tenant is left without a region."""

    do: Literal["drain", "undrain", "bias", "unbias", "split", "unsplit", "start-drill", "stop-drill"]
    target: str
    why: str = ""
    for_s: float = 1800.0
    over_s: float = 0.0
    ms: float = 0.0
    model: str = ""
    weights: str = ""
    dry_run: bool = True
    revision: int = -1
    confirm: str = ""
    force: bool = False
    values: dict[str, str] = {}


class Drills(Protocol):
    """A process that can run drills: it has the probe, the clients' keys and the means to inject faults. If it dies
    during a drill, the injected faults end by themselves. All methods raise ActError and StoreError."""

    async def offered(self) -> list[dict[str, Any]]:
        """The drills that this fleet can run: `drill`, `title`, `kind`, `parameters` with their defaults, `from`."""
        ...

    async def plan(self, name: str, values: Mapping[str, str]) -> dict[str, Any]:
        """What the drill would do, and what its safety checks say now: `revision`, `plan` (lines), `checks`, `may_run`.
        Changes nothing."""
        ...

    async def begin(self, name: str, values: Mapping[str, str], revision: int, why: str, author: str) -> str:
        """Start the drill if `plan` still shows it under this revision, and return the run. The drill makes its checks
        again."""
        ...

    def going(self) -> dict[str, Any] | None:
        """The state of the last run that was started here, or its result; None: no run was started."""
        ...

    async def reported(self) -> dict[str, bool]:
        """The runs whose report is stored here; for each, whether its snapshots are stored as well."""
        ...

    async def report(self, run: str) -> bytes | None:
        """The report of a run, as HTML; None if it is not kept here."""
        ...

    async def keep_past(self, past: Callable[[int], bytes]) -> None:
        """Once a run that was started here has ended, keep beside its report what `past` returns for the time since its
        start (ms since 1970): the snapshots, which the console itself keeps for an hour only."""
        ...

    async def past(self, run: str) -> bytes | None:
        """The snapshots kept of a run, as JSON; None if there are none here."""
        ...


class Acts:
    """Performs actions on one fleet. `store`: the store that its balancers follow; `statuses`: the present statuses of
    its global balancers; `drills`: what runs drills (None: drills cannot be started from here); `status_of`: the
    present status of a regional balancer of a region (None: it cannot be asked from here)."""

    def __init__(
        self,
        store: Store,
        law: Callable[[], Law | None],
        statuses: Callable[[], Awaitable[Sequence[Mapping[str, Any]]]],
        wall: Callable[[], datetime],
        drills: Drills | None = None,
        status_of: Callable[[str], Awaitable[Mapping[str, Any] | None]] | None = None,
    ) -> None:
        self._store, self._law, self._statuses, self._wall = store, law, statuses, wall
        self._drills, self._status_of = drills, status_of

    async def perform(self, act: Act, author: str) -> dict[str, Any]:
        """Show the effect of the action, or perform it. Raises ActError."""
        if act.do == "start-drill":
            return await self._begun(act, author)
        law = self._law()
        if act.do != "stop-drill" and (law is None or act.target not in law.topology.regions):
            raise ActError(f"target: no region {act.target[:64]!r} in this fleet")
        if act.do in ("split", "unsplit"):
            return await self._split(act, author)
        key, document, ttl_s = self._document(act, author)
        statuses = await self._statuses() if act.do in ("drain", "bias") else ()
        try:
            entry = await self._store.get(key)
            answer = {"do": act.do, "target": act.target, "author": author, "key": key, **self._shown(entry, document)}
            stranded = self._stranded(act, statuses)
            effects = self._effects(act, statuses)
            if act.dry_run:
                return {**answer, "dry_run": True, "effects": effects, "strands": stranded}
            self._checked(act, entry, statuses, stranded)
            if document is None:
                await self._store.delete(key, expect_revision=act.revision)
            else:
                await self._store.put(key, document, expect_revision=act.revision, ttl_s=ttl_s)
        except Conflict:
            raise ActError("somebody else changed it since it was shown; look at it again", 409) from None
        except StoreError as error:
            raise ActError(f"etcd: {error}", 503) from None
        return {**answer, "dry_run": False}

    async def _split(self, act: Act, author: str) -> dict[str, Any]:
        """Only the model's weights are set or removed: a region's splits are one document."""
        key, by = split_key(act.target), Authorship(author[: overrides.AUTHOR_LIMIT], act.why, self._wall())
        try:
            entry = await self._store.get(key)
            before = bare(entry.value) if entry is not None else None
            if act.do == "split":
                weights = splits.weights_of(act.weights)
                document = splits.with_weights(before, act.model, weights, by)
                effects = [effect.shares(weights), *await self._versions_moved(act, weights)]
            else:
                document = splits.without(before, act.model, by)
                effects = [f"{act.model}: as the region's configuration says"]
            stands, last = splits.of_region(before).get(act.model), authored.split_authorship(before or b"{}")[1]
            answer = {
                "do": act.do, "target": act.target, "author": author, "key": key,
                "revision": entry.revision if entry is not None else 0, "document": _decoded(document),
                "stands": stands and {"split": stands, "author": last and last.author, "why": last and last.why},
            }  # fmt: skip
            if act.dry_run:
                effects.append("requests under way finish where they are; waiting requests follow it")
                return {**answer, "dry_run": True, "effects": effects, "strands": []}
            _confirmed(act)
            await self._store.put(key, document, expect_revision=act.revision)
        except DocumentError as error:
            raise ActError(f"{error.field}: {error.message}") from None
        except Conflict:
            raise ActError("somebody else changed it since it was shown; look at it again", 409) from None
        except StoreError as error:
            raise ActError(f"etcd: {error}", 503) from None
        return {**answer, "dry_run": False}

    async def _versions_moved(self, act: Act, weights: Mapping[str, float]) -> list[str]:
        status = await self._status_of(act.target) if self._status_of is not None else None
        return effect.split(status, act.model, weights) if status is not None else [UNKNOWN_THERE]

    async def _begun(self, act: Act, author: str) -> dict[str, Any]:
        if self._drills is None:
            raise ActError(NO_DRILLS, 409)
        if not act.why.strip():
            raise ActError("why: give the reason")
        answer = {"do": act.do, "target": act.target, "author": author, "dry_run": act.dry_run}
        try:
            if act.dry_run:
                return {**answer, **await self._drills.plan(act.target, act.values)}
            _confirmed(act)
            why = act.why.strip()[:DRILL_WHY_LIMIT]
            return {**answer, "run": await self._drills.begin(act.target, act.values, act.revision, why, author)}
        except StoreError as error:
            raise ActError(f"etcd: {error}", 503) from None

    def _document(self, act: Act, author: str) -> tuple[str, bytes | None, float | None]:
        common: dict[str, Any] = {
            "why": act.why,
            "author": author[: overrides.AUTHOR_LIMIT],
            "at": self._wall(),
            "for_s": act.for_s,
        }
        if not act.why.strip():
            raise ActError("why: give the reason")
        try:
            drain = DrainOverride(region=act.target, over_s=act.over_s, **common)
            bias = BiasOverride(region=act.target, ms=act.ms, **common)
            if act.do == "drain":
                return drain.key, overrides.encode(drain), act.for_s
            if act.do == "bias":
                return bias.key, overrides.encode(bias), act.for_s
            if act.do == "stop-drill":
                if not act.target or "/" in act.target:
                    raise ActError("target: give the name of a drill's run")
                order = {
                    "author": common["author"],
                    "why": act.why[: overrides.WHY_LIMIT],
                    "at_s": common["at"].timestamp(),
                }
                return f"{_STOP}{act.target}", msgspec.json.encode(order), STOP_S
        except DocumentError as error:
            raise ActError(f"{error.field}: {error.message}") from None
        except ValueError as error:
            raise ActError(str(error)) from None
        return drain.key if act.do == "undrain" else bias.key, None, None

    def _shown(self, entry: KeyValue | None, document: bytes | None) -> dict[str, Any]:
        return {
            "revision": entry.revision if entry is not None else 0,
            "stands": _decoded(entry.value) if entry is not None else None,
            "document": _decoded(document) if document is not None else None,
        }

    def _stranded(self, act: Act, statuses: Statuses) -> list[str]:
        law = self._law()
        return effect.stranded_by(law.topology, statuses, act.target) if act.do == "drain" and law is not None else []

    def _effects(self, act: Act, statuses: Statuses) -> list[str]:
        law = self._law()
        if law is None or act.do not in ("drain", "bias"):
            return []
        effects = effect.drained if act.do == "drain" else effect.biased
        return effects(law.topology, statuses, act.target)

    def _checked(self, act: Act, entry: KeyValue | None, statuses: Statuses, stranded: Sequence[str]) -> None:
        _confirmed(act)
        if (entry.revision if entry is not None else 0) != act.revision:
            raise ActError("somebody else changed it since it was shown; look at it again", 409)
        if entry is None and act.do in ("undrain", "unbias"):
            raise ActError(f"{act.target}: no {act.do.removeprefix('un')} is set", 409)
        if act.do == "drain" and not statuses:
            raise ActError(
                "no global balancer answers, so it is unknown which tenants would be left without a region", 409
            )
        if stranded and not act.force:
            raise ActError(f"{act.target} is the last region serving {', '.join(stranded[:5])}", 409)

    async def laws(self) -> dict[str, Any]:
        """The past laws and the present one, newest first: who set each, why, and what it moved. `moved` is absent for
        the oldest law that is kept, and for a law that does not fit this map. Raises ActError."""
        law = self._law()
        try:
            kept = [*await self._store.list(LAW_HISTORY_PREFIX), *filter(None, [await self._store.get(LAW_KEY)])]
        except StoreError as error:
            raise ActError(f"etcd: {error}", 503) from None
        laws: list[dict[str, Any]] = []
        before: Topology | None = None
        # Reading a law of thousands of tenants takes a while, and an operator needs only the last few.
        for document in sorted((bare(one.value) for one in kept), key=_epoch_of)[-LAWS_MAX - 1 :]:
            raw = _decoded(document) or {}
            one = {name: raw.get(name) for name in ("epoch", "author", "why", "at")}
            after = await asyncio.to_thread(_over, document, law.topology) if law is not None else None
            if before is not None and after is not None:
                moves = await asyncio.to_thread(effect.moved, before, after)
                one["moved"] = [str(move) for move in moves[:MOVES_SHOWN_MAX]]
                one["more"] = max(0, len(moves) - MOVES_SHOWN_MAX)
            before = after
            laws.append(one)
        return {"laws": laws[::-1][:LAWS_MAX]}

    async def drills(self) -> dict[str, Any]:
        """The running, planned and past drills, as etcd holds them; also the state of the run that was started here,
        and which reports are kept. Raises ActError."""
        here = self._drills
        try:
            lock, engaged = await self._store.get(_LOCK), await self._store.get(_EMERGENCY_STOP)
            past = [_decoded(one.value) for one in await self._store.list(_HISTORY)]
            planned = [_decoded(one.value) for one in await self._store.list(_SCHEDULES)]
        except StoreError as error:
            raise ActError(f"etcd: {error}", 503) from None
        runs = sorted((one for one in past if one is not None), key=lambda one: -float(one.get("began_s") or 0.0))
        return {
            "running": _decoded(lock.value) if lock is not None else None,
            "lever": _decoded(engaged.value) if engaged is not None else None,
            "planned": [one for one in planned if one is not None],
            "history": runs[:HISTORY_SHOWN_MAX],
            **({"going": here.going(), "reports": await here.reported()} if here is not None else {}),
        }

    async def drills_offered(self) -> dict[str, Any]:
        """The drills that can be started from here; if there are none, the reason. Raises ActError."""
        if self._drills is None:
            return {"offered": [], "why": NO_DRILLS}
        try:
            return {"offered": await self._drills.offered(), "why": ""}
        except StoreError as error:
            raise ActError(f"etcd: {error}", 503) from None

    async def drill_report(self, run: str) -> bytes | None:
        """The report of a run, as HTML; None if it is not kept here."""
        return await self._drills.report(run) if self._drills is not None else None

    async def keep_drills_past(self, past: Callable[[int], bytes]) -> None:
        """See Drills.keep_past."""
        if self._drills is not None:
            await self._drills.keep_past(past)

    async def drills_past(self, run: str) -> bytes | None:
        """The snapshots of a run, as JSON; None if they are not kept here."""
        return await self._drills.past(run) if self._drills is not None else None


def _confirmed(act: Act) -> None:
    if act.confirm != act.target:
        raise ActError(f"confirm: repeat the name of the target, {act.target}")
    if act.revision < 0:
        raise ActError("revision: give the revision that the dry run showed")


def _over(document: bytes, topology: Topology) -> Topology | None:
    """The map under this law; None if the law does not fit the map."""
    try:
        return law_document.read(document, topology, "etcd").over(topology)
    except TopologyError:
        return None


def _epoch_of(document: bytes) -> int:
    epoch = (_decoded(document) or {}).get("epoch")
    return epoch if isinstance(epoch, int) else 0


def _decoded(document: bytes) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(document, type=dict[str, Any])
    except msgspec.DecodeError:
        return None
