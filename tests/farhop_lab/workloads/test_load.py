from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhop_lab.workloads import load
from farhop_lab.workloads.arrivals import Burst
from farhop_lab.workloads.load import TraceError
from farhop_lab.workloads.traces import AzureRow, LogRow, MooncakeRow, SessionRow, Turn

MOONCAKE = (
    '{"timestamp": 0, "input_length": 700, "output_length": 52, "hash_ids": [0, 14]}\n'
    '{"timestamp": 3000, "input_length": 100, "output_length": 5, "hash_ids": [0]}\n'
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
)


AZURE_HEADED = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 {}.0,374,44\n2023-11-16 {}.0,396,109\n"


def write(path: Path, text: str) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def archive(path: Path, **files: str) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(f"data/reason/kind-1/{name.replace('_', '-').replace('-csv', '.csv')}")
            info.name = info.name.replace("-json", ".json")
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return path


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_mooncake(tmp_path: Path, name: str) -> None:
    assert load.mooncake(write(tmp_path / name, MOONCAKE)) == [
        MooncakeRow(0, 700, 52, (0, 14)),
        MooncakeRow(3000, 100, 5, (0,)),
    ]


def test_azure(tmp_path: Path) -> None:
    first, second = load.azure(write(tmp_path / "azure.csv.gz", AZURE))
    assert first == AzureRow(0.0, 374, 44)
    assert (second.at, second.input_tokens) == (pytest.approx(4.314579), 396)


def test_azure_moments_with_time_zones(tmp_path: Path) -> None:
    text = AZURE_HEADED.format("18:15:50", "19:15:56").replace("50.0", "50.1234567+00:00").replace("56.0", "56.0+01:00")
    assert [row.at for row in load.azure(write(tmp_path / "azure.csv", text))] == [0.0, pytest.approx(5.876544)]


@pytest.mark.parametrize("zoned", ["50.0", "46.0"])
def test_azure_moments_of_which_some_have_a_time_zone(tmp_path: Path, zoned: str) -> None:
    text = AZURE_HEADED.format("18:15:46", "18:15:50").replace(zoned, f"{zoned}+00:00")
    with pytest.raises(load.TraceError, match=r"line 3: TIMESTAMP .* time zone; give it to all or none"):
        load.azure(write(tmp_path / "azure.csv", text))


@pytest.mark.parametrize(
    ("timestamp", "complaint"),
    [
        ("-5", "line 1: timestamp -5; .* shift all of them"),
        ("61.114", r"line 1: timestamp 61.114; whole milliseconds are expected, .* --field at_s=timestamp"),
        ("1e999", r"line 1: "),
    ],
)
def test_invalid_timestamps_in_a_mooncake_trace_are_reported(tmp_path: Path, timestamp: str, complaint: str) -> None:
    text = f'{{"timestamp": {timestamp}, "input_length": 7, "output_length": 1, "hash_ids": [0]}}\n'
    with pytest.raises(load.TraceError, match=complaint):
        load.mooncake(write(tmp_path / "trace.jsonl", text))


BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,0,1087,API log\n"
)
BURSTGPT_WITH_SESSIONS = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "45.5,abc,1.2,GPT-4,1087,0,1087,API log\n5.0,abd,0.3,ChatGPT,472,18,490,Conversation log\n"
)
LOG = (
    '{"at_s": 7.5, "input_tokens": 90, "output_tokens": 5, "session": "a", "pause_s": 1.5, "region": "tokyo"}\n'
    '{"at_s": 5.0, "input_tokens": 60, "output_tokens": 9, "session": "a", "blocks": [["tools", 40], ["x", 16]]}\n'
)
SESSIONS = (
    '{"session": "s", "at_s": 100, "prefix": [["tools", 40]], "turns": [{"input_tokens": 9, "output_tokens": 3},'
    ' {"input_tokens": 2, "output_tokens": 1, "pause_s": 0.5}]}\n'
)


