"""Opens the store of a process that starts: while no etcd answers, it goes on trying, and says so.

Whoever starts etcd and the balancers together, by hand or by a service manager, need not care which is first. What
trying again cannot mend (a refused password, a file that is not there) ends the start with its error. Never lets
anything be served on guesses: who waits here has no documents yet.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from farhop.balance.backoff import Backoff
from farhop.service.process.notify import Notifier
from farhop.store.contract import StoreUnreachable

if TYPE_CHECKING:
    from random import Random

    from structlog.typing import FilteringBoundLogger

    from farhop.service.admin.server import AdminServer
    from farhop.store.contract import Store

REASONS_LOGGED_MAX = 8  # different ones: what is wrong may change while it waits, from no process to no trust


async def opened(store: Store, admin: AdminServer, log: FilteringBoundLogger, rng: Random) -> None:
    """Open the store, whenever it answers. Meanwhile `admin` and the service manager have the reason. Raises StoreError
    if etcd refuses us."""
    backoff, manager, told = Backoff(rng, limit_s=2.0), Notifier(), set[str]()
    while True:
        try:
            await store.open()
        except StoreUnreachable as error:
            why = str(error)
            if why not in told and len(told) < REASONS_LOGGED_MAX:
                told.add(why)
                log.warning("waiting for etcd", why=why)
            admin.starting = f"waiting for etcd: {why}"
            manager.starting(admin.starting)
            await asyncio.sleep(backoff.next_s())
            continue
        if told:
            log.warning("etcd answers")
            admin.starting = "starting"
        return
