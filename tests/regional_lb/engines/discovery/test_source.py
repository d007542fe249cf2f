from __future__ import annotations

import pytest

from farhop.balance.machine import Address
from regional_lb.engines.config import Template
from regional_lb.engines.discovery.source import EndpointError, at, replica_of

TEMPLATE = Template(models=["m"], engine="sglang", slots=8, scheme="https")


def test_template_fills_unset_fields_of_an_endpoint() -> None:
    replica = replica_of(TEMPLATE, {"url": "http://a:1", "slots": 9}, "[0]", name="one")
    assert (replica.models, replica.engine, replica.slots, replica.label) == (["m"], "sglang", 9, "one")
    found = at(TEMPLATE, "fd00::1", 8000, "", "x")
    assert found.address == Address("fd00::1", 8000, tls="fd00::1")


def test_every_fault_is_named_with_its_place() -> None:
    with pytest.raises(EndpointError) as caught:
        replica_of(TEMPLATE, {"url": "nowhere", "engine": "tensorrt", "colour": 1}, "[3]")
    lines = str(caught.value).split("\n")
    assert {line.split(":")[0] for line in lines} == {"[3].url", "[3].engine", "[3].colour"}
    with pytest.raises(EndpointError, match=r"x: must be a mapping"):
        replica_of(TEMPLATE, ["a"], "x")
    with pytest.raises(EndpointError, match=r"x\.name: follows from the source"):
        replica_of(TEMPLATE, {"url": "http://a:1", "name": "n"}, "x", name="m")
