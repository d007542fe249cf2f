"""One request that a gateway carries: to the ingress a client's connection, to the relay an upstream connection.

Invariants: messages are taken in the protocol's order alone, any other ends the stream; the head is answered when the
body is complete and the decision made, then the body, then the trailers; a body ends once; a stream's resources are
released when it ends, however it ends. Bounded like a listener's connections. Never chooses, never writes to a socket:
messages to be sent are in `outbox`, in order.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from farhop_wire import ext_proc_pb2 as wire

from farhop.balance import outcome
from farhop.relay import answers
from farhop.relay.http import head
from farhop.relay.http.exchange import Exchange
from farhop.relay.upstream.attempt import AttemptRun
from farhop.relay.upstream.engine_faults import FaultTap
from regional_lb.picker import messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.balance.bounds import ByteBudget, SlotLimit
    from farhop.balance.machine import Address
    from farhop.relay.active import ActiveRequest
    from farhop.relay.answers import Reply
    from farhop.relay.http.connection import ClientLimits
    from farhop.relay.http.exchange import RequestHandler
    from farhop.relay.relay import Relay

_BEGIN, _READING, _DECIDING, _SENT, _ANSWERING, _OVER = range(6)
_MODES = wire.BodySendMode
_DUPLEX, _NONE = _MODES.Value("FULL_DUPLEX_STREAMED"), _MODES.Value("NONE")
_LARGE_BYTES = 64 * 1024
_READING_TIMES = 5  # its own size: what reading a large body takes besides (farhop.relay.http.connection)


class StreamError(Exception):
    """The gateway violates the protocol. The text is for its operator."""


class Picker(Protocol):
    """The server's interface for its streams. `moved`: requests that went to a later endpoint of their list."""

    handler: RequestHandler
    limits: ClientLimits
    budget: ByteBudget
    requests: SlotLimit
    is_hop: bool
    moved: int

    def endpoints(self, active: ActiveRequest) -> list[tuple[str, Address]]:
        """The endpoints of a request: names and addresses, the chosen one first."""

    def refuse_mode(self, problem: str) -> None:
        """A gateway requests a mode that cannot be served."""

    def protocol_violated(self, problem: str) -> None:
        """A gateway violates the protocol."""

    def bug(self, error: Exception) -> None:
        """An internal error."""


class GatewayExchange(Exchange):
    """A request and its answer through a gateway."""

    __slots__ = ("stream",)

    def __init__(self, stream: GatewayStream, request_head: head.Head) -> None:
        super().__init__(stream, request_head)
        self.stream = stream

    def reply(self, reply: Reply) -> None:
        """Send a whole answer of our own."""
        self.started = True
        reply = answers.in_dialect(reply, answers.dialect(self.head.path))
        extra = b"content-type: " + reply.content_type + b"\r\n" + reply.extra
        if self.is_hop and reply.outcome is not outcome.SERVED:
            extra += answers.hop_outcome(reply.outcome, reply.wait_ms)
        self.stream.answer(reply.status, extra, reply.body, reply.outcome.reason)

    def begin(self, status: int, headers: bytes, length: int | None, first: bytes) -> None:
        """The answer's head is to become this one, and its body begins. The status is unchanged."""
        self.started = True
        if first and not self.sees_answer:  # the engine's body does not pass here: an error takes its place
            self.stream.answer(status, headers, first, outcome.ENGINE_ERROR.reason)
            return
        self.stream.begin(headers, length)
        if first:
            self.stream.chunk(first)

    def write(self, data: bytes) -> None:
        """Send more of the body."""
        self.stream.chunk(data)

    def finish(self) -> None:
        """The answer is complete."""
        self.stream.finish()

    def break_off(self, event: bytes | None) -> None:
        """The answer cannot be completed: the gateway breaks it. Its last message goes first."""
        if event is not None and self.sees_answer:
            self.stream.chunk(event)
        self.stream.abort("the answer cannot be completed")


