"""The keys of identity providers, fetched in the background: at the start, periodically, and soon after a token named
an unknown key.

Invariants: an issuer is asked at most once in REFETCH_S (except for retries), whatever tokens say; redirects are not
followed, and size and time of an answer are bounded; an unusable answer replaces nothing, and the last good keys count
for a bounded time. Never sees a token, and never does IO for a request.
"""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING, Any

from aiohttp import (
    ClientConnectorCertificateError,
    ClientError,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
    TCPConnector,
)

from farhop.identity.jwt_tokens import KeysError, read_keys
from farhop.service.config.process import REFETCH_S

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from farhop.identity.jwt_tokens import Keys, TokenVerifier
    from farhop.service.config.process import IssuerConfig
    from farhop.telemetry.logs import Throttled

DOCUMENT_BYTES_MAX = 256 * 1024
FETCH_S = 10.0
RETRY_S = 1.0, 30.0  # after a failure: the first pause, and the longest
BEGIN_S = 5.0
LOOK_S = 0.5  # between two looks at whether it is time


class _Source:
    """The keys of one issuer, as last fetched."""

    def __init__(self, config: IssuerConfig, context: Callable[[], ssl.SSLContext]) -> None:
        self.config, self.context = config, context
        self.keys: Keys = {}
        self.asked_at, self.fetched_at = -inf, -inf
        self.failures = 0
        self.trouble = ""
        self.is_stale = True
        self.wanted, self.answered = False, asyncio.Event()


class IssuerKeys:
    """Those of all issuers of a configuration; `tokens` is handed them. `now` is monotonic, seconds."""

    def __init__(
        self,
        tokens: TokenVerifier,
        issuers: dict[str, tuple[IssuerConfig, Callable[[], ssl.SSLContext]]],
        now: Callable[[], float],
        log: Throttled,
    ) -> None:
        self._tokens, self._now, self._log, self._since = tokens, now, log, now()
        self.sources = {name: _Source(*given) for name, given in issuers.items()}
        tokens.wanted = self._wanted

    def _wanted(self, name: str) -> None:
        self.sources[name].wanted = True

    async def keep(self) -> None:
        """Fetch keys for as long as the process lives."""
        # Answers are small and rare: nothing is kept open, no cookie kept, no proxy of the environment asked.
        async with (
            ClientSession(
                connector=TCPConnector(force_close=True),
                cookie_jar=DummyCookieJar(),
                timeout=ClientTimeout(total=FETCH_S),
                auto_decompress=False,
            ) as session,
            asyncio.TaskGroup() as group,
        ):
            for name, source in self.sources.items():
                group.create_task(self._keep(session, name, source))

    async def begun(self) -> None:
        """Until each issuer was asked once. Not for long: one that is gone must not keep the others' tenants out."""
        waiting = [asyncio.create_task(one.answered.wait()) for one in self.sources.values()]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=BEGIN_S)
            for task in late:
                task.cancel()

    async def _keep(self, session: ClientSession, name: str, source: _Source) -> None:
        while True:
            source.wanted, source.asked_at = False, self._now()
            await self._fetch(session, name, source)
            source.answered.set()
            while self._now() < self._due_at(source):
                self._end_stale(name, source)
                await asyncio.sleep(LOOK_S)

    def _due_at(self, source: _Source) -> float:
        """When to fetch the keys again."""
        if source.failures:
            return source.asked_at + min(RETRY_S[0] * 2.0 ** min(source.failures - 1, 10), RETRY_S[1])
        return source.asked_at + (REFETCH_S if source.wanted else source.config.refresh_s)

    def _end_stale(self, name: str, source: _Source) -> None:
        """Discard keys that were fetched too long ago."""
        if source.is_stale or self._now() < source.fetched_at + source.config.stale_s:
            return
        source.is_stale = True
        self._tokens.publish(name, None)
        problem = "its keys could not be fetched for stale_s: its tokens are refused"
        self._log.error("issuer", f"{name} stale", issuer=name, problem=problem)

    async def _fetch(self, session: ClientSession, name: str, source: _Source) -> None:
        """Fetch once, and use the answer if it is valid."""
        try:
            keys = read_keys(await self._document(session, source))
        except (ClientError, OSError, TimeoutError, ValueError) as error:
            source.failures += 1
            source.trouble = str(error) if isinstance(error, KeysError) else _why(error)
            self._log.warning("issuer", name, issuer=name, problem=source.trouble, remedy="see identity.issuers")
            return
        source.keys, source.fetched_at, source.failures, source.trouble = keys, self._now(), 0, ""
        source.is_stale = False
        self._tokens.publish(name, keys)

    async def _document(self, session: ClientSession, source: _Source) -> bytes:
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        async with session.get(
            source.config.jwks_url, ssl=source.context(), allow_redirects=False, headers=headers
        ) as answer:
            if answer.status != 200:
                raise KeysError(f"jwks_url answered with status {answer.status}; redirects are not followed")
            if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise KeysError("jwks_url answered compressed, which was not asked for")
            document = b""
            async for some in answer.content.iter_any():
                document += some
                if len(document) > DOCUMENT_BYTES_MAX:
                    raise KeysError(f"jwks_url answered with more than {DOCUMENT_BYTES_MAX} bytes")
            return document

    def ages_s(self) -> dict[str, float]:
        """How long ago each issuer's keys were fetched last; of one that never answered, since we began."""
        now = self._now()
        return {name: now - max(one.fetched_at, self._since) for name, one in self.sources.items()}

    def status(self) -> dict[str, Any]:
        """For operators: the valid keys, their age in seconds, and problems."""
        now = self._now()
        return {
            name: {
                "keys": [] if one.is_stale else sorted(one.keys),
                "age_s": None if one.fetched_at == -inf else round(now - one.fetched_at, 1),
                "stale": one.is_stale,
                "trouble": one.trouble or None,
            }
            for name, one in self.sources.items()
        }


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"jwks_url did not answer within {FETCH_S:g} s"
    if isinstance(error, ClientConnectorCertificateError):
        return "jwks_url: its certificate is not trusted; name the authority that issued it as ca_file"
    return f"jwks_url could not be asked: {type(error).__name__}"
