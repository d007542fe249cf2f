"""Requests through a relay: every transition is reported to the machine once, and its commands are carried out."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from relay_stage import Poked
from relay_wire import SSE, Line, chunk, plain, post, until

from farhop.balance import machine, outcome
from farhop.balance.machine import Usage
from farhop.relay.upstream.attempt import AttemptRun

USAGE = b'{"id":"c","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}'


async def test_a_whole_answer_passes_and_its_edges_are_events(stage: Any) -> None:
    s = await stage()
    body = b'{"choices":[{}],"usage":{"prompt_tokens":7,"completion_tokens":3}}'
    s.upstream.answer = lambda _m: plain(body)
    answer = await s.ask(post(b'{"a":1}'))
    assert (answer.status, answer.body) == (200, body)
    assert answer.get("content-length") == str(len(body))
    assert answer.get("x-farhop-decision") == "d1"
    assert (answer.get("server-timing") or "").startswith("tier;dur=")
    assert s.upstream.asked[0].body == b'{"a":1}'
    assert s.flow.event_names() == ["RequestArrived", "AttemptEnded"], "whole at its first byte: one edge"
    assert s.flow.events[1] == machine.AttemptEnded("r1", 1, 200, Usage(7, 3, None), whole=True)
    assert s.tier.concluded_with == [("served", 200, Usage(7, 3, None))]
    assert s.tier.attempts == [(1, "served")]


async def test_a_stream_passes_event_by_event(stage: Any) -> None:
    s = await stage()
    go: list[bytes] = []

    async def script(line: Line) -> None:
        await s.upstream.request(line)
        await line.send(SSE + chunk(b"data: 1\n\n"))
        await until(lambda: go)
        await line.send(chunk(b"data: 2\n\n") + chunk(b"data: " + USAGE + b"\n\ndata: [DONE]\n\n") + b"0\r\n\r\n")
        await s.upstream.request(line)

    s.upstream.script = script
    c = await s.client()
    await c.send(post())
    head = await c.reader.readuntil(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    assert await c.reader.readexactly(14) == chunk(b"data: 1\n\n")
    assert s.flow.event_names() == ["RequestArrived", "AttemptBegan"]
    go.append(b"go")
    rest = await c.reader.readuntil(b"0\r\n\r\n")
    assert b"data: 2" in rest
    assert b'"usage"' in rest  # this client asked for it
    await until(lambda: s.tier.concluded_with == [("served", 200, Usage(7, 3, None))])


async def test_a_usage_chunk_that_the_client_did_not_ask_for_is_hidden_and_counted(stage: Any) -> None:
    s = await stage()
    s.handler.hide_usage = True
    stream = chunk(b"data: 1\n\n") + chunk(b"data: " + USAGE + b"\n\n") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    s.upstream.answer = lambda _m: SSE + stream
    answer = await s.ask(post())
    assert answer.body == b"data: 1\n\ndata: [DONE]\n\n"
    assert s.tier.concluded_with == [("served", 200, Usage(7, 3, None))]


@pytest.mark.parametrize(("tail", "seen"), [(b": told\n\n", b": told\n\n"), (b"", b""), (b"broken", b"")])
async def test_tail_of_the_tier_follows_a_streams_last_event(stage: Any, tail: bytes, seen: bytes) -> None:
    s = await stage()
    s.tier.tail = tail
    s.upstream.answer = lambda _m: SSE + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    assert (await s.ask(post())).body == b"data: [DONE]\n\n" + seen
    assert [str(e) for e in s.tier.faults] == (["the tier broke"] if tail == b"broken" else [])
    s.upstream.answer = lambda _m: plain(b'{"ok":1}')
    assert (await s.ask(post())).body == b'{"ok":1}'


@pytest.mark.parametrize("end", [b"", b"\n"])
async def test_tail_of_the_tier_is_not_a_part_of_a_last_event_without_its_end(stage: Any, end: bytes) -> None:
    s = await stage()
    s.tier.tail = b": told\n\n"
    s.upstream.answer = lambda _m: SSE + chunk(b"data: 1\n\ndata: [DONE]" + end) + b"0\r\n\r\n"
    assert (await s.ask(post())).body == b"data: 1\n\ndata: [DONE]" + end + b"\n\n: told\n\n"


async def test_an_error_event_is_not_a_part_of_an_event_that_has_passed_in_part(stage: Any) -> None:
    s = await stage()
    part = b"data: " + b"x" * 300_000

    async def breaks(line: Line) -> None:
        await s.upstream.request(line)
        await line.send(SSE + chunk(b"data: 1\n\n") + chunk(part))
        await asyncio.sleep(0.2)
        line.abort()

    s.upstream.script = breaks
    begun, _, error = (await s.ask(post())).body.rpartition(b"\n\ndata: ")
    assert (b"data: 1\n\n" + part).startswith(begun)
    assert len(begun) > 200_000
    assert b"upstream_died_mid_stream" in error


async def test_a_refusal_before_the_first_byte_goes_to_the_next(stage: Any) -> None:
    s = await stage(over_tier=True)
    s.flow.addresses = [s.upstream.address] * 2
    refusal = plain(b"{}", "503 No", b"x-farhop-outcome: queue_full; wait_ms=1200\r\n")
    answers = [refusal, plain(b'{"ok":2}', headers=b"x-farhop-region: target-1\r\n")]
    s.upstream.answer = lambda _m: answers.pop(0)
    answer = await s.ask(post())
    assert (answer.status, answer.body) == (200, b'{"ok":2}')
    assert s.flow.events[1] == machine.AttemptRefused("r1", 1, outcome.QUEUE_FULL, 1200.0)
    assert s.tier.attempts == [(1, "queue_full"), (2, "served")]
    assert len(s.upstream.lines) == 1, "a refusal is a whole answer: its connection is kept"


async def test_an_outcome_header_of_an_engine_means_nothing(stage: Any) -> None:
    s = await stage(over_tier=False)
    found = b"content-type: application/json\r\nretry-after: 7\r\nx-farhop-outcome: queue_full\r\nx-farhop-a: b\r\n"
    s.upstream.answer = lambda _m: plain(b'{"error":{}}', "429 Too Many Requests", found)
    answer = await s.ask(post())
    assert (answer.status, answer.body, answer.get("retry-after")) == (429, b'{"error":{}}', "7")
    assert [name for name, _ in answer.headers if name.startswith("x-farhop-")] == ["x-farhop-decision"]
    assert s.flow.events[-1] == machine.AttemptRefused("r1", 1, outcome.ENGINE_BUSY)
    assert s.tier.concluded_with == [("engine_error", 429, None)]


async def test_answers_of_the_machine(stage: Any) -> None:
    s = await stage()
    s.flow.arrive = lambda request, _now: [s.flow.refuse(request.id, outcome.NO_REGION)]
    answer = await s.ask(post())
    assert (answer.status, answer.get("retry-after")) == (503, "2")
    assert b'"code":"no_region_serving"' in answer.body
    assert answer.get("x-farhop-outcome") is None, "a client listener does not speak of outcomes"
    assert s.tier.concluded_with == [("no_region_serving", 503, None)]


async def test_hop_listener_names_the_outcome_of_a_refusal(stage: Any) -> None:
    s = await stage(is_hop=True)
    s.flow.arrive = lambda request, _now: [s.flow.refuse(request.id, outcome.QUEUE_FULL)]
    answer = await s.ask(post())
    assert answer.get("x-farhop-outcome") == "queue_full; wait_ms=1500"
    early = await s.ask(post(path="/refused"))
    assert early.get("x-farhop-outcome") == "path_not_allowed"


async def test_a_redirect_names_the_other_entry(stage: Any) -> None:
    s = await stage()

    def arrive(request: machine.Request, _now: float) -> list[machine.Command]:
        s.flow.live.clear()
        return [machine.Redirect(request.id, "http://eu.example/v1/chat/completions", outcome.ENTRY_FORBIDDEN)]

    s.flow.arrive = arrive
    answer = await s.ask(post())
    assert (answer.status, answer.get("location")) == (307, "http://eu.example/v1/chat/completions")
    assert s.tier.concluded_with == [("entry_forbidden", 307, None)]


async def test_redirect_to_a_region_has_its_token_region_and_reason(stage: Any) -> None:
    s = await stage()

    def arrive(request: machine.Request, _now: float) -> list[machine.Command]:
        s.flow.live.clear()
        forward = machine.Forward(request.id, 1, "eu", machine.Address("10.0.0.1", 1), 1.0, reasons="because")
        return [machine.Redirect(request.id, "https://eu.example", outcome.REDIRECTED, forward)]

    s.flow.arrive = arrive
    answer = await s.ask(post())
    assert (answer.status, answer.get("location")) == (307, "https://eu.example/v1/chat/completions?token=t-eu")
    assert answer.get("x-farhop-decision") == "d1"
    assert (answer.get("cache-control"), answer.get("referrer-policy")) == ("no-store", "no-referrer")
    assert b"token=" not in answer.body
    assert s.tier.concluded_with == [("redirected", 307, None)]
    assert s.tier.forwards == 0, "nothing was sent upstream"


async def test_held_request_is_answered_when_the_machines_timer_fires(stage: Any) -> None:
    s = await stage()
    s.flow.arrive = lambda request, now: [machine.Hold(request.id), machine.SetTimer(request.id, now + 0.05)]
    answer = await s.ask(post())
    assert answer.status == 504
    assert s.flow.event_names() == ["RequestArrived", "TimerFired"]


@pytest.mark.parametrize(("sweep_s", "due_s"), [(30.0, 0.02), (0.05, 0.2)], ids=["no sweep comes by", "many do"])
async def test_a_timer_fires_when_it_is_due_whenever_the_sweep_comes(
    stage: Any, monkeypatch: pytest.MonkeyPatch, sweep_s: float, due_s: float
) -> None:
    """One due before the next sweep has a handle of its own, the others get one from the sweep."""
    monkeypatch.setattr("farhop.relay.relay.SWEEP_S", sweep_s)
    s = await stage()
    s.flow.arrive = lambda request, now: [machine.Hold(request.id), machine.SetTimer(request.id, now + due_s)]
    began = time.monotonic()
    assert (await s.ask(post())).status == 504
    assert time.monotonic() - began > 0.9 * due_s
    assert s.flow.event_names() == ["RequestArrived", "TimerFired"]


async def test_a_timer_moved_fires_once(stage: Any) -> None:
    s = await stage()

    def arrive(request: machine.Request, now: float) -> list[machine.Command]:
        return [machine.SetTimer(request.id, now + 0.01), machine.SetTimer(request.id, now + 0.1)]

    s.flow.arrive = arrive
    began = time.monotonic()
    await s.ask(post())
    assert time.monotonic() - began > 0.09
    assert s.flow.event_names() == ["RequestArrived", "TimerFired"]


async def test_a_deadline_stops_an_attempt_that_runs(stage: Any) -> None:
    s = await stage()

    async def silent(line: Line) -> None:
        await s.upstream.request(line)
        await s.upstream.request(line)

    s.upstream.script = silent
    forward = s.flow.forward_next
    s.flow.arrive = lambda request, now: [*forward(request.id), machine.SetTimer(request.id, now + 0.05)]
    answer = await s.ask(post())
    assert answer.status == 504
    assert s.tier.attempts == [(1, "deadline_exceeded")]
    await until(lambda: s.upstream.gone == 1)


async def test_a_cancelled_attempt_ends_upstream_and_its_request_goes_on(stage: Any) -> None:
    s = await stage()
    s.flow.addresses = [s.upstream.address] * 2

    async def silent_once(line: Line) -> None:
        await s.upstream.request(line)
        if len(s.upstream.lines) > 1:
            await line.send(plain(b"{}"))
        await s.upstream.request(line)

    s.upstream.script = silent_once
    c = await s.client()
    await c.send(post())
    await until(lambda: s.upstream.asked)
    s.relay.react(Poked([machine.Cancel("r1", 7), machine.Cancel("nobody", 1)]))
    assert s.tier.attempts == []
    s.relay.react(Poked([machine.Cancel("r1", 1)]))
    await until(lambda: s.upstream.gone == 1)
    s.relay.react(Poked(s.flow.forward_next("r1")))
    assert (await c.read()).status == 200
    assert s.tier.attempts == [(1, "client_left"), (2, "served")]


async def test_a_client_that_leaves_stops_the_work_upstream_at_once(
    stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once is: without a timer. Those that look after connections and requests do not come by here."""
    for module in ("farhop.relay.relay", "farhop.relay.http.listener"):
        monkeypatch.setattr(f"{module}.SWEEP_S", 3600.0)
    s = await stage()

    async def endless(line: Line) -> None:
        await s.upstream.request(line)
        await line.send(SSE + chunk(b"data: 1\n\n"))
        await s.upstream.request(line)

    s.upstream.script = endless
    c = await s.client()
    await c.send(post())
    await c.reader.readuntil(b"data: 1\n\n")
    c.abort()
    await until(lambda: s.upstream.gone == 1)
    assert s.flow.event_names()[-1] == "ClientLeft"
    assert s.tier.concluded_with == [("client_left", 0, None)]