def test_a_block_has_one_length_wherever_it_stands(tmp_path: Path) -> None:
    """A recording knows the tokens of whole prompts only, and these have more bytes a token or fewer: with the lengths
    of each prompt's own, two that begin alike for 4 blocks would be played as sharing one.
    """
    lengths = [(66, 67, 66), (71, 71, 72), (66, 66, 67), (9, 9)]
    lines = [
        {"at_s": n, "input_tokens": 300, "output_tokens": 5, "blocks": list(zip("abc", tokens, strict=False))}
        for n, tokens in enumerate(lengths)
    ]
    rows = load.log(write(tmp_path / "log", "".join(json.dumps(line) + "\n" for line in lines)))
    whole = (("a", 66), ("b", 66), ("c", 67))
    assert [row.blocks for row in rows] == [whole, whole, whole, whole[:2]]


SPELLINGS = {
    "a byte order mark": lambda text: b"\xef\xbb\xbf" + text,
    "empty lines": lambda text: b"\n" + text.replace(b"\n", b"\n \n\n"),
    "CRLF": lambda text: text.replace(b"\n", b"\r\n"),
    "gzip": gzip.compress,
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(
    ("read", "text"),
    [
        (load.mooncake, MOONCAKE), (load.azure, AZURE), (load.burstgpt, BURSTGPT), (load.log, LOG),
        (load.sessions, SESSIONS), (lambda path: load.own_log(path, {}), LOG),
        (lambda path: load.own_log(path, {}), AZURE), (lambda path: load.own_log(path, {}), BURSTGPT_WITH_SESSIONS),
        (lambda path: load.own_log(path, {}), f"[{LOG.strip().replace(chr(10), ',' + chr(10))}]"),
    ],
)  # fmt: skip
def test_a_trace_is_read_the_same_in_any_encoding_and_under_any_name(
    tmp_path: Path, read: Any, text: str, spelling: str
) -> None:
    (tmp_path / "other").write_bytes(SPELLINGS[spelling](text.encode()))
    assert read(tmp_path / "other") == read(write(tmp_path / "plain", text))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\x28\xb5\x2f\xfd" + b"x" * 40, r"it is compressed with zstd; unpack it first: zstd -d"),
        (b"BZh91AY&SY", r"compressed with bzip2; unpack it first"),
        (b"PK\x03\x04x", r"a zip archive; unpack it first"),
        (LOG.encode("utf-16"), r"it is UTF-16; save it as UTF-8"),
    ],
)
def test_a_file_that_is_no_text_is_refused_with_the_remedy(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    for read in (load.log, lambda path: load.own_log(path, {}, skip=True)):
        with pytest.raises(TraceError, match=says):
            read(path)


def test_an_archive_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"all\.tar\.gz: it is an archive; name ServeGen's in a scenario"):
        load.own_log(archive(tmp_path / "all.tar.gz", chunk_0_trace_csv="0,1,1,,\n"), {})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"x": ' + "[" * 9999 + "]" * 9999 + "}", r"line 1: .*depth"),
        ("time,input_tokens,output_tokens\n1,2\n", r"line 2: 2 cells under a head of 3; is the file truncated\?"),
        ("time,input_tokens,output_tokens\n1,2,3,4\n", r"line 2: 4 cells under a head of 3"),
        ("time,input_tokens,input_tokens,output_tokens\n1,2,3,4\n", r"line 1: the head has 'input_tokens' twice"),
        ('time,prompt\n1,"' + "x" * 200_000 + '"\n', r"line 2: .*leave its columns of texts out"),
        ("time,input_tokens,output_tokens\n1,,3\n", r"line 2: no input_tokens .*there is time, output_tokens\)"),
        ('[{"time": 1, "input_tokens": 1, "output_tokens": 1}, 7]', r"entry 2 of the array: Expected `object`"),
        ('[{"time": 1, "input_', r"own: Input data was truncated; give JSON lines, or one whole array"),
    ],
)
def test_own_log_that_cannot_be_read(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(TraceError, match=says) as caught:
        load.own_log(write(tmp_path / "own", text), {})
    assert "\n" not in str(caught.value)


def test_own_log_as_csv(tmp_path: Path) -> None:
    text = 'time;input_tokens;output_tokens;prompt\n3;40;5;"two\n\nlines; x"\n1;2\n2;30;4;\n'
    rows, left_out = load.own_log(write(tmp_path / "own.csv", text), {}, skip=True)
    assert [(row.at_s, row.input_tokens, row.output_tokens) for row in rows] == [(0.0, 30, 4), (1.0, 40, 5)]
    assert left_out == [f"{tmp_path / 'own.csv'}, line 5: 2 cells under a head of 4; is the file truncated?"]


def test_own_log_of_which_no_line_can_be_read(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"line 1: no at_s .*; no line of the file can be read"):
        load.own_log(write(tmp_path / "own", "{}\n{}\n"), {}, skip=True)


def test_an_export_of_opentelemetry_has_many_requests_a_line(tmp_path: Path) -> None:
    span = {"startTimeUnixNano": "5", "attributes": {"gen_ai.usage.input_tokens": 3, "gen_ai.usage.output_tokens": 4}}
    export = {"resourceSpans": [{"scopeSpans": [{"spans": [span, {"name": "GET"}, span]}]}]}
    path = write(tmp_path / "own", json.dumps(export))
    rows, left_out = load.own_log(path, {}, skip=True)
    assert rows == [LogRow(at_s=0.0, input_tokens=3, output_tokens=4)] * 2
    assert len(left_out) == 1
    with pytest.raises(TraceError, match=r"line 1, span 2: no at_s .*--skip leaves such lines out"):
        load.own_log(path, {})


@pytest.mark.parametrize(
    ("text", "kind"), [(MOONCAKE, "mooncake"), (SESSIONS, "sessions"), (LOG, None), (AZURE, None), ("", None)]
)
def test_traces_that_a_scenario_plays_as_they_stand(tmp_path: Path, text: str, kind: str | None) -> None:
    found = load.published(write(tmp_path / "trace", text))
    assert (found and found[0]) == kind
    assert load.published(tmp_path) is None


@pytest.mark.parametrize("text", [BURSTGPT, BURSTGPT_WITH_SESSIONS])
def test_burstgpt_with_its_failures_as_answers_of_one_token(tmp_path: Path, text: str) -> None:
    first, second = load.burstgpt(write(tmp_path / "burst.csv", text))
    assert first == AzureRow(0.0, 472, 18)
    assert second == AzureRow(40.5 if "Session" in text else 40.0, 1087, 1)


def test_a_log_in_the_order_of_time_from_its_first_moment(tmp_path: Path) -> None:
    assert load.log(write(tmp_path / "log.jsonl.gz", LOG)) == [
        LogRow(at_s=0.0, input_tokens=60, output_tokens=9, session="a", blocks=(("tools", 40), ("x", 16))),
        LogRow(at_s=2.5, input_tokens=90, output_tokens=5, session="a", pause_s=1.5, region="tokyo"),
    ]


def test_sessions(tmp_path: Path) -> None:
    (row,) = load.sessions(write(tmp_path / "s.jsonl", SESSIONS))
    assert row == SessionRow(session="s", at_s=0.0, prefix=(("tools", 40),), turns=(Turn(9, 3), Turn(2, 1, 0.5)))


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("".join(f'{{"timestamp": {at}, "input_length": {at + 1}, "output_length": 1, "hash_ids": [0]}}\n'
                 for at in (6, 0, 3)), load.mooncake),
        (AZURE_HEADED.format("18:15:50", "18:15:46"), load.azure),
        (BURSTGPT_WITH_SESSIONS, load.burstgpt),
        (LOG, load.log),
    ],
)  # fmt: skip
def test_clocks_that_jitter_are_put_in_order(tmp_path: Path, text: str, read: Any) -> None:
    rows = read(write(tmp_path / "trace", text))
    moments = [getattr(row, "at_ms", getattr(row, "at", getattr(row, "at_s", None))) for row in rows]
    assert moments == sorted(moments)
    assert moments[0] == 0
    assert len(set(moments)) == len(moments) > 1


