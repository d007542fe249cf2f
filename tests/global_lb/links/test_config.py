"""What a global balancer's links add to the ways to the regions."""

from __future__ import annotations

import pytest
from inprocess import HOP, HOP_KEY
from pydantic import ValidationError

from farhop.service.config.region_connections import RegionConnections
from global_lb.links.config import LinksConfig


def test_regions_are_watched_and_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    process = {"region": "virginia", "instance": "g1", "admin": {"port": 1}, "hop": HOP}
    config = LinksConfig.model_validate({**process, "watch": {"ping_s": 2}, "tier_insecure": True})
    assert isinstance(config, RegionConnections)
    assert (config.watch.ping_s, config.allows("tokyo", "203.0.113.1"), config.balancer) == (2.0, True, "virginia/g1")
    with pytest.raises(ValidationError):
        LinksConfig.model_validate({**process, "watch": {"ping_s": 0}})
