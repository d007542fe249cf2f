"""Settings are checked once, and every error names its field."""

from typing import Any

import pytest
from pydantic import ValidationError

from farhop_lab.engine.settings import EngineSettings


def test_ports_listed_or_consecutive_or_free() -> None:
    assert EngineSettings(ports=[9001, 9005]).listen_ports() == [9001, 9005]
    assert EngineSettings(ports=[9001], replicas=3).listen_ports() == [9001, 9002, 9003]
    assert EngineSettings(ports=[0], replicas=2).listen_ports() == [0, 0]


def test_overrides_reach_the_gpu() -> None:
    gpu = EngineSettings(ports=[0], profile="h100", speedup=2, kv_blocks=10).gpu()
    assert (gpu.name, gpu.decode_floor_ms, gpu.kv_blocks, gpu.context_tokens) == ("h100", 3.1, 10, 160)


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("ports", {"ports": []}),
        ("ports", {"ports": [70_000]}),
        ("ports", {"ports": [9001, 9001]}),
        ("ports", {"ports": [65_535], "replicas": 2}),
        ("replicas", {"ports": [1, 2], "replicas": 3}),
        ("profile", {"ports": [0], "profile": "v100"}),
        ("speedup", {"ports": [0], "speedup": 0}),
        ("kv_blocks", {"ports": [0], "kv_blocks": 0}),
        ("mean_output_tokens", {"ports": [0], "mean_output_tokens": 0}),
        ("colour", {"ports": [0], "colour": "red"}),
    ],
)
def test_invalid_settings_are_named(field: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=field):
        EngineSettings(**settings)


def test_kv_events_have_a_port_for_each_replica() -> None:
    settings = EngineSettings(ports=[8001], replicas=2, kv_events_port=5557, kv_replay_port=6557)
    assert [settings.kv_ports(index) for index in (0, 1)] == [(5557, 6557), (5558, 6558)]
    assert EngineSettings(ports=[0], kv_events_port=5557).kv_ports(0) == (5557, None)
    assert EngineSettings(ports=[0]).kv_ports(0) is None
    with pytest.raises(ValidationError, match="needs --kv-events-port"):
        EngineSettings(ports=[0], kv_replay_port=5557)
    with pytest.raises(ValidationError, match="map"):
        EngineSettings.model_validate({"ports": [0], "kv_events_schema": "xml"})


def test_kv_travels_and_is_held_in_the_engines_own_time() -> None:
    link = EngineSettings(ports=[0], speedup=10, kv_link_gbps=100, kv_hold_s=20).link()
    assert link.hold_s == 2.0
    assert link.ms_per_token == pytest.approx(131_072 * 8 / 100e9 * 1e3 / 10)
