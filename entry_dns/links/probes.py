"""Probes each entry for readiness, at the addresses and in the way that clients use. Never judges the results."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import TYPE_CHECKING

from farhop.service.process.tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import Callable

    from entry_dns.links.config import Probe
    from topology.model import Entry

_HEAD_BYTES_MAX = 4096


class Probes:
    """Probes the entries of a topology. `probed(entry, good, why)` is called after each probe; `why` is "" if it is
    good.
    """

    def __init__(self, config: Probe, probed: Callable[[str, bool, str], None], jitter: Callable[[], float]) -> None:
        self._config, self._probed, self._jitter = config, probed, jitter
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._entries: dict[str, Entry] = {}
        self._running = Tasks()
        self._tls: ssl.SSLContext | None = None
        if config.scheme == "https":
            self._tls = ssl.create_default_context(cafile=config.ca_file)

    def follow(self, entries: dict[str, Entry]) -> None:
        """Probe these from now on, and no others."""
        for name in [name for name in self._tasks if entries.get(name) != self._entries.get(name)]:
            self._tasks.pop(name).cancel()
        self._entries = dict(entries)
        for name, entry in entries.items():
            if name not in self._tasks:
                self._tasks[name] = self._running.start(self._probe(entry), f"probe entry {name}")

    async def close(self) -> None:
        """Stop all probes."""
        await self._running.close()

    def addresses(self, entry: Entry) -> list[tuple[str, int]]:
        """The (host, port) pairs at which an entry is probed."""
        given = self._config.at.get(entry.name)
        if given is not None:
            host, _, port = given.rpartition(":")
            return [(host.strip("[]"), int(port))]
        families = self._config.families
        hosts = (*(entry.ipv4 if "ipv4" in families else ()), *(entry.ipv6 if "ipv6" in families else ()))
        return [(host, entry.port) for host in hosts]

    async def _probe(self, entry: Entry) -> None:
        config = self._config
        await asyncio.sleep(config.every_s * self._jitter() / 4.0)
        while True:
            whys = await asyncio.gather(*(self._ask(entry, host, port) for host, port in self.addresses(entry)))
            bad = [why for why in whys if why]
            self._probed(entry.name, not bad, "; ".join(bad)[:256])
            await asyncio.sleep(config.every_s * self._jitter())

    async def _ask(self, entry: Entry, host: str, port: int) -> str:
        """Why it is not ready there; "" if it is."""
        at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            async with asyncio.timeout(self._config.timeout_s):
                return await self._request(entry, host, port, at)
        except TimeoutError:
            return f"{at}: no answer within {self._config.timeout_s:g} s"
        except (OSError, ssl.SSLError) as error:
            return f"{at}: {error.strerror or error}"

    async def _request(self, entry: Entry, host: str, port: int, at: str) -> str:
        config = self._config
        name = config.server_name or entry.host or host
        reader, writer = await asyncio.open_connection(
            host, port, ssl=self._tls, server_hostname=name if self._tls is not None else None, limit=_HEAD_BYTES_MAX
        )
        try:
            if config.scheme == "tcp":
                return ""
            writer.write(f"GET {config.path} HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n".encode())
            line = (await reader.readline())[:64].split()
            status = line[1].decode("latin-1") if len(line) > 1 and line[0].startswith(b"HTTP/1.") else "no HTTP"
            return "" if len(status) == 3 and status[0] == "2" else f"{at}: {status}"
        finally:
            writer.close()
            with contextlib.suppress(OSError, ssl.SSLError):
                writer.transport.abort()
