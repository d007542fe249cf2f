"""New work that a region refuses because an operator or a drill ordered it: a share of all, or of a model.

Invariant: each ends by itself, by this process's clock, whoever set it. Never touches admitted requests. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farhop.balance.machine import Event

if TYPE_CHECKING:
    from collections.abc import Mapping
    from random import Random


_DETAIL = "an operator has this region refuse new work"


class OrderedRefusal(msgspec.Struct, frozen=True):
    """A `share` (0, 1] of new requests is refused until then (monotonic seconds); who ordered it, and why."""

    share: float
    until: float
    why: str
    author: str


class RefusalsChanged(Event, frozen=True):
    """What to refuse from now on, by model; "" is any."""

    by_model: Mapping[str, OrderedRefusal]


class Refusals:
    """The refusals in force."""

    def __init__(self, by_model: Mapping[str, OrderedRefusal] | None = None) -> None:
        self.by_model = dict(by_model or {})

    def of(self, model: str, now: float, rng: Random) -> str:
        """The message for the client if a request for the model is refused; "" if it is not. Each order draws
        separately. Who ordered it, and why, is only for operators: a name is user@host by default, and a reason may
        mention others."""
        for name in dict.fromkeys((model, "")):
            refusal = self.by_model.get(name)
            if refusal is not None and now < refusal.until and rng.random() < refusal.share:
                return _DETAIL
        return ""
