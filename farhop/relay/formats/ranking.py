"""Reading bodies of vLLM's ranking and tokenizer paths: rerank, score, tokenize, detokenize.

A ranking's engine reads each pair of query and document on its own: the query counts once for each. The tokenizer's
paths cost no GPU, so they have no prompt. Never judges what only an engine can (lengths, templates, `top_n`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from farhop.relay.formats.field_guard import json_reader
from farhop.relay.formats.prompt import ITEM, NO_OUTPUT, PAIR, Prompt, invalid, medium, without_output
from farhop.relay.formats.texts import texts

if TYPE_CHECKING:
    from farhop.relay.formats.field_guard import Guard

# A text, or something multi-modal of its own shape.
Passage: TypeAlias = str | dict[str, Any]
Passages: TypeAlias = Passage | list[Passage]


class _Rerank(msgspec.Struct, kw_only=True):
    model: str | None = None
    query: Passage
    documents: Passages
    cache_salt: str | msgspec.UnsetType | None = msgspec.UNSET


class _Score(msgspec.Struct, kw_only=True):
    """vLLM has four pairs of names for the two sides (_SIDES), and reads one of those that are given."""

    model: str | None = None
    text_1: Passages | None = None
    text_2: Passages | None = None
    queries: Passages | None = None
    documents: Passages | None = None
    items: Passages | None = None
    data_1: Passages | None = None
    data_2: Passages | None = None
    cache_salt: str | msgspec.UnsetType | None = msgspec.UNSET


class _GenerativeScore(msgspec.Struct, kw_only=True):
    """vLLM's: how likely labels are behind the query and each item."""

    model: str | None = None
    query: msgspec.Raw
    items: msgspec.Raw
    cache_salt: str | msgspec.UnsetType | None = msgspec.UNSET


class _Tokenize(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None


class _Detokenize(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: msgspec.Raw


def _read_rerank(body: _Rerank, guard: Guard) -> Prompt:
    return _pairs(body, [body.query], _listed(body.documents), ("query", "documents"), guard)


_SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


def _read_score(body: _Score, guard: Guard) -> Prompt:
    given = [
        name for name in dict.fromkeys(name for pair in _SIDES for name in pair) if getattr(body, name) is not None
    ]
    if not given:
        raise invalid("text_1", "`text_1` and `text_2` are missing: give a text or a list of texts each")
    names = next((pair for pair in _SIDES if set(pair).issubset(given)), None)
    if names is None:
        pair = next(pair for pair in _SIDES if given[0] in pair)
        missing = pair[pair[0] == given[0]]
        raise invalid(missing, f"`{missing}` is missing: a score needs both sides")
    # Of several pairs an engine may read another one than is judged here.
    if other := next((name for name in given if name not in names), None):
        raise invalid(other, f"`{other}` gives a side again, beside `{names[0]}` and `{names[1]}`: leave it out")
    left, right = (getattr(body, name) for name in names)
    return _pairs(body, _listed(left), _listed(right), names, guard)


def _listed(value: Passages) -> list[Passage]:
    return value if isinstance(value, list) else [value]


def _pairs(
    body: _Rerank | _Score, left: list[Passage], right: list[Passage], names: tuple[str, str], guard: Guard
) -> Prompt:
    """Pair the texts: one on the left with each on the right, or else both sides element by element."""
    for side, name in zip((left, right), names, strict=True):
        if not side:
            raise invalid(name, f"`{name}` must not be empty")
        for passage in side:
            if isinstance(passage, dict):  # with a type it is a part itself
                guard.media([passage] if "type" in passage else passage.get("content"), name)
    if len(left) not in (1, len(right)):
        raise invalid(names[0], f"`{names[0]}` must be one, or as many as `{names[1]}`")
    sides = [[_canonical(passage) for passage in side] for side in (left, right)]
    opaque_bytes = sum(size for side in sides for _, size in side)
    (query, query_bytes), *_ = sides[0]
    if len(left) == 1:
        canonical = PAIR.join((query, *(text for text, _ in sides[1])))
        opaque_bytes += (len(query) + query_bytes) * (len(right) - 1)
    else:
        canonical = ITEM.join(PAIR.join((a, b)) for (a, _), (b, _) in zip(*sides, strict=True))
    return without_output(body, canonical, opaque_bytes)


def _canonical(passage: Passage) -> tuple[bytes, int]:
    """Its text, and how many bytes of it are opaque."""
    if isinstance(passage, str):
        return passage.encode(), 0
    text = passage.get("text")
    return (text.encode(), 0) if isinstance(text, str) and len(passage) == 1 else medium(passage)


def _read_generative_score(body: _GenerativeScore, _guard: Guard) -> Prompt:
    query, items = texts(body.query, "query"), texts(body.items, "items")
    count = items.canonical.count(ITEM) + 1
    opaque_bytes = len(query.canonical) * (count - 1) - query.surplus_bytes - items.surplus_bytes
    return without_output(body, query.canonical + PAIR + items.canonical, opaque_bytes)


def _read_tokenize(body: _Tokenize, guard: Guard) -> Prompt:
    for message in body.messages or ():
        if isinstance(message, dict):
            guard.media(message.get("content"), "messages")
    if body.prompt is None and body.messages is None:
        raise invalid("prompt", "`prompt` is missing: give a text, or `messages`")
    return Prompt(body.model or "", b"", max_tokens=NO_OUTPUT)


def _read_detokenize(body: _Detokenize, _guard: Guard) -> Prompt:
    if bytes(body.tokens)[:1] != b"[":
        raise invalid("tokens", "`tokens` must be a list of token ids")
    return Prompt(body.model or "", b"", max_tokens=NO_OUTPUT)


rerank = json_reader(_Rerank, _read_rerank)
score = json_reader(_Score, _read_score)
generative_score = json_reader(_GenerativeScore, _read_generative_score)
tokenize = json_reader(_Tokenize, _read_tokenize)
detokenize = json_reader(_Detokenize, _read_detokenize)
