"""Series are found by their whole names, and only lines of those are looked at."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from regional_lb.exposition import Page, PageError, labels_of


def series(text: bytes, name: bytes = b"a:b") -> list[tuple[bytes, bytes]]:
    return list(Page(text).series(name))


def test_a_name_matches_whole() -> None:
    text = b'a:b_total 1\na:b{x="1"} 2\nxa:b 3\n# HELP a:b 4\na:b 5\n a:b 6\na:bc{} 7\na:b\t8 1700000000\n'
    assert series(text) == [(b'x="1"', b"2"), (b"", b"5"), (b"", b"8")]


def test_series_need_not_stand_together() -> None:
    assert series(b"a:b 1\nother 2\na:b 3\n") == [(b"", b"1"), (b"", b"3")]


def test_lines_that_were_not_asked_for_are_never_read() -> None:
    assert series(b'other{ "" nonsense\n\xff\xfe\na:b 1\n') == [(b"", b"1")]


@pytest.mark.parametrize("line", [b"a:b{", b'a:b{x="1} 2', b"a:b ", b'a:b{x="1"}2', b'a:b{x="1\n"} 2'])
def test_a_line_that_is_none_is_said(line: bytes) -> None:
    with pytest.raises(PageError, match="a:b: not a line of metrics") as caught:
        series(line + b"\n")
    assert caught.value.reason == "line"


def test_a_page_ends_with_a_line_feed() -> None:
    assert series(b"") == []
    with pytest.raises(PageError) as caught:
        Page(b"a:b 1")
    assert caught.value.reason == "cut"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from(["engine", "model_name", "a"]), st.text(max_size=20)), st.floats(0, 1e9))
def test_what_prometheus_writes_is_read(labels: dict[str, str], value: float) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("wanted", "with\nlines", list(labels), registry=registry)
    (gauge.labels(**labels) if labels else gauge).set(value)
    ((told, number),) = series(generate_latest(registry), b"wanted")
    escaped = {k: v.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"") for k, v in labels.items()}
    assert labels_of(told) == {k.encode(): v.encode() for k, v in escaped.items()}
    assert float(number) == value
