"""One attempt of one request at one upstream: writes the request, passes the answer on, notices how it ends.

The answer's head is held back until its first body byte is here: until then nothing has reached the client, and the
request can still be sent elsewhere. Never decides what happens next: it reports to its owner, once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from farhop.balance import machine, outcome
from farhop.balance.health.inquiry import QUIET_S, Inquiry, stall_s
from farhop.relay import answers
from farhop.relay.active import DeclinedAnswer
from farhop.relay.formats.openai import without_salt
from farhop.relay.formats.transcript import Transcript
from farhop.relay.upstream import engine_faults, orca
from farhop.relay.upstream.engine_faults import FaultTap, PageTap, RefusalTap
from farhop.relay.upstream.tap import ERROR, BodyTap, EchoTap, NumberedTap, StreamTap

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.balance.machine import Address, Usage
    from farhop.balance.outcome import Outcome
    from farhop.relay.active import ActiveRequest
    from farhop.relay.http.head import AnswerHead
    from farhop.relay.upstream.fetch import Fetched
    from farhop.relay.upstream.pool import Pool, UpstreamConnection


_JOINED_BYTES_MAX = 16 * 1024  # one write is cheaper than two; copying more than this is not
# By which a proxy before a region refuses what it takes for too large: as the region itself would, and the client can
# change it. With 400, too, nginx and HAProxy refuse a long head; a malformed one was refused before it came here.
_TOO_LARGE = {
    413: outcome.BODY_TOO_LARGE,
    **dict.fromkeys((400, 414, 431), outcome.HEAD_TOO_LARGE),
}
_UNSALTED_S = 60.0  # how long an upstream is known to take no salt: another engine may have its address then


class AttemptOwner(Protocol):
    """What an attempt needs from its owner (the relay), and reports to it, once. `clock` gives monotonic seconds;
    `upstream_is_tier`: the upstream is a balancer of ours, whose refusals are to be read. `unsalted_until`:
    by upstream, until when it is taken to refuse a `cache_salt`."""

    pool: Pool
    clock: Callable[[], float]
    upstream_is_tier: bool
    unsalted_until: dict[Address, float]

    def upstream_head(
        self, active: ActiveRequest, host: bytes, body_bytes: int, more: bytes = b"", target: bytes = b""
    ) -> bytes:
        """The request's head as the upstream gets it. `host` is its `Host` header's value; `more`: further lines;
        `target`: asked for in place of what the client asked for."""

    def answer_head(self, active: ActiveRequest, upstream_timing: bytes) -> bytes:
        """Our header lines on an answer that began. `upstream_timing` is the upstream's own server-timing."""

    def path_is_broken(self, attempt: AttemptRun) -> bool:
        """Whether the way to its upstream is broken now."""

    def began(self, attempt: AttemptRun, status: int, now: float) -> None:
        """The first byte is here, and goes to the client now."""

    def resumed(self, attempt: AttemptRun, status: int) -> None:
        """The first byte of a continuation is here: its client's stream goes on now."""

    def ended(self, attempt: AttemptRun, event: machine.AttemptEnded) -> None:
        """The answer is complete."""

    def refused(self, attempt: AttemptRun, reason: Outcome, wait_ms: float | None) -> None:
        """The tier below refused."""

    def failed(self, attempt: AttemptRun, reason: Outcome) -> None:
        """The attempt broke."""

    def replaced(self, attempt: AttemptRun, trace: str) -> None:
        """The body of the engine's failure was not for clients, who get ours; `trace` as in engine_faults.FaultTap."""

    def salt_unknown(self, attempt: AttemptRun) -> None:
        """The engine refused the `cache_salt` that keeps tenants' caches apart, and is asked without it."""

    def fault(self, active: ActiveRequest | None, error: Exception) -> None:
        """An internal error: the request, if one is named, is over."""


