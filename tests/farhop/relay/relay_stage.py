"""A relay on real sockets: a scripted machine in its midst, a scripted upstream behind it, raw clients before it."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from relay_wire import Line, Message, Upstream

from farhop.balance import machine, outcome
from farhop.balance.bounds import ByteBudget
from farhop.balance.machine import Address, Command, Event, Request
from farhop.balance.outcome import Outcome
from farhop.relay import answers
from farhop.relay.formats.transcript import AnswerChain
from farhop.relay.http.connection import ClientLimits
from farhop.relay.http.exchange import Exchange
from farhop.relay.http.listener import Listener
from farhop.relay.relay import Relay
from farhop.relay.upstream.pool import Pool, UpstreamLimits


def no_tls() -> ssl.SSLContext:
    raise AssertionError("nobody asked for TLS")


class Poked(Event, frozen=True):
    """The world moved: the machine answers with these commands."""

    commands: list[Command]


class ScriptedFlow:
    """Forwards to one address after another; answers when there are no more. Speaks the machine's real words."""

    def __init__(self, addresses: list[Address]) -> None:
        self.addresses = addresses
        self.events: list[Event] = []
        self.live: dict[str, int] = {}
        self.started: set[str] = set()
        self.arrive: Callable[[Request, float], list[Command]] | None = None
        self.raise_on: type[Event] | None = None

    def event_names(self) -> list[str]:
        return [type(event).__name__ for event in self.events]

    def handle(self, event: Event, now: float) -> list[Command]:
        self.events.append(event)
        if self.raise_on is type(event):
            raise RuntimeError("the machine broke")
        match event:
            case machine.RequestArrived(request):
                self.live[request.id] = 0
                return self.arrive(request, now) if self.arrive is not None else self.forward_next(request.id)
            case machine.AttemptBegan(id=name):
                self.started.add(name)
            case machine.AttemptEnded(id=name) | machine.ClientLeft(id=name):
                self.live.pop(name, None)
            case (
                machine.AttemptFailed(id=name, outcome=reason)
                | machine.AttemptRefused(id=name, outcome=reason)
                | machine.PrefillFailed(id=name, outcome=reason)
            ):
                if name in self.started or not reason.retryable or self.live[name] >= len(self.addresses):
                    return [self.refuse(name, reason)]
                return self.forward_next(name)
            case Poked(commands):
                return commands
            case machine.TimerFired(id=name):
                return [self.refuse(name, outcome.DEADLINE)]
        return []

    def refuse(self, name: str, reason: Outcome) -> machine.Answer:
        self.live.pop(name, None)
        return machine.Answer(name, reason, f"it ended: {reason.reason}", retry_after_s=2.0, wait_ms=1500.0)

    def forward_next(self, name: str) -> list[Command]:
        number = self.live[name]
        self.live[name] = number + 1
        return [machine.Forward(name, number + 1, f"target-{number}", self.addresses[number], 1.0)]


@dataclass
class ScriptedTier:
    """Writes two headers and keeps what it is told."""

    faults: list[Exception] = field(default_factory=list)
    attempts: list[tuple[int, str]] = field(default_factory=list)
    concluded_with: list[tuple[str, int, machine.Usage | None]] = field(default_factory=list)
    traces: list[str] = field(default_factory=list)
    unsalted: list[str] = field(default_factory=list)
    break_headers: bool = False
    tail: bytes = b""
    region: bytes = b""  # the line that names it, where the tier above is to believe that it is a region
    forwards: int = 0

    def upstream_headers(self, active: Any) -> bytes:
        if self.break_headers:
            raise RuntimeError("the tier broke")
        return b"authorization: Bearer engine-key\r\n"

    def answer_headers(self, active: Any) -> bytes:
        return self.region + b"x-farhop-decision: d1\r\n"

    def answer_tail(self, active: Any) -> bytes:
        if self.tail == b"broken":
            raise RuntimeError("the tier broke")
        return self.tail

    def redirect_url(self, active: Any, base: str) -> str:
        return f"{base}{active.exchange.head.target.decode()}?token=t-{active.forward.target}"

    def forwarded(self, active: Any) -> None:
        self.forwards += 1

    def attempt_over(self, active: Any, attempt: Any, reason: Outcome) -> None:
        self.attempts.append((attempt.number, reason.reason))

    def concluded(self, active: Any, reason: Outcome, status: int, usage: machine.Usage | None) -> None:
        self.concluded_with.append((reason.reason, status, usage))

    def replaced(self, active: Any, attempt: Any, trace: str) -> None:
        self.traces.append(trace)

    def salt_unknown(self, active: Any, attempt: Any) -> None:
        self.unsalted.append(attempt.target)

    def fault(self, active: Any, error: Exception) -> None:
        self.faults.append(error)


