"""`farhop limit`: what tenants, their keys and their models may use, over the whole fleet.

All of a tenant's limits are in one document, with the region that lends quota. `limit_effect` shows what new limits
would have done.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from farhop.accounts.money import usd
from farhop.store.contract import LIMIT_PREFIX, limit_key
from farhop.store.documents import limits as documents
from farhop.store.documents.document import DocumentError
from farhop.store.documents.limits import NAMES, Limit, TenantLimits
from farhop_cli import region_document, setting
from farhop_cli.exits import NEGATIVE, fail, warn
from farhop_cli.setting import UNREADABLE, Item, Noun, Setting, SettingChange
from topology.law import Law, Scope
from topology.problems import quoted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from farhop.accounts.prices import Prices
    from farhop.store.contract import Store
    from farhop.store.documents.authored import Authorship
    from farhop_cli.fleet import Fleet
    from farhop_cli.options import FleetOptions
    from topology.model import Tenant, Topology

MICRO_ERROR = 1e-3  # of a float that was written as whole microdollars
BY_IDENTITY = ("jwt:", "cert:")  # issuers and certificates, which are in balancers' configurations
_TENANTS = ("region", "safe_share", "safe")  # fields of all of a tenant's limits together


@dataclass(frozen=True)
class TrialFiles:
    """Files against which new limits are tried: a folder of usage files, in a dry run; a price book."""

    usage: Path | None
    prices: Path | None

    @cached_property
    def book(self) -> Prices | None:
        """The price book, if one is given. Ends the command if it is invalid."""
        if self.prices is None:
            return None
        from farhop_cli.limit_effect import prices_in

        return prices_in(self.prices)

    def check(self, fleet_options: FleetOptions) -> None:
        """End the command, naming the option, for invalid files."""
        _ = self.book
        if self.usage is not None and not fleet_options.dry_run:
            fail("--usage: is for a dry run; give --dry-run, too")
        if self.usage is not None and not self.usage.is_dir():
            fail(
                f"--usage: {self.usage} is no folder; give the folder that balancers have as usage.dir, or a copy of it"
            )


class Whose(NamedTuple):
    """Whose use is limited: all of the tenant's ("", ""), that of one key, or on one model, or of each user."""

    key: str
    model: str
    each_user: bool


@dataclass(frozen=True)
class Shared:
    """How quota is lent: by which region, what share is each balancer's own, and with which tenants idle quota is
    shared. None: unchanged.
    """

    home: str
    safe_share: float | None
    pool: str | None


def micro_usd(option: str, given: float | None) -> int | None:
    """USD in whole microdollars."""
    if given is None:
        return None
    if abs(given * 1e6 - round(given * 1e6)) > MICRO_ERROR:
        fail(f"{option}: {given} is no amount of whole microdollars; give one such as 50 or 0.25")
    return round(given * 1e6)


def set_limit(
    tenant: str, whose: Whose, sizes: dict[str, int | None], how: Shared, against: TrialFiles,
    why: str, by: str | None, fleet_options: FleetOptions,
) -> int:  # fmt: skip
    """Limit a tenant, or a key or a model of it, or each of its users; the exit code. Limits left out stay. A dry run
    reports what they would have refused, by usage files. Money is not limited if it cannot be counted.
    """
    against.check(fleet_options)
    given = {name: size for name, size in sizes.items() if size is not None}
    if not given and how == Shared("", None, None):
        options = ", ".join("--" + name.removeprefix("micro_").replace("_", "-") for name in NAMES)
        fail(f"give a limit: one of {options}")
    new = _New(tenant, whose, given, how, against, region_document.authorship(why, by), fleet_options.fleet())
    notes = ("requests under way are not disturbed",)
    asked = SettingChange(
        _key(tenant), "", new.whom, new.document, check=new.check, notes=notes, effects=new.effects
    )  # fmt: skip
    return setting.change(NOUN, new.fleet, asked, fleet_options)


