"""A comparison as one self-contained HTML file: its tables and pictures. Nothing is loaded from anywhere.

Pure. Table cells are text, never markup.
"""

from __future__ import annotations

from base64 import b64encode
from html import escape
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

Table: TypeAlias = "tuple[str, list[str], list[list[str]]]"
"""Title, columns (`>` before one: right-aligned), rows."""

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem;color:#1b1e23;background:#fff}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .4rem}p{color:#555}.t{overflow-x:auto}
table{border-collapse:collapse;font-size:13px}td,th{text-align:left;padding:.2rem .8rem .2rem 0;white-space:nowrap;
border-bottom:1px solid #e3e5e8}th{font-weight:600}.r{text-align:right;font-variant-numeric:tabular-nums}
img{max-width:100%;height:auto;margin:.8rem 0;background:#fff}
@media(prefers-color-scheme:dark){body{background:#15181c;color:#e6e8eb}td,th{border-color:#333a42}p{color:#a5adb7}}
"""


def page(title: str, about: str, tables: Sequence[Table], pictures: Sequence[tuple[str, bytes]]) -> str:
    """The file. `pictures` are PNGs, each with its alternative text."""
    body = [f"<h1>{escape(title)}</h1>", f"<p>{escape(about)}</p>"]
    body += [
        f'<img alt="{escape(name)}" src="data:image/png;base64,{b64encode(png).decode()}">' for name, png in pictures
    ]
    body += [_table(*table) for table in tables]
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>"
        f"<meta name=viewport content='width=device-width'><style>{_STYLE}</style><body>{''.join(body)}</body></html>\n"
    )


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    sides = [" class=r" if column.startswith(">") else "" for column in columns]
    head = "".join(f"<th{side}>{escape(column.lstrip('>'))}" for side, column in zip(sides, columns, strict=True))
    lines = "".join(
        "<tr>" + "".join(f"<td{side}>{escape(cell)}" for side, cell in zip(sides, row, strict=True)) for row in rows
    )
    return f"<h2>{escape(title)}</h2><div class=t><table><tr>{head}{lines}</table></div>"


__all__ = ["Table", "page"]
