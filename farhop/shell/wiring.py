"""From a checked configuration to the parts it configures. Never decides a default: those stand with the fields."""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farhop.balance.limits import SlotLimit
from farhop.relay.inbound import InboundLimits
from farhop.relay.outbound import OutboundLimits, Pool
from farhop.relay.tls import ListenerTls
from farhop.shell.certificates import TlsError, system_context
from farhop.shell.config import ConfigError
from farhop.shell.lawbook import LawBook
from farhop.shell.tasks import Tasks
from farhop.store.hubs import store_of, stores_of
from farhop.store.kept import KeptStore, kept_of
from farhop.store.sealed import Sealed, inner
from farhop.store.state import StateDir
from topology import load as worlds

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable
    from random import Random

    from farhop.balance.limits import ByteBudget
    from farhop.balance.machine import Address
    from farhop.relay.guard import Guard
    from farhop.relay.listener import Listener
    from farhop.shell.certificates import Cabinet, Certificates, Files
    from farhop.shell.config import ConnectTls, Entry, Etcd, Limits, Listen, Process
    from farhop.shell.lag import LoopLag
    from farhop.shell.large import LargeBodies
    from farhop.store.contract import Store
    from farhop.store.envelope import Keys
    from farhop.store.etcd_link import EtcdSettings
    from farhop.telemetry.logs import Throttled
    from farhop.telemetry.metrics import TierMetrics
    from topology.law import Law
    from topology.model import Topology

NEAREST, NONE = "nearest", "none"  # instead of a remote hub's name
_JOIN_S = 5.0
_DESCRIPTORS_ASIDE = 256  # etcd, gRPC, the admin port, logs, and connections that are turned away with an answer


def world(config: Process) -> Topology:
    """The topology named: a file, or a ready-made world. Raises TopologyError or ConfigError."""
    name = config.topology
    path = Path(name) if name.endswith((".yaml", ".yml")) else worlds.shipped(name)
    topology = worlds.load(path)
    if config.region not in topology.regions:
        known = ", ".join(sorted(topology.regions))
        raise ConfigError("region", [f"{config.region!r} is not in topology {topology.name!r}; it has {known}"])
    return topology


def hubs(config: Process, topology: Topology) -> dict[str, EtcdSettings]:
    """The etcd clusters to use, by name: the one configured, else every hub of the topology. Raises ConfigError."""
    own = topology.regions[config.region].hub
    if config.etcd.endpoints:
        if config.hubs:
            raise ConfigError("etcd.endpoints", ["they are one cluster, and `hubs` are several; leave one of them out"])
        return {own: _hub(own, config.etcd, ())}
    for name in sorted(set(config.hubs) - set(topology.hubs)):
        known = ", ".join(sorted(topology.hubs)) or "none"
        raise ConfigError(f"hubs.{name}", [f"topology {topology.name!r} has no hub of this name; it has {known}"])
    parts = {name: (config.hubs.get(name, config.etcd), topology.hubs[name]) for name in sorted(topology.hubs)}
    found = {
        name: _hub(name, part, endpoints) for name, (part, endpoints) in parts.items() if part.endpoints or endpoints
    }
    if own not in found:
        raise ConfigError("etcd.endpoints", [f"none given, and hub {own!r} of the topology has none; add some"])
    return found


def home_hubs(config: Process, topology: Topology, remote: str) -> dict[str, EtcdSettings]:
    """Of those, the hub of this region and one more: the one named, or NEAREST by wire time, or NONE.

    A hub is as far as the nearest region that calls it its own. Raises ConfigError.
    """
    own, known = topology.regions[config.region].hub, hubs(config, topology)
    if remote == NEAREST:
        others = sorted((_away_ms(name, config.region, topology), name) for name in known if name != own)
        remote = others[0][1] if others else NONE
    elif remote not in (NONE, *known):
        raise ConfigError("remote_hub", [f"no hub {remote!r} with endpoints; there is {', '.join(sorted(known))}"])
    return {name: known[name] for name in sorted({own, remote} & set(known))}


def state(config: Process, tier: str) -> StateDir | None:
    """Where this process keeps what a restart must know; None: nowhere. Raises ConfigError."""
    if config.state_dir is None:
        return None
    try:
        return StateDir(Path(config.state_dir), config.fleet, f"{tier}.{config.region}.{config.instance}")
    except ValueError as error:
        raise ConfigError("state_dir", [str(error)]) from None


