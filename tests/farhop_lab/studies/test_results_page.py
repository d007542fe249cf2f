"""One file that shows a comparison: all of its tables and pictures, and no markup of anybody's."""

from __future__ import annotations

import re
from base64 import b64decode
from html.parser import HTMLParser

from farhop_lab.studies.results_page import page

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))


class Cells(HTMLParser):
    """The text of all cells, and what is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.sources: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_page_is_self_contained() -> None:
    tables = [("load <1>", ["router", ">good/s"], [["farhop", "1.50 ± 0.20"], ["<script>alert(1)</script>", "–"]])]
    made = page("arena & more", "± is 95 %", tables, [("latency", PNG)])
    read = Cells()
    read.feed(made)
    assert {"arena & more", "± is 95 %", "load <1>", "1.50 ± 0.20", "<script>alert(1)</script>"} <= set(read.texts)
    assert "script" not in read.tags
    (source,) = read.sources
    assert b64decode(source.removeprefix("data:image/png;base64,")) == PNG
    assert re.findall(r"<t[hd] class=r>([^<]*)", made) == ["good/s", "1.50 ± 0.20", "–"]
