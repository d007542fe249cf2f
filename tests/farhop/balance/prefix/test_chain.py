"""Chains: equal for equal prefixes, unrelated for other seeds, cut by position alone, and the same for ever."""

from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from farhop.balance.prefix.chain import (
    BLOCK_BYTES,
    DEPTH_MAX,
    bytes_at,
    chain,
    depth_at,
    extend_chain,
    marked_depth,
    marks,
    seed_of,
    tail,
)

RUN = settings(max_examples=150, deadline=None, derandomize=True)
SEEDS = st.integers(0, 2**64 - 1)
words = st.text(max_size=6)
USUAL_BYTES = 100_000  # made once; only a longer text is made anew
LENGTHS = st.one_of(st.integers(0, 70_000), st.sampled_from([255, 256, 4095, 4096, 5119, 5120, 32768, 36863, 36864]))

# Recorded once: a change here changes what two tiers of different versions can share.
GOLDEN_SEED = 0x635C5B9461B07A9D
GOLDEN_NODES = (0x635C5B0013A3115D, 0x635C5B6DBB37EB23, 0x635C5B9132F0ECFB, 45)


@lru_cache(4)
def _text(n_bytes: int, salt: int) -> bytes:
    return b"".join(f"{salt}:{i:>11} ".encode() for i in range(n_bytes // 12 + 1))


def text(n_bytes: int, salt: int = 0) -> bytes:
    """n_bytes that differ from block to block."""
    return _text(max(n_bytes, USUAL_BYTES), salt)[:n_bytes]


@given(LENGTHS, LENGTHS, LENGTHS, SEEDS)
@RUN
def test_equal_prefixes_give_equal_chains_up_to_the_last_whole_block(a: int, b: int, common: int, seed: int) -> None:
    shared = text(common)
    left, right = chain(shared + text(a, 1), seed), chain(shared + text(b, 2), seed)
    depth = depth_at(common)
    assert left[:depth] == right[:depth] == chain(shared, seed)
    # The block in which the texts diverge, and all below it, differ.
    assert set(left[depth:]).isdisjoint(right[depth:])


@given(LENGTHS, SEEDS, SEEDS)
@RUN
def test_different_seeds_share_nothing(n_bytes: int, seed: int, other: int) -> None:
    if seed != other:
        assert set(chain(text(n_bytes), seed)).isdisjoint(chain(text(n_bytes), other))


def test_a_block_made_to_hash_to_a_node_of_another_scope_is_not_that_node() -> None:
    """Of printable text, found in 13 s of CPU: each pair of the hash's eight lanes gives a sum of its own, and four
    lists of such sums are searched for the one that is wanted. Else a tenant could ask whether another's prompt is
    cached."""
    theirs, own = (seed_of("llama-3.1-8b", "", "", f"tenant:{name}") for name in ("victim", "spy"))
    (node,) = chain(b"user\xfe" + b"the merger is planned for May. " * 9, theirs)
    made = b"user\xfe" + b"." * 187 + b"abwY27tn1EQzTBmXWPKSrPLCFmQoyCXV7Y6KfYsH rWFviMkU0f 1HOZqhiFOHl1"
    assert xxh3_64_intdigest(made, own) == node
    assert chain(made, own) != (node,)


@given(LENGTHS, LENGTHS, words, words)
@RUN
def test_scopes_have_no_node_in_common(length: int, known: int, one: str, other: str) -> None:
    """Whatever the blocks are: the upper bits of all nodes are those of the scope alone."""
    tops = set()
    for scope in {one, other}:
        seed = seed_of("llama-3.1-8b", "", "salt", scope)
        nodes = chain(text(length), seed)
        nodes += extend_chain(tail(text(length), nodes, seed), text(known, 1))[len(nodes) :]
        assert {node >> 40 for node in nodes} <= {seed >> 40}
        assert seed >> 40 == seed_of("other", "adapter", "", scope) >> 40
        tops.add(seed >> 40)
    assert len(tops) == len({one, other})


@given(LENGTHS, SEEDS)
@RUN
def test_a_node_is_its_block_hashed_over_the_node_before(n_bytes: int, seed: int) -> None:
    data = text(n_bytes)
    expected, node, start = [], seed, 0
    for size in BLOCK_BYTES:
        if start + size > n_bytes:
            break
        node = xxh3_64_intdigest(data[start : start + size], node) % 2**40 + (seed >> 40 << 40)
        expected.append(node)
        start += size
    assert chain(data, seed) == tuple(expected)
    assert chain(bytes(bytearray(data)), seed) == chain(data, seed)


@given(LENGTHS, LENGTHS, SEEDS, st.data())
@RUN
def test_a_chain_goes_on_from_its_tail_wherever_it_is_cut(
    length: int, known: int, seed: int, data: st.DataObject
) -> None:
    whole = text(length)
    cut = data.draw(st.integers(0, length))
    prompt, more = whole[:cut], whole[cut:]
    end = tail(prompt, chain(prompt, seed), seed)
    assert extend_chain(end, more) == chain(whole, seed)
    assert len(end.remainder) < max(BLOCK_BYTES)
    # Content that is known to follow may be put before the rest, however long it is.
    opening = more[: min(known, len(more))]
    assert extend_chain(replace(end, remainder=end.remainder + opening), more[len(opening) :]) == chain(whole, seed)


@pytest.mark.parametrize("cut", [0, 100, bytes_at(DEPTH_MAX) - 1, bytes_at(DEPTH_MAX), bytes_at(DEPTH_MAX) + 5000])
def test_a_bounded_chain_goes_on_to_its_bound(cut: int) -> None:
    whole = text(bytes_at(DEPTH_MAX) + 10_000)
    end = tail(whole[:cut], chain(whole[:cut], 1), 1)
    assert extend_chain(end, whole[cut:]) == chain(whole, 1)
    assert len(end.remainder) <= max(BLOCK_BYTES)


@given(st.integers(0, 5_000_000))
@RUN
def test_depth_and_bytes_are_inverse(n_bytes: int) -> None:
    depth = depth_at(n_bytes)
    assert bytes_at(depth) <= n_bytes
    assert depth == DEPTH_MAX or n_bytes < bytes_at(depth + 1)


def test_every_depth_is_found_again() -> None:
    assert [depth_at(bytes_at(depth)) for depth in range(DEPTH_MAX + 1)] == list(range(DEPTH_MAX + 1))
    assert depth_at(-1) == 0


def test_the_boundaries_are_the_designs() -> None:
    assert [bytes_at(depth) for depth in (0, 1, 16, 17, 44, 45)] == [0, 256, 4096, 5120, 32_768, 36_864]
    assert depth_at(200_000) == 84
    assert bytes_at(DEPTH_MAX) == 4 * 1024 * 1024
    for depth in (-1, DEPTH_MAX + 1):
        with pytest.raises(ValueError, match="depth"):
            bytes_at(depth)


def test_a_chain_is_bounded() -> None:
    data = bytes(bytes_at(DEPTH_MAX) + 10_000)
    assert len(chain(data, 1)) == DEPTH_MAX
    assert chain(data, 1) == chain(data[: bytes_at(DEPTH_MAX)], 1)


def test_both_tiers_and_all_versions_compute_the_same() -> None:
    seed = seed_of("llama-3.1-8b", "", "", "tenant-a")
    assert seed == GOLDEN_SEED
    nodes = chain(text(40_000), seed)
    assert (nodes[0], nodes[43], nodes[-1], len(nodes)) == GOLDEN_NODES


@given(st.tuples(words, words, words, words), st.tuples(words, words, words, words))
@RUN
def test_seed_depends_on_every_scope_field_and_on_their_borders(
    one: tuple[str, str, str, str], other: tuple[str, str, str, str]
) -> None:
    assert (seed_of(*one) == seed_of(*other)) == (one == other)


def test_scope_fields_with_equal_concatenation_have_different_seeds() -> None:
    quads = [("ab", "c", "", ""), ("a", "bc", "", ""), ("abc", "", "", ""), ("", "abc", "", ""), ("1:a", "", "", "")]
    assert len({seed_of(*quad) for quad in quads}) == len(quads)
    assert seed_of("\ud800", "", "", "") != seed_of("", "", "", "")


@given(LENGTHS, SEEDS)
@RUN
def test_marks_are_nodes_at_fixed_depths_and_reach_within_four_nodes_of_the_end(n_bytes: int, seed: int) -> None:
    nodes = chain(text(n_bytes), seed)
    found = marks(nodes)
    assert [nodes[marked_depth(n + 1) - 1] for n in range(len(found))] == list(found)
    assert len(nodes) - marked_depth(len(found)) < 4
