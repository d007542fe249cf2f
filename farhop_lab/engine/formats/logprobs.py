"""Log probabilities of an answer's tokens, in the forms that vLLM gives them for chats and for completions.

Pure. The emulated model has no distribution: a token's is a function of its bytes and its place, the token chosen is
the likeliest, and all probabilities together stay below 1. Made only where a request asks.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_64_intdigest

from farhop_lab.engine.core.text import VOCABULARY

if TYPE_CHECKING:
    from farhop_lab.engine.core.sequence import Sequence

END = b"<|end|>"  # what stands for the token that ends an answer, which has no text
TOP_MAX = 20  # vLLM's --max-logprobs


class Logprobs:
    """Of one answer: `take` each token as it is generated. `top`: how many tokens per place; `chat`: which form."""

    def __init__(self, top: int, *, chat: bool) -> None:
        self._top, self._chat = top, chat
        self._offset = 0  # characters before the token
        self._taken: list[tuple[int, list[tuple[bytes, float]]]] = []

    def beside(self) -> Logprobs:
        """Those of another answer to the same prompt."""
        return Logprobs(self._top, chat=self._chat)

    def take(self, sequence: Sequence) -> dict[str, Any]:
        """Note the token just generated; returns what its chunk says of it."""
        piece = sequence.last_piece or END
        self._taken.append((self._offset, _distribution(piece, sequence.output_tokens, self._top)))
        self._offset += len(sequence.last_piece.decode("utf-8", "replace"))
        return self._rendered(self._taken[-1:])

    def whole(self) -> dict[str, Any]:
        """Of all tokens."""
        return self._rendered(self._taken)

    def _rendered(self, taken: list[tuple[int, list[tuple[bytes, float]]]]) -> dict[str, Any]:
        if self._chat:
            return {
                "content": [{**_named(*ranked[0]), "top_logprobs": [_named(*one) for one in ranked[: self._top]]}
                            for _, ranked in taken]
            }  # fmt: skip
        return {
            "text_offset": [at for at, _ in taken],
            "token_logprobs": [ranked[0][1] for _, ranked in taken],
            "tokens": [_text(ranked[0][0]) for _, ranked in taken],
            "top_logprobs": [{_text(piece): value for piece, value in ranked[: max(1, self._top)]}
                             for _, ranked in taken],
        }  # fmt: skip


def _distribution(piece: bytes, place: int, top: int) -> list[tuple[bytes, float]]:
    """The likeliest tokens there, the chosen one first."""
    drawn = xxh3_64_intdigest(piece, place)
    share = 0.5 + (drawn % 1000) / 2100.0  # each takes more than half of what is left: they fall
    at = drawn % len(VOCABULARY)
    others = [VOCABULARY[(at + n) % len(VOCABULARY)] for n in range(top)]
    ranked = [piece, *(other for other in others if other != piece)][: max(1, top)]
    return [(one, round(n * log(1.0 - share) + log(share), 6)) for n, one in enumerate(ranked)]


def _named(piece: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _text(piece), "logprob": logprob, "bytes": list(piece)}


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")
