"""A client of Farhop's entries that behaves well: it has an ordered list, and tries the next entry if one is gone.

    async for event in ask([entry, next_entry], key, {"model": m, "messages": [...], "stream": True}):
        match event:
            case Delta(): print(event.text, end="")         # as it comes, with the time since the request was made
            case Skipped() | Redirected(): ...              # on the way to an answer
            case Result(): ...                              # the last event, always exactly one
    result = await answer(entries, key, body)               # the same, the Result alone

The key goes only to addresses that the caller named: a redirect elsewhere ends in an error. An entry is tried once. A
request whose answer has not begun may be sent again (inference has no side effects); one that has begun never is. Break
out of `ask` under `contextlib.aclosing`. Never raises for errors of servers or network: they are the Result's `error`.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING, Any, TypeAlias

import aiohttp
import msgspec
from yarl import URL

from farhop.identity.redirect_token import PARAMETER
from farhop.service.process import network_error
from farhop_lab.world.stream import EventReader, Failure, Piece, Usage, read_answer, read_failure

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence

__all__ = [
    "Delta",
    "Event",
    "Failure",
    "Redirected",
    "Result",
    "Skipped",
    "Usage",
    "answer",
    "ask",
    "origin",
]

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
ANSWER_BYTES_MAX = 64 * 1024 * 1024
CONNECT_S = 3.0  # as a balancer allows for its own connections
REQUEST_S = 600.0


class Delta(msgspec.Struct, frozen=True):
    """A piece of the answer's text, `at_ms` after the request was made."""

    text: str
    at_ms: float


class Skipped(msgspec.Struct, frozen=True):
    """An entry that could not be reached, or was lost before it began to answer."""

    entry: str
    why: str


class Redirected(msgspec.Struct, frozen=True):
    """An entry that sent us to another one or, `by_token`, to a region itself."""

    entry: str
    to: str
    by_token: bool = False


class Result(msgspec.Struct, frozen=True):
    """The end. Times count from the request's making, failed entries and redirects included.

    `status` is 0 if no entry answered, and `entry` then "". `headers` have lower-case names. `ttft_ms` is the time to
    the first text (of a stream) or to the whole answer; None if there was none. `error` may be set beside a status of
    200: the stream broke after it began, and `text` is what came.
    """

    status: int
    headers: dict[str, str]
    text: str
    usage: Usage | None
    error: Failure | None
    ttft_ms: float | None
    total_ms: float
    entry: str
    redirected: bool

    @property
    def ok(self) -> bool:
        """Whether the answer is complete."""
        return self.error is None


Event: TypeAlias = Delta | Skipped | Redirected | Result