class ScriptedHandler:
    """Lets everything pass but `/refused`; answers `/here` itself; everything else is relayed."""

    def __init__(self) -> None:
        self.relay: Relay | None = None
        self.bodies: list[bytes] = []
        self.exchanges: list[Exchange] = []
        self.abandoned: list[tuple[str, int]] = []
        self.hide_usage = False
        self.answer_chain: AnswerChain | None = None
        self.break_at = ""
        self.streams = False  # whether requests ask for a stream

    def head(self, exchange: Exchange) -> answers.Reply | None:
        if self.break_at == "head":
            raise RuntimeError("the handler broke")
        if exchange.head.path == b"/refused":
            return answers.refusal(outcome.PATH_NOT_ALLOWED, "not here")
        exchange.on_abandoned = lambda reason, status: self.abandoned.append((reason.reason, status))
        return None

    def arrived(self, exchange: Exchange) -> None:
        if self.break_at == "arrived":
            raise RuntimeError("the handler broke")
        self.exchanges.append(exchange)
        self.bodies.append(exchange.body)
        if exchange.head.path == b"/here":
            exchange.reply(answers.Reply(200, b'{"here":%d}' % len(self.bodies), outcome.SERVED))
            return
        assert self.relay is not None
        request = Request(
            id=f"r{len(self.bodies)}",
            tenant="acme",
            model="m",
            prompt_bytes=len(exchange.body),
            body_bytes=len(exchange.body),
            chain=(),
            deadline=time.monotonic() + 60.0,
            stream=self.streams,
        )
        self.relay.start(
            exchange, request, exchange.body, hide_usage=self.hide_usage, context=None, answer_chain=self.answer_chain
        )


class Stage:
    """All of it. Leaving it checks that nothing is left behind."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.upstream = Upstream()
        self.budget = ByteBudget(settings.get("budget_bytes", 1 << 30))
        self.tier, self.handler = ScriptedTier(), ScriptedHandler()
        self.errors: list[dict[str, Any]] = []
        self.expected_errors = 0
        self.edges_count = True  # False where a test breaks the machine or the tier itself
        self.clients: list[Line] = []
        self.port = 0

    async def __aenter__(self) -> Stage:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: self.errors.append(context))
        found = self.settings
        await self.upstream.open(found.get("upstream_tls"))
        self.flow = ScriptedFlow([self.upstream.address])
        self.troubles: list[str] = []
        believing = found.get("believing", no_tls)
        self.pool = Pool(
            found.get("upstream_limits", UpstreamLimits()), believing, lambda _where, why: self.troubles.append(why)
        )
        self.relay = Relay(
            b"tier", self.flow, self.tier, self.pool, time.monotonic, upstream_is_tier=found.get("over_tier", False)
        )
        self.handler.relay = self.relay
        self.listener = Listener(
            "test", self.handler, found.get("client_limits", ClientLimits()), self.budget, found.get("slots"),
            is_hop=found.get("is_hop", False), tls=found.get("tls"),
        )  # fmt: skip
        self.port = await self.listener.open("127.0.0.1", 0)
        return self

    async def client(self, context: ssl.SSLContext | None = None) -> Line:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20, ssl=context)
        line = Line(reader, writer)
        self.clients.append(line)
        return line

    async def ask(self, request: bytes) -> Message:
        """One request on a connection of its own."""
        line = await self.client()
        await line.send(request)
        return await line.read()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for line in self.clients:
            line.abort()
        await self.listener.close(2.0)
        await self.relay.close()
        await self.upstream.close()
        await asyncio.sleep(0)
        if kind is not None:
            print("faults:", self.tier.faults, "errors:", self.errors)  # shown with the failure
            return
        assert self.budget.used_bytes == 0
        assert self.relay.under_way == 0
        assert self.pool.connections == 0
        assert not self.pool._at
        assert self.listener.connections == 0
        assert len(self.errors) == self.expected_errors, self.errors
        if self.edges_count:
            assert len(self.tier.attempts) == self.tier.forwards
            assert not self.flow.live, "the machine was not told of every ending"
            assert len(self.tier.concluded_with) == self.flow.event_names().count("RequestArrived")
