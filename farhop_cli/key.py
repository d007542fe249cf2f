"""`farhop key`: API keys in etcd, in addition to the law's. A key is made here, shown once, and never stored.

Etcd holds its SHA-256.
"""

from __future__ import annotations

import secrets
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from farhop.identity.api_keys import BASE62, CHANCE_CHARS, digest, with_checksum
from farhop.store.contract import KEY_PREFIX, Conflict, issued_key
from farhop.store.documents import issued_keys
from farhop.store.documents.document import DocumentError
from farhop.store.documents.issued_keys import IssuedKey
from farhop.store.envelope import bare
from farhop_cli import setting, show
from farhop_cli.exits import NEGATIVE, fail, warn
from farhop_cli.law import in_force
from farhop_cli.options import duration_s
from topology.law import Law
from topology.problems import quoted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farhop.store.contract import KeyValue, Store
    from farhop_cli.fleet import Fleet
    from farhop_cli.options import FleetOptions
    from topology.model import Topology

ID_CHARS = 11
LENGTH_MAX_S = 3650 * 86_400.0
_OPTIONS = {
    "author": "--by", "why": "--why", "models": "--model", "paths": "--path", "within": "--within",
    "tenant": "TENANT", "id": "ID", "expires": "--for",
}  # fmt: skip
_COLUMNS = ("id", "tenant", "state", "for", "until", "by", "why")


def create(
    tenant: str, scopes: tuple[list[str], list[str], list[str]], after: str | None, length: str | None,
    why: str, by: str | None, fleet_options: FleetOptions, *, explain: bool = False,
) -> int:  # fmt: skip
    """Create a key and show it; the exit code. `scopes`: models, paths, places; `explain`: it may see receipts."""
    now = datetime.now(UTC)
    begins = now + _length("--after", after) if after is not None else None
    models, paths, within = (tuple(dict.fromkeys(names)) for names in scopes)
    key = _made()
    one = IssuedKey(
        id=_id(), sha256=digest(key), tenant=tenant, models=models, paths=paths, within=within, not_before=begins,
        expires=(begins or now) + _length("--for", length) if length is not None else None,
        author=by or setting.author_here(), why=why, at=now, explain=explain,
    )  # fmt: skip
    document = _encoded(one)
    here = fleet_options.fleet()

    async def work(store: Store) -> int:
        _lawful(one, await in_force(store, here.topology))
        await setting.warn_unserved(here, models)
        if not fleet_options.dry_run:
            await store.put(one.key, document, expect_revision=0)
        return await _reported(here, fleet_options, [one], key)

    return setting.with_store(here, work, writes=not fleet_options.dry_run)


def rotate(id_: str, grace: str, length: str | None, why: str, by: str | None, fleet_options: FleetOptions) -> int:
    """Replace a key by a new one; the old one stays valid for `grace`; the exit code."""
    now, here, key = datetime.now(UTC), fleet_options.fleet(), _made()
    ends = now + _length("--grace", grace)
    given = None if length is None else _length("--for", length)

    async def work(store: Store) -> int:
        entry, old = await _issued(store, id_)
        if old.expires is not None and old.expires <= now:
            fail(f"{id_} has expired; make another with `farhop key create {old.tenant}`", NEGATIVE)
        for other in await _all(store):
            if other.replaces == id_ and other.revoked is None:
                fail(f"{id_} was rotated already: {other.id} takes its place; rotate or revoke that one", NEGATIVE)
        lasts = given if given is not None or old.expires is None else old.expires - (old.not_before or old.at)
        new = replace(
            old, id=_id(), sha256=digest(key), not_before=old.not_before if _later(old, now) else None,
            expires=None if lasts is None else now + lasts, author=by or setting.author_here(), why=why, at=now,
            replaces=id_, seq=1,
        )  # fmt: skip
        if not _later(old, now):  # a key that has not begun is not shortened: it would end before it begins
            old = replace(old, expires=min(ends, old.expires or ends), seq=old.seq + 1)
        documents = _encoded(new), _encoded(old)
        if not fleet_options.dry_run:
            await store.put(new.key, documents[0], expect_revision=0)
            try:
                await store.put(old.key, documents[1], expect_revision=entry.revision)
            except Conflict:  # the new key has not been shown
                await store.delete(new.key)
                raise
        return await _reported(here, fleet_options, [new, old], key)

    return setting.with_store(here, work, writes=not fleet_options.dry_run)


def revoke(id_: str, why: str, by: str | None, fleet_options: FleetOptions) -> int:
    """Revoke a key; the exit code."""
    now, here = datetime.now(UTC), fleet_options.fleet()

    async def work(store: Store) -> int:
        entry, old = await _issued(store, id_)
        one = replace(old, revoked=now, author=by or setting.author_here(), why=why, at=now, seq=old.seq + 1)
        document = _encoded(one)
        if not fleet_options.dry_run:
            await store.put(one.key, document, expect_revision=entry.revision)
        return await _reported(here, fleet_options, [one], None)

    return setting.with_store(here, work, writes=not fleet_options.dry_run)


def listed(tenant: str, fleet_options: FleetOptions) -> int:
    """Print issued keys; the exit code."""

    async def work(store: Store) -> int:
        found = [one for one in await _all(store) if tenant in ("", one.tenant)]
        if fleet_options.as_json:
            show.json({"keys": [_row(one) for one in found]})
        elif found:
            show.table("keys", _COLUMNS, [_line(one) for one in found])
        else:
            show.line("no keys were created; those that come with the law are in `farhop law get`")
        return 0

    return setting.with_store(fleet_options.fleet(), work)


