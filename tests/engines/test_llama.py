"""llama.cpp's server behind both tiers: another engine, without KV events."""

from __future__ import annotations

import re
from typing import Any

import pytest
from inprocess import chat, head
from real import RealEngine, send, settled, status, tiers

pytestmark = pytest.mark.engines

_OWN = re.compile(rb'"(?:id|created)":(?:"[^"]*"|\d+)|"timings":\{[^}]*\}')
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    "stream": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "stream": True}),
    "completion": ("/v1/completions", {"prompt": "hello"}),
    "wrong": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "tool_choice": 7}),
}


@pytest.mark.parametrize("name", ASKED)
async def test_an_answer_is_the_same_by_way_of_both_tiers(llama: RealEngine, name: str) -> None:
    path, more = ASKED[name]
    body = {"model": "tiny", "max_tokens": 4, "temperature": 0.0, "seed": 1, "cache_prompt": True, **more}
    port = int(llama.url.rpartition(":")[2])
    sent = chat(key=None, body=body, path=path, content_type="application/json")
    await send(port, sent)
    direct = await send(port, sent)
    async with tiers(llama, tokenizer=False) as both:
        through = await send(both.entry, chat(body=body, path=path, content_type="application/json"))
    assert through.status == direct.status
    if name == "stream":  # it splits its streams at arbitrary points
        assert _texts(through.body) == _texts(direct.body)
        # The last chunk has its duration, and no usage unless it was requested.
        for answer in (through, direct):
            assert b'"usage"' not in answer.body
            assert answer.body.split(b"\n\n")[-3].count(b'"timings":{"cache_n":') == 1
    else:
        assert _OWN.sub(b"", through.body) == _OWN.sub(b"", direct.body)


def _texts(stream: bytes) -> bytes:
    return b"".join(re.findall(rb'"content":"((?:[^"\\]|\\.)*)"', stream))


async def test_its_page_is_read_and_its_cache_is_learned_of(llama: RealEngine) -> None:
    async with tiers(llama, tokenizer=False) as both:
        (replica,) = status(both)
        assert replica["models"] == ["tiny"]
        body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "of the river " * 60}]}
        for _ in range(2):
            answer = await send(both.entry, chat(body=body, content_type="application/json"))
        assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
        await settled(both)
        assert both.regional.flow.learning.actual_tokens > 100
        models = await send(both.entry, head("GET", "/v1/models", authorization="Bearer sk-farhop-anywhere"))
        assert [model["id"] for model in models.json["data"]] == ["tiny"]
