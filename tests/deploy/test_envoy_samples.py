"""What both samples for Envoy must say, looked at without an Envoy."""

import json

import machine
import pytest
import yaml


@pytest.mark.parametrize("name", ["envoy.yaml", "picker.json"])
def test_an_endpoint_that_starts_after_envoy_is_found_within_a_second(name):
    # Envoy checks a cluster without traffic once a minute, unless it is configured otherwise.
    text = (machine.DEPLOY / "envoy" / name).read_text()
    document = json.loads(text) if name.endswith(".json") else yaml.safe_load(text)
    checks = [check for one in document["static_resources"]["clusters"] for check in one.get("health_checks", [])]
    assert checks
    assert {check["no_traffic_interval"] for check in checks} == {"1s"}
