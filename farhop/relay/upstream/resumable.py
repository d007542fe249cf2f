"""Attempts whose stream can be continued by another attempt if it breaks.

The first attempt asks the engine for token ids, and later ones continue from the ids received so far. If continuing by
text is allowed and the engine sends no ids, the text received so far is kept instead.

What is kept is bounded per stream (`formats.resumption`, `formats.text_resumption`) and per process (`Resumption`).
Never sends a continuation on its own: the machine says whether and where. A client never sees an engine's refusal of
one.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Literal, get_args

from farhop.balance import machine, outcome
from farhop.relay.formats import resumption, text_resumption
from farhop.relay.formats.event_stream import each, is_crowded
from farhop.relay.formats.exact_resumption import ExactProgress, HopProgress
from farhop.relay.formats.resumption import Progress, Unresumable
from farhop.relay.formats.text_resumption import TextProgress
from farhop.relay.http.head import RESUME
from farhop.relay.upstream import engine_faults
from farhop.relay.upstream.attempt import AttemptRun
from farhop.relay.upstream.tap import END, ERROR, FINISHES, FINISHES_SPACED, StreamTap, has_usage

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.balance.machine import Usage
    from farhop.balance.outcome import Outcome
    from farhop.relay.active import ActiveRequest
    from farhop.relay.formats.resumption import Plan
    from farhop.relay.formats.transcript import Transcript
    from farhop.relay.http.head import AnswerHead
    from farhop.relay.upstream.attempt import AttemptOwner

VERSION = b"x-farhop-version"
KEPT_BYTES_MAX = 256 * 1024 * 1024
_PACKING_MAX = 4096  # targets; of more none is remembered
IDS = b"ids"  # in a request: send them; in an answer: they are sent
TEXT = b"text"  # the same, and without ids the stream is continued by its text
_CONTINUES = b"continue-"  # in a request: the body is a continuation, by what follows
# Failures that an engine reports about itself in the middle of a stream: another engine would not have them.
_GOES_ON_ELSEWHERE = (outcome.ENGINE_BROKEN, outcome.ENGINE_OUT_OF_MEMORY)
_BREAKS = (outcome.DIED_MID_STREAM, outcome.STALLED, *_GOES_ON_ELSEWHERE)
_NO_BREAKS = (outcome.SERVED, outcome.CLIENT_LEFT, outcome.STOPPING, outcome.DEADLINE)  # a begun stream ends so, too
# A stream's first event has the ids of its prompt, some bytes each, and those that a template added: its length may
# grow with the prompt.
_IDS_BYTES_MAX, _BYTES_PER_ID, _TEMPLATE_BYTES_MAX = 4 * 1024 * 1024, 8, 64 * 1024
_LISTED, _LOOKED_AT, _BEHIND_BYTES = b"0123456789, ", 4096 + 512, 512  # what is behind the ids may be here, too
_COUNTED_EACH = 0xFF  # at the first token, and at every 256th from there

ResumeMode = Literal["off", "exact", "text"]
"""What streams may go on by: nothing, token ids, or text where there are no ids. Each more than the one before."""
MODES: tuple[ResumeMode, ...] = ("off", "exact", "text")


def carrier(value: bytes | None) -> machine.Carrier | None:
    """Of a tier's header, what the stream that the request continues goes on by; None: it continues none."""
    return _CARRIERS.get(value) if value is not None else None


_CARRIERS: dict[bytes, machine.Carrier] = {_CONTINUES + name.encode(): name for name in get_args(machine.Carrier)}