class _New:
    """A new limit: checked against the fleet, then written into the document."""

    def __init__(
        self, tenant: str, whose: Whose, sizes: dict[str, int], how: Shared, against: TrialFiles,
        by: Authorship, fleet: Fleet,
    ) -> None:  # fmt: skip
        self.whom = _whom(tenant, whose)
        self.fleet = fleet
        self._tenant, self._whose, self._sizes, self._how, self._against = tenant, whose, sizes, how, against
        self._by = by
        self._topology: Topology | None = None  # the law in force, once it is known
        self._entries: list[str] = []  # the global balancers, each of which gets a part of a safe share

    async def check(self, store: Store) -> None:
        """End the command if it is not allowed."""
        from farhop_cli.law import in_force

        if any(documents.kind_of(name) == "usd" for name in self._sizes):
            from farhop_cli.limit_effect import check_priced

            check_priced(self._whose.model, self._against.book, await self.fleet.statuses())
        if self._how.safe_share:
            statuses = await self.fleet.statuses()
            self._entries.extend(sorted({f"{one['region']}/{one['instance']}" for one in statuses}))
        await setting.warn_unserved(self.fleet, [self._whose.model] if self._whose.model else [])
        topology = self._topology = await in_force(store, self.fleet.topology)
        if topology is None:
            return
        if self._tenant not in topology.tenants:
            fail(f"TENANT: {quoted(self._tenant)} is no tenant of topology {quoted(topology.name)}")
        if self._how.home and self._how.home not in topology.regions:
            fail(f"--home: no region {quoted(self._how.home)}; there is {', '.join(sorted(topology.regions)[:8])}")
        await self._warn_of_key(self._whose.key, topology.tenants[self._tenant], store)

    async def _warn_of_key(self, key: str, tenant: Tenant, store: Store) -> None:
        if not key or key.startswith(BY_IDENTITY) or any(one.name == key for one in tenant.keys):
            return
        from farhop_cli.key import issued_to

        if await issued_to(store, key) != tenant.name:
            warn(f"--key: {tenant.name} has no key {quoted(key)}, issued or in the law; see `farhop key list`")

    def document(self, before: Setting | None) -> bytes:
        """The tenant's limits including this one."""
        if before is UNREADABLE:
            fail(f"the limits of {self._tenant} cannot be read; remove them with `farhop limit unset`", NEGATIVE)
        items = list(before.items) if before is not None else []
        shared = self._shared(items)
        old: dict[str, Any] = next((item.value for item in items if item.whom == self.whom), {})
        kept = {name: value for name, value in old.items() if name in NAMES or name == "pool"}
        pool = self._how.pool
        if kept or self._sizes or pool:
            value = {**kept, **self._sizes, **({} if pool is None else {"pool": pool})}
            items = [*(item for item in items if item.whom != self.whom), Item(self.whom, value)]
        if any("user" in item.whom for item in items):
            self._warn_of_home(shared["region"])
        return _encoded(self._tenant, items, shared, self._by)

    def _warn_of_home(self, home: str) -> None:
        """Warn if the root of users' limits may know no users."""
        if self._topology is None:
            return
        lawful = Law(self._topology).verdict(self._tenant, "", Scope.LOGGING).lawful
        if home not in lawful:
            where = f"; give one of {', '.join(sorted(lawful)[:8])}" if lawful else ""
            warn(f"--home: the law allows no records of {self._tenant} in {home}, so its users count as one{where}")

    def _shared(self, items: Sequence[Item]) -> dict[str, Any]:
        shared = {name: value for item in items[:1] for name, value in item.value.items() if name in _TENANTS}
        if self._how.home:
            shared["region"] = self._how.home
        if not shared.get("region"):
            fail("--home: give it with a tenant's first limit: the region that lends out the tenant's units")
        if self._how.safe_share is not None:
            if self._how.safe_share and not self._entries:
                fail("--safe-share: no global balancer answers, to have a part of it")
            shared |= {"safe_share": self._how.safe_share, "safe": self._entries if self._how.safe_share else []}
        return shared

    async def effects(self, _store: Store) -> Sequence[str]:
        """What it would have refused, in a dry run with usage files."""
        if self._against.usage is None:
            return ()
        from farhop_cli.limit_effect import refused

        key, model, each_user = self._whose
        effect = refused(
            self._against.usage, self._tenant, key, model, self._sizes, each_user=each_user, prices=self._against.book
        )  # fmt: skip
        return (effect,)


