"""Whether the tokenizer's results are trusted, for each shape of request separately.

A prompt rendered differently than by the engine may have as many tokens and yet share none of its blocks. So two
numbers are compared: the tokens that an engine counts, and those that it found cached. An error in one shape (one
client's tools) does not affect the others. Invariants: a distrusted shape is tried again now and then, so that no
verdict is for ever; memory is bounded. Never decides, and asking changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

_WRONG_MAX = 3  # errors in a row: neither an eviction nor a late event explains this many
_TRIAL = 16  # one in this many prompts of a distrusted shape is tried all the same
_SHAPES_MAX = 4096
_BLOCK_TOKENS = 16  # the smallest block that engines have: what differs by less may be one of theirs


class Shape(NamedTuple):
    """What a prompt's rendering depends on besides its text."""

    model: str
    client: str
    rendering: str


class _Mismatches(msgspec.Struct):
    miscounted: int = 0  # in a row
    mispredicted: int = 0
    prompts: int = 0  # since it is distrusted for what was cached


class TokenizerGuard:
    """See the module's docstring. `miscounts` are prompts of which an engine counted other tokens than we,
    `mispredictions` those of which it had other tokens cached than its own word let us expect.
    """

    def __init__(self) -> None:
        self.miscounts = self.mispredictions = 0
        self.mismatches: dict[Shape, _Mismatches] = {}  # latest distrusted last

    def believes(self, shape: Shape) -> bool:
        """Whether the token ids of this shape are trusted."""
        seen = self.mismatches.get(shape)
        if seen is None:
            return True
        if seen.miscounted >= _WRONG_MAX:
            return False
        return seen.mispredicted < _WRONG_MAX or seen.prompts % _TRIAL == _TRIAL - 1

    @property
    def distrusted(self) -> list[Shape]:
        """The shapes that are not trusted."""
        return [shape for shape, d in self.mismatches.items() if max(d.miscounted, d.mispredicted) >= _WRONG_MAX]

    def counted(self, shape: Shape, ours: int, reported: int) -> None:
        """An engine reported the number of tokens of a prompt that was tokenized here, too."""
        seen = self.mismatches.get(shape)
        if seen is not None and seen.mispredicted >= _WRONG_MAX:
            seen.prompts += 1
        if ours != reported:
            self.miscounts += 1
            self._mismatch(shape).miscounted += 1
        elif seen is not None:
            seen.miscounted = 0
            self._forget_if_clean(shape, seen)

    def cached(self, shape: Shape, expected: float, reported: int, held: float) -> None:
        """An engine that reports all found `reported` of a prompt's tokens cached, where it let us expect `expected`;
        by its reports it now holds `held` of them, as they are tokenized here.

        If it found more than expected and its word has it by now, it was only late.
        """
        more, less = reported > expected + _BLOCK_TOKENS, reported + _BLOCK_TOKENS < expected
        if less or (more and reported > held + _BLOCK_TOKENS):
            self.mispredictions += 1
            self._mismatch(shape).mispredicted += 1
        elif reported and (seen := self.mismatches.get(shape)) is not None:
            seen.mispredicted = seen.prompts = 0
            self._forget_if_clean(shape, seen)

    def _mismatch(self, shape: Shape) -> _Mismatches:
        seen = self.mismatches[shape] = self.mismatches.pop(shape, _Mismatches())
        if len(self.mismatches) > _SHAPES_MAX:
            del self.mismatches[next(iter(self.mismatches))]
        return seen

    def _forget_if_clean(self, shape: Shape, seen: _Mismatches) -> None:
        if not (seen.miscounted or seen.mispredicted):
            del self.mismatches[shape]
