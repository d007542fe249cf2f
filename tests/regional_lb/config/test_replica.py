"""One engine endpoint: what it is called, and where its pages are."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from farhop.balance.machine import Address
from regional_lb.config import ReplicaConfig, place_of


def test_its_name_is_its_address_unless_it_has_one() -> None:
    assert ReplicaConfig(url="http://gpu:8000", models=["m"]).label == "gpu:8000"
    assert ReplicaConfig(url="http://gpu:8000", models=["m"], name="a").label == "a"


def test_a_place_is_an_address_and_a_path() -> None:
    assert place_of("https://gpu/metrics") == (Address("gpu", 443, tls="gpu"), "/metrics")
    assert place_of("http://gpu:9400") == (Address("gpu", 9400), "/")


@pytest.mark.parametrize("url", ["ftp://gpu", "gpu:8000", "http://gpu:8000/v1", "http://u:p@gpu", "http://gpu:99999"])
def test_what_is_no_origin_is_refused_and_told(url: str) -> None:
    with pytest.raises(ValidationError, match="http://host:port"):
        ReplicaConfig(url=url, models=["m"])


def test_where_kv_events_are() -> None:
    plain = ReplicaConfig(url="http://gpu-1", models=["m"])
    assert plain.kv_sources == []
    told = ReplicaConfig(
        url="http://gpu-1", models=["m"], kv_events="tcp://gpu-1:5557", kv_replay="tcp://[fd00::1]:6000", kv_ranks=2
    )
    assert told.kv_sources == [
        ("tcp://gpu-1:5557", "tcp://[fd00::1]:6000"), ("tcp://gpu-1:5558", "tcp://[fd00::1]:6001"),
    ]  # fmt: skip
    alone = ReplicaConfig(url="http://gpu-1", models=["m"], kv_events="tcp://gpu-1:5557")
    assert alone.kv_sources == [("tcp://gpu-1:5557", "")]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"kv_events": "tcp://*:5557"}, "kv_events\n.*must look like tcp://host:port"),
        ({"kv_events": "ipc:///tmp/x"}, "must look like"),
        ({"kv_events": "tcp://gpu:0"}, "must look like"),
        ({"kv_events": "tcp://gpu:65536"}, "must look like"),
        ({"kv_replay": "tcp://gpu:1"}, "mean nothing without kv_events"),
        ({"kv_ranks": 2}, "mean nothing without kv_events"),
        ({"kv_events": "tcp://gpu:65535", "kv_ranks": 2}, "kv_events: the ports of 2 ranks"),
        ({"adapters": ["m"]}, "adapters: m stands among models, too"),
    ],
)
def test_kv_events_and_adapters_that_make_no_sense(given, says) -> None:
    with pytest.raises(ValidationError, match=says):
        ReplicaConfig.model_validate({"url": "http://gpu", "models": ["m"], **given})


def test_adapters_are_served_beside_models() -> None:
    assert ReplicaConfig(url="http://gpu", models=["m"], adapters=("sql",)).served == {"m", "sql"}


def test_how_two_engines_share_a_request() -> None:
    def one(**fields: object) -> ReplicaConfig:
        return ReplicaConfig.model_validate({"url": "http://gpu-1", "models": ["m"], **fields})

    assert (one().handover, one(engine="vllm").handover, one(engine="sglang").handover) == ("vllm", "vllm", "sglang")
    assert one(engine="sglang", disaggregation="vllm").handover == "vllm"
    assert one(role="prefill", disaggregation="sglang").bootstrap_port == 8998
    for fields in ({}, {"engine": "vllm"}, {"disaggregation": "vllm"}):
        with pytest.raises(ValidationError, match="bootstrap_port: is SGLang's way; give disaggregation: sglang"):
            one(role="prefill", bootstrap_port=9000, **fields)
    assert one(role="prefill", engine="sglang", bootstrap_port=9000).bootstrap_port == 9000
    with pytest.raises(ValidationError, match=r"disaggregation[\s\S]*'vllm' or 'sglang'"):
        one(disaggregation="mooncake")
