from __future__ import annotations

from itertools import accumulate, islice, pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from farhop_lab.workloads.program import Ask, WorkloadError, run
from farhop_lab.workloads.prose import common, prose
from farhop_lab.workloads.trees import BRANCH_2, BRANCH_4, Tree, tree, trees


def echo(ask: Ask) -> bytes:
    return prose(f"{len(ask.prompt)} {ask.prompt[-100:]!r}", ask.answer_tokens or 1)


def blocks(text: bytes) -> list[int]:
    """Names of an engine's blocks: each covers all text before it."""
    ends = range(64, len(text) + 1, 64)
    return list(accumulate(ends, lambda name, end: xxh3_64_intdigest(text[end - 64 : end], name), initial=0))[1:]


def test_as_many_requests_as_the_paper_counts() -> None:
    assert [len(batch) for batch in run(tree(BRANCH_2, "t", Random(1)), echo)] == [1, 2, 4, 8]
    assert [len(batch) for batch in run(tree(BRANCH_4, "t", Random(1)), echo)] == [1, 4, 16, 64]
    assert (BRANCH_2.requests, BRANCH_4.requests) == (15, 85)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 1000))
def test_each_node_holds_its_parent_and_siblings_part_where_their_branches_are_named(
    branch: int, levels: int, number: int
) -> None:
    figures = Tree(branch=branch, levels=levels)
    asked = run(tree(figures, f"t{number}", Random(number)), echo)
    assert sum(map(len, asked)) == figures.requests
    for above, below in pairwise(asked):
        for at, ask in enumerate(below):
            parent = above[at // branch]
            held = parent.prompt + echo(parent)
            assert ask.prompt.startswith(held)
            assert len(ask.prompt) == len(held) + 4 * figures.instruction_tokens
        for at in range(0, len(below), branch):
            assert len({ask.prompt for ask in below[at : at + branch]}) == branch
    assert len({ask.session for batch in asked for ask in batch}) == 1


def test_trees_share_only_their_examples_and_each_tree_is_repeated() -> None:
    first, second = (run(program, echo) for program in islice(trees(BRANCH_2, "c", 1), 2))
    shared = common(first[0][0].prompt, second[0][0].prompt)
    assert 0 <= shared - 4 * BRANCH_2.examples_tokens < 32
    assert run(next(trees(BRANCH_2, "c", 1)), echo) == first
    assert run(next(trees(BRANCH_2, "c", 2)), echo) != first


def test_a_cache_could_serve_the_shares_that_were_reported() -> None:
    """Some 93 % where all is in one place for ever; the examples alone, found everywhere, are 42."""
    asked = [ask for program in islice(trees(BRANCH_2, "c", 3), 20) for batch in run(program, echo) for ask in batch]
    seen: set[int] = set()
    held = 0
    for ask in asked:
        names = blocks(ask.prompt)
        held += next((n for n, name in enumerate(names) if name not in seen), len(names)) * 64
        seen.update(blocks(ask.prompt + echo(ask)))
    total = sum(len(ask.prompt) for ask in asked)
    assert 0.89 < held / total < 0.95
    assert 0.35 < 4 * BRANCH_2.examples_tokens * len(asked) / total < 0.45


@pytest.mark.parametrize("figures", [{"branch": 0}, {"levels": 0}, {"branch": 10, "levels": 9}, {"thought_tokens": 0}])
def test_impossible_tree_figures_are_refused(figures: dict[str, int]) -> None:
    with pytest.raises(WorkloadError, match=r"give 1 or more of each|must be 1 or more"):
        Tree(**figures)
