"""Follows in etcd what goes before this region's configuration, and tells the flow: policies and splits. Never decides.

A document is JSON by model, as in the configuration; with who wrote it and why (`farhop policy`, `farhop split`) it is
`{"models": {...}, "author": ..., "why": ..., "at": ...}`. Invariants: a document that is absurd changes nothing and is
counted; a key that goes gives the region back to its configuration; losing etcd changes nothing.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from farhop.store.contract import ChangeKind, pick_key, split_key
from farhop.store.report import MODELS_LIMIT
from farhop.store.word import Signature, parted
from regional_lb.config import Model, PolicyConfig, SplitConfig
from regional_lb.policy import Choice, PoliciesChanged
from regional_lb.split import SplitsChanged, terms_said

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.balance.machine import Event
    from farhop.store.contract import Change, Store

_Policies = Annotated[dict[Model | Literal[""], PolicyConfig], Field(max_length=MODELS_LIMIT + 1)]
_Splits = Annotated[dict[Model, SplitConfig], Field(max_length=MODELS_LIMIT)]
_policies: TypeAdapter[dict[str, PolicyConfig]] = TypeAdapter(_Policies)
_splits: TypeAdapter[dict[str, SplitConfig]] = TypeAdapter(_Splits)


class Overrides:
    """What stands under one key. `read` makes an event of the part by model, or raises ValueError.

    `react` is told events; `refused` counts documents not believed, as `<what>_malformed`.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        what: str,
        read: Callable[[bytes], Event],
        react: Callable[[Event], None],
        refused: Callable[[str], None],
    ) -> None:
        self._store, self._key, self.what, self._event_of = store, key, what, read
        self._react, self._refused = react, refused
        self._document = b""
        self._signature: Signature | None = None

    async def follow(self) -> None:
        """Until cancelled, or the store is closed."""
        async with contextlib.aclosing(self._store.watch(self._key)) as changes:
            async for change in changes:
                self.changed(change)

    def changed(self, change: Change) -> None:
        """Take one step of the watch. Another region's name may begin with ours."""
        if change.kind is ChangeKind.SNAPSHOT:
            self._read(next((entry.value for entry in change.entries if entry.key == self._key), b""))
        elif change.kind is not ChangeKind.LOST and change.key == self._key:
            self._read(change.value if change.kind is ChangeKind.PUT else b"")

    def told(self) -> dict[str, Any] | None:
        """Who wrote what is in force, and why; None if nothing stands there, or nobody signed it."""
        signed = self._signature
        return None if signed is None else {"author": signed.author, "why": signed.why, "at": signed.at.isoformat()}

    def _read(self, document: bytes) -> None:
        """b"" where nothing stands."""
        if document == self._document:
            return  # listed anew after a gap
        try:
            by_model, signature = parted(document or b"{}")
            event = self._event_of(by_model)
        except ValueError:
            self._refused(f"{self.what}_malformed")
            return
        self._document, self._signature = document, signature
        self._react(event)


def policies(store: Store, region: str, react: Callable[[Event], None], refused: Callable[[str], None]) -> Overrides:
    """Those that change by which policies the region picks replicas."""

    def read(by_model: bytes) -> Event:
        chosen = _policies.validate_json(by_model)
        return PoliciesChanged({model: Choice(**policy.model_dump()) for model, policy in chosen.items()})

    return Overrides(store, pick_key(region), "policies", read, react, refused)


def splits(store: Store, region: str, react: Callable[[Event], None], refused: Callable[[str], None]) -> Overrides:
    """Those that change how the region splits traffic between versions."""

    def read(by_model: bytes) -> Event:
        return SplitsChanged({model: terms_said(split) for model, split in _splits.validate_json(by_model).items()})

    return Overrides(store, split_key(region), "splits", read, react, refused)
