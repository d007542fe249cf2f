"""Streams of a real vLLM that are cut, or whose engine is killed, go on at another one: what a client sees of it.

Temperature 0 and the same weights on both. Where the text is another than an unbroken stream's, the engine itself must
say the same when it is given the tokens so far: then it is its arithmetic (another batch), not the seam.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import real
from inprocess import Both, until
from real import RealEngine, status, tiers

pytestmark = pytest.mark.engines
TOKENS, CUTS, KILLED_UNDER, LONG = 60, 30, 12, 400
TEXT_CUTS = 10


class Cut:
    """The next stream of any engine breaks after so many bytes, once; None: all hold. `passed`: bytes of the last."""

    after: int | None = None
    passed = 0


class Pipe(RealEngine):
    """Before an engine: breaks the connection of the stream that is to be cut."""

    def __init__(self, engine: RealEngine, cut: Cut) -> None:
        super().__init__("")
        self._behind, self._cut = engine, cut

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Pipe]:
        """Listen on a free port."""
        server = await asyncio.start_server(self._come, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            yield self

    async def _come(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = int(self._behind.url.rpartition(":")[2])
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(self._pour(reader, back, answers=False), self._pour(there, writer, answers=True))

    async def _pour(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool) -> None:
        streams, passed, cut = False, 0, self._cut
        try:
            while data := await reader.read(65536):
                if answers and data.startswith(b"HTTP/1.1 "):  # a connection carries one answer after another
                    streams, passed = b"text/event-stream" in data, 0
                passed += len(data)
                if streams:
                    cut.passed = passed
                    if cut.after is not None and passed >= cut.after:
                        writer.write(data[: len(data) - (passed - cut.after)])
                        cut.after = None
                        return
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


@pytest.fixture(scope="module")
def own(shared: real.Shared, logs: Path) -> Iterator[list[RealEngine]]:
    """Two engines that nobody else uses."""
    shared.stop()
    started = [real.vllm(logs, tells=False), real.vllm(logs, tells=False)]
    try:
        for engine in started:
            engine.ready()
        yield started
    finally:
        for engine in started:
            engine.stop()


def body(seed: int, tokens: int = TOKENS) -> dict[str, Any]:
    rng = random.Random(seed)
    words = " ".join(str(rng.randrange(1000)) for _ in range(60))
    return {
        "model": "tiny", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, "messages": [{"role": "user", "content": words}],
    }  # fmt: skip


async def through(
    both: Both, asked: dict[str, Any], begun: list[None] | None = None, path: str = "/v1/chat/completions"
) -> list[dict[str, Any]]:
    """The stream's events by way of both tiers; the last is {} for [DONE]. `begun` grows by one at its tenth line."""
    url = f"http://127.0.0.1:{both.entry}{path}"
    key, found = {"authorization": "Bearer sk-farhop-anywhere"}, list[dict[str, Any]]()
    async with aiohttp.ClientSession() as http, http.post(url, json=asked, headers=key) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: "):
                found.append({} if line[6:].strip() == b"[DONE]" else json.loads(line[6:]))
                if begun is not None and len(found) == 10:
                    begun.append(None)
    return found


def text_of(text: list[dict[str, Any]]) -> str:
    return "".join(one["choices"][0]["delta"].get("content") or "" for one in text if one.get("choices"))


def sound(text: list[dict[str, Any]], tokens: int = TOKENS) -> None:
    """One name, one role, one end, the usage of the whole, nothing of what was asked for between."""
    assert not any("error" in one for one in text), text[-2:]
    assert text[-1] == {}
    found = [one for one in text if one.get("choices")]
    assert len({(one["id"], one["created"], one["model"], one["object"]) for one in text[:-1]}) == 1
    assert [one["choices"][0]["finish_reason"] for one in found if one["choices"][0]["finish_reason"]] == ["length"]
    assert [one["choices"][0]["delta"].get("role") for one in found].count("assistant") == 1
    assert [one["usage"]["completion_tokens"] for one in text if one.get("usage")] == [tokens]
    assert all(one["choices"][0].get("token_ids") is None for one in found)
    assert all(one.get("prompt_token_ids") is None for one in text)


async def as_the_engine_says(engine: RealEngine, asked: dict[str, Any], text: str) -> bool:
    """Whether it is what the engine says without us: at once, or going on from some of its own tokens."""
    whole = {**asked, "stream": False, "return_token_ids": True}
    del whole["stream_options"]
    answer = await asyncio.to_thread(engine.ask, "/v1/chat/completions", whole)
    choice = answer["choices"][0]
    if choice["message"]["content"] == text:
        return True
    for at in range(1, asked["max_tokens"]):
        more = {
            "model": "tiny", "temperature": 0, "ignore_eos": True, "max_tokens": asked["max_tokens"] - at,
            "prompt": answer["prompt_token_ids"] + choice["token_ids"][:at],
        }  # fmt: skip
        rest = await asyncio.to_thread(engine.ask, "/v1/completions", more)
        if text.endswith(rest["choices"][0]["text"]) and choice["message"]["content"][:at] == text[:at]:
            return True
    return False