def keep(config: Process, tier: str, rng: Random, log: Throttled) -> Callable[[str, Store], Store]:
    """For `store_of`: what each hub told is on disk, too, where the configuration has a place for it."""
    where = state(config, tier)

    def say(problem: str) -> None:
        log.error("kept state", problem, problem=problem)

    return lambda hub, one: one if where is None else KeptStore(one, hub, where, rng, say)


def sealed(
    given: Store | Mapping[str, EtcdSettings],
    keys: Keys,
    refused: Callable[[str], None],
    rng: Random,
    keep: Callable[[str, Store], Store] = lambda _name, one: one,
) -> Store:
    """The store of these hubs, or the one given, whose readers see what counts by these keys. What is kept on disk is
    as it was written: it is judged again when it is read."""
    if isinstance(given, Mapping):
        return store_of(given, rng, lambda name, one: Sealed(keep(name, one), keys, refused))
    return Sealed(given, keys, refused)


def kept(store: Store, hub: str) -> list[dict[str, Any]]:
    """What is told of what this store has on disk; a single hub goes by `hub`."""
    return kept_of(inner(one) for one in stores_of(store, hub).values())


def law_book(
    config: Process,
    tier: str,
    store: Store,
    law: Law,
    adopt: Callable[[Law], None],
    metrics: TierMetrics,
    log: Throttled,
    rng: Random,
) -> LawBook:
    """The law as this process follows it: in each hub by itself, signature and all. Raises ConfigError."""
    hub = law.topology.regions[config.region].hub
    stores = {name: inner(one) for name, one in stores_of(store, hub).items()}
    keys, kept = config.signing.made(), state(config, tier)
    return LawBook(stores, law, adopt, metrics.report_refused, log, keys=keys, state=kept, rng=rng)


def _away_ms(hub: str, region: str, topology: Topology) -> float:
    near = (topology.rtt_ms(region, other) for other, known in topology.regions.items() if known.hub == hub)
    return min(near, default=inf)


def _hub(name: str, given: Etcd, endpoints: tuple[str, ...]) -> EtcdSettings:
    try:
        return given.settings(endpoints)
    except ValueError as error:
        raise ConfigError(f"hub {name!r} of the topology", [str(error)]) from None


