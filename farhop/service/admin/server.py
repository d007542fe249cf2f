"""The admin port of a balancer: metrics, health, status, decisions, explain. For operators, never for clients.

`farhop.identity.operators` authenticates the caller; each route here states the right that it needs. Only health needs
none. Bounds: connections, concurrent requests, the time until a request's head and body are complete. Never on the data
path, never shows a prompt or a key.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import msgspec
from aiohttp import web

from farhop.identity.operators import OPEN
from farhop.relay.http.listener import PortTakenError
from farhop.relay.http.tls import GIVES_WAY_S, Handshakes
from farhop.service.admin import external_metrics as external
from farhop.service.admin.console.acts import ActError
from farhop.service.admin.console.server import (
    BY_ADDRESS,
    EVENTS,
    OPERATOR,
    BalancerSource,
    Console,
    is_address,
    is_own,
)
from farhop.service.process.clock import wall
from farhop.telemetry import logs
from farhop.telemetry.metrics import CONTENT_TYPE

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from farhop.balance.machine import Request
    from farhop.identity.operators import Operator, Operators, Right
    from farhop.relay.http.tls import ListenerTls
    from farhop.service.admin.console.server import Source
    from farhop.service.observability.decisions import Decisions
    from farhop.store.contract import Store
    from farhop.telemetry.metrics import TierMetrics
    from topology.law import Law

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
DECISIONS_LISTED_MAX = 200  # of the last, at most
EXPLAIN_BYTES_MAX = 16 * 1024 * 1024
EXPLAINS_MAX = 4  # at a time, one of which is worked on
CONNECTIONS_MAX = 256
REQUESTS_MAX = 64  # at a time
HEAD_S = 10.0  # until a connection's first request is read
BODY_S = 30.0
IDLE_S = 15.0  # a connection without a request
LOG_LEVEL_BYTES_MAX = 256
CONSOLE = "/console"
_BROWSERS_OWN = "Accept-Language"  # what no page can keep its browser from sending, and hardly any other client sends
_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="farhop admin"'}


class _Quiet(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's own log: what could not be read of a request, and why, would quote it."""

    def process(self, _msg: object, kwargs: MutableMapping[str, Any]) -> tuple[str, MutableMapping[str, Any]]:
        """Keep the kind of the fault."""
        given = kwargs.pop("exc_info", None)
        error = given if isinstance(given, BaseException) else sys.exc_info()[1]
        return f"a request to the admin port failed: {type(error).__name__ if error is not None else 'malformed'}", {}

    def log(self, level: int, msg: object, *_args: object, **kwargs: Any) -> None:
        """Without what the line would be filled with."""
        super().log(level, msg, **kwargs)

    def exception(self, msg: object, *_args: object, **kwargs: Any) -> None:
        """Log an exception as an error, without its traceback."""
        self.error(msg, **kwargs)


class ExplainError(Exception):
    """A question that cannot be answered; the text says why."""


class TierAdmin(Protocol):
    """What a process provides to its admin port: a balancer (farhop.service.admin.balancer_admin), a DNS server, an
    announcer."""

    def ready(self) -> bool:
        """Whether requests should be sent to this process."""

    def notice(self) -> str:
        """A note for operators beside readiness, in one line; "" for none."""

    def status(self) -> dict[str, Any]:
        """The tier's state, JSON-ready."""

    def compose(self, question: Question) -> Request:
        """The request that a question describes. Runs in a thread, as it may take long. Raises ExplainError."""

    def explain(self, request: Request, drained: str = "") -> dict[str, Any]:
        """Where the request would be sent now, and why; `drained`: if no region of this name took it."""

    def scaling(self) -> dict[str, dict[str, int]]:
        """How many replicas should be there, by region and model."""

    def law(self) -> dict[str, Any]:
        """The law in force, whole: of keys the hashes."""

    def topology(self) -> dict[str, Any]:
        """The topology in use, with its own law, as a document; of keys it has only hashes."""


class Question(msgspec.Struct, frozen=True):
    """A query of `farhop explain`: an OpenAI body, the path and the caller it is for. `drained`: a region that is left
    out, as if it were drained."""

    body: msgspec.Raw
    tenant: str
    path: str = "/v1/chat/completions"
    allow: tuple[str, ...] = ()
    drained: str = ""


