"""Embeddings, rankings and the tokenizer, as in vLLM: one pass over each text, and the results.

Pure. An embedding is the text's words by feature hashing (Weinberger et al., 2009): texts with common words lie close
together, results are the same on every replica, and of length 1. Never guesses: what is not supported is refused.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from typing import Any

import msgspec
import xxhash

from farhop_lab.engine.core.sequence import EngineRequest
from farhop_lab.engine.core.text import TOKEN_BYTES
from farhop_lab.engine.formats.api import ChatBody, Message, decoded, prompt_bytes, refusal, render_chat

DIMENSIONS = 256
TEXTS_MAX = 2048  # OpenAI's limit for one request
_WORD = re.compile(rb"\w+")


class EmbeddingBody(msgspec.Struct):
    """POST /v1/embeddings."""

    model: str | None = None
    input: str | list[Any] | None = None
    messages: list[Message] | None = None
    encoding_format: str = "float"
    dimensions: int | None = None
    cache_salt: str | None = None


class RerankBody(msgspec.Struct):
    """POST /rerank."""

    query: str
    documents: list[str]
    model: str | None = None
    top_n: int = 0


class ScoreBody(msgspec.Struct):
    """POST /score."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None


class GenerativeBody(msgspec.Struct):
    """POST /generative_scoring."""

    query: str
    items: list[str]
    label_token_ids: list[int]
    model: str | None = None
    item_first: bool = False
    cache_salt: str | None = None


class TokenizeBody(msgspec.Struct):
    """POST /tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None


class DetokenizeBody(msgspec.Struct):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class Pooled(msgspec.Struct, frozen=True):
    """A parsed request: one pass over each of `texts`; `pairs` of texts are to be compared."""

    model: str | None
    texts: list[bytes]
    cache_salt: str = ""
    encoding: str = "float"
    documents: list[str] = []
    pairs: list[tuple[bytes, bytes]] = []
    top_n: int = 0

    def wanted(self) -> list[EngineRequest]:
        """The requests for the engine."""
        return [EngineRequest(text, cache_salt=self.cache_salt, generates=False) for text in self.texts]


_EMBEDDING = msgspec.json.Decoder(EmbeddingBody)
_RERANK = msgspec.json.Decoder(RerankBody)
_SCORE = msgspec.json.Decoder(ScoreBody)
_GENERATIVE = msgspec.json.Decoder(GenerativeBody)
_TOKENIZE = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)


def parse_embeddings(body: bytes) -> Pooled:
    """RefusedError if it is malformed or not supported."""
    asked = decoded(_EMBEDDING, body)
    if asked.dimensions not in (None, DIMENSIONS):
        raise refusal("dimensions", f"this model has {DIMENSIONS} dimensions and does not support matryoshka ones")
    if asked.encoding_format not in ("float", "base64"):
        raise refusal("encoding_format", f"{asked.encoding_format!r} is neither float nor base64")
    if asked.messages:
        texts = [render_chat(ChatBody(messages=asked.messages))]
    elif isinstance(asked.input, list) and asked.input and not isinstance(asked.input[0], int):
        texts = [prompt_bytes(item, "input") for item in asked.input]
    else:
        texts = [prompt_bytes(asked.input or [], "input")]
    _bounded("input", texts)
    return Pooled(asked.model, texts, asked.cache_salt or "", asked.encoding_format)


def parse_rerank(body: bytes) -> Pooled:
    """RefusedError if it is malformed."""
    asked = decoded(_RERANK, body)
    pairs = _pairs([asked.query], asked.documents, "documents")
    top_n = asked.top_n if asked.top_n > 0 else len(asked.documents)
    return Pooled(asked.model, [a + b for a, b in pairs], documents=asked.documents, pairs=pairs, top_n=top_n)


def parse_score(body: bytes) -> Pooled:
    """RefusedError if it is malformed."""
    asked = decoded(_SCORE, body)
    left, right = ([text] if isinstance(text, str) else text for text in (asked.text_1, asked.text_2))
    pairs = _pairs(left, right, "text_2")
    return Pooled(asked.model, [a + b for a, b in pairs], pairs=pairs)


def parse_generative(body: bytes) -> Pooled:
    """RefusedError if it is malformed."""
    asked = decoded(_GENERATIVE, body)
    if not asked.label_token_ids:
        raise refusal("label_token_ids", "it is empty; name the tokens whose probabilities are wanted")
    pairs = _pairs([asked.query], asked.items, "items")
    texts = [b + a if asked.item_first else a + b for a, b in pairs]
    return Pooled(asked.model, texts, asked.cache_salt or "", pairs=pairs)


def _pairs(left: list[str], right: list[str], param: str) -> list[tuple[bytes, bytes]]:
    if len(left) not in (1, len(right)):
        raise refusal(param, "Input lengths must be either 1:1, 1:N or N:N")
    _bounded(param, right)
    return [(a.encode(), b.encode()) for a, b in zip(left * (len(right) // len(left)), right, strict=True)]


def _bounded(param: str, texts: list[Any]) -> None:
    if not 0 < len(texts) <= TEXTS_MAX:
        raise refusal(param, f"give 1 to {TEXTS_MAX} texts")


def embedded(text: bytes) -> list[float]:
    """The text's vector of DIMENSIONS dimensions, on the unit sphere."""
    vector = [0.0] * DIMENSIONS
    for word in _WORD.findall(text.lower()) or [text]:
        digest = xxhash.xxh3_64_intdigest(word)
        vector[digest % DIMENSIONS] += 1.0 if digest >> 63 else -1.0
    length = math.sqrt(sum(x * x for x in vector))
    if not length:  # two words that cancel each other
        return [1.0] + [0.0] * (DIMENSIONS - 1)
    return [x / length for x in vector]