class Resumption:
    """Which streams of this process can be continued, and what became of those that broke. `context_tokens` gives, for
    a target and a model, the most tokens of prompt and answer there, 0 if unknown, None if it does not report ids.
    `mode`: for a tenant and a model, by what its streams may be continued; `writes_on`: whether a target can continue
    text."""

    def __init__(
        self,
        context_tokens: Callable[[str, str], int | None],
        kept_bytes_max: int = KEPT_BYTES_MAX,
        mode: Callable[[str, str], ResumeMode] = lambda _tenant, _model: "exact",
        writes_on: Callable[[str], bool] = lambda _target: False,
    ) -> None:
        self.context_tokens, self._kept_bytes_max, self.mode = context_tokens, kept_bytes_max, mode
        self.writes_on = writes_on
        self.attempt = partial(ResumableRun, resumption=self)  # makes a request's first attempt
        self.kept_bytes = 0
        self.packs: set[str] = set()  # targets that were seen to put several tokens into an event
        self.outcomes: Counter[tuple[str, str]] = Counter()  # (outcome, reason)
        self.recomputed_tokens = 0

    def of(self, path: bytes, body: bytes, tenant: str, model: str, asked: bytes | None = None) -> Progress | None:
        """What will be known of the stream that this body asks for; None if it could not go on, which is counted.
        `asked`: what the tier above says, which is to know it, too."""
        if carrier(asked) is not None:
            return None  # what it goes on by passes as it is, and the tier above goes on from there
        mode, why_not = self.mode(tenant, model), "tenant"
        if mode != "off":
            try:
                return self.by_ids(resumption.plan(path, body, text=mode == "text"), body, for_hop=asked is not None)
            except Unresumable as reason:
                why_not = str(reason)
        self.outcomes["not_resumable", why_not] += 1
        return None

    def context_of(self, progress: Progress, target: str, model: str) -> int:
        """The context length of the model at a target. Where it does not say (it has just started, or is gone), that of
        the engine before: else a stream without a limit of its own would end there at once, as if at one."""
        return self.context_tokens(target, model) or progress.context_tokens

    def by_ids(self, plan: Plan, body: bytes, *, for_hop: bool) -> ExactProgress:
        """What will be known of a stream that goes on by ids, asked for with this body. `for_hop`: to the tier above,
        too."""
        return HopProgress(plan, body) if for_hop else ExactProgress(plan, body)

    def by_text(self, active: ActiveRequest, *, for_hop: bool) -> TextProgress | None:
        """The same of a request under way whose stream can go on by its text alone. `for_hop`: so can the tier above,
        which hides from its client what that is not to see of stop strings."""
        assert active.progress is not None  # it has a plan
        try:
            made = TextProgress(active.progress.plan, active.body, sends_usage=not active.hide_usage)
        except Unresumable as reason:
            self.outcomes["not_resumable", str(reason)] += 1
            return None
        if for_hop:
            made.strips = False  # it counts by that, too, and takes it out
            if made.stops is not None:
                made.stops.hides = False
        return made

    def packing(self, target: str) -> None:
        """An engine was seen to put several tokens into an event: from now on it is asked to count them."""
        if len(self.packs) < _PACKING_MAX:
            self.packs.add(target)

    def over(self, progress: Progress, reason: Outcome) -> None:
        """A stream is over: drop what was kept of it. If it ended broken, count the reason why it was not continued."""
        self.kept_bytes -= progress.counted_bytes
        self.recomputed_tokens += progress.recomputed
        if reason in _BREAKS or ((progress.tokens or progress.resumed) and reason not in _NO_BREAKS):
            self.outcomes["broken", progress.hindrance or "nowhere"] += 1

    def keeps(self, progress: Progress) -> bool:
        """Account for what a stream keeps now; whether there is room for it."""
        progress.compact()
        self.kept_bytes += progress.held_bytes - progress.counted_bytes
        progress.counted_bytes = progress.held_bytes
        return self.kept_bytes <= self._kept_bytes_max


