"""The contract of every store, whether etcd or memory (in the lab) holds the keys.

Invariants, kept by every implementation and tested by one shared suite: an opened store's watches and publications
survive any outage and never raise because of one; a watcher sees every state in revision order and, after a gap, a
complete new SNAPSHOT instead of a guess; an unacknowledged write is never reported as done.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote

import msgspec

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection

ROOT = "/farhop/v1/"
REGION_PREFIX = f"{ROOT}region/"
OVERRIDE_PREFIX = f"{ROOT}override/"
POLICY_PREFIX = f"{ROOT}policy/"
LAW_KEY = f"{POLICY_PREFIX}law"
LAW_HISTORY_PREFIX = f"{POLICY_PREFIX}was/"
PICK_PREFIX = f"{ROOT}pick/"
ROUTE_PREFIX = f"{ROOT}route/"
STEER_PREFIX = f"{ROOT}steer/"
SPLIT_PREFIX = f"{ROOT}split/"
KEY_PREFIX = f"{ROOT}key/"
LIMIT_PREFIX = f"{ROOT}limit/"
LIMIT_ROOT_PREFIX = f"{ROOT}limit-root/"
REPLICA_PREFIX = f"{ROOT}replica/"
ENTRY_PREFIX = f"{ROOT}entry/"
ENTRY_DRAIN_PREFIX = f"{ROOT}entry-drain/"
REFUSE_PREFIX = f"{ROOT}refuse/"
ANNOUNCE_PREFIX = f"{ROOT}announce/"
DRILL_PREFIX = f"{ROOT}drill/"
LATENCY_PREFIX = f"{ROOT}latency/"
VALUE_LIMIT_BYTES = 1024 * 1024  # etcd refuses requests above 1.5 MiB
KEYS_LIMIT = 100_000  # in one list or snapshot
REGION_INSTANCES_MAX = 128  # balancers of one region that readers of reports know: no region takes the places of others


class StoreError(Exception):
    """The store refused, and asking again will not help. The message names the endpoints and the remedy."""


class StoreUnreachable(StoreError):  # noqa: N818 -- says what is the case, like ConnectionRefused
    """No endpoint answered in time. A write may or may not have happened: read before you repeat it."""


class Conflict(StoreError):  # noqa: N818 -- the same
    """A compare-and-set found another revision: another writer was first. Read again and decide again."""

    def __init__(self, key: str, expected: int) -> None:
        found = "to be absent" if expected == 0 else f"at revision {expected}"
        super().__init__(f"{key}: expected {found}, but somebody else changed it; read it again")
        self.key = key
        self.expected = expected


class KeyValue(msgspec.Struct, frozen=True):
    """A key and its value. `revision` is that of its last write, for compare-and-set; above 0."""

    key: str
    value: bytes
    revision: int


class ChangeKind(StrEnum):
    """The kinds of change that a watcher receives."""

    SNAPSHOT = "snapshot"
    PUT = "put"
    DELETE = "delete"
    LOST = "lost"


class Change(msgspec.Struct, frozen=True):
    """One step of a watch. `revision` orders steps between two snapshots (a wiped store starts again from 1).

    SNAPSHOT: `entries` is all there is; forget the rest. PUT: `key` and `value`. DELETE: `key`, also as a lease ends.
    LOST: contact is lost and `why` says how; the view is ageing until the next SNAPSHOT. `from_disk`: a SNAPSHOT of
    what was on disk, however long ago that was.
    """

    kind: ChangeKind
    revision: int = 0
    key: str = ""
    value: bytes = b""
    entries: tuple[KeyValue, ...] = ()
    why: str = ""
    from_disk: bool = False

    @property
    def written(self) -> tuple[KeyValue, ...]:
        """The entries that this step brings: all that exist, the one put, or none."""
        if self.kind is ChangeKind.PUT:
            return (KeyValue(self.key, self.value, self.revision),)
        return self.entries

    def ended(self, known: Collection[str]) -> list[str]:
        """Those of these keys that no longer exist."""
        if self.kind is ChangeKind.SNAPSHOT:
            there = {entry.key for entry in self.entries}
            return [key for key in known if key not in there]
        # One look-up: thousands of keys may be deleted at once.
        return [self.key] if self.kind is ChangeKind.DELETE and self.key in known else []


class Publication(Protocol):
    """A key kept alive by its publisher. If its lease is lost it comes back by itself with the last value."""

    @property
    def key(self) -> str:
        """The published key."""
        ...

    @property
    def trouble(self) -> str | None:
        """Why the last attempt to write or keep alive failed; None when all is well."""
        ...

    async def update(self, value: bytes) -> bool:
        """Replace the value. True: stored now. False: not yet, but the newest value will be as soon as it can.

        Never raises on an outage and never waits for one to end. Values in between may be skipped.
        """
        ...

    async def withdraw(self) -> None:
        """Take the key away at once, or, if the store cannot be reached, let its lease run out. Idempotent."""
        ...


class Store(Protocol):
    """Keys under revisions and leases. Keys are text, values bytes of at most 1 MiB."""

    async def open(self) -> None:
        """Connect. Raises StoreUnreachable within the timeout if there is no answer, StoreError if we are refused."""
        ...

    async def close(self) -> None:
        """Withdraw all publications, end all watches, free everything. Idempotent."""
        ...

    async def publish(self, key: str, value: bytes, ttl_s: float) -> Publication:
        """Put `key` under a lease of `ttl_s` (rounded up to whole seconds in etcd) and keep it alive until withdrawn.

        Does not raise on an outage: the publication tries on, with `trouble` set.
        """
        ...

    def watch(self, prefix: str) -> AsyncGenerator[Change, None]:
        """Follow all keys under `prefix`: a SNAPSHOT, then changes in order. After an outage, a compaction or a wipe a
        new SNAPSHOT. LOST once per outage (first of all, if it begins in one). Ends only when the store is closed;
        `aclose()` it when done."""
        ...

    async def get(self, key: str) -> KeyValue | None:
        """The key's entry, read from a quorum; None if absent. Raises StoreError."""
        ...

    async def list(self, prefix: str) -> tuple[KeyValue, ...]:
        """All entries under `prefix` at one revision, ordered by key. Raises StoreError."""
        ...

    async def put(self, key: str, value: bytes, expect_revision: int | None = None, ttl_s: float | None = None) -> int:
        """Write; returns the new revision. With `expect_revision` only if that is the key's revision now (0: absent),
        else Conflict. With `ttl_s` the key expires after that time. Not retried: raises StoreError."""
        ...

    async def delete(self, key: str, expect_revision: int | None = None) -> bool:
        """Remove; returns whether it was there. With `expect_revision` as in `put`. Raises StoreError."""
        ...


