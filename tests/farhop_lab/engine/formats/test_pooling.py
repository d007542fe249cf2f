"""Embeddings that mean something, rankings that follow from them, a tokenizer that gives back what it took."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop_lab.engine.core.text import token_count
from farhop_lab.engine.formats import pooling
from farhop_lab.engine.formats.api import RefusedError

RUN = settings(max_examples=200, deadline=None, derandomize=True)
HEAD = {"id": "i", "created": 1, "model": "m"}


def _parsed(of: str, **fields: Any) -> Any:
    return getattr(pooling, f"parse_{of}")(json.dumps(fields).encode())


@given(st.binary(max_size=60))
@RUN
def test_every_text_has_its_place_on_the_sphere(text: bytes) -> None:
    place = pooling.embedded(text)
    assert len(place) == pooling.DIMENSIONS
    assert sum(x * x for x in place) == pytest.approx(1.0)
    assert place == pooling.embedded(text)
    assert pooling.similarity(text, text) == pytest.approx(1.0)


def test_common_words_bring_texts_together() -> None:
    near, far = b"a cat sat on the old mat", b"interest rates rose again"
    assert pooling.similarity(b"the cat on the mat", near) > 0.5 > pooling.similarity(b"the cat on the mat", far)


def test_embeddings_of_texts_tokens_and_chats() -> None:
    assert _parsed("embeddings", input="abc").texts == [b"abc"]
    assert _parsed("embeddings", input=["abc", [0x61626364]]).texts == [b"abc", b"abcd"]
    assert _parsed("embeddings", input=[0x61626364]).texts == [b"abcd"]
    (chat,) = _parsed("embeddings", messages=[{"role": "user", "content": "hi"}]).texts
    assert b"hi" in chat
    assert not _parsed("embeddings", input="abc").wanted()[0].generates
    answer = pooling.embeddings(_parsed("embeddings", input=["a", "b"]), HEAD, 2)
    assert [(d["index"], len(d["embedding"])) for d in answer["data"]] == [(0, 256), (1, 256)]
    assert answer["usage"]["completion_tokens"] == 0


def test_a_ranking_is_best_first_and_cut() -> None:
    asked = _parsed("rerank", query="the red fox", documents=["blue whale", "a red fox", "the red fox"], top_n=2)
    results = pooling.ranking(asked, HEAD, 9)["results"]
    assert [one["index"] for one in results] == [2, 1]
    assert results[1]["document"] == {"text": "a red fox"}
    assert len(pooling.ranking(_parsed("rerank", query="x", documents=["a", "b"]), HEAD, 9)["results"]) == 2


def test_scores_go_by_pairs() -> None:
    for left, right, found in (("a", "a", [1.0]), ("a", ["a", "b"], [1.0, 0.0]), (["a", "b"], ["b", "b"], [0.0, 1.0])):
        data = pooling.scores(_parsed("score", text_1=left, text_2=right), HEAD, 1)["data"]
        assert [one["score"] for one in data] == pytest.approx(found)


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40))
@RUN
def test_the_tokenizer_gives_back_what_it_took(text: str) -> None:
    _, tokens = pooling.tokenize(json.dumps({"prompt": text}).encode(), 100)
    assert tokens["count"] == len(tokens["tokens"]) == token_count(text.encode())
    assert pooling.detokenize(json.dumps({"tokens": tokens["tokens"]}).encode())[1] == {"prompt": text}


@pytest.mark.parametrize(
    ("of", "fields", "param"),
    [
        ("embeddings", {}, "input"),
        ("embeddings", {"input": []}, "input"),
        ("embeddings", {"input": ["a"] * 2049}, "input"),
        ("embeddings", {"input": [{}]}, None),
        ("embeddings", {"input": "a", "dimensions": 64}, "dimensions"),
        ("embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("rerank", {"query": "a", "documents": []}, "documents"),
        ("score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_2"),
        ("score", {"text_1": [], "text_2": []}, "text_2"),
    ],
)
def test_unsupported_request_is_refused(of: str, fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(RefusedError) as caught:
        _parsed(of, **fields)
    assert caught.value.param == (param or "input")


def test_tokenize_without_text_and_detokenize_of_invalid_ids_are_refused() -> None:
    for refused in (lambda: pooling.tokenize(b"{}", 9), lambda: pooling.detokenize(b'{"tokens":[-1]}')):
        with pytest.raises(RefusedError):
            refused()
