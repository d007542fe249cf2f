"""Tokenizes a text piece by piece: pieces seen before are not tokenized again.

A turn of a chat repeats all turns before it. Hugging Face's tokenizers cut a text at its added tokens before anything
else (`AddedVocabulary.extract_and_normalize`) and tokenize each part in between by itself, so a text that is cut before
each added token gives the ids of the whole. A text is cut only at tokens that take nothing from their surroundings (no
`lstrip`, `rstrip`, `single_word`) and are searched for in the text as it is (not `normalized`). Only digests and ids
are kept, never a text; their number is bounded.

A decision often needs no more than a prompt's beginning, which can be tokenized without the rest.

Never cuts if the library's post-processor adds tokens: a caller that wants those tokenizes the whole text.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

BYTES_MAX = 64 << 20  # of ids, in both halves together
LOOK_CHARS = 1024  # a third of a millisecond, and a dozen blocks of 16 tokens
_LOOK_CHARS_MIN = 128
_TAIL_BYTES = 16 * 4  # of ids: what follows a text decides over its last few tokens, too
_ENTRY_BYTES = 150  # of a digest, its ids' object and their place in a dict


def _apart(content: str) -> bool:
    """Whether a token neither begins nor ends with whitespace or a letter of a word."""
    return not any(char.isspace() or char.isalnum() or char == "_" for char in (content[0], content[-1]))


def head(text: str, chars: int) -> str:
    """The first `chars` characters of a text, cut at the end of a word if possible."""
    space = text.rfind(" ", chars // 2, chars)
    return text[: space if space >= 0 else chars]


def safe(ids: bytes) -> bytes:
    """The first token ids of a text's beginning that the whole text has, too."""
    return ids[:-_TAIL_BYTES]


class Pieces:
    """One tokenizer's. `read` encodes texts without special tokens of the post-processor; each one's ids, packed.

    Threads may share it: at worst they read a piece twice.
    """

    def __init__(self, tokenizer: Any, read: Callable[[list[str]], list[bytes]]) -> None:
        self._read = read
        added = [one for one in tokenizer.get_added_tokens_decoder().values() if not one.normalized and one.content]
        # Beside a token that strips whitespace, or requires a word's end, there is no cut at a token that could be
        # either.
        taking = [one.content for one in added if one.lstrip or one.rstrip or one.single_word]
        self._clean = {
            one.content for one in added if one.content not in taking and (not taking or _apart(one.content))
        }
        # Of several that begin at one place the library takes the longest.
        longest_first = [re.escape(one) for one in sorted((one.content for one in added), key=len, reverse=True)]
        self._mark = re.compile("|".join(longest_first)) if self._clean else None
        # Two halves: what is used moves to the young one; once that is full, the old one goes.
        self.young: dict[bytes, bytes] = {}
        self.old: dict[bytes, bytes] = {}
        self._young_bytes = 0

    def ids(self, text: str) -> bytes:
        """The token ids of a text, as in the tokenization of the whole."""
        found: list[bytes] = []
        missing: list[tuple[int, bytes, str]] = []
        for piece in self._cut(text):
            key = _key(piece)
            known = self._known(key)
            if known is None:
                missing.append((len(found), key, piece))
            found.append(known or b"")
        if missing:
            for (at, key, _), ids in zip(missing, self._read([piece for _, _, piece in missing]), strict=True):
                found[at] = ids
                self._keep(key, ids)
        return b"".join(found)

    def beginning(self, text: str) -> tuple[bytes, bool]:
        """The ids of the part of the text that was read before and of at most LOOK_CHARS more, and whether that is
        all."""
        found: list[bytes] = []
        left = LOOK_CHARS
        for piece in self._cut(text):
            key = _key(piece)
            ids = self._known(key)
            if ids is None and len(piece) > left:
                if left >= _LOOK_CHARS_MIN:
                    found.append(safe(self._read([head(piece, left)])[0]))
                return b"".join(found), False
            if ids is None:
                left -= len(piece)
                (ids,) = self._read([piece])
                self._keep(key, ids)
            found.append(ids)
        return b"".join(found), True

    def _cut(self, text: str) -> list[str]:
        """Pieces that begin with a token to cut at, but for the first one."""
        if self._mark is None:
            return [text]
        begins = [0]
        begins += [one.start() for one in self._mark.finditer(text) if one.start() and one.group() in self._clean]
        return [text[begin:end] for begin, end in zip(begins, [*begins[1:], len(text)], strict=True)]

    def _known(self, key: bytes) -> bytes | None:
        known = self.young.get(key)
        if known is None:
            known = self.old.get(key)
            if known is not None:
                self._keep(key, known)
        return known

    def _keep(self, key: bytes, ids: bytes) -> None:
        if key in self.young:
            return
        self.young[key] = ids
        self._young_bytes += len(ids) + _ENTRY_BYTES
        if self._young_bytes > BYTES_MAX // 2:
            self.old, self.young, self._young_bytes = self.young, {}, 0


def _key(piece: str) -> bytes:
    return blake2b(piece.encode("utf-8", "surrogatepass"), digest_size=16).digest()
