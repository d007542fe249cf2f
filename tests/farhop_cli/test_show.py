"""What is printed: figures, tables, JSON; text from elsewhere drives no terminal and is no markup."""

import json
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop_cli import show


@pytest.mark.parametrize(("value", "digits", "text"), [
    (1234.56, 1, "1,234.6"), (0.0094, 4, "0.0094"), (12, 1, "12"), (None, 1, "–"), ("12", 1, "–"), (True, 1, "–"),
])  # fmt: skip
def test_numbers_are_shown_with_separators_and_a_dash_for_none(value, digits, text):
    assert show.number(value, digits) == text


@pytest.mark.parametrize(("value", "text"), [("up", "up"), (None, "–"), ("", "–"), (7, "7")])
def test_an_empty_cell_is_shown_as_a_dash(value, text):
    assert show.cell(value) == text


@given(st.text())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_no_control_character_is_left_but_line_ends_and_tabs(text):
    assert all(char.isprintable() or char in "\n\t" for char in show.printable(text))


@given(st.text(alphabet=st.characters(categories=("L", "N", "P"))))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_plain_text_is_unchanged(text):
    assert show.printable(text) == text


def test_a_table_keeps_what_looks_like_markup(capsys):
    show.table("title [x]", ("name", ">n"), [["[red]a[/red]", "1"], ["b\x1b[31m", "22"]])
    out = capsys.readouterr().out
    assert "[red]a[/red]" in out
    assert "title [x]" in out
    assert "\x1b" not in out


def test_long_lines_are_neither_cut_nor_wrapped_in_a_pipe(capsys):
    text = "word " * 200
    show.line(text)
    show.cropped([text])
    assert capsys.readouterr().out.splitlines() == [text, text]


def test_a_terminal_cuts_a_tree_at_its_edge(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    show.cropped(["x" * 100])
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert "x" * 41 not in out


def test_json_is_one_document(capsys):
    show.json({"a": [1, None], "b": "ü"})
    assert json.loads(capsys.readouterr().out) == {"a": [1, None], "b": "ü"}


def test_a_stream_passes_as_it_came_in_a_pipe_and_is_tamed_at_a_terminal(capsys, monkeypatch):
    show.streamed("a\x1b[2J")
    assert capsys.readouterr().out == "a\x1b[2J"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show.streamed("a\x1b[2J")
    assert capsys.readouterr().out == "a\N{REPLACEMENT CHARACTER}[2J"


def test_progress_prints_nothing_without_a_terminal(capsys):
    with show.progress("long work") as say:
        say("round 1")
    assert capsys.readouterr() == ("", "")


def _on_a_terminal(monkeypatch, columns):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")


def _printed(capsys):
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)


def test_table_wider_than_the_terminal_is_printed_in_parts_that_name_their_rows(capsys, monkeypatch):
    _on_a_terminal(monkeypatch, 40)
    columns = ("", "region", *(f">figure {number}" for number in range(9)), "why")
    show.table("title", columns, [["→", "frankfurt", *["123,456"] * 9, "chosen"], ["✗", "tokyo", *[""] * 9, "law"]])
    lines = [line.rstrip() for line in _printed(capsys).splitlines()]
    assert all(len(line) <= 40 for line in lines)
    assert "…" not in "".join(lines)
    assert "".join(lines).count("123,456") == 9
    parts = [line for line in lines if "frankfurt" in line]
    assert len(parts) == len([line for line in lines if "tokyo" in line]) > 1
    assert "chosen" in parts[-1]
    assert lines.count("title") == 1


def test_title_longer_than_its_table_is_one_line(capsys, monkeypatch):
    _on_a_terminal(monkeypatch, 80)
    show.table("the score is the sum, in ms, of", ("region", ">score"), [["tokyo", "4.7"]])
    assert _printed(capsys).splitlines()[0].rstrip() == "the score is the sum, in ms, of"


def test_table_that_fits_is_printed_in_one_part(capsys, monkeypatch):
    _on_a_terminal(monkeypatch, 80)
    show.table("title", ("region", ">rtt ms", "why"), [["tokyo", "18.1", "reports and channel agree " * 5]])
    out = _printed(capsys)
    assert out.count("tokyo") == 1
    assert out.count("reports") == 5
    assert "rtt ms" in out


def test_words_are_not_broken_beside_long_text(capsys, monkeypatch):
    _on_a_terminal(monkeypatch, 80)
    names = ["kill-a-global-balancer", "lose-etcd"]
    texts = ["traffic", "The link between two regions freezes", "region=virginia other=frankfurt soak_s=8"]
    show.table("drills", ("drill", "kind", "title", "--set"), [[name, *texts] for name in names])
    out = _printed(capsys)
    assert all(out.count(name) == 1 for name in names)
    assert all(len(line.rstrip()) <= 80 for line in out.splitlines())


def test_address_in_a_table_is_never_cut(capsys, monkeypatch):
    _on_a_terminal(monkeypatch, 60)
    addresses = [f"http://127.0.0.1:{port}" for port in (8100, 8200, 8300)]
    show.table("", ("region", "entry for clients", "admin", "engines"), [["virginia", *addresses]])
    out = _printed(capsys)
    assert all(address in out for address in addresses)


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 30)), min_size=1, max_size=14),
    st.integers(20, 200),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_each_column_is_in_one_part_or_begins_all_of_them(shape, width):
    columns = [f"{'>' if number else ''}{'c' * long}" for number, long in shape]
    parts = show.parts(columns, [["x"] * len(columns)], width)
    labels = [at for at in range(len(columns)) if all(at in part for part in parts)]
    assert all(part[: len(labels)] == labels for part in parts) or len(parts) == 1
    rest = [at for part in parts for at in part if at not in labels]
    assert sorted({*labels, *rest}) == list(range(len(columns)))
    assert len(rest) == len(set(rest))
