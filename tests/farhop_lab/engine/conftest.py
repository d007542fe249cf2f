"""A replica on a real socket, and the few words a client says to it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from farhop_lab.engine.main import host
from farhop_lab.engine.settings import EngineSettings


class Client:
    """Speaks to one replica."""

    def __init__(self, session: aiohttp.ClientSession, address: str) -> None:
        self.session = session
        self.address = address
        self.url = f"http://{address}"

    def post(self, path: str, **fields: Any) -> Any:
        headers = fields.pop("headers", None)
        return self.session.post(self.url + path, json=fields, headers=headers)

    async def ask(self, path: str, **fields: Any) -> dict[str, Any]:
        async with self.post(path, **fields) as response:
            document: dict[str, Any] = await response.json()
            assert response.status == 200, document
            return document

    async def events(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        """All events of a stream, which must end with [DONE]."""
        async with self.post(path, stream=True, **fields) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            body = (await response.read()).decode()
        lines = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    async def metrics(self) -> dict[str, float]:
        """Samples by name, with the reason where there is one."""
        async with self.session.get(self.url + "/metrics") as response:
            page = await response.text()
        return {
            sample.name + (f":{reason}" if (reason := sample.labels.get("finished_reason")) else ""): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }


@pytest.fixture
async def replica() -> AsyncIterator[Callable[..., Awaitable[Client]]]:
    """Starts replicas by their settings; an L4 a hundred times as fast unless told otherwise."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())

        async def start(tracer: Any = None, **settings: Any) -> Client:
            chosen = EngineSettings(**{"ports": [0], "speedup": 100} | settings)
            addresses = await stack.enter_async_context(host(chosen, tracer))
            return Client(session, addresses[0])

        yield start
