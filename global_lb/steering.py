"""Follows in etcd by which routes this entry is to choose regions, and operators' biases and pins. Never decides.

Invariants: a document that is absurd, names an unknown region or stands under another's key changes nothing and is
counted; a word ends with its key, with a snapshot that lacks it, or after its own length by this process's clock; a
routes key that goes gives the entry back to its configuration; losing etcd changes nothing.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, TypeAdapter

from farhop.store import steer
from farhop.store.contract import STEER_PREFIX, ChangeKind, route_key
from farhop.store.override import OverrideError
from farhop.store.steer import BiasWord
from farhop.store.word import Signature, routes_parted
from global_lb.config import ROUTES_MAX, RouteConfig
from global_lb.policy import Bias, Pin, Route, RoutesChanged, Steered, Words

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from farhop.balance.machine import Event
    from farhop.store.contract import Change, Store
    from farhop.store.steer import Word
    from global_lb.policy import Scope

DOCUMENT_LIMIT_BYTES = 256 * 1024
WORDS_MAX = 4096

_reader: TypeAdapter[list[RouteConfig]] = TypeAdapter(Annotated[list[RouteConfig], Field(max_length=ROUTES_MAX)])


def routes_of(listed: Sequence[RouteConfig], regions: Collection[str]) -> dict[Scope, Route]:
    """Routes by their scope. ValueError that names the route and the remedy if they cannot stand together here."""
    routes: dict[Scope, Route] = {}
    for n, one in enumerate(listed):
        scope = (one.tenant, one.model)
        if scope in routes:
            raise ValueError(f"routes.{n}: a second one for tenant {one.tenant!r}, model {one.model!r}; keep one")
        for name in sorted(one.named() - set(regions)):
            known = ", ".join(sorted(regions)[:8])
            raise ValueError(f"routes.{n}: no region {name!r} in the topology; known are {known}")
        routes[scope] = Route(**one.model_dump(exclude={"tenant", "model"}))
    return routes


class Steering:
    """What is in force. `react` is told events; `refused` counts documents not believed, by reason."""

    def __init__(
        self,
        store: Store,
        region: str,
        regions: Collection[str],
        react: Callable[[Event], None],
        refused: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._store, self._regions, self._route_key = store, regions, route_key(region)
        self._react, self._refused, self._clock = react, refused, clock
        self._document = b""
        self._signature: Signature | None = None
        self._words: dict[str, tuple[bytes, Word, float]] = {}  # by key: as written, as read, until when by our clock

    async def follow_routes(self) -> None:
        """Until cancelled, or the store is closed."""
        async with contextlib.aclosing(self._store.watch(self._route_key)) as changes:
            async for change in changes:
                self.routes_changed(change)

    async def follow_words(self) -> None:
        """Until cancelled, or the store is closed."""
        async with contextlib.aclosing(self._store.watch(STEER_PREFIX)) as changes:
            async for change in changes:
                self.words_changed(change)

    # -- routes

    def routes_changed(self, change: Change) -> None:
        """Take one step of the watch. Another region's name may begin with ours."""
        key = self._route_key
        if change.kind is ChangeKind.SNAPSHOT:
            self._read_routes(next((entry.value for entry in change.entries if entry.key == key), b""))
        elif change.kind is not ChangeKind.LOST and change.key == key:
            self._read_routes(change.value if change.kind is ChangeKind.PUT else b"")

    def _read_routes(self, document: bytes) -> None:
        """JSON: a list of routes as in the configuration, bare or signed; b"" where nothing stands."""
        if document == self._document:
            return  # listed anew after a gap
        try:
            listed, signature = routes_parted(document, DOCUMENT_LIMIT_BYTES)
            routes = routes_of(_reader.validate_json(listed or b"[]"), self._regions)
        except ValueError:  # a WordError is one
            self._refused("routes_malformed")
            return
        self._document, self._signature = document, signature
        self._react(RoutesChanged(routes))

    def signed(self) -> dict[str, Any] | None:
        """Who said the routes in force, and why; None where they are the configuration's, or nobody signed."""
        signed = self._signature
        return None if signed is None else {"author": signed.author, "why": signed.why, "at": signed.at.isoformat()}

    # -- words

    def words_changed(self, change: Change) -> None:
        """Take one step of the watch."""
        before = dict(self._words)
        if change.kind is ChangeKind.SNAPSHOT:
            listed = {entry.key for entry in change.entries}
            self._words = {key: word for key, word in self._words.items() if key in listed}
            for entry in change.entries:
                self._read_word(entry.key, entry.value)
        elif change.kind is ChangeKind.PUT:
            self._read_word(change.key, change.value)
        elif change.kind is ChangeKind.DELETE:
            self._words.pop(change.key, None)
        if self._words != before:
            self._react(Steered(self._in_force()))

    def _read_word(self, key: str, value: bytes) -> None:
        known = self._words.get(key)
        if known is not None and known[0] == value:
            return  # listed anew after a gap
        try:
            word = steer.decode(value)
        except OverrideError:
            self._refused("steer_malformed")
            return
        if word.region not in self._regions:
            self._refused("steer_to_unknown_region")
        elif word.key != key:
            self._refused("steer_misplaced")
        elif known is None and len(self._words) >= WORDS_MAX:
            self._refused("too_many_words")
        else:
            self._words[key] = value, word, self._clock() + word.for_s

    def _in_force(self) -> Words:
        biases: dict[str, Bias] = {}
        pins: dict[tuple[str, str], Pin] = {}
        for _, word, until in self._words.values():
            if isinstance(word, BiasWord):
                biases[word.region] = Bias(word.region, word.ms, word.why, word.author, until)
            else:
                whom = ("tenant", word.tenant) if word.tenant else ("model", word.model)
                pins[whom] = Pin(word.region, word.strict, word.why, word.author, until)
        return Words(biases, pins)

    def told(self) -> list[dict[str, Any]]:
        """The words in force, for people."""
        now = self._clock()
        told = []
        for key in sorted(self._words):
            _, word, until = self._words[key]
            if now < until:
                own: dict[str, Any] = (
                    {"action": "bias", "ms": word.ms}
                    if isinstance(word, BiasWord)
                    else {"action": "pin", "tenant": word.tenant, "model": word.model, "strict": word.strict}
                )
                ends = {"until": word.until.isoformat(timespec="seconds"), "left_s": until - now}
                told.append({**own, "region": word.region, "why": word.why, "author": word.author, **ends})
        return told
