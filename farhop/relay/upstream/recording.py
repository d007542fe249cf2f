"""One upstream answer for several clients: it is recorded as it passes, and each client reads it at its own pace.

The relay sees a SharedExchange as the exchange of one request. It has several readers, one for each client; the client
that came first is the leader. Each reader has its own position in the recording and its own backpressure. The upstream
is read at the pace of the fastest client, and paused when all clients are behind; a client so far behind that the
recording has no room left is cut off. The upstream request continues while any client reads, and is cancelled when none
does. An outcome other than a good answer (a refusal, an error, a redirect) goes to the leader alone: the other readers
are released, and each of their requests is routed on its own.

Never decides who may read what, and never holds more bytes than its bound had room for, except the last piece received.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from farhop.balance import outcome
from farhop.relay.formats.cacheable import has_usage
from farhop.relay.formats.event_stream import each
from farhop.relay.http.exchange import Exchange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from farhop.balance.outcome import Outcome
    from farhop.relay.answers import Reply

PIECE_BYTES = 64 * 1024  # of a stored answer, sent at a time
READERS_MAX = 64  # of one answer: each piece of it is written to all of them in one turn of the loop, at 40 us each
_KEPT_LINES = (b"content-type:", b"x-farhop-version:")  # of the answer's head: its other lines belong to one request


class Room(Protocol):
    """A budget of bytes that recordings share (balance.answer_store)."""

    def take(self, n: int) -> bool:
        """Reserve n bytes more. Returns False, and reserves nothing, if there is no room."""

    def give(self, n: int) -> None:
        """Release n reserved bytes."""


class AnswerRecording:
    """The body of an answer, as far as it has arrived.

    `pieces`: consecutive pieces of the body, numbered from `first`; earlier ones were dropped. `held_bytes`: their
    size. `usage_at`: the number of the event that holds only the usage, None for no such event; it is sent only to
    clients that asked for the usage. `lines`: the header lines that are the same for all readers. `length`: the body's
    length in bytes, None if unknown. `whole`: whether the body is complete.
    """

    __slots__ = ("first", "held_bytes", "length", "lines", "pieces", "usage_at", "whole")

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.first = self.held_bytes = 0
        self.usage_at: int | None = None
        self.lines = b""
        self.length: int | None = None
        self.whole = False

    @property
    def end(self) -> int:
        """The number that the next piece will have."""
        return self.first + len(self.pieces)

    def add(self, piece: bytes, *, usage: bool = False) -> None:
        """Append a piece; with `usage` it is the event that holds only the usage."""
        if usage:
            self.usage_at = self.end
        self.pieces.append(piece)
        self.held_bytes += len(piece)

    def drop(self, before: int) -> int:
        """Drop the pieces with numbers below `before`; returns their size in bytes."""
        gone = self.pieces[: before - self.first]
        del self.pieces[: len(gone)]
        self.first += len(gone)
        size = sum(map(len, gone))
        self.held_bytes -= size
        return size


def sliced(body: bytes) -> tuple[bytes, ...]:
    """Split a body into pieces of PIECE_BYTES, so that a client is sent one after another, at its own pace."""
    return tuple(body[start : start + PIECE_BYTES] for start in range(0, len(body), PIECE_BYTES))


def complete_recording(
    lines: bytes, body: Iterable[bytes], usage: bytes, end: bytes, *, streams: bool
) -> AnswerRecording:
    """A complete recording of a stored answer. Any number of readers share it: its pieces are in memory once.

    `lines`: header lines; `usage`, `end`: the last events of a stream, b"" if there are none; `streams`: whether it is
    an event stream, which is sent without a length.
    """
    recording = AnswerRecording()
    recording.lines = lines
    for piece in body:
        recording.add(piece)
    if usage:
        recording.add(usage, usage=True)
    if end:
        recording.add(end)
    recording.length, recording.whole = None if streams else recording.held_bytes, True
    return recording


class ReaderOwner(Protocol):
    """Is notified of what happens to its readers."""

    def head(self, reader: Reader, recording: AnswerRecording) -> bytes:
        """The reader's answer begins now: return its header lines."""

    def over(self, reader: Reader, reason: Outcome | None) -> None:
        """The reader's answer is complete (`reason` None), or ended early. Called once for each reader, except those
        that were let go.
        """

    def reader_released(self, reader: Reader) -> None:
        """The reader's answer has not begun, and this recording will not provide it: route its request on its own."""

    def stopped(self, reader: Reader) -> None:
        """This process shuts down, and its drain time is over."""


