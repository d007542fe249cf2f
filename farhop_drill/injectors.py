"""Injects a step and restores it: overrides in etcd, or faults in a world that `farhop up` runs.

Invariant: every injection ends by itself within LEASE_S of the last renewal: an override by etcd's lease and by each
balancer's own clock, a fault by the clock of the process that runs the world. So a runner that dies ends its drill.
Never overwrites nor removes what an operator set, not even in the middle of a drill: every write is a compare-and-set.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Protocol

import aiohttp
import msgspec

from farhop.store.contract import Conflict, StoreError
from farhop.store.documents import overrides
from farhop.store.documents.document import DocumentError
from farhop.store.documents.overrides import (
    BiasOverride,
    DrainOverride,
    EntryDrainOverride,
    PinOverride,
    RefuseOverride,
)
from farhop_drill.records import LEASE_S

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping
    from datetime import datetime

    from farhop.store.contract import Store
    from farhop.store.documents.overrides import Override
    from farhop_drill.document import Injection, Step

RENEW_S = LEASE_S / 3
MEND_S = 60.0  # processes that were killed take a while to start


class _Signature(msgspec.Struct, frozen=True):
    """Whose an override is."""

    author: str = ""
    why: str = ""


class InjectError(Exception):
    """A step that could not be injected, or not restored; the text says why."""


class Injector(Protocol):
    """Injects steps one after another: a later one replaces an earlier one's injection for the same target."""

    async def inject(self, step: Step) -> None:
        """Inject it. InjectError; then a part of it may be in place, and `restore` removes that."""
        ...

    async def renew(self) -> None:
        """Renew it for LEASE_S from now. InjectError."""
        ...

    async def restore(self) -> None:
        """Restore all of it, the last step first. InjectError; call it again then."""
        ...

    async def close(self) -> None:
        """Free what it holds. Idempotent."""
        ...


class TrafficInjector:
    """By overrides, which every balancer follows. `homes` are entries' regions; `raise_epoch` puts the law in force
    under its next epoch, unchanged, which needs no restoring."""

    def __init__(
        self,
        store: Store,
        author: str,
        why: str,
        homes: Mapping[str, str],
        wall: Callable[[], datetime],
        raise_epoch: Callable[[], Awaitable[int]],
    ) -> None:
        self._store, self._author, self._why = store, author, why
        self._homes, self._wall, self._raise_epoch = homes, wall, raise_epoch
        self._active: dict[str, Injection] = {}
        self.law_epoch = 0

    async def inject(self, step: Step) -> None:
        """See Injector."""
        for one in step.inject:
            if one.do == "law-epoch":
                self.law_epoch = await self._raise_epoch()
                continue
            try:
                await self._put(one)
            except (StoreError, DocumentError, ValueError) as error:
                raise InjectError(str(error)) from None

    async def renew(self) -> None:
        """See Injector."""
        try:
            for one in tuple(self._active.values()):
                await self._put(one)
        except StoreError as error:
            raise InjectError(str(error)) from None

    async def restore(self) -> None:
        """See Injector."""
        for key in reversed(tuple(self._active)):
            try:
                there = await self._store.get(key)
                if there is not None and self._is_ours(there.value):
                    with contextlib.suppress(Conflict):  # it is an operator's now
                        await self._store.delete(key, there.revision)
            except StoreError as error:
                raise InjectError(str(error)) from None
            del self._active[key]

    async def close(self) -> None:
        """See Injector."""

    async def _put(self, one: Injection) -> None:
        """Write it, in place of ours alone. Raises InjectError where an operator's override is."""
        override = self._override(one)
        key, value = override.key, overrides.encode(override)
        there = await self._store.get(key) if key in self._active else None
        if there is None or self._is_ours(there.value):
            self._active[key] = one  # before it is written: an unacknowledged write may be in place
            with contextlib.suppress(Conflict):
                await self._store.put(key, value, there.revision if there is not None else 0, LEASE_S)
                return
        self._active.pop(key, None)
        raise InjectError(f"{key}: an operator's override is set there")

    def _is_ours(self, value: bytes) -> bool:
        """Whether a document at a key of ours is this run's: its reason names the run."""
        try:
            found = msgspec.json.decode(value, type=_Signature)
        except msgspec.DecodeError:
            return False
        return (found.author, found.why) == (self._author[: overrides.AUTHOR_LIMIT], self._why[: overrides.WHY_LIMIT])

    def _override(self, one: Injection) -> Override:
        shared: dict[str, Any] = {
            "why": self._why[: overrides.WHY_LIMIT],
            "author": self._author[: overrides.AUTHOR_LIMIT],
            "at": self._wall(),
            "for_s": LEASE_S,
        }
        if one.do == "drain":
            return DrainOverride(region=one.region, over_s=one.over_s, keep_share=1.0 - one.share, **shared)
        if one.do == "bias":
            return BiasOverride(region=one.region, ms=one.ms, **shared)
        if one.do == "refuse":
            return RefuseOverride(region=one.region, model=one.model, share=one.share, **shared)
        if one.do == "pin":
            return PinOverride(region=one.region, tenant=one.tenant, **shared)
        return EntryDrainOverride(region=self._homes[one.entry], entry=one.entry, **shared)


