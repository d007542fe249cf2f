"""Endings: one line on stderr, a code that means something."""

import pytest
import typer

from farhop_cli.exits import FAULT, NEGATIVE, fail, first_of, warn


def test_codes_differ_and_zero_is_neither():
    assert len({0, NEGATIVE, FAULT}) == 3


@pytest.mark.parametrize("code", [NEGATIVE, FAULT])
def test_a_failure_is_one_line_and_its_code(capsys, code):
    with pytest.raises(typer.Exit) as ended:
        fail("it broke\nin two places", code)
    assert ended.value.exit_code == code
    assert capsys.readouterr() == ("", "farhop: it broke in two places\n")


def test_a_warning_goes_on(capsys):
    warn("careful")
    assert capsys.readouterr().err == "farhop: careful\n"


def test_control_characters_from_others_are_not_printed(monkeypatch):
    """Answers and documents stand in errors: a terminal took their escapes."""
    said = list[str]()
    monkeypatch.setattr(typer, "echo", lambda text, **_: said.append(text))
    warn("status 500: \x1b]0;owned\x07\x1b[2J\x9b31m\u202eno")
    with pytest.raises(typer.Exit):
        fail("\x1b[31mno")
    assert all(one.isprintable() for one in said)
    assert "owned" in said[0]


@pytest.mark.parametrize(("text", "says"), [("", ""), ("one", "one"), ("one\ntwo\nthree", "one (and 2 more)")])
def test_many_problems_are_reported_by_the_first_and_their_number(text, says):
    assert first_of(ValueError(text)) == says
