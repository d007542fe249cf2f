from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from inprocess import HOP
from pydantic import ValidationError

from farhop.balance.machine import Address
from farhop.store.documents.report import RATE_LIMIT_MS
from farhop_lab.world.certs import Authority
from regional_lb.app.config import RegionalConfig, TokenizerFiles
from regional_lb.engines.config import place_of


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
    assert (first.address, first.label) == (Address("10.0.0.1", 8000), "10.0.0.1:8000")
    assert (second.address, second.label) == (Address("gpu-2", 80), "two")
    assert third.address == Address("fd00::1", 9000)
    assert config.client is None


def test_an_engine_over_tls_is_verified_by_its_own_name() -> None:
    replicas = [{"url": f"https://{host}", "models": ["a"]} for host in ("gpu-1:8443", "gpu-2", "[fd00::1]")]
    config = RegionalConfig.model_validate(document(replicas=replicas))
    assert [replica.address for replica in config.replicas] == [
        Address("gpu-1", 8443, tls="gpu-1"), Address("gpu-2", 443, tls="gpu-2"), Address("fd00::1", 443, tls="fd00::1"),
    ]  # fmt: skip


def test_a_split_speaks_of_versions_that_are_served() -> None:
    v1 = {"version": "v1"}
    split = {"llama": {"weights": {"v1": 1}, "rules": [{"tenant": "acme", "version": "v1"}]}}
    config = RegionalConfig.model_validate(document(v1, splits=split))
    assert (config.replicas[0].version, config.splits["llama"].versions) == ("v1", {"v1"})
    assert "splits.llama: no replica serves this model in version v1; there is none" in problems(splits=split)[""]
    split["llama"]["weights"] = {"v2": 1}
    assert "in version v2; there is v1" in problems(v1, splits=split)[""]
    assert "splits.qwen: no replica serves" in problems(v1, splits={"qwen": {"weights": {"v1": 1}}})[""]
    assert "replicas.0.version" in problems({"version": "v 1"})


def test_tls_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("server")
    files = {"cert_file": pair.cert_file, "key_file": pair.key_file}
    assert "tier.tls, control.tls: give both or neither" in problems(tier={"port": 1, "tls": files})[""]
    assert "no replica has an https:// url" in problems(engine_tls={"ca_file": authority.ca_file})[""]
    found = problems(client={"port": 1, "tls": {**files, "key_file": "/none"}}, admin={"port": 1, "tls": {}})
    assert (
        found["client.tls"]
        == "Value error, key_file: /none: No such file or directory; check the path and its permissions"
    )
    assert {"admin.tls.cert_file", "admin.tls.key_file"} < set(found)


@pytest.mark.parametrize("name", ["tier", "control"])
def test_listener_off_loopback_needs_an_advertised_address(name: str) -> None:
    open_port = {name: {"host": "0.0.0.0", "port": 2, "insecure": True}}
    assert f"advertise: is not given, and {name} is not on loopback" in problems(**open_port)[""]
    for given in ("10.1.0.7", "127.0.0.1"):  # the latter: all others are on this machine, too
        assert RegionalConfig.model_validate(document(advertise=given, **open_port)).advertise == given


@pytest.mark.parametrize(
    "url",
    [
        "", "gpu-1:8000", "https://gpu-1:8000/v1", "http://", "http://:8000", "http://gpu-1:8000/v1", "http://gpu-1:99999",
        "http://gpu-1:0", "http://gpu-1:x", "http://gpu-1?x=1", "http://gpu-1#x", "http://user:pw@gpu-1:8000",
        "http://[::1", "ftp://gpu-1",
    ],
)  # fmt: skip
def test_a_url_must_be_http_to_a_host_and_port(url: str) -> None:
    found = problems({"url": url})
    assert list(found) == ["replicas.0.url"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("models", None),
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
        ("colour", "red"),
    ],
)
def test_replica_values_that_a_report_cannot_carry_are_refused_at_the_start(field: str, value: Any) -> None:
    (field_path,) = problems({field: value})
    assert field_path.startswith(f"replicas.0.{field}")


