from __future__ import annotations

from typing import Any

import msgspec
import pytest

from farhop.accounts.usage import Data, Record, lines
from farhop_lab.workloads.own_logs import FieldError, row_of, spans_of

DATA_BUT_THE_PRICES_EPOCH = [name for name in Data.__struct_fields__ if name != "price_epoch"]


@pytest.mark.parametrize(
    "line",
    [
        {"at_s": 12.5, "input_tokens": 9, "output_tokens": 3},
        {"timestamp": 12500000000000 + 0, "prompt_tokens": 9, "completion_tokens": 3},
        {"time": "1970-01-01T00:00:12.5Z", "usage": {"prompt_tokens": 9, "completion_tokens": 3}},
        {"@timestamp": "1970-01-01T01:00:12.500+01:00", "usage": {"input_tokens": 9, "output_tokens": 3}},
        {"created": "1970-01-01 00:00:12.5", "usage.prompt_tokens": 9, "usage.completion_tokens": 3.0},
        {"ts": "12.5", "input_tokens": "9", "output_tokens": 3},
        {"time": "1970-01-01 00:00:12.5 UTC", "input_tokens": 9, "output_tokens": 3},
        {"timestamp_ms": 12500, "input_tokens": 9, "output_tokens": 3},
        {"startTime": 12.5, "promptTokens": 9, "completionTokens": 3},  # Langfuse
        {"startTime": 12.5, "usageDetails": {"input": 9, "output": 3}},
        {"TIMESTAMP": "1970-01-01 00:00:12.5000000", "ContextTokens": "9", "GeneratedTokens": "3"},  # Azure
        {"Timestamp": "12.5", "Request tokens": "9", "Response tokens": "3"},  # BurstGPT
        {"start_time": 12.5, "attributes": {"gen_ai.usage.input_tokens": 9, "gen_ai.usage.output_tokens": 3}},
        {"created_at": "1970-01-01 00:00:12.5", "tokens_prompt": "9", "tokens_completion": "3"},  # OpenRouter
        {"request_created_at": "1970-01-01T00:00:12.5Z", "prompt_tokens": 9, "completion_tokens": 3},  # Helicone
        {"start_time": 12.5, "attributes": {"gen_ai": {"usage": {"input_tokens": 9, "output_tokens": 3}}}},
        {"start_time": 12.5, "attributes": {"gen_ai.usage.prompt_tokens": 9, "gen_ai.usage.completion_tokens": 3}},
    ],
)
def test_fields_by_the_names_that_others_use(line: dict[str, Any]) -> None:
    row, took_s = row_of(line, {})
    assert (row.input_tokens, row.output_tokens, row.session, row.region, took_s) == (9, 3, "", "", None)
    assert row.at_s == pytest.approx(12.5 if "timestamp" not in line else 12.5e9)


@pytest.mark.parametrize("time", ["01/Jan/1970:01:00:12 +0100", "[01/Jan/1970:00:00:12 +0000]"])
def test_moments_as_nginx_and_apache_write_them(time: str) -> None:
    assert row_of({"time": time, "input_tokens": 9, "output_tokens": 3}, {})[0].at_s == 12.0


@pytest.mark.parametrize("took", [{"duration_s": 2.5}, {"latency_ms": 2500}])
def test_a_request_logged_at_its_end_came_before_by_what_it_took(took: dict[str, float]) -> None:
    """As proxies log: nginx's $msec and $request_time."""
    row, took_s = row_of({"end": 1_700_000_012.5, "input_tokens": 9, "output_tokens": 3, **took}, {})
    assert row.at_s == pytest.approx(1_700_000_010.0)
    assert took_s == 2.5


@pytest.mark.parametrize("name", ["time", "timestamp", "at_ms"])
def test_a_name_that_was_given_for_one_field_stands_for_no_other(name: str) -> None:
    """nginx's time is of the end, whatever the log calls it."""
    line = {name: 1_700_000_012.5, "request_time": 2.5, "input_tokens": 9, "output_tokens": 3}
    row, took_s = row_of(line, {"end": name, "duration_s": "request_time"})
    assert (row.at_s, took_s) == (pytest.approx(1_700_000_010.0, abs=1e-3), 2.5)
    row, took_s = row_of(line, {"end": name, "at_s": name})  # unless it was given for both
    assert (row.at_s, took_s) == (1_700_000_012.5, 0.0)


