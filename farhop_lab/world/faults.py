"""Faults in a running world, on command: processes killed, stopped and slowed, links frozen and cut, etcd stopped.

Each has a lease and a bound: its commander must renew it, and a fault that is not renewed is repaired here, by this
process's clock. Invariants: a fault is repaired once, whatever happens to its commander; a killed process is started
again as it was. Never touches a process that this world did not start.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
from typing import TYPE_CHECKING, Any, Protocol

import aiohttp
import msgspec
from aiohttp import web

from farhop_lab.wan.link import LinkError
from farhop_lab.world.child import ChildError
from farhop_lab.world.etcd import EtcdLabError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from farhop_lab.world.child import Child
    from farhop_lab.world.world import RegionRun, World

FAULTS_MAX = 64
START_TRIES = 3
ENGINE_S = 5.0
LINKS = {"freeze-link": "freeze", "cut-link": "cut"}
KILLS = {
    "kill-region": ("engines", "regional", "global_"),
    "kill-engines": ("engines",),
    "kill-regional": ("regional",),
    "kill-global": ("global_",),
}


class FaultError(Exception):
    """A fault that cannot be injected or mended; the text says why."""


class FaultCommand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A commanded fault. Seconds; `hub` "": all of them."""

    do: str
    lease_s: float
    for_s: float
    region: str = ""
    to: str = ""
    hub: str = ""
    factor: float = 10.0


class _InjectedFault:
    """An injected fault: its end, by our clock, and the task that waits for it."""

    def __init__(self, wanted: FaultCommand, now: float) -> None:
        self.wanted = wanted
        self.end = now + wanted.for_s
        self.until = min(self.end, now + wanted.lease_s)
        self.lock = asyncio.Lock()
        self.watch: asyncio.Task[None] | None = None


class FaultTarget(Protocol):
    """Where faults are injected: a world that runs here, or a fleet on a platform (`deployed`)."""

    async def known(self, wanted: FaultCommand) -> None:
        """Check that it can be injected there. FaultError says why not; nothing is touched."""

    async def inject(self, wanted: FaultCommand) -> None:
        """Inject it. Raises FaultError."""

    async def mend(self, wanted: FaultCommand) -> None:
        """Mend it; what works is left as it is. After a FaultError it is called again."""