@pytest.mark.parametrize(
    ("read", "text", "says"),
    [
        (load.burstgpt, BURSTGPT.replace("Request tokens", "Requests"), r"line 1: no column 'Request tokens'"),
        (load.burstgpt, BURSTGPT.replace("472", "many"), r"line 2: .*must be numbers"),
        (load.burstgpt, BURSTGPT.replace("45,GPT-4", "nan,GPT-4"), r"line 3: a moment of nan s"),
        (load.burstgpt, BURSTGPT[:-22], r"line 3: columns are missing; is the file truncated"),
        (load.log, LOG.replace('"at_s"', '"when"'), r"line 1: .*unknown field `when`"),
        (load.log, LOG.replace("1.5", "-1.5"), r"line 1: a pause of -1\.5 s; 0 to 604800"),
        (load.log, LOG.replace("40]", "-40]"), r"line 2: -40 tokens"),
        (load.log, LOG[:-9], r"line 2: .*truncated\?"),
        (load.log, "", r"it holds no request"),
        (load.sessions, SESSIONS.replace(SESSIONS[SESSIONS.index("[{"):-2], "[]"), r"line 1: turns is empty"),
        (load.sessions, SESSIONS.replace("0.5", "1e9"), r"line 1: a pause of 1000000000"),
        (load.sessions, SESSIONS.replace('"pause_s": 0.5', '"since_s": -50'), r"line 1: a pause of -50"),
        (load.sessions, SESSIONS.replace('"prefix"', '"prefixes"'), r"line 1: .*prefixes"),
    ],
)  # fmt: skip
def test_unreadable_file_is_reported_in_one_line(tmp_path: Path, read: Any, text: str, says: str) -> None:
    with pytest.raises(TraceError, match=says) as caught:
        read(write(tmp_path / "trace.jsonl", text))
    assert "\n" not in str(caught.value)


