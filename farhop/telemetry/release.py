"""Which release of Farhop this is, as its distribution says. Never fails: a checkout that is not installed has none."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

UNKNOWN = "0+unknown"


@cache
def release() -> str:
    """The version of this build, such as "0.1.0"."""
    try:
        return version("farhop")
    except PackageNotFoundError:
        return UNKNOWN
