"""A gateway's connection: gRPC over HTTP/2, on the event loop itself.

All data of one read are processed before one write sends all answers. In grpcio each message is an operation of its
own, handed over between threads, and h2 makes an object and some copies of each frame: either costs more than the
choice (docs/measurements/performance.md). So frames are parsed here, and header blocks by hpack.

Invariants: a call's messages are taken in order and answered in order, each exactly once; a call ends once; an error
ends its call and no other, unless the connection itself cannot be parsed. Bounded: concurrent calls, the size of a
message and of a head, incomplete messages by the process's budget, data read while answers cannot be sent, the other
end's silence, work for one connection per turn of the loop, and frames without content. Never looks into a message:
that is the call's task.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Protocol, cast

from hpack import Decoder, HPACKError

from regional_lb.picker import http2
from regional_lb.picker.http2 import Http2Error

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.balance.bounds import ByteBudget

# The gRPC status codes used here.
OK, INVALID_ARGUMENT, NOT_FOUND = 0, 3, 5
RESOURCE_EXHAUSTED, FAILED_PRECONDITION, UNIMPLEMENTED = 8, 9, 12

_WINDOW_BYTES = 16 << 20  # of a connection: many gateways' requests share one
_STREAM_WINDOW_BYTES = 1 << 20  # a body of a usual size needs no window update
_HEADERS_BYTES_MAX = 16 * 1024
_CONTINUATIONS_MAX = 16
_UNSENT_BYTES_MAX = 256 * 1024  # of a call: beyond it no more of that call is read
_UNWRITTEN_BYTES_MAX = 1 << 20  # of a connection: beyond it nothing is read
_JOINED_BYTES_MAX = 16 * 1024  # of one write: smaller pieces are copied together, larger ones are passed on as they are
# In a turn of the loop some 2 ms are for one connection: a frame or a message takes 1 to 2 us, a call 30 more, and a
# head, whose fields are each an object, 3 us for each of its bytes at worst.
_TURN_WORK, _HEAD_WORK = 1024, 16
# How many more frames without content (pings, settings, windows, empty data; a reset or a refused call counts as ten)
# than messages there may be; each message compensates for some, and a second for some hundreds: a peer that keeps a
# connection alive sends few.
_IDLE_FRAMES_MAX, _IDLE_RESET, _IDLE_PER_MESSAGE, _IDLE_PER_SWEEP = 10_000, 10, 8, 250
_LINGER_S = 5.0  # the time for the other end to close a call that we have ended
_QUIET_S, _PING_S = 10.0, 5.0  # after this silence the other end is pinged; the time to answer
_PING = http2.frame(http2.PING, 0, 0, b"farhop  ")
_PREFIX_BYTES = 5  # before each gRPC message: a flag for compression, and its length


class Call(Protocol):
    """The handler of one call. `outbox`: messages to be sent, in order. `status`: gRPC's code and its text once nothing
    follows these; None before. `withdrawn`: what was in the outbox before must not be sent any more.
    """

    outbox: deque[bytes]

    @property
    def withdrawn(self) -> bool:
        """See the class."""

    @property
    def status(self) -> tuple[int, str] | None:
        """See the class."""

    def take(self, message: bytes | memoryview) -> None:
        """A message has come; it is lent until this returns. Never raises."""

    def sent(self) -> None:
        """The outbox was sent: nothing that was in it can be changed any more."""

    def ended(self) -> None:
        """No more will come or be sent: one end has ended it, or the other is gone. May be called twice."""

    def check(self, now: float) -> None:
        """Apply the time limits."""


class _Stream:
    """A call on its stream. `partial`: an incomplete message, of which `held` bytes are in the budget; `unsent`: what
    waits for a window, which is `granted` beyond the initial one; `room`: how many bytes may still come, of which
    `taken` were taken since the last window update.
    """

    __slots__ = (
        "begun",
        "call",
        "closed",
        "ended_at",
        "granted",
        "held",
        "identity",
        "partial",
        "room",
        "taken",
        "unsent",
        "unsent_bytes",
    )

    def __init__(self, identity: int, call: Call) -> None:
        self.identity, self.call = identity, call
        self.granted = self.held = 0
        self.partial = bytearray()
        self.unsent: deque[bytes | memoryview] = deque()
        self.unsent_bytes = self.taken = 0
        self.room = _STREAM_WINDOW_BYTES
        self.begun = self.closed = False  # whether the answer has begun; whether nothing more comes
        self.ended_at: float | None = None  # when we ended it, on the loop's clock

    def put(self, part: bytes | memoryview) -> None:
        self.unsent.append(part)
        self.unsent_bytes += len(part)


class GatewayConnection(asyncio.Protocol):
    """See the module's docstring. `call` makes the call of a method's path (None: there is no such method), and gets a
    function to wake the connection if it has something to send while nothing came. `closed` is called at the
    connection's end.
    """

    def __init__(
        self,
        call: Callable[[bytes, Callable[[], None]], Call | None],
        closed: Callable[[GatewayConnection], None],
        *,
        calls_max: int,
        message_bytes_max: int,
        budget: ByteBudget,
    ) -> None:
        self._make, self._closed = call, closed
        self._calls_max, self._message_bytes_max, self._budget = calls_max, message_bytes_max, budget
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._heads = Decoder(max_header_list_size=_HEADERS_BYTES_MAX)
        self.streams: dict[int, _Stream] = {}
        self._due: dict[int, _Stream] = {}  # those with something to send
        self._last = 0  # the last stream that the other end has begun
        # Reading: incomplete data and how many bytes are needed; the head that continues in further frames.
        self._partial, self._needed = bytearray(), len(http2.PREFACE)
        self._greeted = self._settled = False
        self._block: tuple[int, bool, list[bytes]] | None = None
        self._behind = b""  # data left for the next turn
        self._work = self._idle_frames = 0  # of this turn; in all, less the compensation
        self.room, self._taken = _WINDOW_BYTES, 0
        # Writing: the windows, and this turn's output.
        self._window, self._stream_window = http2.WINDOW_BYTES, http2.WINDOW_BYTES
        self._out: list[bytes | memoryview] = []
        self._out_bytes = 0
        self._reading = self._asked = self._paused = self._leaves = self.pinged = False
        self._widened = False  # all streams may have more to send
        self.received_at = self.called_at = self._loop.time()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send our SETTINGS, and the connection window."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_UNWRITTEN_BYTES_MAX)
        self._put(http2.settings({
            http2.MAX_CONCURRENT_STREAMS: self._calls_max,
            http2.INITIAL_WINDOW_SIZE: _STREAM_WINDOW_BYTES,
            http2.MAX_HEADER_LIST_SIZE: _HEADERS_BYTES_MAX,
        }))  # fmt: skip
        self._put(http2.window_update(0, _WINDOW_BYTES - http2.WINDOW_BYTES))
        self._write()

    def data_received(self, data: bytes) -> None:
        """Process all of it, or one turn's share, then answer."""
        self.received_at, self.pinged = self._loop.time(), False
        if self._behind:
            self._behind += data
        else:
            self._take(data)

    def _take(self, data: bytes) -> None:
        self._reading, self._work = True, _TURN_WORK
        try:
            if self._partial:
                self._partial += data
                if len(self._partial) < self._needed:
                    return
                data = bytes(self._partial)
                self._partial.clear()
            self._read(data)
            self._check_idle()
        except Http2Error as error:
            self._end(error.code, str(error))
            return
        finally:
            self._reading = False
        self._flush()
        if self._behind and self._transport is not None:
            self._transport.pause_reading()
            self._loop.call_soon(self._read_deferred)

    def _check_idle(self) -> None:
        if self._idle_frames > _IDLE_FRAMES_MAX:
            raise Http2Error(http2.ENHANCE_YOUR_CALM, "too many empty frames")

    def _read_deferred(self) -> None:
        """Another turn for data left over. If the other end does not read, once it does."""
        if self._transport is None or self._paused:
            return
        data, self._behind = self._behind, b""
        if data:
            self._take(data)
        if not self._behind and not self._paused and self._transport is not None:
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """The other end does not read: nothing more is read from it until it does, so that nothing piles up here."""
        self._paused = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """The gateway reads again."""
        self._paused = False
        if self._behind:
            self._loop.call_soon(self._read_deferred)
        elif self._transport is not None:
            self._transport.resume_reading()
        self._flush()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        """The connection is closed: all of its calls have ended."""
        self._transport = None
        self._drop()
        self._closed(self)

    # -- for its owner

    def close(self) -> None:
        """Send GOAWAY, and break open calls."""
        self._end(http2.NO_ERROR, "")

    def sweep(self, now: float) -> None:
        """Apply the time limits, on the loop's clock."""
        self._idle_frames = max(0, self._idle_frames - _IDLE_PER_SWEEP)
        for stream in tuple(self.streams.values()):
            if stream.ended_at is None:
                stream.call.check(now)
            elif now - stream.ended_at > _LINGER_S:
                del self.streams[stream.identity]
                self._put(http2.reset(stream.identity, http2.NO_ERROR))
        quiet_s = now - self.received_at
        if quiet_s > _QUIET_S + _PING_S:
            if self._transport is not None:
                self._transport.abort()
        elif quiet_s > _QUIET_S and not self.pinged and not self._paused:
            self.pinged = True
            self._put(_PING)
        self._flush()

    def _end(self, code: int, problem: str) -> None:
        transport, self._transport = self._transport, None
        if transport is None:
            return
        self._drop()
        self._put(http2.goaway(self._last, code, problem))
        transport.writelines(self._out)
        self._out.clear()
        transport.close()
        self._loop.call_later(_LINGER_S, transport.abort)  # of one that does not read the last message

    def _drop(self) -> None:
        streams, self.streams = self.streams, {}
        self._due.clear()
        for stream in streams.values():
            self._release_message(stream)
            if stream.ended_at is None:
                stream.call.ended()

    # -- frames received

    def _read(self, data: bytes) -> None:
        """Every whole frame in it. Raises Http2Error."""
        at, end = 0, len(data)
        if not self._greeted:
            if not http2.PREFACE.startswith(data[: len(http2.PREFACE)]):
                raise Http2Error(http2.PROTOCOL_ERROR, "this port speaks gRPC, which is HTTP/2")
            if end < len(http2.PREFACE):
                self._partial += data
                return
            self._greeted, at = True, len(http2.PREFACE)
        needed = http2.FRAME_HEAD_BYTES
        while end - at >= http2.FRAME_HEAD_BYTES:
            if self._work <= 0:
                self._behind = data[at:]
                return
            self._work -= 1
            size = int.from_bytes(data[at : at + 3])
            if size > http2.FRAME_BYTES_MAX:
                raise Http2Error(http2.FRAME_SIZE_ERROR, "a frame is too large")
            begin = at + http2.FRAME_HEAD_BYTES
            if begin + size > end:
                needed = http2.FRAME_HEAD_BYTES + size
                break
            kind, flags = data[at + 3], data[at + 4]
            identity = int.from_bytes(data[at + 5 : begin]) & 0x7FFF_FFFF
            at = begin + size
            if kind == http2.DATA and self._block is None:
                self._data(flags, identity, data[begin:at])
            else:
                self._frame(kind, flags, identity, data[begin:at])
        self._needed = needed
        if at < end:
            self._partial += memoryview(data)[at:]

    def _frame(self, kind: int, flags: int, identity: int, payload: bytes) -> None:
        if not self._settled and kind != http2.SETTINGS:
            raise Http2Error(http2.PROTOCOL_ERROR, "the first frame must be SETTINGS")
        if self._block is not None and (kind != http2.CONTINUATION or identity != self._block[0]):
            raise Http2Error(http2.PROTOCOL_ERROR, "HEADERS must be followed by CONTINUATION")
        taking = _TAKING.get(kind)
        if taking is not None:
            taking(self, flags, identity, payload)
        else:  # of later versions, and priorities: ignored
            self._idle_frames += 1

    def _settings(self, flags: int, identity: int, payload: bytes) -> None:
        if identity or (flags & http2.ACK and payload):
            raise Http2Error(http2.FRAME_SIZE_ERROR, "SETTINGS must be on stream 0, and an acknowledgement empty")
        self._settled = True
        self._idle_frames += 1
        if flags & http2.ACK:
            return
        for key, value in http2.read_settings(payload):
            self._work -= 1
            if key == http2.INITIAL_WINDOW_SIZE:
                self._stream_window, self._widened = value, True
        self._put(http2.frame(http2.SETTINGS, http2.ACK, 0))

    def _headers(self, flags: int, identity: int, payload: bytes) -> None:
        block = http2.unpadded(flags, payload)
        if flags & http2.WITH_PRIORITY:
            block = block[5:]
        ends = bool(flags & http2.END_STREAM)
        if flags & http2.END_HEADERS:
            self._head(identity, block, ends=ends)
        else:
            self._block = identity, ends, [block]

    def _continuation(self, flags: int, identity: int, payload: bytes) -> None:
        if self._block is None:
            raise Http2Error(http2.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        parts = self._block[2]
        parts.append(payload)
        if len(parts) > _CONTINUATIONS_MAX or sum(map(len, parts)) > _HEADERS_BYTES_MAX:
            raise Http2Error(http2.ENHANCE_YOUR_CALM, "a head is too large")
        if flags & http2.END_HEADERS:
            ends, self._block = self._block[1], None
            self._head(identity, b"".join(parts), ends=ends)

    def _head(self, identity: int, block: bytes, *, ends: bool) -> None:
        self._work -= _HEAD_WORK + len(block)
        http2.check_head(block)
        try:
            fields = dict(self._heads.decode(block, raw=True))  # also of a refused call, to keep the table in step
        except HPACKError:  # its text may contain addresses of our memory
            raise Http2Error(http2.COMPRESSION_ERROR, "a head cannot be read, or its fields are too large") from None
        if identity <= self._last:
            if identity in self.streams and not ends:
                raise Http2Error(http2.PROTOCOL_ERROR, "trailers must end the stream")
            self._ended(identity)
            return
        if not identity % 2:
            raise Http2Error(http2.PROTOCOL_ERROR, "a client's streams have odd numbers")
        self._last = identity
        kind = fields.get(b"content-type", b"")
        if len(self.streams) >= self._calls_max:
            self._idle_frames += _IDLE_RESET
            self._put(http2.reset(identity, http2.REFUSED_STREAM))
        elif fields.get(b":method") != b"POST" or not kind.startswith(b"application/grpc"):
            self._refuse(identity, http2.UNSUPPORTED_MEDIA_TYPE, ends=ends)
        else:
            self._begin(identity, fields.get(b":path", b""), ends=ends)

    def _begin(self, identity: int, path: bytes, *, ends: bool) -> None:
        def wake() -> None:
            if self.streams.get(identity) is stream:
                self._due[identity] = stream
                self._ask()

        self.called_at = self.received_at
        call = self._make(path, wake)
        if call is None:
            self._refuse(identity, http2.BEGUN + http2.status(UNIMPLEMENTED, "there is no such method here"), ends=ends)
            return
        stream = self.streams[identity] = _Stream(identity, call)
        if call.status is not None:
            self._due[identity] = stream
        if ends:
            self._ended(identity)

    def _data(self, flags: int, identity: int, payload: bytes) -> None:
        size, stream = len(payload), self.streams.get(identity)
        self.room -= size
        self._taken += size
        if identity > self._last or not identity or self.room < 0:
            raise Http2Error(http2.PROTOCOL_ERROR, "DATA on an idle stream, or beyond the flow-control window")
        if not size or stream is None:
            self._idle_frames += 1
        if stream is None:
            return  # it was on its way
        stream.room -= size
        stream.taken += size
        if stream.closed or stream.room < 0:
            raise Http2Error(http2.FLOW_CONTROL_ERROR, "DATA after END_STREAM, or beyond the flow-control window")
        if stream.ended_at is None and stream.call.status is None:
            self._due[identity] = stream
            self._messages(stream, http2.unpadded(flags, payload))
        if flags & http2.END_STREAM:
            self._ended(identity)

    def _messages(self, stream: _Stream, data: bytes) -> None:
        """Every whole message in it, after the data left from before."""
        partial = stream.partial
        if partial:
            partial += data
            if len(partial) < _PREFIX_BYTES + int.from_bytes(partial[1:_PREFIX_BYTES]):
                self._hold_partial(stream, partial)
                return
            self._release_message(stream)
            data, stream.partial = partial, bytearray()  # type: ignore[assignment]  # as good to read as bytes are
        at, end, whole = 0, len(data), memoryview(data)
        while end - at >= _PREFIX_BYTES and stream.call.status is None:
            begin = at + _PREFIX_BYTES
            until = begin + int.from_bytes(data[at + 1 : begin])
            if until > end or data[at]:
                break
            stream.call.take(whole[begin:until])
            at = until
            self._work -= 1
            if until == begin:
                self._idle_frames += 1
            elif self._idle_frames:
                self._idle_frames = max(0, self._idle_frames - _IDLE_PER_MESSAGE)
        if at < end and stream.call.status is None:
            stream.partial += whole[at:]
            self._hold_partial(stream, stream.partial)

    def _hold_partial(self, stream: _Stream, partial: bytearray) -> None:
        """Whether an incomplete message may be completed, and be held until then."""
        more = len(partial) - stream.held
        if not self._budget.take(more):
            self._fail(stream, RESOURCE_EXHAUSTED, "the balancer's buffers are full: retry later")
            return
        stream.held += more
        if len(partial) < _PREFIX_BYTES:
            return
        if partial[0]:
            self._fail(stream, UNIMPLEMENTED, "messages are not compressed here")
        elif int.from_bytes(partial[1:_PREFIX_BYTES]) > self._message_bytes_max:
            self._fail(stream, RESOURCE_EXHAUSTED, f"a message has at most {self._message_bytes_max} bytes")

    def _release_message(self, stream: _Stream) -> None:
        """Release an incomplete message."""
        stream.partial = bytearray()
        self._budget.give(stream.held)
        stream.held = 0

    def _ended(self, identity: int) -> None:
        """The gateway has ended the stream."""
        stream = self.streams.get(identity)
        if stream is None:
            return
        stream.closed = True
        self._release_message(stream)
        if stream.ended_at is None:
            stream.call.ended()
            self._due[identity] = stream
        else:
            del self.streams[identity]

    def _reset(self, _flags: int, identity: int, _payload: bytes) -> None:
        if not identity or identity > self._last:
            raise Http2Error(http2.PROTOCOL_ERROR, "RST_STREAM on an idle stream")
        stream = self.streams.pop(identity, None)
        self._due.pop(identity, None)
        if stream is None or stream.ended_at is not None:
            return
        self._idle_frames += _IDLE_RESET
        self._release_message(stream)
        stream.call.ended()

    def _granted(self, _flags: int, identity: int, payload: bytes) -> None:
        more = int.from_bytes(payload) & 0x7FFF_FFFF
        if len(payload) != 4 or not more:
            raise Http2Error(http2.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
        self._idle_frames += 1
        if not identity:
            self._window = window = self._window + more
            self._widened = True
        elif (stream := self.streams.get(identity)) is not None:
            stream.granted += more
            window = self._stream_window + stream.granted
            self._due[identity] = stream
        else:
            return
        if window > http2.WINDOW_BYTES_MAX:
            raise Http2Error(http2.FLOW_CONTROL_ERROR, "a flow-control window is too large")

    def _ping(self, flags: int, _identity: int, payload: bytes) -> None:
        if len(payload) != 8:
            raise Http2Error(http2.FRAME_SIZE_ERROR, "PING has eight bytes")
        self._idle_frames += 1
        if not flags & http2.ACK:
            self._put(http2.frame(http2.PING, http2.ACK, 0, payload))

    def _goes(self, _flags: int, _identity: int, _payload: bytes) -> None:
        """GOAWAY: it begins nothing more; open calls continue."""
        self._leaves = True

    def _no_push(self, _flags: int, _identity: int, _payload: bytes) -> None:
        raise Http2Error(http2.PROTOCOL_ERROR, "a client must not send PUSH_PROMISE")

    # -- frames sent

    def _ask(self) -> None:
        """Flush soon, unless that happens anyway after the present data."""
        if not self._reading and not self._asked:
            self._asked = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._asked = False
        if self._transport is None or self._paused:
            return
        if self._widened:
            self._widened = False
            waiting = (one for one in self.streams.items() if one[1].unsent or one[1].call.outbox)
            self._due.update(waiting)
        while self._due:
            due, self._due = self._due, {}
            for stream in due.values():
                if stream.ended_at is None:
                    self._send_due(stream)
        if self._taken > _WINDOW_BYTES // 2:
            self._put(http2.window_update(0, self._taken))
            self.room, self._taken = self.room + self._taken, 0
        more = self._out_bytes >= _UNWRITTEN_BYTES_MAX  # the rest stays where it can be taken back
        self._write()
        if more:
            self._widened = True
            self._ask()
        if self._leaves and not self.streams:
            self._end(http2.NO_ERROR, "")

    def _send_due(self, stream: _Stream) -> None:
        call = stream.call
        if stream.unsent and call.withdrawn:  # the rest of a message that has begun; none can follow it
            self._fail(stream, FAILED_PRECONDITION, "what was being sent was taken back")
            return
        outbox = call.outbox
        if outbox:
            room = _UNWRITTEN_BYTES_MAX - self._out_bytes
            while outbox and stream.unsent_bytes < room:
                message = outbox.popleft()
                size = len(message)
                stream.put(b"\0" + size.to_bytes(4))
                if size:
                    stream.put(message)
            if not outbox:
                call.sent()
        if stream.unsent:
            if not stream.begun:
                stream.begun = True
                self._put(http2.frame(http2.HEADERS, http2.END_HEADERS, stream.identity, http2.BEGUN))
            self._send(stream)
        if outbox:
            return
        if not stream.unsent and call.status is not None:
            self._finish(stream, *call.status)
        elif stream.taken > _STREAM_WINDOW_BYTES // 2 and stream.unsent_bytes < _UNSENT_BYTES_MAX and not stream.closed:
            self._put(http2.window_update(stream.identity, stream.taken))
            stream.room, stream.taken = stream.room + stream.taken, 0

    def _send(self, stream: _Stream) -> None:
        """Send as much as the windows allow, in frames."""
        window = self._stream_window + stream.granted
        unsent, room = stream.unsent, max(0, min(window, self._window, stream.unsent_bytes))
        stream.granted -= room
        self._window -= room
        while room > 0:
            size = left = min(room, http2.FRAME_BYTES_MAX)
            room -= size
            self._put(http2.frame_head(size, http2.DATA, 0, stream.identity))
            while left:
                part = unsent.popleft()
                if len(part) > left:
                    whole = memoryview(part)
                    unsent.appendleft(whole[left:])
                    part = whole[:left]
                self._put(part)
                left -= len(part)
            stream.unsent_bytes -= size

    def _finish(self, stream: _Stream, code: int, text: str) -> None:
        """End the call."""
        trailers = http2.status(code, text)
        block = trailers if stream.begun else http2.BEGUN + trailers
        self._put(http2.frame(http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, stream.identity, block))
        stream.ended_at = self._loop.time()
        self._release_message(stream)
        stream.call.ended()
        if stream.closed:
            self.streams.pop(stream.identity, None)

    def _fail(self, stream: _Stream, code: int, text: str) -> None:
        """End the call; nothing more of it is read or sent."""
        stream.call.ended()
        stream.call.outbox.clear()
        stream.unsent.clear()
        stream.unsent_bytes = 0
        self._finish(stream, code, text)

    def _refuse(self, identity: int, block: bytes, *, ends: bool) -> None:
        """Reject a stream before it becomes a call; its data are discarded."""
        self._idle_frames += _IDLE_RESET
        self._put(http2.frame(http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, identity, block))
        if not ends:
            self._put(http2.reset(identity, http2.NO_ERROR))

    def _put(self, part: bytes | memoryview) -> None:
        self._out.append(part)
        self._out_bytes += len(part)

    def _write(self) -> None:
        if not self._out or self._transport is None:
            return
        out, size = self._out, self._out_bytes
        self._out, self._out_bytes = [], 0
        if size <= _JOINED_BYTES_MAX:
            self._transport.write(b"".join(out))
        else:
            self._transport.writelines(out)


_TAKING: dict[int, Callable[[GatewayConnection, int, int, bytes], None]] = {
    http2.DATA: GatewayConnection._data,
    http2.HEADERS: GatewayConnection._headers,
    http2.RST_STREAM: GatewayConnection._reset,
    http2.SETTINGS: GatewayConnection._settings,
    http2.PUSH_PROMISE: GatewayConnection._no_push,
    http2.PING: GatewayConnection._ping,
    http2.GOAWAY: GatewayConnection._goes,
    http2.WINDOW_UPDATE: GatewayConnection._granted,
    http2.CONTINUATION: GatewayConnection._continuation,
}
