"""Splits as they are written."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from farhop.balance.machine import Mark
from regional_lb.config.split import SplitConfig

WRITTEN = {
    "rules": [
        {"header": {"name": "X-Canary", "value": "yes"}, "version": "v2"},
        {"cookie": {"name": "ab", "value": "b"}, "version": "v2"},
        {"tenant": "acme", "version": "v1"},
    ],
    "weights": {"v1": 95, "v2": 5},
}


def test_a_rule_looks_at_one_thing() -> None:
    config = SplitConfig.model_validate(WRITTEN)
    marks = [rule.mark for rule in config.rules]
    assert marks == [Mark("header", "x-canary", "yes"), Mark("cookie", "ab", "b"), None]
    assert (config.sticky, config.fallback, config.pinning, config.versions) == ("session", True, False, {"v1", "v2"})


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"rules": [{"version": "v2"}]}, "a rule looks at one thing"),
        ({"rules": [{"version": "v2", "tenant": "a", "cookie": {"name": "a", "value": "b"}}]}, "one thing"),
        ({"rules": [{"tenant": "a"}]}, "version"),
        ({"rules": [{"version": "v2", "header": {"name": "x-farhop-canary", "value": "b"}}]}, "is not passed on"),
        ({"rules": [{"version": "v2", "header": {"name": "Authorization", "value": "b"}}]}, "is not passed on"),
        ({"rules": [{"version": "v2", "header": {"name": "x-canary", "value": " b"}}]}, "pattern"),
        ({"weights": {"v1": -1}}, "greater than or equal to 0"),
        ({"weights": {"v1": float("nan")}}, "less than or equal to"),
        ({"weights": {"v1": 0, "v2": 0}}, "all are 0"),
        ({"weights": {"v 1": 1}}, "pattern"),
        ({"weights": {f"v{n}": 1 for n in range(17)}}, "at most 16"),
        ({"sticky": "user"}, "'session', 'tenant' or 'none'"),
        ({"wieghts": {}}, "Extra inputs"),
    ],
)
def test_what_makes_no_sense_is_told(written: dict, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        SplitConfig.model_validate(written)
