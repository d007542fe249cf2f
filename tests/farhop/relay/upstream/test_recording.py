"""A shared answer: each reader gets all of it at its own pace, whichever pauses, leaves or joins, within a bound."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from farhop.balance import outcome
from farhop.balance.answer_store import AnswerStore
from farhop.balance.outcome import Outcome
from farhop.relay import answers
from farhop.relay.http import head
from farhop.relay.http.exchange import Exchange
from farhop.relay.upstream import recording
from farhop.relay.upstream.recording import AnswerRecording, Reader, SharedExchange, complete_recording, sliced

ASKED = head.read(b"POST /v1/chat/completions HTTP/1.1\r\nhost: farhop", 16)
LINES = b"content-type: text/event-stream\r\nx-farhop-region: tokyo\r\nx-farhop-version: v2\r\n"


class Wire:
    """A client's connection, as far as an exchange knows it: what was written to it, and whether it was broken."""

    is_hop, local_host, certificate, unsent_bytes = False, "", None, 0

    def __init__(self) -> None:
        self.answering: Exchange | None = None
        self.got, self.broken, self.is_over = b"", False, False

    def client_rtt(self) -> None:
        return None

    def write(self, data: bytes) -> None:
        self.got += data

    chunk = write

    def abort(self) -> None:
        self.broken = True

    def keeps(self, exchange: Exchange) -> bool:
        return True

    def close_after(self, exchange: Exchange) -> None:
        pass

    def over(self, exchange: Exchange) -> None:
        self.is_over, self.answering = True, None

    def release_body(self, exchange: Exchange) -> None:
        pass

    @property
    def body(self) -> bytes:
        """Out of its chunks."""
        _, _, rest = self.got.partition(b"\r\n\r\n")
        body = b""
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        return body


class Owner:
    """Who has them read; and who fetches the answer (`callbacks` of the shared exchange)."""

    def __init__(self) -> None:
        self.ended: list[tuple[Reader, Outcome | None]] = []
        self.went: list[Reader] = []
        self.cancelled = self.paused = False

    def head(self, reader: Reader, recording: AnswerRecording) -> bytes:
        leads = reader.shared is not None and reader.shared.leader is reader
        return reader.shared.leader_lines if leads and reader.shared is not None else recording.lines

    def over(self, reader: Reader, reason: Outcome | None) -> None:
        self.ended.append((reader, reason))

    def reader_released(self, reader: Reader) -> None:
        self.went.append(reader)

    def stopped(self, reader: Reader) -> None:
        reader.cut(None, outcome.STOPPING)

    def client_left(self) -> None:
        self.cancelled = True

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False


class Upstream(Owner):
    """As `callbacks`: the same names mean another thing there."""

    def stopped(self, reader: Reader | None = None) -> None:
        self.cancelled = True


def reader(owner: Owner, *, wants_usage: bool = False) -> tuple[Reader, Wire]:
    wire = Wire()
    exchange = Exchange(wire, ASKED)
    wire.answering = exchange
    return Reader(owner, exchange, wants_usage=wants_usage), wire


def shared(room: AnswerStore[Any] | None = None, keeps: int = 1 << 16) -> tuple[SharedExchange, Owner, Upstream, Wire]:
    owner, upstream = Owner(), Upstream()
    leader, wire = reader(owner)
    made = SharedExchange(leader, room if room is not None else AnswerStore(1 << 20), keeps, stream=True)
    made.callbacks = upstream  # type: ignore[assignment]  # of it only these are asked
    return made, owner, upstream, wire


def event(n: int, size: int = 4) -> bytes:
    return b"data: %b%d\n\n" % (b"x" * size, n)


USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"


def test_all_readers_get_the_whole_answer_and_the_usage_if_they_requested_it() -> None:
    one, owner, _, first = shared()
    kept: list[AnswerRecording] = []
    one.recorded = lambda: kept.append(one.recording)
    second, wire = reader(owner, wants_usage=True)
    one.begin(200, LINES, None, event(1))
    one.join(second)
    one.write(event(2) + USAGE + DONE)
    one.finish()
    assert first.body == event(1) + event(2) + DONE
    assert wire.body == event(1) + event(2) + USAGE + DONE
    assert (first.is_over, wire.is_over, len(kept)) == (True, True, 1)
    assert b"x-farhop-region: tokyo" in first.got
    # Header lines of the leader's own do not go to the others.
    assert b"x-farhop-region" not in wire.got
    assert b"x-farhop-version: v2" in wire.got
    assert {reason for _, reason in owner.ended} == {None}


