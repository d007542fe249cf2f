"""Follows the documents in etcd that override this region's configuration (policies and splits), and informs the flow.
Never decides.

A document is JSON by model, as in the configuration; with author and reason (`farhop policy`, `farhop split`) it is
`{"models": {...}, "author": ..., "why": ..., "at": ...}`. Invariants: an invalid document changes nothing and is
counted; a deleted key returns the region to its configuration; losing etcd changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from farhop.config import Model
from farhop.store.contract import pick_key, split_key
from farhop.store.documents.authored import split_authorship
from farhop.store.documents.report import MODELS_LIMIT
from farhop.store.follow import Documents, follow
from regional_lb.scheduler.policy import PoliciesChanged, PolicyConfig
from regional_lb.scheduler.split import SplitConfig, SplitsChanged

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.balance.machine import Event
    from farhop.store.contract import Change, Store
    from farhop.store.documents.authored import Authorship

_Policies = Annotated[dict[Model | Literal[""], PolicyConfig], Field(max_length=MODELS_LIMIT + 1)]
_Splits = Annotated[dict[Model, SplitConfig], Field(max_length=MODELS_LIMIT)]
_policies: TypeAdapter[dict[str, PolicyConfig]] = TypeAdapter(_Policies)
_splits: TypeAdapter[dict[str, SplitConfig]] = TypeAdapter(_Splits)


class Overrides:
    """The document under one key. `read` makes an event of the part by model, or raises ValueError.

    `react` takes events; `refused` counts rejected documents, as `<what>_malformed`.
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
        self._store, self._key, self.what, self._event_of, self._react = store, key, what, read, react
        self._documents: Documents[tuple[Event, Authorship | None]] = Documents(self._read, refused, what, key)

    async def follow(self) -> None:
        """Follow the documents in etcd until cancelled, or until the store is closed."""
        await follow(self._store, self._key, self.changed)

    def changed(self, change: Change) -> None:
        """Process one step of the watch. Without a document, the configuration is in force again."""
        for document in self._documents.take(change).values():
            self._react(self._event_of(b"{}") if document is None else document[0])

    def status(self) -> dict[str, Any] | None:
        """The author of the document in force, and the reason; None if there is none, or it names no author."""
        _, known = self._documents.get(self._key) or (None, None)
        return None if known is None else known.shown()

    def _read(self, _key: str, document: bytes) -> tuple[Event, Authorship | None]:
        by_model, authorship = split_authorship(document or b"{}")
        return self._event_of(by_model), authorship


def policies(store: Store, region: str, react: Callable[[Event], None], refused: Callable[[str], None]) -> Overrides:
    """The overrides of the policies by which the region picks replicas."""

    def read(by_model: bytes) -> Event:
        return PoliciesChanged(_policies.validate_json(by_model))

    return Overrides(store, pick_key(region), "policies", read, react, refused)


def splits(store: Store, region: str, react: Callable[[Event], None], refused: Callable[[str], None]) -> Overrides:
    """The overrides of how the region splits traffic between versions."""

    def read(by_model: bytes) -> Event:
        return SplitsChanged(_splits.validate_json(by_model))

    return Overrides(store, split_key(region), "splits", read, react, refused)
