from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from farhop.config import ConfigError, load, problems_of
from farhop.service.config import process
from farhop.service.config.process import Admin, ClientListen, Limits, Process
from farhop_lab.world.certs import Authority

SECRET = "correct-horse-battery-staple"


def document(**more: Any) -> dict[str, Any]:
    return {
        "region": "virginia",
        "instance": "g1",
        "admin": {"port": 9000},
        "hop": {"keys": {"k1": "env:FARHOP_TEST_HOP"}, "active": "k1"},
        **more,
    }


def loaded(folder: Path, text: str | bytes | dict[str, Any]) -> Process:
    path = folder / "config.yaml"
    data = yaml.safe_dump(text) if isinstance(text, dict) else text
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return load(Process, path)


def problems(folder: Path, text: str | bytes | dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loaded(folder, text)
    assert all(line.startswith(str(folder / "config.yaml")) for line in str(caught.value).splitlines())
    return caught.value.problems


def test_a_valid_configuration_gets_the_defaults(tmp_path: Path) -> None:
    config = loaded(tmp_path, document(limits={"drain_s": 0}, log_level="INFO"))
    assert config.topology == "three-regions"
    assert config.admin.host == "127.0.0.1"
    assert config.limits.body_bytes_max == 16 * 1024 * 1024
    assert config.log_level == "info"
    assert config.hop.secrets() == {"k1": b"x" * 32}


def test_every_limit_is_explained(tmp_path: Path) -> None:
    page = (Path(__file__).parents[4] / "docs" / "reference" / "configuration.md").read_text()
    assert [name for name in Limits.model_fields if f"`{name}`" not in page] == []


def test_a_shared_port_is_the_same_in_every_instance() -> None:
    assert ClientListen.model_validate({"port": 8080, "reuse_port": True}).reuse_port
    with pytest.raises(ValueError, match="needs a port that is the same in every instance, not 0"):
        ClientListen.model_validate({"port": 0, "reuse_port": True})


def test_every_error_at_once_with_its_path(tmp_path: Path) -> None:
    text = problems(
        tmp_path,
        document(
            instance="no spaces",
            admin={"port": 70000, "hots": "x"},
            limits={"body_bytes_max": 0, "request_s": float("inf"), "connect_s": "soon"},
            log_level="loud",
            etcd={"endpoints": "one"},
            extra=1,
        ),
    )
    paths = [line.split(":")[0] for line in text]
    assert sorted(paths) == sorted([
        "instance", "admin.port", "admin.hots", "limits.body_bytes_max", "limits.request_s", "limits.connect_s",
        "log_level", "etcd.endpoints", "extra",
    ])  # fmt: skip


@pytest.mark.parametrize("field", ["region", "instance", "admin", "hop"])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    text = document()
    del text[field]
    assert problems(tmp_path, text) == [f"{field}: Field required; give it, as docs/reference/configuration.md says"]


@pytest.mark.parametrize(
    ("hop", "message"),
    [
        ({"keys": {}, "active": "k1"}, "at least 1 item"),
        ({"keys": {"k1": "env:FARHOP_TEST_HOP"}, "active": "k2"}, "'k2' is not among k1"),
        ({"keys": {"no good": "env:FARHOP_TEST_HOP"}, "active": "no good"}, "key id 'no good' must be"),
        ({"keys": {"k1": "env:FARHOP_TEST_SHORT"}, "active": "k1"}, "has 5 bytes, at least 16"),
    ],
)
def test_a_hop_key_that_cannot_sign_is_refused_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hop: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("FARHOP_TEST_SHORT", "abcde")
    (problem,) = problems(tmp_path, document(hop=hop))
    assert problem.startswith("hop")
    assert message in problem
    assert "abcde" not in problem


@pytest.mark.parametrize(
    ("etcd", "message"),
    [
        ({"endpoints": ["nonsense"]}, "'nonsense' is not host:port"),
        ({"endpoints": ["a:1"], "cert_file": "x"}, "cert_file, key_file: give both"),
        ({"username": "root"}, "username, password: give both"),
    ],
)
def test_an_etcd_that_cannot_be_is_refused_here(tmp_path: Path, etcd: dict[str, Any], message: str) -> None:
    (problem,) = problems(tmp_path, document(etcd=etcd))
    assert problem.startswith("etcd: ")
    assert message in problem


@pytest.mark.parametrize(
    "text",
    [
        f'etcd: {{password: "{SECRET}',
        f"etcd: {{password: *{SECRET}}}",
        f"etcd: {{password: !{SECRET} x}}",
        f"hop: {SECRET}",
        f"hop: {{keys: {SECRET}, active: k1}}",
        f"hop: {{keys: [{SECRET}], active: k1}}",
        f"hop: {{keys: {{k1: [{SECRET}]}}, active: k1}}",
        f"etcd: {{password: {SECRET}, username: x}}",
        f"log_level: {SECRET}",
        f"instance: '{SECRET}!'",
        f"- {SECRET}\n  a: b",
        f"password: %{SECRET}",
    ],
)
def test_no_value_of_the_file_is_quoted_in_a_message(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, text)
    assert SECRET not in str(caught.value)


# -- the admin port


@pytest.fixture
def admin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("FARHOP_TEST_TOKEN", "t" * 32)
    monkeypatch.setenv("FARHOP_TEST_SHORT", "short")
    monkeypatch.setenv("FARHOP_TEST_SPACED", "two words that are long")
    authority = Authority(tmp_path)
    own = authority.issue("own")
    tls = {"cert_file": own.cert_file, "key_file": own.key_file}

    def make(**fields: Any) -> Admin:
        if fields.get("tls") == "mutual":
            fields["tls"] = {**tls, "client_ca_file": authority.ca_file}
        elif fields.get("tls"):
            fields["tls"] = tls
        return Admin.model_validate({"port": 9000, **fields})

    return make


OUTSIDE = {"host": "0.0.0.0"}
TOKEN = {"token": "env:FARHOP_TEST_TOKEN"}


def test_an_admin_port_off_loopback_needs_authentication(admin: Any) -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        assert admin(host=host).made("ex.org").of(None, None).may == "act"
    with pytest.raises(ValidationError, match=r"(?s)tokens.*client_ca_file.*127\.0\.0\.1.*insecure: true"):
        admin(**OUTSIDE, tls=True)
    with pytest.raises(ValidationError, match=r"tls: is not given"):
        admin(**OUTSIDE, tokens={"a": TOKEN})
    assert admin(**OUTSIDE, tls=True, tokens={"a": TOKEN}).made("ex.org").of(None, None).may == ""
    assert admin(**OUTSIDE, tls="mutual").made("ex.org").of(None, None).may == ""
    assert admin(**OUTSIDE, insecure=True).made("ex.org").of(None, None).may == "read"  # nothing acts unauthenticated
    assert admin(tokens={"a": TOKEN}).made("ex.org").of(None, None).may == ""  # on loopback, too, if tokens are given


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tokens": {"a": {"token": "env:FARHOP_TEST_SHORT"}}}, "16 or more"),
        ({"tokens": {"a": {"token": "env:FARHOP_TEST_SPACED"}}}, "no space"),
        ({"tokens": {"a": {"token": "in-the-clear-it-stands"}}}, "never in the clear"),
        ({"tokens": {"a": {**TOKEN, "may": "everything"}}}, "'metrics', 'read' or 'act'"),
        ({"operators": {"alice": "act"}}, "client_ca_file"),
        ({"advertise": "no host"}, "pattern"),
    ],
)
def test_an_impossible_admin_port_is_refused_by_name(admin: Any, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says) as caught:
        admin(**fields)
    assert "t" * 32 not in str(problems_of(caught.value))