class ResumableTap(StreamTap):
    """Keeps what a stream goes on by.

    `withheld` is an event by which an engine says that it is broken, and what came behind it: whoever reads on decides
    whether the client gets to see it. `broke` is what it says.
    """

    __slots__ = ("_endless", "_first_bytes_max", "_resumption", "_said", "broke", "progress", "withheld")

    def __init__(
        self,
        hide_usage: bool,
        transcript: Transcript | None,
        geo: str,
        progress: Progress,
        owner: Resumption,
        body_bytes: int = 0,
    ) -> None:
        super().__init__(hide_usage, transcript, geo)
        self.progress, self._resumption = progress, owner
        ids_bytes = _BYTES_PER_ID * (body_bytes + progress.tokens)
        self._first_bytes_max = _TEMPLATE_BYTES_MAX + min(_IDS_BYTES_MAX, ids_bytes)
        self._said = self._endless = False  # an event has passed; a part of one has
        self.broke: Outcome | None = None
        self.withheld = b""

    @property
    def held_bytes(self) -> int:
        """See StreamTap."""
        return super().held_bytes + self.progress.held_bytes

    def feed(self, data: bytes) -> bytes:
        """See StreamTap."""
        # As StreamTap.feed, without a frame more for each chunk.
        if (
            self._tail
            or not data.endswith(END)
            or (data.rfind(b'"usage"') >= 0 and has_usage(data))
            or (self._hide and (self._finish or data.rfind(FINISHES) >= 0 or data.rfind(FINISHES_SPACED) >= 0))
        ):
            self._endless = False
            events = self._slow(data)
        else:
            self._keep(events := data)
        if self._endless or is_crowded(events):
            return self._pass_unread(events)
        self._said = self._said or b"data:" in events
        if events.rfind(ERROR) >= 0:  # in a text it would be escaped
            events = self._unbroken(events)
        return self._taken(events) if events else events

    def _is_endless(self, tail: bytearray) -> bool:
        """See StreamTap."""
        self._endless = len(tail) > resumption.EVENT_BYTES_MAX and (
            self._said or len(tail) > self._first_bytes_max or bool(tail[-_LOOKED_AT:-_BEHIND_BYTES].strip(_LISTED))
        )
        return self._endless

    def _pass_unread(self, events: bytes) -> bytes:
        """Bytes that are no events of a known engine: pass them unchanged, and never resume the stream. In a
        continuation nothing is passed, since it cannot be rewritten.
        """
        self.progress.why_not = self.progress.why_not or "unreadable"
        return b"" if self.progress.resumed else events

    def _unbroken(self, events: bytes) -> bytes:
        """The events before one that says that the engine is broken; the others are withheld."""
        start = 0
        for event in each(events):
            self.broke = engine_faults.in_event(event) if ERROR in event else None
            if self.broke in _GOES_ON_ELSEWHERE:
                self.withheld = events[start:]
                return events[:start]
            start += len(event)
        self.broke = None
        return events

    def finish(self) -> bytes:
        """See StreamTap."""
        events = super().finish()
        return self._taken(events) if events else events

    def _taken(self, events: bytes) -> bytes:
        """Complete events, as they are passed on."""
        raise NotImplementedError

    def _count(self) -> None:
        if not self._resumption.keeps(self.progress):
            self.progress.why_not = self.progress.why_not or "memory"

    def _stopping(self, events: bytes) -> bytes:
        """The same where there are stop strings. What continues a stream is shown when it is rewritten."""
        progress = self.progress
        passed = progress.take(progress.apply_stops(events))
        return passed if progress.resumed else progress.visible(passed)


class ExactTap(ResumableTap):
    """Takes the ids out of a stream, and keeps them."""

    __slots__ = ()

    progress: ExactProgress

    def feed(self, data: bytes) -> bytes:
        """See StreamTap."""
        progress = self.progress
        if self._tail or self._finish or progress.stops is not None or (known := progress.token(data)) is None:
            return super().feed(data)
        passed, text = known  # nothing else is in it: so nothing is searched for
        if self._transcript is not None:
            self._transcript.add(text)
        self._before, self._last = self._last, b""
        if len(progress.ids) & _COUNTED_EACH == 1:
            self._count()
        return passed

    def _taken(self, events: bytes) -> bytes:
        progress = self.progress
        passed = progress.take(events) if progress.stops is None else self._stopping(events)
        if len(progress.ids) & _COUNTED_EACH == 1:
            self._count()
        return passed


class TextTap(ResumableTap):
    """Keeps the text of a stream, for a continuation from text."""

    __slots__ = ()

    progress: TextProgress

    def feed(self, data: bytes) -> bytes:
        """See StreamTap."""
        progress = self.progress
        if self._tail or self._finish or not progress.adds(data):
            passed = super().feed(data)
            progress.set_usage(self.usage)  # which the client may not be told: then nothing passed
            return passed
        self._keep(data)
        if progress.tokens & _COUNTED_EACH == 1:
            self._count()
        return data

    def finish(self) -> bytes:
        """See StreamTap."""
        passed = super().finish()
        self.progress.set_usage(self.usage)
        return passed

    def _taken(self, events: bytes) -> bytes:
        progress = self.progress
        passed = progress.take(events) if progress.stops is None else self._stopping(events)
        if progress.tokens & _COUNTED_EACH == 1:
            self._count()
        return passed


