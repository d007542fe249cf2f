"""Several etcd clusters (hubs) as one Store: published in each, watched in all, merged by `farhop.store.merge`.

Invariants: a hub that is down, hangs or was wiped does not delay a process that can reach another; each hub is written
independently, so that a slow one only lags; a compare-and-set is decided at the first hub by name that answers, which
is the same for all that can reach it. Never forms a quorum over hubs: each is a cluster of its own.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from farhop.balance.backoff import Backoff
from farhop.store.contract import Conflict, Publication, Store, StoreError, StoreUnreachable, check_value
from farhop.store.etcd import EtcdStore
from farhop.store.merge import Merged, chosen

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
    from random import Random

    from farhop.store.contract import Change, KeyValue
    from farhop.store.etcd_settings import EtcdSettings

CHANGES_WAITING = 1024  # of one watch: a hub whose changes are not consumed waits, as it would alone


class Hubs(Store):
    """A Store on several, by the hub's name. `rng` jitters its back-offs.

    `unreached` has the hubs that the last `get`, `list`, `put` or `delete` did not reach, and why.
    """

    def __init__(self, stores: Mapping[str, Store], rng: Random) -> None:
        if not stores:
            raise ValueError("stores: name at least one hub")
        self.stores = {name: stores[name] for name in sorted(stores)}
        self.unreached: dict[str, str] = {}
        self._rng = rng
        self._tasks: set[asyncio.Task[None]] = set()
        self._publications: set[_Everywhere] = set()

    async def open(self) -> None:
        """See the contract. One hub that answers is enough; the others are tried until they do."""
        tries = await asyncio.gather(*(store.open() for store in self.stores.values()), return_exceptions=True)
        failed: dict[str, StoreError] = {}
        for name, error in zip(self.stores, tries, strict=True):
            if isinstance(error, StoreError):
                failed[name] = error
            elif error is not None:
                raise error
        if len(failed) == len(self.stores):
            await self.close()
            unreachable = all(isinstance(error, StoreUnreachable) for error in failed.values())
            raise (StoreUnreachable if unreachable else StoreError)(_failures(failed))
        for name in failed:
            task = asyncio.create_task(self._reopen(self.stores[name]), name=f"open hub {name}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _reopen(self, store: Store) -> None:
        backoff = Backoff(self._rng)
        while True:
            await asyncio.sleep(backoff.next_s())
            try:
                await store.open()
            except StoreError:
                continue  # its watches and publications say so, each where it is shown
            return

    async def close(self) -> None:
        """See the contract."""
        await _end(self._tasks)
        await asyncio.gather(*(publication.withdraw() for publication in tuple(self._publications)))
        await asyncio.gather(*(store.close() for store in self.stores.values()))

    async def publish(self, key: str, value: bytes, ttl_s: float) -> _Everywhere:
        """See the contract."""
        check_value(key, value)
        publication = _Everywhere(self.stores, key, value, ttl_s, self._publications.discard)
        self._publications.add(publication)
        await publication.start()
        return publication

    async def watch(self, prefix: str) -> AsyncGenerator[Change, None]:
        """See the contract. LOST is told when no hub is in contact any more."""
        merged = Merged(self.stores)
        queue: asyncio.Queue[tuple[str, Change | None]] = asyncio.Queue(CHANGES_WAITING)
        tasks = {
            asyncio.create_task(_follow(name, store, prefix, queue), name=f"watch hub {name}")
            for name, store in self.stores.items()
        }
        left = len(tasks)
        try:
            while left:
                name, change = await queue.get()
                if change is None:
                    left -= 1
                    continue
                for merged_change in merged.take(name, change):
                    yield merged_change
        finally:
            await _end(tasks)
        for task in tasks:
            task.result()

    async def get(self, key: str) -> KeyValue | None:
        """See the contract. The revision is that of the hub whose copy counts."""
        return _of(await self._each(lambda store: store.get(key)))

    async def list(self, prefix: str) -> tuple[KeyValue, ...]:
        """See the contract: all that any hub holds."""
        listed = await self._each(lambda store: store.list(prefix))
        copies: dict[str, dict[str, KeyValue]] = {}
        for name, entries in listed.items():
            for entry in entries:
                copies.setdefault(entry.key, {})[name] = entry
        return tuple(entry for key in sorted(copies) if (entry := _of(copies[key])) is not None)

    async def put(self, key: str, value: bytes, expect_revision: int | None = None, ttl_s: float | None = None) -> int:
        """See the contract. Written to every hub that answers; done if one has it. The revision is the first one's."""
        check_value(key, value)
        revisions = await self._write(
            key, expect_revision, lambda store, expected: store.put(key, value, expected, ttl_s)
        )
        return int(revisions[0])

    async def delete(self, key: str, expect_revision: int | None = None) -> bool:
        """See the contract. A hub that is not reached keeps its copy until its lease ends, or it is asked again."""
        return any(await self._write(key, expect_revision, lambda store, expected: store.delete(key, expected)))

    # -- how

    async def _each(self, ask: Callable[[Store], Coroutine[Any, Any, Any]]) -> dict[str, Any]:
        """The result from each hub that answers. Raises StoreError if none does."""
        answers = await asyncio.gather(*(ask(store) for store in self.stores.values()), return_exceptions=True)
        answered: dict[str, Any] = {}
        failed: dict[str, StoreError] = {}
        for name, answer in zip(self.stores, answers, strict=True):
            if isinstance(answer, StoreError):
                failed[name] = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                answered[name] = answer
        self.unreached = {name: str(error) for name, error in failed.items()}
        if not answered:
            raise StoreUnreachable(_failures(failed))
        return answered

    async def _write(
        self,
        key: str,
        expect_revision: int | None,
        write: Callable[[Store, int | None], Coroutine[Any, Any, Any]],
    ) -> Sequence[Any]:
        """At each hub by its own revision. The writer that is first at the first hub wins; the others give up."""
        found: dict[str, KeyValue | None] = await self._each(lambda store: store.get(key))
        entry = _of(found)
        if expect_revision is not None and expect_revision != (entry.revision if entry is not None else 0):
            raise Conflict(key, expect_revision)
        written: Sequence[Any] = ()
        failed: dict[str, StoreError] = {}
        for name, copy in found.items():
            expected = None if expect_revision is None else copy.revision if copy is not None else 0
            try:
                written = (*written, await write(self.stores[name], expected))
            except Conflict:
                if not written:
                    raise
                # A writer that read after our first write was faster here: its document is the newer one.
            except StoreError as error:
                failed[name] = error
        self.unreached |= {name: str(error) for name, error in failed.items()}
        if not written:
            raise StoreUnreachable(_failures(failed))
        return written


