"""The codec: what is written comes back."""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

import msgspec
import pytest

from farhop_lab.histories.codec import Reader, Tag, Writer, dump, load, made_up


class Pair(NamedTuple):
    left: Any
    right: Any


TAGS = {1: Tag(("left", "right"), lambda it: (it.left, it.right), Pair, shared=True)}
VALUES: list[Any] = [
    None, True, False, 0, -7, 1 << 40, (1 << 64) - 1, 0.5, 1e-9, inf, "a", b"\x00", (), (1, "a"), [2.5, None],
    frozenset({"x", "y"}), {"k": (1,), ("a", "b"): 2.0}, made_up(3), (made_up(5), made_up(6)),
]  # fmt: skip


def tag_of(_value: Any) -> int:
    return 1


def through(values: list[Any], *, file: bool = False, **more: Any) -> list[Any]:
    """`file`: and compressed, which takes 50 ms however little it is."""
    writer = Writer(TAGS, tag_of, {made_up(n): n for n in range(10)})
    for value in values:
        writer.put(value)
    packed = writer.packed()
    read = load(dump(packed)) if file else msgspec.msgpack.decode(msgspec.msgpack.encode(packed), strict=False)
    reader = Reader(read, TAGS, **more)
    return [reader.get() for _ in values]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)  # a set's repr differs by process
def test_a_value_survives_encoding_with_its_type(value: Any) -> None:
    (back,) = through([value])
    assert back == value
    assert type(back) is type(value)


def test_many_in_one_column_come_back_in_order() -> None:
    assert through(VALUES * 3, file=True) == VALUES * 3


def test_shared_objects_are_decoded_as_one_object() -> None:
    one = Pair(1, (2, 3))
    back = through([one, Pair(one, None), one])
    assert back == [one, Pair(one, None), one]
    assert back[1].left is back[0] is back[2]


def test_flat_makes_every_sequence_a_tuple() -> None:
    assert through([[1, [2]], frozenset({"b", "a"})], flat=True) == [(1, (2,)), ("a", "b")]
