"""Follows in etcd by which policies this region is to pick replicas, and tells the flow. Never decides.

Invariants: a document that is absurd changes nothing and is counted; a key that goes gives the region back to its
configuration; losing etcd changes nothing.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, TypeAdapter

from farhop.store.contract import ChangeKind, pick_key
from farhop.store.report import MODELS_LIMIT
from regional_lb.config import Model, PolicyConfig
from regional_lb.policy import Choice, PoliciesChanged

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.balance.machine import Event
    from farhop.store.contract import Change, Store

DOCUMENT_LIMIT_BYTES = 64 * 1024

_Document = Annotated[dict[Model | Literal[""], PolicyConfig], Field(max_length=MODELS_LIMIT + 1)]
_reader: TypeAdapter[dict[str, PolicyConfig]] = TypeAdapter(_Document)


class Overrides:
    """`react` is told events; `refused` counts documents not believed, by reason."""

    def __init__(
        self, store: Store, region: str, react: Callable[[Event], None], refused: Callable[[str], None]
    ) -> None:
        self._store, self._key = store, pick_key(region)
        self._react, self._refused = react, refused
        self._document = b""

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

    def _read(self, document: bytes) -> None:
        """JSON: by model ("" for all others) a policy as in the configuration; b"" where nothing stands."""
        if document == self._document:
            return  # listed anew after a gap
        if len(document) > DOCUMENT_LIMIT_BYTES:
            self._refused("policies_malformed")
            return
        try:
            chosen = _reader.validate_json(document or b"{}")
        except ValueError:
            self._refused("policies_malformed")
            return
        self._document = document
        self._react(PoliciesChanged({model: Choice(**policy.model_dump()) for model, policy in chosen.items()}))
