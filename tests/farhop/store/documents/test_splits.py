"""Weights of a split, within its region's document: the rest stays, and what a balancer would refuse is not written."""

from datetime import UTC, datetime

import pytest

from farhop.store.documents import splits
from farhop.store.documents.authored import Authorship, split_authorship
from farhop.store.documents.document import DocumentError
from regional_lb.scheduler import split

BY = Authorship("ann", "canary", datetime(2027, 1, 15, tzinfo=UTC))


def test_only_the_weights_of_one_model_change():
    before = b'{"m": {"weights": {"v1": 1}, "rules": [7]}, "n": {"sticky": "none"}}'
    document = splits.with_weights(before, "m", {"v1": 9.0, "v2": 1.0}, BY)
    weighted = {"m": {"weights": {"v1": 9.0, "v2": 1.0}, "rules": [7]}, "n": {"sticky": "none"}}
    assert splits.of_region(document) == weighted
    assert split_authorship(document)[1] == BY
    assert splits.of_region(splits.without(document, "m", BY)) == {"n": {"sticky": "none"}}
    assert splits.of_region(splits.with_weights(None, "m", {"v1": 1.0}, BY)) == {"m": {"weights": {"v1": 1.0}}}


@pytest.mark.parametrize("weights", [{}, {"v1": 0.0}, {"v1": -1.0}, {"v1": float("nan")}, {"v1": 2e6}, {"a b": 1.0},
                                     {str(n): 1.0 for n in range(17)}])  # fmt: skip
def test_weights_that_a_balancer_refuses_are_refused(weights):
    with pytest.raises(DocumentError) as caught:
        splits.with_weights(None, "m", weights, BY)
    assert caught.value.field == "weights"
    if weights:
        with pytest.raises(ValueError):
            split.SplitConfig(weights=weights)


def test_the_bounds_are_those_of_a_balancer():
    most = {str(n): splits.WEIGHT_MAX for n in range(splits.VERSIONS_MAX)}
    splits.checked(most)
    assert split.SplitConfig(weights=most).weights == most


@pytest.mark.parametrize(("document", "model"), [(b"nonsense", "m"), (b"[1]", "m"), (None, ""), (None, "a b")])
def test_what_cannot_be_changed_is_refused(document, model):
    with pytest.raises(DocumentError):
        splits.with_weights(document, model, {"v1": 1.0}, BY)
    with pytest.raises(DocumentError):
        splits.without(document, model, BY)


@pytest.mark.parametrize("text", ["", "v1", "v1=a", "v1=1,v1=2", "v1=1,"])
def test_text_that_is_no_weights_is_refused(text):
    with pytest.raises(DocumentError, match="weights"):
        splits.weights_of(text)


def test_text_is_read_with_spaces():
    assert splits.weights_of("v1=95, v2=5") == {"v1": 95.0, "v2": 5.0}