class Faults:
    """The faults in one place. `progress` is called with what is injected and mended."""

    def __init__(self, target: FaultTarget, progress: Callable[[str], None] = lambda _text: None) -> None:
        self._in, self._progress = target, progress
        self._active: dict[str, _InjectedFault] = {}
        self._clock = asyncio.get_running_loop().time

    @property
    def active(self) -> list[str]:
        """The names of present faults."""
        return sorted(self._active)

    async def known(self, wanted: Iterable[FaultCommand]) -> None:
        """Check that all of these can be injected here. FaultError for the first that cannot; nothing is touched."""
        for one in wanted:
            await self._in.known(one)

    async def make(self, name: str, wanted: FaultCommand) -> None:
        """Inject it; a present one of the same name is renewed. FaultError, and then nothing of it is left."""
        if not (0.0 < wanted.lease_s <= 3600.0 and 0.0 < wanted.for_s <= 86_400.0):
            raise FaultError("lease_s, for_s: give seconds above 0, at most an hour and a day")
        if name in self._active:
            self.renew(name, wanted.lease_s)
            return
        if len(self._active) >= FAULTS_MAX:
            raise FaultError(f"{FAULTS_MAX} faults are injected already")
        await self._in.known(wanted)
        injected = self._active[name] = _InjectedFault(wanted, self._clock())
        injected.watch = asyncio.create_task(self._expire(name, injected))
        async with injected.lock:
            self._progress(f"fault: {_described(wanted)}")
            try:
                await self._in.inject(wanted)
            except (FaultError, LinkError, EtcdLabError, OSError) as error:
                await self._mended(name, injected)
                raise FaultError(str(error)) from None

    def renew(self, name: str, lease_s: float) -> None:
        """Extend it to this long from now, but not beyond its bound. FaultError if it is no longer present."""
        injected = self._active.get(name)
        if injected is None:
            raise FaultError(f"{name} is no longer injected: its lease ended, and it was mended")
        injected.until = min(injected.end, self._clock() + lease_s)

    async def mend(self, name: str) -> None:
        """Mend all of it, and wait for that. Idempotent. FaultError if something does not come back."""
        injected = self._active.get(name)
        if injected is None:
            return
        async with injected.lock:
            if name in self._active:
                await self._mended(name, injected)

    async def mend_all(self) -> None:
        """Mend all faults: the world keeps running without us."""
        for name in self.active:
            await self.mend(name)

    async def close(self) -> None:
        """Forget all faults: the world ends."""
        for injected in self._active.values():
            if injected.watch is not None:
                injected.watch.cancel()
        self._active.clear()

    async def _expire(self, name: str, injected: _InjectedFault) -> None:
        while (left := injected.until - self._clock()) > 0.0:
            await asyncio.sleep(left)
        self._progress(f"fault: {_described(injected.wanted)}; its lease was not renewed")
        injected.watch = None
        with contextlib.suppress(FaultError):
            await self.mend(name)

    async def _mended(self, name: str, injected: _InjectedFault) -> None:
        for left in reversed(range(START_TRIES)):
            try:
                await self._in.mend(injected.wanted)
                break
            except (FaultError, ChildError, LinkError, EtcdLabError, OSError) as error:
                self._progress(f"mending {_described(injected.wanted)}: {error}")
                if not left:
                    raise FaultError(str(error)) from None
        self._active.pop(name, None)
        if injected.watch is not None:
            injected.watch.cancel()
        self._progress(f"mended: {_described(injected.wanted)}")


