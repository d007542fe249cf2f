"""SGLang's protocol between a prefill and a decode engine: both get the request at once, and meet in a bootstrap room.

The prefill engine listens at its bootstrap port, over HTTP and without the KV bytes: only their time is spent. Its own
answer, of one token, waits until the KV is fetched. Invariants: a room has one prefill at a time and ends with its
request, however that ends; a waiting peer is informed, or waits at most `wait_s`. A failed handover fails the request,
as in SGLang: a decode engine prefills nothing.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import aiohttp
import msgspec
from aiohttp import web
from msgspec.structs import replace

from farhop_lab.engine.formats.api import RefusedError, decoded
from farhop_lab.engine.transfer import arrive

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farhop_lab.engine.core.held import TransferLink
    from farhop_lab.engine.core.scheduler import EngineCore
    from farhop_lab.engine.core.sequence import Sequence
    from farhop_lab.engine.formats.api import Call

Mode = Literal["prefill", "decode"]
ROOM_PATH = "/lab/kv/room"
ROOMS_MAX = 65_536
WAIT_S = 300.0  # SGLang's default for a peer that does not come
_CONNECT_S = 2.0
_ROOMLESS = "Invalid request: Disaggregated request received without bootstrap room id."


class _Asked(msgspec.Struct):
    """POST of ROOM_PATH: which request's KV."""

    room: int


class _Found(msgspec.Struct):
    blocks: int


_ASKED = msgspec.json.Decoder(_Asked)
_FOUND = msgspec.json.Decoder(_Found)


class _Room:
    """`computed` names the request whose KV is here, "" if there will be none; `taken` is done once it was fetched."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.computed: asyncio.Future[str] = loop.create_future()
        self.taken: asyncio.Future[None] = loop.create_future()
        self.claimed = False


class BootstrapRooms:
    """One engine's side. RefusedError: 400 for a request that it cannot serve, 500 for a failed handover."""

    def __init__(self, mode: Mode, core: EngineCore, link: TransferLink, wait_s: float = WAIT_S) -> None:
        self.mode, self._core, self._link, self._wait_s = mode, core, link, wait_s
        self._rooms: dict[int, _Room] = {}

    def __len__(self) -> int:
        return len(self._rooms)

    def application(self) -> web.Application:
        """The application at a prefill's bootstrap port."""
        app = web.Application()
        app.router.add_post(ROOM_PATH, self._fetch)
        return app

    @contextmanager
    def entered(self, call: Call) -> Iterator[Call]:
        """The request, for as long as this engine works on it. Raises RefusedError."""
        bootstrap = call.bootstrap
        if bootstrap is None:
            raise self.roomless()
        if call.n > 1:
            raise RefusedError("n must be 1 where another engine decodes: one answer, one room", param="n")
        if self.mode == "decode":
            yield call
            return
        room = self._room(bootstrap.room)
        if room.claimed:
            raise RefusedError(f"bootstrap_room: {bootstrap.room} is in use", param="bootstrap_room")
        room.claimed = True
        try:
            yield replace(call, wanted=replace(call.wanted, max_tokens=1, min_tokens=0, keeps=True))
        finally:
            del self._rooms[bootstrap.room]
            if not room.computed.done():
                room.computed.set_result("")  # aborted, or failed: the waiting peer is told

    def roomless(self) -> RefusedError:
        """The refusal of a request that names no room."""
        return RefusedError(_ROOMLESS, param="bootstrap_room")

    async def pull(self, call: Call, sequence: Sequence) -> None:
        """Decode: wait for the prompt's KV and put it into the cache, in the time that the transfer takes. Raises
        RefusedError.
        """
        if self.mode == "decode" and call.bootstrap is not None:
            blocks = await self._ask(call.bootstrap.host, call.bootstrap.port, call.bootstrap.room)
            await arrive(self._core, self._link, sequence, blocks)

    async def handed_over(self, call: Call, sequence: Sequence) -> list[str]:
        """Prefill, when done: wait until its KV was fetched. Returns the errors, [] if there were none."""
        room = self._rooms.get(call.bootstrap.room) if call.bootstrap is not None else None
        if self.mode == "decode" or room is None:
            return []
        room.computed.set_result(sequence.id)
        try:
            async with asyncio.timeout(self._wait_s):
                await room.taken
        except TimeoutError:
            return [_lost("no peer came for it")]
        return []

    def _room(self, number: int) -> _Room:
        """The first to come opens the room."""
        if number not in self._rooms and len(self._rooms) >= ROOMS_MAX:
            raise RefusedError("Too many rooms are open.", status=503, kind="ServiceUnavailableError")
        return self._rooms.setdefault(number, _Room())

    async def _fetch(self, request: web.Request) -> web.Response:
        number = decoded(_ASKED, await request.read()).room
        room = self._room(number)
        try:
            async with asyncio.timeout(self._wait_s):
                name = await asyncio.shield(room.computed)
        except TimeoutError:
            return web.Response(status=504)
        finally:
            if not room.claimed and self._rooms.get(number) is room:
                del self._rooms[number]
        blocks = self._core.held.drop(name) if name else None
        if blocks is None:
            return web.Response(status=410)
        room.taken.set_result(None)
        return web.Response(body=msgspec.json.encode(_Found(blocks)), content_type="application/json")

    async def _ask(self, host: str, port: int, number: int) -> int:
        """The number of blocks for us in that room. RefusedError if that fails."""
        timeout = aiohttp.ClientTimeout(total=self._wait_s, sock_connect=_CONNECT_S)
        body = msgspec.json.encode(_Asked(number))
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(f"http://{host}:{port}{ROOM_PATH}", data=body) as answer,
            ):
                if answer.status == 200:
                    return _FOUND.decode(await answer.read()).blocks
                why = f"the prefill said {answer.status}"
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            why = type(error).__name__
        raise RefusedError(_lost(why), status=500, kind="InternalServerError")


def _lost(why: str) -> str:
    return f"KVTransferError: the prompt's KV was not handed over: {why}"
