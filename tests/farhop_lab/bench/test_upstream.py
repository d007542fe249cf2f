"""The upstream speaks as an engine does, as far as a balancer or a router looks."""

from __future__ import annotations

import json

import aiohttp
import pytest
from bench_runs import listening, sent

from farhop_lab.bench import bodies, upstream
from farhop_lab.world.stream import EventReader
from regional_lb.engines.signals.engines import read_page


async def test_emulated_upstream_answers_what_a_balancer_asks(engines: int) -> None:
    async with aiohttp.ClientSession(f"http://127.0.0.1:{engines}") as session:
        async with session.get("/health") as health:
            assert health.status == 200
        async with session.get("/metrics") as metrics:
            assert read_page(await metrics.read(), 0.0, pytest.fail).waiting == 0
        async with session.get("/v1/models") as models:
            assert (await models.json())["data"][0]["id"] == bodies.MODEL
        async with session.post("/v1/chat/completions", data=bodies.plain(4096, 1)[0]) as answer:
            assert (await answer.json())["usage"]["prompt_tokens"] == 1024


async def test_a_stream_is_paced_and_ends_with_usage(engines: int) -> None:
    (body,) = bodies.streamed(1024, 5, 10.0, 1)
    reader, texts, pieces = EventReader(), list[str](), 0
    url = f"http://127.0.0.1:{engines}/v1/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, data=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for piece in answer.content.iter_any():
            pieces += 1
            texts += reader.feed(piece)
    assert reader.end() is None
    assert texts == [" word"] * 5
    assert pieces >= 3  # they did not arrive in one piece
    assert reader.usage is not None
    assert reader.usage.prompt_tokens == len(body) // 4


async def test_emulated_upstream_serves_many_requests_of_one_connection(engines: int) -> None:
    found = await sent(engines, connections=1)
    assert found.windows[0].requests > 10
    assert found.windows[0].errors == 0


async def test_it_answers_a_global_balancer_in_a_region_s_name() -> None:
    async with listening(lambda: upstream.Connection(region="tokyo")) as port:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        async with aiohttp.ClientSession() as session:
            for body in (bodies.plain(4096, 1)[0], bodies.streamed(1024, 2, 1.0, 1)[0]):
                for more, region in (({"x-farhop-hop": "a"}, "tokyo"), ({}, None)):
                    async with session.post(url, data=body, headers=more) as answer:
                        assert answer.headers.get("x-farhop-region") == region
                        await answer.read()


def test_a_whole_answer_is_json() -> None:
    assert json.loads(upstream.answer(7, 3))["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