def test_servegen(tmp_path: Path) -> None:
    lengths = json.dumps({
        "21600": {"input_tokens": "{39: 0.5, 40: 0.5}", "output_tokens": "{7: 1.0}"},
        "0": {"input_tokens": "{}", "output_tokens": "{}"},
    })  # fmt: skip
    path = archive(
        tmp_path / "all.tar.gz",
        chunk_0_trace_csv="0,0.1,0.9,Gamma,1.1,8.0\n600,0,0,,0,0\n",
        chunk_0_dataset_json=lengths,
        chunk_1_trace_csv="0,2,1.5,Weibull,1.1,8.0\n",
    )
    first, second = load.servegen(path, "kind-1")
    assert first.bursts == (Burst(0.0, 600.0, 0.1, 0.9), Burst(600.0, 600.0, 0.0, 1.0))
    ((at, inputs, _outputs),) = first.lengths  # no client came in the other interval
    assert (at, inputs.values, inputs.marks) == (21600.0, (39, 40), (0.5, 1.0))
    assert (second.name, second.lengths) == ("kind-1 chunk-1", ())
    with pytest.raises(TraceError, match=r"nothing of kind 'giant'; it holds kind-1"):
        load.servegen(path, "giant")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (MOONCAKE[:-20], r"trace\.jsonl, line 2: .*truncated\?"),
        (MOONCAKE + "<html>\n", r"trace\.jsonl, line 3: "),
        (MOONCAKE.replace('"input_length": 700', '"input_length": "many"'), r"line 1: .*input_length"),
        (MOONCAKE.replace("700", "-700"), r"line 1: -700 tokens; a number from 0"),
        (MOONCAKE.replace("700", "7000"), r"line 1: hash_ids cover 1024 of input_length 7000"),
        (MOONCAKE.replace("700", "500"), r"line 1: hash_ids cover 1024 of input_length 500; .*--block-tokens N"),
        ("", r"it holds no request"),
    ],
)
def test_mooncake_that_cannot_be_read(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(TraceError, match=says) as caught:
        load.mooncake(write(tmp_path / "trace.jsonl", text))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (AZURE.replace("TIMESTAMP", "time"), r"line 1: the head is 'time,.*TIMESTAMP,ContextTokens"),
        (AZURE[:-15], r"line 3: not enough values"),
        (AZURE.replace("374", "x"), r"line 2: invalid literal .*two whole numbers"),
        (AZURE.replace("374", "-1"), r"line 2: -1 tokens"),
        (AZURE.splitlines()[0], r"it holds no request"),
    ],
)
def test_azure_that_cannot_be_read(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(TraceError, match=says) as caught:
        load.azure(write(tmp_path / "azure.csv", text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"chunk_0_trace_csv": "0,0.1\n"}, r"chunk-0-trace\.csv, line 1: .*a rate and its variation"),
        ({"chunk_0_trace_csv": "0,0.1,1,,\n600,nan,1,,\n"}, r"line 2: a rate of nan"),
        ({"chunk_0_trace_csv": "0,-4,1,,\n"}, r"line 1: a rate of -4"),
        ({"chunk_0_trace_csv": "0,1,1,,\n", "chunk_0_dataset_json": "{"}, r"dataset\.json, line 1: "),
        (
            {"chunk_0_dataset_json": '{"0": {"input_tokens": "{1: 0}", "output_tokens": "{1: 1}"}}'},
            r"without any share",
        ),
        ({"chunk_0_dataset_json": '{"0": {"input_tokens": "exit()", "output_tokens": "{}"}}'}, r"malformed|histograms"),
        ({"chunk_0_dataset_json": '{"0": {"input_tokens": "{-1: 1.0}", "output_tokens": "{}"}}'}, r"without any share"),
        ({"chunk_0_dataset_json": '{"0": {"input_tokens": "{x: 1.0}", "output_tokens": "{}"}}'}, r"histograms"),
    ],
)
def test_servegen_that_cannot_be_read(tmp_path: Path, files: dict[str, str], says: str) -> None:
    with pytest.raises(TraceError, match=says) as caught:
        load.servegen(archive(tmp_path / "all.tar.gz", **files), "kind-1")
    assert "\n" not in str(caught.value)


