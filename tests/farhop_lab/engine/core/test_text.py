"""A text is a function of all text before it: cut anywhere and continued, it comes out the same."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop_lab.engine.core import text as text_module
from farhop_lab.engine.core.text import (
    TOKEN_BYTES,
    VOCABULARY,
    WIDE_VOCABULARY,
    TextWriter,
    bytes_of,
    id_of,
    ids_of,
    text_of,
    token_count,
    write_all,
)


def test_every_piece_is_a_token_that_needs_no_escaping() -> None:
    assert len(set(VOCABULARY)) == 128
    for piece in VOCABULARY:
        assert len(piece) == TOKEN_BYTES
        assert piece.decode("ascii")[0] == " "
        assert piece.decode("ascii")[1:].isalpha()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    prompt=st.text(alphabet=" abctheso\n<é", max_size=40), seed=st.integers(0, 3), wide=st.booleans(), data=st.data()
)
def test_an_answer_cut_at_any_byte_is_continued_to_the_same_end(
    prompt: str, seed: int, wide: bool, data: st.DataObject
) -> None:
    begun = prompt.encode()
    whole = write_all(begun, seed, 20, 1000, wide=wide)
    cut = data.draw(st.integers(0, len(whole)))
    assert whole[:cut] + write_all(begun + whole[:cut], seed, 20, 1001, wide=wide) == whole


def test_wide_words_are_whole_tokens_of_which_some_end_within_a_character() -> None:
    assert len(set(WIDE_VOCABULARY)) == len(VOCABULARY)
    cut = 0
    for word in WIDE_VOCABULARY:
        assert (len(word) % TOKEN_BYTES, word[:1], word.count(b" ")) == (0, b" ", 1)
        cut += any((byte & 0xC0) == 0x80 for byte in word[TOKEN_BYTES::TOKEN_BYTES])
    assert cut > 20
    assert sum(word.isascii() for word in WIDE_VOCABULARY) > 20


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(max_size=40))
def test_a_texts_ids_are_of_31_bits_and_say_the_text(text: str) -> None:
    encoded = text.replace("\0", "").encode()
    ids = ids_of(encoded)
    assert all(0 <= one < 2**31 for one in ids)
    assert text_of(b"".join(map(bytes_of, ids))) == encoded


@given(st.integers(0, 2**32 - 1))
def test_any_token_id_maps_to_bytes(number: int) -> None:
    """Also one that no text has: what a client sends as ids is anything. Those that a text may have are that one's."""
    assert len(bytes_of(number)) == TOKEN_BYTES
    assert number >= len(text_module.PAIRS) ** 2 or id_of(bytes_of(number)) == number


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    prompt=st.text(alphabet=" abctheso\n<é", max_size=40),
    counts=st.lists(st.integers(0, 30), min_size=1, max_size=8),
    ends_from=st.integers(0, 60),
)
def test_pieces_written_together_equal_pieces_written_one_by_one(
    prompt: str, counts: list[int], ends_from: int
) -> None:
    together, singly = (TextWriter(prompt.encode(), 1, 20.0) for _ in range(2))
    written = 0
    for count in counts:
        pieces = together.write_on(count, max(0, ends_from - written))
        assert pieces == [singly.write(may_end=written + n >= ends_from) for n in range(len(pieces))]
        written += len(pieces)
        if b"" in pieces:
            assert pieces.index(b"") == len(pieces) - 1
            return
        assert len(pieces) == count


def test_seed_and_text_both_matter() -> None:
    answers = {write_all(text, seed, 1e5, 20) for text in (b"one", b"two") for seed in (0, 1)}
    assert len(answers) == 4


def test_answers_are_as_long_as_asked_in_the_mean() -> None:
    lengths = [token_count(write_all(b"%d\n" % n, 7, 50, 10_000)) + 1 for n in range(1_500)]
    assert sum(lengths) / len(lengths) == pytest.approx(50, rel=0.08)


def test_an_answer_does_not_end_while_the_end_is_forbidden() -> None:
    writer = TextWriter(b"prompt", 0, 1)  # a mean of one token: the end is always next
    assert writer.write(may_end=False) in VOCABULARY
    assert writer.write(may_end=True) == b""


def test_a_started_token_counts() -> None:
    assert [token_count(b"x" * n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_a_mean_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="answer_tokens_mean"):
        TextWriter(b"", 0, 0.5)
