from __future__ import annotations

import time
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from farhop_lab.workloads.prose import _POOL_BYTES, _WORDS, HEAD_BYTES, TOKEN_BYTES, _pool_twice, common, prose

NAMES = st.text(max_size=30)


@given(NAMES, st.integers(1, 3000))
def test_a_text_has_its_length_and_is_always_the_same(name: str, tokens: int) -> None:
    text = prose(name, tokens)
    assert len(text) == tokens * TOKEN_BYTES
    assert text == prose(name, tokens)
    assert not text.endswith(b" ")
    assert text.isascii()


@given(NAMES, NAMES)
def test_two_names_differ_before_the_smallest_block_ends(a: str, b: str) -> None:
    if a != b:
        assert common(prose(a, 100), prose(b, 100)) < HEAD_BYTES < 64


@given(NAMES, st.integers(1, 500), st.integers(1, 500))
def test_a_longer_text_begins_with_a_shorter_one(name: str, a: int, b: int) -> None:
    short, long = sorted((prose(name, a), prose(name, b)), key=len)
    assert long.startswith(short[:-1])


def test_the_pool_is_what_one_choice_after_the_other_gives() -> None:
    rng = Random(0)
    chosen = " ".join(rng.choice(_WORDS) for _ in range(2_000)).encode()
    assert _pool_twice()[: len(chosen)] == chosen
    assert _pool_twice()[:_POOL_BYTES] == _pool_twice()[_POOL_BYTES:]
    assert len(_pool_twice()) == 2 * _POOL_BYTES


def test_a_text_of_no_tokens_is_empty_and_a_very_long_one_is_complete() -> None:
    assert prose("x", 0) == prose("x", -3) == b""
    long = prose("x", 700_000)
    assert len(long) == 2_800_000
    assert long[HEAD_BYTES : HEAD_BYTES + 1000] in long[HEAD_BYTES + 1_000_000 :]  # the pool goes round


def test_a_long_text_is_made_by_copying_not_word_by_word() -> None:
    began = time.process_time()
    for number in range(50):
        prose(f"long {number}", 100_000)
    assert time.process_time() - began < 2.0  # 0.02 s here; making it up word by word would take 10


@given(st.binary(max_size=50), st.binary(max_size=20), st.binary(max_size=20))
def test_common_prefix_of_two_texts_has_the_right_length(start: bytes, a: bytes, b: bytes) -> None:
    shared = common(start + a, start + b)
    assert (start + a)[:shared] == (start + b)[:shared]
    assert (start + a)[shared : shared + 1] != (start + b)[shared : shared + 1] or not (start + a)[shared:]
