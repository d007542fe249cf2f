"""A gateway's connection without a network: frames in, frames out; and one with grpcio at its other end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from hpack import Decoder, Encoder
from hypothesis import given
from hypothesis import strategies as st

from farhop.balance.bounds import ByteBudget
from regional_lb.picker import http2
from regional_lb.picker.connection import GatewayConnection

MESSAGE_BYTES_MAX = 2_000_000


class Echo:
    """Says each message again; `/held` says nothing until it is told to, `/failing` ends at its first message."""

    def __init__(self, path: bytes, wake: Callable[[], None]) -> None:
        self.path, self.wake = path, wake
        self.outbox: deque[bytes] = deque()
        self.taken: list[bytes] = []
        self.status: tuple[int, str] | None = None
        self.told_over = self.checks = 0
        self.withdrawn = False

    def take(self, message: bytes | memoryview) -> None:
        self.taken.append(bytes(message))
        if self.path == b"/failing":
            self.status = (9, "not so")
        elif self.path != b"/held":
            self.outbox.append(bytes(message))

    def sent(self) -> None:
        pass

    def ended(self) -> None:
        self.told_over += 1
        self.status = self.status or (0, "")

    def check(self, now: float) -> None:
        self.checks += 1


class Wire:
    """A transport that keeps what is written, and the connection on it, which has said its first words."""

    def __init__(self, calls_max: int = 100, budget_bytes: int = 64 << 20) -> None:
        self.calls: list[Echo] = []
        self.written = bytearray()
        self.is_over = self.is_lost = False
        self.reads = True
        self._heads, self._encoder = Decoder(), Encoder()
        self.budget = ByteBudget(budget_bytes)
        self.connection = GatewayConnection(
            self._call,
            lambda _: setattr(self, "is_lost", True),
            calls_max=calls_max,
            message_bytes_max=MESSAGE_BYTES_MAX,
            budget=self.budget,
        )
        self.connection.connection_made(self)  # type: ignore[arg-type]

    def _call(self, path: bytes, wake: Callable[[], None]) -> Echo | None:
        if path == b"/unknown":
            return None
        self.calls.append(Echo(path, wake))
        return self.calls[-1]

    # -- asyncio.Transport

    def set_write_buffer_limits(self, high: int) -> None:
        assert high > 0

    def write(self, data: bytes) -> None:
        assert not self.is_over
        self.written += data

    def writelines(self, parts: list[bytes | memoryview]) -> None:
        for part in parts:
            self.write(bytes(part))

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        if not self.is_over:
            self.is_over = True
            self.connection.connection_lost(None)

    # -- the other end

    def greet(self, **values: int) -> None:
        fields = {http2.INITIAL_WINDOW_SIZE: values.get("window", 1 << 20)}
        self.connection.data_received(http2.PREFACE + http2.settings(fields))
        self.written.clear()

    def send(self, *frames: bytes) -> None:
        self.connection.data_received(b"".join(frames))

    def head(
        self, stream: int, path: bytes = b"/echo", *more: tuple[bytes, bytes], flags: int = http2.END_HEADERS
    ) -> bytes:
        fields = [(b":method", b"POST"), (b":path", path), (b":scheme", b"http"), (b":authority", b"picker"),
                  (b"content-type", b"application/grpc"), *more]  # fmt: skip
        return http2.frame(http2.HEADERS, flags, stream, self._encoder.encode(fields))

    def sent(self) -> list[tuple[int, int, int, bytes]]:
        """The frames that were written since this was asked last: kind, flags, stream, payload."""
        found, at = [], 0
        while at < len(self.written):
            size = int.from_bytes(self.written[at : at + 3])
            begin = at + http2.FRAME_HEAD_BYTES
            kind, flags = self.written[at + 3], self.written[at + 4]
            stream = int.from_bytes(self.written[at + 5 : begin])
            assert size <= http2.FRAME_BYTES_MAX
            found.append((kind, flags, stream, bytes(self.written[begin : begin + size])))
            at = begin + size
        assert at == len(self.written)
        self.written.clear()
        return found

    def heads(self, value: list[tuple[int, int, int, bytes]]) -> list[dict[bytes, bytes]]:
        return [dict(self._heads.decode(one[3], raw=True)) for one in value if one[0] == http2.HEADERS]


def message(text: bytes) -> bytes:
    return b"\0" + len(text).to_bytes(4) + text


def data(stream: int, payload: bytes, *, last: bool = False) -> bytes:
    parts = [payload[at : at + 16_384] for at in range(0, len(payload), 16_384)] or [b""]
    return b"".join(
        http2.frame(http2.DATA, http2.END_STREAM if last and at == len(parts) else 0, stream, part)
        for at, part in enumerate(parts, 1)
    )


def code(value: list[tuple[int, int, int, bytes]]) -> int:
    """Of the GOAWAY that is the last word."""
    kind, _, _, payload = value[-1]
    assert kind == http2.GOAWAY
    return int.from_bytes(payload[4:8])


def body_of(value: list[tuple[int, int, int, bytes]], stream: int) -> bytes:
    return b"".join(payload for kind, _, of, payload in value if kind == http2.DATA and of == stream)


async def test_a_call_is_answered_message_by_message_and_ends_once() -> None:
    wire = Wire()
    wire.greet()
    wire.send(wire.head(1), data(1, message(b"one") + message(b"two")))
    found = wire.sent()
    assert wire.heads(found) == [{b":status": b"200", b"content-type": b"application/grpc"}]
    assert body_of(found, 1) == message(b"one") + message(b"two")
    assert len([one for one in found if one[0] == http2.DATA]) == 1  # messages that came together are answered together
    wire.send(data(1, message(b""), last=True))
    found = wire.sent()
    assert body_of(found, 1) == message(b"")
    assert wire.heads(found) == [{b"grpc-status": b"0"}]
    assert found[-1][1] & http2.END_STREAM
    assert not wire.connection.streams
    wire.send(wire.head(3, b"/unknown"), wire.head(5, b"/failing"), data(5, message(b"x") + message(b"y")))
    heads = wire.heads(wire.sent())
    assert [one[b"grpc-status"] for one in heads] == [b"12", b"9"]
    assert heads[1][b"grpc-message"] == b"not so"
    assert wire.calls[1].taken == [b"x"]  # nothing is read after its last message
    assert not wire.is_over


async def test_a_request_that_is_no_grpc_call_is_refused_and_the_connection_continues() -> None:
    wire = Wire(calls_max=1)
    wire.greet()
    plain = http2.frame(http2.HEADERS, 5, 1, Encoder().encode([(b":method", b"GET"), (b":path", b"/")]))
    wire.send(plain)
    assert wire.heads(wire.sent()) == [{b":status": b"415"}]
    wire.send(wire.head(3, b"/held"), wire.head(5), data(5, message(b"x")))
    assert (http2.RST_STREAM, 0, 5, http2.REFUSED_STREAM.to_bytes(4)) in wire.sent()
    wire.send(http2.reset(3, 8), wire.head(7), data(7, message(b"y")))
    assert body_of(wire.sent(), 7) == message(b"y")
    assert [call.told_over for call in wire.calls] == [1, 0]


@pytest.mark.parametrize(
    ("text", "status"),
    [(b"\1\0\0\0\1x", b"12"), (b"\0" + (MESSAGE_BYTES_MAX + 1).to_bytes(4), b"8")],
)
async def test_a_message_that_cannot_be_taken_ends_its_call_alone(text: bytes, status: bytes) -> None:
    wire = Wire()
    wire.greet()
    wire.send(wire.head(1), wire.head(3), data(1, text[:3]), data(1, text[3:]), data(3, message(b"z")))
    found = wire.sent()
    assert wire.heads(found)[0][b"grpc-status"] == status
    assert body_of(found, 3) == message(b"z")
    assert wire.calls[0].taken == []
    assert wire.calls[0].told_over


async def test_more_than_the_other_end_grants_is_kept_until_it_does() -> None:
    wire = Wire()
    wire.greet(window=10)
    text = message(bytes(range(256)) * 100)
    wire.send(wire.head(1), data(1, text, last=True))
    found = wire.sent()
    got = body_of(found, 1)
    assert len(got) == 10
    assert len(wire.heads(found)) == 1
    wire.send(http2.window_update(1, 1 << 20))
    got += body_of(wire.sent(), 1)
    assert len(got) == len(text)
    # The connection's own window is used up before that of its stream.
    wire.send(wire.head(3), http2.window_update(3, 1 << 20), data(3, message(b"x" * 50_000)))
    assert len(body_of(wire.sent(), 3)) + len(got) == http2.WINDOW_BYTES
    kept = wire.connection.streams[3]
    wire.send(http2.settings({http2.INITIAL_WINDOW_SIZE: 0}))
    assert kept.unsent_bytes == len(text) + 50_005 - http2.WINDOW_BYTES
    wire.send(http2.window_update(0, 1 << 20))
    assert not kept.unsent
    assert kept.unsent_bytes == 0
    assert got == text


async def test_a_withdrawn_message_is_cut_off_while_it_waits_for_flow_control() -> None:
    wire = Wire()
    wire.greet(window=100)
    wire.send(wire.head(1, b"/held"))
    (call,) = wire.calls
    call.outbox.append(b"x" * 1000)
    call.wake()
    await asyncio.sleep(0)
    assert wire.written.count(b"x") == 95
    call.withdrawn = True
    call.outbox.clear()
    call.outbox.append(b"451")
    call.wake()
    await asyncio.sleep(0)
    wire.send(http2.window_update(1, 5000))
    assert wire.written.count(b"x") == 95
    assert b"451" not in wire.written  # it would be read as the message's rest
    assert call.told_over
    assert call.status is not None
    assert call.status[0] == 0  # not its own error
    assert b"taken back" in wire.written


@pytest.mark.parametrize("withdrawn", [False, True])
async def test_what_waits_while_the_other_end_does_not_read_can_be_taken_back(withdrawn: bool) -> None:
    wire = Wire()
    wire.greet(window=16 << 20)
    wire.send(http2.window_update(0, 16 << 20), wire.head(1, b"/held"))
    (call,) = wire.calls
    call.outbox.extend([b"x" * 62_000] * 100)
    call.wake()
    await asyncio.sleep(0)
    assert 1_000_000 < len(wire.written) < 1_100_000
    wire.connection.pause_writing()
    await asyncio.sleep(0.01)
    assert len(wire.written) < 1_100_000
    if withdrawn:
        call.withdrawn = True
        call.outbox.clear()
        call.outbox.append(b"451")
        call.wake()
    wire.connection.resume_writing()
    for _ in range(20):
        await asyncio.sleep(0)
    assert wire.written.count(b"x") == (17 * 62_000 if withdrawn else 6_200_000)
    assert wire.written.endswith(b"451") is withdrawn


async def test_windows_are_granted_again_but_not_to_a_peer_that_does_not_read() -> None:
    wire = Wire()
    wire.greet(window=0)
    wire.send(wire.head(1), wire.head(3, b"/held"))
    wire.sent()
    text = message(b"x" * 600_000)
    for stream in (1, 3):
        wire.send(data(stream, text))
    found = wire.sent()
    granted = {stream: int.from_bytes(payload) for kind, _, stream, payload in found if kind == http2.WINDOW_UPDATE}
    assert set(granted) == {3}  # stream 1's would have to be kept here
    assert granted[3] == len(text)
    wire.send(http2.window_update(1, 1 << 20), http2.window_update(0, 1 << 20))
    assert (http2.WINDOW_UPDATE, 0, 1, len(text).to_bytes(4)) in wire.sent()


async def test_a_peer_that_does_not_read_is_not_read_from() -> None:
    wire = Wire()
    wire.greet()
    wire.connection.pause_writing()
    assert not wire.reads
    wire.send(wire.head(1), data(1, message(b"x")))
    assert wire.sent() == []
    wire.connection.resume_writing()
    assert wire.reads
    assert body_of(wire.sent(), 1) == message(b"x")


async def test_a_call_may_send_without_having_received_anything() -> None:
    wire = Wire()
    wire.greet()
    wire.send(wire.head(1, b"/held"), data(1, message(b"x")))
    (call,) = wire.calls
    call.outbox.append(b"late")
    call.wake()
    assert wire.sent() == []
    await asyncio.sleep(0)
    assert body_of(wire.sent(), 1) == message(b"late")
    wire.send(http2.reset(1, 8))
    assert call.told_over == 1
    call.outbox.append(b"too late")
    call.wake()
    await asyncio.sleep(0)
    assert wire.sent() == []


async def test_time_limits_ping_and_linger() -> None:
    wire = Wire()
    wire.greet()
    wire.send(wire.head(1, b"/failing"), data(1, message(b"x")), wire.head(3, b"/held"))
    wire.sent()
    at = wire.connection.received_at
    wire.connection.sweep(at + 1.0)
    assert [call.checks for call in wire.calls] == [0, 1]
    wire.connection.sweep(at + 6.0)
    assert [one[:3] for one in wire.sent()] == [(http2.RST_STREAM, 0, 1)]  # it did not close finished streams
    wire.connection.sweep(at + 11.0)
    (ping,) = wire.sent()
    assert (ping[0], ping[1]) == (http2.PING, 0)
    wire.connection.sweep(at + 12.0)
    assert wire.sent() == []
    wire.send(http2.frame(http2.PING, http2.ACK, 0, ping[3]))
    assert not wire.connection.pinged
    wire.connection.sweep(at + 40.0)
    assert wire.is_lost
    assert wire.calls[1].told_over == 1


async def test_calls_begun_before_goaway_are_answered() -> None:
    wire = Wire()
    wire.greet()
    wire.send(wire.head(1), http2.goaway(0, 0), http2.frame(http2.PING, 0, 0, b"12345678"))
    assert not wire.is_over
    wire.send(data(1, message(b"x"), last=True))
    found = wire.sent()
    assert body_of(found, 1) == message(b"x")
    assert code(found) == http2.NO_ERROR
    assert wire.is_lost


async def test_closing_ends_every_call() -> None:
    wire = Wire()
    wire.greet()
    wire.send(wire.head(1), wire.head(3))
    wire.connection.close()
    assert code(wire.sent()) == http2.NO_ERROR
    assert [call.told_over for call in wire.calls] == [1, 1]
    assert wire.is_lost


def narrowed(wire: Wire) -> int:
    """More bytes than there is left of the connection's window, as after 16 MB that nobody took."""
    wire.connection.room = 99
    return 100