class FaultInjector:
    """By the control port of the process that runs the world. `run` names the run; `for_s` bounds every fault."""

    def __init__(self, url: str, token: str, run: str, for_s: float) -> None:
        self._url, self._run, self._for_s = url.rstrip("/"), run, for_s
        self._headers = {"authorization": f"Bearer {token}"}
        self._active: list[str] = []
        self._session: aiohttp.ClientSession | None = None

    async def inject(self, step: Step) -> None:
        """See Injector. All of a step at once: a region does not die piece by piece."""
        names = []
        for one in step.inject:
            name = f"{self._run}.{one.target.replace('/', '.')}"
            names.append(name)
            if name not in self._active:
                self._active.append(name)
        await asyncio.gather(
            *(
                self._call("PUT", f"/faults/{name}", {**_fault(one), "lease_s": LEASE_S, "for_s": self._for_s})
                for name, one in zip(names, step.inject, strict=True)
            )
        )

    async def renew(self) -> None:
        """See Injector."""
        for name in tuple(self._active):
            await self._call("POST", f"/faults/{name}/renew", {"lease_s": LEASE_S})

    async def restore(self) -> None:
        """See Injector."""
        for name in reversed(tuple(self._active)):
            await self._call("DELETE", f"/faults/{name}", None)
            self._active.remove(name)

    async def active_faults(self) -> list[str]:
        """The faults in place in the world now, from any run. InjectError."""
        answer = await self._call("GET", "/faults", None)
        return [str(one) for one in answer.get("faults") or ()]

    async def possible(self, steps: Iterable[Step]) -> None:
        """Ask whether all of it can be injected there. InjectError says what cannot; nothing is touched."""
        bounds = {"lease_s": LEASE_S, "for_s": self._for_s}
        await self._call("POST", "/faults", [{**_fault(one), **bounds} for step in steps for one in step.inject])

    async def close(self) -> None:
        """See Injector."""
        if self._session is not None:
            await self._session.close()

    async def _call(self, method: str, path: str, body: Any) -> dict[str, Any]:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=MEND_S))
        try:
            async with self._session.request(method, self._url + path, json=body, headers=self._headers) as answer:
                document = msgspec.json.decode(await answer.read(), type=dict[str, Any])
                if answer.status != 200:
                    raise InjectError(str(document.get("error") or f"status {answer.status}"))
                return document
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
            raise InjectError(f"the world's control port: {error or type(error).__name__}") from None


def _fault(one: Injection) -> dict[str, Any]:
    question = {"do": one.do, "region": one.region, "to": one.to, "hub": one.hub, "factor": one.factor}
    return {name: value for name, value in question.items() if value}