def unset(tenant: str, whose: Whose | None, why: str, by: str | None, fleet_options: FleetOptions) -> int:
    """Remove a limit, or all of a tenant's (None), readable or not; the exit code."""
    authorship = region_document.authorship(why, by)
    whom = {"tenant": tenant} if whose is None else _whom(tenant, whose)

    def make(before: Setting | None) -> bytes | None:
        if before is UNREADABLE and whose is not None:
            fail(f"the limits of {tenant} cannot be read; give --all to unset it all", NEGATIVE)
        items = list(before.items) if before is not None else []
        left = [item for item in items if whose is not None and item.whom != whom]
        if before is not UNREADABLE and len(left) == len(items):
            fail(f"{setting.title(whom)}: no limit is set; nothing was changed", NEGATIVE)
        shared = {name: value for item in items[:1] for name, value in item.value.items() if name in _TENANTS}
        return _encoded(tenant, left, shared, authorship) if left else None

    back = (f"{setting.title(whom)}: not limited",)
    return setting.change(
        NOUN, fleet_options.fleet(), SettingChange(_key(tenant), "", whom, make, notes=back), fleet_options
    )


def _whom(tenant: str, whose: Whose) -> dict[str, str]:
    key, model = region_document.named("--key", whose.key), region_document.named("--model", whose.model)
    more = {"key": key, "model": model, "user": "each" if whose.each_user else ""}
    return {"tenant": tenant, **{name: value for name, value in more.items() if value}}


def _key(tenant: str) -> str:
    try:
        return limit_key(tenant)
    except ValueError:
        fail(f"TENANT: {quoted(tenant)} is no tenant's name")


def _encoded(tenant: str, items: Sequence[Item], shared: dict[str, Any], by: Any) -> bytes:
    try:
        limits = tuple(
            Limit(
                key=item.whom.get("key", ""), model=item.whom.get("model", ""), each_user="user" in item.whom,
                **{name: value for name, value in item.value.items() if name in NAMES or name == "pool"},
            )
            for item in items
        )  # fmt: skip
        one = TenantLimits(
            tenant=tenant, home=shared["region"], limits=limits, author=by.author, why=by.why, at=by.at,
            safe_share=shared.get("safe_share", 0.0), safe=tuple(shared.get("safe", ())),
            seq=int(datetime.now(UTC).timestamp()) - 1_600_000_000,
        )  # fmt: skip
        return documents.encode(one)
    except DocumentError as error:
        fail(f"{tenant}: the limits would be refused: {error}", NEGATIVE)


def _read(_place: str, document: bytes) -> Setting:
    one = documents.decode(document)
    shared = {"region": one.home, **({"safe_share": one.safe_share, "safe": list(one.safe)} if one.safe else {})}
    items = [
        Item(
            _whom(one.tenant, Whose(limit.key, limit.model, limit.each_user)),
            {**limit.sizes(), **({"pool": limit.pool} if limit.pool else {}), **shared},
        )
        for limit in one.limits
    ]
    return Setting(tuple(items), one.author, one.why, one.at)


def _line(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    parts = [
        f"{usd(value[name]) if documents.kind_of(name) == 'usd' else format(value[name], ',')} {documents.unit(name)}"
        for name in NAMES if name in value
    ]  # fmt: skip
    safe = value.get("safe_share")
    own = f", {safe:.4g} of it split among {len(value.get('safe') or ())} balancers" if safe else ""
    pool = f", with what idles in pool {value['pool']}" if value.get("pool") else ""
    return f"{', '.join(parts) or 'nothing'}{pool}; lent out by {value.get('region')}{own}"


def _all_balancers(here: Fleet, _region: str) -> int:
    return len(here.admins)


async def _followed(here: Fleet, _region: str, before: Setting | None, after: Setting | None) -> int:
    at = after.at.isoformat() if after is not None and after.at is not None else None
    tenants = {item.whom["tenant"] for one in (after, before) if one is not None for item in one.items[:1]}
    return sum(_follows(status, tenants, at) for status in await here.statuses())


def _follows(status: Any, tenants: set[str], at: str | None) -> bool:
    shown = (status.get("limits") or {}).get("tenants")
    return isinstance(shown, dict) and all(shown.get(tenant) == at for tenant in tenants)


NOUN = Noun("limit", LIMIT_PREFIX, "no tenant is limited", _read, _line, _all_balancers, _followed)
