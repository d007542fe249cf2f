"""The view's index by model."""

from __future__ import annotations

import pytest
from worlds import MODEL, OTHER_MODEL, replica

from regional_lb.fleet.view import model_of, prefill_variant, variant_of, view_of


def test_replicas_are_found_by_name_and_by_model() -> None:
    both, one = replica("r1", models=frozenset({MODEL, OTHER_MODEL})), replica("r2")
    view = view_of([both, one])
    assert view.replicas == {"r1": both, "r2": one}
    assert view.by_model == {MODEL: ("r1", "r2"), OTHER_MODEL: ("r1",)}
    with pytest.raises(AttributeError):
        view.by_model = {}  # type: ignore[misc]


def test_a_line_is_a_model_or_a_version_of_it() -> None:
    first, second, plain = (replica(name, version=version) for name, version in (("a", "v1"), ("b", "v2"), ("c", "")))
    view = view_of([first, second, plain])
    assert view.by_model == {MODEL: ("a", "b", "c")}
    assert view.by_variant == {MODEL: ("a", "b", "c"), variant_of(MODEL, "v1"): ("a",), variant_of(MODEL, "v2"): ("b",)}
    assert variant_of(MODEL, "") == model_of(variant_of(MODEL, "v1")) == model_of(MODEL) == MODEL


def test_prefill_replicas_are_not_listed_for_their_model() -> None:
    view = view_of([replica("p", role="prefill"), replica("d", role="decode"), replica("m")])
    assert view.by_model == {MODEL: ("d", "m")}
    assert view.prefillers == {prefill_variant(MODEL, "vllm"): ("p",)}
    assert set(view.replicas) == {"p", "d", "m"}


def test_a_region_may_be_empty() -> None:
    view = view_of([])
    assert (view.by_model, view.prefillers) == ({}, {})
