"""Engines whose answers are cut at chosen points, behind a balancer, and clients that check every event."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import msgspec
from inprocess import MODEL

from regional_lb.app.main import RegionalBalancer
from tests.drills.classic import Gpu, l4, region

TOKENS = 40
# Engines, balancer and clients share one loop here: if a probe's timeout is below the time that the loop may stand
# still on a busy machine, every engine counts as dead, and then "no replica of this model is healthy".
STEADY: dict[str, Any] = {"watch": {"probe_s": 0.1, "scrape_s": 0.05, "timeout_s": 30.0}}
HEADERS = {"authorization": "Bearer sk-farhop-anywhere"}
_log = logging.getLogger(__name__)


class Cutter(Gpu):
    """An engine whose connection breaks once so many bytes of an answer's body have passed; None: it holds."""

    cut_after: int | None = None
    passed = 0
    together: tuple[Cutter, ...] = ()

    async def _pour(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        streams = False
        try:
            while data := await reader.read(65536):
                streams = streams or b"text/event-stream" in data
                if streams and self.cut_after is not None:
                    left = self.cut_after - self.passed
                    self.passed += len(data)
                    if left <= len(data):
                        for one in self.together:
                            one.cut_after = None
                        writer.write(data[: max(0, left)])
                        await writer.drain()
                        return
                writer.write(data)
                await writer.drain()
        except ConnectionError as error:
            _log.info("the pipe at port %d broke after %d bytes of an answer: %r", self.port, self.passed, error)
        finally:
            writer.close()


@asynccontextmanager
async def fleet(
    count: int = 2, engine: str = "vllm", **config: Any
) -> AsyncIterator[tuple[RegionalBalancer, str, list[Cutter]]]:
    """Engines of one model and one seed, which are told to be such ones, and a balancer before them."""
    async with AsyncExitStack() as stack:
        made = [Cutter(l4(100.0), 7) for _ in range(count)]
        engines = [await stack.enter_async_context(one.running()) for one in made]
        fields = {"engine": engine, "kv_tokens": 100_000}
        balancer, url = await stack.enter_async_context(region(engines, fields, **(STEADY | config)))
        yield balancer, url, made


def cut_once(engines: list[Cutter], after: int) -> None:
    """Whoever answers next, once. What breaks at two engines is not handed to a third."""
    for one in engines:
        one.cut_after, one.passed, one.together = after, 0, tuple(engines)


def chat(text: str, **more: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": text}]
    return "/v1/chat/completions", {"messages": messages, "max_tokens": TOKENS, "ignore_eos": True, **more}


def completion(text: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": text, "max_tokens": TOKENS, "ignore_eos": True, **more}


async def ask(url: str, asked: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A stream's events; the last is {} for [DONE]."""
    path, body = asked
    events: list[dict[str, Any]] = []
    async with (
        aiohttp.ClientSession() as http,
        http.post(url + path, json={"model": MODEL, "stream": True, **body}, headers=HEADERS) as answer,
    ):
        assert answer.status == 200, await answer.text()
        for event in (await answer.read()).split(b"\n\n"):
            if event.strip() and not event.startswith(b":"):
                found = event.removeprefix(b"data: ")
                events.append({} if found == b"[DONE]" else msgspec.json.decode(found))
    return events


def text_of(events: list[dict[str, Any]]) -> str:
    choices = [event["choices"][0] for event in events if event.get("choices")]
    return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices)


def sound(events: list[dict[str, Any]], expected: list[dict[str, Any]], *, chats: bool) -> None:
    """As if it had never broken: one name, one role, one end, the same text."""
    assert text_of(events) == text_of(expected)
    assert events[-1] == {}, events[-1]
    found = [event for event in events if event.get("choices")]
    assert len({(event["id"], event["created"], event["model"], event["object"]) for event in events[:-1]}) == 1
    ends = [event["choices"][0]["finish_reason"] for event in found if event["choices"][0]["finish_reason"]]
    assert ends == [e["choices"][0]["finish_reason"] for e in expected if e.get("choices")][-1:]
    if chats:
        assert [event["choices"][0]["delta"].get("role") for event in found].count("assistant") == 1
    assert not any("error" in event for event in events)
    assert all(event["choices"][0].get("token_ids") is None for event in found)
    assert all(event.get("prompt_token_ids") is None for event in events)


def outcomes(balancer: RegionalBalancer) -> dict[tuple[str, str], int]:
    assert balancer.relay.resumption is not None
    return dict(balancer.relay.resumption.outcomes)
