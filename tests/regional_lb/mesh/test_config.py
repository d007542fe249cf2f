"""Where other balancers of the region are, as configured."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from regional_lb.mesh.config import PeersConfig


def test_addresses_are_host_and_port() -> None:
    assert PeersConfig().addresses == ()
    assert PeersConfig(addresses=["lb2.example:7002", "[::1]:7002"]).addresses == ("lb2.example:7002", "[::1]:7002")
    for wrong in ("lb2.example", "http://lb2:7002", "lb2:70000", ""):
        with pytest.raises(ValidationError, match=r"addresses\n.*host:port"):
            PeersConfig(addresses=[wrong])


def test_an_authority_is_needed() -> None:
    with pytest.raises(ValidationError, match=r"tls\.ca_file"):
        PeersConfig.model_validate({"tls": {}})
