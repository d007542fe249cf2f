"""Whether what the tokenizer here says of prompts is gone by: for each shape of request by itself.

A prompt rendered in another way than the engine does it may have as many tokens and share none of its blocks: so both
are compared, the tokens that an engine counts and those it found cached. What is wrong for one shape (one client's
tools) is no reason to disbelieve the others. Invariants: a doubted shape is tried again now and then, so that no doubt
is for ever; memory is bounded. Never decides, and asking changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

_WRONG_MAX = 3  # in a row: neither an eviction nor a late event explains that
_TRIAL = 16  # of the prompts of a doubted shape, one in so many is gone by all the same
_SHAPES_MAX = 4096
_BLOCK_TOKENS = 16  # the smallest block that engines have: what differs by less may be one of theirs


class Shape(NamedTuple):
    """What a prompt's rendering depends on, beside its text."""

    model: str
    client: str
    rendering: str


class _Doubt(msgspec.Struct):
    miscounted: int = 0  # in a row
    mispredicted: int = 0
    prompts: int = 0  # since it is doubted for what was cached


class TokenizerGuard:
    """See the module's head. `miscounts` are prompts of which an engine counted other tokens than we, `mispredictions`
    those of which it had other tokens cached than its own word let us expect."""

    def __init__(self) -> None:
        self.miscounts = self.mispredictions = 0
        self._doubts: dict[Shape, _Doubt] = {}  # latest doubted last

    def believes(self, shape: Shape) -> bool:
        """Whether this shape's tokens are gone by."""
        doubt = self._doubts.get(shape)
        if doubt is None:
            return True
        if doubt.miscounted >= _WRONG_MAX:
            return False
        return doubt.mispredicted < _WRONG_MAX or doubt.prompts % _TRIAL == _TRIAL - 1

    @property
    def doubted(self) -> list[Shape]:
        """The shapes that are not gone by."""
        return [shape for shape, d in self._doubts.items() if max(d.miscounted, d.mispredicted) >= _WRONG_MAX]

    def counted(self, shape: Shape, ours: int, reported: int) -> None:
        """An engine told how many tokens a prompt has that was tokenized here, too."""
        doubt = self._doubts.get(shape)
        if doubt is not None and doubt.mispredicted >= _WRONG_MAX:
            doubt.prompts += 1
        if ours != reported:
            self.miscounts += 1
            self._doubt(shape).miscounted += 1
        elif doubt is not None:
            doubt.miscounted = 0
            self._settle(shape, doubt)

    def cached(self, shape: Shape, expected: float, reported: int, held: float) -> None:
        """An engine that reports all found `reported` of a prompt's tokens cached, where it let us expect `expected`;
        by its reports it now holds `held` of them, as they are tokenized here.

        If it found more than expected and its word has it by now, it was only late.
        """
        more, less = reported > expected + _BLOCK_TOKENS, reported + _BLOCK_TOKENS < expected
        if less or (more and reported > held + _BLOCK_TOKENS):
            self.mispredictions += 1
            self._doubt(shape).mispredicted += 1
        elif reported and (doubt := self._doubts.get(shape)) is not None:
            doubt.mispredicted = doubt.prompts = 0
            self._settle(shape, doubt)

    def _doubt(self, shape: Shape) -> _Doubt:
        doubt = self._doubts[shape] = self._doubts.pop(shape, _Doubt())
        if len(self._doubts) > _SHAPES_MAX:
            del self._doubts[next(iter(self._doubts))]
        return doubt

    def _settle(self, shape: Shape, doubt: _Doubt) -> None:
        if not (doubt.miscounted or doubt.mispredicted):
            del self._doubts[shape]
