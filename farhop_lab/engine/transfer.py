"""The side channel between a prefill and a decode engine: offering held KV, and fetching it.

As vLLM's NIXL connector does it, over HTTP and without the KV bytes: only their time is spent. Never fails a request:
what is unknown, expired, of an earlier process of that engine, or out of reach is prefilled here.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
from aiohttp import web

from farhop_lab.engine.core.held import adopt
from farhop_lab.engine.formats.api import decoded

if TYPE_CHECKING:
    from farhop_lab.engine.core.held import TransferLink
    from farhop_lab.engine.core.scheduler import EngineCore
    from farhop_lab.engine.core.sequence import Sequence
    from farhop_lab.engine.formats.api import Transfer

FETCH_PATH = "/lab/kv/fetch"
FETCH_S = 2.0  # an engine that does not answer in this time is out of reach


class FetchBody(msgspec.Struct):
    """POST /lab/kv/fetch: which request's KV, of which process of this engine."""

    request_id: str
    engine_id: str


class _Fetched(msgspec.Struct):
    blocks: int


_ASKED = msgspec.json.Decoder(FetchBody)
_FETCHED = msgspec.json.Decoder(_Fetched)


class Transfers:
    """One engine's side of the channel."""

    def __init__(self, core: EngineCore, link: TransferLink) -> None:
        self._core, self._link = core, link
        self._engine_id = uuid.uuid4().hex
        self._offered: dict[str, asyncio.TimerHandle] = {}
        self.fetched_blocks = 0  # fetched from others

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """The lab's path of the channel."""
        router.add_post(FETCH_PATH, self._fetch)

    def close(self) -> None:
        """Nothing more will be fetched."""
        for timer in self._offered.values():
            timer.cancel()
        self._offered.clear()

    def offer(self, request: web.Request, sequence: Sequence) -> dict[str, Any] | None:
        """Offer the KV of a finished sequence, for a limited time; the parameters to fetch it, None if it keeps
        none.
        """
        transport = request.transport
        if not sequence.keeps or transport is None:
            return None
        loop = asyncio.get_running_loop()
        self._offered[sequence.id] = loop.call_later(self._link.hold_s, self._drop, sequence.id)
        host, port = transport.get_extra_info("sockname")[:2]
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine_id,
            "remote_block_ids": list(range(self._core.held.blocks(sequence.id))),
            "remote_request_id": sequence.id,
            "remote_host": host,
            "remote_port": port,
            "tp_size": 1,
        }

    def over(self, sequence: Sequence) -> None:
        """Its answer is written or given up: KV that was never offered is not kept."""
        if sequence.keeps and sequence.id not in self._offered:
            self._core.held.drop(sequence.id)

    def _drop(self, name: str) -> int | None:
        timer = self._offered.pop(name, None)
        if timer is None:
            return None
        timer.cancel()
        return self._core.held.drop(name)

    async def _fetch(self, request: web.Request) -> web.Response:
        asked = decoded(_ASKED, await request.read())
        blocks = self._drop(asked.request_id) if asked.engine_id == self._engine_id else None
        if blocks is None:
            return web.Response(status=404)
        return web.Response(body=msgspec.json.encode(_Fetched(blocks)), content_type="application/json")

    async def pull(self, source: Transfer, sequence: Sequence) -> None:
        """Fetch the prompt's KV, in the time that takes, and put it into the cache."""
        self.fetched_blocks += await arrive(self._core, self._link, sequence, await _ask(source))


async def arrive(core: EngineCore, link: TransferLink, sequence: Sequence, blocks: int) -> int:
    """The first blocks of a prompt come over the link and are cached. Returns how many had to be transferred."""
    size = core.profile.block_tokens
    chain = sequence.block_names(min(blocks, sequence.prompt_tokens // size))
    missing = len(chain) - core.kv.match(chain)  # cached blocks are not transferred
    if missing:
        await asyncio.sleep(missing * size * link.ms_per_token / 1e3)
        adopt(core.kv, chain)
    return missing


async def _ask(source: Transfer) -> int:
    """How many blocks the other engine held for us; 0 if it knows none."""
    if not source.remote_host or not source.remote_port:
        return 0
    host = f"[{source.remote_host}]" if ":" in source.remote_host else source.remote_host
    asked = FetchBody(source.remote_request_id or "", source.remote_engine_id or "")
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=FETCH_S)) as session,
            session.post(f"http://{host}:{source.remote_port}{FETCH_PATH}", data=msgspec.json.encode(asked)) as answer,
        ):
            return _FETCHED.decode(await answer.read()).blocks if answer.status == 200 else 0
    except (aiohttp.ClientError, TimeoutError, ValueError, msgspec.DecodeError):
        return 0
