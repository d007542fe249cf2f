"""Where regions may be reached, and by what name they are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from farhop.service.config.region_connections import RegionConnections
from farhop_lab.world.certs import Authority


def test_whether_a_region_speaks_tls_and_by_what_name_is_the_configurations_to_say(tmp_path: Path) -> None:
    process = {"region": "virginia", "instance": "g1", "admin": {"port": 1}}
    ca = {"ca_file": Authority(tmp_path).ca_file}

    def name(**more: Any) -> str | None:
        return RegionConnections.model_validate({**process, **more}).certified_name("tokyo")

    assert name() is None
    assert name(tier_tls=ca) == "tokyo.regional.farhop.internal"
    assert name(tier_tls=ca, trust_domain="f.example") == "tokyo.regional.f.example"
    assert name(tier_tls={**ca, "server_name": "{region}.tiers.example"}) == "tokyo.tiers.example"
    assert name(tier_tls={**ca, "plaintext_regions": ["tokyo"]}) is None
    assert name(tier_tls={**ca, "plaintext_regions": ["virginia"]}) == "tokyo.regional.farhop.internal"
    for wrong in ({}, {**ca, "server_name": "{host}"}, {**ca, "cert_file": "/none"}, {**ca, "verify": False}):
        with pytest.raises(ValidationError):
            name(tier_tls=wrong)
