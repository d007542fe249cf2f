"""Engines' pages on real sockets: whole or not at all, and the key where the engine wants one."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from farhop.relay.upstream.fetch import FetchError
from farhop.relay.upstream.pool import Pool, UpstreamLimits
from regional_lb.engines import pages as module
from regional_lb.engines.config import ReplicaConfig
from regional_lb.engines.pages import Pages
from regional_lb.engines.signals.exposition import PageError

KEY = "sk-engine"


class Engine:
    """Answers each path with a status and a text; notes the keys that it is given."""

    def __init__(self) -> None:
        self.pages: dict[str, tuple[int, bytes, str]] = {}
        self.keys: dict[str, str | None] = {}
        self.url = ""

    def says(self, path: str, body: Any, status: int = 200, content_type: str = "text/plain") -> None:
        text = body if isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()
        self.pages[path] = status, text, content_type

    async def answer(self, request: web.Request) -> web.Response:
        self.keys[request.raw_path] = request.headers.get("authorization")
        status, body, content_type = self.pages.get(request.raw_path, (404, b"", "text/plain"))
        return web.Response(status=status, body=body, content_type=content_type)

    def replica(self, **fields: Any) -> ReplicaConfig:
        return ReplicaConfig.model_validate({"url": self.url, "models": ["m"]} | fields)


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Engine, Pages]]:
    engine, app = Engine(), web.Application()
    app.router.add_get("/{tail:.*}", engine.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    pool = Pool(UpstreamLimits(connect_s=1.0))
    try:
        yield engine, Pages(pool, 20.0, KEY)
    finally:
        await pool.close()
        await runner.cleanup()


@pytest.mark.parametrize(
    ("status", "content_type", "reason"),
    [
        (404, "text/plain", "status"),
        (500, "text/plain", "status"),
        (401, "application/json", "key"),
        (403, "text/html", "key"),
        (200, "text/html", "type"),
        (200, "application/json", "type"),
    ],
)
async def test_what_is_no_metrics_page_is_an_error(status: int, content_type: str, reason: str) -> None:
    async with serving() as (engine, pages):
        engine.says("/metrics", "a 1\n", status, content_type)
        with pytest.raises(PageError) as raised:
            await pages.metrics(engine.replica().address, "/metrics")
        assert raised.value.reason == reason


@pytest.mark.parametrize("path", ["/metrics", "/v1/models"])
async def test_a_compressed_page_that_nobody_asked_for_is_named_as_such(path: str) -> None:
    async with serving() as (engine, pages):
        engine.says(path, gzip.compress(b"a 1\n"))
        address = engine.replica().address
        with pytest.raises(PageError, match="it is compressed") as raised:
            await (pages.metrics(address, path) if path == "/metrics" else pages.models(address))
        assert raised.value.reason == "type"


async def test_a_page_is_read_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut in the midst of `waiting 42`, it would read 4."""
    text = "waiting 42\n"
    async with serving() as (engine, pages):
        engine.says("/metrics", text)
        monkeypatch.setattr(module, "PAGE_BYTES_MAX", len(text))
        assert await pages.metrics(engine.replica().address, "/metrics") == text.encode()
        monkeypatch.setattr(module, "PAGE_BYTES_MAX", len(text) - 1)
        with pytest.raises(FetchError) as raised:
            await pages.metrics(engine.replica().address, "/metrics")
        assert raised.value.reason == "size"


async def test_a_metrics_page_gets_a_key_only_if_it_is_the_engines_own() -> None:
    async with serving() as (engine, pages):
        engine.says("/metrics", "a 1\n")
        await pages.metrics(engine.replica().address, "/metrics")
        assert engine.keys["/metrics"] is None
        await pages.metrics(engine.replica().address, "/metrics", KEY)
        assert engine.keys["/metrics"] == f"Bearer {KEY}"


async def test_a_list_of_models_is_asked_for_with_the_key() -> None:
    async with serving() as (engine, pages):
        address = engine.replica().address
        engine.says("/v1/models", {"data": []})
        assert json.loads(await pages.models(address)) == {"data": []}
        assert engine.keys["/v1/models"] == f"Bearer {KEY}"
        for status, reason in ((401, "key"), (403, "key"), (404, "status"), (503, "status")):
            engine.says("/v1/models", {}, status)
            with pytest.raises(PageError) as raised:
                await pages.models(address)
            assert raised.value.reason == reason


async def test_how_many_requests_run_at_once_is_taken_from_the_first_page_that_says_it() -> None:
    async with serving() as (engine, pages):
        address = engine.replica().address
        assert await pages.slots(address, "sglang") is None
        engine.says("/get_server_info", {"max_running_requests": 7})
        assert await pages.slots(address, "sglang") == 7
        engine.says("/server_info", {"max_running_requests": 9})
        assert await pages.slots(address, "sglang") == 9
        assert await pages.slots(address, "unknown") is None
        assert await pages.slots(address, "triton") is None  # it says it of each model


async def test_a_server_of_several_models_runs_as_many_at_once_as_the_least_of_them() -> None:
    async with serving() as (engine, pages):
        one = engine.replica(models=["a", "b/c", "silent"], engine="triton")
        assert await pages.slots_by_model(one) is None
        for path, count in (("/v2/models/a/config", 5), ("/v2/models/b%2Fc/config", 3)):
            engine.says(path, {"instance_group": [{"count": count}], "max_batch_size": 1})
        assert await pages.slots_by_model(one) == 3


async def test_an_engine_that_cannot_be_reached_says_nothing() -> None:
    async with serving() as (engine, pages):
        gone = engine.replica(url="http://127.0.0.1:9", engine="triton")
        for asked in (pages.slots(gone.address, "sglang"), pages.slots_by_model(gone), pages.models(gone.address)):
            with pytest.raises(FetchError):
                await asked