class AttemptRun:
    """A live attempt. States: connecting (no connection), waiting (no first byte), flowing, over."""

    __slots__ = (
        "_connection",
        "_inquiry",
        "_length",
        "_onward",
        "_over",
        "_pause_s",
        "_paused",
        "_recalled",
        "_refusal",
        "_silent_s",
        "_status",
        "_tap",
        "_transcript",
        "active",
        "began",
        "body",
        "last_activity_at",
        "load",
        "number",
        "owner",
        "streams",
        "target",
        "timing",
        "whole",
    )

    def __init__(self, owner: AttemptOwner, active: ActiveRequest, number: int, now: float) -> None:
        self.owner, self.active, self.number = owner, active, number
        self.target = active.forward.target if active.forward is not None else ""  # who is asked
        self.body = active.body  # as this upstream gets it; b"" once its answer began
        self._connection: UpstreamConnection | None = None
        self.last_activity_at = now  # when something of the answer came last; before that, when it was made
        self._silent_s = self._pause_s = 0.0  # at the last sweep, and the longest that ended, as sweeps see them
        self._inquiry: Inquiry | None = None  # once its upstream was asked about it
        self._status = 0
        self._onward = b""
        self._length: int | None = None
        self._tap: StreamTap | BodyTap | FaultTap | RefusalTap | None = None
        self._transcript = Transcript(active.answer_chain) if active.answer_chain is not None else None
        self._refusal: tuple[Outcome, float | None] | None = None
        self._over = self._paused = False
        self._recalled = False  # it may be sent nowhere again: the law forbids it now
        self.began = self.whole = False
        self.streams = False  # whether the answer is one of events, which can end with an error event
        self.timing = b""  # the upstream's own server-timing
        self.load: machine.EngineLoad | None = None  # as its answer reports it

    # -- pool.UpstreamHandler

    def connected(self, connection: UpstreamConnection) -> None:
        """The connection is open: send the request, unless it was cancelled meanwhile."""
        if self._over:
            connection.attempt = None
            self.owner.pool.give_back(connection)
            return
        self._connection = connection
        try:
            request_head, body = self.request(connection.host)
        except Exception as error:  # noqa: BLE001 - the tier's headers failed: this request is over, the connection is not
            self._over = True
            connection.attempt = None
            self.owner.pool.give_back(connection)
            self.owner.fault(self.active, error)
            return
        if len(body) <= _JOINED_BYTES_MAX:
            connection.write(request_head + body)
        else:
            connection.write(request_head)
            connection.write(body)
        if self._paused:
            connection.pause()

    def answered(self, answer: AnswerHead) -> None:
        """Keep the head until there is something to send with it."""
        known = answer.known
        self._status, self._onward = answer.status, answer.onward
        self.timing = known.get(b"server-timing", b"")
        if self.owner.upstream_is_tier:
            if self._is_not_the_tiers(answer):
                return
            if version := known.get(b"x-farhop-version"):
                self._onward += b"x-farhop-version: " + version + b"\r\n"
                self.active.version = version
        if (load := known.get(orca.HEADER)) is not None and not self.owner.upstream_is_tier:
            self.load = orca.read(load)
        content_type = known.get(b"content-type", b"").lower()
        # There are engines without any one of the paths: one that embeds has none for chats. Another may have it.
        if answer.status in (404, 405, 501) and not (self.owner.upstream_is_tier or self.active.request.once):
            self._tap = RefusalTap(engine_faults.is_unsupported, outcome.PATH_UNSUPPORTED)
        elif answer.status in engine_faults.TOO_LONG_STATUSES and self._may_be_held_elsewhere():
            self._tap = RefusalTap(engine_faults.is_too_long, outcome.TOO_LONG, salted=self._may_be_salted())
        elif answer.status in engine_faults.SALT_STATUSES and self._may_be_salted():
            self._tap = RefusalTap(None, None, salted=True)
        elif (
            answer.status >= 300
            and not self.owner.upstream_is_tier
            and (reason := outcome.of_misconfigured(answer.status)) is not None
        ):
            self._refusal = reason, None
        elif answer.status in engine_faults.FAULT_STATUSES and not self.owner.upstream_is_tier:
            self._tap = FaultTap()
        elif answer.status == 404 or answer.status in outcome.DECLINED_BY_STATUS:
            self._tap = RefusalTap(None, None)
        elif content_type.startswith(b"text/event-stream"):
            made = NumberedTap if self.active.exchange.head.path == b"/v1/responses" else StreamTap
            self._tap, self.streams = made(self.active.hide_usage, self._transcript, self.active.geo), True
        elif content_type.startswith(b"application/json") and self.active.geo and answer.status < 400:
            self._tap = EchoTap(self._transcript, self.active.geo)  # it becomes longer by what is repeated
        elif content_type.startswith(b"application/json"):
            self._tap, self._length = BodyTap(self._transcript), answer.length
        elif content_type.startswith(b"text/html") and answer.status < 400:
            self._tap, self._length = PageTap(), answer.length
        else:
            self._length = answer.length

    def _is_not_the_tiers(self, answer: AnswerHead) -> bool:
        """Whether a tier's answer is none for the client: it is the region's refusal, or does not name the region that
        was asked. Another has its address then, and neither its success nor its failure says anything of the region. It
        may say something of the request: a proxy's 504 to one whose answer comes in one piece says, as our own limit
        would, that it takes long. It would elsewhere, too."""
        known = answer.known
        if value := known.get(b"x-farhop-outcome"):
            self._refusal = answers.read_hop_outcome(value)
        elif known.get(b"x-farhop-region", b"") == self.target.encode():
            return False
        elif answer.status == 504 and not self.active.request.stream:
            self._give_up(outcome.WHOLE_ANSWER_TIMEOUT)
        else:
            self._give_up(_TOO_LARGE.get(answer.status, outcome.NO_ENGINE_THERE))
        return True

    def _may_be_held_elsewhere(self) -> bool:
        """Whether another target can hold longer requests."""
        forward = self.active.forward
        return forward is not None and forward.longer

    def _may_be_salted(self) -> bool:
        """Whether an engine may be asked with a `cache_salt`. To be sure takes 20 ms of the longest body: that is left
        until an engine says that it refuses one."""
        return not self.owner.upstream_is_tier and b'"cache_salt"' in self.body

    def received(self, data: bytes) -> None:
        """Pass body bytes on."""
        if self._refusal is not None or self._over:
            return
        tap = self._tap
        if tap is not None:
            data = tap.feed(data)
            if isinstance(tap, FaultTap) and tap.over_bound:
                self._cut()
                return
            if not data and isinstance(tap, FaultTap | RefusalTap):
                return  # held, and time goes on: else an answer that never ends would be waited for without end
        self.last_activity_at = self.owner.clock()
        if self.streams and data.rfind(ERROR) >= 0:
            data = engine_faults.without_traces(data)
        if not self.began:
            self._begin(data)
        elif data:
            self.active.exchange.write(data)

    def _cut(self) -> None:
        """The engine's error is too long to be passed on: do not wait for its end."""
        if self._connection is not None:
            self._connection.abort()
        self.completed()

    def completed(self) -> None:
        """The upstream's answer is complete."""
        if self._over or self._refusal is not None:
            self._close()
            return
        self._over = True
        rest = self._tap.finish() if self._tap is not None else b""
        if isinstance(self._tap, RefusalTap):
            if self._tap.reason is not None:
                self.owner.failed(self, self._tap.reason)
                return
            if self._tap.salt_unknown:
                if self._asks_unsalted():
                    return
                rest = self._tap.held
        if isinstance(self._tap, FaultTap) and self._tap.unfit:
            if self._status == 502 and self._tap.says_nothing:  # a proxy's, to whom its engine gave no answer
                self.owner.failed(self, outcome.DIED_BEFORE_START)
                return
            rest = self._in_our_words(self._tap)
        elif self.streams and ERROR in rest:
            rest = engine_faults.without_traces(rest)
        if not self.began:
            if (declined := self._why_declined(rest)) is not None:
                # A model that one engine does not serve may still be another's that takes no request now.
                if self._status != 404 or self.active.declined is None:
                    self.active.declined = DeclinedAnswer(self._status, self._onward, rest)
                self.owner.refused(self, declined, None)
                return
            self._length, self.last_activity_at = len(rest), self.owner.clock()
            self._begin(rest)
        elif rest:
            self.active.exchange.write(rest)
        self.owner.ended(self, self._ended())

    def _why_declined(self, body: bytes) -> Outcome | None:
        """The outcome if an engine did nothing for the request, and another may."""
        if self._status == 404:
            return outcome.MODEL_NOT_SERVED if engine_faults.lacks_model(body) else None
        broken = self._tap is not None and self._tap.fault is not None
        return None if broken else outcome.DECLINED_BY_STATUS.get(self._status)

    def _asks_unsalted(self) -> bool:
        """Ask the same engine again, without the salt that it refused: it has none to keep caches apart by. False where
        that cannot be: its refusal is the answer."""
        body, forward = without_salt(self.body), self.active.forward
        if body is self.body or forward is None:
            return False
        self.owner.salt_unknown(self)
        self.owner.unsalted_until[forward.address] = self.owner.clock() + _UNSALTED_S
        return self._is_sent_again(body, forward.address)

    def _is_sent_again(self, body: bytes, address: Address) -> bool:
        """Send this body to the same upstream, unless the law forbids it by now. Returns whether the refusal before is
        no answer then."""
        if self._recalled:
            self._give_up(outcome.UNLAWFUL_HERE)
            return True
        self.last_activity_at = self.owner.clock()
        self._status, self._onward, self._tap, self._connection, self.load = 0, b"", None, None, None
        self._over, self.timing, self.body = False, b"", body
        self.start(address)
        return True

    def _in_our_words(self, tap: FaultTap) -> bytes:
        """The body that replaces an engine's error that must not reach clients."""
        self.owner.replaced(self, tap.trace)
        kept = (line for line in self._onward.splitlines(keepends=True) if not line.startswith(b"content-"))
        self._onward = b"".join(kept) + b"content-type: application/json\r\n"
        return answers.engine_failure(tap.fault or outcome.ENGINE_ERROR, self.active.exchange.head.path)

    def lost(self, reason: Outcome) -> None:
        """The connection broke, or could not be opened."""
        if not self._close():
            return
        if self.began and reason is outcome.DIED_BEFORE_START:
            reason = outcome.DIED_MID_STREAM
        self.owner.failed(self, reason)

    def _close(self) -> bool:
        """No more events come from the upstream. Returns whether the owner still has to be told the result."""
        if self._over:
            return False
        self._over = True
        if self._refusal is not None:
            self.owner.refused(self, *self._refusal)
        return self._refusal is None

    @property
    def is_refused(self) -> bool:
        """Whether it was the tier below that said how it ended."""
        return self._refusal is not None

    @property
    def target_lives(self) -> bool:
        """Whether it was the tier below that broke the answer off, rather than its connection."""
        connection = self._connection
        return self.owner.upstream_is_tier and connection is not None and connection.broken_off

    def broke(self, error: Exception) -> None:
        """An internal error while it was connecting or the answer was read. It ends the request, but not of an attempt
        that was given up while connecting: the request may be elsewhere by then."""
        given_up = self._over and self._connection is None
        self._over = True
        self.owner.fault(None if given_up else self.active, error)

    def request(self, host: bytes) -> tuple[bytes, bytes]:
        """Head and body as the upstream gets them. `host` is its `Host` header's value."""
        body = self.body
        return self.owner.upstream_head(self.active, host, len(body)), body

    # -- for its owner

    @property
    def usage(self) -> Usage | None:
        """The usage that the engine has reported so far."""
        return machine.plausible(self._tap.usage, self.active.request) if self._tap is not None else None

    @property
    def held_bytes(self) -> int:
        """How many bytes of the answer are kept now."""
        tap, transcript = self._tap, self._transcript
        return (0 if tap is None else tap.held_bytes) + (0 if transcript is None else transcript.held_bytes)

    @property
    def is_within_event(self) -> bool:
        """Whether what its client has of the stream may end within an event, so that nothing may simply follow it."""
        return isinstance(self._tap, StreamTap) and self._tap.is_within

    @property
    def next_number(self) -> int:
        """The number of the event that would follow, where events have numbers."""
        return self._tap.next_number if isinstance(self._tap, NumberedTap) else 0

    @property
    def status(self) -> int:
        """The HTTP status of the upstream's answer; 0 before it is known."""
        return self._status

    @property
    def resumable(self) -> bool:
        """Whether its stream could go on elsewhere now."""
        return False

    @property
    def carried_by(self) -> machine.Carrier:
        """What a continuation would be based on: token ids, or text."""
        return "ids"

    def start(self, address: Address) -> None:
        """Request a connection to the upstream."""
        pool = self.owner.pool
        if address in self.owner.unsalted_until:
            self._leave_out_salt(address)
        lend = pool.lend_fresh if self.active.needs_fresh else pool.lend
        lend(address, self, len(self.body))

    def _leave_out_salt(self, address: Address) -> None:
        """This upstream was seen to refuse a salt: ask without, for a while."""
        unsalted_until = self.owner.unsalted_until
        if unsalted_until[address] > self.owner.clock():
            self.body = without_salt(self.body)
        else:
            del unsalted_until[address]

    def abort(self) -> None:
        """Cancel the work upstream at once, without a callback."""
        self._over = True
        if self._connection is not None and self._connection.attempt is self:
            self._connection.abort()

    @property
    def is_sent(self) -> bool:
        """Whether all of the request has left this host."""
        return self._connection is not None and self._connection.has_sent

    def recall(self) -> None:
        """See active.Attempt. If the request was sent in part, the rest stays here: it is of no use there."""
        self._recalled = True
        if not self._over and not self.is_sent:
            self._give_up(outcome.UNLAWFUL_HERE)

    def pause(self) -> None:
        """The client is behind: stop reading upstream."""
        self._paused = True
        if self._connection is not None and self._connection.attempt is self:
            self._connection.pause()

    def resume(self) -> None:
        """The client has read what was sent: send more."""
        self._paused = False
        self.last_activity_at = self.owner.clock()
        if self._connection is not None and self._connection.attempt is self:
            self._connection.resume()

    # -- what its upstream knows of it

    @property
    def id(self) -> str:
        """The attempt's id, as in the hop token."""
        return f"{self.active.request.id}/{self.number}"

    @property
    def inquiry(self) -> Inquiry:
        """What is known of the attempt from its upstream since it fell silent."""
        known = self._inquiry = self._inquiry or Inquiry()
        return known

    def is_quiet(self, now: float) -> bool:
        """Whether the attempt has been silent for long enough to ask its upstream about it."""
        waits = not self._over and not self._paused and self._connection is not None
        return waits and now - self.last_activity_at >= QUIET_S

    def on_inquiry_answer(self, asked_at: float, quiet_s: float | None, rtt_s: float) -> None:
        """The upstream's answer to an inquiry about this attempt: see farhop.balance.health.inquiry."""
        if self._over or self._paused:
            return
        if self.last_activity_at > asked_at:
            self.inquiry.clear()
            return
        now = self.owner.clock()
        if self.inquiry.lost(now - self.last_activity_at, quiet_s, rtt_s, now, began=self.began):
            self._give_up(outcome.STALLED if self.began else outcome.LOST)

    # -- upkeep

    def check(self, now: float) -> None:
        """Apply the time limits; called by the relay's sweep."""
        silent_s, limits = now - self.last_activity_at, self.owner.pool.limits
        if self._over or self._paused or self._connection is None:
            return  # connecting has its own limit, and a slow client is not a slow upstream
        if self.began:
            self._pause_s = max(self._pause_s, self._silent_s if silent_s < self._silent_s else 0.0)
            self._silent_s, most_s = silent_s, limits.between_bytes_s
            if silent_s > (stall_s(self._pause_s, most_s) if self.owner.path_is_broken(self) else most_s):
                self._give_up(outcome.STALLED)
        elif self.active.request.stream:
            if silent_s > limits.first_byte_s:
                self._give_up(outcome.FIRST_BYTE_TIMEOUT)
        elif silent_s > limits.whole_answer_s:
            self._give_up(outcome.WHOLE_ANSWER_TIMEOUT)

    def _give_up(self, reason: Outcome) -> None:
        self.abort()
        self.owner.failed(self, reason)

    def _ended(self) -> machine.AttemptEnded:
        fault = self._tap.fault if self._tap is not None else None
        chain, answer_bytes = self._transcript.result() if self._transcript is not None else ((), 0)
        request = self.active.request
        usage = machine.plausible(self._tap.usage, request) if self._tap is not None else None
        whole, load = self.whole, self.load if self.whole else None
        return machine.AttemptEnded(
            request.id, self.number, self._status, usage, fault, chain, answer_bytes, whole, load
        )

    @property
    def is_over(self) -> bool:
        """Whether the attempt has ended, so that later bytes are ignored."""
        return self._over

    def answer_with(self, other: Fetched) -> None:
        """Use the complete answer of another upstream as this attempt's answer."""
        self.abort()
        self._status, self._tap, self._length = other.status, None, len(other.body)
        self.last_activity_at, self.streams = self.owner.clock(), False
        self._onward = b"content-type: %b\r\n" % other.content_type if other.content_type else b""
        self._begin(other.body)
        self.owner.ended(self, self._ended())

    def _begin(self, first: bytes) -> None:
        self.began, self.whole = True, len(first) == self._length  # what is whole has ended before we return
        self.body = b""
        self.owner.began(self, self._status, self.last_activity_at)
        headers = self._onward + self.owner.answer_head(self.active, self.timing)
        self._onward = self.timing = b""
        self.active.exchange.begin(self._status, headers, self._length, first)
