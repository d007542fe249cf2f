"""`farhop console`: the console of a whole fleet, served on this machine from all balancers' snapshots.

It asks each balancer for its snapshot once a second, with the context's token or certificate, and shows its age.
Invariant: the token stays here: the page gets another one, valid for this process alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from farhop.identity.operators import Operators, digest_of
from farhop.relay.http.listener import PortTakenError
from farhop.service.admin.console.acts import ActError, Acts
from farhop.service.admin.console.snapshot import LastSnapshot
from farhop.service.admin.server import AdminServer
from farhop.service.observability.decisions import Decisions
from farhop.service.process.clock import wall
from farhop.store.contract import StoreError
from farhop.store.envelope import NO_KEYS
from farhop.store.hubs import store_of
from farhop.store.sealed import Sealed
from farhop.telemetry.metrics import TierMetrics
from farhop_cli import admin, evidence, running, setting
from farhop_cli.access import AdminError
from farhop_cli.drill_control import DrillControl
from farhop_cli.drill_fleet import DrillFleet
from farhop_cli.exits import fail, warn
from topology.law import Law, Scope
from topology.problems import quoted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farhop.identity.operators import Operator
    from farhop.service.admin.console.acts import Drills
    from farhop.store.contract import Store
    from farhop_cli.drill_fleet import DrillOptions
    from farhop_cli.fleet import Balancer, Fleet
    from farhop_cli.options import FleetOptions

HOST = "127.0.0.1"
WAIT_S = 0.4  # for those that answer at once; a slower one appears in the next snapshot
LAW_EVERY_S = 5.0


class FleetSource:
    """All balancers of a fleet. See farhop.service.admin.console.server.Source."""

    def __init__(
        self, here: Fleet, http: admin.AdminClient, store: Store | None, author: str, drills: Drills | None = None
    ) -> None:
        self._here, self._http, self._store, self._author, self._drills = here, http, store, author, drills
        self._names = {one: str(one) for one in here.balancers}
        self._last = {name: LastSnapshot(None, tier=one.tier, region=one.region) for one, name in self._names.items()}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._law = Law(here.topology) if here.topology is not None else None
        self._law_due = 0.0
        world = here.topology is not None and here.name.startswith("the world in ")
        self.name = f"the world {here.topology.name}" if world and here.topology is not None else here.name

    async def snapshots(self) -> Mapping[str, LastSnapshot]:
        """See Source."""
        for one, name in self._names.items():
            if name not in self._asking:
                self._asking[name] = asyncio.create_task(self._ask(one, name))
        await asyncio.wait(tuple(self._asking.values()), timeout=WAIT_S)
        now = asyncio.get_running_loop().time()
        if self._here.topology is not None and now >= self._law_due:
            self._law_due = now + LAW_EVERY_S
            self._asking[""] = self._asking.get("") or asyncio.create_task(self._ask_law())
        return dict(self._last)

    async def _ask(self, one: Balancer, name: str) -> None:
        last = self._last[name]
        try:
            document = await admin.get(self._http, one.at, "/console/of/snapshot")
            snapshot = next(iter((document or {}).get("snapshots", {}).values()), None)
            if isinstance(snapshot, dict):
                self._last[name] = LastSnapshot(snapshot, int(wall().timestamp() * 1e3), "", one.tier, one.region)
            else:
                error = f"{one.url} has no console; is it an older build?"
                self._last[name] = msgspec.structs.replace(last, error=error)
        except AdminError as trouble:
            self._last[name] = msgspec.structs.replace(last, error=str(trouble))
        finally:
            del self._asking[name]

    async def _ask_law(self) -> None:
        """The newest law that a global balancer reports, over the map; the previous one if none reports."""
        here = self._here
        assert here.topology is not None  # called only if it exists
        try:
            newest = await asyncio.to_thread(running.under_law, here.topology, here.admins, here.access)
            if self._law is None or newest.epoch > self._law.epoch:
                self._law = Law(newest)
        finally:
            del self._asking[""]

    def law(self) -> Law | None:
        """See Source."""
        return self._law

    async def decision(self, decision_id: str) -> dict[str, dict[str, Any]]:
        """See Source."""
        if not decision_id.isalnum():
            return {}
        upper, lower, _ = await evidence.everywhere(self._http, self._here, decision_id)
        named = (("global", upper), ("regional", lower))
        return {f"{tier} {region}".strip(): record for tier, found in named for region, record in found}

    async def explain(self, question: bytes) -> dict[str, Any]:
        """See Source. Asks the first global balancer that may read the request and answers, and one of the region
        named.
        """
        try:
            asked = msgspec.json.decode(question, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise ActError(str(error)) from None
        verdict = self._law.verdict(str(asked.get("tenant")), "", Scope.ENTRY) if self._law is not None else None
        why = "no global balancer answers"
        for one in self._here.of("global"):
            if verdict is not None and verdict.why_not(one.region) is not None:
                continue  # the law forbids reading it there
            try:
                above = await admin.explain(self._http, one.at, asked)
            except AdminError as error:
                why = str(error)
                continue
            decisions = {str(one): above}
            for below in self._here.of("regional", str((above.get("reasons") or {}).get("chosen"))):
                with contextlib.suppress(AdminError):
                    decisions[str(below)] = await admin.explain(self._http, below.at, asked)
                    break
            return decisions
        raise ActError(why, 503)

    def acts(self) -> Acts | None:
        """See Source."""
        store = self._store
        here = self._here
        return None if store is None else Acts(store, self.law, here.statuses, wall, self._drills, here.status_of)

    def author(self, operator: Operator) -> str:  # noqa: ARG002 - who runs this process is who acts
        """See Source."""
        return self._author

    async def close(self) -> None:
        """Stop asking."""
        for task in tuple(self._asking.values()):
            task.cancel()


class _NoTier:
    """The tier of this process's admin port: none, as it carries no requests."""

    def ready(self) -> bool:
        """Always ready."""
        return True

    def notice(self) -> str:
        """None."""
        return ""

    def status(self) -> dict[str, Any]:
        """Empty: balancers have their own."""
        return {}

    scaling = law = topology = status


