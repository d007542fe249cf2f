"""Which requests may not enter a region, or not stay: by token, law, model and time, in that order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from worlds import REGIONS, law, replica, request

from farhop.balance import outcome
from regional_lb.fleet.view import view_of
from regional_lb.scheduler.admission import ForeignConfig, refusal

VIEW = view_of([replica("r1")])
LAW = law()


@pytest.mark.parametrize(
    ("fields", "reason", "words"),
    [
        ({"lawful": frozenset({"tokyo"}), "model": "no", "deadline": 0.0}, outcome.UNLAWFUL_HERE, "hop token"),
        ({"tenant": "german", "model": "no", "deadline": 0.0}, outcome.UNLAWFUL_HERE, "allows only DE"),
        ({"key": "unknown"}, outcome.UNLAWFUL_HERE, "no key"),
        ({"narrow": (("uk",), ("eu",))}, outcome.UNLAWFUL_HERE, "asked to stay within eu"),
        ({"model": "no", "deadline": 0.0}, outcome.MODEL_NOT_HERE, "no replica in region london"),
        ({"deadline": 5.0}, outcome.DEADLINE, "deadline"),
    ],
)
def test_each_refusal_names_its_outcome_and_reason(fields, reason: outcome.Outcome, words: str) -> None:
    refused = refusal(request("a", **fields), "london", LAW, VIEW, now=5.0)
    assert refused is not None
    assert refused.outcome is reason
    assert words in refused.detail


@given(
    st.sampled_from(("anyone", "european", "german", "lost", "stateless", "nobody")),
    st.sampled_from(sorted(REGIONS)),
    st.none() | st.frozensets(st.sampled_from(sorted(REGIONS))),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_request_enters_only_if_lawful_by_token_and_by_law(
    tenant: str, region: str, token: frozenset[str] | None
) -> None:
    one = request("a", tenant=tenant, lawful=token)
    lawful = region in LAW.verdict(tenant, one.model).lawful and (token is None or region in token)
    assert (refusal(one, region, LAW, VIEW, now=0.0) is None) is lawful


def test_the_last_resort_is_kept_no_more_from_than_any_foreign_refusal() -> None:
    assert ForeignConfig(reserve_share=0.2, last_resort_reserve_share=0.2)
    with pytest.raises(ValidationError, match=r"last_resort_reserve_share 0\.05 is above reserve_share 0\.01: set it"):
        ForeignConfig(reserve_share=0.01)
    with pytest.raises(ValidationError, match="reserve_share"):
        ForeignConfig(reserve_share=-1)
