"""The models on offer in a set of regions."""

from __future__ import annotations

from worlds import MODEL, OTHER_MODEL, capacity, instance, seen


def test_models_of_regions() -> None:
    both = {OTHER_MODEL: capacity(), MODEL: capacity(replicas_ready=0)}
    view = seen(instance("london"), instance("london", "b", models=both), instance("tokyo", models={})).view
    assert view.models(frozenset({"london", "tokyo", "mars"})) == [MODEL, OTHER_MODEL]
    assert view.models(frozenset({"tokyo"})) == []