def test_two_replicas_of_one_name_are_refused() -> None:
    twice = {"url": "http://a:1", "models": ["m"]}
    assert "a:1 is given twice" in problems(replicas=[twice, twice])[""]
    assert (
        "one is given twice"
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


def test_where_redirected_clients_come_is_a_plain_url_of_one_instance() -> None:
    client = {"port": 4, "url": "https://eu.example:8443"}
    config = RegionalConfig.model_validate(document(client=client))
    assert config.client is not None
    assert config.client.url == "https://eu.example:8443"
    for url in ("eu.example", "https://eu.example/v1", "https://eu.example?x", "ftp://eu.example", ""):
        assert "client.url" in problems(client={**client, "url": url})
    assert "each its own port" in problems(client={**client, "reuse_port": True})["client"]


def test_the_engines_key_cannot_write_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARHOP_TEST_ENGINE", "sk-1\r\nx-evil: 1")
    found = problems(engine_key="env:FARHOP_TEST_ENGINE")
    assert "printable ASCII" in found["engine_key"]
    assert "sk-1" not in repr(found)
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
    (field_path,) = problems(**{part: value})
    assert field_path == f"{part}.{next(iter(value))}"


def test_a_policy_is_a_name_or_has_options() -> None:
    plain = RegionalConfig.model_validate(document())
    assert (plain.policy.name, plain.policies) == ("predictive", {})
    config = RegionalConfig.model_validate(
        document(
            {"name": "r1"},
            policy="p2c",
            policies={"llama": {"name": "weighted-random", "weights": {"r1": 2}}},
            session={"cookie": "sid"},
        )
    )
    assert (config.policy.name, config.policies["llama"].weights) == ("p2c", {"r1": 2.0})
    assert (config.session.header, config.session.cookie, config.session.field) == ("x-session-id", "sid", "user")


@pytest.mark.parametrize(
    ("more", "field_path", "says"),
    [
        ({"policy": "fastest"}, "policy", "no policy 'fastest'; known are predictive, prefix, least-load,"),
        ({"policy": {"name": ["p2c"]}}, "policy", "known are"),
        ({"policies": {"llama": "fastest"}}, "policies.llama", "known are"),
        ({"policy": {"name": "prefix", "weight": 2}}, "policy", "its options: load_factor, prefix_bytes"),
        ({"policy": {"name": "p2c", "load_factor": 2}}, "policy", "'load_factor' of policy p2c; its options: none"),
        ({"policy": {"name": "prefix", "load_factor": 0.5}}, "policy.load_factor", "greater than or equal to 1"),
        ({"policy": {"name": "weighted-random", "weights": {"r9": 1}}}, "", "policy.weights: no replica 'r9'; known"),
        ({"policies": {"qwen": "p2c"}}, "", "policies.qwen: no replica serves this model"),
        ({"policy": 7}, "policy", "dictionary"),
        ({"session": {"header": "a b"}}, "session.header", "match"),
    ],
)  # fmt: skip
def test_an_unknown_policy_or_option_is_named_with_those_that_are_known(
    more: dict[str, Any], field_path: str, says: str
) -> None:
    assert says in problems(**more)[field_path]


def test_an_unknown_engine_kind_is_reported_with_the_known_ones() -> None:
    found = problems({"url": "http://a:1", "engine": "tensorrt"})
    assert found == {
        "replicas.0.engine": "Value error, is unknown; there is vllm, sglang, tgi, trtllm, llamacpp, lmdeploy, "
        "aphrodite, triton, and without one it is found out"
    }


@pytest.mark.parametrize("field", ["metrics", "dcgm"])
@pytest.mark.parametrize(
    "url", ["http://a:9400", "ftp://a:9400/metrics", "a:9400/metrics", "http://a:0/m", "http://a/m?x=1"]
)
def test_where_a_page_is_must_be_a_plain_url_with_a_path(field: str, url: str) -> None:
    assert list(problems({"url": "http://a:1", field: url})) == [f"replicas.0.{field}"]
    assert place_of("http://a:9400/metrics") == (Address("a", 9400), "/metrics")


def test_tokenizers_are_of_models_that_are_served_and_adapters_have_their_bases() -> None:
    files = {"file": "tokenizer.json"}
    assert "correct its name" in problems(tokenizers={"nobody": files})[""]
    other = {"other": {"file": "other.json"}}
    config = RegionalConfig.model_validate(
        document({"adapters": ["sql", "other"]}, tokenizers={"llama": files, **other})
    )
    assert {name: named.file for name, named in config.tokenizer_of().items()} == {
        "llama": "tokenizer.json", "sql": "tokenizer.json", "other": "other.json",
    }  # fmt: skip
    RegionalConfig.model_validate(document({"adapters": ["sql"]}, policies={"sql": "least-load"}))


def test_a_prefill_replica_needs_a_replica_that_decodes_the_same_model() -> None:
    alone = {"url": "http://10.0.0.1:8000", "models": ["llama", "qwen"], "role": "prefill"}
    answers = {"url": "http://10.0.0.2:8000", "models": ["llama"], "role": "decode"}
    (found,) = problems(replicas=[alone, answers]).values()
    assert "'qwen' has replicas of role prefill only; give it one of role decode or mixed" in found
    config = RegionalConfig.model_validate(document(replicas=[alone, {**answers, "models": ["llama", "qwen"]}]))
    assert [replica.role for replica in config.replicas] == ["prefill", "decode"]
    assert RegionalConfig.model_validate(document()).replicas[0].role == "mixed"
    assert "replicas.0.role" in problems({"role": "both"})


def test_sglangs_decode_engines_need_one_that_prefills_in_their_way() -> None:
    decode = {"url": "http://10.0.0.2:8000", "models": ["llama"], "role": "decode", "engine": "sglang"}
    prefill = {"url": "http://10.0.0.1:8000", "models": ["llama"], "role": "prefill"}
    (found,) = problems(replicas=[prefill, decode]).values()
    assert "'llama' has a decode engine of SGLang's, which answers nothing alone" in found
    RegionalConfig.model_validate(document(replicas=[{**prefill, "disaggregation": "sglang"}, decode]))


def test_a_template_may_be_left_out_and_a_file_may_not() -> None:
    assert TokenizerFiles(file="a.json").template is None
    with pytest.raises(ValidationError, match="file"):
        TokenizerFiles.model_validate({"template": "t"})
    with pytest.raises(ValidationError, match="template"):
        TokenizerFiles(file="a.json", template="")
