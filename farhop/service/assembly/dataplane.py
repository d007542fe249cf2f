"""Builds the parts of a process's data plane: limits, TLS, the upstream pool, listeners, and their gauges.

The input is a checked configuration. Never decides a default: defaults are declared with the fields.
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from typing import TYPE_CHECKING

from msgspec.structs import replace

from farhop.balance.bounds import ByteBudget, SlotLimit
from farhop.config import ConfigError
from farhop.relay.http.connection import ClientLimits
from farhop.relay.http.listener import ConnectionSlots, Listener
from farhop.relay.http.tls import ListenerTls
from farhop.relay.upstream.pool import Pool, UpstreamLimits
from farhop.relay.upstream.resumable import MODES, ResumeMode, Resumption
from farhop.service.admission.large_bodies import LargeBodyReader
from farhop.service.config.certificates import TlsError, TlsManager, system_context
from farhop.service.process.clock import wall
from farhop.service.process.loop_lag import LoopLag
from farhop.service.process.tasks import Tasks, until

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from farhop.balance.machine import Address
    from farhop.relay.http.exchange import RequestHandler
    from farhop.service.assembly.instruments import Instruments
    from farhop.service.config.certificates import Certificates, Files
    from farhop.service.config.endpoints import ConnectTls, Listen
    from farhop.service.config.process import ClientListen, Limits, Process, ResumeConfig
    from farhop.telemetry.logs import Throttled
    from farhop.telemetry.metrics import TierMetrics
    from topology.law import Law

_JOIN_S = 5.0
_DESCRIPTORS_ASIDE = 256  # etcd, gRPC, the admin port, logs, and connections that are turned away with an answer


def client_limits(limits: Limits) -> ClientLimits:
    """The limits of the clients' side."""
    return ClientLimits(
        head_bytes_max=limits.head_bytes_max,
        headers_max=limits.headers_max,
        body_bytes_max=limits.body_bytes_max,
        connections_max=limits.connections_max,
        connections_per_client_max=limits.connections_per_client_max,
        idle_s=limits.idle_s,
        drain_idle_s=limits.drain_idle_s,
        head_s=limits.head_s,
        body_s=limits.body_s,
        upload_s=limits.upload_s,
        upload_bytes_per_s_min=limits.upload_bytes_per_s_min,
        send_s=limits.send_s,
    )


def upstream_limits(limits: Limits) -> UpstreamLimits:
    """The limits of the upstreams' side."""
    return UpstreamLimits(
        connect_s=limits.connect_s,
        first_byte_s=limits.first_byte_s,
        whole_answer_s=limits.whole_answer_s,
        between_bytes_s=limits.between_bytes_s,
        idle_s=limits.upstream_idle_s,
        idle_max=limits.upstream_idle_max,
        streams_max=limits.streams_per_upstream_max,
    )


# Those that `DataPlane.relimit` changes in a process that lives, and `drain_s`, which is read when it ends.
LIVE_LIMITS = tuple(
    f"limits.{name}"
    for name in (
        "head_bytes_max", "headers_max", "body_bytes_max", "connections_max", "connections_per_client_max", "idle_s",
        "drain_idle_s", "head_s", "body_s", "upload_s", "upload_bytes_per_s_min", "send_s", "connect_s", "first_byte_s",
        "whole_answer_s", "between_bytes_s", "upstream_idle_s", "upstream_idle_max", "streams_per_upstream_max",
        "drain_s",
    )
)  # fmt: skip


def context_of(certificates: Certificates | None) -> Callable[[], ssl.SSLContext]:
    """A function that gives the TLS context of the next outgoing connection."""
    return system_context if certificates is None else certificates.context