def test_a_session_that_is_a_number() -> None:
    line = {"ts": 1, "input_tokens": 9, "output_tokens": 3}
    assert [row_of(line | {"session": name}, {})[0].session for name in (7, 7.0, "7")] == ["7", "7", "7"]
    with pytest.raises(FieldError, match="session: a text is expected"):
        row_of(line | {"session": 7.5}, {})


def test_usage_records_of_farhop_are_a_log() -> None:
    """They are written when a request is over, and name the region in which it entered."""
    data = dict.fromkeys(Data.__struct_fields__, 0) | {
        "input_tokens": 9, "output_tokens": 3, "duration_ms": 2500.0, "entry_region": "tokyo", "region": "virginia"
    }  # fmt: skip
    record = Record("id", 1_700_000_012.5, False, tuple(data[name] for name in DATA_BUT_THE_PRICES_EPOCH))
    (line,) = lines([record], "farhop/here", None)
    row, took_s = row_of(msgspec.json.decode(line), {})
    assert row.at_s == pytest.approx(1_700_000_010.0, abs=0.01)
    assert (row.input_tokens, row.output_tokens) == (9, 3)
    assert (row.region, took_s) == ("tokyo", 2.5)
    assert row_of(msgspec.json.decode(line), {"region": "-"})[0].region == ""


def test_hashes_of_blocks_are_blocks_if_their_length_is_known() -> None:
    line = {"timestamp": 61.114, "input_length": 40, "output_length": 3, "hash_ids": [7, 8, 9]}
    assert row_of(line, {}, 16)[0].blocks == (("7", 16), ("8", 16), ("9", 8))
    assert row_of(line, {})[0].blocks == ()
    assert row_of(line | {"hash_ids": []}, {}, 16)[0].blocks == ()
    with pytest.raises(FieldError, match=r"3 blocks of 32 tokens are more than a prompt of 40; .*--block-tokens"):
        row_of(line, {}, 32)
    with pytest.raises(FieldError, match=r"hash_ids: .*; a list of blocks' names is expected"):
        row_of(line | {"hash_ids": "7 8 9"}, {}, 16)


@pytest.mark.parametrize(("scale", "at"), [(1, 1.7e9), (1_000, 1.7e9), (1_000_000, 1.7e9), (1_000_000_000, 1.7e9)])
def test_moments_in_any_unit(scale: int, at: float) -> None:
    row, _ = row_of({"ts": int(at) * scale, "input_tokens": 1, "output_tokens": 1}, {})
    assert row.at_s == pytest.approx(at)


