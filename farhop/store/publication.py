"""Keeps a key alive under a lease: the loop that both stores share, built on four operations of a store.

Invariants: at most one value (the newest) waits to be written; the lease is refreshed every third of its life, however
often values change; a lost lease is replaced and the last value written again; no outage ends the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Protocol

from farhop.balance.backoff import Backoff
from farhop.store.contract import Publication, StoreError, check_value

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

REFRESHES_PER_TTL = 3  # two may fail before the lease ends


class Leases(Protocol):
    """The operations that a publication needs of a store. Each raises StoreError when the store does not answer."""

    async def grant(self, ttl_s: float) -> int:
        """Create a lease; returns its id."""
        ...

    async def keep_alive(self, lease: int) -> bool:
        """Start the lease's time again; False if there is no such lease any more."""
        ...

    async def put_leased(self, key: str, value: bytes, lease: int) -> bool:
        """Write under the lease; False if there is no such lease any more."""
        ...

    async def revoke(self, lease: int) -> None:
        """End a lease, and delete the keys under it."""
        ...


class LeasedPublication(Publication):
    """The Publication of farhop.store.contract. `on_end` is called once, when it is withdrawn."""

    def __init__(
        self,
        leases: Leases,
        key: str,
        value: bytes,
        ttl_s: float,
        rng: Random,
        on_end: Callable[[LeasedPublication], None],
    ) -> None:
        if ttl_s <= 0:
            raise ValueError(f"ttl_s {ttl_s} must be above 0")
        check_value(key, value)
        self._leases = leases
        self._key = key
        self._value = value
        self._ttl_s = ttl_s
        self._on_end = on_end
        refresh_s = ttl_s / REFRESHES_PER_TTL
        self._backoff = Backoff(rng, first_s=min(0.05, refresh_s), limit_s=min(1.0, refresh_s))
        self._version = 1  # of _value
        self._stored = 0  # the version the store has acknowledged under _lease
        self._lease: int | None = None
        self._refresh_at = 0.0  # seconds of the loop's clock
        self._trouble: str | None = None
        self._wake = asyncio.Event()
        self._waiting: list[tuple[int, asyncio.Future[bool]]] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def key(self) -> str:
        """The published key."""
        return self._key

    @property
    def trouble(self) -> str | None:
        """Why the last attempt failed; None when all is well."""
        return self._trouble

    async def start(self) -> bool:
        """Begin to publish; returns whether the first write was acknowledged."""
        self._task = asyncio.create_task(self._run(), name=f"publish {self._key}")
        try:
            return await self._outcome()
        except BaseException:  # cancelled: this publication will have no owner, so nothing of it may stay
            await self.withdraw()
            raise

    async def update(self, value: bytes) -> bool:
        """See the contract. Raises StoreError only for a value no store would take, or after `withdraw`."""
        check_value(self._key, value)
        if self._task is None:
            raise StoreError(f"{self._key}: withdrawn; publish it again")
        if self._task.done():
            raise StoreError(f"{self._key}: publishing has ended; publish it again") from self._task.exception()
        self._value = value
        self._version += 1
        self._wake.set()
        if self._trouble is not None:
            return False
        return await self._outcome()

    async def withdraw(self) -> None:
        """See the contract."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait({task})
        self._on_end(self)
        # A write still under way when it was cancelled is harmless: it names this lease, and dies with it.
        lease, self._lease = self._lease, None
        if lease is not None:
            try:
                await self._leases.revoke(lease)
            except StoreError as error:
                self._trouble = f"{error} (the key goes with its lease, within {self._ttl_s} s)"

    async def _run(self) -> None:
        try:
            await self._publish(asyncio.get_running_loop())
        finally:
            self._resolve_waiting(failed=True)

    async def _publish(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            self._wake.clear()
            try:
                await self._attempt(loop)
            except StoreError as error:
                self._trouble = str(error)
                self._resolve_waiting(failed=True)
                await asyncio.sleep(self._backoff.next_s())
                continue
            self._trouble = None
            self._backoff.reset()
            self._resolve_waiting(failed=False)
            if self._stored == self._version:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(self._refresh_at):
                        await self._wake.wait()

    async def _attempt(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._lease is not None and loop.time() >= self._refresh_at:
            await self._refresh(self._lease, loop.time())
        if self._lease is None:
            asked_at = loop.time()
            self._lease = await self._leases.grant(self._ttl_s)
            self._refresh_at = asked_at + self._ttl_s / REFRESHES_PER_TTL
            self._stored = 0
        if self._stored != self._version:
            version = self._version
            if await self._leases.put_leased(self._key, self._value, self._lease):
                self._stored = version
            else:
                self._lease = None
                raise StoreError(f"{self._key}: its lease was lost; publishing again under a new one")

    async def _refresh(self, lease: int, asked_at: float) -> None:
        if await self._leases.keep_alive(lease):
            self._refresh_at = asked_at + self._ttl_s / REFRESHES_PER_TTL
        else:
            self._lease = None

    async def _outcome(self) -> bool:
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((self._version, future))
        return await future

    def _resolve_waiting(self, *, failed: bool) -> None:
        keep = []
        for version, future in self._waiting:
            if future.done():
                continue
            if failed or version <= self._stored:
                future.set_result(not failed)
            else:
                keep.append((version, future))
        self._waiting = keep