async def test_a_client_that_leaves_before_the_connection_is_there_costs_nothing(stage: Any) -> None:
    s = await stage()
    s.flow.arrive = lambda request, _now: [machine.Hold(request.id)]
    c = await s.client()
    await c.send(post())
    await until(lambda: s.relay.under_way)
    s.relay.react(Poked(s.flow.forward_next("r1")))  # connecting takes a turn of the loop; the client goes first
    s.relay.client_left(s.handler.exchanges[0].callbacks)
    assert s.flow.event_names() == ["RequestArrived", "Poked", "ClientLeft"]
    await until(lambda: s.upstream.lines)
    s.flow.arrive = None
    assert (await s.ask(post(b"later"))).status == 200
    assert [m.body for m in s.upstream.asked] == [b"later"]
    assert len(s.upstream.lines) == 1, "the connection was kept for the next"
    assert s.tier.attempts == [(1, "client_left"), (1, "served")]


async def test_a_client_that_leaves_while_held_is_an_event_once(stage: Any) -> None:
    s = await stage()
    s.flow.arrive = lambda request, _now: [machine.Hold(request.id)]
    c = await s.client()
    await c.send(post())
    await until(lambda: s.relay.under_way)
    c.abort()
    await until(lambda: not s.relay.under_way)
    assert s.flow.event_names() == ["RequestArrived", "ClientLeft"]
    assert s.tier.concluded_with == [("client_left", 0, None)]


