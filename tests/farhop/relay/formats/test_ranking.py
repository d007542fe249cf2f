"""Rankings: the query before its documents, and counted with each of them. The tokenizer costs nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.relay.formats import bodies
from farhop.relay.formats.openai import change, salt_of
from farhop.relay.formats.paths import Kind
from farhop.relay.formats.prompt import NO_OUTPUT, BodyError, Prompt

RUN = settings(max_examples=200, deadline=None, derandomize=True)
TEXT = st.text("abé\n", max_size=4)


def read(kind: Kind, **fields: Any) -> Prompt:
    return bodies.read(kind, json.dumps({"model": "m", **fields}).encode())


@given(TEXT, st.lists(TEXT, min_size=1, max_size=4), TEXT, st.lists(TEXT, min_size=1, max_size=4))
@RUN
def test_different_rankings_never_collide(a: str, docs_a: list[str], b: str, docs_b: list[str]) -> None:
    first, second = read(Kind.RERANK, query=a, documents=docs_a), read(Kind.RERANK, query=b, documents=docs_b)
    assert (first.canonical == second.canonical) is ((a, docs_a) == (b, docs_b))


@given(TEXT, st.lists(TEXT, min_size=1, max_size=4), TEXT)
@RUN
def test_more_documents_extend_the_text(query: str, documents: list[str], more: str) -> None:
    longer = read(Kind.RERANK, query=query, documents=[*documents, more])
    assert longer.canonical.startswith(read(Kind.RERANK, query=query, documents=documents).canonical)


def test_a_query_counts_once_for_each_document() -> None:
    prompt = read(Kind.RERANK, query="q" * 100, documents=["a" * 10, "b" * 10, "c" * 10])
    assert prompt.canonical.startswith(b"q" * 100)
    assert prompt.opaque_bytes == 200
    assert (prompt.max_tokens, prompt.stream, prompt.hide_usage) == (NO_OUTPUT, False, False)


def test_a_document_with_nothing_but_text_is_its_text_and_others_are_hashed() -> None:
    plain = read(Kind.RERANK, query="q", documents=["d"])
    assert read(Kind.RERANK, query="q", documents=[{"text": "d"}]) == plain
    picture = {"type": "image_url", "image_url": "data:," + "x" * 500}
    image = read(Kind.RERANK, query="q", documents={"content": [picture]})
    assert len(image.canonical) < 60
    assert image.opaque_bytes > 500


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_a_score_is_a_ranking_by_any_name(names: tuple[str, str]) -> None:
    one, many = names
    ranked = read(Kind.RERANK, query="q", documents=["a", "b"])
    assert read(Kind.SCORE, **{one: "q", many: ["a", "b"]}) == ranked
    assert read(Kind.SCORE, **{one: ["q"], many: ["a", "b"]}) == ranked
    assert read(Kind.SCORE, **{one: ["p", "q"], many: ["a", "b"]}).canonical == b"p\xf9a\xffq\xf9b"


def test_tokenize_and_detokenize_requests_have_no_prompt_and_no_output() -> None:
    for prompt in (
        read(Kind.TOKENIZE, prompt="x" * 999),
        read(Kind.TOKENIZE, messages=[{"role": "user", "content": "x"}]),
        read(Kind.DETOKENIZE, tokens=[1, 2]),
    ):
        assert prompt == Prompt("m", b"", max_tokens=NO_OUTPUT)


FETCHED = {"content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}]}


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (Kind.RERANK, {"documents": ["a"]}, "query"),
        (Kind.RERANK, {"query": "q"}, "documents"),
        (Kind.RERANK, {"query": "q", "documents": []}, "documents"),
        (Kind.RERANK, {"query": "q", "documents": [7]}, "documents[0]"),
        (Kind.RERANK, {"query": ["q"], "documents": ["a"]}, "query"),
        (Kind.RERANK, {"query": "q", "documents": ["a"], "model": None}, "model"),
        (Kind.SCORE, {}, "text_1"),
        (Kind.SCORE, {"text_1": "a"}, "text_2"),
        (Kind.SCORE, {"documents": ["a"]}, "queries"),
        (Kind.SCORE, {"text_1": "a", "text_2": []}, "text_2"),
        # vLLM 0.32 reads the other names of these, and fetches what they point to.
        (Kind.SCORE, {"text_1": "a", "text_2": "b", "data_1": "q", "data_2": FETCHED}, "data_1"),
        (Kind.SCORE, {"text_1": "a", "text_2": "b", "queries": "q", "documents": FETCHED}, "queries"),
        (Kind.SCORE, {"text_1": "a", "text_2": "b", "queries": "q", "items": FETCHED}, "queries"),
        (Kind.SCORE, {"queries": "a", "documents": "b", "items": FETCHED}, "items"),
        (Kind.SCORE, {"text_1": "a", "text_2": "b", "items": ["c"]}, "items"),
        (Kind.SCORE, {"text_1": "a", "text_2": FETCHED}, "text_2"),
        (Kind.RERANK, {"query": "q", "documents": [FETCHED["content"][0]]}, "documents"),
        (Kind.SCORE, {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        (Kind.TOKENIZE, {}, "prompt"),
        (Kind.TOKENIZE, {"prompt": 5}, "prompt"),
        (Kind.DETOKENIZE, {}, "tokens"),
        (Kind.DETOKENIZE, {"tokens": "a"}, "tokens"),
    ],
)
def test_a_bad_field_is_named(kind: Kind, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BodyError) as caught:
        read(kind, **fields)
    assert caught.value.param == param
    assert param.split("[")[0] in caught.value.detail


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Kind.RERANK, {"query": "q", "documents": ["a", "b"]}),
        (Kind.SCORE, {"text_1": "a", "text_2": ["b", "c"]}),
        (Kind.GENERATIVE_SCORE, {"query": "q", "items": ["a"]}),
    ],
)
def test_a_tenant_cannot_use_another_tenant_s_salt(kind: Kind, body: dict[str, Any]) -> None:
    """vLLM takes one wherever it pools, and what we make of a tenant's name can be worked out."""
    stolen = salt_of(Kind.EMBEDDINGS, Prompt("m", b"x"), "tenant:other")
    for mine in ({}, {"cache_salt": None}, {"cache_salt": stolen}):
        wire = json.dumps({"model": "m", **body, **mine}).encode()
        prompt = bodies.read(kind, wire)
        for scope in ("tenant:me", ""):
            salt = salt_of(kind, prompt, scope)
            told = json.loads(change(wire, prompt, salt).of(wire)).get("cache_salt")
            assert told != stolen
            assert bool(told) == bool(scope or mine.get("cache_salt"))
            assert told in (None, salt)
