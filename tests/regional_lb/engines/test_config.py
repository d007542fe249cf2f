"""Engines as configured: what each is called, where its pages are, how it is probed, where more are found."""

from __future__ import annotations

from typing import Any

import pytest
from inprocess import HOP
from pydantic import ValidationError

from farhop.balance.machine import Address
from regional_lb.app.config import RegionalConfig
from regional_lb.engines.config import KubernetesSource, Probe, ReplicaConfig, Watch, nameserver, place_of


def test_a_replica_without_a_name_is_named_by_its_address() -> None:
    assert ReplicaConfig(url="http://gpu:8000", models=["m"]).label == "gpu:8000"
    assert ReplicaConfig(url="http://gpu:8000", models=["m"], name="a").label == "a"


def test_a_page_url_is_split_into_address_and_path() -> None:
    assert place_of("https://gpu/metrics") == (Address("gpu", 443, tls="gpu"), "/metrics")
    assert place_of("http://gpu:9400") == (Address("gpu", 9400), "/")


@pytest.mark.parametrize("url", ["ftp://gpu", "gpu:8000", "http://gpu:8000/v1", "http://u:p@gpu", "http://gpu:99999"])
def test_a_url_that_is_no_origin_is_refused_by_name(url: str) -> None:
    with pytest.raises(ValidationError, match="http://host:port"):
        ReplicaConfig(url=url, models=["m"])


def test_kv_event_sources_are_one_port_for_each_rank() -> None:
    plain = ReplicaConfig(url="http://gpu-1", models=["m"])
    assert plain.kv_sources == []
    found = ReplicaConfig(
        url="http://gpu-1", models=["m"], kv_events="tcp://gpu-1:5557", kv_replay="tcp://[fd00::1]:6000", kv_ranks=2
    )
    assert found.kv_sources == [
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


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"kind": "icmp"}, "kind"),
        ({"path": "health"}, "begin with /"),
        ({"live_path": "/a b"}, "without spaces"),
        ({"kind": "tcp", "path": "/health"}, "path is for kind http, and this is tcp; leave it out"),
        ({"kind": "grpc", "live_path": "/live"}, "live_path is for kind http"),
        ({"service": "llm"}, "service is for kind grpc"),
        ({"port": 0}, "port"),
        ({"generate_s": 0.5}, "1 s or more; 0 turns it off"),
        ({"warmup": 101}, "warmup"),
    ],
)
def test_a_probe_that_makes_no_sense_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Probe(**given)


def test_how_often_engines_are_looked_at() -> None:
    assert (Watch().rise, Probe(kind="grpc", service="llm", port=8001).warmup) == (2, 0)
    with pytest.raises(ValidationError, match="probe_s"):
        Watch(probe_s=-1)


# -- where replicas are found


def document(*sources: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "region": "virginia", "instance": "r1", "admin": {"port": 1}, "tier": {"port": 2}, "control": {"port": 3},
        "hop": HOP, "discovery": list(sources), **more,
    }  # fmt: skip


def problems(*sources: dict[str, Any], **more: Any) -> dict[str, str]:
    with pytest.raises(ValidationError) as caught:
        RegionalConfig.model_validate(document(*sources, **more))
    return {".".join(map(str, error["loc"])): error["msg"] for error in caught.value.errors()}


FILE = {"kind": "file", "path": "replicas.yaml"}


def test_with_a_source_there_need_be_no_replica_and_what_is_found_later_may_be_named() -> None:
    config = RegionalConfig.model_validate(
        document(
            FILE, {"kind": "etcd"}, {"kind": "dns", "host": "_vllm._tcp.gpus.example"},
            {"kind": "dns", "host": "gpus.example", "record": "address", "port": 8000},
            {"kind": "kubernetes", "service": "vllm", "replica": {"models": ["llama"], "slots": 64}},
            policy={"name": "weighted-random", "weights": {"later": 2}}, policies={"qwen": "p2c"}, engine_tls={},
        )
    )  # fmt: skip
    assert config.replicas == []
    assert [source.label for source in config.discovery] == [
        "file replicas.yaml", "etcd", "dns srv _vllm._tcp.gpus.example", "dns address gpus.example:8000",
        "kubernetes service vllm",
    ]  # fmt: skip
    kubernetes = config.discovery[-1]
    assert isinstance(kubernetes, KubernetesSource)
    assert (kubernetes.replica.models, kubernetes.replica.slots) == (["llama"], 64)


def test_without_a_source_there_must_be_a_replica() -> None:
    assert "say under `discovery` where they are found" in problems()["replicas"]


def test_a_replica_whose_models_are_asked_for_may_serve_any() -> None:
    asked = [{"url": "http://a:1", "models": []}]
    config = RegionalConfig.model_validate(document(replicas=asked, policies={"qwen": "p2c"}))
    assert config.replicas[0].models == []


@pytest.mark.parametrize(
    ("source", "field_path", "says"),
    [
        ({"kind": "consul"}, "discovery.0", "'file', 'etcd', 'dns', 'kubernetes'"),
        ({"kind": "file"}, "discovery.0.file.path", "required"),
        ({"kind": "etcd", "replica": {"engine": "tensorrt"}}, "discovery.0.etcd.replica.engine", "there is vllm"),
        ({"kind": "etcd", "replica": {"url": "http://a:1"}}, "discovery.0.etcd.replica.url", "not permitted"),
        ({"kind": "dns", "host": "a..b"}, "discovery.0.dns.host", "must be a DNS name"),
        ({"kind": "dns", "host": "a.b", "record": "address"}, "discovery.0.dns", "port: give one"),
        ({"kind": "dns", "host": "a.b", "port": 1}, "discovery.0.dns", "none with `srv`"),
        ({"kind": "dns", "host": "a.b", "ttl_floor_s": 99}, "discovery.0.dns", "ttl_floor_s"),
        ({"kind": "dns", "host": "a.b", "nameservers": ["ns1"]}, "discovery.0.dns.nameservers", "an IP address"),
        ({"kind": "kubernetes"}, "discovery.0.kubernetes", "give one of service, selector and pool"),
        ({"kind": "kubernetes", "service": "a", "pool": "b"}, "discovery.0.kubernetes", "give one of"),
        ({"kind": "kubernetes", "pool": "b", "port": 1}, "discovery.0.kubernetes", "targetPorts"),
        ({"kind": "kubernetes", "service": "../x"}, "discovery.0.kubernetes.service", "match"),
        ({"kind": "kubernetes", "service": "a", "api": "ftp://x"}, "discovery.0.kubernetes.api", "match"),
    ],
)  # fmt: skip
def test_a_source_that_makes_no_sense_is_named_with_the_remedy(
    source: dict[str, Any], field_path: str, says: str
) -> None:
    assert says in problems(source)[field_path]


def test_a_source_given_twice_is_refused() -> None:
    assert "file replicas.yaml is given twice" in problems(FILE, FILE)["discovery"]


def test_a_nameserver_is_an_address_with_or_without_a_port() -> None:
    assert nameserver("127.0.0.1:8600") == ("127.0.0.1", 8600)
    assert nameserver("10.0.0.2") == ("10.0.0.2", 53)
    assert nameserver("fd00::2") == ("fd00::2", 53)
    assert nameserver("[fd00::2]:5353") == ("fd00::2", 5353)
    for wrong in ("10.0.0.2:0", "10.0.0.2:x", "dns.example", ""):
        with pytest.raises(ValueError, match=r"must be an IP|1 to 65535"):
            nameserver(wrong)
