from __future__ import annotations

from typing import Any

import pytest
from inprocess import HOP
from pydantic import ValidationError

from farhop.balance.health.pilot_light import PilotConfig
from farhop.balance.retry import TRANSPORT_RETRIES_MAX
from farhop.config import ConfigError
from farhop.service.config.process import Limits
from farhop_lab.sim.sites import Watching
from global_lb.app.config import GlobalConfig
from regional_lb.scheduler.queue import QueueConfig
from topology.model import Region, Topology


def document(**more: Any) -> dict[str, Any]:
    return {"region": "virginia", "instance": "g1", "admin": {"port": 1}, "listen": {"port": 2}, "hop": HOP, **more}


def test_a_minimal_global_configuration_has_its_defaults() -> None:
    config = GlobalConfig.model_validate(document())
    assert config.listen.host == "127.0.0.1"
    assert config.watch.report_age_s == 3.0  # three reports missed


def test_default_limits_exceed_the_regional_ones() -> None:
    """By default: what waits longest for an inner limit is told, or asked elsewhere there, before an outer one."""
    inner, outer = Limits(), GlobalConfig.model_validate(document()).limits
    attempts = 1 + TRANSPORT_RETRIES_MAX
    assert outer.first_byte_s >= attempts * (inner.first_byte_s + QueueConfig().wait_s) + inner.connect_s
    assert outer.whole_answer_s > inner.whole_answer_s
    assert outer.between_bytes_s > inner.between_bytes_s
    assert outer.request_s >= outer.first_byte_s
    assert Watching().first_byte_s == outer.first_byte_s
    assert (Watching().whole_answer_s, Watching().between_bytes_s) == (outer.whole_answer_s, outer.between_bytes_s)


def test_its_name_among_balancers_is_unique_in_the_fleet() -> None:
    """Instances are named per region: two that share a name must not share what a region acknowledges."""
    here = GlobalConfig.model_validate(document())
    there = GlobalConfig.model_validate(document(region="tokyo"))
    assert here.balancer == "virginia/g1"
    assert here.balancer != there.balancer


@pytest.mark.parametrize(
    ("field", "value", "field_path"),
    [
        ("listen", None, "listen"),
        ("listen", {"port": -1}, "listen.port"),
        ("watch", {"ping_s": 0}, "watch.ping_s"),
        ("watch", {"ping_timeout_s": float("inf")}, "watch.ping_timeout_s"),
        ("watch", {"report_age_s": -3}, "watch.report_age_s"),
        ("watch", {"pingers": 3}, "watch.pingers"),
        ("trie_bytes", -1, "trie_bytes"),
        ("replicas", [], "replicas"),
        ("instance", "a/b", "instance"),
        ("instance", "", "instance"),
    ],
)
def test_a_wrong_value_is_reported_by_its_path(field: str, value: Any, field_path: str) -> None:
    with pytest.raises(ValidationError) as caught:
        GlobalConfig.model_validate(document(**{field: value}))
    assert [".".join(map(str, error["loc"])) for error in caught.value.errors()] == [field_path]


@pytest.mark.parametrize(
    ("route", "message"),
    [
        ({"policy": "fastest"}, "no policy 'fastest'; known are predictive, nearest"),
        ({"policy": "nearest", "fill_at": 0.5}, "fill_at is no option of policy nearest; its options: none"),
        ({"policy": "failover"}, "regions: give them in order"),
        ({"policy": "failover", "regions": ["tokyo", "tokyo"]}, "one is given twice"),
        ({"policy": "weighted", "weights": {"tokyo": 0}}, "none is above 0"),
        ({"canary": {"tokyo": 0.6, "paris": 0.6}}, "the shares come to 1.2; at most 1"),
        ({"foreign_quota": 1.5}, "foreign_quota"),
        ({"answer": "resume"}, "answer"),
        ({"redirect_bytes": 9}, "goes with `answer: redirect`"),
        ({"bias_ms": {"to kyo": 1}}, "bias_ms"),
        ({"usd_weight_ms": float("inf")}, "usd_weight_ms"),
        ({"speed": 1}, "speed"),
        ("nearest", "routes.0"),
    ],
)
def test_a_route_that_cannot_stand_is_reported_with_its_field(route: Any, message: str) -> None:
    with pytest.raises(ValidationError, match="routes") as refused:
        GlobalConfig.model_validate(document(routes=[route]))
    assert message in str(refused.value)


def test_pilot_lights_must_be_regions_of_the_topology_and_not_all_of_them() -> None:
    regions = {name: Region(name, name, "xx", frozenset(), 0.0, 0.0) for name in ("tokyo", "paris")}
    world = Topology("w", 1, regions)
    config = GlobalConfig.model_validate(document(pilot_light={"tokyo": {"sleep_after_s": 60}}))
    assert config.pilots_in(world) == {"tokyo": PilotConfig(sleep_after_s=60.0)}
    with pytest.raises(ConfigError, match="pilot_light: no region 'rome' in the topology; known are paris, tokyo"):
        GlobalConfig.model_validate(document(pilot_light={"rome": {}})).pilots_in(world)
    with pytest.raises(ConfigError, match="every region is one"):
        GlobalConfig.model_validate(document(pilot_light={"tokyo": {}, "paris": {}})).pilots_in(world)
    with pytest.raises(ValidationError, match="sleep_after_s"):
        GlobalConfig.model_validate(document(pilot_light={"tokyo": {"sleep_after_s": -1}}))