class Reader:
    """A client that reads a recording (exchange.ExchangeCallbacks).

    `shared`: the exchange that is being recorded, None if the recording is complete. `wants_usage`: whether this client
    asked for the usage. `begun`: whether its answer's head was sent. `context` belongs to the owner.
    """

    __slots__ = ("_at", "begun", "context", "exchange", "owner", "paused", "recording", "shared", "wants_usage")

    def __init__(self, owner: ReaderOwner, exchange: Exchange, *, wants_usage: bool, context: object = None) -> None:
        self.owner, self.exchange, self.wants_usage, self.context = owner, exchange, wants_usage, context
        self.shared: SharedExchange | None = None
        self.recording: AnswerRecording | None = None
        self.begun = self.paused = False
        self._at = 0

    @property
    def at(self) -> int:
        """The number of the piece to read next."""
        return self._at

    def play(self, recording: AnswerRecording) -> None:
        """Start to send the recording from its beginning; `pump` continues when more arrives."""
        self.recording, self.exchange.callbacks = recording, self
        self.pump()

    def pump(self) -> None:
        """Send the pieces that are available, until the client is behind."""
        recording, exchange = self.recording, self.exchange
        if recording is None:
            return
        if not self.begun:
            self.begun = True
            lines, first = self.owner.head(self, recording), self._next(recording)
            exchange.begin(200, lines, recording.length, first)
        while not self.paused and self.recording is recording and self._at < recording.end:
            if piece := self._next(recording):
                exchange.write(piece)
        if recording.whole and self.recording is recording and self._at >= recording.end:
            self._end()
            exchange.finish()
            self.owner.over(self, None)

    def _next(self, recording: AnswerRecording) -> bytes:
        if self._at >= recording.end:
            return b""
        at, self._at = self._at, self._at + 1
        return b"" if at == recording.usage_at and not self.wants_usage else recording.pieces[at - recording.first]

    def _end(self) -> None:
        shared, self.shared, self.recording, self.exchange.callbacks = self.shared, None, None, None
        if shared is not None:
            shared.gone(self)

    def release(self) -> None:
        """Detach from the recording before anything was sent. The exchange keeps this reader as its callbacks until
        another owner takes it.
        """
        self.shared = self.recording = None

    def leave(self) -> None:
        """Detach from the recording: the client gets its answer from elsewhere."""
        self._end()

    def broke(self, event: bytes | None, reason: Outcome) -> None:
        """The recording will not be completed: send the remaining pieces, then `event`; without one, break the
        answer off.
        """
        self.paused = False
        recording = self.recording
        while recording is not None and self._at < recording.end:
            if piece := self._next(recording):
                self.exchange.write(piece)
        self.cut(event, reason)

    def cut(self, event: bytes | None, reason: Outcome) -> None:
        """End the answer at the current position, with `event` if there is one."""
        self._end()
        self.exchange.break_off(event)
        self.owner.over(self, reason)

    # -- exchange.ExchangeCallbacks

    def client_left(self) -> None:
        """The client is gone."""
        self._end()
        self.owner.over(self, outcome.CLIENT_LEFT)

    def stopped(self) -> None:
        """This process shuts down, and its drain time is over."""
        self.owner.stopped(self)

    def pause(self) -> None:
        """The client reads too slowly: stop sending."""
        self.paused = True
        if self.shared is not None:
            self.shared.flow()

    def resume(self) -> None:
        """The client has read what was sent: send more."""
        self.paused = False
        self.pump()
        if self.shared is not None:
            self.shared.flow()


