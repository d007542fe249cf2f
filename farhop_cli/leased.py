"""The common part of drains, biases and pins: a document each, under a lease of its length, which ends by itself."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from farhop.store.documents.document import DocumentError
from farhop_cli import setting
from farhop_cli.exits import NEGATIVE, fail
from farhop_cli.options import duration_s
from farhop_cli.setting import Setting, SettingChange

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from farhop.store.contract import Store
    from farhop_cli.fleet import Fleet
    from farhop_cli.options import FleetOptions
    from farhop_cli.setting import Noun


def authorship(why: str, by: str | None, length: str) -> dict[str, Any]:
    """The fields that every such document has."""
    for_s = duration_s("--for", length)
    return {"why": why, "author": by or setting.author_here(), "at": datetime.now(UTC), "for_s": for_s}


def refused(error: DocumentError, texts: Mapping[str, str]) -> None:
    """End the command, naming the option."""
    option = {"author": "--by", "why": "--why", "ms": "--ms"}.get(error.field, error.field)
    known = {"for_s": "--for: give 1s to 7d", **texts}
    fail(known.get(error.field, f"{option}: {error.message}"))


class Leased(NamedTuple):
    """A document with a lease, and its subject. `check` and `effects` as in SettingChange."""

    key: str
    whom: Mapping[str, str]
    document: bytes
    for_s: float
    check: Callable[[Store], Awaitable[None]] | None = None
    effects: Callable[[Store], Awaitable[Sequence[str]]] | None = None


def put(noun: Noun, here: Fleet, one: Leased, fleet_options: FleetOptions, notes: Sequence[str] = ()) -> int:
    """Write it instead of the present one, readable or not; the exit code."""
    scope = (name if kind == "region" else f"--{kind} {name}" for kind, name in one.whom.items())
    sooner = f"it ends by itself; sooner with: farhop {noun.name} unset {' '.join(scope)}"
    asked = SettingChange(
        one.key, "", one.whom, lambda _: one.document, one.for_s, one.check, (*notes, sooner), effects=one.effects
    )
    return setting.change(noun, here, asked, fleet_options)


def unset(
    noun: Noun, here: Fleet, key: str, whom: Mapping[str, str], fleet_options: FleetOptions, notes: Sequence[str] = ()
) -> int:
    """Remove it; the exit code. Ends the command if there is none."""

    def make(before: Setting | None) -> None:
        if before is None:
            fail(f"{setting.title(whom)}: no {noun.name} is set; nothing was changed", NEGATIVE)

    return setting.change(noun, here, SettingChange(key, "", whom, make, notes=notes), fleet_options)


def all_balancers(here: Fleet, _region: str) -> int:
    """All global balancers follow these."""
    return len(here.admins)
