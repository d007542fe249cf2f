"""The answer cache in operation: while any route uses it, it is between ingress and relay, and answers a request from a
stored answer, from one under way, or by sending it upstream and recording the answer.

global_lb.routing.answer_cache decides; relay.upstream.recording records an answer and serves it to clients. Each
client's request is accounted for once, separately; the tokens of an answer are those of the request that was sent.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from farhop.balance import outcome
from farhop.relay import answers
from farhop.relay.active import ActiveRequest
from farhop.relay.formats import cacheable
from farhop.relay.formats.prompt import BodyError
from farhop.relay.http.head import EXPLAIN
from farhop.relay.upstream.recording import AnswerRecording, Reader, SharedExchange, complete_recording, sliced
from farhop.service.admission.ingress import within_arrival_law
from farhop.service.observability.request_telemetry import CacheUse
from global_lb.routing.answer_cache import Alone, AnswerCache, Follow, Hit, Lead, StoredAnswer

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.balance.machine import Event, Request
    from farhop.balance.outcome import Outcome
    from farhop.relay.formats.cacheable import CacheLookup
    from farhop.relay.formats.transcript import AnswerChain
    from farhop.relay.http.exchange import Exchange
    from farhop.relay.relay import Relay
    from farhop.service.admission.ingress import Ingress
    from farhop.service.observability.request_telemetry import RequestContext
    from farhop.telemetry.metrics import TierMetrics
    from global_lb.app.serve import GlobalTier
    from global_lb.routing.flow import GlobalFlow
    from global_lb.routing.policy import RouteConfig, RouteScope
    from topology.law import Law

_LATE = "the request's deadline passed while another client's same request was being answered"


@dataclass(slots=True)
class _Client:
    """A client request that reads a recording, and what is needed to send it upstream on its own. `age_s`: the age of a
    stored answer.
    """

    active: ActiveRequest
    body: bytes
    answer_chain: AnswerChain | None
    leads: bool = False
    leader: ActiveRequest | None = None  # the request whose answer it shares, once that began
    age_s: float | None = None
    timer: asyncio.TimerHandle | None = None


class AnswerCacheRelay:
    """See the module's docstring. It is the ingress's relay while any route has it, and costs nothing while none
    has.
    """

    def __init__(
        self, relay: Relay, ingress: Ingress, *, flow: GlobalFlow, tier: GlobalTier, capacity_bytes: int,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._relay, self._ingress, self._flow, self._tier, self._clock = relay, ingress, flow, tier, clock
        self.cache: AnswerCache[SharedExchange] = AnswerCache(capacity_bytes, flow.config.region)
        self._loop = asyncio.get_running_loop()
        self._repeating: dict[
            RouteScope, tuple[float, bool]
        ] = {}  # by route in force, for how long, and whether shared
        flow.routes.changed.append(self._routes_changed)
        flow.law_changes.append(self._law_changed)
        self._routes_changed()

    def _routes_changed(self) -> None:
        before, self._repeating = self._repeating, self._flow.routes.repeating
        self._ingress.relay = self if self._repeating else self._relay
        if before != self._repeating:
            self.cache.store.clear()  # so an operator can discard all stored answers

    def _law_changed(self) -> None:
        """Another law may be in force: drop the answers stored under the one before."""
        self.cache.under(self._flow.law)

    def observe(self, metrics: TierMetrics) -> None:
        """Export the state as metrics."""
        cache, store = self.cache, self.cache.store
        metrics.counter(
            "answer_cache_requests", "Requests whose route gives answers again, by what became of them and why.",
            lambda: dict(cache.outcomes), ("outcome", "reason"),
        )  # fmt: skip
        metrics.counter(
            "answer_cache_saved_tokens", "Tokens of answers given again, which no engine computed again.",
            lambda: dict(cache.saved_tokens), "kind",
        )  # fmt: skip
        metrics.gauge(
            "answer_cache_bytes", "Bytes of answers kept, and of answers being recorded.",
            lambda: {"kept": float(store.stored), "recorded": float(store.taken)}, "what",
        )  # fmt: skip
        metrics.gauge("answer_cache_bytes_max", "Bytes that all of these may take.", lambda: float(store.capacity))
        metrics.gauge("answer_cache_answers", "Answers kept.", lambda: float(len(store)))

    # -- ingress.RequestCarrier

    def holds(self, request_id: str) -> bool:
        """Whether a request is here and was sent nowhere yet."""
        return self._relay.holds(request_id)

    def react(self, event: Event, now: float | None = None) -> None:
        """Pass an event to the state machine, and execute its commands."""
        self._relay.react(event, now)

    def start(
        self,
        exchange: Exchange,
        request: Request,
        body: bytes,
        *,
        hide_usage: bool,
        context: RequestContext,
        arrived_at: float = 0.0,
        answer_chain: AnswerChain | None = None,
        geo: str = "",
    ) -> None:
        """Take a request that was read completely and authenticated, as relay.Relay does."""
        flow = self._flow
        route = flow.routes.of(request.tenant, request.model).config
        if not route.reuses_answers:
            self._relay.start(
                exchange, request, body, hide_usage=hide_usage, context=context, arrived_at=arrived_at,
                answer_chain=answer_chain, geo=geo,
            )  # fmt: skip
            return
        now = self._clock()
        request = replace(request, fallbacks=())  # requests for this model may get its answer, too
        active = ActiveRequest(
            self._relay, exchange, request, b"", hide_usage, context, arrived_at or now, answer_chain, geo
        )
        client = _Client(active, body, answer_chain)
        try:
            asked = self._asked(exchange, request, body, context)
        except BodyError as error:
            reply = answers.refusal(error.outcome, error.detail, param=error.param)
            self._tier.telemetry.turned_away(context, reply.outcome, reply.status)
            exchange.reply(reply)
            return
        if isinstance(asked, str):
            self._alone(client, asked)
            return
        self._reuse(client, asked, route, now)

    def _reuse(self, client: _Client, asked: CacheLookup, route: RouteConfig, now: float) -> None:
        """Give the client a stored answer, let it share one that is under way, lead one, or send it alone."""
        request, context = client.active.request, client.active.context
        assert context.caller is not None  # its body was read
        decide = partial(
            self.cache.decide, request, asked.key, route, self._flow.law, now, key_id=context.caller.key_id,
            renew=asked.renew, age_s_max=asked.age_s_max,
        )  # fmt: skip
        plan = decide()
        if isinstance(plan, Hit):
            recording = self._recording(plan.answer, request, context)
            if recording is not None:
                self._give(client, plan, recording)
                return
            plan = decide(gives=False)
        if isinstance(plan, Follow) and not plan.leader.joinable:
            plan = Lead(plan.share, keeps=False)
        match plan:
            case Follow(leader):
                self._follow(client, leader)
            case Lead():
                self._lead(client, asked, plan, self._flow.law)
            case Alone(why):
                self._alone(client, why)

    @staticmethod
    def _asked(exchange: Exchange, request: Request, body: bytes, context: RequestContext) -> CacheLookup | str:
        head = exchange.head
        if head.known.get(EXPLAIN) == b"1":
            return "receipt"  # it asks for its own route
        assert context.kind is not None  # its body was read
        named = head.known.get(cacheable.KEY_HEADER)
        return cacheable.asked(
            context.kind, head.target, head.onward, body, request.version, named, stream=request.stream
        )

    @staticmethod
    def _recording(stored: StoredAnswer, request: Request, context: RequestContext) -> AnswerRecording | None:
        """The stored answer in the form that the request asks for; None if it cannot be derived with certainty."""
        if stored.stream == request.stream:
            return complete_recording(stored.lines, stored.body, stored.usage_event, stored.end, streams=stored.stream)
        assert context.kind is not None
        if stored.stream:
            lines = stored.lines.replace(b"text/event-stream", b"application/json")
            document = cacheable.whole(context.kind, b"".join((*stored.body, stored.usage_event, stored.end)))
            return None if document is None else complete_recording(lines, sliced(document), b"", b"", streams=False)
        lines = stored.lines.replace(b"application/json", b"text/event-stream")
        stream = cacheable.stream(context.kind, b"".join(stored.body))
        return None if stream is None else complete_recording(lines, sliced(stream[0]), *stream[1:], streams=True)

    # -- four ways

    def _alone(self, client: _Client, why: str) -> None:
        active = client.active
        active.context.given = CacheUse("bypass", why)
        self.cache.counted("bypass", why)
        self._send(client, active.exchange)

    def _give(self, client: _Client, hit: Hit, recording: AnswerRecording) -> None:
        """Answer a client from a stored answer."""
        stored, active = hit.answer, client.active
        client.age_s = hit.age_s
        active.context.given = CacheUse("hit", "", stored.region, stored.decision, hit.age_s, stored.usage)
        active.version = _version(stored.lines)
        self.cache.counted("hit", "", stored.usage)
        active.exchange.body = client.body = b""
        active.exchange.release_body()
        self._reader(client).play(recording)

    def _follow(self, client: _Client, shared: SharedExchange) -> None:
        active, leads = client.active, shared.context
        active.context.given = CacheUse("shared", "", decision=leads.decision_id)
        active.exchange.body = b""
        left_s = active.request.deadline - self._clock()
        reader = self._reader(client)
        client.timer = self._loop.call_later(max(0.0, left_s), self._late, reader)
        shared.join(reader)

    def _lead(self, client: _Client, asked: CacheLookup, plan: Lead, law: Law) -> None:
        """Send the request upstream, and record the answer."""
        active, cache = client.active, self.cache
        request, exchange = active.request, active.exchange
        outcome, why = ("bypass", "no_cache") if asked.renew else ("miss", "")
        active.context.given = CacheUse(outcome, why)
        cache.counted(outcome, why)
        client.leads, exchange.body = True, b""
        shared = SharedExchange(self._reader(client), cache.store, cache.store.largest, stream=request.stream)
        if plan.keeps:
            shared.recorded = partial(self._recorded, shared, client, asked.key, law)
        if plan.share is not None:
            cache.leads(plan.share, shared, request.deadline)
            shared.on_closed = partial(cache.stop_sharing, plan.share, shared)
        self._send(client, shared)
        if isinstance(shared.callbacks, ActiveRequest):
            client.active = shared.callbacks  # as the relay has it

    def _send(self, client: _Client, exchange: Exchange) -> None:
        active, body = client.active, client.body
        shares = isinstance(exchange, SharedExchange)
        client.body = b""
        self._relay.start(
            exchange,
            active.request,
            body,
            hide_usage=active.hide_usage and not shares,  # each reader hides it from its own client
            context=active.context,
            arrived_at=active.arrived_at,
            answer_chain=client.answer_chain,
            geo=active.geo,
        )

    def _reader(self, client: _Client) -> Reader:
        return Reader(self, client.active.exchange, wants_usage=not client.active.hide_usage, context=client)

    def _recorded(self, shared: SharedExchange, client: _Client, key: bytes, law: Law) -> None:
        """An answer is complete: it is kept if it is good and was never continued elsewhere."""
        active, recording = client.active, shared.recording
        context: RequestContext = active.context
        forward, attempt, progress = active.forward, active.attempt, active.progress
        resumed = progress is not None and progress.resumed
        if forward is None or attempt is None or resumed or context.kind is None:
            return
        if not cacheable.complete(context.kind, b"".join(recording.pieces), stream=active.request.stream):
            return
        at = recording.end if recording.usage_at is None else recording.usage_at
        body, usage_event, end = (
            b"".join(part)
            for part in (recording.pieces[:at], recording.pieces[at : at + 1], recording.pieces[at + 1 :])
        )
        stored = StoredAnswer(
            active.request.stream, recording.lines, sliced(body), usage_event, end, forward.target, context.decision_id,
            self._clock(), attempt.usage,
        )  # fmt: skip
        self.cache.keep(active.request.tenant, key, stored, law, self._flow.law)

    # -- recording.ReaderOwner

    def head(self, reader: Reader, recording: AnswerRecording) -> bytes:
        """The header lines that this client's answer begins with."""
        client = _client(reader)
        active = client.active
        if client.leads:
            assert reader.shared is not None  # it has just begun there
            return reader.shared.leader_lines
        _disarm(client)
        active.began_at, active.status, active.streams = self._clock(), 200, active.request.stream
        if reader.shared is not None:
            self._reads_along(client, reader.shared)
            client.body = b""
        age = b"" if client.age_s is None else b"age: %d\r\n" % client.age_s
        return recording.lines + age + self._tier.answer_headers(active)

    def _reads_along(self, client: _Client, shared: SharedExchange) -> None:
        """Where the answer comes from is known now."""
        context: RequestContext = client.active.context
        leads = client.leader = _client(shared.leader).active
        region = leads.forward.target if leads.forward is not None else ""
        context.given = CacheUse("shared", "", region, leads.context.decision_id)
        client.active.version = leads.version

    def _read_along(self, client: _Client, leads: ActiveRequest, reason: Outcome | None) -> None:
        """It has read all that it could: what that saved an engine is known if it was the complete answer."""
        context: RequestContext = client.active.context
        usage = leads.usage if leads.attempt is None else leads.attempt.usage
        saved = usage if reason is None else None
        if context.given is not None:
            context.given = replace(context.given, saved=saved)
        self.cache.counted("shared", "", saved)

    def over(self, reader: Reader, reason: Outcome | None) -> None:
        """A client's answer is complete, or ended before."""
        client = _client(reader)
        _disarm(client)
        if client.leads:
            return  # the relay says so, when upstream is over
        active = client.active
        if client.leader is not None:
            self._read_along(client, client.leader, reason)
        elif client.age_s is None:
            self.cache.counted("shared", "left")  # before there was anything to read
        status = 0 if reason is outcome.CLIENT_LEFT else active.status
        self._conclude(active, reason or outcome.SERVED, status)

    def reader_released(self, reader: Reader) -> None:
        """The answer that the reader waited for did not begin: route its request on its own, after the caller has
        finished.
        """
        _disarm(_client(reader))
        self._loop.call_soon(self._goes_alone, reader)

    def stopped(self, reader: Reader) -> None:
        """This process shuts down, and its drain time is over."""
        if reader.shared is not None:
            reader.shared.stop()
        if reader.exchange.callbacks is not reader:
            return  # it was informed with all the others
        if reader.begun:
            reader.cut(None, outcome.STOPPING)
        else:
            self._refuse(reader, outcome.STOPPING, answers.STOPPING_DETAIL, 1.0)

    def _goes_alone(self, reader: Reader) -> None:
        client, exchange = _client(reader), reader.exchange
        if exchange.callbacks is reader:
            exchange.callbacks = None
            active, arrival_law = client.active, client.active.context.arrival_law
            if arrival_law is not None and arrival_law is not self._flow.law:
                active.request = within_arrival_law(active.request, arrival_law, self._flow.law)
            try:
                self._alone(client, "leader_failed")
            except Exception as error:  # noqa: BLE001 - no caller would answer its client
                self._tier.fault(client.active, error)
                self._refuse(reader, outcome.INTERNAL, "the balancer failed on this request; it is logged", None)

    def _late(self, reader: Reader) -> None:
        if not reader.begun:
            self._refuse(reader, outcome.DEADLINE, _LATE, None)

    def _refuse(self, reader: Reader, reason: Outcome, detail: str, retry_after_s: float | None) -> None:
        client = _client(reader)
        active = client.active
        _disarm(client)
        if not client.leads:
            active.context.given = CacheUse("bypass", reason.reason)
            self.cache.counted("bypass", reason.reason)
        extra = self._tier.answer_headers(active)
        reader.leave()
        reply = answers.refusal(reason, detail, retry_after_s=retry_after_s, extra=extra)
        active.status = reply.status
        reader.exchange.reply(reply)
        self._conclude(active, reason, reply.status)

    def _conclude(self, active: ActiveRequest, reason: Outcome, status: int) -> None:
        try:
            self._tier.concluded(active, reason, status, None)
        except Exception as error:  # noqa: BLE001 - what is noted down must not decide whether a request is served
            self._tier.fault(active, error)


def _client(reader: Reader) -> _Client:
    client: Any = reader.context
    assert isinstance(client, _Client)  # we made it
    return client


def _disarm(client: _Client) -> None:
    if client.timer is not None:
        client.timer.cancel()
        client.timer = None


def _version(lines: bytes) -> bytes:
    """The model's version, from the head of an answer."""
    found = [line.partition(b":")[2].strip() for line in lines.split(b"\r\n") if line.startswith(b"x-farhop-version:")]
    return found[0] if found else b""
