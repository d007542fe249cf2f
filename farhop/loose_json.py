"""Parts of a JSON document that another process wrote: what is absent, or of another type, is empty.

For pages such as a balancer's status, which a newer or an older release, or another program, may have answered. Never
raises, and never converts: a number written as a text is no number. Where a wrong type is an error, a model checks it.
"""

from __future__ import annotations

from typing import Any


def as_dict(value: object) -> dict[str, Any]:
    """The value, if it is an object."""
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """The value, if it is a list."""
    return value if isinstance(value, list) else []


def dicts(value: object) -> list[dict[str, Any]]:
    """The objects in a list."""
    return [one for one in as_list(value) if isinstance(one, dict)]


def dicts_by_name(value: object) -> dict[str, dict[str, Any]]:
    """Those fields of an object that are objects."""
    return {name: one for name, one in as_dict(value).items() if isinstance(one, dict)}
