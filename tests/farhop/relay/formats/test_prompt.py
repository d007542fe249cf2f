"""The words that readers share: marks no text can hold, headers that stand once, texts and tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.relay.formats import prompt
from farhop.relay.formats.prompt import BodyError, header, texts

MARKS = (prompt.ITEM, prompt.FIELD, prompt.PART, prompt.MEDIA, prompt.TOOLS, prompt.TOKENS, prompt.PAIR)


@given(st.text())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_no_text_holds_a_mark(text: str) -> None:
    assert len(set(MARKS)) == len(MARKS)
    assert not [mark for mark in MARKS if mark in text.encode()]


def test_a_header_stands_once() -> None:
    lines = b"accept: */*\r\ncontent-type: a/b\r\nx-content-type: c\r\n"
    assert header(lines, b"content-type") == b"a/b"
    assert header(lines, b"absent") is None
    with pytest.raises(BodyError) as caught:
        header(lines + b"content-type: d\r\n", b"content-type")
    assert caught.value.param == "content-type"


def test_texts() -> None:
    assert texts(b'"\\u0061"', "x") == (b"a", True, True, 0)
    assert texts(b'["a", "b"]', "x") == (b"a\xffb", False, True, 0)
    assert texts(b'["a"]', "x").one
    assert texts(b"[ 1,\n 2]", "x") == texts(b"[[1,2]]", "x") == (prompt.TOKENS + b"1,2", True, False, 3 - 8)
    assert texts(b"[[1], [22, 3]]", "x") == (prompt.TOKENS + b"1\xff" + prompt.TOKENS + b"22,3", False, False, 5 - 12)


@pytest.mark.parametrize(
    "given", [b"[{}]", b"{}", b"7", b"null", b'""', b"[]", b"[ ]", b"[-1]", b"[1.5]", b'[1,"a"]', b"[[[1]]]"]
)
def test_what_is_no_text_is_refused_by_name(given: bytes) -> None:
    with pytest.raises(BodyError) as caught:
        texts(given, "x")
    assert caught.value.param == "x"
