"""What follows behind whole blocks: learned where engines find more, and never more than a block."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.prefix.chain import BLOCK_BYTES, bytes_at, chain
from farhop.balance.prefix.partial_blocks import NODES_MAX, PartialBlocks

SYSTEM = b"".join(b"%d you are a helpful assistant " % n for n in range(200))[:6016]


def asked(rest: bytes, system: bytes = SYSTEM) -> tuple[tuple[int, ...], int]:
    """A prompt's chain and length."""
    prompt = system + rest
    return chain(prompt, 1), len(prompt)


def test_tokens_cached_behind_the_last_whole_block_are_expected_for_the_next_prompt() -> None:
    partial_blocks = PartialBlocks()
    nodes, size = asked(b"what is two and two" * 100)
    depth = 17  # 16 blocks of 256 bytes and one of 1 KiB: 5,120 of 6,016 bytes
    assert partial_blocks.bytes_behind(nodes, depth) == 5120.0
    partial_blocks.learn(nodes, size, 5120.0, 6016.0)
    other, _ = asked(b"and something else " * 90)
    assert partial_blocks.bytes_behind(other, depth) == 6016.0
    assert partial_blocks.bytes_behind(other, depth - 1) == bytes_at(depth - 1)  # it is that node's alone
    for _ in range(40):
        partial_blocks.learn(other, size, 5120.0, 5320.0)
    assert 5320.0 <= partial_blocks.bytes_behind(nodes, depth) < 5330.0


def test_an_engine_that_found_less_than_the_blocks_and_a_prompt_that_ends_there_say_nothing() -> None:
    partial_blocks = PartialBlocks()
    nodes, size = asked(b"x" * 2000)
    partial_blocks.learn(nodes, size, 5120.0, 1024.0)
    partial_blocks.learn((), 100, 0.0, 90.0)
    assert len(partial_blocks) == 0
    partial_blocks.learn(nodes, size, 5120.0, 6016.0)
    short, length = asked(b"", SYSTEM[:5400])  # all of it was found: other prompts may match for longer
    partial_blocks.learn(short, length, 5120.0, 5376.0)
    assert partial_blocks.bytes_behind(nodes, 17) == 6016.0


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 40_000), st.floats(0, 40_000)), max_size=40))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_partial_block_is_always_shorter_than_the_next_whole_block(blocks: list[tuple[int, float, float]]) -> None:
    partial_blocks = PartialBlocks()
    prompts = [asked(b"%d" % n * 1000 * n) for n in range(10)]
    for n, predicted, found in blocks:
        nodes, size = prompts[n]
        partial_blocks.learn(nodes, size, predicted, found)
    for nodes, _ in prompts:
        for depth in range(len(nodes) + 1):
            assert bytes_at(depth) <= partial_blocks.bytes_behind(nodes, depth) < bytes_at(depth) + BLOCK_BYTES[depth]


def test_remembered_partial_blocks_are_bounded() -> None:
    partial_blocks = PartialBlocks()
    for n in range(NODES_MAX + 50):
        partial_blocks.learn((n,), 4096, 256.0, 300.0)
    assert len(partial_blocks) == NODES_MAX
    assert partial_blocks.bytes_behind((0,), 1) == 256.0
    assert partial_blocks.bytes_behind((NODES_MAX + 49,), 1) == 300.0
