"""Fetches engines' pages: what they serve, how many requests they run at once, their metrics.

Invariants: a page is read whole or not at all: a truncated one could say 1 instead of 12. What an engine does not say
is None or an error, never a guess. Never decides, and never changes what is known of a replica.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from farhop.relay.upstream import fetch
from regional_lb.engines.signals import slots
from regional_lb.engines.signals.exposition import PageError

if TYPE_CHECKING:
    from farhop.balance.machine import Address
    from farhop.relay.upstream.pool import Pool
    from regional_lb.engines.config import ReplicaConfig

PAGE_BYTES_MAX = 4 * 1024 * 1024
LISTING_BYTES_MAX = 1024 * 1024
# Anything else may be a metrics page whose server gives no better type.
_NO_PAGES = (b"text/html", b"application/json")
_GZIP = b"\x1f\x8b"  # how it begins; no text does


class Pages:
    """Engines' pages, over one pool of connections. Each takes `timeout_s` at most; `key` is the engines' API key."""

    def __init__(self, pool: Pool, timeout_s: float, key: str | None) -> None:
        self._pool, self._timeout_s, self._key = pool, timeout_s, key

    async def metrics(self, address: Address, path: str, key: str | None = None) -> bytes:
        """A metrics page; llama.cpp's server and LiteLLM want a `key` for theirs. Raises PageError, FetchError."""
        answer = await fetch.get(self._pool, address, path, self._timeout_s, PAGE_BYTES_MAX, key)
        _check(answer)
        if answer.content_type in _NO_PAGES:
            raise PageError("type", f"{answer.content_type.decode()} is no metrics page")
        return answer.body

    async def models(self, address: Address) -> bytes:
        """The list of models. Raises PageError, FetchError: then it has reported nothing, and that is no evidence."""
        answer = await self._get(address, "/v1/models")
        _check(answer)
        return answer.body

    async def slots(self, address: Address, engine: str) -> int | None:
        """How many requests it runs at once; None if it does not say. Raises FetchError."""
        paths, _ = slots.PAGES.get(engine, ((), None))
        for path in paths if engine not in slots.BY_MODEL else ():
            answer = await self._get(address, path)
            if answer.status == 200 and (found := slots.read_slots(engine, answer.body)) is not None:
                return found
        return None

    async def slots_by_model(self, replica: ReplicaConfig) -> int | None:
        """The same of a server that says it of each model by itself: the least of them, so that none has a queue.
        Raises FetchError."""
        assert replica.engine is not None  # the caller has checked
        (path,), _ = slots.PAGES[replica.engine]
        found: list[int] = []
        for model in sorted(replica.models):
            answer = await self._get(replica.address, path.format(model=quote(model, safe="")))
            one = slots.read_slots(replica.engine, answer.body) if answer.status == 200 else None
            found += [one] if one is not None else []
        return min(found, default=None)

    async def _get(self, address: Address, path: str) -> fetch.Fetched:
        return await fetch.get(self._pool, address, path, self._timeout_s, LISTING_BYTES_MAX, self._key)


def _check(answer: fetch.Fetched) -> None:
    if answer.status != 200:
        wants_key = answer.status in (401, 403)
        raise PageError("key" if wants_key else "status", f"status {answer.status}")
    if answer.body.startswith(_GZIP):
        raise PageError("type", "it is compressed, though asked for as it is (`accept-encoding: identity`)")