def broken() -> dict[str, Callable[[Wire], bytes]]:
    frame = http2.frame
    return {
        "a frame too large": lambda _: http2.frame_head(16_385, http2.DATA, 0, 1),
        "no settings first": lambda _: frame(http2.PING, 0, 0, b"12345678"),
        "an even stream": lambda wire: wire.head(2),
        "data of no stream": lambda _: frame(http2.DATA, 0, 1, b"x"),
        "data of the connection": lambda _: frame(http2.DATA, 0, 0, b"x"),
        "data after the end": lambda wire: wire.head(1, b"/held") + data(1, b"", last=True) + wire.head(3, b"/held")
        + data(3, b"", last=True) + data(5, b"x"),
        "a head in the midst": lambda wire: wire.head(1, b"/held") + wire.head(1),
        "a head broken into": lambda wire: wire.head(1, flags=0) + frame(http2.PING, 0, 0, b"12345678"),
        "a head without end": lambda wire: wire.head(1, flags=0) + frame(http2.CONTINUATION, 0, 1) * 17,
        "a head too large": lambda wire: wire.head(1, flags=0) + frame(http2.CONTINUATION, 0, 1, b"x" * 16_000) * 2,
        "a head that cannot be read": lambda _: frame(http2.HEADERS, 4, 1, b"\xff\xff\xff\xff\xff\xff"),
        "a head of sizes": lambda _: frame(http2.HEADERS, 4, 1, b"\x20\x3f\x80\x00\x20"),
        "a continuation of nothing": lambda _: frame(http2.CONTINUATION, 4, 1),
        "a push": lambda _: frame(http2.PUSH_PROMISE, 4, 1),
        "a reset of nothing": lambda _: http2.reset(1, 0),
        "nothing granted": lambda _: http2.window_update(0, 0),
        "too much granted": lambda _: http2.window_update(0, 2**31 - 1),
        "half a ping": lambda _: frame(http2.PING, 0, 0, b"1234"),
        "settings of a stream": lambda _: frame(http2.SETTINGS, 0, 1),
        "padding of nothing": lambda wire: wire.head(1) + frame(http2.DATA, http2.PADDED, 1, b"\x05"),
        "more than the connection may": lambda wire: wire.head(1, b"/held") + data(1, b"x" * narrowed(wire)),
        "more than a stream may": lambda wire: wire.head(1, b"/failing") + data(1, message(b"x") + b"y" * 1_100_000),
    }  # fmt: skip


