"""Conversations over replicas that keep what they answered: what their caches are expected to hold they do, live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from inprocess import MODEL, chat, send
from kv_world import BLOCK, World, words, world

from farhop.balance.prefix.chain import BLOCK_BYTES

TURNS = 3
# Tokens. The first prompt is long, so that a template's words matter little, and all of it is in small blocks.
FIRST, QUESTION, ANSWER = 400, 50, 200
# An engine counts in blocks of tokens, we in blocks of bytes; and they spell roles differently.
OFF_TOKENS = BLOCK_BYTES[0] / 4 + 2 * BLOCK


async def _answer(here: World, body: dict[str, Any], path: str) -> tuple[str, str, int]:
    """One request: the replica, the answer's text, and how many tokens of the prompt were found cached."""
    body = {"model": MODEL, "max_tokens": ANSWER, "ignore_eos": True, **body}
    answer = await send(here.client, chat(body=body, path=path))
    assert answer.status == 200, answer.body
    await here.settled()
    replica = answer.headers["x-farhop-replica"]
    if not body["stream"]:
        document = answer.json
        choice = document["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        return replica, text, document["usage"]["prompt_tokens_details"]["cached_tokens"]
    text, cached = "", 0
    for line in answer.body.split(b"\n\n"):
        if line.startswith(b"data: {"):
            event = msgspec.json.decode(line[6:])
            for choice in event["choices"]:
                text += choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
            cached = event["usage"]["prompt_tokens_details"]["cached_tokens"] if event.get("usage") else cached
    return replica, text, cached


def _grown(here: World, before: list[float]) -> list[float]:
    return [now - then for now, then in zip(here.hits()["trie"], before, strict=True)]


@pytest.mark.parametrize("stream", [True, False], ids=["streams", "documents"])
async def test_next_chat_turn_is_predicted_and_found_where_its_answer_is_cached(tmp_path: Path, stream: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if stream else {}
    async with world(tmp_path, tokenizer=False, events=False, replicas=3) as here:
        talk = [{"role": "user", "content": words(1, FIRST)}]
        home, known_tokens = "", 0
        for turn in range(TURNS):
            before = list(here.hits()["trie"])
            body = {"messages": talk, "stream": stream, **options}
            replica, text, cached = await _answer(here, body, "/v1/chat/completions")
            assert len(text) == ANSWER * 4
            if turn:
                assert replica == home
                expected, found, off = _grown(here, before)
                assert found == cached > known_tokens - 2 * BLOCK  # the engine keeps its answers, too
                assert off <= OFF_TOKENS, (expected, found)
            home, known_tokens = replica, (known_tokens or FIRST - QUESTION) + QUESTION + ANSWER
            talk += [{"role": "assistant", "content": text}, {"role": "user", "content": words(2 + turn, QUESTION)}]


@pytest.mark.parametrize("stream", [True, False], ids=["streams", "documents"])
async def test_continued_completion_is_predicted_where_it_is_cached(tmp_path: Path, stream: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if stream else {}
    async with world(tmp_path, tokenizer=False, events=False, replicas=2) as here:
        prompt = words(7, FIRST)
        for turn in range(TURNS):
            before = list(here.hits()["trie"])
            body = {"prompt": prompt, "stream": stream, **options}
            _, text, cached = await _answer(here, body, "/v1/completions")
            if turn:
                expected, found, off = _grown(here, before)
                assert found == cached > len(prompt) / 4 - QUESTION - 2 * BLOCK
                assert off <= OFF_TOKENS, (expected, found)
            prompt += text + words(8 + turn, QUESTION)


async def test_answer_text_appears_in_no_output_of_the_balancer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with world(tmp_path, tokenizer=False, events=False, replicas=1) as here:
        body = {"messages": [{"role": "user", "content": words(9, QUESTION)}], "stream": True}
        _, text, _ = await _answer(here, body, "/v1/chat/completions")
        shown = (
            msgspec.json.encode(here.balancer.tier_admin.status()).decode() + here.balancer.metrics.render().decode()
        )
    out = capfd.readouterr()
    assert len(text) == ANSWER * 4
    assert text[:24] not in shown + out.out + out.err