def inbound(limits: Limits) -> InboundLimits:
    """Bounds of the client's side."""
    return InboundLimits(
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


def outbound(limits: Limits) -> OutboundLimits:
    """Bounds of the upstream's side."""
    return OutboundLimits(
        connect_s=limits.connect_s,
        first_byte_s=limits.first_byte_s,
        whole_answer_s=limits.whole_answer_s,
        between_bytes_s=limits.between_bytes_s,
        idle_s=limits.upstream_idle_s,
        idle_max=limits.upstream_idle_max,
        streams_max=limits.streams_per_upstream_max,
    )


def context_of(certificates: Certificates | None) -> Callable[[], ssl.SSLContext]:
    """What gives the TLS context for the next connection of ours."""
    return system_context if certificates is None else certificates.context


class Secrecy:
    """What a process needs for TLS: its certificates, and where failures are told."""

    def __init__(self, cabinet: Cabinet, metrics: TierMetrics, log: Throttled) -> None:
        self.cabinet, self._metrics, self._log, self._tasks = cabinet, metrics, log, Tasks()
        metrics.gauge(
            "certificate_not_after_seconds", "When each certificate ends, epoch seconds.", cabinet.not_after, "part"
        )
        metrics.gauge("certificate_stale", "1 if the files changed to what cannot be used.", cabinet.stale, "part")

    def open(self) -> None:
        """Begin to look at the files."""
        self._tasks.start(self.cabinet.keep(), "look at the certificates")

    async def close(self) -> None:
        """Look no more."""
        await self._tasks.close()

    def certificates(self, part: str, files: Files) -> Certificates:
        """The certificates of a part of the configuration. Raises ConfigError."""
        try:
            return self.cabinet.add(part, files)
        except TlsError as error:
            raise ConfigError(part, [str(error)]) from None

    def upstream(self, part: str, given: ConnectTls | None) -> Certificates | None:
        """For connections of ours; None where nothing is configured. Raises ConfigError."""
        return None if given is None else self.certificates(part, given.files)

    def pool(self, limits: Limits, certificates: Certificates | None) -> Pool:
        """The pool of connections to upstreams; without certificates the system's authorities are believed."""
        return Pool(outbound(limits), context_of(certificates), self.trouble)

    def listened(self, name: str, listen: Listen | None) -> Certificates | None:
        """For a port that others come to; None where it is to speak plaintext. Raises ConfigError."""
        if listen is None or listen.tls is None:
            return None
        return self.certificates(f"{name}.tls", listen.tls.files)

    def listener(
        self, name: str, listen: Listen | None, admits: Callable[[bytes | None], bool] | None = None
    ) -> ListenerTls | None:
        """As `listened`, for a listener, whose failed handshakes are counted and told; `admits`: see ListenerTls."""
        certificates = self.listened(name, listen)
        if certificates is None or listen is None or listen.tls is None:
            return None

        def refused(reason: str) -> None:
            self._metrics.handshake_refused(name, reason)
            self._log.warning("TLS handshake refused", f"{name} {reason}", listener=name, reason=reason)

        return ListenerTls(certificates.context, listen.tls.handshake_s, refused, admits)

    def trouble(self, address: Address, why: str) -> None:
        """TLS towards an upstream failed."""
        self._log.warning("TLS upstream failed", str(address), upstream=str(address), problem=why)


def slots(aside: int = 0) -> SlotLimit:
    """How many client connections the process may have: each may need a descriptor upstream, too.

    `aside` are the descriptors that something else of the process may take at a time.
    """
    return SlotLimit(max(1, (_descriptors() - aside - _DESCRIPTORS_ASIDE) // 2))


def check_descriptors(limits: Limits, slots: SlotLimit, log: Throttled) -> None:
    """Say so if not even one listener's connections fit."""
    if slots.capacity < limits.connections_max:
        problem = (
            f"limits.connections_max {limits.connections_max} does not fit: with {_descriptors()} file descriptors at"
            f" most {slots.capacity} clients are let in; raise the hard limit (ulimit -Hn, LimitNOFILE) or lower it"
        )
        log.warning("limits", problem=problem)


def _descriptors() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


async def open_entry(listener: Listener, entry: Entry, ready: Callable[[], bool], settle_s: float = 0.0) -> int:
    """Listen for clients; returns the port. A shared port is joined when work can be done, or after a while all the
    same: the kernel would send this instance its share of clients before it knows anybody to send them to. One's own
    port waits for `settle_s`: clients who went elsewhere when we were gone are better off there until then."""
    loop = asyncio.get_running_loop()
    end = loop.time() + (_JOIN_S if entry.reuse_port else settle_s)
    while not ready() and loop.time() < end:
        await asyncio.sleep(0.01)
    return await listener.open(entry.host, entry.port, reuse_port=entry.reuse_port)


def observe(
    metrics: TierMetrics,
    budget: ByteBudget,
    requests: SlotLimit,
    pool: Pool,
    lag: LoopLag,
    guard: Guard,
    large: LargeBodies,
    *listeners: Listener,
) -> None:
    """Show what the data plane holds and what it turned away unread, as both tiers do."""
    gauge = metrics.gauge
    gauge("buffered_bytes", "Request bytes held.", lambda: float(budget.used_bytes))
    gauge("answer_bytes", "Answer bytes held, as last looked at.", lambda: float(budget.noted))
    gauge("buffering_tenants", "Tenants with something buffered.", lambda: float(budget.holders))
    gauge("requests_counted", "Requests under way, against limits.requests_max.", lambda: float(requests.used))
    gauge("loop_lag_seconds", "The longest that the event loop was late of late.", lag.worst_s)
    gauge("loop_late_seconds", "By how much it was late since the start, in all.", lambda: lag.total_s)
    gauge("buffered_bytes_max", "Request bytes that may be held.", lambda: float(budget.capacity_bytes))
    gauge("unknown_body_fields", "Requests with a body field that nobody knows.", lambda: dict(guard.unknown), "field")
    gauge("large_bodies", "Bodies read in a process of their own, by how.", lambda: dict(large.counts), "how")
    gauge("upstream_connections", "Open connections upstream.", lambda: float(pool.connections))

    def clients() -> dict[str, float]:
        return {listener.name: float(listener.connections) for listener in listeners}

    gauge("connections", "Open connections of clients.", clients, "listener")
    metrics.refused_unread = lambda: sum((li.refused for li in listeners), Counter())
