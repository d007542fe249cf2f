"""Opens a TCP connection to a name that may have several addresses, of which some may swallow packets (RFC 8305).

Invariants: of the connections that are begun one is used, and the others are closed before a protocol learns of them.
Bounded in time by its caller.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any, TypeVar

from farhop.relay.http.keepalive import keep_alive

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_P = TypeVar("_P", bound=asyncio.Protocol)
# What is sent reaches the other end's kernel in a round trip, unless packets are lost: this is six repeats of it, whose
# intervals double from 0.2 s. Below what upstreams may be silent for, so that what was sent in vain is sent elsewhere.
UNACKNOWLEDGED_S = 20.0
_STAGGER_S = 0.25  # RFC 8305 §8: longer than most round trips, and short against `connect_s`


async def dial(make: Callable[[], _P], host: str, port: int) -> tuple[asyncio.Transport, _P]:
    """Connect to the first of the addresses that answers; the next one is tried once the last has failed, or has been
    silent for a while. Raises OSError: why the first of them failed."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:  # an empty label, or one that is too long
        raise socket.gaierror(socket.EAI_NONAME, "not a host name") from None
    places = list(dict.fromkeys((entry[0], entry[4]) for entry in found))
    if len(places) == 1:
        made = await loop.create_connection(make, str(places[0][1][0]), port)
    else:
        sock = await _first(places)
        try:
            made = await loop.create_connection(make, sock=sock)
        except BaseException:
            sock.close()
            raise
    keep_alive(made[0].get_extra_info("socket"), UNACKNOWLEDGED_S)
    return made


async def _first(places: Sequence[tuple[int, Any]]) -> socket.socket:
    """A socket connected to one of these families and addresses."""
    tries: list[asyncio.Task[socket.socket]] = []
    kept: asyncio.Task[socket.socket] | None = None
    try:
        while True:
            ahead = len(tries) < len(places)
            if ahead:
                tries.append(asyncio.create_task(_connected(*places[len(tries)])))
            if waiting := [one for one in tries if not one.done()]:
                stagger_s = _STAGGER_S if ahead else None
                await asyncio.wait(waiting, timeout=stagger_s, return_when=asyncio.FIRST_COMPLETED)
            kept = next((one for one in tries if one.done() and one.exception() is None), None)
            if kept is not None or not (ahead or any(not one.done() for one in tries)):
                return (kept or tries[0]).result()
    finally:
        for one in tries:
            if one is not kept:
                one.cancel()
                one.add_done_callback(_discard)


async def _connected(family: int, address: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


def _discard(late: asyncio.Task[socket.socket]) -> None:
    if not late.cancelled() and late.exception() is None:
        late.result().close()
