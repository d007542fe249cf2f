"""Discovers replicas in a YAML or JSON file, and follows its changes. Never writes the file.

Invariants: a file is taken whole or not at all: if one entry is invalid, the last good file stays in force, as it does
while the file is missing or empty (an empty list is written `[]`). Renames over the file and changes in place are both
noticed.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from farhop.config import ConfigError, parsed
from regional_lb.engines.config import REPLICAS_MAX
from regional_lb.engines.discovery.source import EndpointError, Failed, Found, replica_of

if TYPE_CHECKING:
    from regional_lb.engines.config import FileSource, ReplicaConfig
    from regional_lb.engines.discovery.source import OnUpdate

FILE_BYTES_MAX = 4 * 1024 * 1024
_READ_EVERY = 10  # looks: a change that left time and size as they were is seen by then


class ReplicaFile:
    """See the module's docstring."""

    def __init__(self, config: FileSource) -> None:
        self._config, self.label = config, config.label
        self._path = Path(config.path)
        self._looks = 0
        self._seen: tuple[int, ...] = ()
        self._document: bytes | None = None
        self._trouble = ""

    async def follow(self, on_update: OnUpdate) -> None:
        """See Source."""
        while True:
            step = await asyncio.to_thread(self._look)  # a file may be far away, and a long one takes time to parse
            if step is not None:
                on_update(step)
            await asyncio.sleep(self._config.poll_s)

    def _look(self) -> Found | Failed | None:
        """What is new since the last call: the replicas, or a new problem; None: nothing."""
        try:
            document = self._changed()
            if document is None:
                return None
            self._trouble = ""
            return Found(self.label, self._replicas(document))
        except ConfigError as error:
            trouble = "\n".join(error.problems)
        except OSError as error:
            self._document, self._seen = None, ()
            trouble = f"cannot be read: {error.strerror or error}"
        if trouble == self._trouble:
            return None
        self._trouble = trouble
        return Failed(self.label, trouble)

    def _changed(self) -> bytes | None:
        """Its content, if that is another than the last time."""
        status = self._path.stat()
        seen = (status.st_mtime_ns, status.st_size, status.st_ino, status.st_dev)
        self._looks += 1
        if seen == self._seen and self._looks % _READ_EVERY:
            return None
        with self._path.open("rb") as file:
            document = file.read(FILE_BYTES_MAX + 1)
        self._seen = seen
        if document == self._document:
            return None
        self._document = document
        return document

    def _replicas(self, document: bytes) -> tuple[ReplicaConfig, ...]:
        """Raises ConfigError with all that is wrong."""
        if len(document) > FILE_BYTES_MAX:
            raise ConfigError(self.label, [f"is larger than {FILE_BYTES_MAX} bytes; is it a list of replicas?"])
        entries = parsed(document, self.label)
        if not isinstance(entries, list):
            raise ConfigError(self.label, ["must be a list of replicas; one of none is written []"])
        if len(entries) > REPLICAS_MAX:
            raise ConfigError(self.label, [f"holds {len(entries)} replicas, at most {REPLICAS_MAX}; run several"])
        replicas: list[ReplicaConfig] = []
        problems: list[str] = []
        for number, entry in enumerate(entries):
            try:
                replicas.append(replica_of(self._config.replica, entry, f"[{number}]"))
            except EndpointError as error:
                problems += str(error).split("\n")
        if problems:
            raise ConfigError(self.label, problems)
        return tuple(replicas)