def test_a_log_with_other_fields_names_the_import(tmp_path: Path) -> None:
    line = '{"at_s": 5, "input_tokens": 6, "output_tokens": 9, "model": "llama"}\n'
    with pytest.raises(TraceError, match=r"unknown field `model`; .* farhop sim import FILE --out mine\.yaml$"):
        load.log(write(tmp_path / "log.jsonl", line))


def test_a_programs_log_is_no_csv_and_nothing_of_it_is_repeated(tmp_path: Path) -> None:
    line = f"INFO 11-30 10:00:00 Received request: prompt: '{'tell me, ' * 3}{'secret ' * 20}', params: max_tokens=5\n"
    with pytest.raises(TraceError, match=r"line 1: no head of CSV; JSON objects") as caught:
        load.own_log(write(tmp_path / "vllm.log", line * 3), {})
    assert "secret" not in str(caught.value)


def gzipped_and_cut(path: Path, text: str) -> Path:
    """As a log that is copied while it is written, or whose copy broke off."""
    whole = gzip.compress(text.encode())
    path.write_bytes(whole[: len(whole) // 2])
    return path


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("".join(f'{{"ts": {n}, "input_tokens": {n * 7919 % 997}, "output_tokens": 4}}\n' for n in range(999)), "a.gz"),
        ('time,input_tokens,output_tokens,text\n1,2,3,hi\n2,2,3,"hello', "a.csv"),
    ],
)  # fmt: skip
def test_of_an_own_log_that_breaks_off_the_rows_before_are_kept_with_skip(tmp_path: Path, text: str, name: str) -> None:
    path = tmp_path / name
    path = gzipped_and_cut(path, text) if path.suffix == ".gz" else write(path, text)
    with pytest.raises(TraceError, match=r"line \d+: .*\(--skip reads what is before\)"):
        load.own_log(path, {})
    rows, (complaint,) = load.own_log(path, {}, skip=True)
    assert [row.at_s for row in rows] == [float(at) for at in range(len(rows))]
    at = int(complaint.partition("line ")[2].partition(":")[0])
    assert 0 < len(rows) <= at  # all before, at most
    assert complaint.endswith("; nothing from there on was read")