class ResumableRun(AttemptRun):
    """The first attempt whose answer reaches the client. If its engine reports token ids, it is asked for them."""

    __slots__ = ("_asked", "_progress", "_resumption")

    def __init__(
        self, owner: AttemptOwner, active: ActiveRequest, number: int, now: float, resumption: Resumption
    ) -> None:
        super().__init__(owner, active, number, now)
        assert active.progress is not None  # else the relay makes another kind
        self._progress, self._resumption = active.progress, resumption
        self._asked = b""  # what for: IDS, TEXT, or nothing

    def request(self, host: bytes) -> tuple[bytes, bytes]:
        """See AttemptRun."""
        active, plan, target = self.active, self._progress.plan, self.target
        body = self.body
        if self.owner.upstream_is_tier:
            self._asked = TEXT if plan.text else IDS
            more = RESUME + b": " + self._asked + b"\r\n"
            return self.owner.upstream_head(active, host, len(body), more), body
        if self._resumption.context_tokens(target, active.request.model) is not None:
            self._asked = IDS
            body = resumption.asking(body, plan)
        elif plan.text and self._resumption.writes_on(target):
            self._asked = TEXT
            if plan.stops and plan.hides_stop:
                body = resumption.asking(body, plan, text_resumption.ASKS)
            if target in self._resumption.packs and text_resumption.can(plan, body):
                body = text_resumption.counting(body)
        return self.owner.upstream_head(active, host, len(body)), body

    def answered(self, answer: AnswerHead) -> None:
        """See AttemptRun."""
        super().answered(answer)
        if not self._asked or answer.status != 200 or not isinstance(self._tap, StreamTap):
            return
        active, offered = self.active, b""  # what the tier above is to know, too
        if self.owner.upstream_is_tier:
            known = answer.known.get(RESUME, b"")
            if known != IDS and known != self._asked:
                return  # it has nothing for us to go on by: its chunks pass as they are
            self._asked = known
        elif active.exchange.is_hop:
            offered = active.exchange.head.known.get(RESUME, b"")
        made: type[ResumableTap] = ExactTap
        if self._asked == TEXT:
            made, progress = TextTap, self._resumption.by_text(active, for_hop=offered == TEXT)
            if progress is None:
                return
            active.progress = self._progress = progress
        elif not isinstance(self._progress, ExactProgress):  # the target asked before would have continued by text
            ours = self._resumption.by_ids(self._progress.plan, active.body, for_hop=bool(offered))
            active.progress = self._progress = ours
        self._answers()
        if self.owner.upstream_is_tier:
            self._progress.version = answer.known.get(VERSION, b"")
        elif self._asked == offered or (self._asked == IDS and offered):
            self._onward += RESUME + b": " + self._asked + b"\r\n"
        body_bytes = active.request.body_bytes
        self._tap = made(active.hide_usage, self._transcript, active.geo, self._progress, self._resumption, body_bytes)

    def _answers(self) -> None:
        """Keep what is to be known of its engine once that is gone."""
        progress, model = self._progress, self.active.request.model
        progress.context_tokens = self._resumption.context_of(progress, self.target, model)

    def received(self, data: bytes) -> None:
        """See AttemptRun. It begins with its first whole event: before that nothing is known to go on from, and the
        request may still be asked elsewhere as if it had never been here."""
        tap = self._tap
        if not isinstance(tap, ResumableTap):
            super().received(data)
        elif not self._over:
            self.last_activity_at = self.owner.clock()
            if events := tap.feed(data):
                if events.rfind(ERROR) >= 0:
                    events = engine_faults.without_traces(events)
                if self.began:
                    self.active.exchange.write(events)
                else:
                    self._begin(events)
            if tap.withheld and not self._over:
                self._engine_broke(tap)

    def _engine_broke(self, tap: ResumableTap) -> None:
        """The engine reports that it is broken. If the stream can be continued elsewhere, treat it like a broken
        connection. Else the client gets its word as it is."""
        withheld, tap.withheld = tap.withheld, b""
        if self.began and self.resumable and tap.broke is not None:
            self.abort()
            self.owner.failed(self, tap.broke)
            return
        withheld = engine_faults.without_traces(withheld)
        if self.began:
            self.active.exchange.write(withheld)
        else:
            self._begin(withheld)

    def completed(self) -> None:
        """See AttemptRun."""
        target, progress = self.target, self._progress
        super().completed()
        if isinstance(progress, TextProgress) and progress.packs and not self.owner.upstream_is_tier:
            self._resumption.packing(target)

    @property
    def resumable(self) -> bool:
        """Whether its stream could go on elsewhere now."""
        if not isinstance(self._tap, ResumableTap) or not self._progress.can_resume:
            return False
        context_tokens = self._resumption.context_of(self._progress, self.target, self.active.request.model)
        return self._progress.bounded(context_tokens)

    @property
    def carried_by(self) -> machine.Carrier:
        """See AttemptRun."""
        return self._progress.carried_by

    def lost(self, reason: Outcome) -> None:
        """See AttemptRun. A stream that has all its chunks lacks no more than its end."""
        if isinstance(self._tap, ResumableTap) and self._progress.can_end:
            self._end_whole()
        else:
            super().lost(reason)

    def _end_whole(self) -> None:
        if self._close():
            # Nothing, if all of its end was sent: an empty chunk would end the answer, and its end would be sent twice.
            if end := self._progress.end(sends_usage=not self.active.hide_usage):
                self.active.exchange.write(end)
            request_id, usage = self.active.request.id, machine.plausible(self._progress.usage, self.active.request)
            self.owner.ended(self, machine.AttemptEnded(request_id, self.number, self._status, usage))


