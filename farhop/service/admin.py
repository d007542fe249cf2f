"""The admin port of a balancer: metrics, health, status, decisions, explain. For operators, never for clients.

Never on the data path, never authenticated (bind it to a private address), never shows a prompt or a key.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec
from aiohttp import web

from farhop.relay.formats import bodies, paths
from farhop.relay.http.listener import PortTakenError
from farhop.relay.http.tls import Handshakes
from farhop.telemetry.metrics import CONTENT_TYPE
from topology.law import narrowing

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from farhop.balance.machine import Request
    from farhop.relay.http.tls import ListenerTls
    from farhop.service.authenticator import KeyAuthenticator
    from farhop.service.decisions import Decisions
    from farhop.service.ingress import Ingress
    from farhop.telemetry.metrics import TierMetrics

EXPLAIN_BYTES_MAX = 16 * 1024 * 1024
EXPLAINS_MAX = 4  # at a time, one of which is worked on


class _Quiet(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's own log: what could not be read of a request, and why, would quote it."""

    def process(self, _msg: object, kwargs: MutableMapping[str, Any]) -> tuple[str, MutableMapping[str, Any]]:
        """Keep the kind of fault."""
        given = kwargs.pop("exc_info", None)
        error = given if isinstance(given, BaseException) else sys.exc_info()[1]
        return f"a request to the admin port failed: {type(error).__name__ if error is not None else 'malformed'}", {}

    def log(self, level: int, msg: object, *_args: object, **kwargs: Any) -> None:
        """Without what the line would be filled with."""
        super().log(level, msg, **kwargs)

    def exception(self, msg: object, *_args: object, **kwargs: Any) -> None:
        """As an error without its trace."""
        self.error(msg, **kwargs)


class ExplainError(Exception):
    """A question that cannot be answered; the text says why."""


class TierAdmin(Protocol):
    """What a tier tells an operator."""

    def ready(self) -> bool:
        """Whether work should be sent here."""

    def notice(self) -> str:
        """What is to be known beside that, in a line; "" if nothing is."""

    def status(self) -> dict[str, Any]:
        """The tier's state, JSON-ready."""

    def compose(self, question: Question) -> Request:
        """The request that a question stands for; in a thread, as it may take long. Raises ExplainError."""

    def explain(self, request: Request) -> dict[str, Any]:
        """Where it would go now."""

    def law(self) -> dict[str, Any]:
        """The law in force, whole: of keys the hashes."""


class Question(msgspec.Struct, frozen=True):
    """What `farhop explain` asks: an OpenAI body, for which path, for whom."""

    body: msgspec.Raw
    tenant: str
    path: str = "/v1/chat/completions"
    allow: tuple[str, ...] = ()


def composed(ingress: Ingress, authenticator: KeyAuthenticator, question: Question) -> Request:
    """The Request that a question stands for, made as the ingress makes it for a client. Raises ExplainError."""
    path = question.path.encode("utf-8", "replace")
    kind = paths.classify(b"POST", path)
    if not isinstance(kind, paths.Kind):
        raise ExplainError(kind.detail)
    try:
        caller = authenticator.trusted(question.tenant, narrowing(question.allow))
        body = bytes(question.body)
        return ingress.spelled(caller, kind, *ingress.compose(caller, kind, body, path), body)
    except bodies.BodyError as error:
        raise ExplainError(error.detail) from None


class AdminServer:
    """One admin server."""

    def __init__(
        self, tier_admin: TierAdmin, metrics: TierMetrics, decisions: Decisions, tls: ListenerTls | None = None
    ) -> None:
        self._tier_admin, self._metrics, self._decisions = tier_admin, metrics, decisions
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._tls = tls
        self._handshakes: Handshakes | None = None
        self._explaining, self._one = 0, asyncio.Semaphore(1)

    async def open(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises PortTakenError."""
        app = web.Application(client_max_size=EXPLAIN_BYTES_MAX)
        app.router.add_get("/metrics", self._show_metrics)
        app.router.add_get("/healthz", self._show_alive)
        app.router.add_get("/readyz", self._show_ready)
        app.router.add_get("/status", self._show_status)
        app.router.add_get("/law", self._show_law)
        app.router.add_get("/decisions/{id}", self._show_decision)
        app.router.add_post("/explain", self._explain)
        quiet = cast("logging.Logger", _Quiet(logging.getLogger("farhop.admin")))
        self._runner = web.AppRunner(app, access_log=None, logger=quiet, shutdown_timeout=1.0)
        await self._runner.setup()
        make = self._runner.server
        assert make is not None  # set up above
        self._handshakes = None if self._tls is None else Handshakes(make, self._tls)
        try:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(self._handshakes or make, host, port)
        except OSError as error:
            await self._runner.cleanup()
            reason = error.strerror or str(error)
            raise PortTakenError(f"admin: cannot listen on {host}:{port}: {reason}; choose another port") from None
        chosen: int = self._server.sockets[0].getsockname()[1]
        return chosen

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
        if self._handshakes is not None:
            await self._handshakes.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _show_metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def _show_alive(self, _request: web.Request) -> web.Response:
        return web.Response(text="alive\n")

    async def _show_ready(self, _request: web.Request) -> web.Response:
        ready, notice = self._tier_admin.ready(), self._tier_admin.notice()
        text = "ready\n" if ready else "not ready\n"
        return web.Response(text=f"{text}{notice}\n" if notice else text, status=200 if ready else 503)

    async def _show_status(self, _request: web.Request) -> web.Response:
        return _json(self._tier_admin.status())

    async def _show_law(self, _request: web.Request) -> web.Response:
        return _json(self._tier_admin.law())

    async def _show_decision(self, request: web.Request) -> web.Response:
        record = self._decisions.get(request.match_info["id"])
        if record is None:
            return _json({"error": "no such decision here: unknown, too long ago, or kept from here by law"}, 404)
        return _json(record)

    async def _explain(self, request: web.Request) -> web.Response:
        if self._explaining >= EXPLAINS_MAX:
            return _json({"error": "others ask at this moment: ask again shortly"}, 503)
        self._explaining += 1
        try:
            question = msgspec.json.decode(await request.read(), type=Question)
            async with self._one:
                return _json(self._tier_admin.explain(await asyncio.to_thread(self._tier_admin.compose, question)))
        except (msgspec.DecodeError, UnicodeDecodeError, ExplainError) as error:
            return _json({"error": str(error)}, 400)
        except RecursionError:
            return _json({"error": "the question is nested too deeply"}, 400)
        finally:
            self._explaining -= 1


def _json(data: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(data), status=status, content_type="application/json")