@pytest.mark.parametrize("skip", [False, True])
def test_an_own_log_that_breaks_off_at_once_is_an_error_with_skip_too(tmp_path: Path, skip: bool) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(LOG.encode())[:12])
    with pytest.raises(TraceError, match=r"; give a whole, readable file$"):
        load.own_log(path, {}, skip=skip)


def test_the_pause_after_an_answer_of_unknown_duration_is_unknown(tmp_path: Path) -> None:
    """It is not the time since an answer before that one: the session would be played twice as slowly."""
    asked = {"session": "a", "output_tokens": 5}
    lines = [
        {**asked, "ts": 0, "input_tokens": 10, "latency_ms": 1000}, {**asked, "ts": 31, "input_tokens": 30},
        {**asked, "ts": 61, "input_tokens": 50, "latency_ms": 2000}, {**asked, "ts": 93, "input_tokens": 70},
    ]  # fmt: skip
    rows, _ = load.own_log(write(tmp_path / "own", "".join(json.dumps(line) + "\n" for line in lines)), {})
    assert [row.pause_s for row in rows] == [None, 30.0, None, 30.0]


def test_requests_that_name_the_one_before_are_of_one_session(tmp_path: Path) -> None:
    """As in Qwen's traces, where each request has a chat_id of its own, and -1 begins a conversation."""
    chats = [(None, None), (1, -1), (2, -1), (3, 1), (4, 3), (5, 2), (6, 77), (7, None)]
    lines = [
        {"chat_id": chat, "parent_chat_id": before, "timestamp": at, "input_length": 40 + 60 * at, "output_length": 5}
        for at, (chat, before) in enumerate(chats)
    ]
    path = write(tmp_path / "own", "".join(json.dumps(line) + "\n" for line in reversed(lines)))
    assert [row.session for row in load.own_log(path, {})[0]] == ["", "1", "2", "1", "1", "2", "6", "7"]
    assert [row.session for row in load.own_log(path, {"session": "chat_id"})[0]] == ["", *"1234567"]


OF_AIPERF = [
    {"session_id": "a", "timestamp": 0, "input_length": 100, "output_length": 40},
    {"session_id": "a", "delay": 500, "input_length": 150, "output_length": 50},
    {"session_id": "b", "timestamp": 200, "input_length": 80, "output_length": 30},
    {"session_id": "b", "delay": 300, "input_length": 120, "output_length": 45},
    {"session_id": "b", "delay": 400, "input_length": 90, "output_length": 35},
]


def test_later_turns_of_a_mooncake_session_have_delays_and_may_name_only_new_tokens(tmp_path: Path) -> None:
    """AIPerf's own example: milliseconds, though small numbers are seconds in other logs."""
    path = write(tmp_path / "own", "".join(json.dumps(line) + "\n" for line in OF_AIPERF))
    assert load.published(path) is None
    rows, _ = load.own_log(path, {"new_tokens": "input_length"})
    assert [(row.at_s, row.session, row.input_tokens, row.pause_s) for row in rows] == [
        (0.0, "a", 100, None), (0.2, "b", 80, None), (0.5, "a", 290, 0.5), (0.5, "b", 230, 0.3), (0.9, "b", 365, 0.4),
    ]  # fmt: skip
    assert [row.input_tokens for row in load.own_log(path, {})[0]] == [100, 80, 150, 120, 90]


