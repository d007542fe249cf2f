"""Tickets measure what the client sees, write to open sockets only, and cut off who does not read."""

import asyncio
from typing import cast

import pytest

from farhop_lab.engine.core.profiles import PROFILES
from farhop_lab.engine.core.sequence import EngineRequest, Sequence, TextModel
from farhop_lab.engine.formats.render import Answer
from farhop_lab.engine.metrics import Observations
from farhop_lab.engine.ticket import UNSENT_BYTES_MAX, StreamTicket, Wait, WholeTicket


class Socket:
    """A transport that keeps what it is given."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.closing = False
        self.unsent = 0

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: bytes) -> None:
        self.sent.append(data)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.closing = True


def _wait() -> Wait:
    sequence = Sequence("1", EngineRequest(b"xxxx", max_tokens=9), TextModel("m"), PROFILES["l4"])
    return Wait(sequence, asyncio.get_running_loop().create_future(), Observations(), 10.0)


async def test_a_whole_answer_is_gathered_and_timed() -> None:
    wait = _wait()
    ticket = WholeTicket(wait)
    assert ticket.ttft_s is None
    ticket.token(" the", None, 10.5)
    ticket.token(" sea", None, 10.75)
    assert not ticket.done.done()
    ticket.token("", "stop", 11.0)
    assert ticket.done.done()
    assert (ticket.text, ticket.ttft_s) == (" the sea", 0.5)
    seen = wait.observations
    assert (seen.ttft.sum_s, seen.itl.sum_s, seen.e2e.sum_s) == (0.5, 0.5, 1.0)
    assert sum(seen.itl.counts) == 2


async def test_a_last_token_for_a_cancelled_ticket_is_ignored() -> None:
    ticket = WholeTicket(_wait())
    ticket.done.cancel()
    ticket.token(" the", "length", 10.5)
    assert ticket.done.cancelled()


async def test_stream_writes_each_token_immediately() -> None:
    socket = Socket()
    answer = Answer("c", "m", 7, "assistant")
    ticket = StreamTicket(_wait(), answer, cast(asyncio.Transport, socket), include_usage=False)
    ticket.token(" the", None, 11.0)
    ticket.token(" sea", None, 11.1)
    ticket.token("", "stop", 11.2)
    assert socket.sent[0] == answer.opening(ticket.sequence) + answer.token(" the")
    assert socket.sent[1] == answer.token(" sea")
    assert socket.sent[2].endswith(b"data: [DONE]\n\n\r\n")


@pytest.mark.parametrize(("unsent", "sent"), [(UNSENT_BYTES_MAX, 2), (UNSENT_BYTES_MAX + 1, 1)])
async def test_a_client_that_does_not_read_is_cut_off(unsent: int, sent: int) -> None:
    socket = Socket()
    socket.unsent = unsent
    ticket = StreamTicket(_wait(), Answer("c", "m", 7, None), cast(asyncio.Transport, socket), include_usage=False)
    ticket.token(" the", None, 11.0)
    ticket.token(" sea", None, 11.1)
    assert len(socket.sent) == sent
