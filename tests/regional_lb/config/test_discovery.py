from __future__ import annotations

from typing import Any

import pytest
from inprocess import HOP, HOP_KEY
from pydantic import ValidationError

from regional_lb.config import KubernetesSource, RegionalConfig
from regional_lb.config.discovery import nameserver


@pytest.fixture(autouse=True)
def _hop_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)


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
    ("source", "where", "says"),
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
def test_a_source_that_makes_no_sense_is_named_with_the_remedy(source: dict[str, Any], where: str, says: str) -> None:
    assert says in problems(source)[where]


def test_a_source_stands_once() -> None:
    assert "file replicas.yaml stands twice" in problems(FILE, FILE)["discovery"]


def test_a_nameserver_is_an_address_with_or_without_a_port() -> None:
    assert nameserver("127.0.0.1:8600") == ("127.0.0.1", 8600)
    assert nameserver("10.0.0.2") == ("10.0.0.2", 53)
    assert nameserver("fd00::2") == ("fd00::2", 53)
    assert nameserver("[fd00::2]:5353") == ("fd00::2", 5353)
    for wrong in ("10.0.0.2:0", "10.0.0.2:x", "dns.example", ""):
        with pytest.raises(ValueError, match=r"must be an IP|1 to 65535"):
            nameserver(wrong)