class GatewayRun(AttemptRun):
    """An attempt that the gateway makes: the gateway gets the endpoint, and reports what comes back."""

    __slots__ = ("_places", "_relay", "_stream")

    def __init__(self, owner: Relay, active: ActiveRequest, number: int, now: float, stream: GatewayStream) -> None:
        super().__init__(owner, active, number, now)
        self._relay = owner
        self._stream = stream
        self._places: list[tuple[str, Address]] = []

    def start(self, address: Address) -> None:
        """Send the gateway the endpoint."""
        self._places = self._stream.picker.endpoints(self.active) or [(self.target, address)]
        if address in self.owner.unsalted_until:
            self._leave_out_salt(address)
        try:
            request_head, body = self.request(b"")
        except Exception as error:  # noqa: BLE001 - as in AttemptRun.connected: the tier's headers failed, this request is over
            self.owner.fault(self.active, error)
            return
        self._stream.send(self, ",".join(str(address) for _, address in self._places), request_head, body)

    def recall(self) -> None:
        """See active.Attempt. How much of it the engine has is unknown, so until its answer begins it counts as not
        all. What waits here is dropped, and with this answer the gateway drops the rest."""
        if not self._over and not (self.began and self._stream.is_sent):
            self._stream.withdraw()
            self._give_up(outcome.UNLAWFUL_HERE)

    def answer(self, answer: head.AnswerHead, served: str, details: str) -> None:
        """The answer's head has come, from the endpoint `served` ("": not reported)."""
        if details and details != messages.VIA_UPSTREAM and not served:
            unconnected = "connection_failure" in details or "connection_timeout" in details
            self.lost(outcome.CONNECT_FAILED if unconnected else outcome.DIED_BEFORE_START)
            return
        self._served_by(served)
        self.answered(answer)

    def _served_by(self, served: str) -> None:
        for place, (name, address) in enumerate(self._places):
            if str(address) == served:
                if place:
                    self._stream.picker.moved += 1
                    self._relay.moved(self, name, address, tuple(passed for passed, _ in self._places[:place]))
                return

    def bypassed(self) -> None:
        """Its answer does not pass here: only its beginning is known, which may be no answer for a client. A failure's
        body may hold a stack trace, so none passes unseen."""
        if self._refusal is not None or isinstance(self._tap, FaultTap):
            self.completed()
            return
        self._tap = None
        self._begin(b"")

    def _is_sent_again(self, body: bytes, address: Address) -> bool:  # noqa: ARG002 - the next requests go without
        """A gateway sends each request once: the engine's refusal is the answer."""
        return False


