"""Ids piece by piece are those of the whole text, for every kind of tokenizer that models have."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from farhop.service.tokenization import pieces
from farhop.service.tokenization.pieces import Pieces

MARKS = ("<|im_start|>", "<|im_end|>", "<|", "<|im_end|>\n", "<mask>", "word", "\n\n", "<s>", "<low>")
# Text as close to the marks as possible: pieces of them, whitespace on both sides, words that continue.
TEXTS = st.lists(
    st.sampled_from([*MARKS, " ", "\n", "a", "words", "<|im_", "start|>", "é", "▁", "  ", "A", "user\n", "<LOW>", "_"])
    | st.text(max_size=4),
    max_size=12,
).map("".join)
STRIP = {"type": "Strip", "strip_left": True, "strip_right": True}
NORMALIZERS = (
    None,
    {"type": "Prepend", "prepend": "▁"},
    {"type": "Lowercase"},
    {"type": "NFKC"},
    STRIP,
)
PRE_TOKENIZERS = (
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": False},
)


def made(flags: dict[str, dict[str, bool]], normalizer: Any, pre_tokenizer: Any) -> tokenizers.Tokenizer:
    """Bytes and some merges; the marks are added tokens with these flags."""
    spelled = sorted({*tokenizers.pre_tokenizers.ByteLevel.alphabet(), "▁", "é", "\n", " "})
    vocabulary = {char: n for n, char in enumerate(spelled)}
    merges = [["w", "o"], ["wo", "r"], ["wor", "d"], ["▁", "w"], ["u", "s"], ["e", "r"], ["us", "er"], ["Ġ", "a"]]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    off = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": 1000 + n, "content": one, **off, **flags.get(one, {})} for n, one in enumerate(MARKS)]
    bpe = {"type": "BPE", "vocab": vocabulary, "merges": merges, "unk_token": None, "byte_fallback": False}
    document = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer, "post_processor": None, "decoder": None, "model": bpe,
    }  # fmt: skip
    return tokenizers.Tokenizer.from_str(msgspec.json.encode(document).decode())


def reader(tokenizer: tokenizers.Tokenizer, read: list[str] | None = None) -> Pieces:
    def encoded(texts: list[str]) -> list[bytes]:
        if read is not None:
            read.extend(texts)
        return [array("I", one.ids).tobytes() for one in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    return Pieces(tokenizer, encoded)


def whole(tokenizer: tokenizers.Tokenizer, text: str) -> bytes:
    return array("I", tokenizer.encode(text, add_special_tokens=False).ids).tobytes()


FLAGS = st.dictionaries(
    st.sampled_from(MARKS),
    st.dictionaries(
        st.sampled_from(["lstrip", "rstrip", "single_word", "normalized"]), st.just(value=True), max_size=2
    ),
    max_size=3,
)
# If a normalizer leaves nothing of a token to look for, the library panics (test_tokenizer.py).
KINDS = st.tuples(FLAGS, st.sampled_from(NORMALIZERS), st.sampled_from(PRE_TOKENIZERS)).filter(
    lambda kind: not (kind[1] == STRIP and kind[0].get("\n\n", {}).get("normalized"))
)


@given(KINDS, st.lists(TEXTS, min_size=1, max_size=5))
def test_ids_are_those_of_the_whole_text_however_it_is_cut(kind, texts) -> None:
    tokenizer = made(*kind)
    known = reader(tokenizer)
    grown = ""
    for text in texts:  # a chat that grows by a turn
        grown += text
        assert known.ids(grown) == whole(tokenizer, grown)
        assert known.ids(grown) == whole(tokenizer, grown), "out of what is remembered"


def chat(turns: int) -> str:
    return "".join(f"<|im_start|>user\n{n} apples and pears<|im_end|>\n" for n in range(turns))


def test_a_chats_next_turn_alone_is_read() -> None:
    tokenizer = made({}, None, PRE_TOKENIZERS[0])
    read: list[str] = []
    known = reader(tokenizer, read)
    known.ids(chat(20))
    read.clear()
    assert known.ids(chat(21)) == whole(tokenizer, chat(21))
    assert read == ["<|im_start|>user\n20 apples and pears"]


def test_what_is_remembered_is_bounded_and_what_is_used_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "BYTES_MAX", 16_384)
    tokenizer = made({}, None, PRE_TOKENIZERS[0])
    read: list[str] = []
    known = reader(tokenizer, read)
    for n in range(2_000):
        known.ids(f"<s>always the same<s>{n}")
    assert read.count("<s>always the same") == 1
    assert sum(len(half) for half in (known.young, known.old)) < 110


def test_without_tokens_to_cut_at_the_whole_is_read() -> None:
    every = {one: {"normalized": True} for one in MARKS}
    tokenizer = made(every, None, PRE_TOKENIZERS[0])
    read: list[str] = []
    known = reader(tokenizer, read)
    assert known.ids(chat(3)) == known.ids(chat(3)) == whole(tokenizer, chat(3))
    assert read == [chat(3)]


@given(KINDS, st.lists(TEXTS, max_size=5))
def test_a_beginning_is_that_of_the_whole_text(kind, texts) -> None:
    tokenizer = made(*kind)
    known = reader(tokenizer)
    known.ids("".join(texts[:1]))  # the text that was read before
    for text in ("".join(texts), "".join(texts) * 3 + " word" * 200 + "".join(texts) * 9):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pieces, "LOOK_CHARS", 300)
            ids, complete = known.beginning(text)
        assert whole(tokenizer, text).startswith(ids)
        assert not complete or ids == whole(tokenizer, text)


def test_a_beginning_reads_little_of_what_is_new_and_nothing_of_what_is_known() -> None:
    tokenizer = made({}, None, PRE_TOKENIZERS[0])
    read: list[str] = []
    known = reader(tokenizer, read)
    known.ids(chat(20))
    read.clear()
    assert known.beginning(chat(20)) == (whole(tokenizer, chat(20)), True)
    assert known.beginning(chat(21)) == (whole(tokenizer, chat(21)), True)
    longer = chat(21) + "<s>" + "plums " * 10_000
    ids, complete = known.beginning(longer)
    assert not complete
    assert len(whole(tokenizer, chat(21))) < len(ids) < len(whole(tokenizer, longer)) / 10
    assert whole(tokenizer, longer).startswith(ids)
    assert max(map(len, read)) <= pieces.LOOK_CHARS
