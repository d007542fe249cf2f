"""One emulated link between two regions: an HTTP CONNECT proxy on a loopback port, whose settings can be changed live.

A connection through it behaves as over the real distance: a round trip to connect, delay and jitter in order, resets if
it is cut, silence if it is frozen. Reaches only loopback and allowed hosts. Close it in the end.
"""

from __future__ import annotations

import asyncio
import math
from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from farhop_lab.wan.alarm import Alarm
from farhop_lab.wan.shaper import LinkSettings
from farhop_lab.wan.tunnel import LinkLimits, Path, Tunnel

if TYPE_CHECKING:
    from random import Random

HOST = "127.0.0.1"
DELAY_MS_MAX = 600_000.0
_BREAK_S = 1.0  # the time to break the connections that are left
_MBPS_BYTES = 125_000.0


class LinkState(Enum):
    """A link's state."""

    OPEN = "open"
    CUT = "cut"  # connections break, new ones get 502
    FROZEN = "frozen"  # silence: nothing is answered, nothing closes


class LinkStats(msgspec.Struct, frozen=True):
    """A link's counters since it was made, and its open `connections`. Bytes: delivered payload."""

    state: LinkState
    connections: int
    accepted: int
    established: int  # answered 200
    failed: int  # answered 502 or 504: the fault of the network or the far side
    refused: int  # answered 4xx or 503: the client's fault
    out_bytes: int  # from the clients
    back_bytes: int  # to the clients


class LinkError(ValueError):
    """An impossible setting, or use of a link that is not started; the text names it and the remedy."""


class Link:
    """A link named after its direction, such as `tokyo>frankfurt`; bytes flow both ways, connections are made one way.

    `delay_ms` is one way; each chunk's is drawn uniformly within `jitter_ms` of it. `bandwidth_mbps` (10^6 bits a
    second each way, shared by all connections) is unbounded unless given.
    """

    def __init__(
        self,
        name: str,
        delay_ms: float,
        jitter_ms: float = 0.0,
        *,
        rng: Random,
        bandwidth_mbps: float | None = None,
        limits: LinkLimits | None = None,
        allowed_hosts: frozenset[str] = frozenset(),
    ) -> None:
        self.name = name
        self._settings = LinkSettings(0.0, 0.0)
        self._rng, self._limits, self._allowed_hosts = rng, limits or LinkLimits(), allowed_hosts
        self.path: Path | None = None
        self._server: asyncio.Server | None = None
        self._own_alarm: Alarm | None = None
        self._port = 0
        self.state = LinkState.OPEN
        self.set(delay_ms=delay_ms, jitter_ms=jitter_ms)
        if bandwidth_mbps is not None:
            self.set(bandwidth_mbps=bandwidth_mbps)

    # -- life cycle

    async def start(self, alarm: Alarm | None = None) -> None:
        """Listen on a free port. Links on one loop may share an alarm; its maker closes it, after the links."""
        if self._server is not None:
            return
        if alarm is None:
            alarm = self._own_alarm = Alarm()
        path = self.path = Path(self._settings, self._rng, alarm, self._limits, self._allowed_hosts)
        path.is_cut = self.state is LinkState.CUT
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Tunnel(path).near, HOST, 0, backlog=1024)
        self._port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening and break open connections."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        assert self.path is not None
        end = asyncio.get_running_loop().time() + _BREAK_S
        while True:
            for tunnel in tuple(self.path.tunnels):
                tunnel.break_off()
            if not self.path.tunnels or asyncio.get_running_loop().time() > end:
                break
            await asyncio.sleep(0.001)
        if self._own_alarm is not None:
            self._own_alarm.close()
            self._own_alarm = None

    async def __aenter__(self) -> Link:
        await self.start()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    @property
    def port(self) -> int:
        """The proxy's port on loopback. Raises LinkError before `start`."""
        if self._server is None:
            raise LinkError(f"link {self.name}: has no port unless started; start it first")
        return self._port

    @property
    def url(self) -> str:
        """The proxy's URL, as `grpc.http_proxy` and HTTPS_PROXY take it. Raises LinkError before `start`."""
        return f"http://{HOST}:{self.port}"

    # -- live control

    def set(
        self, *, delay_ms: float | None = None, jitter_ms: float | None = None, bandwidth_mbps: float | None = None
    ) -> None:
        """Change the given settings, from the next chunk on; what is under way keeps its time. Raises LinkError.

        A `bandwidth_mbps` of infinity removes the limit.
        """
        for name, value in (("delay_ms", delay_ms), ("jitter_ms", jitter_ms)):
            if value is not None and not 0 <= value <= DELAY_MS_MAX:
                raise LinkError(f"link {self.name}: {name}: {value} is not within 0 to {DELAY_MS_MAX:g} ms")
        if bandwidth_mbps is not None and not bandwidth_mbps > 0:
            raise LinkError(f"link {self.name}: bandwidth_mbps: {bandwidth_mbps} is not above 0")
        if delay_ms is not None:
            self._settings.delay_s = delay_ms / 1000
        if jitter_ms is not None:
            self._settings.jitter_s = jitter_ms / 1000
        if bandwidth_mbps is not None:
            self._settings.bytes_per_s = None if math.isinf(bandwidth_mbps) else bandwidth_mbps * _MBPS_BYTES

    def cut(self) -> None:
        """Break the link: open connections are reset at both ends, those being made get 502 a one-way delay later.

        The break is half-way: half the way out and half back make one delay.
        """
        self._enter(LinkState.CUT)
        for tunnel in self._tunnels():
            tunnel.cut()

    def freeze(self) -> None:
        """Silence: bytes, FIN and RST are lost both ways, nothing is answered, nothing closes. After `heal` what was
        lost is sent again, as TCP would.
        """
        self._enter(LinkState.FROZEN)

    def blackhole(self) -> None:
        """As freeze, but present connections stay dead after `heal`, too (a NAT that lost its state)."""
        self._enter(LinkState.FROZEN)
        for tunnel in self._tunnels():
            tunnel.forget()

    def heal(self) -> None:
        """The link works again."""
        was_frozen = self.state is LinkState.FROZEN
        self._enter(LinkState.OPEN)
        if was_frozen:
            for tunnel in self._tunnels():
                tunnel.thaw()

    def _enter(self, state: LinkState) -> None:
        self.state = state
        self._settings.frozen = state is LinkState.FROZEN
        if self.path is not None:
            self.path.is_cut = state is LinkState.CUT

    def _tunnels(self) -> tuple[Tunnel, ...]:
        return () if self.path is None else tuple(self.path.tunnels)

    # -- counters

    def stats(self) -> LinkStats:
        """The counters and the state."""
        path = self.path
        if path is None:
            return LinkStats(self.state, 0, 0, 0, 0, 0, 0, 0)
        return LinkStats(
            state=self.state,
            connections=len(path.tunnels),
            accepted=path.accepted,
            established=path.established,
            failed=path.failed,
            refused=path.refused,
            out_bytes=path.out.delivered_bytes,
            back_bytes=path.back.delivered_bytes,
        )
