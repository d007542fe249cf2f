"""Writes the usage records and audit records of a balancer's requests: decides which of them are written here, and
where to. They must never be lost.

A request's usage is written once in the fleet: by the balancer that the client reached or, if the tenant's law keeps
records from there, by the balancer of the region that answered, if that one may. Both use the same record id, so that a
record written twice during a change of the law is counted once. If accounts are switched off, nothing of this exists.
The event loop only appends one object per request and never waits. This module never decides about a request, except
that none is admitted while nothing can be written, if the configuration says so.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from farhop.accounts import usage as records
from farhop.accounts.audit import AuditEvent, AuditLog, Decided
from farhop.accounts.segments import Bounds, Segments
from farhop.accounts.tlog import LogError
from farhop.balance import outcome
from farhop.balance.outcome import Source
from farhop.config import ConfigError
from farhop.identity.jwt_tokens import hidden_user
from farhop.relay import answers
from farhop.service.accounts.price_file import PriceFile
from farhop.service.accounts.usage_delivery import Delivery
from farhop.service.authentication.authenticator import recorded
from farhop.service.process.clock import wall
from farhop.service.process.tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.accounts.prices import Prices
    from farhop.balance.machine import Usage
    from farhop.balance.outcome import Outcome
    from farhop.relay.active import ActiveRequest
    from farhop.relay.answers import Reply
    from farhop.service.authentication.authenticator import Caller
    from farhop.service.config.process import AuditConfig, Process, UsageConfig
    from farhop.service.law.lawbook import LawBook
    from farhop.service.observability.request_telemetry import CacheUse, RequestContext
    from farhop.service.process.clock import Clock
    from farhop.telemetry.logs import Throttled
    from farhop.telemetry.metrics import TierMetrics
    from topology.law import Law

    GpuMs = Callable[[ActiveRequest, Usage], float | None]

MODEL_CHARS_MAX = 128
IDLE_S = 0.5
RETRY_AFTER_S = 5.0
_UNSENT = (outcome.REDIRECTED, outcome.ADVISED)  # the region that a client is sent to writes it down
_FULL = "usage or audit cannot be written here, and nothing is served unaccounted: ask again later"


class RecordWriter:
    """What one process writes down. `law` is the one in force, `gpu_ms` what a request took of a GPU, by the tier's
    estimates; None where it has none. `judged` is under which epoch it was decided and where it might have gone."""

    def __init__(
        self,
        config: Process,
        *,
        law: Callable[[], Law],
        gpu_ms: GpuMs,
        version: Callable[[ActiveRequest], str],
        judged: Callable[[ActiveRequest], tuple[int, frozenset[str] | None]],
        clock: Clock,
        metrics: TierMetrics,
        log: Throttled,
    ) -> None:
        self._config, self._law, self._gpu_ms, self._version = config, law, gpu_ms, version
        self._judged, self._clock, self._log = judged, clock, log
        self.region, self._user_salt, self._tasks = config.region, config.identity.salt, Tasks()
        self.delivery: Delivery | None = None
        self.price_file: PriceFile | None = None
        self.withheld = 0
        self._must: list[Segments | AuditLog] = []  # be written, or nothing is served
        self.usage = self._make_usage(config.usage, metrics) if config.usage is not None else None
        self.audit = self._make_audit(config.audit, metrics) if config.audit is not None else None
        self._law_logged = b""

    def _make_usage(self, config: UsageConfig, metrics: TierMetrics) -> Segments:
        regions = self._law().topology.regions
        if config.http is not None and config.http.region and config.http.region not in regions:
            known = ", ".join(sorted(regions)[:8])
            problem = f"no region {config.http.region!r} in the topology; known are {known}"
            raise ConfigError("usage.http.region", [problem])
        self.price_file = PriceFile(Path(config.prices), _wall_s) if config.prices is not None else None
        source = f"farhop/{self._config.fleet}"
        folder = Path(config.dir) / self._config.region / self._config.instance
        bounds = Bounds(
            config.segment_bytes, config.segment_s, config.bytes_max, config.keep_days * 86_400.0,
            config.sync, config.sync_s,
        )  # fmt: skip
        files = Segments(
            folder, bounds, lambda some: records.lines(some, source, self.prices), self._clock.now, _wall_s
        )
        if config.http is not None:
            self.delivery = Delivery(folder, config.http, self._log, self._may_leave)
            files.may_delete = self.delivery.has_read
        if config.on_full == "refuse":
            self._must.append(files)
        self._observe_usage(metrics, files)
        return files

    def _make_audit(self, config: AuditConfig, metrics: TierMetrics) -> AuditLog:
        process = self._config
        origin = config.origin or f"farhop.internal/{process.fleet}/{process.region}/{process.instance}"
        folder = Path(config.dir) / process.region / process.instance
        log = AuditLog(folder, origin, config.signing_key(), self._clock.now, _wall_s)
        if config.on_full == "refuse":
            self._must.append(log)
        self._observe_audit(metrics, log)
        return log

    @property
    def prices(self) -> Prices | None:
        """The prices in force."""
        return self.price_file.prices if self.price_file is not None else None

    # -- for requests

    def refusal(self) -> Reply | None:
        """The answer if no request can be accepted now, as usage cannot be recorded; None: accept requests."""
        for one in self._must:
            if one.trouble:
                return answers.refusal(outcome.ACCOUNTS_NOT_WRITABLE, _FULL, retry_after_s=RETRY_AFTER_S)
        return None

    def forwarded(self, context: RequestContext) -> None:
        """The request was forwarded, under the law in force now."""
        context.law_epoch = self._law().epoch

    def concluded(
        self, context: RequestContext, active: ActiveRequest, reason: Outcome, status: int, usage: Usage | None,
        now: float,
    ) -> None:  # fmt: skip
        """A request is over for which a decision was made."""
        caller = context.caller
        if context.over:
            return
        if self.audit is not None:
            self.audit.put(self._decision(context, active, reason, status, now))
        if self.usage is None or caller is None or reason in _UNSENT:
            return
        served = self._served_in(active, reason)
        # If the answer was made for another request, only we know that this one got it.
        if self._writes(caller, active.request.model, served if active.forward is not None else ""):
            self.usage.put(self._record(context, caller, active, reason, served, status, usage, now))

    def _decision(
        self, context: RequestContext, active: ActiveRequest, reason: Outcome, status: int, now: float
    ) -> Decided:
        caller, request = context.caller, active.request
        known = caller is not None and recorded(
            self._law(), request.tenant, request.model, caller.narrow, self.region, request.key
        )
        epoch, lawful = self._judged(active)
        return Decided(
            self._clock.wall_ns(now) / 1e9,
            context.decision_id,
            epoch,
            request.tenant if known else "",
            request.model[:MODEL_CHARS_MAX],
            (caller.key_id or request.key) if known and caller is not None else "",  # it shows whose it is
            request.entry_region,
            self._served_in(active, reason),
            reason.reason,
            status,
            lawful,
        )

    def _record(
        self, context: RequestContext, caller: Caller, active: ActiveRequest, reason: Outcome, served: str,
        status: int, usage: Usage | None, now: float,
    ) -> records.Record:  # fmt: skip
        request, forward, began, given = active.request, active.forward, active.began_at, context.given
        used = _used(active, usage)
        usage = used.by_engine
        return records.Record(
            self._id(context, caller, active),
            self._clock.wall_ns(now) / 1e9,
            self._stays(caller, request.model),
            (
                request.tenant,
                caller.key_id or caller.key,
                request.model[:MODEL_CHARS_MAX],
                self._version(active),
                served,
                caller.entry_region or self.region,
                status,
                reason.reason,
                request.stream,
                used.measured,
                used.prompt_tokens,
                used.cached_tokens,
                used.output_tokens,
                None if usage is None else usage.reasoning_tokens,
                used.recomputed_tokens,
                0 if forward is None else forward.attempt,
                round((now - context.arrived_at) * 1e3, 3),
                round((began - context.arrived_at) * 1e3, 3) if began else None,
                None if usage is None else self._gpu_ms(active, usage),
                request.body_bytes,
                caller.user or self._named(context, caller),
                *(() if given is None else _of_cache(given)),
            ),
        )

    def turned_away(self, context: RequestContext, reason: Outcome, status: int, now: float) -> None:
        """A request is over that was admitted, but for which no decision was made."""
        caller, files = context.caller, self.usage
        if self.audit is not None and (caller is not None or reason.source is Source.LAW):
            law, at_s = self._law(), self._clock.wall_ns(now) / 1e9
            known = caller is not None and context.recorded
            tenant, key = (caller.tenant, caller.key_id or caller.key) if known and caller is not None else ("", "")
            entry = caller.entry_region if caller is not None else ""
            self.audit.put(Decided(
                at_s, context.decision_id, law.epoch, tenant, "", key, entry, "", reason.reason, status, None
            ))  # fmt: skip
        if files is None or caller is None or reason in _UNSENT or not self._writes(caller, context.model):
            return
        if not context.recorded:  # the model has a rule of its own, and was known by then
            self.withheld += 1
            return
        entry, duration_ms = caller.entry_region or self.region, round((now - context.arrived_at) * 1e3, 3)
        files.put(records.Record(
            f"{context.decision_id}-0",
            self._clock.wall_ns(now) / 1e9,
            self._stays(caller, context.model),
            (
                caller.tenant, caller.key_id or caller.key, context.model[:MODEL_CHARS_MAX], "", "", entry, status,
                reason.reason, False, "none", None, None, None, None, 0, 0, duration_ms, None, None, 0, caller.user,
            ),
        ))  # fmt: skip

    def law_changed(self, laws: LawBook) -> None:
        """Record in the audit log that a law came into force: its author and its hash."""
        status, written = laws.status(), laws.document_after(-1)
        digest = hashlib.sha256(written or msgspec.json.encode(laws.topology(), order="sorted")).digest()
        if self.audit is None or digest == self._law_logged:
            return
        self._law_logged = digest
        fields = {name: status[name] for name in ("epoch", "source", "author", "signed_by")}
        self.audit.put(AuditEvent(_wall_s(), "law", {**fields, "sha256": digest.hex(), "as_written": bool(written)}))

    def acted(self, operator: str, what: str) -> None:
        """An operator used the admin port to change something."""
        if self.audit is not None:
            self.audit.put(AuditEvent(_wall_s(), "operator", {"who": operator[:128], "what": what[:128]}))

    def reconfigured(self) -> None:
        """Record in the audit log that a configuration came into force."""
        if self.audit is not None:
            self.audit.put(AuditEvent(_wall_s(), "configuration", {"epoch": self._law().epoch}))

    def _named(self, context: RequestContext, caller: Caller) -> str:
        """The user that the request's body names, if no token did."""
        salt = self._user_salt
        return hidden_user(salt, caller.tenant, context.user) if context.user and salt else ""

    def _writes(self, caller: Caller, model: str, served: str = "") -> bool:
        """Whether this balancer writes the record. If the entry may not, the region that served the request does, if it
        may."""
        law, narrow = self._law(), caller.narrow
        tenant, key = caller.tenant, caller.key
        if not recorded(law, tenant, model, narrow, self.region, key):
            elsewhere = bool(caller.issuer) or (served and recorded(law, tenant, model, narrow, served, key))
            self.withheld += not elsewhere
            return False
        return not caller.issuer or not recorded(law, tenant, model, narrow, caller.entry_region, key)

    def _stays(self, caller: Caller, model: str) -> bool:
        delivery = self.delivery
        if delivery is None or not delivery.region or delivery.region == self.region:
            return False
        return not recorded(self._law(), caller.tenant, model, caller.narrow, delivery.region, caller.key)

    def _may_leave(self, tenant: str, model: str, key: str) -> bool:
        """By the law of now, which may narrow the key that the record names: an issued key, and one that is gone, stay
        within what holds for their tenant."""
        delivery, law = self.delivery, self._law()
        if delivery is None or not delivery.region or delivery.region == self.region:
            return True
        known = law.topology.tenants.get(tenant)
        of_law = known is not None and any(one.name == key for one in known.keys)
        return recorded(law, tenant, model, (), delivery.region, key if of_law else "")

    def _id(self, context: RequestContext, caller: Caller, active: ActiveRequest) -> str:
        if caller.attempt:
            number = caller.attempt.rpartition("/")[2]  # as the balancer above counts
        else:
            number = "0" if active.forward is None else str(active.forward.attempt)
        return f"{context.decision_id}-{number}"

    def _served_in(self, active: ActiveRequest, reason: Outcome) -> str:
        given = active.context.given
        if active.forward is None and given is not None and active.began_at:
            return str(given.region)
        if active.forward is None or not (active.began_at or reason is outcome.SERVED):
            return ""
        target = active.forward.target
        return target if target in self._law().topology.regions else self.region  # else it is a replica's name

    # -- its life

    async def open(self) -> None:
        """Start writing. Raises ConfigError if that is impossible."""
        if self.audit is not None:
            await self._open_audit(self.audit)
        if self.usage is None:
            return
        try:
            await asyncio.to_thread(self.usage.open)
        except OSError as error:
            problem = f"{self.usage.folder} cannot be written: {error.strerror or error}; give another place"
            raise ConfigError("usage.dir", [problem]) from None
        if self.usage.unclean:
            self._log.warning(
                "usage", "unclean", problem="the process before was killed: what it was handed in its last tenth of a "
                "second may be lost", torn_lines=self.usage.torn,
            )  # fmt: skip
        self._tasks.start(self._watch(self.usage, "usage"), "look after usage")
        if self.price_file is not None:
            self._tasks.start(self.price_file.keep(self._priced), "look at the prices")
        if self.delivery is not None:
            self._tasks.start(self.delivery.keep(), "deliver usage")

    def _priced(self) -> None:
        file = self.price_file
        assert file is not None
        if file.trouble:
            self._log.error(
                "prices", "passed over", problem=file.trouble, remedy="the last good price book stays in force"
            )
        else:
            self._log.warning("prices", "in force", epoch=file.prices.epoch_at(_wall_s()))

    async def _open_audit(self, log: AuditLog) -> None:
        try:
            await asyncio.to_thread(log.open)
        except OSError as error:
            problem = f"{log.folder} cannot be written: {error.strerror or error}; give another place"
            raise ConfigError("audit.dir", [problem]) from None
        except LogError as error:
            raise ConfigError("audit.dir", [str(error)]) from None
        if log.unclean:
            problem = "the process before was killed: decisions of its last moments may be missing; the log says so"
            self._log.warning("audit", "unclean", problem=problem, recovered=log.recovered)
        self._tasks.start(self._watch(log, "audit"), "look after the audit log")

    async def close(self) -> None:
        """Write all queued records, and stop."""
        await self._tasks.close()
        if self.audit is not None:
            await asyncio.to_thread(self.audit.close)
        if self.usage is not None:
            await asyncio.to_thread(self.usage.close)
        if self.delivery is not None:
            await self.delivery.close()

    async def _watch(self, written: Segments | AuditLog, what: str) -> None:
        before = ""
        while True:
            await asyncio.sleep(IDLE_S)
            if written.trouble == before:
                continue
            before = written.trouble
            if before:
                requests = "refused" if written in self._must else "served"
                self._log.error(f"{what} is not written", before, problem=before, requests=requests, lost=written.lost)
            else:
                self._log.warning(f"{what} is written again", what, lost=written.lost)

    def status(self) -> dict[str, Any]:
        """The state as a JSON-ready value, for operators."""
        return self._usage_status() | self._audit_status()

    def _audit_status(self) -> dict[str, Any]:
        log = self.audit
        if log is None:
            return {}
        return {"audit": {
            "folder": str(log.folder), "origin": log.origin, "trouble": log.trouble or None, "entries": log.size,
            "signed": log.sealed, "lost": log.lost, "ended_unclean_before": log.unclean,
        }}  # fmt: skip

    def _usage_status(self) -> dict[str, Any]:
        files, delivery = self.usage, self.delivery
        if files is None:
            return {}
        status: dict[str, Any] = {
            "folder": str(files.folder), "trouble": files.trouble or None, "written": files.written,
            "lost": files.lost, "withheld_by_law": self.withheld, "bytes": files.bytes_held,
        }  # fmt: skip
        if (file := self.price_file) is not None:
            status["prices"] = {"epoch": file.prices.epoch_at(_wall_s()), "trouble": file.trouble or None}
        if delivery is not None:
            status["delivery"] = {
                "trouble": delivery.trouble or None, "delivered": delivery.delivered, "rejected": delivery.rejected,
                "kept_back_by_law": delivery.kept_back,
            }  # fmt: skip
        return {"usage": status}

    def _observe_audit(self, metrics: TierMetrics, log: AuditLog) -> None:
        metrics.gauge("audit_entries", "Entries of the audit log, signed or not.", lambda: float(log.size))
        metrics.gauge("audit_unsigned", "Audit entries no checkpoint names yet.", lambda: float(log.size - log.sealed))
        metrics.counter("audit_lost", "Decisions that the audit log could not take.", lambda: float(log.lost))
        metrics.gauge("audit_trouble", "1 while the audit log cannot be written.", lambda: float(bool(log.trouble)))

    def _observe_usage(self, metrics: TierMetrics, files: Segments) -> None:
        delivery = self.delivery

        def counts() -> dict[str, float]:
            return {"written": files.written, "lost": files.lost, "withheld": self.withheld}

        def delivered() -> dict[str, float]:
            sent = delivery
            if sent is None:
                return {}
            return {"delivered": sent.delivered, "rejected": sent.rejected, "kept_back": sent.kept_back}

        def trouble() -> dict[str, float]:
            troubles = {"files": float(bool(files.trouble))}
            if (file := self.price_file) is not None:
                troubles["prices"] = float(bool(file.trouble))
            return troubles if delivery is None else {**troubles, "delivery": float(bool(delivery.trouble))}

        metrics.counter("usage_records", "Usage records, by what became of them here.", counts, "result")
        metrics.counter("usage_deliveries", "Usage records sent on, by what became of them.", delivered, "result")
        metrics.counter("usage_unclean_starts", "Starts after a kill: usage may lack 0.1 s.", lambda: files.unclean)
        metrics.gauge("usage_trouble", "1 while usage cannot be written, or sent on, or priced again.", trouble, "part")
        metrics.gauge("usage_spool_bytes", "Usage records on the disk.", lambda: float(files.bytes_held))


class _Used(NamedTuple):
    """The tokens that a request counts as having used; None: not counted. `measured`: who counted them; `by_engine`:
    the same figures as an engine would report them."""

    measured: str
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    recomputed_tokens: int
    by_engine: Usage | None


def _used(active: ActiveRequest, usage: Usage | None) -> _Used:
    progress, measured, again = active.progress, "engine", 0
    if progress is not None:
        again = progress.recomputed
        if progress.counts and (usage is None or progress.resumed):
            usage, measured = progress.usage, "ids"  # it broke: what passed was counted here
    if usage is None:
        if active.began_at and active.forward is None:  # it is another's answer
            return _Used("again", 0, None, 0, again, None)
        return _Used("none", None, None, None, again, None)
    if active.request.continues is not None:
        # Its prompt is that of an answer that began elsewhere, which was written down there.
        return _Used(measured, 0, None, usage.completion_tokens, usage.prompt_tokens, usage)
    return _Used(measured, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, again, usage)


def _of_cache(given: CacheUse) -> tuple[str, int, int]:
    saved = given.saved
    return (given.outcome, 0, 0) if saved is None else (given.outcome, saved.prompt_tokens, saved.completion_tokens)


def _wall_s() -> float:
    return wall().timestamp()