@pytest.mark.parametrize("name", broken())
async def test_a_connection_that_breaks_the_protocol_ends_and_its_calls_with_it(name: str) -> None:
    wire = Wire()
    if name != "no settings first":
        wire.greet()
    else:
        wire.send(http2.PREFACE)
    wire.send(broken()[name](wire))
    assert code(wire.sent()) != http2.NO_ERROR
    assert wire.is_lost
    assert all(call.told_over for call in wire.calls)


FLOODS: dict[str, Callable[[Wire, int], bytes]] = {
    "pings": lambda _wire, _n: http2.frame(http2.PING, 0, 0, b"12345678"),
    "settings": lambda _wire, _n: http2.settings({http2.INITIAL_WINDOW_SIZE: 9}),
    "acknowledgements": lambda _wire, _n: http2.frame(http2.SETTINGS, http2.ACK, 0),
    "windows": lambda _wire, _n: http2.window_update(0, 1),
    "windows of a call": lambda _wire, _n: http2.window_update(1, 1),
    "windows of no call": lambda _wire, _n: http2.window_update(7, 1),
    "empty data": lambda _wire, _n: http2.frame(http2.DATA, 0, 1),
    "data of no call": lambda _wire, _n: http2.frame(http2.DATA, 0, 3, b"x"),
    "empty messages": lambda _wire, _n: data(1, message(b"")) + http2.frame(http2.PRIORITY, 0, 1, b"12345"),
    "priorities": lambda _wire, _n: http2.frame(http2.PRIORITY, 0, 1, b"12345"),
    "frames of later versions": lambda _wire, _n: http2.frame(77, 0, 0),
    "resets": lambda wire, n: wire.head(5 + 2 * n, b"/held") + http2.reset(5 + 2 * n, 8),
    "unknown methods": lambda wire, n: wire.head(5 + 2 * n, b"/unknown"),
    "plain HTTP": lambda wire, n: wire.head(5 + 2 * n, b"/echo", (b":method", b"GET")),
}