class TlsSetup:
    """A process's certificates, and the logs and metrics of their failures."""

    def __init__(self, manager: TlsManager, metrics: TierMetrics, log: Throttled) -> None:
        self.manager, self._metrics, self._log, self._tasks = manager, metrics, log, Tasks()
        metrics.gauge(
            "certificate_expiry_timestamp_seconds",
            "When each certificate ends.",
            manager.not_after,
            "part",
        )
        metrics.gauge("certificate_stale", "1 if the files changed and cannot be used.", manager.stale, "part")

    def open(self) -> None:
        """Begin to watch the files."""
        self._tasks.start(self.manager.keep(), "look at the certificates")

    async def close(self) -> None:
        """Stop watching the files."""
        await self._tasks.close()

    def certificates(self, part: str, files: Files) -> Certificates:
        """The certificates of a part of the configuration. Raises ConfigError."""
        try:
            return self.manager.add(part, files)
        except TlsError as error:
            raise ConfigError(part, [str(error)]) from None

    def upstream(self, part: str, given: ConnectTls | None) -> Certificates | None:
        """The certificates for outgoing connections; None if none are configured. Raises ConfigError."""
        return None if given is None else self.certificates(part, given.files)

    def pool(self, limits: Limits, certificates: Certificates | None) -> Pool:
        """The pool of connections to upstreams; without certificates the system's authorities are believed."""
        return Pool(upstream_limits(limits), context_of(certificates), self.trouble)

    def listened(self, name: str, listen: Listen | None, protocol: str = "http/1.1") -> Certificates | None:
        """The certificates of a port that this process serves; None for plaintext. Raises ConfigError."""
        if listen is None or listen.tls is None:
            return None
        return self.certificates(f"{name}.tls", replace(listen.tls.files, protocol=protocol))

    def listener(
        self,
        name: str,
        listen: Listen | None,
        admits: Callable[[bytes | None], bool] | None = None,
        protocol: str = "http/1.1",
    ) -> ListenerTls | None:
        """As `listened`, for a listener, whose failed handshakes are counted and logged. `admits`: see ListenerTls."""
        certificates = self.listened(name, listen, protocol)
        if certificates is None or listen is None or listen.tls is None:
            return None

        def refused(reason: str) -> None:
            self._metrics.handshake_refused(name, reason)
            self._log.warning("TLS handshake refused", f"{name} {reason}", listener=name, reason=reason)

        return ListenerTls(certificates.context, listen.tls.handshake_s, refused, admits)

    def trouble(self, address: Address, why: str) -> None:
        """TLS towards an upstream failed, or it sent unsolicited data."""
        self._log.warning("upstream trouble", str(address), upstream=str(address), problem=why)


def _descriptors() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


async def open_entry(listener: Listener, entry: ClientListen, ready: Callable[[], bool]) -> int:
    """Listen for clients; returns the port. A shared port is joined once a target is known, or after a while in any
    case: otherwise the kernel would send this instance its share of clients before it can serve them."""
    if entry.reuse_port:
        await until(ready, _JOIN_S)
    return await listener.open(entry.host, entry.port, reuse_port=entry.reuse_port)


