"""Two halves at once on the wire: the requests to both engines, whose answer is used, and how either half ends."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from relay_stage import Poked
from relay_wire import SSE, Line, Message, chunk, plain, post, until

from farhop.balance import machine
from farhop.balance.machine import Address, Command, Forward, Prefill, Request
from farhop.relay.upstream.concurrent_pair import both_body
from farhop.relay.upstream.pool import UpstreamLimits

ROOM = 2**63 - 1
BODY = {"model": "m", "prompt": "hé", "max_tokens": 50, "stream": True}
USED = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}\n\n'
SAID = SSE + chunk(USED) + b"0\r\n\r\n"
THERE = "127.1"  # the same as 127.0.0.1
TOKEN = SSE + chunk(b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":1}}\n\n') + b"0\r\n\r\n"


def role_of(asked: Message) -> str:
    return "prefill" if (asked.get("host") or "").startswith(THERE) else "decode"


class Engines:
    """Both engines behind one socket, told apart by how it is called. Those `silent` say nothing."""

    def __init__(self, s: Any) -> None:
        self.s = s
        self.prefill = TOKEN
        self.silent: set[str] = set()
        self.prefill_waits = asyncio.Event()
        self.prefill_waits.set()
        self.whole = 0
        s.upstream.script = self.script

    async def script(self, line: Line) -> None:
        while True:
            asked = await self.s.upstream.request(line)
            if "bootstrap_room" not in msgspec.json.decode(asked.body):
                self.whole += 1
                await line.send(SAID)
                continue
            role = role_of(asked)
            if role in self.silent:
                continue
            await until(lambda: len(self.s.upstream.asked) >= 2)
            if role == "prefill":
                await self.prefill_waits.wait()
            await line.send(self.prefill if role == "prefill" else SAID)


async def _together(stage: Any, **settings: Any) -> tuple[Any, Engines]:
    """A stage whose machine asks both at once first, and for one attempt after that."""
    s = await stage(**settings)
    engines = Engines(s)

    def arrive(request: Request, _now: float) -> list[Command]:
        s.flow.live[request.id] = 1
        prefill = Prefill("p1", Address(THERE, s.upstream.address.port), 8998, ROOM)
        return [Forward(request.id, 1, "d1", s.upstream.address, 1.0, prefill=prefill)]

    s.flow.arrive = arrive
    s.flow.addresses = [s.upstream.address] * 2
    return s, engines


def _json(message: Message) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(message.body)
    return decoded


def _reasons(s: Any) -> list[str]:
    return [event.outcome.reason for event in s.flow.events if isinstance(event, machine.PrefillFailed)]


async def test_both_get_the_same_request_and_the_second_answers(stage: Any) -> None:
    s, _ = await _together(stage)
    answer = await s.ask(post(msgspec.json.encode(BODY), headers=b"X-Request-Id: 7\r\n"))
    assert (answer.status, answer.body) == (200, USED)
    first, second = s.upstream.asked
    bootstrap = {"bootstrap_host": THERE, "bootstrap_port": 8998, "bootstrap_room": ROOM}
    assert _json(first) == _json(second) == {**BODY, **bootstrap}
    same = ("x-request-id", "authorization", "via")
    assert [first.get(name) for name in same] == [second.get(name) for name in same]
    assert first.get("x-request-id") == "r1"  # never a field of the client's own
    assert sorted(s.flow.event_names()) == ["AttemptBegan", "AttemptEnded", "PrefillEnded", "RequestArrived"]
    assert s.tier.attempts == [(1, "served")]
    assert [usage.completion_tokens for _, _, usage in s.tier.concluded_with] == [2]  # once, and it is the second's


async def test_decode_half_may_end_before_the_prefill_half_has_answered(stage: Any) -> None:
    s, engines = await _together(stage)
    engines.prefill_waits.clear()
    answer = await s.ask(post(msgspec.json.encode(BODY)))
    assert (answer.status, answer.body) == (200, USED)
    assert s.flow.event_names() == ["RequestArrived", "AttemptBegan", "AttemptEnded"]
    engines.prefill_waits.set()  # neither is cut off: its connection is kept
    await until(lambda: not s.relay.under_way)
    await asyncio.sleep(0.02)
    assert s.upstream.gone == 0


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (plain(b"{}", status="500 Oh"), "prefill_failed"),
        (plain(b"{}", status="503 Full"), "prefill_failed"),
        (plain(b"{}", status="401 Unauthorized"), "engine_key_refused"),
        (plain(b"{}", status="307 There"), "engine_redirects"),
        (TOKEN[:-5], "upstream_died_before_first_byte"),
        (None, "upstream_died_before_first_byte"),
    ],
)
async def test_a_first_half_that_fails_before_the_answer_began_gives_up_both(
    stage: Any, value: bytes | None, reason: str
) -> None:
    s, _ = await _together(stage)

    async def script(line: Line) -> None:
        asked = await s.upstream.request(line)
        if "bootstrap_room" not in _json(asked):
            await line.send(SAID)
        elif role_of(asked) == "prefill":
            await until(lambda: len(s.upstream.asked) == 2)
            if value is not None:
                await line.send(value)
        else:
            await s.upstream.request(line)  # waits for a prompt that never comes

    s.upstream.script = script
    answer = await s.ask(post(msgspec.json.encode(BODY)))
    assert answer.status == 200
    assert _reasons(s) == [reason]
    assert s.tier.attempts == [(1, reason), (2, "served")]
    await until(lambda: s.upstream.gone >= 1)  # the other half is aborted
    assert _json(s.upstream.asked[2]) == BODY


async def test_a_refusal_of_the_first_engine_is_the_answer(stage: Any) -> None:
    s, engines = await _together(stage)
    engines.silent = {"decode"}
    engines.prefill = plain(b'{"error":{"message":"too long"}}', status="400 Bad")
    answer = await s.ask(post(msgspec.json.encode(BODY)))
    assert (answer.status, answer.body) == (400, b'{"error":{"message":"too long"}}')
    assert s.flow.event_names() == ["RequestArrived", "AttemptEnded"]
    assert s.tier.attempts == [(1, "request_refused_by_engine")]
    await until(lambda: s.upstream.gone >= 1)


async def test_an_answer_that_has_begun_goes_on_without_the_first_half(stage: Any) -> None:
    s, engines = await _together(stage)
    finish = asyncio.Event()
    engines.prefill_waits.clear()

    async def script(line: Line) -> None:
        asked = await s.upstream.request(line)
        assert "bootstrap_room" in _json(asked)
        if role_of(asked) == "prefill":
            await engines.prefill_waits.wait()
            return  # closed without an answer
        await line.send(SSE + chunk(b'data: {"choices":[]}\n\n'))
        await finish.wait()
        await line.send(chunk(USED) + b"0\r\n\r\n")

    s.upstream.script = script
    asking = asyncio.create_task(s.ask(post(msgspec.json.encode(BODY))))
    await until(lambda: "AttemptBegan" in s.flow.event_names())
    flow_handle = s.flow.handle

    def handle(event: Any, now: float) -> list[Command]:  # a real machine does not answer this for a begun request
        if isinstance(event, machine.PrefillFailed):
            s.flow.events.append(event)
            return []
        commands: list[Command] = flow_handle(event, now)
        return commands

    s.flow.handle = handle
    engines.prefill_waits.set()
    await until(lambda: _reasons(s))
    finish.set()
    answer = await asking
    assert (answer.status, answer.whole) == (200, True)
    assert s.tier.attempts == [(1, "served")]


async def test_an_engine_that_is_not_there(stage: Any) -> None:
    s, engines = await _together(stage)
    engines.silent = {"decode"}
    s.flow.arrive = lambda request, _now: (
        s.flow.live.__setitem__(request.id, 1)
        or [Forward(request.id, 1, "d1", s.upstream.address, 1.0, prefill=Prefill("p1", Address("127.0.0.1", 1), 2, 3))]
    )
    assert (await s.ask(post(msgspec.json.encode(BODY)))).status == 200
    assert s.tier.attempts == [(1, "connect_failed"), (2, "served")]


async def test_if_both_engines_are_silent_the_timeout_is_reported_for_the_first(stage: Any) -> None:
    s, engines = await _together(stage, upstream_limits=UpstreamLimits(first_byte_s=0.5))
    engines.silent = {"prefill", "decode"}
    assert (await s.ask(post(msgspec.json.encode(BODY)))).status == 200
    assert (_reasons(s), engines.whole) == (["first_byte_timeout"], 1)
    await until(lambda: s.upstream.gone >= 2)


@pytest.mark.parametrize("how", ["client", "deadline"])
async def test_a_cancel_goes_to_both(stage: Any, how: str) -> None:
    s, _ = await _together(stage)
    arrive = s.flow.arrive
    if how == "deadline":
        s.flow.arrive = lambda request, now: [machine.SetTimer(request.id, now + 0.1), *arrive(request, now)]

    async def script(line: Line) -> None:
        while True:
            await s.upstream.request(line)

    s.upstream.script = script
    client = await s.client()
    await client.send(post(msgspec.json.encode(BODY)))
    await until(lambda: len(s.upstream.asked) == 2)
    if how == "client":
        client.abort()
    await until(lambda: s.upstream.gone >= 2)
    assert s.tier.attempts == [(1, "client_left" if how == "client" else "deadline_exceeded")]


@pytest.mark.parametrize("unread", ["prefill", "decode", ""])
async def test_a_request_that_one_of_both_engines_has_only_in_part_is_recalled_from_both(
    stage: Any, unread: str
) -> None:
    s, _ = await _together(stage)
    end, has = asyncio.Event(), 0

    async def script(line: Line) -> None:
        nonlocal has
        head = await line.reader.readuntil(b"\r\n\r\n")
        role = "prefill" if b"host: " + THERE.encode() in head else "decode"
        said = b"THE END" if role == unread else b""
        while b"THE END" not in said:
            said = said[-8:] + await line.reader.read(65536)
        has += 1
        if has == 2:
            s.flow.live["r1"] = 2  # no other replica can be tried
            s.relay.react(Poked([machine.Recall("r1", 1)]))
        await until(lambda: has == 2)
        await (end.wait() if unread else line.send(SAID if role == "decode" else TOKEN))

    s.upstream.script = script
    answer = await s.ask(post(msgspec.json.encode({**BODY, "prompt": "x" * 14_000_000 + "THE END"})))
    end.set()
    assert (answer.status, has) == (451 if unread else 200, 2)
    assert s.tier.attempts == [(1, "unlawful_here" if unread else "served")]


async def test_a_tier_that_breaks_costs_this_request_only(stage: Any) -> None:
    s, _ = await _together(stage)
    s.tier.break_headers = True
    assert (await s.ask(post(msgspec.json.encode(BODY)))).status == 500
    s.tier.break_headers = False
    assert (await s.ask(post(msgspec.json.encode(BODY)))).status == 200
    assert len(s.tier.faults) == 1


def test_a_literal_address_is_written_as_sglangs_router_does() -> None:
    body = both_body(b'{"prompt":"\xc3\xa9","bootstrap_room":null,"x":1.50}', Prefill("p", Address("::1", 1), 8998, 5))
    bootstrap = {"bootstrap_host": "[::1]", "bootstrap_port": 8998, "bootstrap_room": 5}
    assert msgspec.json.decode(body) == {"prompt": "é", "x": 1.5, **bootstrap}