def similarity(a: bytes, b: bytes) -> float:
    """Similarity of two texts: 0 to 1."""
    return max(0.0, sum(x * y for x, y in zip(embedded(a), embedded(b), strict=True)))


def embeddings(asked: Pooled, head: dict[str, Any], prompt_tokens: int) -> dict[str, Any]:
    """The answer. `head` is its id, model and time."""
    data = []
    for index, text in enumerate(asked.texts):
        vector: Any = embedded(text)
        if asked.encoding == "base64":
            vector = base64.b64encode(struct.pack(f"<{DIMENSIONS}f", *vector)).decode()
        data.append({"index": index, "object": "embedding", "embedding": vector})
    return {**head, "object": "list", "data": data, "usage": usage(prompt_tokens)}


def ranking(asked: Pooled, head: dict[str, Any], prompt_tokens: int) -> dict[str, Any]:
    """The answer, best first."""
    scored = [(similarity(a, b), index) for index, (a, b) in enumerate(asked.pairs)]
    scored.sort(key=lambda one: (-one[0], one[1]))
    results = [
        {"index": index, "document": {"text": asked.documents[index]}, "relevance_score": score}
        for score, index in scored[: asked.top_n]
    ]
    return {
        "id": head["id"],
        "model": head["model"],
        "usage": {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens},
        "results": results,
    }


def scores(asked: Pooled, head: dict[str, Any], prompt_tokens: int) -> dict[str, Any]:
    """The answer, in the order of the pairs."""
    data = [{"index": i, "object": "score", "score": similarity(a, b)} for i, (a, b) in enumerate(asked.pairs)]
    return {**head, "object": "list", "data": data, "usage": usage(prompt_tokens)}


def generative_scores(asked: Pooled, head: dict[str, Any], prompt_tokens: int) -> dict[str, Any]:
    """The answer, in the order of the items: the similarity of each to the query, as there are no probabilities of a
    model.
    """
    return scores(asked, head, prompt_tokens)


def usage(prompt_tokens: int) -> dict[str, Any]:
    """The `usage` of requests without output."""
    tokens = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens, "completion_tokens": 0}
    return {**tokens, "prompt_tokens_details": None}


def tokenize(body: bytes, context_tokens: int) -> tuple[str | None, dict[str, Any]]:
    """The requested model and the answer. A token is up to four bytes, read as a number. Raises RefusedError."""
    asked = decoded(_TOKENIZE, body)
    if asked.messages:
        text = render_chat(ChatBody(messages=asked.messages))
    elif asked.prompt is not None:
        text = asked.prompt.encode("utf-8", "surrogatepass")
    else:
        raise refusal("prompt", "it is missing; give a text, or messages")
    tokens = [int.from_bytes(text[at : at + TOKEN_BYTES], "big") for at in range(0, len(text), TOKEN_BYTES)]
    answer = {"count": len(tokens), "max_model_len": context_tokens, "tokens": tokens, "token_strs": None}
    return asked.model, answer


def detokenize(body: bytes) -> tuple[str | None, dict[str, Any]]:
    """The requested model and the answer. Raises RefusedError."""
    asked = decoded(_DETOKENIZE, body)
    if any(not 0 <= token < 2**32 for token in asked.tokens):
        raise refusal("tokens", "a token is a number from 0 to 4294967295")
    # A short last token has leading zeros; a text has none to lose.
    text = b"".join(token.to_bytes(TOKEN_BYTES, "big").lstrip(b"\0") for token in asked.tokens)
    return asked.model, {"prompt": text.decode("utf-8", "replace")}