async def test_a_machine_that_breaks_answers_500_and_the_process_lives(stage: Any) -> None:
    s = await stage()
    s.flow.raise_on = machine.RequestArrived
    c = await s.client()
    await c.send(post())
    answer = await c.read()
    assert answer.status == 500
    assert b"internal_error" in answer.body
    assert b"Traceback" not in answer.body
    assert [str(e) for e in s.tier.faults] == ["the machine broke"]
    assert s.flow.event_names() == ["RequestArrived", "ClientLeft"], "the machine gives back what it holds"
    s.flow.raise_on = None
    assert s.tier.concluded_with == [("internal_error", 500, None)]
    await c.send(post())
    assert (await c.read()).status == 200


async def test_a_machine_that_breaks_when_an_answer_begins_takes_nothing_back(stage: Any) -> None:
    s = await stage()
    s.edges_count = False
    s.flow.raise_on = machine.AttemptBegan
    s.upstream.answer = lambda _m: SSE + chunk(b"data: 1\n\n") + b"0\r\n\r\n"
    c = await s.client()
    await c.send(post())
    assert (await c.read()).status == 200  # it was sent before the machine was notified
    assert s.tier.attempts == [(1, "served")]
    s.flow.raise_on = None
    await c.send(post())
    assert (await c.read()).status == 200
    assert s.tier.concluded_with == [("served", 200, None), ("served", 200, None)]
    assert len(s.tier.faults) == 1