async def ask(
    entries: Sequence[str],
    key: str | None,
    body: Mapping[str, Any],
    *,
    path: str = CHAT,
    headers: Mapping[str, str] | None = None,
    trusted: Iterable[str] = (),
    session: aiohttp.ClientSession | None = None,
    connect_s: float = CONNECT_S,
    request_s: float = REQUEST_S,
) -> AsyncGenerator[Event, None]:
    """Send `body` to the first of `entries` (base URLs) that can be reached, and yield the events.

    A 307 or 308 is followed, with the key, to any of `entries` or `trusted`; and, without the key, to a URL with a
    single-use token (docs/operate/answering.md). A `session` of the caller's saves set-up for many requests.
    `request_s` bounds each entry's answer. ValueError if `entries` is empty.
    """
    if not entries:
        raise ValueError("entries: give at least one URL")
    async with AsyncExitStack() as stack:
        if session is None:
            session = await stack.enter_async_context(aiohttp.ClientSession())
        sent = {"accept": "text/event-stream, application/json", **(headers or {})}
        sent |= {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        asking = _Asking(session, msgspec.json.encode(body), sent, path, aiohttp.ClientTimeout(
            total=request_s, sock_connect=connect_s
        ))  # fmt: skip
        known = frozenset(map(origin, (*entries, *trusted)))
        async with aclosing(asking.events(entries, known)) as events:
            async for event in events:
                yield event


async def answer(entries: Sequence[str], key: str | None, body: Mapping[str, Any], **options: Any) -> Result:
    """`ask` without the events before the result."""
    async for event in ask(entries, key, body, **options):
        if isinstance(event, Result):
            result = event
    return result


def origin(url: str | URL) -> str:
    """Scheme, host and port of a URL: they identify the server. ValueError if it has none."""
    return str(URL(url).origin())


class _Asking:
    """One request on its way down the entries."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        body: bytes,
        headers: dict[str, str],
        path: str,
        timeout: aiohttp.ClientTimeout,
    ) -> None:
        self._session, self._body, self._headers, self._path, self._timeout = session, body, headers, path, timeout
        self._started = time.perf_counter()
        self._redirected = False
        self._pass: URL | None = None  # where to go next without the key
        self._entered = ""

    async def events(self, entries: Sequence[str], trusted: frozenset[str]) -> AsyncGenerator[Event, None]:
        """See `ask`."""
        pending, tried, skipped = deque(map(origin, entries)), set[str](), list[str]()
        while pending:
            entry = pending.popleft()
            if entry in tried:
                continue
            tried.add(entry)
            try:
                response = await self._send(entry)
            except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
                why, self._entered = network_error.in_words(error), ""
                skipped.append(f"{entry}: {why}")
                yield Skipped(entry, why)
                continue
            async with response:
                to = _target(response)
                self._pass = _with_pass(response) if to not in (None, "nowhere") else None
                if to is None or to in tried or (to not in trusted and self._pass is None):
                    async with aclosing(self._read(response, entry, to, again=to in tried)) as reading:
                        async for event in reading:
                            yield event
                    return
            self._redirected = True
            pending.appendleft(to)
            if self._pass is not None:
                self._entered = entry  # it decided: a region's answer is no entry's
            yield Redirected(entry, to, self._pass is not None)
        yield self._result(error=Failure(f"no entry could be reached ({'; '.join(skipped)})", "connect_failed"))

    async def _send(self, entry: str) -> aiohttp.ClientResponse:
        url, headers = URL(entry).with_path(self._path), self._headers
        if self._pass is not None:
            url, headers = self._pass, {name: value for name, value in headers.items() if name != "authorization"}
            self._pass = None
        return await self._session.post(
            url, data=self._body, headers=headers, timeout=self._timeout, allow_redirects=False
        )

    async def _read(
        self, response: aiohttp.ClientResponse, entry: str, to: str | None, *, again: bool
    ) -> AsyncGenerator[Event, None]:
        if to is not None:
            yield self._result(response, entry, error=_astray(entry, to, again))
        elif response.status == 200 and response.content_type == "text/event-stream":
            async with aclosing(self._read_stream(response, entry)) as reading:
                async for event in reading:
                    yield event
        else:
            yield await self._read_whole(response, entry)

    async def _read_stream(self, response: aiohttp.ClientResponse, entry: str) -> AsyncGenerator[Event, None]:
        reader, text = EventReader(), list[str]()
        first_ms: float | None = None
        size = 0
        try:
            async for data in response.content.iter_any():
                now_ms = self._now_ms()
                size += len(data)
                if size > ANSWER_BYTES_MAX:
                    reader.error = Failure(f"the answer is longer than {ANSWER_BYTES_MAX} bytes", "answer_too_large")
                    break
                for piece in reader.feed(data):
                    first_ms = now_ms if first_ms is None else first_ms
                    text.append(piece)
                    yield Delta(piece, now_ms)
        except (aiohttp.ClientError, OSError) as error:
            reader.error = reader.error or Failure(
                f"the stream broke: {network_error.in_words(error)}", "stream_broken"
            )
        yield self._result(response, entry, Piece("".join(text), reader.usage), reader.end(), first_ms)

    async def _read_whole(self, response: aiohttp.ClientResponse, entry: str) -> Result:
        body = bytearray()
        try:
            async for data in response.content.iter_any():
                body += data
                if len(body) > ANSWER_BYTES_MAX:
                    failure = Failure(f"the answer is longer than {ANSWER_BYTES_MAX} bytes", "answer_too_large")
                    return self._result(response, entry, error=failure)
        except (aiohttp.ClientError, OSError) as error:
            return self._result(
                response, entry, error=Failure(f"the answer broke: {network_error.in_words(error)}", "stream_broken")
            )
        if response.status != 200:
            return self._result(response, entry, error=read_failure(response.status, bytes(body)))
        read = read_answer(bytes(body))
        if isinstance(read, Failure):
            return self._result(response, entry, error=read)
        return self._result(response, entry, read, first_ms=self._now_ms())

    def _result(
        self,
        response: aiohttp.ClientResponse | None = None,
        entry: str = "",
        read: Piece | None = None,
        error: Failure | None = None,
        first_ms: float | None = None,
    ) -> Result:
        return Result(
            status=response.status if response is not None else 0,
            headers={name.lower(): value for name, value in response.headers.items()} if response is not None else {},
            text=read.text if read is not None else "",
            usage=read.usage if read is not None else None,
            error=error,
            ttft_ms=first_ms,
            total_ms=self._now_ms(),
            entry=self._entered or entry,
            redirected=self._redirected,
        )

    def _now_ms(self) -> float:
        return (time.perf_counter() - self._started) * 1e3


def _target(response: aiohttp.ClientResponse) -> str | None:
    """A redirect's target as an origin; "nowhere" if it has none; None if it is no redirect."""
    if response.status not in (307, 308):
        return None
    try:
        return origin(response.url.join(URL(response.headers["location"])))
    except (KeyError, ValueError):
        return "nowhere"


def _with_pass(response: aiohttp.ClientResponse) -> URL | None:
    """A redirect's target if it has a token instead of the key."""
    url = response.headers.get("location", "")
    return URL(url, encoded=True) if f"{PARAMETER.decode()}=" in url.partition("?")[2] else None


def _astray(entry: str, to: str, again: bool) -> Failure:
    """Why a redirect is not followed."""
    if again:
        return Failure(f"{entry} sends us to {to}, which was asked already and did not serve us", "no_entry")
    return Failure(
        f"{entry} sends us to {to}, which is not trusted with the key: no entry named here", "redirect_refused"
    )
