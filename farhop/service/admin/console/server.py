"""The console on an admin port: its page, the stream of snapshots, the last hour, and actions.

One picture per second is made for all viewers, and each viewer is sent only its patch. Bounds: the number of viewers,
the backlog of a slow viewer, sessions, the last hour's bytes. A browser sends a cookie instead of a token; every
request that changes anything needs a header that another site's page cannot send. Never on the data path; never shows a
prompt or a key.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import secrets
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextvars import ContextVar
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from farhop.service.admin.console import snapshot as snapshots
from farhop.service.admin.console.acts import NO_DRILLS, Act, ActError, Acts
from farhop.service.admin.console.delta import Picture, Ring, diff_in_turns
from farhop.service.admin.console.snapshot import LastSnapshot, Snapshot
from farhop.service.process.clock import wall
from farhop.telemetry import logs

if TYPE_CHECKING:
    from farhop.identity.operators import Operator, Operators, Right
    from farhop.service.observability.decisions import Decisions
    from farhop.store.contract import Store
    from farhop.telemetry.metrics import TierMetrics
    from topology.law import Law

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
EVERY_S, UNSEEN_S = 1.0, 5.0  # with and without viewers: without, only for the last hour
SPAN, RATE_MS_MIN = 2, 700  # snapshots that a rate is over, and their least distance
VIEWERS_MAX = 64
BEHIND_MAX = 8  # patches that a viewer may be behind
WRITE_S = 5.0
SESSIONS_MAX, SESSION_S = 256, 8 * 3600.0
BODY_BYTES_MAX = 64 * 1024
BODY_S = 10.0
EVENTS = "/console/of/events"  # a viewer is no request at a time: it has a bound of its own
GUARD = "x-farhop-console"  # the header that a page of another origin cannot send without being asked about first
BY_ADDRESS = "ask by the machine's address or as localhost, or give the port tokens: a name may be another's"
OPERATOR: ContextVar[Operator] = ContextVar("OPERATOR")  # the caller, set by the port that admits it
PAGE = Path(__file__).parent / "page"
FILES = {
    "": ("index.html", "text/html"),
    "app.js": ("app.js", "text/javascript"),
    "style.css": ("style.css", "text/css"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
    "coast.json": ("coast.json", "application/json"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'; sandbox"


class ExplainRequest(msgspec.Struct, frozen=True):
    """A question of the page: one for /explain, and a region or replica to leave out, as if it were drained."""

    question: msgspec.Raw
    drained: str = ""


class Source(Protocol):
    """The data source of a console: one balancer, or those of a fleet."""

    @property
    def name(self) -> str:
        """The name that the console shows."""
        ...

    async def snapshots(self) -> Mapping[str, LastSnapshot]:
        """The last snapshot of each balancer, by its name; asked once a second. Never raises."""
        ...

    def law(self) -> Law | None:
        """The law that is shown, with its map; None if unknown."""
        ...

    async def decision(self, decision_id: str) -> dict[str, dict[str, Any]]:
        """The records of a decision, by balancer."""
        ...

    async def explain(self, question: bytes) -> dict[str, Any]:
        """Where a request would go now. Raises ActError."""
        ...

    def acts(self) -> Acts | None:
        """The actions offered here; None: none."""
        ...

    def author(self, operator: Operator) -> str:
        """The name of the operator, as documents record it."""
        ...


class BalancerSource:
    """The source of a single balancer: its own status."""

    def __init__(
        self,
        status: Callable[[], dict[str, Any]],
        metrics: TierMetrics,
        decisions: Decisions,
        law: Callable[[], Law],
        store: Store,
        explain: Callable[[bytes], Awaitable[dict[str, Any]]],
    ) -> None:
        self._read_status, self._metrics, self._decisions, self._store = status, metrics, decisions, store
        self.law, self._explain = law, explain
        self._briefs: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._counted: deque[tuple[int, dict[str, dict[str, int]]]] = deque(maxlen=SPAN + 1)
        self._rates: dict[str, dict[str, float]] = {}
        self._status: dict[str, Any] = {}
        self.name = " ".join(metrics.process)

    async def snapshots(self) -> Mapping[str, LastSnapshot]:
        """See Source."""
        now_ms = _now_ms()
        return {self.name: LastSnapshot(await self.snapshot(now_ms), now_ms)}

    async def snapshot(self, now_ms: int) -> Snapshot:
        """What this balancer says of the world now, made in many turns of the loop: requests are not kept waiting for
        it. Rates are since it was last asked."""
        self._status = status = self._read_status()
        names = self._decisions.newest(snapshots.DECISIONS_MAX)
        for name in reversed(names):  # each is spelled out once: that is what costs
            if name not in self._briefs and (record := self._decisions.get(name)) is not None:
                self._briefs[name] = record
                await asyncio.sleep(0)
        for name in self._briefs.keys() - set(names):
            del self._briefs[name]
        steps = snapshots.of_status(status, now_ms, list(self._briefs.values()), self._arcs(now_ms))
        return await _in_turns(steps)

    def _arcs(self, now_ms: int) -> dict[str, dict[str, float]]:
        """Requests a second by target and by outcome, over the last SPAN snapshots."""
        if self._counted and now_ms - self._counted[-1][0] < RATE_MS_MIN:
            return self._rates  # other requests do not shorten the interval
        counts = self._metrics.traffic()
        self._counted.append((now_ms, counts))
        since_ms, before = self._counted[0]
        span_s = (now_ms - since_ms) / 1e3
        rates: dict[str, dict[str, float]] = {}
        for target, flows in counts.items() if span_s > 0.0 else ():
            was = before.get(target, {})
            moved = {how: (n - was.get(how, 0)) / span_s for how, n in flows.items() if n > was.get(how, 0)}
            if moved:
                rates[target] = moved
        self._rates = rates
        return rates

    async def decision(self, decision_id: str) -> dict[str, dict[str, Any]]:
        """See Source."""
        record = self._decisions.get(decision_id)
        return {} if record is None else {self.name: record}

    async def explain(self, question: bytes) -> dict[str, Any]:
        """See Source."""
        return {self.name: await self._explain(question)}

    def acts(self) -> Acts | None:
        """See Source. A regional balancer does not know which tenants would be left without a region."""
        if self._status.get("tier") != "global":
            return None

        async def statuses() -> tuple[dict[str, Any]]:
            return (self._status,)

        return Acts(self._store, self.law, statuses, wall)

    def author(self, operator: Operator) -> str:
        """See Source."""
        return operator.name


class Console:
    """Serves the console to all of its viewers."""

    def __init__(self, source: Source, operators: Operators, *, secure: bool) -> None:
        """`secure`: the port speaks TLS, so that the cookie never goes without."""
        self._source, self._operators, self._secure = source, operators, secure
        self._log = logs.get("farhop.console")
        self._boot = secrets.token_hex(4)
        self._number = 0
        self._picture: Picture = {}
        self._looking = asyncio.Lock()  # each patch leads from the picture before
        self._ring = Ring()
        self._forgotten = 0  # how often
        self._viewers: set[asyncio.Queue[bytes | None]] = set()
        self._looked_at = asyncio.Event()  # somebody has begun to
        self._sessions: OrderedDict[str, tuple[Operator, float]] = OrderedDict()
        self._cookie = "farhop_" + hashlib.sha256(source.name.encode()).hexdigest()[:12]
        self._task: asyncio.Task[None] | None = None
        self._failed = ""
        self.dropped = 0

    @property
    def viewers(self) -> int:
        """The number of open viewers."""
        return len(self._viewers)

    def open(self) -> None:
        """Begin to take snapshots. A failed snapshot does not stop the following ones."""
        self._task = asyncio.get_running_loop().create_task(self._keep(), name="the console's pictures")

    async def close(self) -> None:
        """Disconnect all viewers."""
        for viewer in self._viewers:
            _end(viewer)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def forget(self) -> None:
        """The law allows fewer records here than before: keep no picture of before. Viewers begin again."""
        self._forgotten += 1
        self._picture, self._ring = {}, Ring()
        self._number += 1  # an empty picture, which no patch leads to
        for viewer in self._viewers:
            _end(viewer)

    def routes(self) -> tuple[tuple[str, str, Handler, Right | None], ...]:
        """The method, path and handler of each route, and the right it needs (None: the handler checks it, or its
        answer is public).
        """
        return (
            ("GET", "/console", self._page, None),
            ("GET", "/console/", self._page, None),
            ("GET", "/console/{file}", self._page, None),
            ("GET", "/console/of/me", self._who, None),
            ("POST", "/console/of/login", self._login, None),
            ("POST", "/console/of/logout", self._logout, None),
            ("GET", "/console/of/snapshot", self._snapshot, "read"),
            ("GET", EVENTS, self._events, "read"),
            ("GET", "/console/of/past", self._past, "read"),
            ("GET", "/console/of/past/{number}", self._past_chunk, "read"),
            ("GET", "/console/of/decision/{id}", self._decision, "read"),
            ("GET", "/console/of/drills", self._drills, "read"),
            ("GET", "/console/of/drills/offered", self._drills_offered, "read"),
            ("GET", "/console/of/drills/{run}/report", self._drill_report, "read"),
            ("GET", "/console/of/drills/{run}/past", self._drills_past, "read"),
            ("GET", "/console/of/laws", self._laws, "read"),
            ("POST", "/console/of/explain", self._explain, "read"),
            ("POST", "/console/of/act", self._act, "act"),
        )

    # -- who

    def operator(self, request: web.Request) -> Operator | None:
        """The operator, by the cookie of the login; None: no valid cookie."""
        found = self._sessions.get(request.cookies.get(self._cookie, ""))
        if found is None or not request.path.startswith("/console/"):
            return None
        operator, until = found
        return operator if asyncio.get_running_loop().time() < until else None

    def refused(self, request: web.Request) -> web.Response | None:
        """Why a request to the console may come from another site's page; None if it does not."""
        host = request.headers.get("Host", "")
        if not self._operators.asks and not is_address(host):
            return reply({"error": BY_ADDRESS}, 403)
        if request.method == "GET":
            return None
        origin = request.headers.get("Origin")
        if request.headers.get(GUARD) != "1" or (origin is not None and not is_own(origin, host)):
            return reply({"error": f"only the console's own page acts here (header {GUARD}: 1)"}, 403)
        return None

    async def _who(self, _request: web.Request) -> web.Response:
        operator = OPERATOR.get()
        return reply({
            "name": operator.name, "may": operator.may, "asks": self._operators.asks, "source": self._source.name,
            "acts": operator.may_do("act") and self._source.acts() is not None,
            "author": self._source.author(operator),
        })  # fmt: skip

    async def _login(self, request: web.Request) -> web.Response:
        token = (await _body(request, dict[str, str])).get("token", "")
        operator = self._operators.of(f"Bearer {token}", None)
        if not operator.may_do("read"):
            return reply({"error": "this token is not known here, or may not read"}, 401)
        session = secrets.token_urlsafe(32)
        self._sessions[session] = (operator, asyncio.get_running_loop().time() + SESSION_S)
        while len(self._sessions) > SESSIONS_MAX:
            self._sessions.popitem(last=False)
        answer = reply({"name": operator.name, "may": operator.may})
        answer.set_cookie(
            self._cookie, session, path="/console/", max_age=int(SESSION_S), secure=self._secure, httponly=True,
            samesite="Strict",
        )  # fmt: skip
        self._log.info("an operator logged in", operator=operator.name)
        return answer

    async def _logout(self, request: web.Request) -> web.Response:
        self._sessions.pop(request.cookies.get(self._cookie, ""), None)
        answer = reply({})
        answer.del_cookie(self._cookie, path="/console/")
        return answer

    # -- the page

    async def _page(self, request: web.Request) -> web.Response:
        found = FILES.get(request.match_info.get("file", ""))
        if found is None:
            raise web.HTTPNotFound(text="the console has no such file\n", headers=HEADERS)
        body, etag = _file(found[0])
        headers = {**HEADERS, "ETag": etag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
        if request.headers.get("If-None-Match") == etag:
            return web.Response(status=304, headers=headers)
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            headers["Content-Encoding"] = "gzip"
        else:
            body = gzip.decompress(body)
        return web.Response(body=body, content_type=found[1], charset="utf-8", headers=headers)

    # -- what happens

    async def _keep(self) -> None:
        clock = asyncio.get_running_loop().time
        due = clock()
        while True:
            try:
                await self.look()
            except Exception as error:  # noqa: BLE001 - a page for people: whatever it meets, it goes on
                if self._failed != type(error).__name__:
                    self._failed = type(error).__name__
                    self._log.error("the console could not read the fleet's state", kind=self._failed)
            due = max(due + (EVERY_S if self._viewers else UNSEEN_S), clock())
            if self._viewers:
                await asyncio.sleep(due - clock())
                continue
            self._looked_at.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._looked_at.wait()
                    due = clock()

    async def look(self) -> None:
        """Make the next picture, and send all viewers the difference."""
        async with self._looking:
            await self._look()

    async def _look(self) -> None:
        forgotten = self._forgotten
        latest = await self._source.snapshots()
        now_ms = _now_ms()
        picture = await _in_turns(snapshots.picture(latest, self._source.law(), now_ms))
        patch = msgspec.json.encode(await _in_turns(diff_in_turns(self._picture, picture)))
        if self._forgotten != forgotten:
            return  # it may show what must not be kept any more
        self._picture = picture
        self._number += 1
        self._ring.add(self._number, now_ms, picture, patch)
        if (acts := self._source.acts()) is not None:
            await acts.keep_drills_past(self._ring.past)
        event = self._event("patch", self._number, patch)
        for viewer in tuple(self._viewers):
            if viewer.qsize() >= BEHIND_MAX:
                self.dropped += 1
                self._viewers.discard(viewer)
                _end(viewer)
            else:
                viewer.put_nowait(event)

    def _event(self, kind: str, number: int, data: bytes) -> bytes:
        return b"id: %b.%d\nevent: %b\ndata: %b\n\n" % (self._boot.encode(), number, kind.encode(), data)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if len(self._viewers) >= VIEWERS_MAX:
            return reply({"error": f"{VIEWERS_MAX} look at this moment: try again later"}, 503)
        viewer: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._viewers.add(viewer)
        self._looked_at.set()
        try:
            begun = self._begun(request.headers.get("Last-Event-ID", ""))
            headers = {**HEADERS, "Content-Type": "text/event-stream", "Cache-Control": "no-store"}
            response = web.StreamResponse(headers=headers)
            await response.prepare(request)
            event: bytes | None = b"retry: 1000\n\n" + begun
            while event is not None:
                async with asyncio.timeout(WRITE_S):
                    await response.write(event)
                event = await viewer.get()
        except (TimeoutError, ConnectionError):
            self.dropped += 1
        finally:
            self._viewers.discard(viewer)
        return response

    def _begun(self, last: str) -> bytes:
        """A viewer's first message: the patches that it missed, or the whole picture."""
        boot, _, number = last.partition(".")
        missed = (
            self._ring.since(int(number)) if boot == self._boot and number.isdecimal() and len(number) < 18 else None
        )
        if missed is None:
            return self._event("picture", self._number, msgspec.json.encode(self._picture))
        return b"".join(self._event("patch", one, patch) for one, patch in missed)

    async def _snapshot(self, _request: web.Request) -> web.Response:
        latest = await self._source.snapshots()
        return reply({"snapshots": {name: one.snapshot for name, one in latest.items()}})

    # -- the last hour

    async def _past(self, _request: web.Request) -> web.Response:
        return reply({"chunks": self._ring.chunks()})

    async def _past_chunk(self, request: web.Request) -> web.Response:
        number = request.match_info["number"]
        return _recorded(self._ring.chunk(int(number)) if number.isdecimal() and len(number) < 18 else None)

    # -- asking and acting

    async def _decision(self, request: web.Request) -> web.Response:
        name, drained = request.match_info["id"], request.query.get("drained", "")
        records = await self._source.decision(name)
        if not records:
            return reply({"error": "no such decision here: unknown, too long ago, or kept from here by law"}, 404)
        answer: dict[str, Any] = {"decision": name, "records": records}
        if drained:
            answer["what_if"] = {key: snapshots.without(record, drained) for key, record in records.items()}
        return reply(answer)

    async def _explain(self, request: web.Request) -> web.Response:
        asked = await _body(request, ExplainRequest)
        explained = await self._source.explain(bytes(asked.question))
        answer: dict[str, Any] = {"explained": explained}
        if asked.drained:
            answer["what_if"] = {key: snapshots.without(one, asked.drained) for key, one in explained.items()}
            answer["what_if"].update(await self._asked_again(asked, explained))
        return reply(answer)

    async def _asked_again(self, asked: ExplainRequest, explained: dict[str, Any]) -> dict[str, Any]:
        """What those that answered decide without the region, by balancer; empty for a replica, and none of an older
        build."""
        law = self._source.law()
        if law is None or asked.drained not in law.topology.regions:
            return {}
        question = {**msgspec.json.decode(asked.question, type=dict[str, Any]), "drained": asked.drained}
        again = await self._source.explain(msgspec.json.encode(question))
        return {
            key: snapshots.compared(explained[key], one, asked.drained)
            for key, one in again.items()
            if key in explained and one.get("drained") == asked.drained
        }

    async def _laws(self, _request: web.Request) -> web.Response:
        acts = self._source.acts()
        return reply({"laws": []} if acts is None else await acts.laws())

    async def _drills(self, _request: web.Request) -> web.Response:
        acts = self._source.acts()
        if acts is None:
            return reply({"error": "ask a global balancer or `farhop console` for drills"}, 404)
        return reply(await acts.drills())

    async def _drills_offered(self, _request: web.Request) -> web.Response:
        acts = self._source.acts()
        return reply({"offered": [], "why": NO_DRILLS} if acts is None else await acts.drills_offered())

    async def _drill_report(self, request: web.Request) -> web.Response:
        acts = self._source.acts()
        found = await acts.drill_report(request.match_info["run"]) if acts is not None else None
        if found is None:
            return reply({"error": "this report is not kept here: see where the drill was run"}, 404)
        # A file with its own styles, which runs no script and loads nothing.
        headers = {**HEADERS, "Content-Security-Policy": REPORT_POLICY, "Cache-Control": "no-store"}
        return web.Response(body=found, content_type="text/html", charset="utf-8", headers=headers)

    async def _drills_past(self, request: web.Request) -> web.Response:
        acts = self._source.acts()
        return _recorded(await acts.drills_past(request.match_info["run"]) if acts is not None else None)

    async def _act(self, request: web.Request) -> web.Response:
        act = await _body(request, Act)
        acts = self._source.acts()
        if acts is None:
            return reply(
                {"error": "nothing can be done from here: ask a global balancer, or use `farhop console`"}, 409
            )
        operator = OPERATOR.get()
        author = self._source.author(operator)
        answer = await acts.perform(act, author)
        if not act.dry_run:
            self._log.warning("operator action", operator=author, what=f"{act.do} {act.target}"[:128])
        return reply(answer)


def _recorded(pictures: bytes | None) -> web.Response:
    if pictures is None:
        return reply({"error": "that is not kept any more"}, 404)
    headers = {**HEADERS, "Cache-Control": "no-store"}
    return web.Response(body=pictures, content_type="application/json", headers=headers)


def reply(data: Mapping[str, Any], status: int = 200) -> web.Response:
    """JSON that no page of another site reads, and no cache keeps."""
    body = msgspec.json.encode(data)
    headers = {**HEADERS, "Cache-Control": "no-store"}
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


async def _raw(request: web.Request) -> bytes:
    async with asyncio.timeout(BODY_S):
        body = await request.content.read(BODY_BYTES_MAX + 1)
        while len(body) <= BODY_BYTES_MAX and (more := await request.content.read(BODY_BYTES_MAX)):
            body += more
    if len(body) > BODY_BYTES_MAX:
        raise ActError(f"more than {BODY_BYTES_MAX} bytes")
    return body


async def _body(request: web.Request, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(await _raw(request), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ActError(str(error)[:200]) from None


async def _in_turns(steps: Generator[None, None, Snapshot]) -> Snapshot:
    """The result of `steps`, computed over many turns of the event loop."""
    while True:
        await asyncio.sleep(0)
        try:
            next(steps)
        except StopIteration as end:
            made: Snapshot = end.value
            return made


def _end(viewer: asyncio.Queue[bytes | None]) -> None:
    while not viewer.empty():
        viewer.get_nowait()
    viewer.put_nowait(None)


def _now_ms() -> int:
    return int(wall().timestamp() * 1e3)


@cache
def _file(name: str) -> tuple[bytes, str]:
    """A file of the page, compressed, and its tag."""
    body = gzip.compress((PAGE / name).read_bytes(), 9, mtime=0)
    return body, f'"{hashlib.sha256(body).hexdigest()[:16]}"'


def is_own(origin: str, host: str) -> bool:
    """Whether an `Origin` header names the port itself, by the name in the request's `Host`."""
    try:
        return urlsplit(origin).netloc == host
    except ValueError:
        return False


def is_address(host: str) -> bool:
    """Whether a `Host` header names no other machine: a name may lead to another's page first and here afterwards."""
    name = ""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return bool(ip_address(name))
    except ValueError:
        return name == "localhost"