@pytest.mark.parametrize("scale", [1, 1_000, 1_000_000, 1_000_000_000])
def test_moments_that_are_texts_of_numbers(scale: int) -> None:
    """1712010112345 is a moment of 1712 in ISO 8601, too."""
    row, _ = row_of({"ts": str(1712010112345 * scale // 1000), "input_tokens": 1, "output_tokens": 1}, {})
    assert row.at_s == pytest.approx(1712010112, abs=1)


def test_a_moment_in_milliseconds_from_any_zero() -> None:
    line = {"timestamp": 3000, "input_tokens": 1, "output_tokens": 1}
    assert row_of(line, {})[0].at_s == 3000.0
    assert row_of(line, {"at_ms": "timestamp"})[0].at_s == 3.0


SPAN = {
    "name": "chat",
    "startTimeUnixNano": "1544712660000000000",
    "endTimeUnixNano": "1544712661500000000",
    "attributes": [
        {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "20"}},
        {"key": "gen_ai.usage.output_tokens", "value": {"intValue": "10"}},
        {"key": "gen_ai.conversation.id", "value": {"stringValue": "c1"}},
    ],
}


def test_spans_of_opentelemetry() -> None:
    export = {"resourceSpans": [{"resource": {}, "scopeSpans": [{"spans": [SPAN]}, {"spans": [SPAN]}]}]}
    assert spans_of(SPAN) is None
    assert spans_of(export) == [SPAN, SPAN]
    row, took_s = row_of(SPAN, {})
    assert (row.at_s, row.input_tokens, row.output_tokens, row.session) == (1544712660.0, 20, 10, "c1")
    assert took_s == pytest.approx(1.5)
    with pytest.raises(FieldError, match=r"resourceSpans: .*; an export of OpenTelemetry's collector is expected"):
        spans_of({"resourceSpans": 5})


@pytest.mark.parametrize("nested", [True, False])
def test_what_anthropic_counts_beside_the_input(nested: bool) -> None:
    usage = {"input_tokens": 20, "cache_read_input_tokens": 4000, "cache_creation_input_tokens": None}
    usage |= {"output_tokens": 5}
    line = {"ts": 1, "usage": usage} if nested else {"ts": 1, **usage}
    assert row_of(line, {})[0].input_tokens == 4020
    assert row_of(line, {"input_tokens": "usage.input_tokens" if nested else "input_tokens"})[0].input_tokens == 20


def test_what_a_gateway_counts_within_the_input_is_not_added() -> None:
    usage = {"prompt_tokens": 4020, "cache_read_input_tokens": 4000, "input_tokens": 20, "completion_tokens": 5}
    assert row_of({"ts": 1, "usage": usage}, {})[0].input_tokens == 4020


@pytest.mark.parametrize(
    ("value", "offers"), [("false", False), ("0", False), ("true", True), ([], False), ([1], True)]
)
def test_tools_in_a_log_may_be_a_list_or_a_flag_as_text(value: Any, offers: bool) -> None:
    assert row_of({"ts": 1, "input_tokens": 1, "output_tokens": 1, "tools": value}, {})[0].tools is offers


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
    with pytest.raises(
        FieldError,
        match=r"no at_s \(looked for meta\.where; there is meta, n, .*\); say where it is by --field at_s=PATH",
    ):
        row_of(line, {"at_s": "meta.where"})


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("ts", "yesterday", r"at_s: 'yesterday' is no moment; seconds, milliseconds or ISO 8601 are expected"),
        ("ts", 1e300, r"at_s: '1e\+300' is no moment"),
        ("ts", True, r"at_s: 'True' is no moment"),
        ("ts", None, r"no at_s \(looked for at_s, timestamp, .* more; there is ts, input_tokens, output_tokens\)"),
        ("end_time", 0.5, r"an answer that took -0\.5 s; 0 or more is expected"),
        ("latency_ms", -1, r"an answer that took -0\.001 s"),
        ("input_tokens", 10**400, r"input_tokens: '1000+' is no number"),
        ("input_tokens", -1, r"input_tokens: -1 is no count of tokens"),
        ("input_tokens", 1.5, r"input_tokens: 1\.5 is no count"),
        ("input_tokens", float("nan"), r"input_tokens: 'nan' is no number"),
        ("output_tokens", [1], r"output_tokens: '\[1\]' is no number"),
        ("session", {"a": 1}, r"session: a text is expected"),
        ("duration_s", "soon", r"duration_s: 'soon' is no number"),
    ],
)
def test_error_names_the_field(name: str, value: Any, says: str) -> None:
    with pytest.raises(FieldError, match=says):
        row_of({"ts": 1, "input_tokens": 1, "output_tokens": 1, name: value}, {})


def test_new_tokens_count_only_if_they_are_given() -> None:
    line = {"at_s": 1, "new_tokens": 4, "input_tokens": 9, "output_tokens": 3}
    assert row_of(line, {})[0].input_tokens == 9
    assert row_of(line, {"new_tokens": "new_tokens"})[0].input_tokens == 4
    with pytest.raises(FieldError, match=r"no new_tokens \(looked for added; .* --field new_tokens=PATH"):
        row_of(line, {"new_tokens": "added"})
