from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import create_model, model_validator

from farhop.config import ConfigError, Part, PublicKey, Secret, is_absent, load, rule

SECRET = "correct-horse-battery-staple"


class Kept(Part):
    key: Secret
    name: PublicKey
    other: Secret


class Spot(Part):
    port: int = 1


class Thing(Part):
    """Something with a secret."""

    elsewhere = {"tier": "another thing's"}

    region: str = "tokyo"
    keys: dict[str, Secret]
    spot: Spot = Spot()
    spots: list[Spot] = []
    by_name: dict[str, Spot] = {}


def loaded(folder: Path, text: str | bytes | dict[str, Any]) -> Thing:
    path = folder / "config.yaml"
    data = yaml.safe_dump(text) if isinstance(text, dict) else text
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return load(Thing, path)


def problems(folder: Path, text: str | bytes | dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loaded(folder, text)
    assert all(line.startswith(str(folder / "config.yaml")) for line in str(caught.value).splitlines())
    return caught.value.problems


@pytest.mark.parametrize(
    ("text", "message"),
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
        ("a:\n\tb: 1\n", "that cannot start any token; indent with spaces, never with tabs"),
        (b"\xff\xfe\xfd", "is not YAML"),
        ("a: \x00", "is not YAML"),
        ("[" * 500, "nested too deeply"),
    ],
)
def test_yaml_that_is_no_mapping_is_reported_in_one_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    (problem,) = problems(tmp_path, text)
    assert message in problem
    assert "\n" not in problem


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.yaml", tmp_path):
        with pytest.raises(ConfigError) as caught:
            load(Thing, path)
        assert "cannot be read" in caught.value.problems[0]


def test_a_secret_is_never_in_the_clear(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, {"keys": {"k1": SECRET * 2}})
    assert problem == "keys.k1: a secret is given as env:NAME or file:PATH, never in the clear"


def test_a_secret_from_a_file_or_a_variable_is_stripped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text(f"  {SECRET}\n")
    monkeypatch.setenv("FARHOP_TEST_OTHER", f"{SECRET}\n")
    keys = {"a": f"file:{tmp_path / 'key'}", "b": "env:FARHOP_TEST_OTHER"}
    config = loaded(tmp_path, {"keys": keys})
    assert {key.get_secret_value() for key in config.keys.values()} == {SECRET}
    assert SECRET not in repr(config)
    (tmp_path / "key").write_text(f"\ufeff{SECRET}\r\n")  # as some editors save it
    assert loaded(tmp_path, {"keys": keys}).keys["a"].get_secret_value() == SECRET


def test_a_secret_that_cannot_be_had_is_named_by_where_it_should_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARHOP_TEST_EMPTY", " ")
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "bytes").write_bytes(b"\xff" + SECRET.encode())
    for given, message in (
        ("env:FARHOP_TEST_UNSET", "FARHOP_TEST_UNSET is not set"),
        ("env:FARHOP_TEST_EMPTY", "FARHOP_TEST_EMPTY is not set"),
        (f"file:{tmp_path / 'none'}", "No such file or directory; check the path and its permissions"),
        ("file:none.key", "check the path from the folder in which the process starts and its permissions"),
        (f"file:{tmp_path / 'empty'}", "is empty"),
        (f"file:{tmp_path / 'bytes'}", "must be UTF-8"),
        ("file:a\0b", "cannot read the secret"),
    ):
        (problem,) = problems(tmp_path, {"keys": {"k1": given}})
        assert problem.startswith("keys.k1: ")
        assert message in problem
        assert SECRET not in problem


def test_a_checked_configuration_is_read_without_files_that_are_absent(tmp_path, monkeypatch):
    (tmp_path / "it").write_text(f"{{key: 'env:NOT_SET', name: 'file:{tmp_path}/none', other: 'env:SET'}}")
    monkeypatch.delenv("NOT_SET", raising=False)
    monkeypatch.setenv("SET", "s3cret")
    with pytest.raises(ConfigError) as raised:
        load(Kept, tmp_path / "it")
    assert len(raised.value.problems) == 2
    absent: list[str] = []
    read = load(Kept, tmp_path / "it", absent)
    assert absent == ["environment variable NOT_SET is not set", f"{tmp_path}/none: No such file or directory"]
    assert (is_absent(read.key), is_absent(read.name), is_absent(read.other)) == (True, True, False)
    (tmp_path / "it").write_text("{key: s3cret, name: n, other: 'env:SET'}")
    with pytest.raises(ConfigError, match="never in the clear"):
        load(Kept, tmp_path / "it", [])


