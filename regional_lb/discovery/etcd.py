"""Replicas that stand in etcd, each a key of its own: engines may announce themselves, under a lease of theirs.

Invariants: a value that makes no sense leaves what that key said before; a key that goes, or whose lease ends, takes
its replica with it; losing etcd changes nothing. Never writes.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec

from farhop.store.contract import ChangeKind, replica_prefix
from regional_lb.discovery.source import EndpointError, Failed, Found, replica_of

if TYPE_CHECKING:
    from farhop.store.contract import Change, Store
    from regional_lb.config import EtcdSource, ReplicaConfig
    from regional_lb.discovery.source import Tell

VALUE_BYTES_MAX = 64 * 1024


class EtcdKeys:
    """See the module's head. The name of a replica is the last part of its key."""

    def __init__(self, config: EtcdSource, region: str, store: Store) -> None:
        self._config, self.label = config, config.label
        self._prefix, self._store = replica_prefix(region), store
        self._replicas: dict[str, ReplicaConfig] = {}  # by key
        self._problems: dict[str, str] = {}

    async def follow(self, tell: Tell) -> None:
        """See Source. Ends when the store is closed."""
        async with contextlib.aclosing(self._store.watch(self._prefix)) as changes:
            async for change in changes:
                tell(self._changed(change))

    def _changed(self, change: Change) -> Found | Failed:
        if change.kind is ChangeKind.LOST:
            return Failed(self.label, change.why)
        if change.kind is ChangeKind.SNAPSHOT:
            there = {entry.key: entry.value for entry in change.entries}
            self._replicas = {key: replica for key, replica in self._replicas.items() if key in there}
            self._problems = {}
            for key, value in there.items():
                self._put(key, value)
        elif change.kind is ChangeKind.PUT:
            self._put(change.key, change.value)
        else:
            self._replicas.pop(change.key, None)
            self._problems.pop(change.key, None)
        replicas = tuple(self._replicas[key] for key in sorted(self._replicas))
        return Found(self.label, replicas, tuple(self._problems.values()))

    def _put(self, key: str, value: bytes) -> None:
        try:
            self._replicas[key] = self._replica(key, value)
            self._problems.pop(key, None)
        except EndpointError as error:
            self._problems[key] = str(error)

    def _replica(self, key: str, value: bytes) -> ReplicaConfig:
        """Raises EndpointError."""
        name = key[len(self._prefix) :]
        if not name or "/" in name:
            raise EndpointError(f"{key}: must be {self._prefix}NAME")
        if len(value) > VALUE_BYTES_MAX:
            raise EndpointError(f"{key}: {len(value)} bytes, at most {VALUE_BYTES_MAX}")
        return replica_of(self._config.replica, _decoded(key, value), key, name=name)


def _decoded(key: str, value: bytes) -> object:
    try:
        return msgspec.json.decode(value)
    except (ValueError, RecursionError) as error:
        raise EndpointError(f"{key}: is not JSON: {error}") from None
