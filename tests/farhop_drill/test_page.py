"""The page: one file that loads nothing, and takes nobody's words for markup."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from outcomes import EVIL, outcome

from farhop_drill.machine import DrillVerdict
from farhop_drill.page import POINTS_MAX, page


class Read(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("verdict", [None, *DrillVerdict])
def test_the_page_is_self_contained_and_escapes_its_values(verdict: DrillVerdict | None) -> None:
    read = Read()
    read.feed(page(outcome(verdict, EVIL)))
    assert "script" not in read.tags
    assert read.links == []
    assert EVIL in read.text  # as text
    assert read.tags.count("svg") == 2
    assert str(verdict or DrillVerdict.PASS) in read.text


def test_however_many_canaries_there_were_the_points_are_bounded() -> None:
    found = outcome()
    found.canaries = found.canaries * 400
    assert page(found).count("<circle") <= POINTS_MAX


def test_a_run_that_touched_nothing_has_a_page_too() -> None:
    found = outcome(DrillVerdict.NOT_RUN, "blocked")
    found.canaries, found.looks, found.done = [], [], []
    assert "no canary was sent" in page(found)
