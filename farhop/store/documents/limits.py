"""A tenant's limits (`farhop limit`) in etcd, and the record of the quota root that lends their units to balancers.

Never decides whether a request is within a limit.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from farhop.balance.quota import Quota
from farhop.balance.quota_root import MARK_MAX
from farhop.store.contract import limit_key, limit_root_key
from farhop.store.documents.document import DocumentError, check_size, check_text, read
from farhop.store.documents.overrides import AUTHOR_LIMIT, WHY_LIMIT

DOCUMENT_LIMIT_BYTES = 256 * 1024
ROOT_LIMIT_BYTES = 1 << 20
NAME_LIMIT = 256
LIMITS_MAX = 256  # of a tenant
SAFE_MAX = 256
MINUTE_S, DAY_S, MONTH_S = 60.0, 86_400.0, 30 * 86_400.0
UNITS_MAX = 1_000_000_000_000
_NUMBER_MAX = 1 << 62  # leases are int64 on the wire, and a root's successor adds some

Units = Annotated[int, Meta(ge=1, le=UNITS_MAX)]


class Limit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Limits of one tenant, or of a part of its traffic.

    `key` and `model` narrow it to one API key (issued, or named in the law) and one model; with `each_user` every user
    has these limits separately. None: no limit. `pool`: limits on requests and tokens with the same home region and
    pool name lend unused units to each other.

    Tokens are those of prompts (`input`), of answers (`output`), or both; `concurrency` counts requests in flight;
    money is in millionths of a USD, by the balancers' price book; a month is 30 days.
    """

    key: str = ""
    model: str = ""
    each_user: bool = False
    pool: str = ""
    requests_per_minute: Units | None = None
    requests_per_day: Units | None = None
    input_tokens_per_minute: Units | None = None
    input_tokens_per_day: Units | None = None
    output_tokens_per_minute: Units | None = None
    output_tokens_per_day: Units | None = None
    tokens_per_minute: Units | None = None
    tokens_per_day: Units | None = None
    concurrency: Units | None = None
    micro_usd_per_day: Units | None = None
    micro_usd_per_month: Units | None = None

    def sizes(self) -> dict[str, int]:
        """The limits that are given, by their names."""
        return {name: n for name in NAMES if (n := getattr(self, name)) is not None}


NAMES = Limit.__struct_fields__[4:]


def unit(name: str) -> str:
    """A limit's name as people say it: `requests per minute`, `requests at once`."""
    return (
        name.removeprefix("micro_").replace("_", " ").replace("usd", "USD")
        if period_s(name) else "requests at once"
    )  # fmt: skip


def kind_of(name: str) -> str:
    """The kind that a limit counts, by its name: `requests` of `requests_per_minute`, `usd` of `micro_usd_per_day`."""
    return name.partition("_per_")[0].removeprefix("micro_")


