"""A silent replica: its requests are checked by a timer, not only when other events happen."""

from __future__ import annotations

import asyncio
import os
from random import Random

import pytest
from inprocess import HOP_KEY, MODEL, Engine, chat, regional_config, send, streaming, topology, until

from farhop_lab.memory_store import MemoryStore
from regional_lb.app.main import RegionalBalancer


async def test_a_request_that_a_silent_engine_has_not_begun_moves_without_any_probe_or_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(os.environ, "FARHOP_TEST_HOP", HOP_KEY)
    async with Engine().running() as one, Engine().running() as other:
        replicas = [
            {"url": f"http://{engine.address}", "models": [MODEL], "name": name}
            for name, engine in (("one", one), ("other", other))
        ]
        quiet = {"probe_s": 600.0, "scrape_s": 600.0, "rise": 1}
        below = RegionalBalancer(
            regional_config(one, replicas=replicas, watch=quiet), topology(), Random(1), MemoryStore(Random(2))
        )
        line = await below.open()
        port = int(line.partition("clients on 127.0.0.1:")[2].split(",")[0])
        try:
            await until(lambda: all(r["state"] == "up" for r in below.tier_admin.status()["replicas"]))
            one.behaviour = "wait"
            async with asyncio.timeout(60.0):
                while not one.seen:
                    answer = await send(port, chat(body=streaming()), within_s=60.0)
                    assert b"[DONE]" in answer.body
            assert len(other.seen) >= 1
        finally:
            one.release.set()
            await below.close()
