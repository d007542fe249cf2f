"""Moments of the wall clock as records write them. Never reads a clock.

Many fall into one second, and formatting that second is most of the work: so it is remembered.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache

_MS = tuple(f".{ms:03d}Z" for ms in range(1000))


def moment(at_s: float) -> str:
    """Epoch seconds as RFC 3339 in UTC, to the millisecond that has begun."""
    second, ms = divmod(int(at_s * 1e3), 1000)
    return _second(second) + _MS[ms]


@lru_cache(4)
def _second(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).isoformat(timespec="seconds").removesuffix("+00:00")
