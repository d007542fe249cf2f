"""LoRA adapters: what is in memory, what fits a batch, and what a client of vLLM sees of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop_lab.engine.core.adapters import Adapters
from farhop_lab.engine.core.profiles import PROFILES
from farhop_lab.engine.core.scheduler import EngineCore
from farhop_lab.engine.core.sequence import EngineRequest, Sequence, TextModel

Start = Callable[..., Awaitable[Any]]
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello over there"}], "max_tokens": 4, "ignore_eos": True}


def test_the_longest_unused_makes_room_and_never_one_in_use() -> None:
    adapters = Adapters(("a", "b", "c"), most=2, load_ms=5.0)
    assert [adapters.use(name, set()) for name in ("a", "b", "a")] == [5.0, 5.0, 0.0]
    assert adapters.use("c", set()) == 5.0
    assert adapters.loaded == ("a", "c")
    assert adapters.use("b", {"a"}) == 5.0
    assert adapters.loaded == ("a", "b")
    assert (adapters.fits("c", {"a", "b"}), adapters.fits("a", {"a", "b"}), adapters.fits("", {"a", "b"})) == (
        False, True, True,
    )  # fmt: skip
    with pytest.raises(ValueError, match="max_loras"):
        Adapters((), most=0)


def sequence(name: str, adapter: str, tokens: int = 40) -> Sequence:
    wanted = EngineRequest(name.encode().ljust(4 * tokens, b"."), max_tokens=5, ignore_eos=True, adapter=adapter)
    return Sequence(name, wanted, TextModel("m"), PROFILES["l4"])


def test_a_sequence_that_waits_for_its_adapter_lets_others_pass_and_keeps_its_place() -> None:
    core = EngineCore(PROFILES["l4"], adapters=Adapters(("a", "b"), most=1, load_ms=100.0))
    plain = EngineCore(PROFILES["l4"])
    for name, adapter in (("1", "a"), ("2", "b"), ("3", ""), ("4", "b"), ("5", "a")):
        core.submit(sequence(name, adapter), 0.0)
        plain.submit(sequence(name, ""), 0.0)
    step = core.step(0.0)
    assert {emission.id for emission in step.emissions} == {"1", "3", "5"}
    assert step.duration_ms > 100.0  # adapter a was loaded
    assert (core.adapters_of(running=True), core.adapters_of(running=False)) == (["a"], ["b"])
    used: list[str] = []
    while core.has_work:
        core.step(0.0)
        used += core.adapters_of(running=True)
    assert used == sorted(used)  # all of a, then all of b
    assert core.adapters.loads == 2
    assert {emission.id for emission in plain.step(0.0).emissions} == {"1", "2", "3", "4", "5"}


@given(
    st.lists(st.tuples(st.sampled_from(["", "a", "b", "c"]), st.integers(1, 400)), min_size=1, max_size=12),
    st.integers(1, 3),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_all_are_served_and_no_batch_uses_more_than_fit(asked: list[tuple[str, int]], most: int) -> None:
    tight = replace(PROFILES["l4"], kv_blocks=60, sequences_max=4, max_model_len=900)
    core = EngineCore(tight, adapters=Adapters("abc", most=most, load_ms=1.0))
    for at, (adapter, tokens) in enumerate(asked):
        core.submit(sequence(f"q{at}", adapter, tokens), 0.0)
    served = set()
    for _ in range(2000):
        if not core.has_work:
            break
        step = core.step(0.0)
        served |= {emission.id for emission in step.emissions if emission.finished}
        assert len(core.adapters_of(running=True)) <= most
        assert set(core.adapters_of(running=True)) <= set(core.adapters.loaded)
        core.kv.check()
    assert len(served) == len(asked)


async def test_adapters_are_models_of_their_own_with_caches_of_their_own(replica: Start) -> None:
    client = await replica(adapters=["sql"], max_loras=2)
    async with client.session.get(client.url + "/v1/models") as response:
        listed = {model["id"]: model["parent"] for model in (await response.json())["data"]}
    assert listed == {"llama-3.1-8b": None, "sql": "llama-3.1-8b"}
    long = {**HELLO, "messages": [{"role": "user", "content": "over there " * 40}]}
    for model in ("llama-3.1-8b", "sql"):
        found = [await client.ask(CHAT, **long, model=model) for _ in range(2)]
        assert [one["model"] for one in found] == [model, model]
        cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in found]
        assert cached[0] == 0
        assert cached[1] > 50
    async with client.session.get(client.url + "/metrics") as response:
        assert 'vllm:lora_requests_info{max_lora="2",running_lora_adapters="",' in await response.text()


async def test_adapters_come_and_go_at_run_time(replica: Start) -> None:
    client = await replica()

    async def status(path: str, **fields: Any) -> int:
        async with client.post(path, **fields) as response:
            return int(response.status)

    assert await status(CHAT, **HELLO, model="sql") == 404
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    assert await status(load, lora_name="sql", lora_path="/adapters/sql") == 200
    assert await status(load, lora_name="sql") == 400
    assert await status(load, lora_name="llama-3.1-8b") == 400
    assert await status(load) == 400
    assert await status(CHAT, **HELLO, model="sql") == 200
    assert await status(unload, lora_name="sql") == 200
    assert await status(unload, lora_name="sql") == 404
    assert await status(CHAT, **HELLO, model="sql") == 404
