"""Health as configured: defaults are the machine's, and nonsense is refused by name with the remedy."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from farhop.balance.health import HealthConfig
from regional_lb.config import Health, Probe


def test_defaults_are_those_of_the_machine() -> None:
    machine, told = HealthConfig(), Health()
    for name in ("streak", "eject_s", "eject_share_max", "panic_share", "slow_start_s", "outlier_factor"):
        assert getattr(told, name) == getattr(machine, name)


@pytest.mark.parametrize(
    ("part", "given", "says"),
    [
        (Health, {"outlier_factor": 1.2}, "1.5 or more"),
        (Health, {"eject_share_max": 1.5}, "eject_share_max"),
        (Health, {"streak": 0}, "streak"),
        (Health, {"slow_start_s": -1}, "slow_start_s"),
        (Probe, {"kind": "icmp"}, "kind"),
        (Probe, {"path": "health"}, "begin with /"),
        (Probe, {"live_path": "/a b"}, "without spaces"),
        (Probe, {"kind": "tcp", "path": "/health"}, "path is for kind http, and this is tcp; leave it out"),
        (Probe, {"kind": "grpc", "live_path": "/live"}, "live_path is for kind http"),
        (Probe, {"service": "llm"}, "service is for kind grpc"),
        (Probe, {"port": 0}, "port"),
        (Probe, {"generate_s": 0.5}, "1 s or more; 0 turns it off"),
        (Probe, {"warmup": 101}, "warmup"),
    ],
)
def test_nonsense_is_refused_and_told(part: type[Health | Probe], given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        part(**given)


def test_what_is_off_is_zero() -> None:
    assert Health(outlier_factor=0, slow_start_s=0, panic_share=0).outlier_factor == 0.0
    assert Probe(kind="grpc", service="llm", port=8001).warmup == 0
