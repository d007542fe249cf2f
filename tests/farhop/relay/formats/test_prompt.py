"""The helpers that readers share: separators that no text contains, headers that occur once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.relay.formats import prompt
from farhop.relay.formats.prompt import BodyError, header

MARKS = (prompt.ITEM, prompt.FIELD, prompt.PART, prompt.MEDIA, prompt.TOOLS, prompt.TOKENS, prompt.PAIR)


@given(st.text())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_separator_marks_are_distinct_and_occur_in_no_text(text: str) -> None:
    assert len(set(MARKS)) == len(MARKS)
    assert not [mark for mark in MARKS if mark in text.encode()]


def test_a_header_may_occur_only_once() -> None:
    lines = b"accept: */*\r\ncontent-type: a/b\r\nx-content-type: c\r\n"
    assert header(lines, b"content-type") == b"a/b"
    assert header(lines, b"absent") is None
    with pytest.raises(BodyError) as caught:
        header(lines + b"content-type: d\r\n", b"content-type")
    assert caught.value.param == "content-type"
