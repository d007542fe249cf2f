"""Texts by name: equal names give equal texts, different names share nothing, from the first byte on.

Pure and cheap: a text is a slice of one pool of words, behind a head that names it, so 400 KB cost one copy. Invariant:
the texts of two names differ within their first HEAD_BYTES, less than the smallest block that is hashed anywhere (64 B
in an engine, 256 B in a balancer): only texts of the same name can hit a cache.
"""

from __future__ import annotations

from functools import cache
from random import Random

import numpy as np
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
    """Made on first use, as not all importers need it. The words are those of repeated `Random(0).choice`: of each draw
    of 32 bits the uppermost 5, until they name a word. All draws at once take a tenth of the time, and every process
    that plays clients makes the pool.
    """
    draws = _POOL_BYTES * 3 // 5  # 17 of 32 name a word, of 3.6 bytes with its blank
    drawn = np.frombuffer(Random(0).getrandbits(32 * draws).to_bytes(4 * draws, "little"), "<u4") >> 27
    words = " ".join([_WORDS[place] for place in drawn[drawn < len(_WORDS)].tolist()])
    return 2 * words.encode()[:_POOL_BYTES]


def prose(name: str, tokens: int) -> bytes:
    """The text of this name, of this many tokens. A longer one begins with the shorter one, except for its last byte.

    It does not end in a blank, so that a model begins its answer with a whole word. b"" for 0 tokens or less.
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
    """Length in bytes of the common prefix; by bisection, so that long texts cost little."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