@pytest.mark.parametrize(
    ("fields", "host", "reached"),
    [
        ({}, "", "127.0.0.1:9"),
        ({}, "127.0.0.1", "127.0.0.1:9"),
        ({}, "10.1.0.7", ""),  # others reach the process at another address, and this one only here
        ({"host": "::1"}, "", "[::1]:9"),
        ({**OUTSIDE, "insecure": True}, "10.1.0.7", "10.1.0.7:9"),
        ({**OUTSIDE, "insecure": True}, "", ""),
        ({"host": "10.9.9.9", "insecure": True}, "10.1.0.7", "10.9.9.9:9"),
        ({"advertise": "ops.example"}, "10.1.0.7", "ops.example:9"),
        ({"advertise": "[fd00::7]:8443"}, "", "[fd00::7]:8443"),
    ],
)
def test_the_advertised_admin_address_follows_the_configuration(
    admin: Any, fields: dict[str, Any], host: str, reached: str
) -> None:
    assert admin(**fields).reached_at(9, host) == reached


def test_the_resume_mode_is_read_by_model_and_yaml_off_is_accepted() -> None:
    text = process.ResumeConfig.model_validate(yaml.safe_load("{mode: off, modes: {m: text, o: off}}"))
    assert [text.of(model) for model in ("m", "o", "another")] == ["text", "off", "off"]
    assert text.on
    assert not process.ResumeConfig.model_validate({"mode": "off"}).on
    for wrong in ({"mode": "perhaps"}, {"mode": True}, {"modes": {"": "off"}}):
        with pytest.raises(ValidationError):
            process.ResumeConfig.model_validate(wrong)
