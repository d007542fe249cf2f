"""One request's text: where it stops, what it holds back, and what its blocks are called."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs
from xxhash import xxh3_64_intdigest

from farhop_lab.engine.core.profiles import PROFILES
from farhop_lab.engine.core.sequence import EngineRequest, Sequence, TextModel
from farhop_lab.engine.core.text import write_all

GPU = PROFILES["l4"]
ROOMY = PROFILES["h100"]
VOICE = TextModel("m", seed=3, answer_tokens_mean=40)
PROMPT = b"tell me of the sea\n"
ANSWER = write_all(PROMPT, VOICE.seed, VOICE.answer_tokens_mean, 10_000).decode()


def _generate(wanted: EngineRequest) -> tuple[list[str], Sequence]:
    sequence = Sequence("s", wanted, VOICE, GPU)
    shown: list[str] = []
    while sequence.finished is None:
        shown.append(sequence.write_token())
    return shown, sequence


def test_sequence_ends_with_a_token_without_text() -> None:
    shown, sequence = _generate(EngineRequest(PROMPT))
    assert "".join(shown) == ANSWER
    assert (shown[-1], sequence.finished, sequence.output_tokens) == ("", "stop", len(ANSWER) // 4 + 1)
    assert sequence.total_tokens == sequence.prompt_tokens + sequence.output_tokens


def test_a_script_is_the_answer_by_the_models_seed_and_each_token_counts() -> None:
    """Also where a character is cut by tokens, whatever the model's own shape says of the end."""
    text = '{"a": "ü🌊"}'
    wanted = EngineRequest(PROMPT, script=lambda seed: f"{seed}{text}".encode(), ignore_eos=True)
    shown, sequence = _generate(wanted)
    assert "".join(shown) == f"3{text}"
    assert sequence.finished == "stop"
    assert sequence.output_tokens == -(-len(f"3{text}".encode()) // 4) + 1
    assert Sequence("s", wanted, VOICE, GPU).foresee(8) == 0
    assert "".join(_generate(structs.replace(wanted, max_tokens=2))[0]) == f"3{text}"[:8]


def test_max_tokens_cuts() -> None:
    shown, sequence = _generate(EngineRequest(PROMPT, max_tokens=3))
    assert ("".join(shown), sequence.finished) == (ANSWER[:12], "length")


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    leaps=st.lists(st.integers(0, 40), max_size=12),
    max_tokens=st.integers(1, 150),
    min_tokens=st.integers(0, 150),
    ignore_eos=st.booleans(),
)
def test_tokens_written_ahead_equal_those_written_step_by_step(
    leaps: list[int], max_tokens: int, min_tokens: int, ignore_eos: bool
) -> None:
    wanted = EngineRequest(PROMPT, max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), ignore_eos=ignore_eos)
    _, singly = _generate(wanted)
    leaping = Sequence("s", wanted, VOICE, GPU)
    for most in leaps:
        steps = leaping.foresee(most)
        assert 0 <= steps <= most
        leaping.advance(steps)
        assert leaping.finished is None
        assert leaping.total_tokens == leaping.prompt_tokens + leaping.output_tokens < singly.total_tokens
        if leaping.output_tokens + 1 < singly.output_tokens and most:
            assert steps  # only its end delays it
    while leaping.finished is None:
        leaping.write_token()
    same = ("text", "output_tokens", "total_tokens", "finished")
    assert [getattr(leaping, name) for name in same] == [getattr(singly, name) for name in same]


def test_a_stop_string_is_not_foreseen() -> None:
    assert Sequence("s", EngineRequest(PROMPT, stop=(ANSWER[4:8],)), VOICE, GPU).foresee(10) == 0


def test_min_tokens_and_ignore_eos_go_past_the_natural_end() -> None:
    natural = len(ANSWER) // 4
    _, at_least = _generate(EngineRequest(PROMPT, min_tokens=natural + 5))
    assert at_least.output_tokens > natural + 5
    shown, forever = _generate(EngineRequest(PROMPT, ignore_eos=True, max_tokens=natural + 50))
    assert (forever.finished, len("".join(shown))) == ("length", 4 * (natural + 50))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    stops=st.lists(
        st.integers(0, 60).flatmap(lambda at: st.integers(1, 9).map(lambda n: ANSWER[at : at + n])), max_size=3
    )
)
@example(stops=["n", " "])  # one token completes both: the space that stands before the n is shown
def test_the_first_token_that_completes_a_stop_ends_the_text_before_it(stops: list[str]) -> None:
    stops = [stop for stop in stops if stop]
    shown, sequence = _generate(EngineRequest(PROMPT, stop=tuple(stops)))
    assert ("".join(shown), sequence.stop_reason) == _stopped(stops)


