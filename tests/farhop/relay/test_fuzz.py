"""The fuzz target, for a short time; `fuzz.py` says what it looks for."""

from __future__ import annotations

import uvloop
from fuzz import rounds


def test_what_passes_reads_the_same_to_another_parser() -> None:
    ran, passed = uvloop.run(rounds(seconds=60.0, most=4000, seed=1))
    assert ran == 4000
    assert passed > 1000  # most of it must not be garbage