class GatewayStream:
    """See the module's docstring. `wake` has the outbox sent; `now` returns the loop's seconds."""

    def __init__(self, picker: Picker, wake: Callable[[], None], now: Callable[[], float]) -> None:
        self.picker, self._wake, self._now = picker, wake, now
        self.outbox: deque[bytes] = deque()  # of each a ProcessingResponse
        self.answering: Exchange | None = None
        self.exchange: GatewayExchange | None = None
        self.among: list[str] | None = None
        self.is_over = False  # nothing more is sent after the outbox
        self.is_sent = False  # nothing of the request waits here
        self.withdrawn = False  # what was in the outbox before must not be sent any more
        self.broken = ""  # the error with which the stream is to end
        self.received_at = self._since = now()
        self._phase = _BEGIN
        self._sees_answers = True  # the answer's body passes here
        self._trailers = self._answer_trailers = False
        self._given: list[tuple[bytes, bytes]] = []
        self._run: GatewayRun | None = None
        self._left: int | None = None  # bytes of the answer's body still to come, if its length is known
        self._last: bytes | memoryview | None = None  # the answer's last piece, not sent yet, at the outbox's end
        self._withheld: bytes | None = None  # the piece that completes the answer: sent with the end marker

    # -- messages from the gateway

    def take(self, message: wire.ProcessingRequest) -> None:
        """One message. An error in it ends this stream and no other."""
        if self.is_over:
            return  # the rest of a request that was answered from here may still come
        self.received_at = self._now()
        what = message.WhichOneof("request")
        try:
            configured = self._phase == _BEGIN and message.HasField("protocol_config")
            if configured and not self._serves(message.protocol_config):
                return
            if what is not None:  # a newer gateway may send messages that are not known here
                _TAKING[what](self, getattr(message, what), message)
        except StreamError as error:
            self.picker.protocol_violated(str(error))
            self.abort(str(error))
        except Exception as error:  # noqa: BLE001 - one request's bug must not take its neighbours', nor leave it unanswered
            self._bug(error)

    def _bug(self, error: Exception) -> None:
        self.picker.bug(error)
        exchange = self.exchange
        if exchange is not None and exchange.callbacks is not None:
            exchange.callbacks.client_left()
        if exchange is None or exchange.started:
            self.abort("the balancer failed on this request; it is logged")
        else:
            exchange.reply(answers.refusal(outcome.INTERNAL, "the balancer failed on this request; it is logged"))

    def _serves(self, modes: wire.ProtocolConfiguration) -> bool:
        """Whether the gateway's body modes can be served; if not, the request was answered."""
        asked, answered = modes.request_body_mode, modes.response_body_mode
        self._sees_answers = answered != _NONE
        if asked == _DUPLEX and answered in (_DUPLEX, _NONE):
            return True
        field, mode, remedy = "request_body_mode", asked, "FULL_DUPLEX_STREAMED"
        if asked == _DUPLEX:
            field, mode, remedy = "response_body_mode", answered, "FULL_DUPLEX_STREAMED or NONE"
        name = _MODES.Name(mode) if mode in _MODES.values() else str(mode)
        problem = f"processing_mode.{field}: {name} cannot be served by this picker; set it to {remedy}"
        self.picker.refuse_mode(problem)
        body = answers.error_body(outcome.INTERNAL, problem)
        self.answer(500, b"content-type: application/json\r\n", body, "mode")
        return False

    def _expect(self, what: str, *phases: int) -> None:
        if self._phase not in phases:
            raise StreamError(f"{what} came out of turn")

    def _request_headers(self, part: wire.HttpHeaders, message: wire.ProcessingRequest) -> None:
        self._expect("request headers", _BEGIN)
        self._phase = _READING
        picker, limits = self.picker, self.picker.limits
        try:
            self._given = messages.fields(part.headers, limits.headers_max)
            request_head = head.read(messages.request_head(self._given, limits.head_bytes_max), limits.headers_max)
        except head.HeadError as error:
            self.exchange = self.answering = GatewayExchange(self, head.UNREAD)
            self.exchange.reply(answers.refusal(error.outcome, error.detail))
            return
        self.among = messages.subset(message)
        exchange = self.exchange = self.answering = GatewayExchange(self, request_head)
        exchange.sees_answer = self._sees_answers
        early = picker.handler.head(exchange)
        if early is not None:
            exchange.reply(early)
        elif not picker.budget.take(len(request_head.onward), exchange.tenant):
            self._refuse(exchange, answers.refusal(outcome.NO_BUFFER, _FULL, retry_after_s=1.0))
        elif not picker.requests.take(1, exchange.tenant):
            exchange.held_bytes = len(request_head.onward)
            self._refuse(exchange, answers.refusal(outcome.TENANT_OVER_SHARE, _CROWDED, retry_after_s=1.0))
        else:
            exchange.held_bytes, exchange.counted = len(request_head.onward), True
            if part.end_of_stream:
                self._arrive(exchange)

    def _request_body(self, part: wire.HttpBody, _message: wire.ProcessingRequest) -> None:
        if self._phase in (_DECIDING, _SENT):
            return  # some Envoys send the end of a large body twice (envoyproxy/envoy#46237)
        self._expect("a piece of the request's body", _READING)
        exchange = self.exchange
        assert exchange is not None
        data = part.body  # each access makes a copy
        if data:
            size, most = len(data), self.picker.limits.body_bytes_max
            exchange.body_bytes += size
            if exchange.body_bytes > most:
                detail = f"the body is too large: at most {most} bytes"
                self._refuse(exchange, answers.refusal(outcome.BODY_TOO_LARGE, detail))
                return
            if not self.picker.budget.take(size, exchange.tenant):
                self._refuse(exchange, answers.refusal(outcome.NO_BUFFER, _FULL, retry_after_s=1.0))
                return
            exchange.held_bytes += size
            exchange.gather(data)
        if part.end_of_stream:
            self._arrive(exchange)

    def _request_trailers(self, _trailers: wire.HttpTrailers, _message: wire.ProcessingRequest) -> None:
        self._expect("request trailers", _READING)
        assert self.exchange is not None
        self._trailers = True
        self._arrive(self.exchange)

    def _arrive(self, exchange: GatewayExchange) -> None:
        """The request is complete."""
        self._phase = _DECIDING
        exchange.body = exchange.gathered()
        size = len(exchange.body)
        reading_bytes = _READING_TIMES * size if size > _LARGE_BYTES else 0
        if reading_bytes and not self.picker.budget.take(reading_bytes, exchange.tenant):
            self._refuse(exchange, answers.refusal(outcome.NO_BUFFER, _FULL, retry_after_s=1.0))
            return
        try:
            self.picker.handler.arrived(exchange)
        finally:
            if reading_bytes:
                self.picker.budget.give(reading_bytes, exchange.tenant)

    def _refuse(self, exchange: GatewayExchange, reply: Reply) -> None:
        """Refuse a request that the handler does not take."""
        exchange.abandon(reply.outcome, reply.status)
        exchange.reply(reply)

    def _response_headers(self, part: wire.HttpHeaders, message: wire.ProcessingRequest) -> None:
        self._expect("response headers", _SENT)
        self._phase, run = _ANSWERING, self._run
        assert run is not None
        try:
            self._given = messages.fields(part.headers, self.picker.limits.headers_max)
            answer = head.answer(messages.answer_head(self._given), self.picker.limits.headers_max)
        except head.HeadError:
            run.lost(outcome.BAD_FRAMING)
            return
        if part.end_of_stream:  # it has no body, and can get none but by an answer from here
            assert self.exchange is not None
            self._sees_answers = self.exchange.sees_answer = False
        run.answer(answer, messages.served(message), messages.code_details(message))
        if self.is_over or run.is_over:
            return
        if part.end_of_stream:
            run.completed()
        elif not self._sees_answers:
            run.bypassed()

    def _response_body(self, part: wire.HttpBody, _message: wire.ProcessingRequest) -> None:
        self._expect("a piece of the answer's body", _ANSWERING)
        assert self._run is not None
        if data := part.body:
            self._run.received(data)
        if part.end_of_stream:
            self._run.completed()

    def _response_trailers(self, _trailers: wire.HttpTrailers, _message: wire.ProcessingRequest) -> None:
        self._expect("response trailers", _ANSWERING)
        assert self._run is not None
        self._answer_trailers = True
        self._run.completed()

    # -- messages to the gateway

    def send(self, run: GatewayRun, endpoints: str, request_head: bytes, body: bytes) -> None:
        """The request goes there, with this head and this body."""
        self._phase, self._run, self.is_sent = _SENT, run, False
        more = {messages.DESTINATION.encode(): endpoints.encode()}  # Envoy frames a streamed body itself
        wanted = request_head.partition(b"\r\n")[2]
        self._put(messages.chosen(endpoints, messages.mutation(self._given, wanted, more)))
        rest = list(messages.pieces(body)) or [b""]
        for at, one in enumerate(rest, 1):
            self._put(messages.piece(one, of_request=True, last=at == len(rest) and not self._trailers))
        if self._trailers:
            self._put(messages.TRAILERS_OF_REQUEST)
        self._given = []

    def begin(self, headers: bytes, length: int | None) -> None:
        """The answer's head is to become this one."""
        more = {} if length is None else {b"content-length": b"%d" % length}
        changed = messages.mutation(self._given, headers, more, drop_length=length is None and self._sees_answers)
        self._given = []
        self._put(messages.answered(changed))
        self._left = length

    def chunk(self, data: bytes) -> None:
        """More of the answer's body."""
        if not self._sees_answers:
            return
        if self._left is not None:
            self._left -= len(data)
            if not self._left:
                self._withheld = data  # its end marker comes next, and then needs no message of its own
                return
        for one in messages.pieces(data):
            self._last = one
            self._put(messages.piece(one, of_request=False, last=False))

    def withdraw(self) -> None:
        """No more of the request may be sent."""
        self.withdrawn = True
        self.outbox.clear()

    def finish(self) -> None:
        """The answer is complete: its last piece has the end marker, if it is still here."""
        if self._sees_answers:
            if self._withheld is not None:
                self._left, data = None, self._withheld
                self.chunk(data)
            if self._answer_trailers:
                self._put(messages.TRAILERS_OF_ANSWER)
            elif self._last is not None and self.outbox:
                self.outbox[-1] = messages.piece(self._last, of_request=False, last=True)
            else:
                self._put(messages.piece(b"", of_request=False, last=True))
        self._end()

    def answer(self, status: int, lines: bytes, body: bytes, details: str) -> None:
        """An answer from here, also instead of one that the gateway still waits for."""
        self._put(messages.immediate(status, lines, body, details))
        self._end()

    def abort(self, why: str = "given up") -> None:
        """End the stream as an error: a gateway that fails closed ends the request."""
        self.broken = self.broken or why
        self._drop()

    def sent(self) -> None:
        """The outbox was sent: nothing in it can be changed any more."""
        self._last, self.is_sent = None, True

    def _put(self, reply: bytes) -> None:
        self.outbox.append(reply)
        self._wake()

    def _end(self) -> None:
        self._phase, self.is_over = _OVER, True
        exchange, self.answering = self.exchange, None
        if exchange is not None:
            self._give_back(exchange)
        self._wake()

    # -- exchange.AnsweringConnection

    @property
    def is_hop(self) -> bool:
        """Whether the tier above sends by way of the gateway."""
        return self.picker.is_hop

    @property
    def local_host(self) -> str:
        """Not known: clients connect to the gateway."""
        return ""

    @property
    def certificate(self) -> bytes | None:
        """See AnsweringConnection: only the gateway knows a client's."""
        return None

    def client_rtt(self) -> tuple[str, int] | None:
        """Not known: clients connect to the gateway."""
        return None

    @property
    def unsent_bytes(self) -> int:
        """The gateway takes what it gets before more of the answer is read."""
        return 0

    def write(self, data: bytes) -> None:
        """Never called: an exchange of a gateway uses the stream itself."""
        raise NotImplementedError

    def keeps(self, exchange: Exchange) -> bool:  # noqa: ARG002
        """The gateway's connections are its own."""
        return True

    def close_after(self, exchange: Exchange) -> None:
        """See above."""

    def over(self, exchange: Exchange) -> None:
        """See `_end`."""

    def release_body(self, exchange: Exchange) -> None:
        """The body is with the gateway: it is not held here."""
        body_bytes = exchange.held_bytes - len(exchange.head.onward)
        if body_bytes > 0:
            self.picker.budget.give(body_bytes, exchange.tenant)
            exchange.held_bytes -= body_bytes

    # -- ending

    def gone(self) -> None:
        """The gateway has ended the stream. A request without an answer has lost its client; an answer that does not
        pass here is over.
        """
        run = self._run
        if self.is_over:
            return
        if self._phase == _ANSWERING and not self._sees_answers and run is not None:
            run.completed()
            return
        self._drop()

    def _drop(self) -> None:
        """End the request, whatever still waits for it."""
        exchange, reading = self.exchange, self._phase == _READING
        self._end()
        if exchange is not None and exchange.callbacks is not None:
            exchange.callbacks.client_left()
        elif exchange is not None and reading:
            exchange.abandon(outcome.CLIENT_LEFT, 0)

    def check(self, now: float) -> None:
        """Apply the time limits to a request that is being read, or has not begun."""
        exchange, limits = self.exchange, self.picker.limits
        if self._phase == _BEGIN and now - self._since > limits.head_s:
            self.abort(f"no request came within {limits.head_s:g} s")
        if exchange is None or self._phase != _READING:
            return
        quiet_s, reading_s = now - self.received_at, now - self._since
        if quiet_s > limits.body_s:
            detail = f"the body paused for more than {limits.body_s:g} s"
        elif reading_s > limits.upload_s:
            detail = f"the request did not arrive within {limits.upload_s:g} s"
        else:
            return
        self._refuse(exchange, answers.refusal(outcome.REQUEST_TIMEOUT, detail))

    def expel(self) -> None:
        """The shutdown deadline has passed."""
        exchange = self.exchange
        if self.is_over or exchange is None:
            return
        if exchange.callbacks is not None:
            exchange.callbacks.stopped()
        else:
            self._refuse(exchange, answers.stopping())

    def _give_back(self, exchange: Exchange) -> None:
        self.picker.budget.give(exchange.held_bytes, exchange.tenant)
        exchange.held_bytes = 0
        if exchange.counted:
            exchange.counted = False
            self.picker.requests.give(1, exchange.tenant)


_FULL = "the balancer's buffers are full: retry later"
_CROWDED = "this tenant has reached its limit of requests under way: retry when some are answered"
_TAKING: dict[str, Callable[[GatewayStream, Any, wire.ProcessingRequest], None]] = {
    "request_headers": GatewayStream._request_headers,
    "request_body": GatewayStream._request_body,
    "request_trailers": GatewayStream._request_trailers,
    "response_headers": GatewayStream._response_headers,
    "response_body": GatewayStream._response_body,
    "response_trailers": GatewayStream._response_trailers,
}