@pytest.mark.parametrize("what", FLOODS)
async def test_a_flooding_connection_is_closed_and_others_keep_their_turns(what: str) -> None:
    """256 KB of resets held the loop for 300 ms, and so for as long as they came."""
    wire = Wire()
    wire.greet()
    wire.send(wire.head(1, b"/held"), wire.head(3, b"/held"), http2.reset(3, 8))
    calls, sent = len(wire.calls), []
    for begin in range(0, 20_000, 2000):
        if not wire.is_over:
            wire.send(*[FLOODS[what](wire, begin + n) for n in range(2000)])
        assert len(wire.calls) - calls <= 64, "it is left for the next turn of the loop"
        while not wire.is_over and wire.connection._behind:
            assert not wire.reads, "no more is to come before"
            calls = len(wire.calls)
            await asyncio.sleep(0)
        calls = len(wire.calls)
        sent += wire.sent()
    assert code(sent) == http2.ENHANCE_YOUR_CALM
    assert wire.is_lost
    assert all(call.told_over for call in wire.calls)
    assert wire.budget.used == 0


async def test_window_updates_pings_and_resets_beside_messages_are_no_flood() -> None:
    """A window for each, a ping now and then, and some clients that leave."""
    wire = Wire()
    wire.greet()
    wire.send(wire.head(1))
    for n in range(4000):
        wire.send(data(1, message(b"x")), http2.window_update(1, 6), http2.window_update(0, 6))
        if n % 10 == 0:
            wire.send(http2.frame(http2.PING, 0, 0, b"12345678"))
            wire.send(wire.head(3 + 2 * n, b"/held"), data(3 + 2 * n, message(b"y")), http2.reset(3 + 2 * n, 8))
    assert body_of(wire.sent(), 1) == message(b"x") * 4000
    for _ in range(40):
        wire.connection.sweep(wire.connection.received_at)
    assert wire.connection._idle_frames == 0  # and the state that keeps it alive is forgotten in time


