from __future__ import annotations

from typing import Any

import pytest
from inprocess import HOP, HOP_KEY
from pydantic import ValidationError

from farhop.balance.machine import Address
from farhop.store.report import RATE_LIMIT_MS
from regional_lb.config import RegionalConfig


@pytest.fixture(autouse=True)
def _hop_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)


def document(replica: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "region": "virginia",
        "instance": "r1",
        "admin": {"port": 1},
        "tier": {"port": 2},
        "control": {"port": 3},
        "hop": HOP,
        "replicas": [{"url": "http://10.0.0.1:8000", "models": ["llama"], **(replica or {})}],
        **more,
    }


def problems(replica: dict[str, Any] | None = None, **more: Any) -> dict[str, str]:
    with pytest.raises(ValidationError) as caught:
        RegionalConfig.model_validate(document(replica, **more))
    return {".".join(map(str, error["loc"])): error["msg"] for error in caught.value.errors()}


def test_a_replica_has_an_address_and_a_name() -> None:
    config = RegionalConfig.model_validate(
        document(replicas=[
            {"url": "http://10.0.0.1:8000/", "models": ["a"]},
            {"url": "http://gpu-2", "models": ["a"], "name": "two"},
            {"url": "http://[fd00::1]:9000", "models": ["a"]},
        ])
    )  # fmt: skip
    first, second, third = config.replicas
    assert (first.address, first.label, first.origin) == (
        Address("10.0.0.1", 8000), "10.0.0.1:8000", "http://10.0.0.1:8000",
    )  # fmt: skip
    assert (second.address, second.label) == (Address("gpu-2", 80), "two")
    assert (third.address, third.origin) == (Address("fd00::1", 9000), "http://[fd00::1]:9000")
    assert config.client is None


@pytest.mark.parametrize(
    "url",
    [
        "", "gpu-1:8000", "https://gpu-1:8000", "http://", "http://:8000", "http://gpu-1:8000/v1", "http://gpu-1:99999",
        "http://gpu-1:0", "http://gpu-1:x", "http://gpu-1?x=1", "http://gpu-1#x", "http://user:pw@gpu-1:8000",
        "http://[::1", "ftp://gpu-1",
    ],
)  # fmt: skip
def test_a_url_must_be_plain_http_to_a_host_and_port(url: str) -> None:
    told = problems({"url": url})
    assert list(told) == ["replicas.0.url"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("models", []),
        ("models", [""]),
        ("models", ["a b"]),
        ("models", ["m" * 257]),
        ("models", ["m\n"]),
        ("slots", 0),
        ("slots", 10**9),
        ("kv_tokens", 0),
        ("kv_tokens", 10**12),
        ("prefill_ms_per_token", 0),
        ("prefill_ms_per_token", float("inf")),
        ("prefill_ms_per_token", float("nan")),
        ("tpot_ms", RATE_LIMIT_MS * 2),
        ("tpot_ms", -1),
        ("gpu", "g" * 65),
        ("usd_per_hour", float("nan")),
        ("colour", "red"),
    ],
)
def test_what_a_report_could_not_say_is_refused_at_the_start(field: str, value: Any) -> None:
    (where,) = problems({field: value})
    assert where.startswith(f"replicas.0.{field}")


def test_two_replicas_of_one_name_are_refused() -> None:
    twice = {"url": "http://a:1", "models": ["m"]}
    assert "a:1 stands twice" in problems(replicas=[twice, twice])[""]
    assert (
        "one stands twice"
        in problems(replicas=[{**twice, "name": "one"}, {"url": "http://b:1", "models": ["m"], "name": "one"}])[""]
    )
    assert "replicas" in problems(replicas=[])


def test_more_models_than_a_report_may_hold_are_refused() -> None:
    many = [{"url": f"http://h{n}:1", "models": [f"m{n}-{k}" for k in range(60)]} for n in range(5)]
    assert "300 models, at most 256" in problems(replicas=many)[""]
    kinds = [{"url": f"http://h{n}:1", "models": ["m"], "gpu": f"g{n}"} for n in range(33)]
    assert "33 kinds of GPU, at most 32" in problems(replicas=kinds)[""]


@pytest.mark.parametrize(
    ("given", "host"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("lb-1.eu.internal", "lb-1.eu.internal"),
        ("fd00::7", "[fd00::7]"),
        ("[fd00::7]", "[fd00::7]"),
    ],
)
def test_the_advertised_host_is_ready_for_a_port(given: str, host: str) -> None:
    assert RegionalConfig.model_validate(document(advertise=given)).advertise == host


@pytest.mark.parametrize("given", ["", "host:80", "http://host", "a b", "[fd00::7", "-host"])
def test_an_advertised_host_that_is_none_is_refused(given: str) -> None:
    assert list(problems(advertise=given)) == ["advertise"]


def test_the_engines_key_cannot_write_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARHOP_TEST_ENGINE", "sk-1\r\nx-evil: 1")
    told = problems(engine_key="env:FARHOP_TEST_ENGINE")
    assert "printable ASCII" in told["engine_key"]
    assert "sk-1" not in repr(told)
    monkeypatch.setenv("FARHOP_TEST_ENGINE", "sk-1\n")
    key = RegionalConfig.model_validate(document(engine_key="env:FARHOP_TEST_ENGINE")).engine_key
    assert key is not None
    assert key.get_secret_value() == "sk-1"


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("queue", {"requests_max": -1}), ("queue", {"wait_s": 0}), ("queue", {"starvation_s": float("inf")}),
        ("watch", {"probe_s": 0}), ("watch", {"rise": 0}), ("watch", {"timeout_s": 1e6}), ("watch", {"pace": 1}),
    ],
)  # fmt: skip
def test_bounds_of_queue_and_watch(part: str, value: dict[str, Any]) -> None:
    (where,) = problems(**{part: value})
    assert where == f"{part}.{next(iter(value))}"
