"""Trees of thoughts: each level asks all its nodes together, and a node's prompt contains its parent's whole thought.

Levels 1, 2, 4, 8 (branch 2) are 15 requests a tree; 1, 4, 16, 64 (branch 4) are 85: as SkyWalker's paper counts them.

A prompt is: the examples that all trees share, the question of its tree, and the chain of thoughts so far, each with
the instruction that distinguishes its branch from its siblings'. Sizes are chosen so that the share of tokens served
from caches comes near those reported: 90 % if a tree stays in one region (an infinite cache would serve 93 %), 59 % if
only the examples (42 % of all tokens) are found everywhere, and the rest by chance. Pure: takes random generators.
"""

from __future__ import annotations

from itertools import count
from math import exp
from random import Random

import msgspec
from xxhash import xxh3_64_intdigest

from farhop_lab.workloads.program import BATCH_MAX, Ask, Program, Programs, WorkloadError
from farhop_lab.workloads.prose import prose


class Tree(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of tree. Lengths in tokens; `thought_tokens` is a mean, log-normal with `sigma`."""

    branch: int = 2
    levels: int = 4
    examples_tokens: int = 300
    question_tokens: int = 80
    instruction_tokens: int = 32
    thought_tokens: float = 100.0
    sigma: float = 0.5
    max_tokens: int = 512

    def __post_init__(self) -> None:
        if self.branch < 1 or self.levels < 1 or self.branch ** (self.levels - 1) > BATCH_MAX:
            raise WorkloadError(
                f"a tree of branch {self.branch} and {self.levels} levels: give 1 or more of each, and at most "
                f"{BATCH_MAX} leaves"
            )
        if not (self.thought_tokens >= 1.0 and self.sigma >= 0.0 and self.max_tokens >= 1):
            raise WorkloadError("a tree's thought_tokens and max_tokens must be 1 or more, its sigma 0 or more")

    @property
    def requests(self) -> int:
        """Requests per tree."""
        return sum(self.branch**level for level in range(self.levels))


BRANCH_2 = Tree(branch=2)
BRANCH_4 = Tree(branch=4)


def tree(figures: Tree, name: str, rng: Random, *, tenant: str = "t") -> Program:
    """One tree. `name` distinguishes its question and session from all others'."""
    session = xxh3_64_intdigest(name.encode()) or 1
    root = prose("tree examples", figures.examples_tokens) + prose(name, figures.question_tokens)
    level = [root + prose("branch 0", figures.instruction_tokens)]
    for depth in range(figures.levels):
        asked = tuple(
            Ask(
                prompt=prompt,
                max_tokens=figures.max_tokens,
                answer_tokens=_thought(figures, rng),
                tenant=tenant,
                session=session,
            )
            for prompt in level
        )
        thoughts = yield asked
        if depth + 1 < figures.levels:
            level = [
                ask.prompt + thought + prose(f"branch {branch}", figures.instruction_tokens)
                for ask, thought in zip(asked, thoughts, strict=True)
                for branch in range(figures.branch)
            ]


def trees(figures: Tree, client: str, seed: int, *, tenant: str = "t") -> Programs:
    """One client of a closed loop: trees without end, each with its own question and random generator."""
    for number in count():
        name = f"tree {figures.branch} {seed} {client} {number}"
        yield tree(figures, name, Random(name), tenant=tenant)


def _thought(figures: Tree, rng: Random) -> int:
    drawn = figures.thought_tokens * exp(figures.sigma * rng.gauss(0.0, 1.0) - figures.sigma**2 / 2.0)
    return max(1, min(round(drawn), figures.max_tokens))
