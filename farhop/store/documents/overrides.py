"""Operators' overrides in etcd: a region drained, biased or refusing work; a tenant or model pinned to a region.

Each is stored under a lease and ends with it; `at` is shown to operators and never compared with another host's clock.
The etcd key of a drain or bias names its region, the key of a pin its tenant or model. A document is refused as a whole
(DocumentError) or trusted as a whole. Never decides what an override changes.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Annotated, TypeAlias
from urllib.parse import quote

import msgspec
from msgspec import Meta

from farhop.store.contract import OVERRIDE_PREFIX, STEER_PREFIX, entry_drain_key, override_key, refuse_key
from farhop.store.documents.document import DocumentError, check_text, read

DOCUMENT_LIMIT_BYTES = 16 * 1024
REGION_LIMIT = 128  # characters, as in a report
NAME_LIMIT = 256  # of a tenant's or a model's name
WHY_LIMIT = 256
AUTHOR_LIMIT = 128
FOR_LIMIT_S = 7 * 86_400.0  # a drain for longer is a change of the topology
OVER_LIMIT_S = 3600.0
BIAS_LIMIT_MS = 60_000.0


class _Leased(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of every override. `for_s`: the lifetime of its lease in seconds, counted from `at` (UTC)."""

    region: str
    why: str
    author: str
    at: Annotated[datetime, Meta(tz=True)]
    for_s: float

    @property
    def until(self) -> datetime:
        """When the lease ends, to within etcd's resolution of a second; only for display."""
        return self.at + timedelta(seconds=self.for_s)

    @property
    def key(self) -> str:
        """Its key in etcd."""
        raise NotImplementedError


class DrainOverride(_Leased, frozen=True, kw_only=True, tag="drain", tag_field="action"):
    """Send no new work to `region`.

    `over_s`: the share of new requests that may still go there falls linearly to zero in this many seconds, by each
    balancer's own clock from when it first saw the drain; 0: at once. `keep_share` (0..1) of new requests may go there
    throughout the drain, and so may requests that have no other region; 0: none. `move_streams`: streams in progress
    there are moved to other regions at the same pace, if the law and their kind allow it; otherwise they finish there.
    """

    over_s: float = 0.0
    keep_share: float = 0.0
    move_streams: bool = False

    @property
    def key(self) -> str:
        """Its key in etcd."""
        return override_key(self.region)


class EntryDrainOverride(_Leased, frozen=True, kw_only=True, tag="drain-entry", tag_field="action"):
    """Send no new client to `entry`, which is in `region`: DNS answers leave it out, its anycast route is withdrawn.

    `over_s`: as for a region. The entry still serves requests that arrive there nevertheless.
    """

    entry: str
    over_s: float = 0.0

    @property
    def key(self) -> str:
        """Its key in etcd."""
        return entry_drain_key(self.region, self.entry)


class RefuseOverride(_Leased, frozen=True, kw_only=True, tag="refuse", tag_field="action"):
    """`region` itself refuses this `share` (0..1) of the new requests for `model` that arrive there ("": any model).

    Unlike with a drain, global balancers learn of it from the refusals, as if the region had no room. Requests in
    progress there continue.
    """

    model: str = ""
    share: float = 1.0

    @property
    def key(self) -> str:
        """Its key in etcd."""
        return refuse_key(self.region, self.model)


class BiasOverride(_Leased, frozen=True, kw_only=True, tag="bias", tag_field="action"):
    """Every global balancer adds `ms` (milliseconds; below 0: a preference) to the cost of `region`."""

    ms: float

    @property
    def key(self) -> str:
        """Its key in etcd."""
        return bias_key(self.region)


class PinOverride(_Leased, frozen=True, kw_only=True, tag="pin", tag_field="action"):
    """Requests of `tenant`, or for `model` (one of the two), go to `region` while the law allows it and it has room.

    `strict`: they go to no other region.
    """

    tenant: str = ""
    model: str = ""
    strict: bool = False

    @property
    def key(self) -> str:
        """Its key in etcd."""
        return pin_key(self.tenant, self.model)


RoutingOverride: TypeAlias = BiasOverride | PinOverride
Override: TypeAlias = DrainOverride | EntryDrainOverride | RefuseOverride | BiasOverride | PinOverride