class LocalWorld:
    """A world that this process runs: real signals to its children, and its links."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def known(self, wanted: FaultCommand) -> None:
        """See FaultTarget."""
        world = self._world
        for name in (wanted.region, wanted.to):
            if name and name not in world.regions:
                raise FaultError(f"no region {name!r} in this world; it has {', '.join(world.regions)}")
        if wanted.do == "stop-etcd":
            if not world.hubs:
                raise FaultError("this world's etcd is not its own to stop")
            if wanted.hub and wanted.hub not in world.hubs:
                raise FaultError(f"no hub {wanted.hub!r}; there is {', '.join(world.hubs)}")
        elif wanted.do not in {*KILLS, *LINKS, "stop-engines", "slow-engines"}:
            raise FaultError(f"{wanted.do[:64]!r} is no fault of a world")
        elif not wanted.region:
            raise FaultError(f"{wanted.do}: give a region")
        if wanted.do in (*KILLS, "stop-engines", "slow-engines") and not world.regions[wanted.region].engines:
            raise FaultError(f"the engines of {wanted.region} are not this world's own")

    async def inject(self, wanted: FaultCommand) -> None:
        """See FaultTarget."""
        world, do = self._world, wanted.do
        if do in KILLS:
            await asyncio.gather(*(child.kill() for child in _children(world.regions[wanted.region], KILLS[do])))
        elif do in LINKS:
            assert world.network is not None  # a running world has one
            getattr(world.network, LINKS[do])(wanted.region, wanted.to or None)
        elif do == "stop-engines":
            for engine in world.regions[wanted.region].engines:
                engine.signal(signal.SIGSTOP)
        elif do == "slow-engines":
            await self._set_engine_faults(wanted, {"kind": "slow", "factor": wanted.factor})
        else:
            for cluster in self._hubs(wanted):
                cluster.pause()

    async def mend(self, wanted: FaultCommand) -> None:
        """See FaultTarget."""
        world, do, region = self._world, wanted.do, wanted.region
        if do in KILLS:
            run, starts = world.regions[region], []
            if "engines" in KILLS[do]:
                starts += [world.start_engine(region, at) for at, one in enumerate(run.engines) if one.pid is None]
            if "regional" in KILLS[do] and (run.regional is None or run.regional.pid is None):
                starts.append(world.start_regional(region))
            if "global_" in KILLS[do] and (run.global_ is None or run.global_.pid is None):
                starts.append(world.start_global(region))
            for problem in await asyncio.gather(*starts, return_exceptions=True):
                if problem is not None:
                    raise problem
        elif do in LINKS:
            assert world.network is not None
            world.network.heal(region, wanted.to or None)
        elif do == "stop-engines":
            for engine in world.regions[region].engines:
                engine.signal(signal.SIGCONT)
        elif do == "slow-engines":
            await self._set_engine_faults(wanted, None)
        else:
            for cluster in self._hubs(wanted):
                cluster.resume()

    def _hubs(self, wanted: FaultCommand) -> Iterable[Any]:
        return [cluster for name, cluster in self._world.hubs.items() if wanted.hub in ("", name)]

    async def _set_engine_faults(self, wanted: FaultCommand, fault: dict[str, Any] | None) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ENGINE_S)) as session:
            for url in self._world.regions[wanted.region].engine_urls:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    method = "DELETE" if fault is None else "POST"
                    async with session.request(method, f"{url}/lab/fault", json=fault):
                        pass


def _children(run: RegionRun, kinds: Iterable[str]) -> list[Child]:
    found: list[Child] = []
    for kind in kinds:
        one = getattr(run, kind)
        found += one if isinstance(one, list) else [one] if one is not None else []
    return found


def _described(wanted: FaultCommand) -> str:
    return " ".join(part for part in (wanted.do, wanted.region, wanted.to, wanted.hub) if part)


def _after(work: Callable[[web.Request], Awaitable[None]]) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """A handler; the middleware writes its answer, the same for all."""

    async def handler(request: web.Request) -> web.StreamResponse:
        await work(request)
        return web.Response()

    return handler


class Control:
    """The world's control port: on loopback alone, and only with the token, which is in the world's file."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self.token = secrets.token_urlsafe(24)
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self, host: str) -> None:
        """Listen on any free port."""
        app = web.Application(client_max_size=64 * 1024, middlewares=[self._guarded])
        app.router.add_get("/faults", _after(self._list))
        app.router.add_post("/faults", _after(self._known))
        app.router.add_put("/faults/{name}", _after(self._make))
        app.router.add_post("/faults/{name}/renew", _after(self._renew))
        app.router.add_delete("/faults/{name}", _after(self._mend))
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"http://{host}:{port}"

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()
        await self._faults.close()

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Any) -> web.StreamResponse:
        authorization = request.headers.get("authorization", "").encode()
        if not secrets.compare_digest(authorization, f"Bearer {self.token}".encode()):
            return web.json_response({"error": "give the token in the world's file"}, status=401)
        try:
            await handler(request)
        except (FaultError, msgspec.DecodeError, UnicodeDecodeError) as error:
            return web.json_response({"error": str(error)}, status=400)
        return web.json_response({"faults": self._faults.active})

    async def _list(self, _request: web.Request) -> None:
        """The middleware answers."""

    async def _known(self, request: web.Request) -> None:
        """Whether these can be injected: `known` says why not, the middleware answers with the present faults."""
        await self._faults.known(msgspec.json.decode(await request.read(), type=list[FaultCommand]))

    async def _make(self, request: web.Request) -> None:
        await self._faults.make(
            request.match_info["name"], msgspec.json.decode(await request.read(), type=FaultCommand)
        )

    async def _renew(self, request: web.Request) -> None:
        lease = msgspec.json.decode(await request.read(), type=dict[str, float])
        self._faults.renew(request.match_info["name"], lease.get("lease_s", 0.0))

    async def _mend(self, request: web.Request) -> None:
        await asyncio.shield(self._faults.mend(request.match_info["name"]))