async def _issued(store: Store, id_: str) -> tuple[KeyValue, IssuedKey]:
    """The key of this id. Ends the command if there is none that is valid."""
    if not id_ or "/" in id_:
        fail(f"ID: {quoted(id_)} is no key's id; see `farhop key list`")
    entry = await store.get(issued_key(id_))
    if entry is None:
        fail(f"ID: no key {quoted(id_)} was created; see `farhop key list`", NEGATIVE)
    one = _read(entry)
    if one is None:
        fail(f"the document at {entry.key} cannot be read, and admits no caller; nothing was changed", NEGATIVE)
    if one.revoked is not None:
        fail(f"{id_} is revoked already, by {one.author}: {one.why}", NEGATIVE)
    return entry, one


async def issued_to(store: Store, id_: str) -> str | None:
    """The tenant that a key was issued to; None for an unknown id."""
    entry = await store.get(issued_key(id_)) if id_ and "/" not in id_ else None
    one = _read(entry) if entry is not None else None
    return one.tenant if one is not None else None


def _read(entry: KeyValue) -> IssuedKey | None:
    try:
        one = issued_keys.decode(bare(entry.value))
    except DocumentError:
        return None
    return one if one.key == entry.key else None


async def _all(store: Store) -> list[IssuedKey]:
    found = []
    for entry in await store.list(KEY_PREFIX):
        one = _read(entry)
        if one is None:
            warn(f"the document at {entry.key} cannot be read, and admits no caller")
        else:
            found.append(one)
    return sorted(found, key=lambda one: (one.tenant, one.at, one.id))


def _lawful(one: IssuedKey, topology: Topology | None) -> None:
    """End the command for a key that would never admit a request."""
    if topology is None:
        return
    if one.tenant not in topology.tenants:
        fail(
            f"TENANT: {quoted(one.tenant)} is no tenant of the law; there is {', '.join(sorted(topology.tenants)[:16])}"
        )
    law = Law(topology)
    for place in one.within:
        if law.within(place) is None:
            fail(f"--within: {quoted(place)} is no place here; there is {', '.join(law.residencies()[:16])}")


def _encoded(one: IssuedKey) -> bytes:
    try:
        return issued_keys.encode(one)
    except DocumentError as error:
        fail(f"{_OPTIONS.get(error.field, error.field)}: {error.message}")


async def _reported(here: Fleet, fleet_options: FleetOptions, changed: Sequence[IssuedKey], key: str | None) -> int:
    """Print what was done. The key last, so that it is not missed."""
    # Regional balancers also use keys: at their own client ports, and when they check a hop token's key.
    of = 0 if fleet_options.dry_run else len(here.admins) + len(here.regional)
    aware = await setting.followers_of(lambda: _followed(here, changed[0]), of)
    if fleet_options.as_json:
        made = {} if key is None or fleet_options.dry_run else {"key": key}
        balancers = {"dry_run": fleet_options.dry_run, "balancers": of, "aware": aware}
        show.json({"keys": [_row(one) for one in changed], **made, **balancers})
        return 0
    dry = show.DRY if fleet_options.dry_run else ""
    for one in changed:
        show.line(f"{dry}{one.id}, of {one.tenant}: {_state(one)}, for {_scope(one)}, until {_until(one)}", "bold")
    setting.print_aware(aware, of)
    if key is not None and not fleet_options.dry_run:
        show.line("the key, which is shown this once:")
        show.line(key, "bold")
    return 0


async def _followed(here: Fleet, one: IssuedKey) -> int:
    return sum((status.get("keys") or {}).get("last") == one.at.isoformat() for status in await here.all_statuses())


def _row(one: IssuedKey) -> dict[str, Any]:
    """A key's row in `--json`."""
    fields: dict[str, Any] = msgspec.to_builtins(one)
    return {**fields, "state": _state(one)}


def _line(one: IssuedKey) -> list[str]:
    return [one.id, one.tenant, _state(one), _scope(one), _until(one), one.author, one.why]


def _scope(one: IssuedKey) -> str:
    within = [f"within {place}" for place in one.within]
    scope = ", ".join([*one.models, *one.paths, *within]) or "all that the tenant may"
    return scope + (", with receipts" if one.explain else "")


def _until(one: IssuedKey) -> str:
    return "it is revoked" if one.expires is None else f"{one.expires:%Y-%m-%d %H:%M:%S} UTC"


def _state(one: IssuedKey) -> str:
    now = datetime.now(UTC)
    if one.revoked is not None:
        return "revoked"
    if _later(one, now):
        return "not yet valid"
    return "valid" if one.expires is None or now < one.expires else "expired"


def _later(one: IssuedKey, now: datetime) -> bool:
    return one.not_before is not None and now < one.not_before


def _length(option: str, text: str) -> timedelta:
    return timedelta(seconds=duration_s(option, text, 1.0, LENGTH_MAX_S))


def _made() -> str:
    return with_checksum(_chance(CHANCE_CHARS))


def _id() -> str:
    return "k" + _chance(ID_CHARS)


def _chance(chars: int) -> str:
    return "".join(secrets.choice(BASE62) for _ in range(chars))