_drain = msgspec.json.Decoder(DrainOverride)
_entry_drain = msgspec.json.Decoder(EntryDrainOverride)
_refusal = msgspec.json.Decoder(RefuseOverride)
_routing: msgspec.json.Decoder[RoutingOverride] = msgspec.json.Decoder(BiasOverride | PinOverride)


def bias_key(region: str) -> str:
    """The etcd key of a region's bias."""
    return f"{STEER_PREFIX}bias/{quote(region, safe='')}"


def pin_key(tenant: str, model: str) -> str:
    """The etcd key of a tenant's pin or, without a tenant, of a model's. Names may contain anything, as models' do."""
    kind, name = ("tenant", tenant) if tenant else ("model", model)
    return f"{STEER_PREFIX}pin/{kind}/{quote(name, safe='')}"


def region_of(key: str) -> str | None:
    """The region that a drain's key names; None for any other key."""
    region = key.removeprefix(OVERRIDE_PREFIX)
    return region if region and "/" not in region and override_key(region) == key else None


def encode(override: Override) -> bytes:
    """The override as JSON. Raises DocumentError for one its reader would refuse."""
    check(override)
    return msgspec.json.encode(msgspec.structs.replace(override, at=override.at.astimezone(UTC)))


def decode_drain(document: bytes) -> DrainOverride:
    """The drain in a JSON document of at most 16 KiB. Raises DocumentError."""
    override = read(_drain, document, "override", DOCUMENT_LIMIT_BYTES)
    check(override)
    return override


def decode_entry_drain(document: bytes) -> EntryDrainOverride:
    """The drain of an entry in a JSON document of at most 16 KiB. Raises DocumentError."""
    override = read(_entry_drain, document, "override", DOCUMENT_LIMIT_BYTES)
    check(override)
    return override


def decode_refusal(document: bytes) -> RefuseOverride:
    """The refusal in a JSON document of at most 16 KiB. Raises DocumentError."""
    override = read(_refusal, document, "override", DOCUMENT_LIMIT_BYTES)
    check(override)
    return override


def decode_routing(document: bytes) -> RoutingOverride:
    """The bias or pin in a JSON document of at most 16 KiB. Raises DocumentError."""
    override = read(_routing, document, "override", DOCUMENT_LIMIT_BYTES)
    check(override)
    return override


def check(override: Override) -> None:
    """Raise DocumentError at the first field outside its domain."""
    for field, limit in (("region", REGION_LIMIT), ("why", WHY_LIMIT), ("author", AUTHOR_LIMIT)):
        check_text(field, getattr(override, field), limit)
    if not 1.0 <= override.for_s <= FOR_LIMIT_S:  # NaN is refused, too
        raise DocumentError("for_s", f"{override.for_s} is outside 1..{FOR_LIMIT_S:g} seconds")
    if override.at.tzinfo is None or not 1970 < override.at.year < 9000:
        raise DocumentError("at", "must be a time with its zone, in this era")
    if isinstance(override, DrainOverride | EntryDrainOverride):
        if isinstance(override, EntryDrainOverride):
            check_text("entry", override.entry, REGION_LIMIT)
            if "/" in override.entry:
                raise DocumentError("entry", "must not contain '/'")
        if "/" in override.region:
            raise DocumentError("region", "must not contain '/'")
        if not (math.isfinite(override.over_s) and 0.0 <= override.over_s <= OVER_LIMIT_S):
            raise DocumentError("over_s", f"{override.over_s} is outside 0..{OVER_LIMIT_S:g} seconds")
        if isinstance(override, DrainOverride) and not 0.0 <= override.keep_share < 1.0:
            raise DocumentError("keep_share", f"{override.keep_share} is outside 0..1, 1 left out")
    elif isinstance(override, RefuseOverride):
        if "/" in override.region:
            raise DocumentError("region", "must not contain '/'")
        if override.model:
            check_text("model", override.model, NAME_LIMIT)
        if not 0.0 < override.share <= 1.0:
            raise DocumentError("share", f"{override.share} is outside 0..1, 0 left out")
    elif isinstance(override, BiasOverride):
        if not -BIAS_LIMIT_MS <= override.ms <= BIAS_LIMIT_MS:
            raise DocumentError("ms", f"{override.ms} is outside -{BIAS_LIMIT_MS:g}..{BIAS_LIMIT_MS:g}")
    elif bool(override.tenant) == bool(override.model):
        raise DocumentError("tenant", "give either a tenant or a model")
    else:
        check_text("tenant" if override.tenant else "model", override.tenant or override.model, NAME_LIMIT)
