"""Playbooks of the scheduler: each step's cost and what comes out of it, on a GPU small enough to reckon by hand."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop_lab.engine.core.profiles import Profile
from farhop_lab.engine.core.scheduler import EngineCore, EngineFullError, Step
from farhop_lab.engine.core.sequence import EngineRequest, Sequence, TextModel
from farhop_lab.engine.core.text import write_all

# A prompt token costs 1 ms, a pass at least 10 ms, each decode 0.1 ms more: a step's time shows its contents.
GPU = Profile(
    "hand",
    prefill_ms_per_token=1,
    decode_floor_ms=10,
    decode_ms_per_sequence=0.1,
    kv_blocks=64,
    max_model_len=1_024,
    prefill_tokens_per_step=100,
    sequences_max=4,
    step_overhead_ms=0,
)
VOICE = TextModel("m", seed=1, answer_tokens_mean=1e6)


class Playbook:
    """A core on a clock of its own."""

    def __init__(self, gpu: Profile = GPU, text_model: TextModel = VOICE) -> None:
        self.core = EngineCore(gpu)
        self.gpu, self.text_model = gpu, text_model
        self.now = 0.0
        self.texts: dict[str, str] = {}

    def submit(self, name: str, tokens: int, max_tokens: int = 50, *, text: bytes | None = None) -> Sequence:
        prompt = text if text is not None else name.encode().ljust(4 * tokens, b".")
        sequence = Sequence(
            name, EngineRequest(prompt, max_tokens=max_tokens, ignore_eos=True), self.text_model, self.gpu
        )
        self.core.submit(sequence, self.now)
        return sequence

    def step(self) -> Step:
        step = self.core.step(self.now)
        self.now += step.duration_ms / 1000
        for emission in step.emissions:
            self.texts[emission.id] = self.texts.get(emission.id, "") + emission.text
        self.core.kv.check()
        return step

    def run(self) -> None:
        for _ in range(10_000):
            if not self.core.has_work:
                self.core.end_step()
                return
            self.step()
        raise AssertionError("the core never came to rest")


def _who(step: Step) -> list[str]:
    return [emission.id for emission in step.emissions]


def test_an_idle_step_is_nothing() -> None:
    assert EngineCore(GPU).step(0) == Step(0.0, [], 0, 0)


def test_one_alone_prefill_then_decode_then_rest() -> None:
    book = Playbook()
    book.submit("a", 30, max_tokens=2)
    assert (book.core.waiting, book.core.running) == (1, 0)
    first = book.step()
    assert (first.duration_ms, first.prefill_tokens, first.decode_sequences, _who(first)) == (30, 30, 0, ["a"])
    last = book.step()
    assert (last.duration_ms, last.prefill_tokens, last.decode_sequences) == (10.1, 0, 1)
    assert last.emissions[0].finished == "length"
    assert book.core.running == 1  # until its time has passed
    book.core.end_step()
    assert (book.core.running, book.core.kv.referenced, book.core.has_work) == (0, 0, False)
    assert book.core.counters.finished["length"] == 1


def test_a_long_prompt_is_chunked_and_decodes_ride_along() -> None:
    book = Playbook()
    book.submit("a", 20)
    book.step()
    book.submit("b", 250)
    seen = [book.step() for _ in range(3)]
    assert [step.prefill_tokens for step in seen] == [99, 99, 52]  # one token of the budget is a's decode
    assert [step.decode_sequences for step in seen] == [1, 1, 1]
    assert [_who(step) for step in seen] == [["a"], ["a"], ["a", "b"]]
    assert seen[0].duration_ms == pytest.approx(99.1)  # a waits for b's chunk


def test_requests_that_arrive_together_share_a_step_up_to_the_batch_size() -> None:
    book = Playbook()
    for name in "abcdef":
        book.submit(name, 5, max_tokens=2)
    assert _who(book.step()) == list("abcd")
    assert (book.core.running, book.core.waiting) == (4, 2)
    assert _who(book.step()) == list("abcd")
    assert _who(book.step()) == list("ef")


def test_a_prefix_is_reused_but_the_last_token_never() -> None:
    book = Playbook()
    text = b"x" * 64 * 4
    book.submit("a", 0, max_tokens=1, text=text)
    book.run()
    again = book.submit("b", 0, max_tokens=1, text=text)
    assert book.step().prefill_tokens == 16  # 64 tokens; the last of its four blocks is computed again
    assert again.cached_tokens == 48
    longer = book.submit("c", 0, max_tokens=1, text=text + b"y" * 8)
    assert book.step().prefill_tokens == 2
    assert longer.cached_tokens == 64
    assert (book.core.counters.prefix_queries, book.core.counters.prefix_hits) == (64 + 64 + 66, 48 + 64)


def test_an_answer_becomes_prefix_of_the_next_turn() -> None:
    book = Playbook()
    book.submit("a", 16, max_tokens=33)
    book.run()
    turn = book.submit("b", 0, max_tokens=1, text=b"a".ljust(64, b".") + book.texts["a"].encode() + b"and then?")
    book.run()
    assert turn.cached_tokens == 48  # 16 of the prompt and 32 of the answer; its last token was never computed


def test_two_with_one_prefix_in_one_pass_compute_it_once() -> None:
    book = Playbook()
    text = b"s" * 64 * 3
    book.submit("a", 0, text=text + b"aaaa")
    book.submit("b", 0, text=text + b"bbbb")
    assert book.step().prefill_tokens == 49 + 1


@pytest.mark.parametrize("kv_blocks", [6, 7])  # at 7 the youngest itself lacks a block
def test_kv_running_out_preempts_the_last_in_which_comes_back_whole(kv_blocks: int) -> None:
    book = Playbook(replace(GPU, kv_blocks=kv_blocks, max_model_len=96))
    _, victim = [book.submit(name, 32, max_tokens=60) for name in "ab"]
    while not book.core.counters.preemptions:
        step = book.step()
    assert _who(step) == ["a"]
    assert (book.core.running, book.core.waiting) == (1, 1)
    assert (victim.computed_tokens, victim.table.blocks) == (0, 0)
    book.run()
    assert book.core.kv.available == kv_blocks
    for name in "ab":
        prompt = name.encode().ljust(128, b".")
        assert book.texts[name] == write_all(prompt, 1, 1e6, 60).decode()
    assert book.core.counters.prompt_tokens == 64  # counted once, though b was computed twice
    assert book.core.counters.generation_tokens == 120


def test_the_head_of_the_queue_waits_for_blocks_and_none_overtakes() -> None:
    book = Playbook(replace(GPU, kv_blocks=8, max_model_len=128))
    book.submit("big", 90, max_tokens=3)
    book.step()
    book.submit("next", 60, max_tokens=1)
    book.submit("small", 4, max_tokens=1)
    assert _who(book.step()) == ["big"]
    assert book.core.waiting == 2
    book.run()
    assert set(book.texts) == {"big", "next", "small"}


def test_a_sequence_is_admitted_only_if_its_whole_prompt_fits() -> None:
    book = Playbook(replace(GPU, kv_blocks=16, max_model_len=256))
    book.submit("a", 100, max_tokens=12)
    book.step()
    book.submit("b", 150, max_tokens=1)  # 9 of its 10 blocks are free, and 7 would be enough for one step
    for _ in range(11):
        assert _who(book.step()) == ["a"]
        assert book.core.waiting == 1
    book.run()
    assert set(book.texts) == {"a", "b"}
    assert book.core.counters.preemptions == 0


def test_old_prefixes_are_evicted_for_new_work() -> None:
    book = Playbook(replace(GPU, kv_blocks=8, max_model_len=128))
    for name in "abc":
        book.submit(name, 64, max_tokens=1)
        book.run()
    assert book.core.kv.evictions > 0
    gone = book.submit("a", 64, max_tokens=1)
    book.run()
    assert gone.cached_tokens == 0


def test_cached_blocks_of_waiting_sequences_age() -> None:
    book = Playbook(replace(GPU, kv_blocks=10, max_model_len=160))
    for name in "pq":  # two full blocks of each stay cached, p's are the older ones
        book.submit(name, 33, max_tokens=1)
        book.run()
    book.submit("r", 80, max_tokens=40)
    book.step()
    waits = book.submit("p goes on", 0, max_tokens=1, text=b"p".ljust(4 * 32, b".") + b"x" * 4 * 98)
    while book.core.waiting:
        book.step()
    assert waits.cached_tokens == 0


def test_abort_frees_a_sequence_at_once_in_any_state() -> None:
    book = Playbook()
    for name in "abcde":
        book.submit(name, 40)
    book.step()
    assert book.core.abort("a")  # decoding
    assert book.core.abort("e")  # waiting
    assert book.core.abort("c")  # half computed
    assert not book.core.abort("a")
    assert not book.core.abort("nobody")
    assert book.core.counters.finished["abort"] == 3
    book.run()
    assert sorted(book.texts) == ["a", "b", "d"]
    assert len(book.texts["a"]) == 4
    assert (book.core.kv.referenced, book.core.running, book.core.waiting) == (0, 0, 0)


def test_the_engine_queue_is_bounded_and_a_request_id_in_use_is_refused() -> None:
    core = EngineCore(GPU, waiting_max=1)
    core.submit(Sequence("a", EngineRequest(b"x"), VOICE, GPU), 0)
    assert core.full
    with pytest.raises(EngineFullError):
        core.submit(Sequence("b", EngineRequest(b"x"), VOICE, GPU), 0)
    core.step(0)
    with pytest.raises(ValueError, match="in use"):
        core.submit(Sequence("a", EngineRequest(b"x"), VOICE, GPU), 0)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    requests=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 36), st.integers(0, 2)), min_size=1, max_size=12),
    aborts=st.lists(st.integers(0, 11), max_size=4),
    arrivals=st.integers(1, 4),
)
def test_any_load_ends_with_every_answer_right_and_no_block_lost(
    requests: list[tuple[int, int, int]], aborts: list[int], arrivals: int
) -> None:
    book = Playbook(replace(GPU, kv_blocks=7, max_model_len=112, prefill_tokens_per_step=24), TextModel("m", 5, 30))
    prompts: dict[str, tuple[bytes, int]] = {}
    for at, (tokens, max_tokens, family) in enumerate(requests):
        prompts[str(at)] = (b"%d" % family * 4 * tokens, max_tokens)
        book.submit(str(at), 0, max_tokens, text=prompts[str(at)][0])
        for _ in range(at % arrivals):
            step = book.step()
            assert step.prefill_tokens + step.decode_sequences <= 24
        if at in aborts:
            book.core.abort(str(at // 2))
            prompts.pop(str(at // 2), None)
    book.run()
    for name, (prompt, max_tokens) in prompts.items():
        assert book.texts[name] == write_all(prompt, 5, 1e9, max_tokens).decode()[: 4 * max_tokens]
    assert book.core.kv.available == 7
