"""Asks the local entry over HTTP whether it is ready (`GET` of its readiness). Never decides about the consequences."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import aiohttp

from entry_anycast.announcing.machine import Fitness, Probed
from farhop.service.config.endpoints import is_loopback

if TYPE_CHECKING:
    from collections.abc import Callable

    from entry_anycast.app.config import Probe


class Prober:
    """`report` takes what each probe found. Raises OSError for a `ca_file` that cannot be read."""

    def __init__(self, config: Probe, report: Callable[[Probed], None]) -> None:
        self._config, self._report, self._tls = config, report, _context(config)

    async def run(self) -> None:
        """Until cancelled. Each probe makes a new connection, since it asks whether new ones are accepted."""
        loop = asyncio.get_running_loop()
        timeout = aiohttp.ClientTimeout(total=self._config.timeout_s)
        connector = aiohttp.TCPConnector(force_close=True, ssl=self._tls)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, trust_env=False) as http:
            due = loop.time()
            while True:
                self._report(await self._probe(http))
                due = max(due + self._config.every_s, loop.time())
                await asyncio.sleep(due - loop.time())

    async def _probe(self, http: aiohttp.ClientSession) -> Probed:
        try:
            name = self._config.server_name or None
            async with http.get(self._config.url, allow_redirects=False, server_hostname=name) as answer:
                if answer.status // 100 == 2:
                    return Probed(Fitness.FIT)
                return Probed(Fitness.LEAVING, f"it answers {answer.status}")
        except TimeoutError:
            return Probed(Fitness.DEAD, f"it does not answer within {self._config.timeout_s:g} s", silent=True)
        except (aiohttp.ClientError, OSError) as error:
            text = getattr(error, "strerror", None) or type(error).__name__
            return Probed(Fitness.DEAD, f"it cannot be reached: {text}")


def _context(config: Probe) -> ssl.SSLContext | bool:
    """Verification is off for this machine: there a certificate proves no more than the address."""
    parts = urlsplit(config.url)
    if config.ca_file is not None:
        return ssl.create_default_context(cafile=config.ca_file)
    if parts.scheme != "https" or not is_loopback(parts.hostname or ""):
        return True
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
