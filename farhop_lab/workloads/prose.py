"""Texts by name: equal names give equal texts, different names share nothing, from the first byte on.

Pure and cheap: a text is a slice of one pool of words, behind a head that names it, so 400 KB cost one copy. Invariant:
the texts of two names differ within their first HEAD_BYTES, which is less than the smallest block that anybody hashes
(64 B in an engine, 256 B in a balancer): only what was given the same name can ever hit.
"""

from __future__ import annotations

from functools import cache
from random import Random

from xxhash import xxh3_128_intdigest

TOKEN_BYTES = 4
"""An emulated engine's token: see farhop_lab.engine.core.text."""
HEAD_BYTES = 32
_POOL_BYTES = 1 << 20
_WORDS = (
    "so",
    "the",
    "old",
    "map",
    "of",
    "it",
    "all",
    "was",
    "read",
    "by",
    "me",
    "and",
    "you",
    "on",
    "a",
    "wet",
    "day",
)


@cache
def _pool_twice() -> bytes:
    """Made when a text is first asked for: it takes a fifth of a second, and not all who import this ask."""
    rng = Random(0)
    words: list[str] = []
    size = 0
    while size < _POOL_BYTES:
        words.append(rng.choice(_WORDS))
        size += len(words[-1]) + 1
    return 2 * " ".join(words).encode()[:_POOL_BYTES]


def prose(name: str, tokens: int) -> bytes:
    """The text of this name, so many tokens long. A longer one begins with the shorter one, but for its last byte.

    It ends in no blank, so that a model begins its answer with a whole word. b"" for 0 tokens or less.
    """
    n_bytes = tokens * TOKEN_BYTES
    if n_bytes <= 0:
        return b""
    digest = xxh3_128_intdigest(name.encode())
    at = digest % _POOL_BYTES
    rest = n_bytes - HEAD_BYTES
    text = b"%032x" % digest
    if rest <= _POOL_BYTES:
        text += _pool_twice()[at : at + max(0, rest)]
    else:
        turned = _pool_twice()[at : at + _POOL_BYTES]
        text += turned * (rest // _POOL_BYTES) + turned[: rest % _POOL_BYTES]
    return text[: n_bytes - 1] + b"."


def common(a: bytes, b: bytes) -> int:
    """How many bytes both begin with; by halving, so that long texts cost little."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
