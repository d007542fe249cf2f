"""A waiting request ends once: with what it waited for, when its client leaves, or when the process stops."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from farhop.balance import outcome
from farhop.relay import answers
from farhop.relay.answers import Reply
from farhop.service.admission.waiting import Waiting

REFUSED = answers.refusal(outcome.HOP_FORGED, "not yours")


class Client:
    """An exchange and the telemetry of its tier."""

    def __init__(self) -> None:
        self.answered: list[int] = []
        self.turned_away: list[tuple[Any, ...]] = []
        self.exchange: Any = SimpleNamespace(
            callbacks=None, context="context", reply=lambda reply: self.answered.append(reply.status), is_open=True,
            started=False,
        )  # fmt: skip

    def waits(self, future: asyncio.Future[str], then: Any) -> Waiting:
        telemetry: Any = SimpleNamespace(turned_away=lambda *what: self.turned_away.append(what))
        return Waiting(self.exchange, telemetry, future, then)


@pytest.mark.parametrize("reply", [None, REFUSED])
async def test_when_the_result_is_there_a_request_continues_or_is_answered(reply: Reply | None) -> None:
    client, future, seen = Client(), asyncio.get_running_loop().create_future(), list[str]()

    def then(done: asyncio.Future[str]) -> Reply | None:
        assert client.exchange.callbacks is None, "whoever goes on with it is told of its client from now on"
        seen.append(done.result())
        return reply

    waiting = client.waits(future, then)
    assert client.exchange.callbacks is waiting
    waiting.pause()
    waiting.resume()
    future.set_result("read")
    await asyncio.sleep(0)
    assert seen == ["read"]
    assert client.answered == ([] if reply is None else [REFUSED.status])
    assert client.turned_away == ([] if reply is None else [("context", outcome.HOP_FORGED, REFUSED.status)])


@pytest.mark.parametrize("done", ["before", "with an error before", "after"])
@pytest.mark.parametrize(
    ("end", "counted", "answered"),
    [("client_left", (outcome.CLIENT_LEFT, 0), []), ("stopped", (outcome.STOPPING, 503), [503])],
)
async def test_a_result_for_a_client_that_left_or_after_a_stop_is_dropped(
    done: str, end: str, counted: tuple[Any, ...], answered: list[int]
) -> None:
    client, future = Client(), asyncio.get_running_loop().create_future()
    waiting = client.waits(future, pytest.fail)
    if done == "before":
        future.set_result("read")
    elif done != "after":
        future.set_exception(ValueError())
    getattr(waiting, end)()
    await asyncio.sleep(0)
    assert future.cancelled() is (done == "after"), "nobody computes for it any more"
    assert client.exchange.callbacks is None
    assert (client.turned_away, client.answered) == ([("context", *counted)], answered)


@pytest.mark.parametrize(
    ("is_open", "started", "answered"), [(True, False, [500]), (False, False, []), (True, True, [])]
)
async def test_a_bug_is_counted_answered_and_raised(is_open: bool, started: bool, answered: list[int]) -> None:
    raised: list[Any] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: raised.append(context["exception"]))
    client, future = Client(), loop.create_future()
    client.exchange.is_open, client.exchange.started = is_open, started
    client.waits(future, lambda done: done.result())
    future.set_exception(ZeroDivisionError())
    await asyncio.sleep(0)
    assert [type(one) for one in raised] == [ZeroDivisionError]
    assert client.turned_away == [("context", outcome.INTERNAL, 500)]
    assert client.answered == answered
