from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import yaml
from pydantic import ValidationError

from farhop.relay.inbound import InboundLimits
from farhop.relay.outbound import OutboundLimits
from farhop.shell import config, wiring
from farhop.shell.config import ConfigError, Entry, Limits, Process, load

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


def test_a_good_one_has_its_defaults(tmp_path: Path) -> None:
    config = loaded(tmp_path, document(limits={"drain_s": 0}, log_level="INFO"))
    assert config.topology == "three-regions"
    assert config.admin.host == "127.0.0.1"
    assert config.limits.body_bytes_max == 16 * 1024 * 1024
    assert config.log_level == "info"
    assert config.hop.secrets() == {"k1": b"x" * 32}


def test_limits_have_the_defaults_of_what_they_bound(tmp_path: Path) -> None:
    limits = loaded(tmp_path, document()).limits
    assert wiring.inbound(limits) == InboundLimits()
    assert wiring.outbound(limits) == OutboundLimits()


def test_every_limit_is_explained(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()
    assert [name for name in Limits.model_fields if f"`{name}`" not in page] == []


# Of the process, or of requests.
NOT_OF_A_CONNECTION = ("buffered_bytes_max", "request_s", "drain_s", "requests_max", "traced_per_s_max")


def test_a_limit_reaches_what_it_bounds(tmp_path: Path) -> None:
    names = [name for name in Limits.model_fields if name not in NOT_OF_A_CONNECTION]
    limits = loaded(tmp_path, document(limits={name: 2000 + i for i, name in enumerate(names)})).limits
    put = [*msgspec.structs.astuple(wiring.inbound(limits)), *msgspec.structs.astuple(wiring.outbound(limits))]
    assert {2000 + i for i in range(len(names))} <= set(put)


def test_a_shared_port_is_the_same_in_every_instance() -> None:
    assert Entry.model_validate({"port": 8080, "reuse_port": True}).reuse_port
    with pytest.raises(ValueError, match="needs a port that is the same in every instance, not 0"):
        Entry.model_validate({"port": 0, "reuse_port": True})


def test_clients_leave_descriptors_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _which: (10_256, 20_000))
    told: list[str] = []
    log = SimpleNamespace(warning=lambda _event, problem: told.append(problem))
    slots = wiring.slots(aside=2000)
    assert slots.capacity == 4000
    for connections_max in (4000, 4001):
        wiring.check_descriptors(Limits(connections_max=connections_max), slots, log)  # type: ignore[arg-type]
    (problem,) = told
    assert problem.startswith("limits.connections_max 4001 does not fit: with 10256 file descriptors at most 4000")


def test_every_error_at_once_with_its_path(tmp_path: Path) -> None:
    told = problems(
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
    paths = [line.split(":")[0] for line in told]
    assert sorted(paths) == sorted([
        "instance", "admin.port", "admin.hots", "limits.body_bytes_max", "limits.request_s", "limits.connect_s",
        "log_level", "etcd.endpoints", "extra",
    ])  # fmt: skip


@pytest.mark.parametrize("field", ["region", "instance", "admin", "hop"])
def test_what_is_missing_is_named(tmp_path: Path, field: str) -> None:
    text = document()
    del text[field]
    assert problems(tmp_path, text) == [f"{field}: Field required; give it, as docs/configuration.md says"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must be a mapping"),
        ("- a\n- b\n", "must be a mapping"),
        ("just words", "must be a mapping"),
        ("a: [1,\n", "is not YAML: line 2, column 1"),
        ("a: {b: 1\nc: 2", "is not YAML"),
        ("region: a\nregion: b\n", "is not YAML: line 2, column 1: a key is given twice; keep one"),
        ("a: {b: 1, b: 2}", "a key is given twice"),
        ("a: 2026-99-99", "a date or a number that does not exist"),
        ("a: !!python/object:os.system {}", "is not YAML"),
        (b"\xff\xfe\xfd", "is not YAML"),
        ("a: \x00", "is not YAML"),
        ("[" * 20_000, "nested too deeply"),
    ],
)
def test_what_is_no_mapping_in_yaml_is_one_line(tmp_path: Path, text: str | bytes, words: str) -> None:
    (problem,) = problems(tmp_path, text)
    assert words in problem
    assert "\n" not in problem


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.yaml", tmp_path):
        with pytest.raises(ConfigError) as caught:
            load(Process, path)
        assert "cannot be read" in caught.value.problems[0]