class AdminServer:
    """The HTTP server of the admin port."""

    def __init__(
        self,
        tier_admin: TierAdmin,
        metrics: TierMetrics,
        decisions: Decisions,
        tls: ListenerTls | None = None,
        operators: Operators = OPEN,
        config: Callable[[], dict[str, Any]] = dict,
        *,
        acted: Callable[[str, str], None] | None = None,
        more: tuple[tuple[str, str, Handler, Right], ...] = (),
    ) -> None:
        """`config` returns the configuration in use, without secrets. `acted` is told about each action and its author,
        before it is done. `more`: routes of this process alone."""
        self._config, self._acted, self._more = config, acted, more
        self._tier_admin, self._metrics, self._decisions = tier_admin, metrics, decisions
        self._operators, self._log = operators, logs.get("farhop.admin")
        self._under_way = 0
        self._refused: Counter[str] = Counter()
        metrics.counter(
            "admin_requests_refused",
            "Requests the admin port refused, by reason.",
            lambda: dict(self._refused),
            "reason",
        )
        self.starting = ""  # why the tier has nothing to show yet; "" once it has
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._tls = tls
        self._handshakes: Handshakes | None = None
        self._explaining, self._one = 0, asyncio.Semaphore(1)
        self.console: Console | None = None

    async def open(self, host: str, port: int) -> int:
        """Listen; returns the port. While `starting`, only health and metrics are shown. Raises PortTakenError."""
        bounded = _Bounded(self._count)
        app = web.Application(client_max_size=EXPLAIN_BYTES_MAX, middlewares=[bounded.respond])
        app.router.add_get("/healthz", self._show_alive)
        app.router.add_get("/readyz", self._show_ready)
        routes: tuple[tuple[str, str, Handler, Right], ...] = (
            ("GET", "/metrics", self._show_metrics, "metrics"),
            ("GET", "/scaling", self._show_scaling, "metrics"),
            ("GET", "/scaling/{region}", self._show_scaling, "metrics"),
            *((("GET", path, partial(self._show_external, path), "metrics")) for path in external.PATHS),
            ("GET", "/status", self._show_status, "read"),
            ("GET", "/law", self._show_law, "read"),
            ("GET", "/topology", self._show_topology, "read"),
            ("GET", "/config", self._show_config, "read"),
            ("GET", "/decisions", self._list_decisions, "read"),
            ("GET", "/decisions/{id}", self._show_decision, "read"),
            ("POST", "/explain", self._explain, "read"),
            ("POST", "/log-level", self._set_log_level, "act"),
        )
        for method, path, handler, needed in (*routes, *self._more):
            app.router.add_route(method, path, partial(self._admitted, handler, needed))
        if self.console is not None:
            for method, path, handler, right in self.console.routes():
                app.router.add_route(method, path, partial(self._in_console, handler, right))
        quiet = cast("logging.Logger", _Quiet(logging.getLogger("farhop.admin")))
        self._runner = web.AppRunner(app, access_log=None, logger=quiet, shutdown_timeout=1.0, keepalive_timeout=IDLE_S)
        await self._runner.setup()
        make = bounded
        make.make = self._runner.server
        self._handshakes = None if self._tls is None else Handshakes(make, self._tls)
        try:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(self._handshakes or make, host, port)
        except OSError as error:
            await self._runner.cleanup()
            reason = error.strerror or str(error)
            raise PortTakenError(f"admin: cannot listen on {host}:{port}: {reason}; choose another port") from None
        if self.console is not None:
            self.console.open()
        chosen: int = self._server.sockets[0].getsockname()[1]
        return chosen

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
        if self.console is not None:
            await self.console.close()
        if self._handshakes is not None:
            await self._handshakes.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _admitted(self, handler: Handler, needed: Right, request: web.Request) -> web.StreamResponse:
        """Answer callers that have the right, before anything of a body is read."""
        if no := self._from_a_page(request):
            self._count("other_site")
            return no
        if self.starting and needed != "metrics":
            return self._not_yet()
        return await self._given(handler, needed, request, self._operator(request))

    def _from_a_page(self, request: web.Request) -> web.Response | None:
        """Why a request may come from a page of another site in an operator's browser, which can reach what the page's
        author cannot; None if it does not."""
        host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
        if origin is not None and not is_own(origin, host):
            return _json({"error": "pages of other sites are not answered here"}, 403)
        if _BROWSERS_OWN in request.headers and not self._operators.asks and not is_address(host):
            return _json({"error": BY_ADDRESS}, 403)
        return None

    async def _in_console(self, handler: Handler, needed: Right | None, request: web.Request) -> web.StreamResponse:
        """Authorize a request of the console, whose page sends a cookie; requests from pages of other sites are
        refused.
        """
        console = self.console
        assert console is not None  # its routes are there only where it is
        if self.starting:
            return self._not_yet()
        operator = self._operator(request)
        if operator.may == "":
            operator = console.operator(request) or operator
        OPERATOR.set(operator)
        if (needed is not None or request.path.startswith(f"{CONSOLE}/of/")) and (no := console.refused(request)):
            self._count("other_site")
            return no
        try:
            if needed is None or (request.path == EVENTS and operator.may_do(needed)):
                return await handler(request)
            return await self._given(handler, needed, request, operator)
        except ActError as error:
            return _json({"error": str(error)}, error.status)

    def _not_yet(self) -> web.Response:
        """The answer to what can only be shown once the tier has started."""
        return _json({"error": "starting" if self._operators.asks else self.starting}, 503)

    def _operator(self, request: web.Request) -> Operator:
        transport = request.transport
        session = transport.get_extra_info("ssl_object") if transport is not None else None
        certificate = session.getpeercert(binary_form=True) if session is not None else None
        return self._operators.of(request.headers.get("Authorization"), certificate)

    async def _given(
        self, handler: Handler, needed: Right, request: web.Request, operator: Operator
    ) -> web.StreamResponse:
        if not operator.may_do(needed):
            return self._refusal(operator, needed)
        if self._under_way >= REQUESTS_MAX:
            self._count("too_many_requests")
            return _json({"error": "too many requests at this moment: ask again shortly"}, 503)
        self._under_way += 1
        try:
            if needed == "act":
                self._log.warning("operator action", operator=operator.name, what=request.path[:128])
                if self._acted is not None:
                    self._acted(operator.name, request.path)
            return await handler(request)
        except TimeoutError:
            self._count("too_slow")
            return _json({"error": f"the body was not there within {BODY_S:g} s"}, 408)
        finally:
            self._under_way -= 1

    def _refusal(self, operator: Operator, needed: Right) -> web.Response:
        if operator.may != "":
            self._count("right")
            text = f"{operator.name} may {operator.may} here, and this needs the right to {needed}"
            return _json({"error": f"{text}; see `admin` in the balancer's configuration"}, 403)
        self._count("unknown")
        text = "this admin port asks who comes: send `Authorization: Bearer TOKEN` with a token that it knows"
        return _json({"error": text}, 401, _CHALLENGE)

    def _count(self, reason: str) -> None:
        self._refused[reason] += 1

    async def _show_metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def _show_alive(self, _request: web.Request) -> web.Response:
        return web.Response(text="alive\n")

    async def _show_ready(self, _request: web.Request) -> web.Response:
        # The details name hosts, which not every caller may see.
        ready = not self.starting and self._tier_admin.ready()
        notice = "" if self._operators.asks else self.starting or self._tier_admin.notice()
        text = "ready\n" if ready else "not ready\n"
        return web.Response(text=f"{text}{notice}\n" if notice else text, status=200 if ready else 503)

    async def _show_status(self, _request: web.Request) -> web.Response:
        return _json(self._tier_admin.status())

    async def _show_scaling(self, request: web.Request) -> web.Response:
        region, model = request.match_info.get("region"), request.query.get("model")
        desired = self._tier_admin.scaling()
        if model is None:
            return _json({"desired_replicas": desired if region is None else desired.get(region, {})})
        value = external.one(desired, region, model)
        if value is None:
            in_region = "" if region is None else f" in region {region[:128]!r}"
            return _json({"error": f"nothing is known yet of model {model[:128]!r}{in_region}; see /scaling"}, 404)
        return _json({"value": value})

    async def _show_external(self, path: str, request: web.Request) -> web.Response:
        if path != external.METRIC:
            return _json(external.RESOURCES)
        if request.match_info["metric"] != external.NAME:
            return _json(external.status(404, f"no such metric; there is {external.NAME}"), 404)
        try:
            wanted = external.selector(request.query.get("labelSelector", ""))
        except ValueError as error:
            return _json(external.status(400, str(error)), 400)
        return _json(external.values(self._tier_admin.scaling(), wanted, wall()))

    async def _show_law(self, _request: web.Request) -> web.Response:
        return _json(self._tier_admin.law())

    async def _show_topology(self, _request: web.Request) -> web.Response:
        return _json(self._tier_admin.topology())

    async def _show_config(self, _request: web.Request) -> web.Response:
        return _json(self._config())

    async def _list_decisions(self, request: web.Request) -> web.Response:
        try:
            most = min(int(request.query.get("most", DECISIONS_LISTED_MAX)), DECISIONS_LISTED_MAX)
        except ValueError:
            return _json({"error": "most: give a whole number"}, 400)
        return _json({"decisions": self._decisions.last(max(0, most))})

    async def _set_log_level(self, request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(BODY_S):
                body = await request.content.read(LOG_LEVEL_BYTES_MAX)
            level = msgspec.json.decode(body, type=dict[str, str]).get("level", "")
            logs.set_level(level)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return _json({"error": 'give a JSON object such as {"level": "debug"}'}, 400)
        except logs.LogError as error:
            return _json({"error": str(error)}, 400)
        return _json({"level": level.lower()})

    async def _show_decision(self, request: web.Request) -> web.Response:
        record = self._decisions.get(request.match_info["id"])
        if record is None:
            return _json({"error": "no such decision here: unknown, too long ago, or kept from here by law"}, 404)
        return _json(record)

    async def _explain(self, request: web.Request) -> web.Response:
        if self._explaining >= EXPLAINS_MAX:
            return _json({"error": "other questions are being answered: try again shortly"}, 503)
        self._explaining += 1
        try:
            async with asyncio.timeout(BODY_S):
                body = await request.read()
            return _json(await self._explained(body))
        except (msgspec.DecodeError, UnicodeDecodeError, ExplainError) as error:
            return _json({"error": str(error)}, 400)
        except RecursionError:
            return _json({"error": "the question is nested too deeply"}, 400)
        finally:
            self._explaining -= 1

    async def _explained(self, body: bytes) -> dict[str, Any]:
        question = msgspec.json.decode(body, type=Question)
        async with self._one:
            request = await asyncio.to_thread(self._tier_admin.compose, question)
            return self._tier_admin.explain(request, question.drained)

    async def explained(self, body: bytes) -> dict[str, Any]:
        """Answer a question that the console asks. Raises ActError."""
        if self._explaining >= EXPLAINS_MAX:
            raise ActError("other questions are being answered: try again shortly", 503)
        self._explaining += 1
        try:
            return await self._explained(body)
        except (msgspec.DecodeError, UnicodeDecodeError, ExplainError) as error:
            raise ActError(str(error)) from None
        except RecursionError:
            raise ActError("the question is nested too deeply") from None
        finally:
            self._explaining -= 1

    def show(self, law: Callable[[], Law], store: Store) -> None:
        """Have a console, of this balancer alone. Before `open`."""
        source = BalancerSource(self._tier_admin.status, self._metrics, self._decisions, law, store, self.explained)
        self.have(source)
        assert self.console is not None  # made just now
        self._decisions.narrowed.append(self.console.forget)

    def have(self, source: Source) -> None:
        """Have a console of this source. Before `open`."""
        self.console = Console(source, self._operators, secure=self._tls is not None)
        self._metrics.gauge("console_viewers", "Who looks at the console now.", lambda: float(self._viewers()))

    def _viewers(self) -> int:
        return self.console.viewers if self.console is not None else 0


class _Bounded:
    """A protocol factory around aiohttp's own: it bounds the number of connections, and the time until a new one sends
    a request.

    aiohttp bounds neither. After its first request, a connection is bounded by IDLE_S. If there are too many, a
    connection without a request is closed for a new one; otherwise silent connections could keep out liveness probes.
    """

    def __init__(self, refused: Callable[[str], None]) -> None:
        self.make: web.Server | None = None  # once there is one: it is made of what asks us
        self._refused = refused
        # Those that have asked for nothing yet, for HEAD_S at most, and since when; the oldest first.
        self._silent: dict[asyncio.Protocol, float] = {}
        self._busy: set[asyncio.Protocol] = set()  # that are being answered

    def __call__(self) -> asyncio.Protocol:
        """The protocol of a connection just accepted."""
        assert self.make is not None  # set before any connection is accepted
        now = asyncio.get_running_loop().time()
        if len(there := self.make.connections) >= CONNECTIONS_MAX:
            self._refused("too_many_connections")
            if not self._give_way(there, now):
                return _Unwanted()
        protocol = self.make()
        self._silent[protocol] = now
        asyncio.get_running_loop().call_later(HEAD_S, self._look, protocol)
        return protocol

    @web.middleware
    async def respond(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The head of a request was received."""
        self._silent.pop(request.protocol, None)
        self._busy.add(request.protocol)
        try:
            return await handler(request)
        finally:
            self._busy.discard(request.protocol)

    def _give_way(self, there: list[web.RequestHandler], now: float) -> bool:
        """Close the oldest that asks for nothing, if one had its time for it."""
        for one in there:
            transport = one.transport
            if one in self._busy or transport is None or transport.is_closing():
                continue
            if now - self._silent.get(one, -inf) >= GIVES_WAY_S:
                transport.abort()
                return True
        return False

    def _look(self, protocol: web.RequestHandler) -> None:
        if self._silent.pop(protocol, None) is not None and protocol.transport is not None:
            self._refused("too_slow")
            protocol.transport.close()


class _Unwanted(asyncio.Protocol):
    """A connection above the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def _json(data: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    body = msgspec.json.encode(data)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)