class _Everywhere(Publication):
    """One key, published in every hub. An update is done when the first hub has it; the others have it when they can.

    Invariant: a hub still at an older value is given the newest one next, never one in between.
    """

    def __init__(
        self, stores: Mapping[str, Store], key: str, value: bytes, ttl_s: float, on_end: Callable[[_Everywhere], None]
    ) -> None:
        self._stores, self._key, self._value, self._ttl_s, self._on_end = stores, key, value, ttl_s, on_end
        self._copies: dict[str, Publication] = {}
        self._under_way: set[asyncio.Task[bool]] = set()
        self._withdrawn = False

    @property
    def key(self) -> str:
        """The published key."""
        return self._key

    @property
    def trouble(self) -> str | None:
        """Which hubs do not have it, and why; None when all do."""
        return "; ".join(f"hub {name}: {why}" for name, why in self.by_hub.items() if why is not None) or None

    @property
    def by_hub(self) -> dict[str, str | None]:
        """Why a hub does not have it; None where it does."""
        begun = {name: copy.trouble for name, copy in self._copies.items()}
        return {name: begun.get(name, "no answer yet") for name in self._stores}

    async def start(self) -> bool:
        """Publish in all hubs; returns whether any hub has acknowledged it."""
        try:
            return await self._first({self._task(self._begin(name, store)) for name, store in self._stores.items()})
        except BaseException:  # cancelled: this publication will have no owner, so nothing of it may stay
            await self.withdraw()
            raise

    async def update(self, value: bytes) -> bool:
        """See the contract. Raises StoreError only for a value no store would take, or after `withdraw`."""
        check_value(self._key, value)
        if self._withdrawn:
            raise StoreError(f"{self._key}: withdrawn; publish it again")
        self._value = value
        return await self._first({self._task(copy.update(value)) for copy in self._copies.values()})

    async def withdraw(self) -> None:
        """See the contract."""
        if self._withdrawn:
            return
        self._withdrawn = True
        await _end(self._under_way)
        await asyncio.gather(*(copy.withdraw() for copy in self._copies.values()))
        self._on_end(self)

    async def _begin(self, name: str, store: Store) -> bool:
        value = self._value
        copy = await store.publish(self._key, value, self._ttl_s)
        self._copies[name] = copy
        return copy.trouble is None if value is self._value else await copy.update(self._value)

    def _task(self, work: Coroutine[Any, Any, bool]) -> asyncio.Task[bool]:
        task = asyncio.create_task(work, name=f"publish {self._key} in a hub")
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    async def _first(self, tasks: set[asyncio.Task[bool]]) -> bool:
        """Whether one of them succeeds; without waiting for the others once one has."""
        while tasks:
            done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if any(task.result() for task in done):
                return True
        return False


async def _follow(name: str, store: Store, prefix: str, queue: asyncio.Queue[tuple[str, Change | None]]) -> None:
    watch = store.watch(prefix)
    try:
        async for change in watch:
            await queue.put((name, change))
    finally:
        await watch.aclose()
    await queue.put((name, None))


async def _end(tasks: set[asyncio.Task[Any]]) -> None:
    ending = tuple(tasks)
    for task in ending:
        task.cancel()
    if ending:
        await asyncio.wait(ending)


def _of(copies: Mapping[str, KeyValue | None]) -> KeyValue | None:
    return chosen((name, entry) for name, entry in copies.items() if entry is not None)


def _failures(failed: Mapping[str, StoreError]) -> str:
    return "; ".join(f"hub {name}: {error}" for name, error in sorted(failed.items()))


def store_of(
    hubs: Mapping[str, EtcdSettings], rng: Random, around: Callable[[str, Store], Store] = lambda _name, one: one
) -> Store:
    """The store of these hubs, with something `around` each, by its name: the etcd itself where there is but one."""
    stores: dict[str, Store] = {name: around(name, EtcdStore(settings, rng)) for name, settings in hubs.items()}
    return next(iter(stores.values())) if len(stores) == 1 else Hubs(stores, rng)


def stores_of(store: Store, name: str) -> Mapping[str, Store]:
    """The store of each hub; `name`: the name of a single one."""
    return store.stores if isinstance(store, Hubs) else {name: store}


def publication_status(publication: Publication | None, name: str) -> dict[str, str | None]:
    """By hub, why the published document is not there; None if it is. A single hub is called `name`."""
    if isinstance(publication, _Everywhere):
        return publication.by_hub
    return {name: "not published" if publication is None else publication.trouble}


def unreached(store: Store) -> Mapping[str, str]:
    """The hubs that the last call did not reach, and why."""
    return store.unreached if isinstance(store, Hubs) else {}
