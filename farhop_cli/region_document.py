"""The common part of routes, policies and splits: a region's items in one document with one author, until unset.

After an unset the document has no items and still names who unset it and why; balancers read it as if it did not exist.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from farhop.config import problems_of
from farhop.store.documents import authored
from farhop.store.documents.authored import Authorship
from farhop.store.documents.document import DocumentError
from farhop_cli import setting
from farhop_cli.exits import NEGATIVE, fail
from farhop_cli.setting import UNREADABLE, Item, Setting, SettingChange
from topology.problems import quoted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from pydantic import BaseModel

    from farhop.store.contract import Store
    from farhop_cli.fleet import Fleet
    from farhop_cli.options import FleetOptions
    from farhop_cli.setting import Noun


_NAME = re.compile(r"[!-~]{1,256}")


class RegionDocument(NamedTuple):
    """One region's document of a noun. `encode` writes its items, or raises DocumentError."""

    noun: Noun
    region: str
    encode: Callable[[Sequence[Item], Authorship], bytes]

    @property
    def key(self) -> str:
        """Its key. Ends the command for an invalid region name."""
        if not self.region or "/" in self.region:
            fail(f"{quoted(self.region)} is no region's name")
        return self.noun.prefix + self.region

    def encoded(self, items: Sequence[Item], by: Authorship) -> bytes:
        """The document to write. Ends the command if balancers would refuse it."""
        try:
            return self.encode(items, by)
        except DocumentError as error:
            fail(f"{self.region}: the document would be refused: {error}", NEGATIVE)


class Checks(NamedTuple):
    """Checks of a change against the fleet, each as in SettingChange."""

    sense: Callable[[Fleet], Awaitable[None]] | None = None
    warnings: Callable[[Fleet], Awaitable[Sequence[str]]] | None = None
    effects: Callable[[Fleet, Store], Awaitable[Sequence[str]]] | None = None


NO_CHECKS = Checks()


def authorship(why: str, by: str | None) -> Authorship:
    """Author, time and reason. Ends the command, naming the option, for an empty one."""
    made = Authorship(by or setting.author_here(), why, datetime.now(UTC))
    try:
        authored.check(made)
    except DocumentError as error:
        fail(f"--{error}".replace("--author", "--by"))
    return made


def put(
    document: RegionDocument,
    whom: Mapping[str, str],
    value: Callable[[Any], Any],
    by: Authorship,
    fleet_options: FleetOptions,
    checks: Checks = NO_CHECKS,
    notes: Sequence[str] = (),
) -> int:
    """Put `value(present value, None if there is none)` in its place, and keep the rest; the exit code."""
    noun, region, _ = document
    here, (sense, warnings, effects) = fleet_options.fleet(region), checks
    whom = {"region": region, **whom}

    def make(before: Setting | None) -> bytes:
        if before is UNREADABLE:
            fail(f"the document of {region} cannot be read; remove it with `farhop {noun.name} unset`", NEGATIVE)
        items = before.items if before is not None else ()
        old = next((item.value for item in items if item.whom == whom), None)
        return document.encoded([*(item for item in items if item.whom != whom), Item(whom, value(old))], by)

    asked = SettingChange(
        document.key, region, whom, make, notes=notes,
        warnings=None if warnings is None else lambda: warnings(here),
        effects=None if effects is None else lambda store: effects(here, store),
        sense=None if sense is None else lambda: sense(here),
    )  # fmt: skip
    return setting.change(noun, here, asked, fleet_options)


def unset(
    document: RegionDocument, whom: Mapping[str, str] | None, why: str, by: str | None, fleet_options: FleetOptions
) -> int:
    """Remove what is set for one subject, or all of the region's (None), readable or not; the exit code."""
    noun, region, _ = document
    by_whom = authorship(why, by)
    scope = {"region": region, **(whom or {})}

    def make(before: Setting | None) -> bytes:
        if before is UNREADABLE and whom is not None:
            fail(f"the document of {region} cannot be read; name only the region to unset it all", NEGATIVE)
        items = before.items if before is not None else ()
        left = [item for item in items if whom is not None and item.whom != scope]
        if before is not UNREADABLE and len(left) == len(items):
            fail(f"{setting.title(scope)}: no {noun.name} is set; nothing was changed", NEGATIVE)
        return document.encoded(left, by_whom)

    back = (f"{setting.title(scope)}: as configured",)
    return setting.change(
        noun, fleet_options.fleet(region), SettingChange(document.key, region, scope, make, notes=back), fleet_options
    )  # fmt: skip


def setting_of(items: Sequence[Item], by: Authorship | None) -> Setting:
    """The items with their authors, if known."""
    if by is None:
        return Setting(tuple(items))
    return Setting(tuple(items), by.author, by.why, by.at)


def named(option: str, name: str) -> str:
    """A tenant's or a model's name, or "". Ends the command for an invalid one."""
    if name and not _NAME.fullmatch(name):
        fail(f"{option}: {quoted(name)} cannot be a name")
    return name


def checked(shape: type[BaseModel], value: object, option: str) -> None:
    """End the command, naming the option, if a balancer would refuse it."""
    from pydantic import ValidationError

    try:
        shape.model_validate(value)
    except ValidationError as error:
        fail(f"{option}: {problems_of(error, kind=shape)[0].removeprefix('document: ')}")
