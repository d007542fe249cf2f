from __future__ import annotations

import pytest
from pydantic import ValidationError

from entry_dns.links.config import NetworksConfig, Probe


def test_countries_are_taken_in_any_case() -> None:
    assert NetworksConfig(confine={"JP": ("jp",)}).confine == {"jp": ("jp",)}


@pytest.mark.parametrize("fault", [{"at": {"a": "nowhere"}}, {"scheme": "ftp"}, {"path": "ready"}, {"down_after": 0}])
def test_a_probe_that_cannot_work_is_refused(fault) -> None:
    with pytest.raises(ValidationError):
        Probe(**fault)
