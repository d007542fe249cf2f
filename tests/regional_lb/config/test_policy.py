"""Policies as they are written: a name, or a name with the options it takes."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from regional_lb.config import POLICIES, PolicyConfig


@pytest.mark.parametrize("name", POLICIES)
def test_a_name_is_enough(name: str) -> None:
    assert PolicyConfig.model_validate(name).name == name


def test_an_option_of_another_policy_is_refused_with_what_it_takes() -> None:
    with pytest.raises(ValidationError, match=r"no option 'weights' of policy prefix; its options: load_factor"):
        PolicyConfig.model_validate({"name": "prefix", "weights": {"a": 1}})