def _stopped(stops: list[str]) -> tuple[str, str | None]:
    """As vLLM's check_stop_strings has it: after each token, the first of the list that stands in what is there, at its
    earliest, if this token completed it."""
    pieces, _ = _generate(EngineRequest(PROMPT))
    text = ""
    for piece in pieces:
        before, text = len(text), text + piece
        for stop in stops:
            if (at := text.find(stop, max(0, before + 1 - len(stop)))) >= 0:
                return text[:at], stop
    return text, None


def test_text_held_back_for_a_stop_string_is_shown_at_the_end() -> None:
    never = ("#########",)
    shown, _ = _generate(EngineRequest(PROMPT, stop=never))
    assert "".join(shown) == ANSWER
    assert shown[0] == ""  # held back: eight characters at a time
    shown, cut = _generate(EngineRequest(PROMPT, stop=never, max_tokens=3))
    assert ("".join(shown), cut.finished, cut.stop_reason) == (ANSWER[:12], "length", None)


def test_a_stop_before_min_tokens_is_passed_over() -> None:
    shown, _ = _generate(EngineRequest(PROMPT, stop=(ANSWER[4:8],), min_tokens=5))
    assert ANSWER[4:8] in "".join(shown)


def test_names_of_blocks_cover_all_text_before_model_and_salt() -> None:
    def names(text: bytes, text_model: TextModel = VOICE, salt: str = "") -> list[int]:
        return Sequence("s", EngineRequest(text, cache_salt=salt), text_model, GPU).block_names(99)

    text = bytes(range(256))
    assert len(names(text)) == 4
    assert len(names(text + b"x" * 63)) == 4
    assert names(text + b"more" * 20)[:4] == names(text)
    assert names(b"!" + text[1:])[1:4] != names(text)[1:]
    for other in (names(text, TextModel("other")), names(text, salt="tenant")):
        assert not set(other) & set(names(text))


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (EngineRequest(b""), "prompt"),
        (EngineRequest(b"x" * 4 * 16_384), "maximum context length is 16384 tokens"),
        (EngineRequest(b"xxxx", max_tokens=16_384), "you requested 16385 tokens"),
        (EngineRequest(b"x", max_tokens=0), "max_tokens"),
        (EngineRequest(b"x", max_tokens=4, min_tokens=5), "min_tokens"),
    ],
)
def test_invalid_parameters_are_refused_with_a_text(wanted: EngineRequest, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Sequence("s", wanted, VOICE, GPU)


def test_the_context_is_bounded_by_the_cache() -> None:
    with pytest.raises(ValueError, match="maximum context length is 64 tokens"):
        Sequence("s", EngineRequest(b"x" * 240, max_tokens=5), VOICE, replace(GPU, kv_blocks=4))


def test_a_pass_over_the_prompt_generates_nothing_and_may_fill_the_context() -> None:
    shown, sequence = _generate(EngineRequest(PROMPT, generates=False))
    assert (shown, sequence.finished, sequence.output_tokens) == ([""], "stop", 0)
    whole = EngineRequest(b"x" * 4 * GPU.context_tokens, generates=False)
    assert _generate(whole)[1].total_tokens == GPU.context_tokens
    with pytest.raises(ValueError, match="maximum context"):
        _generate(EngineRequest(b"x" * 4 * (GPU.context_tokens + 1), generates=False))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 20_000), st.integers(0, 20_000), st.integers(0, 300))
def test_names_that_are_known_from_an_earlier_prompt_are_what_they_would_be(shared: int, own: int, since: int) -> None:
    """Whatever of a long prompt came before, in which portions ever it is asked for."""
    prompt = b"a" * shared + b"b" * (own + 1)
    sequences = [Sequence("s", EngineRequest(prompt, 1), VOICE, replace(ROOMY, block_tokens=size)) for size in (16, 32)]
    for sequence in sequences:
        size = sequence.block_bytes
        blocks = len(prompt) // size
        sequence.block_names(min(since, blocks))
        name, names = sequence.chain[0], []
        for start in range(0, blocks * size, size):
            name = xxh3_64_intdigest(prompt[start : start + size], name)
            names.append(name)
        assert sequence.block_names(blocks) == names