def test_a_kept_answer_is_sent_in_pieces_as_the_client_reads() -> None:
    owner = Owner()
    one, wire = reader(owner)
    body = b"y" * (3 * recording.PIECE_BYTES)
    one.paused = True  # it takes the first piece with the head, and is behind then
    one.play(complete_recording(b"content-type: text/event-stream\r\n", sliced(body), USAGE, DONE, streams=True))
    assert wire.body == body[: recording.PIECE_BYTES]
    one.resume()
    assert wire.body == body + DONE
    assert owner.ended == [(one, None)]


@pytest.mark.parametrize("begins", ["reply", "error", "form", "coded"])
def test_an_answer_that_cannot_be_shared_goes_to_the_leader_alone(begins: str) -> None:
    one, owner, upstream, wire = shared()
    settled: list[bool] = []
    one.on_closed = lambda: settled.append(True)
    other, unsent = reader(owner)
    one.join(other)
    if begins == "reply":
        one.reply(answers.refusal(outcome.NO_REGION, "none"))
    elif begins == "error":
        one.begin(500, LINES, 2, b"no")
        one.finish()
    elif begins == "coded":  # usage that no client asked for, and that only its own head announces
        one.begin(200, LINES + b"content-encoding: gzip\r\n", 2, b"\x1f\x8b")
        one.finish()
    else:
        one.begin(200, b"content-type: application/json\r\n", 2, b"{}")
        one.finish()
    assert owner.went == [other]
    assert not one.joinable
    assert settled == [True]
    assert (wire.is_over, unsent.got, owner.ended, upstream.cancelled) == (True, b"", [], False)
    other.client_left()  # it is reported until another exchange has it
    assert owner.ended == [(other, outcome.CLIENT_LEFT)]


def test_an_upstream_error_is_cancelled_once_the_leader_has_left() -> None:
    one, owner, upstream, _ = shared()
    other, _ = reader(owner)
    one.join(other)
    one.leader.client_left()
    assert not upstream.cancelled
    one.begin(500, LINES, 2, b"no")
    assert upstream.cancelled
    assert owner.went == [other]


def test_a_broken_answer_breaks_for_every_reader_after_what_it_has_not_read() -> None:
    one, owner, _, first = shared()
    slow, wire = reader(owner)
    one.join(slow)
    one.begin(200, LINES, None, event(1))
    slow.pause()
    one.write(event(2))
    assert wire.body == event(1)
    one.break_off(b"data: the end\n\n")
    assert first.body == wire.body == event(1) + event(2) + b"data: the end\n\n"
    assert {reason for _, reason in owner.ended} == {outcome.DIED_MID_STREAM}


def test_all_readers_of_a_shared_answer_end_with_reason_stopping_at_a_stop() -> None:
    one, owner, upstream, _ = shared()
    other, wire = reader(owner)
    one.join(other)
    one.begin(200, LINES, None, event(1))
    one.stop()
    assert upstream.cancelled
    one.break_off(b"data: we stop\n\n")  # as the relay does then
    assert wire.body == event(1) + b"data: we stop\n\n"
    assert {reason for _, reason in owner.ended} == {outcome.STOPPING}


def test_upstream_waits_while_all_are_behind() -> None:
    one, owner, upstream, _ = shared()
    other, _ = reader(owner)
    one.join(other)
    one.begin(200, LINES, None, event(1))
    one.leader.pause()
    assert not upstream.paused
    other.pause()
    assert upstream.paused
    other.client_left()
    assert upstream.paused
    one.leader.resume()
    assert not upstream.paused


def test_a_reader_too_far_behind_is_cut_off_and_the_others_continue() -> None:
    room = AnswerStore[Any](1 << 20)
    one, owner, _, first = shared(room, keeps=1000)
    slow, wire = reader(owner)
    near, _ = reader(owner)
    one.join(slow)
    one.join(near)
    one.begin(200, LINES, None, event(0))
    slow.pause()
    for n in range(1, 100):
        near.pause()
        one.write(event(n))
        near.resume()
        assert room.taken <= 1100
    assert wire.broken
    assert owner.ended == [(slow, outcome.CLIENT_LEFT)]
    assert not one.joinable
    one.finish()
    assert first.body == b"".join(map(event, range(100)))
    assert room.taken == 0


