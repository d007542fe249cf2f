"""Hosts emulated replicas in one process until it is stopped. The only module here with sockets and signals.

Invariant: either every replica listens and the ready line is printed, or none does and one line says why.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import uvloop
from aiohttp import web

from farhop_lab.engine.core.sequence import TextModel
from farhop_lab.engine.formats import dcgm
from farhop_lab.engine.server import Replica
from farhop_lab.engine.settings import EngineSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from opentelemetry.trace import Tracer

    from farhop_lab.engine.core.faults import Faults
    from farhop_lab.engine.core.scheduler import EngineCore
    from farhop_lab.engine.kv_publisher import KvPublisher
    from farhop_lab.engine.tokens import EngineTokenizer

__all__ = ["EngineSettings", "host", "run"]

# Either names a collector of spans, by the OpenTelemetry specification.
OTLP_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
STOP_GRACE_S = 0.5  # for answers under way; a GPU that is switched off does not finish them either


class ListenError(Exception):
    """A port could not be taken; the text says which and why."""


class TokenizerError(Exception):
    """A tokenizer cannot be used; the text says why."""


@asynccontextmanager
async def host(settings: EngineSettings, tracer: Tracer | None = None) -> AsyncIterator[list[str]]:
    """Serve every replica of `settings` on the running loop; yields their `host:port`.

    ListenError if a port is taken, TokenizerError.
    """
    text_model = TextModel(settings.model, settings.seed, settings.mean_output_tokens, settings.wide)
    async with AsyncExitStack() as stack:
        addresses: list[str] = []
        gpus: list[tuple[EngineCore, Faults]] = []
        tokenizer = _tokenizer(settings)
        for index, port in enumerate(settings.listen_ports()):
            publisher = make_publisher(settings, index)
            replica = Replica(
                settings.gpu(), text_model, time.monotonic, tracer=tracer, publisher=publisher, tokenizer=tokenizer,
                adapters=settings.loras(), link=settings.link(), mode=settings.disaggregation_mode,
                kv_wait_s=settings.kv_wait_s / settings.speedup,
            )  # fmt: skip
            stack.callback(replica.close)
            gpus.append((replica.core, replica.faults))
            addresses.append(await _listen(stack, replica.application(), settings.host, port))
            if replica.rooms is not None and replica.rooms.mode == "prefill":
                await _listen(stack, replica.rooms.application(), settings.host, settings.bootstrap_port + index)
        if settings.dcgm_port is not None:
            exporter = web.Application()
            exporter.router.add_get("/metrics", partial(_exported, gpus))
            await _listen(stack, exporter, settings.host, settings.dcgm_port)
        yield addresses


async def _exported(gpus: list[tuple[EngineCore, Faults]], _: web.Request) -> web.Response:
    return web.Response(body=dcgm.page(gpus), content_type="text/plain")


async def _listen(stack: AsyncExitStack, application: web.Application, host: str, port: int) -> str:
    """Serve until the stack unwinds; returns `host:port`. ListenError if the port is taken."""
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=STOP_GRACE_S)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    try:
        await web.TCPSite(runner, host, port, backlog=1024).start()
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise ListenError(f"port {port}: cannot listen on {host}:{port}: {why}") from None
    return f"{host}:{runner.addresses[0][1]}"


def _tokenizer(settings: EngineSettings) -> EngineTokenizer | None:
    if settings.tokenizer is None:
        return None
    try:
        from farhop_lab.engine.tokens import EngineTokenizer  # an extra, and slow to import: only when wanted
    except ImportError:
        raise TokenizerError("tokenizer: needs the extra `tokenizer`: pip install 'farhop[tokenizer]'") from None
    try:
        return EngineTokenizer(settings.tokenizer)
    except ValueError as error:
        raise TokenizerError(str(error)) from None


def make_publisher(settings: EngineSettings, index: int) -> KvPublisher | None:
    ports = settings.kv_ports(index)
    if ports is None:
        return None
    from farhop_lab.engine.kv_publisher import KvPublisher  # as above

    try:
        return KvPublisher(settings.host, *ports, settings.kv_events_schema)
    except OSError as error:
        raise ListenError(f"KV events: cannot publish on {error.filename}: {error.strerror}") from None


def run(settings: EngineSettings) -> None:
    """Serve until SIGTERM or SIGINT. SystemExit(2), after one line on stderr, if a port is taken."""
    tracer, shut_down = _tracing()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, tracer))
    except TokenizerError as error:
        print(f"engine: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except ListenError as error:
        print(f"engine: {error}; stop what holds it or choose another port", file=sys.stderr)
        raise SystemExit(2) from None
    finally:
        shut_down()


async def _serve(settings: EngineSettings, tracer: Tracer | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with host(settings, tracer) as addresses:
        print(f"engine: serving {settings.model} on {' '.join(addresses)}", flush=True)
        gc.freeze()  # what start-up made stays: the collector need not walk it again
        await stop.wait()


def _tracing() -> tuple[Tracer | None, Callable[[], None]]:
    """The tracer, if the environment names a collector, and how to flush it at the end."""
    if not any(os.environ.get(name) for name in OTLP_VARIABLES):
        return None, lambda: None
    from farhop_lab.engine.tracing import provider  # OpenTelemetry is slow to import: only when wanted

    made = provider()
    return made.get_tracer("farhop_lab.engine"), made.shutdown