def test_a_secret_is_never_in_the_clear(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, document(hop={"keys": {"k1": SECRET * 2}, "active": "k1"}))
    assert problem == "hop.keys.k1: a secret is given as env:NAME or file:PATH, never in the clear"


def test_a_secret_from_a_file_or_a_variable_is_stripped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text(f"  {SECRET}\n")
    monkeypatch.setenv("FARHOP_TEST_OTHER", f"{SECRET}\n")
    keys = {"a": f"file:{tmp_path / 'key'}", "b": "env:FARHOP_TEST_OTHER"}
    config = loaded(tmp_path, document(hop={"keys": keys, "active": "b"}))
    assert set(config.hop.secrets().values()) == {SECRET.encode()}
    assert SECRET not in repr(config)


def test_a_secret_that_cannot_be_had_is_told_by_where_it_should_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARHOP_TEST_EMPTY", " ")
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "bytes").write_bytes(b"\xff" + SECRET.encode())
    for given, words in (
        ("env:FARHOP_TEST_UNSET", "FARHOP_TEST_UNSET is not set"),
        ("env:FARHOP_TEST_EMPTY", "FARHOP_TEST_EMPTY is not set"),
        (f"file:{tmp_path / 'none'}", "No such file"),
        (f"file:{tmp_path / 'empty'}", "is empty"),
        (f"file:{tmp_path / 'bytes'}", "must be UTF-8"),
        ("file:a\0b", "cannot read the secret"),
    ):
        (problem,) = problems(tmp_path, document(hop={"keys": {"k1": given}, "active": "k1"}))
        assert problem.startswith("hop.keys.k1: ")
        assert words in problem
        assert SECRET not in problem


@pytest.mark.parametrize(
    ("hop", "words"),
    [
        ({"keys": {}, "active": "k1"}, "at least 1 item"),
        ({"keys": {"k1": "env:FARHOP_TEST_HOP"}, "active": "k2"}, "'k2' is not among k1"),
        ({"keys": {"no good": "env:FARHOP_TEST_HOP"}, "active": "no good"}, "key id 'no good' must be"),
        ({"keys": {"k1": "env:FARHOP_TEST_SHORT"}, "active": "k1"}, "has 5 bytes, at least 16"),
    ],
)
def test_a_hop_key_that_cannot_sign_is_told_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hop: dict[str, Any], words: str
) -> None:
    monkeypatch.setenv("FARHOP_TEST_SHORT", "abcde")
    (problem,) = problems(tmp_path, document(hop=hop))
    assert problem.startswith("hop")
    assert words in problem
    assert "abcde" not in problem


@pytest.mark.parametrize(
    ("etcd", "words"),
    [
        ({"endpoints": ["nonsense"]}, "'nonsense' is not host:port"),
        ({"endpoints": ["a:1"], "cert_file": "x"}, "cert_file, key_file: give both"),
        ({"username": "root"}, "username, password: give both"),
    ],
)
def test_an_etcd_that_cannot_be_is_told_here(tmp_path: Path, etcd: dict[str, Any], words: str) -> None:
    (problem,) = problems(tmp_path, document(etcd=etcd))
    assert problem.startswith("etcd: ")
    assert words in problem


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
def test_nothing_that_stands_in_the_file_is_in_a_message(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, text)
    assert SECRET not in str(caught.value)


OPS = "O2onvM62pC1io6jQKm8Nc2UyFXcd4kOmOsBIoYtZ2ik="


def test_keys_that_sign_are_read_from_the_file_or_beside_it(tmp_path: Path) -> None:
    (tmp_path / "ops.pub").write_text(OPS)
    for public in (OPS, f"file:{tmp_path / 'ops.pub'}"):
        made = config.Signing.model_validate(
            {"keys": {"ops": {"public": public, "may": ["law", "drain/tokyo"]}}}
        ).made()
        assert made.asks("/farhop/v1/policy/law")
        assert made.asks("/farhop/v1/override/paris")
        assert not made.asks("/farhop/v1/split/tokyo")
    assert config.Signing().made().asks("/farhop/v1/policy/law") is False


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ({"public": "AAAA"}, "give an Ed25519 public key"),
        ({"public": OPS, "may": ["laws"]}, "is no kind of document"),
        ({"public": OPS, "may": []}, "at least 1"),
    ],
)
def test_a_key_that_cannot_be_one_is_told_with_its_path(key: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        config.Signing.model_validate({"keys": {"ops": key}})
    [line] = config.problems_of(caught.value)
    assert line.startswith("keys.ops")
    assert words in line