def test_a_mistyped_field_is_reported_with_the_right_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET", SECRET)
    document = {
        "keys": {"a": "env:SET"}, "regoin": "tokyo", "tier": 1, "zzz": 1, "spot": {"prot": 1}, "spots": [{"Port": 1}],
        "by_name": {"prot": {"pport": 1}, "x": {"y": 1}},
    }  # fmt: skip
    other = "unknown field; correct its name (docs/reference/configuration.md), or leave it out"
    assert sorted(problems(tmp_path, document)) == [
        'by_name.prot.pport: unknown field; did you mean "port"?',
        f"by_name.x.y: {other}",
        'regoin: unknown field; did you mean "region"?',
        'spot.prot: unknown field; did you mean "port"?',
        'spots[0].Port: unknown field; did you mean "port"?',
        "tier: unknown field; it is one of another thing's: is this the right file?",
        f"zzz: {other}",
    ]


@pytest.mark.parametrize(
    ("field", "given", "unit"),
    [
        ("drain_s", "30s", ", in seconds"),
        ("ping_ms", "1 s", ", in milliseconds"),
        ("segment_bytes", "64 MiB", ", in bytes (64 MiB is 67108864)"),
        ("body_bytes_max", "16MiB", ", in bytes (64 MiB is 67108864)"),
        ("nodes_per_s_max", "5k", ""),
        ("port", "http", ""),
    ],
)
def test_error_for_a_number_with_a_unit_names_the_fields_unit(
    tmp_path: Path, field: str, given: str, unit: str
) -> None:
    kind = create_model("Sized", __base__=Part, **{field: (float, 1.0)})  # type: ignore[call-overload]
    (tmp_path / "config.yaml").write_text(f"{field}: {given}\n")
    with pytest.raises(ConfigError) as caught:
        load(kind, tmp_path / "config.yaml")
    (problem,) = caught.value.problems
    assert problem.startswith(f"{field}: ")
    assert problem.endswith(f"; give a number without a unit or quotes{unit}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("spot:", "spot: is empty; give a value, or leave the line out"),
        ("spots:", "spots: is empty; give a value, or leave the line out"),
        ("by_name: {a: {port: }}", "by_name.a.port: is empty; give a value, or leave the line out"),
        ("spot: [port]", "spot: must be a mapping, a `name: value` for each field"),
        ("by_name: [a]", "by_name: must be a mapping, a `name: value` for each field"),
        ("region: no", "region: Input should be a valid string; put it in quotes"),
        ("region: 2026-12-01", "region: Input should be a valid string; put it in quotes"),
        ("region: [a]", "region: Input should be a valid string"),
        ("spots: {port: 1}", "spots: must be a list, such as [one, two], or a line `- one` for each"),
        ("spot: {port: yes}", "spot.port: is yes or no (true or false); give a number"),
        ("spots: [{port: 1}, {port: off}]", "spots[1].port: is yes or no (true or false); give a number"),
        ("by_name: {a: {port: true}}", "by_name.a.port: is yes or no (true or false); give a number"),
    ],
)
def test_what_is_of_another_shape_is_reported_with_the_one_to_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    monkeypatch.setenv("SET", SECRET)
    assert problems(tmp_path, f"keys: {{a: 'env:SET'}}\n{text}") == [expected]


def test_what_several_fields_contradict_begins_with_the_one_to_change(tmp_path: Path) -> None:
    class Pair(Part):
        low: int
        high: int

        @model_validator(mode="after")
        def _ordered(self) -> Pair:
            if self.low > self.high:
                raise ValueError("low: is above high; lower it")
            if self.low == self.high:
                raise ValueError("both are the same")
            return self

    for text, expected in (("{low: 2, high: 1}", "low: is above"), ("{low: 1, high: 1}", "document: both are")):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(ConfigError) as caught:
            load(Pair, tmp_path / "config.yaml")
        assert caught.value.problems[0].startswith(expected)


class Range(Part):
    """Two fields that go together, and a rule of each way to say that they do not."""

    low: int = 0
    high: int = 1

    @rule
    def _ordered(self) -> Iterator[str]:
        if self.low > self.high:
            yield "low: is above high; {give} less"
        if self.low < 0:
            yield "low: is below 0; raise it"


class Steps(Range):
    step: int = 1
    inner: Range | None = None

    @rule
    def _fits(self) -> None:
        if self.step > self.high:
            raise ValueError("step: is above high; give less")

    @rule
    def _again(self) -> Iterator[str]:
        if self.low < 0:
            yield "low: is below 0; raise it"  # told once


def test_all_errors_across_fields_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"low": -1, "high": -2, "step": 5}))
    with pytest.raises(ConfigError) as caught:
        load(Steps, path)
    assert caught.value.problems == [
        "low: is above high; {give} less", "low: is below 0; raise it", "step: is above high; give less"
    ]  # fmt: skip
    path.write_text(yaml.safe_dump({"inner": {"low": -1, "high": -2}}))
    with pytest.raises(ConfigError) as caught:
        load(Steps, path)
    assert caught.value.problems == ["inner: low: is above high; {give} less", "inner: low: is below 0; raise it"]
    path.write_text(yaml.safe_dump({"low": 0, "high": 2}))
    assert load(Steps, path) == Steps(low=0, high=2)