class ContinuedRun(ResumableRun):
    """An attempt that continues a stream which the client has the beginning of."""

    __slots__ = ("_usage_due",)

    def __init__(
        self, owner: AttemptOwner, active: ActiveRequest, number: int, now: float, resumption: Resumption
    ) -> None:
        super().__init__(owner, active, number, now, resumption)
        self._usage_due = not active.hide_usage
        self._transcript = None  # the answer's beginning was heard by another
        self.streams = True

    def request(self, host: bytes) -> tuple[bytes, bytes]:
        """See AttemptRun."""
        progress, active = self._progress, self.active
        context_tokens = self._resumption.context_of(progress, self.target, active.request.model)
        more = b""
        if self.owner.upstream_is_tier:
            more = RESUME + b": " + _CONTINUES + progress.carried_by.encode() + b"\r\n"
        body = progress.continuation_body(context_tokens)
        active.body, active.target = body, progress.target  # as the hop token signs it
        head = self.owner.upstream_head(active, host, len(body), more, progress.target)
        active.body = b""
        return head, body

    def answered(self, answer: AnswerHead) -> None:
        """See AttemptRun."""
        self._status = answer.status
        if self.owner.upstream_is_tier and self._is_not_the_tiers(answer):
            return
        if answer.status != 200 or not answer.known.get(b"content-type", b"").startswith(b"text/event-stream"):
            elsewhere = answer.status in (429, 503) or outcome.of_misconfigured(answer.status) is not None
            self._give_up(outcome.DIED_BEFORE_START if elsewhere else outcome.ENGINE_ERROR)
            return
        self._answers()
        made = TextTap if isinstance(self._progress, TextProgress) else ExactTap
        self._tap = made(True, None, "", self._progress, self._resumption, self.active.request.body_bytes)

    def received(self, data: bytes) -> None:
        """See AttemptRun."""
        if self._over or self._tap is None:
            return
        self.last_activity_at = self.owner.clock()
        self._write(self._tap.feed(data))
        stops = self._progress.stops
        if stops is not None and stops.ended:  # over a seam, which the engine cannot see: it would go on
            self._end_whole()
            return
        if isinstance(self._tap, ResumableTap) and self._tap.withheld:
            self.abort()
            broke = self._tap.broke if self.began else None
            self.owner.failed(self, broke or outcome.DIED_BEFORE_START)

    def completed(self) -> None:
        """See AttemptRun."""
        if not self._close() or self._tap is None:
            return
        self._write(self._tap.finish())
        if not self._progress.finished:
            self.owner.failed(self, outcome.DIED_MID_STREAM if self.began else outcome.DIED_BEFORE_START)
            return
        if end := self._progress.end(sends_usage=self._usage_due):  # its engine said no `[DONE]`
            self.active.exchange.write(end)
        ended = self._ended()
        self.owner.ended(self, machine.AttemptEnded(ended.id, ended.attempt, self._status, self.usage, ended.fault))

    def _write(self, events: bytes) -> None:
        if not events:
            return
        if not self.began:
            self.began = True
            self.owner.resumed(self, self._status)
        rewritten = self._progress.rewritten(events, sends_usage=self._usage_due)
        if ERROR in rewritten:
            rewritten = engine_faults.without_traces(rewritten)
        if rewritten:
            self.active.exchange.write(rewritten)

    @property
    def usage(self) -> Usage | None:
        """The usage of the whole stream."""
        return machine.plausible(self._progress.usage, self.active.request)