async def test_data_left_for_the_next_turn_wait_for_a_peer_that_does_not_read() -> None:
    wire = Wire()
    wire.greet()
    wire.send(*[http2.frame(http2.PING, 0, 0, b"12345678")] * 3000)
    wire.connection.pause_writing()
    await asyncio.sleep(0)
    wire.connection.data_received(http2.frame(http2.PING, 0, 0, b"the last"))  # was on its way
    behind = len(wire.connection._behind)
    assert behind
    wire.connection.resume_writing()
    assert not wire.reads
    for _ in range(4):
        await asyncio.sleep(0)
    assert wire.reads
    assert len(pings := wire.sent()) == 3001
    assert pings[-1][3] == b"the last"


async def test_many_settings_in_one_read_update_the_streams_windows_once() -> None:
    """5 KB of settings beside 1,000 calls took 110 ms."""

    class Walked(dict[int, Any]):
        walks = 0

        def items(self) -> Any:
            self.walks += 1
            return super().items()

        def values(self) -> Any:
            self.walks += 1
            return super().values()

    wire = Wire(calls_max=1000)
    wire.greet(window=5)
    wire.send(*[wire.head(1 + 2 * n) for n in range(20)], *[data(1 + 2 * n, message(b"x")) for n in range(20)])
    walked = wire.connection.streams = Walked(wire.connection.streams)
    sizes = b"".join(b"\0\4" + (size % 6).to_bytes(4) for size in range(500))
    wire.send(http2.frame(http2.SETTINGS, 0, 0, sizes), *[http2.window_update(0, 1)] * 300)
    assert walked.walks == 1
    wire.sent()
    wire.send(http2.settings({http2.INITIAL_WINDOW_SIZE: 6}))
    assert [body_of(found, 1 + 2 * n) for found in [wire.sent()] for n in range(20)] == [b"x"] * 20


