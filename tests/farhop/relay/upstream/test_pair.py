"""An attempt in two halves on the wire: what each engine is asked, what the client sees, and how either half ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from relay_stage import Poked
from relay_wire import SSE, Line, Message, chunk, plain, post, until

from farhop.balance import machine, outcome
from farhop.balance.machine import Command, Forward, Prefill, Request
from farhop.relay.upstream.pair import ANSWER_BYTES_MAX, decode_body, kv_transfer_params_of, prefill_body
from farhop.relay.upstream.pool import UpstreamLimits
from tests.conftest import at_once

WHERE = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [1, 2], "remote_host": "p"}
BODY = {"model": "m", "messages": [{"role": "user", "content": "hé"}], "max_tokens": 50, "stream": True}
SAID = SSE + chunk(b'data: {"choices":[]}\n\n') + b"0\r\n\r\n"


def _json(message: Message) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(message.body)
    return decoded


def _is_prefill(message: Message) -> bool:
    return bool((_json(message).get("kv_transfer_params") or {}).get("do_remote_decode"))


def _answer(prefill: bytes) -> Callable[[Message], bytes]:
    return lambda asked: prefill if _is_prefill(asked) else SAID


OK = plain(msgspec.json.encode({"choices": [], "kv_transfer_params": WHERE}))


async def _paired(stage: Any, whole_next: bool = True, **settings: Any) -> Any:
    """A stage whose machine asks for two halves first, and for one attempt after that."""
    s = await stage(**settings)
    s.upstream.answer = _answer(OK)

    def arrive(request: Request, _now: float) -> list[Command]:
        s.flow.live[request.id] = 1 if whole_next else 2
        prefill = Prefill("p1", s.upstream.address)
        return [Forward(request.id, 1, "d1", s.upstream.address, 1.0, prefill=prefill)]

    s.flow.arrive = arrive
    s.flow.addresses = [s.upstream.address] * 2
    return s


async def test_one_engine_computes_and_the_other_learns_where(stage: Any) -> None:
    s = await _paired(stage)
    answer = await s.ask(
        post(msgspec.json.encode(BODY), headers=b"X-Request-Id: 7\r\nContent-Type: application/json\r\n")
    )
    assert (answer.status, answer.body) == (200, b'data: {"choices":[]}\n\n')
    first, second = s.upstream.asked
    assert first.line == second.line == "POST /v1/chat/completions HTTP/1.1"
    assert _json(first) == {
        "model": "m",
        "messages": BODY["messages"],
        "max_tokens": 1,
        "min_tokens": 1,
        "stream": False,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }
    assert _json(second) == {**BODY, "kv_transfer_params": WHERE}
    same = ("x-request-id", "authorization", "content-type", "via")
    assert [first.get(name) for name in same] == [second.get(name) for name in same]
    assert (first.get("x-request-id"), first.get("authorization")) == (
        "r1",
        "Bearer engine-key",
    )  # never a field of the client's own
    assert s.flow.event_names() == ["RequestArrived", "PrefillEnded", "AttemptBegan", "AttemptEnded"]
    assert s.tier.attempts == [(1, "served")]


async def test_a_request_without_a_name_gets_one_for_both(stage: Any) -> None:
    s = await _paired(stage)
    await s.ask(post(msgspec.json.encode(BODY)))
    assert [asked.get("x-request-id") for asked in s.upstream.asked] == ["r1", "r1"]


@pytest.mark.parametrize(
    ("value", "reason", "status"),
    [
        (plain(b"{}", status="500 Oh"), "prefill_failed", 200),
        (plain(b"{}", status="503 Full"), "prefill_failed", 200),
        (plain(b"{}"), "prefill_failed", 200),
        (plain(b'{"kv_transfer_params":null}'), "prefill_failed", 200),
        (plain(b'{"kv_transfer_params":[1]}'), "prefill_failed", 200),
        (plain(b"nonsense"), "prefill_failed", 200),
        (plain(b"x" * (ANSWER_BYTES_MAX + 1)), "prefill_failed", 200),
        (OK[:-5], "upstream_died_before_first_byte", 200),
        (b"SSH-2.0\r\n\r\n", "upstream_bad_framing", 502),  # never retried, as elsewhere
        (plain(b"{}", status="401 Unauthorized"), "engine_key_refused", 200),
        (plain(b"{}", status="307 There"), "engine_redirects", 200),
        (plain(b"{}", status="400 Bad"), "engine_error", 502),  # the scripted machine does not retry this
    ],
)
async def test_a_prefill_that_fails_is_reported_and_asked_elsewhere(
    stage: Any, value: bytes, reason: str, status: int
) -> None:
    s = await _paired(stage)
    s.upstream.answer = _answer(value)

    async def script(line: Line) -> None:
        asked = await s.upstream.request(line)
        await line.send(s.upstream.answer(asked))
        while value != OK[:-5]:  # this answer breaks off
            await line.send(s.upstream.answer(await s.upstream.request(line)))

    s.upstream.script = script
    answer = await s.ask(post(msgspec.json.encode(BODY)))
    assert answer.status == status
    failed = [event for event in s.flow.events if isinstance(event, machine.PrefillFailed)]
    assert [(event.attempt, event.outcome.reason) for event in failed] == [(1, reason)]
    assert s.tier.attempts[0] == (1, reason)
    if status == 200:
        assert _json(s.upstream.asked[1]) == BODY  # whole again, unchanged


async def test_an_engine_that_is_not_there(stage: Any) -> None:
    s = await _paired(stage)
    nobody = machine.Address("127.0.0.1", 1)
    s.flow.arrive = lambda request, _now: (
        s.flow.live.__setitem__(request.id, 1)
        or [Forward(request.id, 1, "d1", s.upstream.address, 1.0, prefill=Prefill("p1", nobody))]
    )
    assert (await s.ask(post(msgspec.json.encode(BODY)))).status == 200
    assert s.tier.attempts == [(1, "connect_failed"), (2, "served")]


async def test_a_prefill_that_takes_too_long_is_given_up(stage: Any) -> None:
    s = await _paired(stage, upstream_limits=UpstreamLimits(first_byte_s=0.05))

    async def script(line: Line) -> None:
        while True:
            asked = await s.upstream.request(line)
            if not _is_prefill(asked):
                await line.send(SAID)

    s.upstream.script = script
    assert (await s.ask(post(msgspec.json.encode(BODY)))).status == 200
    assert s.tier.attempts == [(1, "first_byte_timeout"), (2, "served")]
    await until(lambda: s.upstream.gone >= 1)


@pytest.mark.parametrize("half", [1, 2])
async def test_a_client_that_leaves_stops_either_half_at_once(stage: Any, half: int) -> None:
    s = await _paired(stage)

    async def script(line: Line) -> None:
        while True:
            asked = await s.upstream.request(line)
            if _is_prefill(asked) and half == 2:
                await line.send(OK)

    s.upstream.script = script

    client = await s.client()
    await client.send(post(msgspec.json.encode(BODY)))
    await until(lambda: len(s.upstream.asked) == half)
    client.abort()
    await at_once(lambda: s.upstream.gone == 1 and s.flow.event_names()[-1] == "ClientLeft")
    assert s.tier.attempts == [(1, "client_left")]


@pytest.mark.parametrize("half", [1, 2])
async def test_a_deadline_stops_either_half(stage: Any, half: int) -> None:
    """The deadline is over as soon as that half was asked, however long it took until then."""
    s = await _paired(stage)

    async def script(line: Line) -> None:
        while True:
            asked = await s.upstream.request(line)
            if _is_prefill(asked) and half == 2:
                await line.send(OK)
            else:
                s.relay.react(Poked([machine.SetTimer("r1", 0.0)]))

    s.upstream.script = script
    assert (await s.ask(post(msgspec.json.encode(BODY)))).status == 504
    assert len(s.upstream.asked) == half
    assert s.tier.attempts == [(1, "deadline_exceeded")]
    await until(lambda: s.upstream.gone >= 1)


@pytest.mark.parametrize("half", [1, 2])
async def test_a_request_recalled_between_prefill_and_decode_is_not_decoded(stage: Any, half: int) -> None:
    """What the engine that answers has whole stays there."""
    s = await _paired(stage, whole_next=False)

    async def script(line: Line) -> None:
        while True:
            asked = await s.upstream.request(line)
            if _is_prefill(asked) and half == 2:
                await line.send(OK)
                continue
            s.relay.react(Poked([machine.Recall("r1", 2), machine.Recall("r1", 1)]))
            if half == 2:
                await line.send(SAID)

    s.upstream.script = script
    answer = await s.ask(post(msgspec.json.encode(BODY)))
    assert (answer.status, len(s.upstream.asked)) == ((451, 1) if half == 1 else (200, 2))
    assert s.tier.attempts == [(1, "unlawful_here" if half == 1 else "served")]
    failed = [event.outcome for event in s.flow.events if isinstance(event, machine.PrefillFailed)]
    assert failed == ([outcome.UNLAWFUL_HERE] if half == 1 else [])


async def test_a_machine_that_breaks_between_the_halves_has_no_second_one(stage: Any) -> None:
    s = await _paired(stage)
    s.flow.raise_on = machine.PrefillEnded
    assert (await s.ask(post(msgspec.json.encode(BODY)))).status == 500
    assert len(s.upstream.asked) == len(s.tier.faults) == 1


async def test_a_kept_connection_that_died_is_reported_in_either_half(stage: Any) -> None:
    s = await _paired(stage)

    async def script(line: Line) -> None:  # one answer, then it closes the connection silently
        asked = await s.upstream.request(line)
        await line.send(s.upstream.answer(asked))
        await asyncio.sleep(0)

    s.upstream.script = script
    for _ in range(3):
        assert (await s.ask(post(msgspec.json.encode(BODY)))).status == 200
    assert set(s.tier.attempts) <= {(1, "served"), (1, "kept_connection_closed"), (2, "served")}


async def test_a_tier_that_breaks_in_the_first_half_costs_this_request_only(stage: Any) -> None:
    s = await _paired(stage)
    s.tier.break_headers = True
    assert (await s.ask(post(msgspec.json.encode(BODY)))).status == 500
    s.tier.break_headers = False
    assert (await s.ask(post(msgspec.json.encode(BODY)))).status == 200
    assert len(s.tier.faults) == 1


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.dictionaries(
        st.sampled_from(("max_tokens", "max_completion_tokens", "stream_options", "n", "min_tokens", "stop", "seed")),
        st.integers(0, 9) | st.none(),
    )
)
def test_everything_else_of_a_body_is_kept(more: dict[str, Any]) -> None:
    body = msgspec.json.encode({"prompt": "é\u2028", "x": 1.50, **more})
    first, second = msgspec.json.decode(prefill_body(body)), msgspec.json.decode(decode_body(body, b'{"a":1}'))
    kept = {"prompt": "é\u2028", "x": 1.5, **{k: v for k, v in more.items() if k in ("stop", "seed")}}
    one = {"max_tokens": 1, "min_tokens": 1, "stream": False}
    if "max_completion_tokens" in more:
        one["max_completion_tokens"] = 1
    assert {k: v for k, v in first.items() if k != "kv_transfer_params"} == {**kept, **one}
    assert second == {"prompt": "é\u2028", "x": 1.5, **more, "kv_transfer_params": {"a": 1}}


def test_kv_transfer_params_are_copied_only_if_an_object() -> None:
    assert kv_transfer_params_of(b'{"kv_transfer_params":{"a":[1,2]}}') == b'{"a":[1,2]}'
    assert kv_transfer_params_of(b'{"kv_transfer_params":"there"}') is None
    assert kv_transfer_params_of(b"\xff{}") is None