def test_blocks_of_a_mooncake_session_have_512_tokens_unless_another_length_is_given(tmp_path: Path) -> None:
    lines = [
        {"session_id": "a", "timestamp": 1000.5, "input_length": 600, "output_length": 9, "hash_ids": [7, 8]},
        {"session_id": "a", "delay": 2.5, "input_length": 700, "output_length": 9, "hash_ids": [7, 9]},
    ]
    path = write(tmp_path / "own", "".join(json.dumps(line) + "\n" for line in lines))
    assert load.published(path) is None
    rows, _ = load.own_log(path, {})
    assert [(row.at_s, row.blocks) for row in rows] == [
        (0.0, (("7", 512), ("8", 88))),
        (0.0025, (("7", 512), ("9", 188))),
    ]
    rows, _ = load.own_log(path, {"new_tokens": "input_length"}, block_tokens=400)
    assert [row.blocks for row in rows] == [(("7", 400), ("8", 200))] * 2, "the conversation begins as it began"


def test_a_session_must_begin_at_some_time(tmp_path: Path) -> None:
    path = write(tmp_path / "own", json.dumps(OF_AIPERF[1]) + "\n")
    with pytest.raises(TraceError, match="the first line of session 'a' has a pause and no time; give it a time"):
        load.own_log(path, {})


def test_seconds_beside_lengths_of_mooncakes_names_stay_seconds(tmp_path: Path) -> None:
    """A log of one's own: nothing but its names is Mooncake's."""
    lines = [{**OF_AIPERF[0], "timestamp": at_s} for at_s in (10, 12)]
    rows, _ = load.own_log(write(tmp_path / "own", "".join(json.dumps(line) + "\n" for line in lines)), {})
    assert [row.at_s for row in rows] == [0.0, 2.0]


def test_truncated_or_missing_files_are_reported(tmp_path: Path) -> None:
    cut = gzipped_and_cut(tmp_path / "cut.jsonl.gz", (MOONCAKE * 500).replace("3000", "0"))
    with pytest.raises(TraceError, match=r"cut\.jsonl\.gz, line \d+: .*; give a whole, readable file"):
        load.mooncake(cut)
    with pytest.raises(TraceError, match=r": No such file or directory; give a whole"):
        load.azure(tmp_path / "none.csv")
    tar = archive(tmp_path / "all.tar.gz", chunk_0_trace_csv="0,1,1,,\n" * 5000)
    tar.write_bytes(tar.read_bytes()[:60])
    with pytest.raises(TraceError, match=r"give a whole \.tar\.gz archive"):
        load.servegen(tar, "kind-1")


@given(st.permutations(range(5)))
def test_servegen_stretches_come_in_the_order_of_time(
    tmp_path_factory: pytest.TempPathFactory, order: list[int]
) -> None:
    lines = "".join(f"{600 * n},{n + 1},1\n" for n in order)
    path = archive(tmp_path_factory.getbasetemp() / "stretches.tar.gz", chunk_0_trace_csv=lines)
    (found,) = load.servegen(path, "kind-1")
    assert found.bursts == tuple(Burst(600.0 * n, 600.0, n + 1.0, 1.0) for n in range(5))


@pytest.mark.parametrize("lines", ["0,1,1\n600,1,1\n300,1,1\n", "600,1,1\n0,1,1\n0,1,1\n"])
def test_overlapping_servegen_intervals_are_an_error(tmp_path: Path, lines: str) -> None:
    with pytest.raises(TraceError, match=r"line 3: its 600 s from \d+ s overlap those from 0 s; give one line"):
        load.servegen(archive(tmp_path / "all.tar.gz", chunk_0_trace_csv=lines), "kind-1")


def test_a_line_without_end_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a device, or of a gzip file that unpacks to very much."""
    monkeypatch.setattr(load, "LINE_CHARS_MAX", 100)
    with pytest.raises(TraceError, match="line 2: 100 characters and more; one object a line is expected"):
        load.mooncake(write(tmp_path / "a.jsonl.gz", MOONCAKE.splitlines(keepends=True)[0] + "\0" * 1000))