def run(port: int, asked: DrillOptions, fleet_options: FleetOptions, *, read_only: bool) -> int:
    """Serve it until Ctrl-C; the exit code. `asked` has the author, and what drills need."""
    here = fleet_options.fleet()
    if not here.balancers:
        fail(f"{here.name}: no balancer is known; give its admin port by --admin")
    if asked.folder is not None and not asked.folder.is_dir():
        fail(f"--folder: {quoted(str(asked.folder))} is no folder")
    # Drills need a map and etcd: the page says so if one is missing.
    drilled = (
        DrillFleet(asked, fleet_options, here) if not read_only and here.topology is not None and here.hubs else None
    )
    return asyncio.run(_serve(here, port, asked, drilled, read_only=read_only))


async def _serve(here: Fleet, port: int, asked: DrillOptions, drilled: DrillFleet | None, *, read_only: bool) -> int:
    token, stop = secrets.token_urlsafe(24), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(admin.AdminClient(here.access))
        store = await store_of_fleet(here, stack)  # a read-only user sees drills and laws
        drills = DrillControl(drilled, store, asked) if drilled is not None and store is not None else None
        source = FleetSource(here, http, store, asked.by or setting.author_here(), drills)
        stack.push_async_callback(source.close)
        if drills is not None:
            stack.push_async_callback(drills.close)
        operators = Operators({"console": (digest_of(token), "read" if read_only else "act")})
        server = AdminServer(_NoTier(), TierMetrics("console", "", ""), Decisions(), None, operators)  # type: ignore[arg-type]
        server.have(source)
        try:
            bound = await server.open(HOST, port)
        except PortTakenError as error:
            fail(f"--port: {error}")
        stack.push_async_callback(server.close)
        typer.echo(f"http://{HOST}:{bound}/console#{token}")
        typer.echo(
            f"the console of {here.name}; anyone with this address may {'read' if read_only else 'act'}", err=True
        )
        await stop.wait()
    return 0


async def store_of_fleet(here: Fleet, stack: contextlib.AsyncExitStack) -> Store | None:
    """The fleet's etcd for acts; None, with a warning, if it cannot be reached."""
    if not here.hubs:
        warn(f"{here.name} names no etcd: nothing can be done from this console")
        return None
    signer = setting.signing_key(os.environ.get(setting.SIGNING_KEY, ""), setting.SIGNING_KEY)
    store = store_of(here.hubs, Random(), lambda _, one: Sealed(one, NO_KEYS, signer=signer, must=here.keys))
    try:
        await store.open()
    except StoreError as error:
        warn(f"etcd: {error}; nothing can be done from this console")
        return None
    stack.push_async_callback(store.close)
    return store