def report_key(region: str, instance: str) -> str:
    """Where a regional balancer instance publishes its report. Raises ValueError for a name that would not parse."""
    return f"{REGION_PREFIX}{_segment(region)}/lb/{_segment(instance)}"


def entry_key(region: str, instance: str) -> str:
    """Where a global balancer instance says that it is there. Raises ValueError for a name that would not parse."""
    return f"{ENTRY_PREFIX}{_segment(region)}/{_segment(instance)}"


def override_key(region: str) -> str:
    """The key of an operator's drain or pin of a region. Raises ValueError for a name that would not parse."""
    return f"{OVERRIDE_PREFIX}{_segment(region)}"


def entry_drain_key(region: str, entry: str) -> str:
    """The key of an operator's drain of an entry. Raises ValueError for a name that would not parse."""
    return f"{ENTRY_DRAIN_PREFIX}{_segment(region)}/{_segment(entry)}"


def refuse_key(region: str, model: str) -> str:
    """The key of an operator's order that a region refuse new work: all, or a model's (whose name may contain
    anything). Raises ValueError for a region's name that would not parse."""
    return f"{REFUSE_PREFIX}{_segment(region)}/{quote(model, safe='')}"


def announce_key(region: str, instance: str) -> str:
    """The key of an entry announcer's report. Raises ValueError for a name that would not parse."""
    return f"{ANNOUNCE_PREFIX}{_segment(region)}/{_segment(instance)}"


def latency_key(region: str, instance: str) -> str:
    """Where an entry says how far client networks are from it. Raises ValueError for a name that would not parse."""
    return f"{LATENCY_PREFIX}{_segment(region)}/{_segment(instance)}"


def law_history_key(epoch: int) -> str:
    """Where a law that was replaced is kept, so that keys sort by epoch."""
    return f"{LAW_HISTORY_PREFIX}{epoch:016d}"


def pick_key(region: str) -> str:
    """The key of the policies by which a region picks replicas. Raises ValueError for a name that would not parse."""
    return f"{PICK_PREFIX}{_segment(region)}"


def route_key(region: str) -> str:
    """The key of the routes of a region's global balancers. Raises ValueError for a name that would not parse."""
    return f"{ROUTE_PREFIX}{_segment(region)}"


def split_key(region: str) -> str:
    """The key of a region's traffic splits between versions. Raises ValueError for a name that would not parse."""
    return f"{SPLIT_PREFIX}{_segment(region)}"


def issued_key(name: str) -> str:
    """The key of an issued API key, by its id. Raises ValueError for an id that would not parse."""
    return f"{KEY_PREFIX}{_segment(name)}"


def limit_key(tenant: str) -> str:
    """The key of a tenant's limits. Raises ValueError for a name that would not parse."""
    return f"{LIMIT_PREFIX}{_segment(tenant)}"


def limit_root_key(region: str) -> str:
    """The key that names the root of a region's limits. Raises ValueError for a name that would not parse."""
    return f"{LIMIT_ROOT_PREFIX}{_segment(region)}"


def replica_prefix(region: str) -> str:
    """The prefix of a region's replicas, each by its name. Raises ValueError for a name that would not parse."""
    return f"{REPLICA_PREFIX}{_segment(region)}/"


def parse_report_key(key: str) -> tuple[str, str] | None:
    """(region, instance) of a report key; None for any other key."""
    if not key.startswith(REGION_PREFIX):
        return None
    match key[len(REGION_PREFIX) :].split("/"):
        case [region, "lb", instance] if region and instance:
            return region, instance
    return None


def parse_instance_key(prefix: str, key: str) -> tuple[str, str] | None:
    """(region, instance) of a key `prefix`REGION/INSTANCE; None for any other key."""
    if not key.startswith(prefix):
        return None
    match key[len(prefix) :].split("/"):
        case [region, instance] if region and instance:
            return region, instance
    return None


def check_value(key: str, value: bytes) -> None:
    """Raise StoreError for a value no store would take."""
    if len(value) > VALUE_LIMIT_BYTES:
        raise StoreError(f"{key}: value of {len(value)} bytes, at most {VALUE_LIMIT_BYTES}: publish less")


def _segment(name: str) -> str:
    if not name or "/" in name:
        raise ValueError(f"{name!r} cannot be part of a key: it must not be empty or contain '/'")
    return name
