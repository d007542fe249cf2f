"""A problem in a topology, worded for the person who must fix it.

A problem names the place, the fault and the remedy. It never quotes a value that may be a secret, and never spans two
lines.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

_PLAIN_PART = re.compile(r"[A-Za-z0-9_-]{1,64}")
_PART_CHARS_MAX = 64


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One fault. `path` reads like `tenants[2].residency.processing.allow[0]`, or line:column where YAML fails."""

    path: str
    message: str
    remedy: str

    def __str__(self) -> str:
        prefix = f"{self.path}: " if self.path else ""
        return f"{prefix}{self.message}; {self.remedy}"


class TopologyError(Exception):
    """A topology that cannot be used, with every problem found in it. `source` is the file or name it came from."""

    def __init__(self, source: str, problems: Iterable[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        super().__init__(source, self.problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return f"{self.source}: {self.problems[0]}"
        lines = "".join(f"\n  {problem}" for problem in self.problems)
        return f"{self.source}: {len(self.problems)} problems{lines}"


def path_of(*parts: str | int) -> str:
    """The path of a value in the document: indices in brackets, keys after a dot, unusual keys quoted in brackets."""
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif _PLAIN_PART.fullmatch(part):
            path += f".{part}" if path else part
        else:
            path += f"[{quoted(part)}]"
    return path


def quoted(text: str) -> str:
    """A name from the document as it may stand in a message: one line, printable, bounded."""
    short = text if len(text) <= _PART_CHARS_MAX else text[: _PART_CHARS_MAX - 1] + "…"
    printable = short if short.isprintable() else ascii(short)[1:-1]
    return f'"{printable}"'


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """A remedy naming the closest known name, or `otherwise` where none is close."""
    close = difflib.get_close_matches(name[:_PART_CHARS_MAX].lower(), list(known), n=1, cutoff=0.6)
    return f"did you mean {quoted(close[0])}?" if close else otherwise
