"""Texts by name: equal names give equal texts, different names share nothing, from the first byte on.

Pure and cheap: a text is a slice of one pool of words, behind a head that names it, so 400 KB cost one copy. Invariant:
the texts of two names differ within their first HEAD_BYTES, which is less than the smallest block that anybody hashes
(64 B in an engine, 256 B in a balancer): only what was given the same name can ever hit.
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
    """Made when a text is first asked for: not all who import this ask. The words are those that `Random(0).choice`
    gives one after the other: of each draw of 32 bits the uppermost 5, until they name a word. All draws at once take a
    tenth of the time, and every process that plays clients makes the pool."""
    draws = _POOL_BYTES * 3 // 5  # 17 of 32 name a word, of 3.6 bytes with its blank
    drawn = np.frombuffer(Random(0).getrandbits(32 * draws).to_bytes(4 * draws, "little"), "<u4") >> 27
    words = " ".join([_WORDS[place] for place in drawn[drawn < len(_WORDS)].tolist()])
    return 2 * words.encode()[:_POOL_BYTES]


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