def test_without_room_a_slow_reader_is_cut_off_and_the_others_read_on() -> None:
    room = AnswerStore[Any](100)
    one, owner, _, first = shared(room, keeps=100)
    slow, wire = reader(owner)
    one.join(slow)
    one.begin(200, LINES, None, event(0, 40))
    slow.pause()
    one.write(event(1, 40))
    one.write(event(2, 400))  # more than there is room for at all
    assert wire.broken
    one.finish()
    assert first.body == event(0, 40) + event(1, 40) + event(2, 400)
    assert room.taken == 0


def test_two_slow_readers_that_are_cut_off_together_are_each_ended_once() -> None:
    one, owner, _, first = shared(AnswerStore[Any](200), keeps=100)
    one.begin(200, LINES, None, event(0, 1))
    slow = [reader(owner)[0] for _ in range(2)]
    for each in slow:
        one.join(each)
        each.pause()
    one.write(event(1, 91))
    one.write(event(2, 91))
    assert sorted(map(id, (one for one, _ in owner.ended))) == sorted(map(id, slow))
    assert not first.is_over


class Sharing(RuleBasedStateMachine):
    """Any order of pieces, pauses, joins and leavings: who stays gets exactly all of it, nobody anything else; upstream
    is cancelled if and only if nobody is left; what is taken of the room is given back."""

    @initialize(capacity=st.sampled_from([200, 2_000, 1 << 20]), keeps=st.sampled_from([0, 100, 1 << 16]))
    def begin(self, capacity: int, keeps: int) -> None:
        self.room: AnswerStore[Any] = AnswerStore(capacity)
        self.one, self.owner, self.upstream, wire = shared(self.room, keeps)
        self.kept: list[bytes] = []
        self.one.recorded = lambda: self.kept.append(b"".join(self.one.recording.pieces))
        self.wires = {self.one.leader: wire}
        self.sent, self.over = b"", False
        self.write(1)

    def there(self) -> list[Reader]:
        return list(self.one.readers)

    def goes_on(self) -> bool:
        return not self.over and not self.upstream.cancelled

    @precondition(goes_on)
    @rule(size=st.integers(0, 300))
    def write(self, size: int) -> None:
        data = event(len(self.sent), size)
        self.sent += data
        if self.one.started:
            self.one.write(data)
        else:
            self.one.begin(200, LINES, None, data)

    @precondition(lambda self: self.one.joinable)
    @rule()
    def join(self) -> None:
        one, self.wires[one] = reader(self.owner)
        self.one.join(one)

    @precondition(there)
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.there()))
        one.resume() if one.paused else one.pause()

    @precondition(there)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.there())).client_left()

    @precondition(goes_on)
    @rule(well=st.booleans())
    def end(self, well: bool) -> None:
        self.over, self.one.callbacks = True, None
        if well:
            self.one.finish()
        else:
            self.one.break_off(b"data: broke\n\n")
        self.well = well

    @precondition(lambda self: not self.there())
    @rule()
    def nothing_more(self) -> None:
        """All is over."""

    @invariant()
    def each_has_its_own_part(self) -> None:
        left = {one for one, reason in self.owner.ended if reason is outcome.CLIENT_LEFT}
        for one, wire in self.wires.items():
            body = wire.body.removesuffix(b"data: broke\n\n")
            assert self.sent.startswith(body)
            if not one.paused and one not in left and not wire.is_over:
                assert body == self.sent
            if wire.is_over and one not in left:
                assert body == self.sent
        assert len(self.owner.ended) == len({one for one, _ in self.owner.ended})

    @invariant()
    def upstream_goes_on_while_anybody_reads(self) -> None:
        assert self.upstream.cancelled == (not self.there() and not self.over)
        if self.goes_on():
            assert self.upstream.paused == all(one.paused for one in self.there())

    @invariant()
    def bounded(self) -> None:
        assert self.room.taken <= self.room.capacity
        assert all(kept == self.sent for kept in self.kept)
        if not self.there():
            assert self.room.taken == 0


TestSharing = Sharing.TestCase
