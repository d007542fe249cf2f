"""Discovers replicas in etcd, one key each: engines may announce themselves, under a lease of their own.

Invariants: an invalid value leaves the key's previous one in force; a key that is deleted, or whose lease ends, removes
its replica; losing etcd changes nothing. Never writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farhop.store.contract import ChangeKind, replica_prefix
from farhop.store.follow import Documents, follow
from regional_lb.engines.discovery.source import EndpointError, Failed, Found, replica_of

if TYPE_CHECKING:
    from farhop.store.contract import Change, Store
    from regional_lb.engines.config import EtcdSource, ReplicaConfig
    from regional_lb.engines.discovery.source import OnUpdate

VALUE_BYTES_MAX = 64 * 1024


class EtcdKeys:
    """See the module's docstring. The name of a replica is the last part of its key."""

    def __init__(self, config: EtcdSource, region: str, store: Store) -> None:
        self._config, self.label = config, config.label
        self._prefix, self._store = replica_prefix(region), store
        self._replicas: Documents[ReplicaConfig] = Documents(self._replica, lambda _reason: None, "replica")

    async def follow(self, on_update: OnUpdate) -> None:
        """See Source. Ends when the store is closed."""
        await follow(self._store, self._prefix, lambda change: on_update(self.changed(change)))

    def changed(self, change: Change) -> Found | Failed:
        if change.kind is ChangeKind.LOST:
            return Failed(self.label, change.why)
        self._replicas.take(change)
        problems = self._replicas.problems
        return Found(self.label, tuple(self._replicas.values()), tuple(problems[key] for key in sorted(problems)))

    def _replica(self, key: str, value: bytes) -> ReplicaConfig:
        """The replica in a document of etcd. Raises EndpointError."""
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
