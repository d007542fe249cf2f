"""The fuzz target, for a while; `fuzz_bodies.py` says what it looks for."""

from __future__ import annotations

import uvloop
from fuzz_bodies import rounds


def test_whatever_is_said_is_an_outcome() -> None:
    ran, passed = uvloop.run(rounds(4000, seed=2, seconds=60.0))
    assert ran == 4000
    assert passed > 500  # most of it must not be mere garbage
