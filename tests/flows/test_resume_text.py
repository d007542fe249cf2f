"""A stream of an engine without token ids is continued by its text, if configured; never called exact."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import pytest
from aiohttp import web
from inprocess import MODEL, Engine, both, head, streaming, topology
from inprocess import chat as chat_request
from resumes import ask, chat, completion, cut_once, fleet, outcomes, sound, text_of

from tests.drills import classic

TEXT: dict[str, Any] = {"engine": "sglang", "resume": {"mode": "text"}}


def used(events: list[dict[str, Any]]) -> tuple[int, int, int]:
    (usage,) = [event["usage"] for event in events if event.get("usage")]
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]


async def test_streams_cut_anywhere_equal_uncut_ones() -> None:
    rng = Random(5)
    async with fleet(**TEXT) as (balancer, url, engines):
        for number in range(20):
            make, tells = (chat, completion)[number % 2], number % 3 == 0
            more: dict[str, Any] = {"stream_options": {"include_usage": True}} if tells else {}
            more |= ({}, {"min_tokens": 30, "ignore_eos": False}, {"max_tokens": 400, "ignore_eos": False})[number % 3]
            asked = make(f"{number} tell me of the sea", **more)
            expected = await ask(url, asked)
            size = sum(len(msgspec.json.encode(event)) + 20 for event in expected)
            cut_once(engines, rng.randrange(size))
            events = await ask(url, asked)
            if any("error" in event for event in events):
                assert outcomes(balancer)["broken", "usage"] == 1
                continue
            sound(events, expected, chats=make is chat)
            if tells:
                assert used(events) == used(expected)
        found = outcomes(balancer)
        assert found["resumed", ""] > 12
        assert set(found) <= {("resumed", ""), ("broken", "usage")}, found
        assert balancer.relay.resumption is not None
        assert balancer.relay.resumption.kept_bytes == 0
        assert balancer.flow.under_way == 0


async def test_characters_that_tokens_cut_in_two_and_stop_strings_over_the_seam() -> None:
    rng = Random(9)
    async with fleet(**TEXT) as (balancer, url, engines):
        for one in engines:
            one.replica.text_model = msgspec.structs.replace(one.replica.text_model, wide=True)
        for number in range(20):
            make = (chat, completion)[number % 2]
            prompt = f"{number} erzähl vom Meer"
            fields = {"stream_options": {"include_usage": True}} if number % 2 else {}
            whole = text_of(await ask(url, make(prompt)))
            at = rng.randrange(len(whole) // 2, len(whole) - 12)
            shows = ({"include_stop_str_in_output": True}, {"no_stop_trim": True}, {}, {}, {})[number % 5]
            asked = make(prompt, stop=["unsaid", whole[at : at + 12]], **shows, **fields)
            expected = await ask(url, asked)
            assert len(text_of(expected)) < len(whole)
            size = sum(len(msgspec.json.encode(event)) + 20 for event in expected[:-2])
            cut_once(engines, size - rng.randrange(1400))
            events = await ask(url, asked)
            if any("error" in event for event in events):
                assert outcomes(balancer)["broken", "usage"] == 1
                continue
            sound(events, expected, chats=make is chat)
            if fields:  # an engine that reads the text again counts other tokens in the prompt
                assert used(events)[1] == used(expected)[1]
        assert outcomes(balancer)["resumed", ""] >= 8
        assert set(outcomes(balancer)) <= {("resumed", ""), ("broken", "usage")}
        assert balancer.flow.under_way == 0


async def test_token_ids_are_used_if_the_engine_reports_them() -> None:
    async with fleet(engine="vllm", resume={"mode": "text"}) as (balancer, url, engines):
        asked = chat("of ids")
        expected = await ask(url, asked)
        cut_once(engines, 3000)
        sound(await ask(url, asked), expected, chats=True)
        assert outcomes(balancer) == {("resumed", ""): 1}
        assert balancer.relay.resumption is not None
        assert balancer.relay.resumption.recomputed_tokens > 0


async def test_stream_that_cannot_continue_from_text_ends_with_an_error_and_a_reason() -> None:
    async with fleet(**TEXT) as (balancer, url, engines):
        for make, more, reason in (
            (chat, {"response_format": {"type": "json_object"}}, "structured"),
            (chat, {"n": 2}, "answers"),
            (chat, {"regex": "a+"}, "structured"),
            (chat, {"stop_regex": "a+"}, "stop_strings"),
            (chat, {"messages": [{"role": "assistant", "content": "I say"}]}, "turns"),
            (completion, {"prompt": [1, 2, 3]}, "prompt_ids"),
        ):
            cut_once(engines, 2_000)
            events = await ask(url, make("a tale", **more))
            assert "error" in events[-1] or "error" in events[-2], events[-2:]
            assert outcomes(balancer)["not_resumable", reason] >= 1
        assert ("resumed", "") not in outcomes(balancer)


async def test_prefilled_assistant_message_is_continued_after_a_break() -> None:
    async with fleet(**TEXT) as (_, url, engines):
        turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The sea"}]
        asked = chat("", messages=turns, continue_final_message=True, add_generation_prompt=False)
        expected = await ask(url, asked)
        cut_once(engines, 3000)
        sound(await ask(url, asked), expected, chats=True)


@pytest.mark.parametrize("resume", [{"mode": "exact"}, {"mode": "text", "modes": {MODEL: "exact"}}])
async def test_without_text_mode_a_stream_is_not_resumed_by_text(resume: dict[str, Any]) -> None:
    async with fleet(engine="sglang", resume=resume) as (balancer, url, gpus):
        cut_once(gpus, 2_000)
        events = await ask(url, chat("a tale"))
        assert any("error" in event for event in events)
        assert ("resumed", "") not in outcomes(balancer)


async def test_tenant_may_restrict_resume_to_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    world = classic.topology()
    anywhere = replace(world.tenants["anywhere"], resume="exact")
    monkeypatch.setattr(classic, "topology", lambda: replace(world, tenants={**world.tenants, "anywhere": anywhere}))
    async with fleet(**TEXT) as (balancer, url, engines):
        cut_once(engines, 2_000)
        events = await ask(url, chat("a tale"))
        assert any("error" in event for event in events)
        assert ("resumed", "") not in outcomes(balancer)


class Ending(Engine):
    """It says all that there is, and dies before its answer's own end."""

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(({}, msgspec.json.decode(await request.read())))
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for text, ends in (("The sea", b"null"), (" is wide", b'"stop"')):
            await answer.write(
                b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,'
                b'"delta":{"content":"%b"},"logprobs":null,"finish_reason":%b}]}\n\n' % (text.encode(), ends)
            )
        await answer.write(b"data: [DONE]\n\n")
        assert request.transport is not None
        request.transport.abort()
        return answer


async def test_an_engine_that_dies_after_its_last_event_leaves_the_client_s_connection_usable() -> None:
    """One end, and what answers the next request begins right behind it."""
    engine = Ending()
    async with engine.running():
        replica = {"url": f"http://{engine.address}", "models": [MODEL], "name": "one", "engine": "sglang"}
        async with both(engine, topology(), regional={"replicas": [replica], "resume": {"mode": "text"}}) as up:
            first = chat_request(body=streaming()).replace(b"connection: close\r\n", b"")
            wire = b""
            reader, writer = await asyncio.open_connection("127.0.0.1", up.client)
            async with asyncio.timeout(60.0):
                writer.write(first + head("GET", "/v1/models", authorization="Bearer sk-farhop-anywhere"))
                wire = await reader.read()
            writer.close()
            _, _, body = wire.partition(b"\r\n\r\n")
            stream, _, rest = body.partition(b"\r\n0\r\n\r\n")
            assert stream.count(b"[DONE]") == 1
            assert rest.startswith(b"HTTP/1.1 200 OK\r\n"), rest[:40]
            assert outcomes(up.regional) == {}