def period_s(name: str) -> float:
    """The period of a limit, by its name; 0 for a limit on concurrent requests."""
    _, _, period = name.partition("_per_")
    return {"minute": MINUTE_S, "day": DAY_S, "month": MONTH_S, "": 0.0}[period]


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All limits of a tenant.

    `home` is the region whose root lends the units. `safe_share` (0..1) of each limit is not lent: it is split among
    the balancers in `safe` (REGION/INSTANCE), which use it while they cannot reach that region. `seq` rises with each
    change.
    """

    tenant: str
    home: str
    limits: tuple[Limit, ...]
    author: str
    why: str
    at: Annotated[datetime, Meta(tz=True)]
    safe_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    safe: tuple[str, ...] = ()
    seq: Annotated[int, Meta(ge=1, le=1_000_000_000)] = 1

    @property
    def place(self) -> str:
        """Its key in etcd."""
        return limit_key(self.tenant)

    def parts(self, limit: Limit, name: str, size: int) -> tuple[Quota, Quota]:
        """Split `size`, the limit's value of this name: (the quota that is lent, the quota of each balancer in `safe`).

        Concurrency is split into whole slots. Limits of each user, limits of money, and a limit so small that no part
        of it would hold one unit are lent completely.
        """
        period, each = period_s(name), self.safe_share / max(1, len(self.safe))
        if limit.each_user or kind_of(name) == "usd":
            return Quota(float(size), size / period if period else 0.0), Quota(0.0, 0.0)
        if not period:
            n = int(size * each)
            return Quota(float(size - n * len(self.safe)), 0.0), Quota(float(n), 0.0)
        pool = f"{limit.pool}/{name}" if limit.pool else ""
        whole = Quota(float(size), size / period, pool)
        if size * max(each, 1.0 - self.safe_share) < 1.0:
            return whole, Quota(0.0, 0.0)
        return whole.part(1.0 - self.safe_share), whole.part(each)


class RootClaim(msgspec.Struct, frozen=True, kw_only=True):
    """The quota root of `region`: the balancer `instance` at `address` that lends the units of the region's tenants.

    Both are "" after it stopped. `marks`: by bucket, how much counts as used for the next root. `seq` rises with each
    write, `first_lease` with each new root.
    """

    region: str
    instance: str
    address: str
    seq: Annotated[int, Meta(ge=0, le=_NUMBER_MAX)]
    first_lease: Annotated[int, Meta(ge=0, le=_NUMBER_MAX)]
    marks: dict[str, Annotated[int, Meta(ge=0, le=MARK_MAX)]]

    @property
    def place(self) -> str:
        """Its key in etcd."""
        return limit_root_key(self.region)


_limits, _root = msgspec.json.Decoder(TenantLimits), msgspec.json.Decoder(RootClaim)


def encode(one: TenantLimits) -> bytes:
    """The limits as JSON, at most DOCUMENT_LIMIT_BYTES. Raises DocumentError if `decode` would refuse them."""
    check(one)
    document = msgspec.json.encode(one)
    check_size(len(document), DOCUMENT_LIMIT_BYTES)
    return document


def decode(document: bytes) -> TenantLimits:
    """The limits in a JSON document. Raises DocumentError, naming the field.

    A document with an unknown field is refused, since that field may be a limit.
    """
    one = read(_limits, document, "list of limits", DOCUMENT_LIMIT_BYTES)
    check(one)
    return one


def encode_root(one: RootClaim) -> bytes:
    """The claim as JSON. Raises DocumentError above ROOT_LIMIT_BYTES."""
    document = msgspec.json.encode(one)
    check_size(len(document), ROOT_LIMIT_BYTES)
    return document


def decode_root(document: bytes) -> RootClaim:
    """The claim in a JSON document of at most ROOT_LIMIT_BYTES. Raises DocumentError."""
    return read(_root, document, "root of limits", ROOT_LIMIT_BYTES)


def check(one: TenantLimits) -> None:
    """Raise DocumentError at the first field that is outside its domain or contradicts another."""
    check_text("tenant", one.tenant, NAME_LIMIT)
    check_text("home", one.home, NAME_LIMIT)
    check_text("author", one.author, AUTHOR_LIMIT)
    check_text("why", one.why, WHY_LIMIT)
    if len(one.limits) > LIMITS_MAX:
        raise DocumentError("limits", f"at most {LIMITS_MAX}")
    if len(one.safe) > SAFE_MAX:
        raise DocumentError("safe", f"at most {SAFE_MAX}")
    if len(set(one.safe)) < len(one.safe):
        raise DocumentError("safe", "names a balancer twice")
    if (one.safe_share > 0) != bool(one.safe):
        raise DocumentError("safe_share", "is above 0 where `safe` names balancers, and only there")
    seen = set()
    for place, limit in enumerate(one.limits):
        for field in ("key", "model", "pool"):
            if name := getattr(limit, field):
                check_text(f"limits[{place}].{field}", name, NAME_LIMIT)
        if (whom := (limit.key, limit.model, limit.each_user)) in seen:
            raise DocumentError(f"limits[{place}]", "the same key, model and users stand twice")
        seen.add(whom)
        if limit.pool and limit.each_user:
            raise DocumentError(f"limits[{place}].pool", "limits of each user lend nothing to each other")
        _check_sizes(limit, f"limits[{place}]")


def _check_sizes(limit: Limit, place: str) -> None:
    if not limit.sizes():
        raise DocumentError(place, f"limits nothing; give one of {', '.join(NAMES)}")
    for what in ("requests", "input_tokens", "output_tokens", "tokens"):
        minute, day = getattr(limit, f"{what}_per_minute"), getattr(limit, f"{what}_per_day")
        if minute is not None and day is not None and day < minute:
            raise DocumentError(f"{place}.{what}_per_day", f"is below {what}_per_minute, which it contradicts")
    day, month = limit.micro_usd_per_day, limit.micro_usd_per_month
    if day is not None and month is not None and month < day:
        raise DocumentError(f"{place}.micro_usd_per_month", "is below micro_usd_per_day, which it contradicts")
    for period in ("minute", "day"):
        whole = getattr(limit, f"tokens_per_{period}")
        for what in ("input", "output"):
            part = getattr(limit, f"{what}_tokens_per_{period}")
            if whole is not None and part is not None and whole < part:
                raise DocumentError(f"{place}.tokens_per_{period}", f"is below {what}_tokens_per_{period}")
