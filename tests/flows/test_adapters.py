"""LoRA adapters live: engines, their KV events and metrics, a balancer and its clients, all over real sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from inprocess import MODEL, Answer, until
from kv_world import World, words, world

ADAPTERS = ["sql", "de", "fr"]


def _lora(here: World, name: str) -> Any:
    sample = here.flow.replicas.view.replicas[name].sample
    return sample.lora if sample is not None else None


def _served(answer: Answer) -> str:
    return answer.headers["x-farhop-replica"]


def _at(folder: Path, replicas: int, **more: Any) -> Any:
    """Engines at which one adapter fits a batch, and loading one takes as long as 1,000 tokens of prefill."""
    listing = {"adapters": ADAPTERS, **more.pop("listing", {})}
    settings = {"adapters": ADAPTERS, "max_loras": 1, "lora_load_ms": 300.0, "speedup": 20.0, **more}
    return world(folder, replicas=replicas, listing=listing, **settings)


async def test_requests_stay_where_their_adapter_is(tmp_path: Path) -> None:
    async with _at(tmp_path, 3) as here:
        # At once, so that each request finds the others' replicas busy.
        first = await asyncio.gather(*(here.ask(words(n, 300), model=name) for n, name in enumerate(ADAPTERS)))
        home = dict(zip(ADAPTERS, map(_served, first), strict=True))
        assert sorted(home.values()) == ["e0", "e1", "e2"]
        for n in range(8):
            for name in ADAPTERS:  # no prompt is like another: only the adapter draws a request to a replica
                assert _served(await here.ask(words(10 * n + len(name), 40) + name, model=name)) == home[name]
        loaded = {one["replica"]: one["adapters_loaded"] for one in here.status()}
        assert loaded == {home[name]: [name] for name in ADAPTERS}


async def test_a_crowd_spreads_once_waiting_takes_longer_than_loading_the_adapter(tmp_path: Path) -> None:
    async with _at(tmp_path, 2, listing={"slots": 2}) as here:
        home = _served(await here.ask("hello", model="sql"))
        crowd = await asyncio.gather(*(here.ask(words(n, 100), model="sql", max_tokens=40) for n in range(4)))
        assert sorted({_served(answer) for answer in crowd}) == ["e0", "e1"]
        assert sum(_served(answer) == home for answer in crowd) >= 2


async def test_adapters_reported_by_engines_are_used_for_routing(tmp_path: Path) -> None:
    async with _at(tmp_path, 1) as here:
        await until(lambda: _lora(here, "e0") is not None)
        assert (_lora(here, "e0").max, _lora(here, "e0").running) == (1, frozenset())
        asking = asyncio.create_task(here.ask("hello", model="de", max_tokens=600, ignore_eos=True))
        await until(lambda: _lora(here, "e0").running == {"de"})
        waiting = asyncio.create_task(here.ask("hello", model="fr"))
        await until(lambda: _lora(here, "e0").waiting == {"fr"})
        await asyncio.gather(asking, waiting)


async def test_a_prompt_cached_under_one_adapter_is_news_to_another(tmp_path: Path) -> None:
    async with _at(tmp_path, 1) as here:
        text = words(5, 400)
        for model, known in (("sql", 0), ("de", 0), (MODEL, 0), ("sql", 400), ("de", 400), (MODEL, 400)):
            before = list(here.hits()["exact"])
            answer = await here.ask(text, model=model)
            predicted, actual, off = (now - was for now, was in zip(here.hits()["exact"], before, strict=True))
            cached = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert (predicted, actual, off) == (cached, cached, 0.0)  # its own word, to the token
            assert (cached >= known) if known else (cached == 0)
        assert here.status()[0]["kv_events"] == "exact"
        assert here.hits()["trie"] == [0.0, 0.0, 0.0]


async def test_the_mirror_keeps_adapters_apart_without_events_and_tokenizer(tmp_path: Path) -> None:
    """Without events and without a tokenizer."""
    async with _at(tmp_path, 1, tokenizer=False, events=False) as here:
        text = words(6, 400)
        for model in ("sql", "de", MODEL):
            before = list(here.hits()["trie"])
            await here.ask(text, model=model)
            assert here.hits()["trie"][0] == before[0]
        before = here.hits()["trie"][0]
        await here.ask(text, model="sql")
        assert here.hits()["trie"][0] > before


async def test_an_adapter_that_is_not_served_is_refused(tmp_path: Path) -> None:
    async with _at(tmp_path, 1) as here:
        with pytest.raises(AssertionError, match="model"):
            await here.ask("hello", model="pirate")