class DataPlane:
    """What requests pass through, and the bounds that all listeners of a process share. `part` of the configuration
    says how upstreams are connected to (`upstream`); `aside` are the file descriptors that something else of the
    process may take at a time. `slots` bound the connections of clients: each may need a descriptor upstream, too."""

    def __init__(
        self, config: Process, instruments: Instruments, part: str, upstream: ConnectTls | None, aside: int = 0
    ) -> None:
        limits, self._log = config.limits, instruments.log
        self._limits, self._listeners = limits, list[Listener]()
        self.tls = TlsSetup(TlsManager(instruments.logger, wall), instruments.metrics, instruments.log)
        self.certificates = self.tls.upstream(part, upstream)
        self.pool = self.tls.pool(limits, self.certificates)
        self.budget, self.requests = ByteBudget(limits.buffered_bytes_max), SlotLimit(limits.requests_max)
        self.slots = ConnectionSlots(max(1, (_descriptors() - aside - _DESCRIPTORS_ASIDE) // 2))
        self.guard, self.large, self.lag = config.requests.guard(), LargeBodyReader(), LoopLag()

    def listener(
        self, name: str, handler: RequestHandler, tls: ListenerTls | None, *, is_hop: bool = False
    ) -> Listener:
        """A new listener under these limits."""
        limits = client_limits(self._limits)
        made = Listener(
            name, handler, limits, self.budget, self.slots, self.requests, is_hop=is_hop, tls=tls
        )  # fmt: skip
        self._listeners.append(made)
        return made

    def open(self) -> None:
        """Begin to look at certificates and at the loop. Say so if not even one listener's connections fit."""
        self.tls.open()
        self.lag.open()
        most = self._limits.connections_max
        if self.slots.capacity < most:
            problem = (
                f"limits.connections_max {most} does not fit: with {_descriptors()} file descriptors at most"
                f" {self.slots.capacity} clients are let in; raise the hard limit (ulimit -Hn, LimitNOFILE) or lower it"
            )
            self._log.warning("limits", problem=problem)

    async def drain(self) -> None:
        """No new connections; requests under way may finish, for as long as is configured."""
        await asyncio.gather(*(listener.close(self._limits.drain_s) for listener in self._listeners))

    async def close(self) -> None:
        """Stop what `open` started."""
        self.large.close()
        await self.tls.close()
        await self.lag.close()

    def relimit(self, limits: Limits) -> None:
        """By these bounds from now on; connections of clients that are there keep to those they came under."""
        self._limits = limits
        self.pool.limits = upstream_limits(limits)
        for listener in self._listeners:
            listener.set_limits(client_limits(limits))

    def observe(self, metrics: TierMetrics) -> None:
        """Show what is held here and what was turned away unread."""
        gauge, counter, budget = metrics.gauge, metrics.counter, self.budget
        gauge("buffered_bytes", "Request bytes held.", lambda: float(budget.used_bytes))
        gauge("buffered_answer_bytes", "Answer bytes held, as last looked at.", lambda: float(budget.noted))
        gauge("buffering_tenants", "Tenants with something buffered.", lambda: float(budget.holders))
        gauge(
            "request_slots_used", "Requests in flight, against limits.requests_max.", lambda: float(self.requests.used)
        )
        gauge("loop_lag_seconds", "The longest that the event loop was late in the last 15 s.", self.lag.worst_s)
        counter("loop_late_seconds", "Seconds that the event loop was late.", lambda: self.lag.total_s)
        gauge("buffered_bytes_max", "Request bytes that may be held.", lambda: float(budget.capacity_bytes))
        counter(
            "unknown_body_fields", "Requests with a body field unknown here.", lambda: dict(self.guard.unknown), "field"
        )
        counter(
            "large_bodies", "Bodies read in a process of their own, by how.", lambda: dict(self.large.counts), "how"
        )
        gauge("upstream_connections", "Open connections upstream.", lambda: float(self.pool.connections))

        def clients() -> dict[str, float]:
            return {listener.name: float(listener.connections) for listener in self._listeners}

        gauge("connections", "Open connections of clients.", clients, "listener")
        metrics.refused_unread = lambda: sum((li.refused for li in self._listeners), Counter())


def resumption(
    config: ResumeConfig,
    law: Callable[[], Law],
    metrics: TierMetrics,
    context_tokens: Callable[[str, str], int | None],
    writes_on: Callable[[str], bool] = lambda _target: False,
) -> Resumption | None:
    """How streams are continued elsewhere, with its counters; None if that is off. By the stricter of the configuration
    and the tenant's setting. `context_tokens`, `writes_on`: see Resumption."""
    if not config.on:
        return None

    def mode(tenant: str, model: str) -> ResumeMode:
        known = law().topology.tenants.get(tenant)
        return min(config.of(model), "off" if known is None else known.resume, key=MODES.index)

    made = Resumption(context_tokens, mode=mode, writes_on=writes_on)
    metrics.counter(
        "resumes",
        "Streams whose engine broke, by what became of them, and streams that could not have gone on, by why.",
        lambda: dict(made.outcomes), ("outcome", "reason"),
    )  # fmt: skip
    metrics.counter(
        "resume_recomputed_tokens", "Tokens computed again for streams that continued elsewhere; not billed.",
        lambda: made.recomputed_tokens,
    )  # fmt: skip
    metrics.gauge(
        "resume_kept_bytes", "Bytes kept of streams, so that they can go on elsewhere.", lambda: made.kept_bytes
    )
    return made
