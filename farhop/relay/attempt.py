"""One attempt of one request at one upstream: writes the request, passes the answer on, notices how it ends.

The answer's head is held until its first body byte is here: until then nothing has reached the client, and the request
may still go elsewhere. Never decides what happens next: it tells the relay, once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farhop.balance import machine, outcome
from farhop.balance.inquiry import QUIET_S, Inquiry, stall_s
from farhop.relay import answers, faults
from farhop.relay.tap import BodyTap, StreamTap
from farhop.relay.transcript import Transcript

if TYPE_CHECKING:
    from farhop.balance.machine import Address, Usage
    from farhop.balance.outcome import Outcome
    from farhop.relay.head import AnswerHead
    from farhop.relay.outbound import Outbound, OutboundLimits
    from farhop.relay.relay import Journey, Relay


_JOINED_BYTES_MAX = 16 * 1024  # one write is cheaper than two; copying more than this is not


class AttemptRun:
    """A live attempt. States: connecting (no connection), waiting (no first byte), flowing, over."""

    __slots__ = (
        "_connection",
        "_heard_at",
        "_inquiry",
        "_length",
        "_onward",
        "_over",
        "_pause_s",
        "_paused",
        "_refusal",
        "_relay",
        "_silent_s",
        "_status",
        "_tap",
        "_transcript",
        "began",
        "journey",
        "number",
        "timing",
    )

    def __init__(self, relay: Relay, journey: Journey, number: int, now: float) -> None:
        self._relay, self.journey, self.number = relay, journey, number
        self._connection: Outbound | None = None
        self._heard_at = now
        self._silent_s = self._pause_s = 0.0  # at the last sweep, and the longest that ended, as sweeps see them
        self._inquiry: Inquiry | None = None  # once its upstream was asked about it
        self._status = 0
        self._onward = b""
        self._length: int | None = None
        self._tap: StreamTap | BodyTap | faults.FaultTap | None = None
        self._transcript = Transcript(journey.continuation) if journey.continuation is not None else None
        self._refusal: tuple[Outcome, float | None] | None = None
        self._over = self._paused = False
        self.began = False
        self.timing = b""  # the upstream's own server-timing

    # -- outbound.Attempt

    def connected(self, connection: Outbound) -> None:
        """Write the request, if it is still wanted."""
        if self._over:
            connection.attempt = None
            self._relay.pool.give_back(connection)
            return
        self._connection = connection
        try:
            request_head, body = self.request(connection.host)
        except Exception as error:  # noqa: BLE001 - the tier's headers failed: this request is over, the connection is not
            self._over = True
            connection.attempt = None
            self._relay.pool.give_back(connection)
            self._relay.fault(self.journey, error)
            return
        if len(body) <= _JOINED_BYTES_MAX:
            connection.write(request_head + body)
        else:
            connection.write(request_head)
            connection.write(body)

    def answered(self, answer: AnswerHead) -> None:
        """Keep the head until there is something to send with it."""
        known = answer.known
        self._status, self._onward = answer.status, answer.onward
        self.timing = known.get(b"server-timing", b"")
        if self._relay.upstream_is_tier:
            if word := known.get(b"x-farhop-outcome"):
                self._refusal = answers.read_hop_outcome(word)
                return
            if version := known.get(b"x-farhop-version"):
                self._onward += b"x-farhop-version: " + version + b"\r\n"
        content_type = known.get(b"content-type", b"").lower()
        if faults.looks_at(answer.status) and not self._relay.upstream_is_tier:
            self._tap, self._length = faults.FaultTap(), answer.length
        elif content_type.startswith(b"text/event-stream"):
            self._tap = StreamTap(self.journey.hide_usage, self._transcript)
        elif content_type.startswith(b"application/json"):
            self._tap, self._length = BodyTap(self._transcript), answer.length
        else:
            self._length = answer.length

    def received(self, data: bytes) -> None:
        """Pass body bytes on."""
        if self._refusal is not None or self._over:
            return
        self._heard_at = self._relay.clock()
        if self._tap is not None:
            data = self._tap.feed(data)
        if not self.began:
            self._begin(data)
        elif data:
            self.journey.exchange.write(data)

    def completed(self) -> None:
        """The upstream's answer is whole."""
        if self._over:
            return
        self._over = True
        if self._refusal is not None:
            self._relay.refused(self, *self._refusal)
            return
        rest = self._tap.rest() if self._tap is not None else b""
        if not self.began:
            self._length = len(rest)
            self._begin(rest)
        elif rest:
            self.journey.exchange.write(rest)
        self._relay.ended(self, self._ended())

    def lost(self, reason: Outcome) -> None:
        """The upstream is gone, or never came."""
        if self._over:
            return
        self._over = True
        if self._refusal is not None:
            self._relay.refused(self, *self._refusal)
            return
        if self.began and reason is outcome.DIED_BEFORE_START:
            reason = outcome.DIED_MID_STREAM
        self._relay.failed(self, reason)

    def broke(self, error: Exception) -> None:
        """Whatever it met while it read the answer: a bug of ours, and the end of this request."""
        self._over = True
        self._relay.fault(self.journey, error)

    def request(self, host: bytes) -> tuple[bytes, bytes]:
        """Head and body as the upstream gets them. `host` is its `Host` header's value."""
        body = self.journey.body
        return self.journey.upstream_head(host, len(body)), body

    # -- for the relay

    @property
    def target(self) -> str:
        """Who is asked."""
        forward = self.journey.forward
        return forward.target if forward is not None else ""

    @property
    def usage(self) -> Usage | None:
        """What the engine said so far of its usage."""
        return self._tap.usage if self._tap is not None else None

    @property
    def held_bytes(self) -> int:
        """What is kept of the answer now."""
        tap, transcript = self._tap, self._transcript
        return (0 if tap is None else tap.held_bytes) + (0 if transcript is None else transcript.held_bytes)

    @property
    def status(self) -> int:
        """The upstream's status, 0 while unknown."""
        return self._status

    @property
    def streams(self) -> bool:
        """Whether the answer is a stream of events, which can end with an error event."""
        return isinstance(self._tap, StreamTap)

    def start(self, address: Address) -> None:
        """Get a connection."""
        self._relay.pool.lend(address, self)

    def abort(self) -> None:
        """Stop the work upstream at once; tells nobody."""
        self._over = True
        if self._connection is not None and self._connection.attempt is self:
            self._connection.abort()

    def pause(self) -> None:
        """The client is behind: stop reading upstream."""
        self._paused = True
        if self._connection is not None and self._connection.attempt is self:
            self._connection.pause()

    def resume(self) -> None:
        """The client caught up."""
        self._paused = False
        self._heard_at = self._relay.clock()
        if self._connection is not None and self._connection.attempt is self:
            self._connection.resume()

    # -- what its upstream knows of it

    @property
    def id(self) -> str:
        """As the hop token names it."""
        return f"{self.journey.request.id}/{self.number}"

    @property
    def heard_at(self) -> float:
        """When something of the answer came last; before that, when the attempt was made."""
        return self._heard_at

    @property
    def inquiry(self) -> Inquiry:
        """What is known of it where it is silent."""
        known = self._inquiry = self._inquiry or Inquiry()
        return known

    def is_quiet(self, now: float) -> bool:
        """Whether its upstream, which should have it by now, is worth being asked about it."""
        waits = not self._over and not self._paused and self._connection is not None
        return waits and now - self._heard_at >= QUIET_S

    def told(self, asked_at: float, quiet_s: float | None, way_s: float) -> None:
        """What its upstream said when asked: see balance.inquiry."""
        if self._over or self._paused:
            return
        if self._heard_at > asked_at:
            self.inquiry.heard()
            return
        now = self._relay.clock()
        if self.inquiry.lost(now - self._heard_at, quiet_s, way_s, now, began=self.began):
            self._give_up(outcome.STALLED if self.began else outcome.LOST)

    # -- upkeep

    def check(self, now: float, limits: OutboundLimits) -> None:
        """Apply the time limits; called by the relay's sweep."""
        silent_s = now - self._heard_at
        if self._over or self._paused or self._connection is None:
            return  # connecting has its own limit, and a slow client is not a slow upstream
        if self.began:
            self._pause_s = max(self._pause_s, self._silent_s if silent_s < self._silent_s else 0.0)
            self._silent_s, most_s = silent_s, limits.between_bytes_s
            if silent_s > (stall_s(self._pause_s, most_s) if self._relay.is_dark(self) else most_s):
                self._give_up(outcome.STALLED)
        elif self.journey.request.stream:
            if silent_s > limits.first_byte_s:
                self._give_up(outcome.FIRST_BYTE_TIMEOUT)
        elif silent_s > limits.whole_answer_s:
            self._give_up(outcome.WHOLE_ANSWER_TIMEOUT)

    def _give_up(self, reason: Outcome) -> None:
        self.abort()
        self._relay.failed(self, reason)

    def _ended(self) -> machine.AttemptEnded:
        fault = self._tap.fault if self._tap is not None else None
        chain, said_bytes = self._transcript.told() if self._transcript is not None else ((), 0)
        request_id, usage = self.journey.request.id, self.usage
        return machine.AttemptEnded(request_id, self.number, self._status, usage, fault, chain, said_bytes)

    def _begin(self, first: bytes) -> None:
        self.began = True
        if self._relay.began(self, self._status):
            headers = self._onward + self.journey.answer_head(self.timing)
            self.journey.exchange.begin(self._status, headers, self._length, first)
