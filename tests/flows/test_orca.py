"""ORCA end to end: an engine reports its load with an answer, and both tiers use it."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from inprocess import HOP_KEY, MODEL, Engine, both, chat, send, topology, until

from farhop_lab.engine import main as engine
from farhop_lab.engine.settings import EngineSettings


async def test_engine_load_is_never_passed_to_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    async with engine.host(EngineSettings(ports=[0], model=MODEL, speedup=5)) as (address,):
        stand = Engine()
        stand.address = address
        async with both(stand, topology(), regional={"watch": {"probe_s": 0.05, "rise": 1}}) as up:
            for port in (up.client, up.entry):
                answer = await send(port, chat(**{"endpoint-load-metrics-format": "TEXT"}))
                assert (answer.status, answer.headers.get("endpoint-load-metrics")) == (200, None)


async def keep_asking(client: aiohttp.ClientSession, address: str, word: str) -> None:
    """Long requests, one after the other, which share nothing with another word's."""
    messages = [{"role": "user", "content": word * 400}]
    while True:
        body = {"model": MODEL, "messages": messages, "max_tokens": 300}
        async with client.post(f"http://{address}/v1/chat/completions", json=body) as response:
            await response.read()


async def waiting(client: aiohttp.ClientSession, address: str) -> float:
    """What the engine says of its own queue."""
    async with client.get(f"http://{address}/metrics") as response:
        lines = (await response.text()).splitlines()
    return float(next(line for line in lines if line.startswith("vllm:num_requests_waiting{")).rpartition(" ")[2])


async def test_load_reported_with_an_answer_goes_up_without_a_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    seldom: dict[str, Any] = {"watch": {"probe_s": 0.05, "scrape_s": 60, "rise": 1, "orca": True}}
    settings = EngineSettings(ports=[0], model=MODEL, speedup=50, kv_blocks=64)  # room for one of the long ones
    async with engine.host(settings) as (address,), aiohttp.ClientSession() as elsewhere:
        stand = Engine()
        stand.address = address
        async with both(stand, topology(), regional=seldom) as up:
            flow = up.regional.flow
            await until(lambda: flow.replicas.view.replicas["one"].sample is not None)
            scraped = flow.replicas.view.replicas["one"].sample
            assert (scraped.waiting, scraped.kv_usage) == (0, 0.0)
            above = up.global_.flow

            def wait_ms() -> float:
                (instance,) = above.regions.view.regions["virginia"].instances
                return float(instance.models[MODEL].wait_ms)

            assert wait_ms() == 0.0
            # Load from other clients, which this balancer does not know: it lasts until the answer is there.
            others = [
                asyncio.create_task(keep_asking(elsewhere, address, word))
                for word in ("one  ", "two  ", "three", "four ", "five ", "six  ")
            ]
            while await waiting(elsewhere, address) < 3:
                await asyncio.sleep(0.01)
            short = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 20}
            answer = await send(up.client, chat(body=short, **{"endpoint-load-metrics-format": "JSON"}))
            assert answer.status == 200
            assert "endpoint-load-metrics" not in answer.headers  # whoever asks, it is for us
            found = flow.replicas.view.replicas["one"].sample
            assert found.at > scraped.at
            assert found.waiting >= 2
            assert found.kv_usage > 0.1
            await until(lambda: wait_ms() > 0.0)  # the next report passes it to the global tier
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)