async def test_messages_that_are_not_whole_are_in_the_budget() -> None:
    """Of 1,000 calls each could hold a megabyte."""
    wire = Wire(budget_bytes=100_000)
    wire.greet()
    half = message(b"x" * 80_000)[:60_000]
    wire.send(*[wire.head(1 + 2 * n, b"/held") for n in range(8)], data(1, half))
    assert wire.budget.used == len(half)
    wire.send(data(3, half))
    (refused,) = wire.heads(wire.sent())
    assert refused[b"grpc-status"] == b"8"
    assert refused[b"grpc-message"] == b"the balancer's buffers are full: retry later"
    assert wire.budget.used == len(half)
    wire.send(data(1, message(b"x" * 80_000)[60_000:] + message(b"y")[:3]))
    assert [len(text) for text in wire.calls[0].taken] == [80_000]
    assert wire.budget.used == 3
    for end in (
        lambda: http2.reset(5, 8),
        lambda: data(7, b"", last=True),
        lambda: data(9, message(b"z")[6:] + b"\1\0\0\0\0"),  # of a length that does not exist
    ):
        stream = {http2.RST_STREAM: 5}.get(end()[3]) or int.from_bytes(end()[5:9])
        wire.send(data(stream, half[:500]))
        assert wire.budget.used > 3
        wire.send(end())
        wire.send(http2.reset(stream, 8))
        assert wire.budget.used == 3
    wire.connection.close()
    assert wire.budget.used == 0


async def test_no_further_message_is_read_from_a_failed_call() -> None:
    """It was, of one that had said nothing: a request that nobody would answer, and whose slot nobody gave back."""
    wire = Wire()
    wire.greet()
    wire.send(wire.head(1, b"/held"))
    wire.calls[0].ended = lambda: None  # type: ignore[method-assign]  # it does not say that it is over
    wire.send(data(1, b"\0" + (MESSAGE_BYTES_MAX + 1).to_bytes(4)), data(1, message(b"x")))
    assert wire.calls[0].taken == []