async def test_a_bug_while_a_connection_is_lost_ends_only_its_request(
    stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_attempt: object) -> bool:
        raise RuntimeError("a bug")

    s = await stage()
    monkeypatch.setattr(AttemptRun, "resumable", property(broken))

    async def dies(line: Line) -> None:
        await line.read()
        await line.send(SSE + chunk(b"data: 1\n\n"))
        await until(lambda: s.flow.started)
        line.abort()

    s.upstream.script = dies
    answer = await s.ask(post())
    assert (answer.body, answer.whole) == (b"data: 1\n\n", False)
    assert [str(e) for e in s.tier.faults] == ["a bug"]
    assert s.tier.concluded_with == [("internal_error", 200, None)]


async def test_a_tier_that_breaks_answers_500_and_keeps_its_connections(stage: Any) -> None:
    s = await stage()
    s.tier.break_headers = True
    assert (await s.ask(post())).status == 500
    s.tier.break_headers = False
    assert (await s.ask(post())).status == 200
    assert len(s.upstream.lines) == 1
    assert s.flow.event_names() == ["RequestArrived", "ClientLeft", "RequestArrived", "AttemptEnded"]


async def test_a_bug_in_the_tiers_records_does_not_change_an_answer(stage: Any) -> None:
    s = await stage()

    def broken(*_: object) -> None:
        raise RuntimeError("the notes broke")

    s.tier.attempt_over = broken
    s.tier.concluded = broken
    s.edges_count = False
    answer = await s.ask(post())
    assert answer.status == 200
    assert len(s.tier.faults) == 2
