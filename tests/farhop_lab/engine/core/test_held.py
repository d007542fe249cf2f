"""Blocks that wait for another engine, in any order of keeping, fetching, adopting and computing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from farhop_lab.engine.core.held import TransferLink, adopt
from farhop_lab.engine.core.kv import BlockTable, PagedCache
from farhop_lab.engine.core.profiles import PROFILES
from farhop_lab.engine.core.scheduler import EngineCore
from farhop_lab.engine.core.sequence import EngineRequest, Sequence, TextModel

GPU = replace(PROFILES["l4"], kv_blocks=8, max_model_len=128)  # 16 tokens of 4 bytes each to a block
VOICE = TextModel("m", seed=1, answer_tokens_mean=1e6)
BLOCK_BYTES = 64


def _sequence(name: str, prompt: bytes, *, keeps: bool, max_tokens: int = 1) -> Sequence:
    return Sequence(name, EngineRequest(prompt, max_tokens=max_tokens, ignore_eos=True, keeps=keeps), VOICE, GPU)


def _computed(core: EngineCore, sequence: Sequence) -> Sequence:
    core.submit(sequence, 0.0)
    for _ in range(100):
        if sequence.finished:
            break
        core.step(0.0)
    core.end_step()
    assert sequence.finished == "length"
    return sequence


def test_a_prompts_full_blocks_are_held_until_they_are_dropped_once() -> None:
    core = EngineCore(GPU)
    _computed(core, _sequence("a", b"x" * (3 * BLOCK_BYTES + 8), keeps=True))
    assert (core.held.blocks("a"), core.kv.referenced, len(core.held)) == (3, 3, 1)
    assert not core.kv.grow(BlockTable(), 6)  # held blocks are not evicted
    assert core.held.drop("a") == 3
    assert core.held.drop("a") is None
    assert core.held.blocks("a") == 0
    assert (core.kv.referenced, core.kv.cached) == (0, 3)


def test_a_request_without_transfer_leaves_no_blocks_held() -> None:
    core = EngineCore(GPU)
    _computed(core, _sequence("a", b"x" * 130, keeps=False))
    assert (len(core.held), core.kv.referenced) == (0, 0)


def test_a_client_that_leaves_before_the_answer_leaves_no_blocks_held() -> None:
    core = EngineCore(GPU)
    core.submit(_sequence("a", b"x" * 130, keeps=True), 0.0)
    core.step(0.0)  # the last token is due when this step is over
    assert not core.abort("a")
    core.end_step()
    assert (len(core.held), core.kv.referenced) == (0, 0)


def test_engine_with_a_cache_full_of_held_blocks_idles_until_they_are_fetched() -> None:
    core = EngineCore(GPU)
    _computed(core, _sequence("a", b"x" * (7 * BLOCK_BYTES), keeps=True))
    core.submit(_sequence("b", b"y" * (3 * BLOCK_BYTES), keeps=False), 0.0)
    idle = core.step(0.0)
    assert (idle.emissions, idle.prefill_tokens) == ([], 0)
    assert idle.duration_ms >= 1.0  # a driver would spin otherwise
    assert core.waiting == 1
    core.held.drop("a")
    assert [emission.id for emission in core.step(0.0).emissions] == ["b"]


def test_adopted_blocks_are_found_by_the_prompt_they_belong_to() -> None:
    prefill, decode = EngineCore(GPU), EngineCore(GPU)
    prompt = b"x" * (3 * BLOCK_BYTES + 8)
    _computed(prefill, _sequence("a", prompt, keeps=True))
    waiting = _sequence("b", prompt, keeps=False, max_tokens=2)
    assert adopt(decode.kv, waiting.block_names(prefill.held.blocks("a"))) == 3
    _computed(decode, waiting)
    assert waiting.cached_tokens == 48


def test_adopted_blocks_are_bounded_and_the_oldest_are_evicted() -> None:
    cache = PagedCache(4)
    assert adopt(cache, [1, 2]) == 2
    assert adopt(cache, [11, 12, 13]) == 3
    assert cache.match([11, 12, 13]) == 3
    assert cache.match([1, 2]) == 1  # its leaf went
    busy = BlockTable()
    assert cache.grow(busy, 2)
    assert adopt(cache, [21, 22, 23]) == 2
    assert cache.match([21, 22, 23]) == 2
    cache.check()


def test_the_link_takes_the_time_of_its_bytes() -> None:
    assert TransferLink().ms_per_token * 1000 == pytest.approx(5.24, abs=0.01)  # 131 MB over 25 GB/s


WORDS = ("aaaa", "aabb", "abab", "bbbb")


class AnyOrder(RuleBasedStateMachine):
    """Prefills for others and for itself, fetches, adoptions and time-outs on a cache of eight blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.core = EngineCore(GPU)
        self.serial = 0
        self.kept: list[str] = []

    def _prompt(self, word: str) -> bytes:
        return b"".join(letter.encode() * BLOCK_BYTES for letter in word)

    @rule(word=st.sampled_from(WORDS), keeps=st.booleans())
    def ask(self, word: str, keeps: bool) -> None:
        self.serial += 1
        self.core.submit(_sequence(str(self.serial), self._prompt(word), keeps=keeps), 0.0)
        if keeps:
            self.kept.append(str(self.serial))

    @rule()
    def step(self) -> None:
        self.core.step(0.0)

    @rule(at=st.integers(0, 9))
    def leave(self, at: int) -> None:
        if self.kept:
            self.core.abort(self.kept[at % len(self.kept)])

    @rule(at=st.integers(0, 9))
    def fetch_or_expire(self, at: int) -> None:
        if self.kept:
            self.core.held.drop(self.kept[at % len(self.kept)])

    @rule(word=st.sampled_from(WORDS), blocks=st.integers(1, 4))
    def adopt(self, word: str, blocks: int) -> None:
        chain = _sequence("w", self._prompt(word), keeps=False).block_names(blocks)
        adopted = adopt(self.core.kv, chain)
        assert self.core.kv.match(chain) >= adopted
        assert adopted == len(chain) or self.core.kv.available <= adopted  # nothing else was left to evict

    @invariant()
    def nothing_is_lost(self) -> None:
        self.core.kv.check()

    @invariant()
    def a_held_block_has_its_parent(self) -> None:
        for word in WORDS:
            chain = _sequence("w", self._prompt(word), keeps=False).block_names(4)
            depth = self.core.kv.match(chain)
            assert all(self.core.kv.match([name]) == 0 for name in chain[depth:])

    def teardown(self) -> None:
        for name in self.kept:
            self.core.held.drop(name)
        for _ in range(200):
            if not self.core.has_work:
                break
            self.core.step(0.0)
            for name in self.kept:
                self.core.held.drop(name)
        self.core.end_step()
        for name in self.kept:
            self.core.held.drop(name)
        assert not self.core.has_work
        assert (self.core.kv.referenced, len(self.core.held)) == (0, 0)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