class SharedExchange(Exchange):
    """The exchange that the relay answers, in place of the exchange of the first request (that of `leader`).

    An answer of at most `keeps_max` bytes is held completely: readers may join, and `recorded` is called once if it
    ends well. Of a longer answer, at most that much is held between the fastest and the slowest reader. `on_closed` is
    called once, when no reader can join any more. `stream`: whether an event stream was asked for. `leader_lines`: the
    head of the leader's answer (region, decision, timing). `callbacks`: those of the attempt that fetches the answer.
    """

    __slots__ = (
        "_keeps",
        "_over",
        "_room",
        "_solo",
        "_stopped",
        "_stream",
        "_taken",
        "_upstream_paused",
        "keeps_max",
        "leader",
        "leader_lines",
        "on_closed",
        "readers",
        "recorded",
        "recording",
    )  # fmt: skip

    def __init__(self, leader: Reader, room: Room, keeps_max: int, *, stream: bool) -> None:
        exchange = leader.exchange
        super().__init__(exchange._connection, exchange.head)
        self.context, self.tenant = exchange.context, exchange.tenant
        self.leader, self._room, self._stream = leader, room, stream
        self.recording, self.readers = AnswerRecording(), [leader]
        self.keeps_max, self._keeps = keeps_max, keeps_max > 0
        self.recorded: Callable[[], None] | None = None
        self.on_closed: Callable[[], None] | None = None
        self.leader_lines = b""
        self._taken = 0
        self._over = self._solo = self._stopped = self._upstream_paused = False
        leader.shared, exchange.callbacks = self, leader

    # -- readers

    @property
    def joinable(self) -> bool:
        """Whether a further reader can still read it from its beginning, and there are not too many."""
        return not (self._over or self._solo) and self.recording.first == 0 and len(self.readers) < READERS_MAX

    def join(self, reader: Reader) -> None:
        """Add a reader, which reads from the beginning."""
        reader.shared, reader.exchange.callbacks = self, reader
        self.readers.append(reader)
        if self.started:
            reader.exchange.release_body()
            reader.play(self.recording)
            self.flow()

    def gone(self, reader: Reader) -> None:
        """Remove a reader. Without any reader left, the upstream request is cancelled."""
        if reader in self.readers:
            self.readers.remove(reader)
        if not self.readers and not self._over:
            self._close_sharing()
            self._over = True
            if self.callbacks is not None:
                self.callbacks.client_left()
        elif not self._over:
            self._trim()
            self.flow()
        self._give_back()

    def flow(self) -> None:
        """Pause the upstream while all readers are behind, and resume it otherwise."""
        if self._over or self._solo or self.callbacks is None or not self.readers:
            return
        behind = all(reader.paused for reader in self.readers)
        if behind != self._upstream_paused:
            self._upstream_paused = behind
            if behind:
                self.callbacks.pause()
            else:
                self.callbacks.resume()

    def stop(self) -> None:
        """The drain time is over: end the answer for all readers."""
        if not (self._over or self._stopped) and self.callbacks is not None:
            self._stopped = True
            self.callbacks.stopped()

    # -- Exchange, as the relay sees it

    @property
    def is_open(self) -> bool:
        """Whether any client waits for the answer."""
        return self.leader.exchange.is_open if self._solo else bool(self.readers)

    @property
    def unsent_bytes(self) -> int:
        """Bytes held in the recording, and bytes that the clients' connections have not sent yet."""
        return self.recording.held_bytes + sum(reader.exchange.unsent_bytes for reader in self.readers)

    def release_body(self) -> None:
        """Release the clients' request bodies: none is needed again."""
        for reader in self.readers:
            reader.exchange.release_body()

    def reply(self, reply: Reply) -> None:
        """An answer of the balancer itself: only the leader gets it."""
        self.started = True
        if self._alone():
            self.leader.exchange.reply(reply)

    def begin(self, status: int, headers: bytes, length: int | None, first: bytes) -> None:
        """The answer begins. Only the leader gets an answer with another status than 200, not in the form that was
        asked for, or with a content-encoding, which the shared header lines would not name.
        """
        self.started = True
        lines = b"".join(line + b"\r\n" for line in headers.split(b"\r\n") if line.startswith(_KEPT_LINES))
        coded = b"content-encoding:" in headers
        if status != 200 or coded or (b"text/event-stream" in lines) != self._stream:
            if self._alone():
                self.leader.exchange.begin(status, headers, length, first)
            elif self.callbacks is not None:
                self.callbacks.client_left()
            return
        recording = self.recording
        recording.lines, recording.length = lines, length
        self.leader_lines = headers
        if length is not None and length > self.keeps_max:
            self._keeps = False
        if first:
            self._add(first)
        for reader in tuple(self.readers):
            reader.play(recording)
        self._trim()

    def write(self, data: bytes) -> None:
        """Add data, and send it to the readers."""
        if self._solo:
            self.leader.exchange.write(data)
            return
        self._add(data)
        for reader in tuple(self.readers):
            reader.pump()
        self._trim()

    def finish(self) -> None:
        """The answer is complete."""
        if self._solo:
            self.leader.exchange.finish()
            return
        self._close_sharing()
        self._over = self.recording.whole = True
        if self._keeps and self.recording.first == 0 and self.recorded is not None:
            self.recorded()
        for reader in tuple(self.readers):
            reader.pump()
        self._give_back()

    def break_off(self, event: bytes | None) -> None:
        """The answer cannot be completed, for any reader."""
        if self._solo:
            self.leader.exchange.break_off(event)
            return
        self._close_sharing()
        self._over = True
        reason = outcome.STOPPING if self._stopped else outcome.DIED_MID_STREAM
        for reader in tuple(self.readers):
            reader.broke(event, reason)
        self._give_back()

    # -- inside

    def _alone(self) -> bool:
        """Give the answer to the leader alone, and release all other readers. Returns whether the leader is still
        connected.
        """
        self._close_sharing()
        self._solo = True
        there = self.leader in self.readers
        others = [reader for reader in self.readers if reader is not self.leader]
        self.readers = []
        for reader in others:
            reader.release()
            reader.owner.reader_released(reader)
        if there:
            self.leader.shared, self.leader.exchange.callbacks = None, self.callbacks
        return there

    def _close_sharing(self) -> None:
        on_closed, self.on_closed = self.on_closed, None
        if on_closed is not None:
            on_closed()

    def _add(self, data: bytes) -> None:
        recording = self.recording
        if self._keeps and recording.held_bytes + len(data) > self.keeps_max:
            self._keeps = False
        self._find_room(len(data))
        parts = each(data) if self._stream and b'"usage"' in data else (data,)
        for part in parts:
            recording.add(part, usage=self._stream and has_usage(part))

    def _find_room(self, size: int) -> None:
        """Reserve `size` bytes. If there is no room, drop the pieces that all have read, then cut off the slowest
        readers.

        If there is still none, the piece is held without a reservation: it was in flight before the upstream could be
        paused.
        """
        found = self._room.take(size)
        if not found:
            self._keeps = False
            self._forget_read()
            found = self._room.take(size)
        while not found and self._cut_slowest():
            found = self._room.take(size)
        self._taken += size if found else 0

    def _trim(self) -> None:
        """Unless the whole answer is kept, drop the pieces that all have read, and cut off readers too far behind."""
        if self._keeps or not self.readers:
            return
        self._forget_read()
        while self.recording.held_bytes > self.keeps_max and self._cut_slowest(self.keeps_max):
            pass

    def _forget_read(self) -> None:
        recording = self.recording
        least = min((reader.at for reader in self.readers), default=recording.end)
        if least > recording.first:
            self._close_sharing()
            self._release(recording.drop(least))

    def _cut_slowest(self, lag_max: int = 0) -> bool:
        """Cut off the readers furthest behind, if they lag the fastest by more than `lag_max` bytes. Returns whether
        any was cut off.
        """
        ats = [reader.at for reader in self.readers]
        first, least, most = self.recording.first, min(ats, default=0), max(ats, default=0)
        if sum(map(len, self.recording.pieces[least - first : most - first])) <= lag_max:
            return False
        for reader in [one for one in self.readers if one.at == least]:
            if reader in self.readers:  # when one is cut off, `gone` trims, which may cut off the next
                reader.cut(None, outcome.CLIENT_LEFT)
        self._forget_read()
        return True

    def _release(self, size: int) -> None:
        given = min(size, self._taken)
        self._taken -= given
        self._room.give(given)

    def _give_back(self) -> None:
        if self._over and not self.readers:
            self._release(self._taken)
