"""What `farhop policy` and `farhop split` share: one model's entry in a region's document in etcd, read and changed.

Never touches a balancer: they follow etcd. Every write is a compare-and-set of the whole document and signed, so that
two operators at once cannot overwrite each other unseen, and whoever looks sees who it was.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import BaseModel, ValidationError

from farhop.store import word
from farhop.store.word import Signature, WordError
from farhop_cli import fleet, show
from farhop_cli.drain import author_here, heeded, with_store
from farhop_cli.exits import NEGATIVE, fail, warn
from topology.problems import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from farhop.store.contract import Entry, Store
    from farhop_cli.fleet import Status

Models = dict[str, Any]
_MODEL = re.compile(r"[!-~]{1,256}")


@dataclass(frozen=True)
class Options:
    """What the user asked for, as typed. `model` None: not told. `why` is needed where something is set."""

    region: str
    model: str | None
    clear: bool
    why: str | None
    author: str | None
    world: Path
    config: Path | None
    etcd: str | None
    as_json: bool


class Document:
    """A region's document of one kind: `what` as balancers call it in their status, `key_of` where it stands."""

    def __init__(self, what: str, key_of: Callable[[str], str], options: Options) -> None:
        self._what, self._options = what, options
        self._where = fleet.find(options.world, options.config, options.etcd)
        if self._where.topology is not None:
            named = f"topology {quoted(self._where.topology.name)}"
            fleet.known(options.region, self._where.topology.regions, named)
        if options.model and not _MODEL.fullmatch(options.model):
            fail(f"--model: {quoted(options.model)} cannot be a model's name")
        try:
            self._key = key_of(options.region)
        except ValueError:
            fail(f"{quoted(options.region)} is no region's name")

    def show(self, line: Callable[[str, Any], str]) -> int:
        """Print what stands there, a line a model; the exit code."""

        async def work(store: Store) -> int:
            models, signature, _ = await self._stands(store)
            if self._options.as_json:
                show.json({"region": self._options.region, self._what: models, "signed": signature})
            elif not models:
                show.line(f"{self._options.region}: nothing in etcd; its configuration decides")
            for model, entry in {} if self._options.as_json else models.items():
                show.line(f"{model or 'all other models'}: {line(model, entry)}")
            if models and signature is not None and not self._options.as_json:
                show.line(f"by {signature.author} at {_time(signature)}: {signature.why}", "dim")
            return 0

        return with_store(self._where, work)

    def set(self, model: str, entry: Callable[[Any], Any], told: Callable[[Any, Status | None], None]) -> int:
        """Put `entry(what stands of the model, {} if nothing)` in its place; the exit code."""
        if self._options.why is None:
            fail("--why: say why; whoever looks will see it")
        signature = self._signed(self._options.why)

        async def work(store: Store) -> int:
            models, _, revision = await self._stands(store)
            models[model] = made = entry(models.get(model, {}))
            await store.put(self._key, self._encoded(models, signature), expect_revision=revision)
            status = await self._known(signature.at.isoformat())
            if self._options.as_json:
                show.json({"region": self._options.region, "model": model, "set": made, "known": status is not None})
            else:
                told(made, status)
                self._tell_known(status)
            return 0

        return with_store(self._where, work)

    def clear(self) -> int:
        """Take the model's entry away, or without a model all; the exit code."""
        model = self._options.model
        signature = self._signed(self._options.why or f"{model}: back to the configuration")

        async def work(store: Store) -> int:
            if model is None:
                if not await store.delete(self._key):
                    fail(f"{self._options.region}: nothing stands there; nothing was changed", NEGATIVE)
                status = await self._known(None)
            else:
                models, _, revision = await self._stands(store)
                if model not in models:
                    fail(f"{self._options.region}: nothing stands there for {quoted(model)}", NEGATIVE)
                del models[model]
                if models:
                    await store.put(self._key, self._encoded(models, signature), expect_revision=revision)
                else:
                    await store.delete(self._key, expect_revision=revision)
                status = await self._known(signature.at.isoformat() if models else None)
            if self._options.as_json:
                show.json({"region": self._options.region, "cleared": model, "known": status is not None})
            else:
                show.line(f"{model or 'every model'} of {self._options.region}: as configured", "bold")
                self._tell_known(status)
            return 0

        return with_store(self._where, work)

    # -- within

    def _signed(self, why: str) -> Signature:
        signature = Signature(self._options.author or author_here(), why, datetime.now(UTC))
        try:
            word.check(signature)
        except WordError as error:
            fail(f"--{error}")
        return signature

    def _encoded(self, models: Models, signature: Signature) -> bytes:
        try:
            return word.signed(models, signature)
        except WordError as error:
            fail(f"{self._options.region}: the document would be refused: {error}", NEGATIVE)

    async def _stands(self, store: Store) -> tuple[Models, Signature | None, int]:
        """The document by model, who wrote it, and its revision (0: there is none)."""
        found: Entry | None = await store.get(self._key)
        if found is None:
            return {}, None, 0
        try:
            by_model, signature = word.parted(found.value)
            return msgspec.json.decode(by_model, type=Models), signature, found.revision
        except (WordError, msgspec.DecodeError):
            fail(f"what stands at {self._key} cannot be read; take it away with --clear", NEGATIVE)

    async def _known(self, at: str | None) -> Status | None:
        """The region's status once its balancer says that it follows what was written at `at` (None: nothing)."""
        following: list[Status] = []

        async def count() -> int:
            status = await self._where.status_of(self._options.region) or {}
            signed = (status.get("overrides") or {}).get(self._what)
            if status and (signed or {}).get("at") == at:
                following.append(status)
            return len(following)

        await heeded(count, int(self._options.region in self._where.regional))
        return following[0] if following else None

    def _tell_known(self, status: Status | None) -> None:
        if status is None and self._options.region in self._where.regional:
            warn("the region's balancer does not say so yet; it follows when it can")


def checked(shape: type[BaseModel], entry: object, option: str) -> None:
    """End the command, naming the option, if a balancer would refuse the entry."""
    try:
        shape.model_validate(entry)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        fail(f"{option}: {place + ': ' if place else ''}{first['msg'].removeprefix('Value error, ')}")


def listed(numbers: Mapping[str, float]) -> str:
    """Weights for people: `v1=95,v2=5`."""
    return ",".join(f"{name}={number:g}" for name, number in numbers.items())


def _time(signature: Signature) -> str:
    return signature.at.strftime("%Y-%m-%d %H:%M:%S UTC")
