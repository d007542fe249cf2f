"""Texts and token ids, one or many: what goes into a chain, and what is refused by name."""

from __future__ import annotations

import pytest

from farhop.relay.formats import prompt
from farhop.relay.formats import texts as module
from farhop.relay.formats.prompt import BodyError
from farhop.relay.formats.texts import texts


def test_strings_lists_and_token_ids_are_read_as_texts() -> None:
    assert texts(b'"\\u0061"', "x") == (b"a", 1, True, 0)
    assert texts(b'["a", "b"]', "x") == (b"a\xffb", 2, True, 0)
    assert texts(b'["a"]', "x").items == 1
    assert texts(b"[ 1,\n 2]", "x") == texts(b"[[1,2]]", "x") == (prompt.TOKENS + b"1,2", 1, False, 3 - 8)
    assert texts(b"[[1], [22, 3]]", "x") == (prompt.TOKENS + b"1\xff" + prompt.TOKENS + b"22,3", 2, False, 5 - 12)


@pytest.mark.parametrize(
    "given",
    [
        b"[{}]",
        b"{}",
        b"7",
        b"null",
        b'""',
        b"[]",
        b"[ ]",
        b"[-1]",
        b"[1.5]",
        b'[1,"a"]',
        b'["a",1]',
        b'["a",[1]]',
        b'[[1],"a"]',
        b"[[1],2]",
        b"[[1],[[2]]]",
        b"[[1],[2147483648]]",
        b"[[1],null]",
        b"[[[1]]]",
        b"[[1],[2.5]]",
    ],
)
def test_a_value_that_is_no_text_is_refused_by_its_name(given: bytes) -> None:
    with pytest.raises(BodyError) as caught:
        texts(given, "x")
    assert caught.value.param == "x"


def test_token_ids_of_many_lists_are_range_checked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """8,000 of one id each took NumPy 90 ms."""
    looked: list[bytes] = []
    monkeypatch.setattr(module, "_in_range", lambda digits, _commas: looked.append(digits) or True)
    read = texts(b"[" + b", ".join([b"[7, 8]", b"[]", b"[9]"] * 1000) + b"]", "x")
    assert read.canonical == b"\xff".join([prompt.TOKENS + b"7,8", prompt.TOKENS, prompt.TOKENS + b"9"] * 1000)
    assert (read.items, read.is_text, read.surplus_bytes) == (3000, False, 1000 * (3 + 1 - 12))
    assert looked == [b",".join([b"7,8,9"] * 1000)]
