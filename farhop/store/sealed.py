"""A Store whose readers see only documents that count, taken out of their envelopes, and whose writers sign if they
have a key.

It wraps the store of one hub, below the merging of several: an unsigned document in one hub hides nothing in another.
Invariant: a document that does not count changes nothing and is counted, like one that cannot be read: a watcher keeps
the previous valid document until the key is deleted. Never decides what a document means.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec

from farhop.store.contract import Change, ChangeKind, KeyValue, Store
from farhop.store.envelope import NO_KEYS, OPERATORS_KINDS, EnvelopeError, is_sealed, kind_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from farhop.store.contract import Publication
    from farhop.store.envelope import Keys, Signer

IGNORED_MAX = 1000


class Sealed(Store):
    """`store` with documents opened by `keys`. `refused` is called for each document that does not count, with
    `<kind>_<reason>`.

    With a `signer`, documents written for an operator are sealed by it. A document that would not count under the keys
    `must` is not written: EnvelopeError.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        refused: Callable[[str], None] = lambda _reason: None,
        signer: Signer | None = None,
        must: Keys = NO_KEYS,
    ) -> None:
        self.store, self._keys, self._refused, self._signer, self._must = store, keys, refused, signer, must
        self.ignored: dict[str, str] = {}  # what was read last and does not count, and why; at most IGNORED_MAX

    async def open(self) -> None:
        """See the contract."""
        await self.store.open()

    async def close(self) -> None:
        """See the contract."""
        await self.store.close()

    async def publish(self, key: str, value: bytes, ttl_s: float) -> Publication:
        """See the contract."""
        return await self.store.publish(key, value, ttl_s)

    async def watch(self, prefix: str) -> AsyncGenerator[Change, None]:
        """See the contract. What does not count is as if it had never been written."""
        counted: dict[str, KeyValue] = {}
        async with contextlib.aclosing(self.store.watch(prefix)) as changes:
            async for change in changes:
                if change.kind is ChangeKind.SNAPSHOT:
                    self.ignored = {key: why for key, why in self.ignored.items() if not key.startswith(prefix)}
                opened = self._opened_change(change, counted)
                if opened is not None:
                    yield opened

    def _opened_change(self, change: Change, counted: dict[str, KeyValue]) -> Change | None:
        if change.kind is ChangeKind.SNAPSHOT:
            entries = [self._opened(entry) or counted.get(entry.key) for entry in change.entries]
            counted.clear()
            counted.update((entry.key, entry) for entry in entries if entry is not None)
            return msgspec.structs.replace(change, entries=tuple(counted.values()))
        if change.kind is ChangeKind.PUT:
            entry = self._opened(KeyValue(change.key, change.value, change.revision))
            if entry is None:
                return None
            if self._keys.asks(change.key):
                counted[change.key] = entry
            return msgspec.structs.replace(change, value=entry.value)
        if change.kind is ChangeKind.DELETE:
            counted.pop(change.key, None)
            self.ignored.pop(change.key, None)
        return change

    def _opened(self, entry: KeyValue) -> KeyValue | None:
        kind, _ = kind_of(entry.key)
        if not kind:
            return entry
        try:
            document = self._keys.open(entry.key, entry.value).document
        except EnvelopeError as error:
            self._refused(f"{kind}_{error.reason}")
            if len(self.ignored) < IGNORED_MAX or entry.key in self.ignored:
                self.ignored[entry.key] = f"{kind}_{error.reason}"
            return None
        self.ignored.pop(entry.key, None)
        return entry if document is entry.value else KeyValue(entry.key, document, entry.revision)

    async def get(self, key: str) -> KeyValue | None:
        """See the contract."""
        entry = await self.store.get(key)
        return None if entry is None else self._opened(entry)

    async def list(self, prefix: str) -> tuple[KeyValue, ...]:
        """See the contract."""
        return tuple(entry for one in await self.store.list(prefix) if (entry := self._opened(one)) is not None)

    async def put(self, key: str, value: bytes, expect_revision: int | None = None, ttl_s: float | None = None) -> int:
        """See the contract."""
        if self._signer is not None and kind_of(key)[0] in OPERATORS_KINDS and not is_sealed(value):
            value = self._signer.seal(key, value)
        if self._must.asks(key):
            self._must.open(key, value)
        return await self.store.put(key, value, expect_revision, ttl_s)

    async def delete(self, key: str, expect_revision: int | None = None) -> bool:
        """See the contract."""
        return await self.store.delete(key, expect_revision)


def inner(store: Store) -> Store:
    """The wrapped store, whose documents are as they were written."""
    return store.store if isinstance(store, Sealed) else store