async def test_client_of_another_protocol_gets_an_error_naming_grpc() -> None:
    wire = Wire()
    wire.sent()
    wire.send(b"GET / HTTP/1.1\r\n\r\n")
    assert b"this port speaks gRPC" in wire.sent()[-1][3]
    assert wire.is_lost


@pytest.mark.hypothesis
def test_frames_cut_anywhere_give_the_same_result() -> None:
    def play(cuts: list[int]) -> list[list[bytes]]:
        async def run() -> list[list[bytes]]:
            wire = Wire()
            text = b"".join((
                http2.PREFACE, http2.settings({http2.INITIAL_WINDOW_SIZE: 1 << 20}), wire.head(1),
                data(1, message(b"one") + message(b"t" * 40_000)[:20_000]), wire.head(3, b"/held"),
                data(1, message(b"t" * 40_000)[20_000:]), data(3, message(b"three"), last=True), data(1, message(b"")),
            ))  # fmt: skip
            at = 0
            for cut in [*sorted(cut % len(text) for cut in cuts), len(text)]:
                if cut > at:
                    wire.send(text[at:cut])
                at = cut
            found = wire.sent()
            whole = message(b"one") + message(b"t" * 40_000) + message(b"")
            assert body_of(found, 1) == whole
            return [call.taken for call in wire.calls]

        return asyncio.run(run())

    whole = play([])

    @given(st.lists(st.integers(0, 60_000), max_size=12))
    def check(cuts: list[int]) -> None:
        assert play(cuts) == whole

    check()


@pytest.mark.hypothesis
def test_no_sequence_of_frames_does_more_than_end_its_connection() -> None:
    frames = st.builds(
        lambda kind, flags, stream, payload: http2.frame(kind, flags, stream, payload),
        st.integers(0, 11), st.integers(0, 63), st.integers(0, 6), st.binary(max_size=24),
    )  # fmt: skip

    @given(st.lists(st.one_of(frames, st.sampled_from(["head", "data"])), max_size=12))
    def check(given_: list[Any]) -> None:
        async def run() -> None:
            wire = Wire()
            wire.greet()
            stream = 1
            for one in given_:
                if wire.is_over:
                    break
                wire.send(wire.head(stream) if one == "head" else data(stream, message(b"x")) if one == "data" else one)
                stream += 2 if one == "head" else 0
            wire.connection.sweep(wire.connection.received_at + 60.0)
            assert wire.is_lost
            assert all(call.told_over for call in wire.calls)

        asyncio.run(run())

    check()


async def test_grpcio_at_the_other_end_gets_large_messages_back_both_ways_at_once() -> None:
    calls: list[Echo] = []

    def call(path: bytes, wake: Callable[[], None]) -> Echo:
        calls.append(Echo(path, wake))
        return calls[-1]

    open_: list[GatewayConnection] = []

    def made() -> GatewayConnection:
        budget = ByteBudget(64 << 20)
        open_.append(
            GatewayConnection(call, lambda _: None, calls_max=100, message_bytes_max=MESSAGE_BYTES_MAX, budget=budget)
        )
        return open_[-1]

    server = await asyncio.get_running_loop().create_server(made, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    texts = [b"x" * size for size in (0, 1, 70_000, 1_500_000, 5)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        method = channel.stream_stream("/any/Method")

        async def one() -> list[bytes]:
            stream = method()

            async def write() -> None:
                for text in texts:
                    await stream.write(text)
                await stream.done_writing()

            writing = asyncio.create_task(write())
            got = [answer async for answer in stream]
            await writing
            assert await stream.code() == grpc.StatusCode.OK
            return got

        assert await asyncio.gather(*(one() for _ in range(4))) == [texts] * 4
        with pytest.raises(grpc.aio.AioRpcError, match="at most"):
            await channel.unary_unary("/any/Method")(b"x" * (MESSAGE_BYTES_MAX + 1))
    server.close()
    assert all(one.told_over for one in calls)
    for connection in open_:
        connection.close()
