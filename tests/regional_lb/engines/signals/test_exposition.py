"""Series are found by their whole names, and only lines of those are looked at."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from regional_lb.engines.signals.exposition import _TRUSTED_PAGES, Page, PageError, Places, labels_of


def series(text: bytes, name: bytes = b"a:b") -> list[tuple[bytes, bytes]]:
    return list(Page(text).series(name))


def test_a_metric_name_must_match_whole() -> None:
    text = b'a:b_total 1\na:b{x="1"} 2\nxa:b 3\n# HELP a:b 4\na:b 5\n a:b 6\na:bc{} 7\na:b\t8 1700000000\n'
    assert series(text) == [(b'x="1"', b"2"), (b"", b"5"), (b"", b"8")]


def test_series_of_one_metric_need_not_be_adjacent() -> None:
    assert series(b"a:b 1\nother 2\na:b 3\n") == [(b"", b"1"), (b"", b"3")]


def test_lines_that_were_not_asked_for_are_never_read() -> None:
    assert series(b'other{ "" nonsense\n\xff\xfe\na:b 1\n') == [(b"", b"1")]


@pytest.mark.parametrize("line", [b"a:b{", b'a:b{x="1} 2', b"a:b ", b'a:b{x="1"}2', b'a:b{x="1\n"} 2'])
def test_a_malformed_line_is_an_error(line: bytes) -> None:
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
def test_a_page_in_the_prometheus_format_is_read(labels: dict[str, str], value: float) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("wanted", "with\nlines", list(labels), registry=registry)
    (gauge.labels(**labels) if labels else gauge).set(value)
    ((found, number),) = series(generate_latest(registry), b"wanted")
    escaped = {k: v.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"") for k, v in labels.items()}
    assert labels_of(found) == {k.encode(): v.encode() for k, v in escaped.items()}
    assert float(number) == value


# -- pages of one source, one after another

PAGE = b"".join(b'other_%d{le="%d"} %d\n' % (n, n, n) for n in range(200)) + b'a:b{x="1"} 2\na:b{x="2"} 3\na:bc{} 7\n'
MORE = b'a:b{x="a label that is long enough"} 4\n'


def test_a_series_whose_line_moved_a_little_is_found_again() -> None:
    places = Places()
    for number in (b"1", b"1234567", b"12"):
        page = PAGE.replace(b"} 7\n", b"} " + number + b"\n").replace(b"} 3\n", b"} " + number + b"\n")
        expected = [(b'x="1"', b"2"), (b'x="2"', number)]
        assert list(Page(page, places).series(b"a:b")) == expected == series(page)
    assert list(Page(PAGE, places).series(b"absent")) == []


@pytest.mark.parametrize("at", [0, PAGE.index(b"other_99"), PAGE.index(b"a:b{x"), len(PAGE)])
def test_an_added_line_is_found_at_any_place(at: int) -> None:
    places = Places()
    assert len(list(Page(PAGE, places).series(b"a:b"))) == 2
    page = PAGE[:at] + MORE + PAGE[at:]
    assert list(Page(page, places).series(b"a:b")) == series(page)
    assert len(series(page)) == 3
    assert list(Page(PAGE, places).series(b"a:b")) == series(PAGE)


def test_metrics_that_moved_within_a_page_are_found() -> None:
    places = Places()
    assert len(list(Page(PAGE, places).series(b"a:b"))) == 2
    page = PAGE[-60:] + PAGE[:-60]
    page = page[page.index(b"\n") + 1 :] + page[: page.index(b"\n") + 1]
    assert len(page) == len(PAGE)
    assert list(Page(page, places).series(b"a:b")) == series(page)
    assert len(series(page)) == 2


def test_a_metric_that_appears_later_is_found_after_a_few_pages() -> None:
    places = Places()
    first = PAGE.replace(b"other_9{", b"absent9{")
    assert list(Page(first, places).series(b"other_9")) == []
    seen = [bool(list(Page(PAGE, places).series(b"other_9"))) for _ in range(2 * _TRUSTED_PAGES)]
    assert seen.index(True) <= _TRUSTED_PAGES
    assert all(seen[seen.index(True) :])


@pytest.mark.parametrize("filler", [b"a" * 100_000, b"a" * 50_000 + b" " * 50_000, b"a " * 50_000, b"a=" * 50_000])
def test_text_that_is_no_label_is_passed_over_at_once(filler: bytes) -> None:
    """Where each of its places was looked at as a beginning, this took minutes."""
    ((labels, value),) = series(b"a:b{" + filler + b',x="1"} 4\n')
    assert (labels_of(labels)[b"x"], value) == (b"1", b"4")


def test_labels_are_read_once_and_not_kept_for_ever() -> None:
    places = Places()
    read = Page(PAGE, places).labels(b'x="1"')
    assert read == labels_of(b'x="1"') == {b"x": b"1"}
    assert Page(PAGE, places).labels(b'x="1"') is read
    Page(PAGE + MORE, places)
    assert not places.labels


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.tuples(st.sampled_from([b"a:b", b"a:bc", b"z"]), st.integers(0, 10**6)), max_size=30)))
def test_with_places_no_line_is_found_that_is_not_there(pages: list[list[tuple[bytes, int]]]) -> None:
    places = Places()
    for lines in pages:
        text = b"".join(b'%b{of="what was asked for"} %d\n' % line for line in lines)
        expected, found = series(text), list(Page(text, places).series(b"a:b"))
        # The only change that stays unseen for a while is a line replaced by another one of the same length.
        assert found == expected or (
            len(found) < len(expected) and [line for line in expected if line in found] >= found
        )
        assert list(Page(text, Places()).series(b"a:b")) == expected
