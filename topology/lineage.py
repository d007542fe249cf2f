"""The base models of served models: a LoRA adapter's base, or the model behind a name that an engine gives it.

Engines and configuration report them; both tiers collect them. Bounded. A model keeps its known bases until a report
changes them, so that its rules stay the same while its engines restart. Never interprets a base's rules: `topology.law`
does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TypeAlias

Bases: TypeAlias = frozenset[str] | None
"""The models whose rules bind a model beside its own; None: it is an adapter, and nobody knows of which."""

Lineage: TypeAlias = Mapping[str, Bases]
"""The bases of each model that is served."""

NO_LINEAGE: Lineage = MappingProxyType({})
MODELS_MAX = 8192
_NO_BASES: frozenset[str] = frozenset()


def merged(reported: Iterable[Lineage]) -> dict[str, Bases]:
    """The union of several reports: all bases that any of them names; unknown if a report says so and none names a
    base."""
    known: dict[str, Bases] = {}
    for lineage in reported:
        for model, bases in lineage.items():
            before = known.get(model, _NO_BASES)
            known[model] = (before or _NO_BASES) | (bases or _NO_BASES) or (bases if before is not None else None)
    return known


class Lineages:
    """What was learned so far. `of` is replaced, never changed."""

    def __init__(self) -> None:
        self.of: Lineage = NO_LINEAGE

    def learn(self, reported: Iterable[Lineage]) -> bool:
        """All that is told now; whether that changes anything. Of models that nobody tells of, what was known stands,
        unless there are too many."""
        now = merged(reported)
        if all(model in self.of and self.of[model] == bases for model, bases in now.items()):
            return False
        kept = {model: bases for model, bases in self.of.items() if model not in now}
        for model in list(kept)[: max(0, len(kept) + len(now) - MODELS_MAX)]:
            del kept[model]
        self.of = MappingProxyType(kept | now)
        return True
