from __future__ import annotations

from typing import Any

import pytest

from farhop_lab.workloads.own_logs import FieldError, row_of


@pytest.mark.parametrize(
    "line",
    [
        {"at_s": 12.5, "input_tokens": 9, "output_tokens": 3},
        {"timestamp": 12500000000000 + 0, "prompt_tokens": 9, "completion_tokens": 3},
        {"time": "1970-01-01T00:00:12.5Z", "usage": {"prompt_tokens": 9, "completion_tokens": 3}},
        {"@timestamp": "1970-01-01T01:00:12.500+01:00", "usage": {"input_tokens": 9, "output_tokens": 3}},
        {"created": "1970-01-01 00:00:12.5", "usage.prompt_tokens": 9, "usage.completion_tokens": 3.0},
        {"ts": "12.5", "input_tokens": "9", "output_tokens": 3},
    ],
)
def test_fields_by_the_names_that_others_use(line: dict[str, Any]) -> None:
    row, took_s = row_of(line, {})
    assert (row.input_tokens, row.output_tokens, row.session, row.region, took_s) == (9, 3, "", "", None)
    assert row.at_s == pytest.approx(12.5 if "timestamp" not in line else 12.5e9)


@pytest.mark.parametrize(("scale", "at"), [(1, 1.7e9), (1_000, 1.7e9), (1_000_000, 1.7e9), (1_000_000_000, 1.7e9)])
def test_moments_in_any_unit(scale: int, at: float) -> None:
    row, _ = row_of({"ts": int(at) * scale, "input_tokens": 1, "output_tokens": 1}, {})
    assert row.at_s == pytest.approx(at)


def test_optional_fields_are_read() -> None:
    line = {
        "ts": 1,
        "input_tokens": 1,
        "output_tokens": 1,
        "conversation_id": 77,
        "region": "tokyo",
        "latency_ms": 1500,
        "request": {"tools": [{"type": "function"}]},
    }
    row, took_s = row_of(line, {})
    assert (row.session, row.region, took_s, row.tools) == ("77", "tokyo", 1.5, True)


def test_field_is_read_from_the_given_path() -> None:
    line = {"meta": {"when": 4, "in": [1]}, "n": 7, "input_tokens": 1, "output_tokens": 2}
    row, _ = row_of(line, {"at_s": "meta.when", "input_tokens": "n"})
    assert (row.at_s, row.input_tokens, row.output_tokens) == (4.0, 7, 2)
    with pytest.raises(FieldError, match=r"no at_s \(looked for meta\.where\); say where it is by --field at_s=PATH"):
        row_of(line, {"at_s": "meta.where"})


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("ts", "yesterday", r"at_s: 'yesterday' is no number"),
        ("ts", 1e300, r"at_s: 1e\+300 is no moment"),
        ("ts", True, r"at_s: 'True' is no number"),
        ("ts", None, r"no at_s"),
        ("input_tokens", -1, r"input_tokens: -1 is no count of tokens"),
        ("input_tokens", 1.5, r"input_tokens: 1\.5 is no count"),
        ("input_tokens", float("nan"), r"input_tokens: 'nan' is no number"),
        ("output_tokens", [1], r"output_tokens: '\[1\]' is no number"),
        ("session", {"a": 1}, r"session: a text is expected"),
        ("duration_s", "soon", r"duration: 'soon' is no number"),
    ],
)
def test_error_names_the_field(name: str, value: Any, says: str) -> None:
    with pytest.raises(FieldError, match=says):
        row_of({"ts": 1, "input_tokens": 1, "output_tokens": 1, name: value}, {})