async def test_streams_cut_at_random_places_say_what_whole_ones_say(vllms: list[RealEngine]) -> None:
    rng, other = random.Random(3), 0
    async with AsyncExitStack() as stack:
        cut = Cut()
        pipes = [await stack.enter_async_context(Pipe(engine, cut).running()) for engine in vllms]
        both = await stack.enter_async_context(tiers(*pipes))
        for seed in range(CUTS):
            asked = body(seed)
            expected = text_of(await through(both, asked))
            cut.after = rng.randrange(400, cut.passed)
            answer = await through(both, asked)
            cut.after = None
            sound(answer)
            if text_of(answer) != expected:
                other += 1
                assert await as_the_engine_says(vllms[0], asked, text_of(answer))
        assert both.regional.relay.resumption is not None
        print(f"\n{CUTS} cut, {other} of another text; {dict(both.regional.relay.resumption.outcomes)}")
        assert both.regional.relay.resumption.outcomes["resumed", ""] >= CUTS // 2  # the others had finished


async def test_streams_of_engines_without_token_ids_are_resumed_by_their_text(vllms: list[RealEngine]) -> None:
    """vLLM, taken for an engine that is asked for none. What is told behind a seam is what the engine says to the text
    before it: its tokens may be others than those that it wrote, and then the rest is, too."""
    rng, went_on = random.Random(5), 0
    async with AsyncExitStack() as stack:
        cut = Cut()
        pipes = [await stack.enter_async_context(Pipe(engine, cut).running()) for engine in vllms]
        mute = [
            {"url": pipe.url, "models": ["tiny"], "name": f"e{n}", "slots": 8, "engine": "sglang"}
            for n, pipe in enumerate(pipes)
        ]
        both = await stack.enter_async_context(tiers(*pipes, replicas=mute, resume={"mode": "text"}))
        assert both.regional.relay.resumption is not None
        outcomes = both.regional.relay.resumption.outcomes
        for seed in range(TEXT_CUTS):
            asked = body(seed)
            asked["prompt"] = asked.pop("messages")[0]["content"]
            whole = completion_text(await through(both, asked, path="/v1/completions"))
            cut.after, resumed = rng.randrange(400, cut.passed), outcomes["resumed", ""]
            answer = await through(both, asked, path="/v1/completions")
            cut.after = None
            if outcomes["resumed", ""] == resumed:
                continue  # it had sent everything, or nothing
            went_on += 1
            assert not any("error" in one for one in answer), answer[-2:]
            assert answer[-1] == {}
            assert await goes_on(vllms[0], asked, whole, completion_text(answer))
        print(f"\n{TEXT_CUTS} cut, {went_on} went on; {dict(outcomes)}")
        assert went_on >= TEXT_CUTS // 2


def completion_text(text: list[dict[str, Any]]) -> str:
    return "".join(one["choices"][0]["text"] for one in text if one.get("choices"))


async def goes_on(engine: RealEngine, asked: dict[str, Any], whole: str, text: str) -> bool:
    """Whether it is the whole text, or some of it and what the engine says to that."""
    if text == whole:
        return True
    alike = next((at for at, (one, other) in enumerate(zip(whole, text, strict=False)) if one != other), len(whole))
    for at in range(alike, 0, -1):
        more = {"model": "tiny", "temperature": 0, "ignore_eos": True, "prompt": asked["prompt"] + text[:at]}
        more["max_tokens"] = asked["max_tokens"]
        rest = (await asyncio.to_thread(engine.ask, "/v1/completions", more))["choices"][0]["text"]
        if len(text) > at and rest.startswith(text[at:].rstrip("\ufffd")):
            return True
    return False


async def test_an_engine_killed_under_streams_loses_none(own: list[RealEngine]) -> None:
    async with tiers(*own) as both:
        bodies = [body(seed, LONG) for seed in range(100, 100 + KILLED_UNDER)]
        begun: list[None] = []
        asked = [asyncio.create_task(through(both, one, begun)) for one in bodies]
        carried: list[int] = []  # at each engine; the picker may send all of them to one

        def all_begun() -> bool:
            carried[:] = [one["in_flight"] for one in sorted(status(both), key=lambda one: str(one["replica"]))]
            return 0 < sum(carried) == len(begun) - sum(one.done() for one in asked)

        await until(all_begun, real.ANSWER_S)
        killed = carried.index(max(carried))
        own[killed].signal(signal.SIGKILL)
        answers = await asyncio.gather(*asked)
        assert both.regional.relay.resumption is not None
        print(f"\n{dict(both.regional.relay.resumption.outcomes)}")
        assert both.regional.relay.resumption.outcomes["resumed", ""] >= 1
        for one, each in zip(bodies, answers, strict=True):
            sound(each, LONG)
            assert await as_the_engine_says(own[1 - killed], one, text_of(each))
