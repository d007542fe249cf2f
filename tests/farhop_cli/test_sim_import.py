"""`farhop sim import` as a person meets it: a log becomes a scenario that runs, or one line says why not."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farhop_cli.main import app
from farhop_lab.scenarios import load, work
from farhop_lab.studies import routers
from farhop_lab.workloads.program import Ask, Program
from farhop_lab.workloads.prose import TOKEN_BYTES

LINES = [
    {"timestamp": "2026-11-01T10:00:03Z", "usage": {"prompt_tokens": 500, "completion_tokens": 100},
     "session_id": "a", "latency_ms": 1500},
    {"timestamp": "2026-11-01T10:00:01Z", "usage": {"prompt_tokens": 900, "completion_tokens": 50}, "session_id": "b"},
    {"timestamp": "2026-11-01T10:00:12Z", "usage": {"prompt_tokens": 640, "completion_tokens": 10}, "session_id": "a"},
]  # fmt: skip


def written(path: Path, lines: list[dict[str, object]], array: bool = False) -> str:
    path.write_text(json.dumps(lines, indent=1) if array else "".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.mark.parametrize("array", [False, True])
def test_a_log_becomes_a_scenario_that_runs(tmp_path: Path, array: bool) -> None:
    log, out = written(tmp_path / "own.json", LINES, array), tmp_path / "mine.yaml"
    text = CliRunner().invoke(app(), ["sim", "import", log, "--out", str(out), "--regions", "tokyo", "--json"])
    assert text.exit_code == 0, text.output
    facts = json.loads(text.stdout)
    assert (facts["requests"], facts["sessions"], facts["span_s"], facts["left_out"]) == (3, 2, 11.0, 0)
    rows = [json.loads(line) for line in (tmp_path / "mine.jsonl").read_text().splitlines()]
    assert [row["at_s"] for row in rows] == [0.0, 2.0, 11.0]
    assert rows[2] == {"at_s": 11.0, "input_tokens": 640, "output_tokens": 10, "session": "a", "pause_s": 7.5}
    scenario = load.find(str(out), routers.names())
    (work,) = scenario.doc.work
    assert (work.kind, work.loop, work.regions) == ("log", "closed", ["tokyo"])
    ran = CliRunner().invoke(app(), ["sim", str(out), "--policy", "farhop", "--seeds", "1", "--workers", "1"])
    assert ran.exit_code == 0, ran.output


def test_regions_that_are_recorded_are_kept(tmp_path: Path) -> None:
    lines = [{**line, "region": region} for line, region in zip(LINES, ("tokyo", "virginia", "tokyo"), strict=True)]
    out = tmp_path / "mine.yaml"
    text = CliRunner().invoke(app(), ["sim", "import", written(tmp_path / "own", lines), "--out", str(out)])
    assert text.exit_code == 0, text.output
    (work,) = load.find(str(out), routers.names()).doc.work
    assert (work.place, sorted(work.regions)) == ("recorded", ["tokyo", "virginia"])


@pytest.mark.parametrize(
    ("regions", "sites"),
    [([], {"virginia", "frankfurt", "tokyo"}), (["--regions", "frankfurt"], {"frankfurt", "tokyo"})],
)
def test_a_region_without_clients_of_its_own_has_replicas_too(
    tmp_path: Path, regions: list[str], sites: set[str]
) -> None:
    """Else a fleet with a single entry would be planned as if it had no other region to lose, or to spill to."""
    out = tmp_path / "mine.yaml"
    log = written(tmp_path / "own", [{**line, "region": "tokyo"} for line in LINES])
    text = CliRunner().invoke(app(), ["sim", "import", log, "--out", str(out), *regions])
    assert text.exit_code == 0, text.output
    doc = load.find(str(out), routers.names()).doc
    assert (set(doc.sites), doc.work[0].place, doc.work[0].regions) == (sites, "recorded", ["tokyo"])


def test_missing_fields_of_the_log_are_reported(tmp_path: Path) -> None:
    lines = [{"timestamp": n, "prompt_tokens": 150_000 * n + 1, "completion_tokens": 5} for n in range(2)]
    text = CliRunner().invoke(
        app(), ["sim", "import", written(tmp_path / "own", lines), "--out", str(tmp_path / "m.yaml")]
    )
    assert text.exit_code == 0, text.output
    cut, alike = text.stderr.splitlines()
    assert "1 of 2 requests are longer than 131072 tokens" in cut
    assert "every prompt counts as new" in alike


def test_smaller_gpus_than_were_proposed_may_be_put_in(tmp_path: Path) -> None:
    out = tmp_path / "mine.yaml"
    text = CliRunner().invoke(app(), ["sim", "import", written(tmp_path / "own", LINES), "--out", str(out)])
    assert (text.exit_code, text.stderr) == (0, "")
    out.write_text(out.read_text().replace("gpu: a100", "gpu: l4"))
    (work,) = load.find(str(out), routers.names()).doc.work
    assert (work.figures["context_tokens"], work.figures["max_tokens"]) == (950, 100)


@pytest.mark.parametrize(("file", "name"), [("My Friday_2.yaml", "my-friday_2"), ("_.yaml", "imported")])
def test_scenario_runs_under_any_file_name(tmp_path: Path, file: str, name: str) -> None:
    out = tmp_path / file
    text = CliRunner().invoke(app(), ["sim", "import", written(tmp_path / "own", LINES), "--out", str(out)])
    assert text.exit_code == 0, text.output
    assert load.find(str(out), routers.names()).doc.name == name


@pytest.mark.parametrize("text", ['{"timestamp": 5, "usa', "17\n"], ids=["cut", "no object"])
def test_file_other_than_a_log_is_reported_in_one_line_with_the_expected_format(tmp_path: Path, text: str) -> None:
    (tmp_path / "own").write_text(text)
    output = CliRunner().invoke(app(), ["sim", "import", str(tmp_path / "own"), "--out", str(tmp_path / "mine.yaml")])
    assert output.exit_code == 2
    assert output.stderr.count("\n") == 1
    assert "own, line 1: " in output.stderr
    assert "; JSON objects, one a line or in one array, or CSV are expected" in output.stderr


@pytest.mark.parametrize("before", ["2026-11-30T10:00:00.1Z stdout F ", "engine-0 | ", "Nov 30 10:00:00 host app[7]: "])
def test_json_behind_other_text_is_reported_with_its_remedy(tmp_path: Path, before: str) -> None:
    """As container engines and syslog write it. With its commas it looks like CSV."""
    (tmp_path / "own").write_text("".join(f"{before}{json.dumps(line)}\n" for line in LINES))
    output = CliRunner().invoke(app(), ["sim", "import", str(tmp_path / "own"), "--out", str(tmp_path / "mine.yaml")])
    assert output.exit_code == 2
    assert output.stderr.count("\n") == 1
    assert "own, line 1: JSON behind other text; cut that off, as by: sed 's/^[^{]*//'" in output.stderr


def test_lines_that_cannot_be_read_are_shown_and_counted(tmp_path: Path) -> None:
    log, out = written(tmp_path / "own", [*LINES, {"timestamp": 5, "usage": None}]), tmp_path / "mine.yaml"
    text = CliRunner().invoke(app(), ["sim", "import", log, "--out", str(out)])
    assert text.exit_code == 2
    assert "line 4: no input_tokens" in text.stderr
    assert not out.exists()
    text = CliRunner().invoke(app(), ["sim", "import", log, "--out", str(out), "--skip", "--json"])
    assert text.exit_code == 0
    assert json.loads(text.stdout)["left_out"] == 1
    assert "left out: " in text.stderr


PUBLISHED = {
    "mooncake": '{"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}\n'
    '{"timestamp": 0, "input_length": 9, "output_length": 2, "hash_ids": [0]}\n',
    "sessions": '{"session": "s", "at_s": 5, "prefix": [["tools", 697]], "turns": [{"input_tokens": 3, "output_tokens"'
    ': 5}, {"input_tokens": 4, "output_tokens": 2, "pause_s": 3.0}]}\n',
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_trace_that_a_scenario_plays_as_it_stands_is_not_copied(tmp_path: Path, kind: str) -> None:
    log, out = tmp_path / "trace.jsonl", tmp_path / "mine.yaml"
    log.write_text(PUBLISHED[kind])
    text = CliRunner().invoke(app(), ["sim", "import", str(log), "--out", str(out), "--json"])
    assert (text.exit_code, text.stderr) == (0, "")
    facts = json.loads(text.stdout)
    tokens = {"mooncake": 700, "sessions": 709}[kind]
    assert (facts["requests"], facts["span_s"], facts["input_tokens_max"], facts["trace"]) == (2, 3.0, tokens, str(log))
    assert sorted(tmp_path.iterdir()) == [out, log]
    (piece,) = load.find(str(out), routers.names()).doc.work
    assert (piece.kind, piece.path) == (kind, str(log))


def test_a_trace_with_fields_of_its_own_is_a_log(tmp_path: Path) -> None:
    log, out = tmp_path / "trace.jsonl", tmp_path / "mine.yaml"
    log.write_text(PUBLISHED["mooncake"])
    fields = ["at_ms=timestamp", "input_tokens=input_length", "output_tokens=output_length"]
    given = [one for field in fields for one in ("--field", field)]
    text = CliRunner().invoke(app(), ["sim", "import", str(log), "--out", str(out), "--json", *given])
    assert text.exit_code == 0, text.output
    rows = [json.loads(line) for line in (tmp_path / "mine.jsonl").read_text().splitlines()]
    assert rows == [
        {"at_s": 0.0, "input_tokens": 9, "output_tokens": 2}, {"at_s": 3.0, "input_tokens": 700, "output_tokens": 5}
    ]  # fmt: skip


def test_a_trace_of_blocks_of_another_length_is_a_log_with_blocks(tmp_path: Path) -> None:
    """Such as Qwen's: seconds, and blocks of 16 tokens."""
    log, out = tmp_path / "trace.jsonl", tmp_path / "mine.yaml"
    log.write_text(
        '{"chat_id": 1, "timestamp": 61.114, "input_length": 40, "output_length": 5, "hash_ids": [1, 2, 3]}\n'
        '{"chat_id": 2, "timestamp": 60.5, "input_length": 20, "output_length": 5, "hash_ids": [1, 4]}\n'
    )
    asked = ["sim", "import", str(log), "--out", str(out)]
    text = CliRunner().invoke(app(), asked)
    assert text.exit_code == 2
    assert "--block-tokens" in text.stderr
    text = CliRunner().invoke(app(), [*asked, "--block-tokens", "16"])
    assert (text.exit_code, text.stderr) == (0, "")
    rows = [json.loads(line) for line in (tmp_path / "mine.jsonl").read_text().splitlines()]
    assert [(row["at_s"], row["blocks"]) for row in rows] == [
        (0.0, [["1", 16], ["4", 4]]), (0.614, [["1", 16], ["2", 16], ["3", 8]])
    ]  # fmt: skip
    load.find(str(out), routers.names())


def test_turns_that_count_only_what_they_add_are_asked_about(tmp_path: Path) -> None:
    lines = [
        {"session_id": "a", "timestamp": 0, "input_length": 100, "output_length": 40},
        {"session_id": "a", "delay": 500, "input_length": 90, "output_length": 50},
    ]
    log, out = written(tmp_path / "own", lines), tmp_path / "mine.yaml"
    asked = ["sim", "import", log, "--out", str(out)]
    text = CliRunner().invoke(app(), asked)
    assert (text.exit_code, text.stderr.count("1 of 1 later turns are shorter")) == (0, 1), text.stderr
    assert "--field new_tokens=PATH" in text.stderr
    out.unlink()
    out.with_suffix(".jsonl").unlink()
    text = CliRunner().invoke(app(), [*asked, "--field", "new_tokens=input_length"])
    assert (text.exit_code, text.stderr) == (0, "")
    assert '"input_tokens":230' in out.with_suffix(".jsonl").read_text()


@pytest.mark.parametrize("bytes_max", [100, 400], ids=["the trace", "the scenario"])
def test_a_full_disk_is_named_and_leaves_no_half_of_a_file(tmp_path: Path, bytes_max: int) -> None:
    log, out = written(tmp_path / "own", LINES), tmp_path / "mine.yaml"
    code = (
        "import resource, signal, sys; from farhop_cli.main import main; "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({bytes_max}, {bytes_max})); "
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); main()"
    )
    command = [sys.executable, "-c", code, "sim", "import", log, "--out", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"farhop: --out: {tmp_path}: File too large; give a place that can be written to\n"
    assert list(tmp_path.iterdir()) == [Path(log)]


def test_requests_of_one_instant_count(tmp_path: Path) -> None:
    out = tmp_path / "mine.yaml"
    log = written(tmp_path / "own", [{"timestamp": 7, "prompt_tokens": 5, "completion_tokens": 5}] * 3)
    assert CliRunner().invoke(app(), ["sim", "import", log, "--out", str(out)]).exit_code == 0
    ran = CliRunner().invoke(app(), ["sim", str(out), "--policy", "farhop", "--seeds", "1", "--json"])
    assert (ran.exit_code, ran.stderr) == (0, "")
    assert json.loads(ran.stdout)["cells"][0]["score"]["whole"]["asked"] == 3


@pytest.mark.parametrize(
    "lines",
    [
        [{"at_s": at, "input_tokens": 50, "output_tokens": 5} for at in (0, 3, 10, 10)],
        [{"timestamp": at, "input_length": 9, "output_length": 5, "hash_ids": [7]} for at in (0, 3000, 9000, 9000)],
    ],
)
def test_the_last_requests_of_a_log_are_played_too(tmp_path: Path, lines: list[dict[str, object]]) -> None:
    """With stamps of whole seconds all those of the last one, with Mooncake's those of 3 s."""
    out = tmp_path / "m.yaml"
    CliRunner().invoke(app(), ["sim", "import", written(tmp_path / "own", lines), "--out", str(out)])
    ran = CliRunner().invoke(app(), ["sim", str(out), "--policy", "farhop", "--seeds", "1", "--json"])
    (cell,) = json.loads(ran.stdout)["cells"]
    assert cell["program_counts"]["asked"] == 4


def test_import_lists_what_is_not_replayed_as_logged(tmp_path: Path) -> None:
    lines = [{"timestamp": at, "prompt_tokens": 5, "completion_tokens": 0, "session": "a"} for at in (0, 700_000)]
    out = tmp_path / "m.yaml"
    text = CliRunner().invoke(app(), ["sim", "import", written(tmp_path / "own", lines), "--out", str(out)])
    assert text.exit_code == 0, text.output
    empty, long = text.stderr.splitlines()
    assert "2 of 2 requests have a prompt or an answer of 0 tokens, which counts as 1" in empty
    assert "spans 700000 s, and the scenario plays its first 604800" in long


@pytest.mark.parametrize(
    ("session", "says", "played"),
    [
        ({"session": "a"}, "a session ends before such a one", [100_000]),
        ({}, "they are cut to that", [100_000, 131_062]),
    ],
)
def test_import_says_what_becomes_of_a_request_that_no_gpu_has_room_for(
    tmp_path: Path, session: dict[str, str], says: str, played: list[int]
) -> None:
    lines = [
        {"at_s": at, "input_tokens": tokens, "output_tokens": 10, **session}
        for at, tokens in enumerate((100_000, 140_000))
    ]
    out = tmp_path / "m.yaml"
    text = CliRunner().invoke(app(), ["sim", "import", written(tmp_path / "own", lines), "--out", str(out)])
    assert f"1 of 2 requests are longer than 131072 tokens: {says}" in text.stderr
    (schedule,) = work.schedules(load.find(str(out), routers.names()).doc.work[0], "w", 1, 1.0, {}, tmp_path, 9.0)
    assert [len(ask.prompt) // TOKEN_BYTES for start in schedule for ask in asks_of(start.make())] == played


def asks_of(program: Program) -> list[Ask]:
    """What a program asks if every answer is as long as it may be."""
    asks: list[Ask] = []
    answers: tuple[bytes, ...] | None = None
    with suppress(StopIteration):
        while True:
            (ask,) = next(program) if answers is None else program.send(answers)
            asks.append(ask)
            answers = (b"x" * TOKEN_BYTES * ask.answer_tokens,)
    return asks


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "mine.txt"], "let it end in .yaml"),
        (["--out", "{there}"], "is there already, and is not written over"),
        (["--regions", "tokio"], 'did you mean "tokyo"'),
        (["--topology", "nowhere"], "no ready-made world of that name"),
        (["--field", "when=x"], "--field: there are: at_s"),
        (["--field", "at_s"], "names no path; give one such as at_s="),
        (["--field", "input_tokens=size"], "no input_tokens (looked for size; there is timestamp, usage, "),
        (["--out", "/dev/null/x.yaml"], "give a place that can be written to"),
    ],
)
def test_error_is_reported_in_one_line(tmp_path: Path, arguments: list[str], words: str) -> None:
    there = tmp_path / "there.yaml"
    there.touch()
    given = [one.format(there=there) for one in arguments]
    out = [] if "--out" in given else ["--out", str(tmp_path / "mine.yaml")]
    output = CliRunner().invoke(app(), ["sim", "import", written(tmp_path / "own", LINES), *out, *given])
    assert output.exit_code == 2
    assert words in output.stderr
    assert output.stderr.count("\n") == 1
    assert not (tmp_path / "mine.jsonl").exists()


def test_the_name_of_the_log_itself_is_not_taken_for_its_trace(tmp_path: Path) -> None:
    log = written(tmp_path / "friday.jsonl", LINES)
    output = CliRunner().invoke(app(), ["sim", "import", log, "--out", str(tmp_path / "friday.yaml")])
    assert output.exit_code == 2
    assert output.stderr.startswith(f"farhop: --out: its trace goes to {log}, which is there already")


def test_regions_that_the_topology_has_not_may_be_ignored(tmp_path: Path) -> None:
    log, out = written(tmp_path / "own", [{**line, "region": "us-east-1"} for line in LINES]), tmp_path / "mine.yaml"
    asked = ["sim", "import", log, "--out", str(out), "--regions", "tokyo"]
    output = CliRunner().invoke(app(), asked)
    assert output.exit_code == 2
    assert "names unknown region 'us-east-1'; the topology has: virginia, frankfurt, tokyo; give yours" in output.stderr
    assert output.stderr.endswith("by --topology, or ignore regions by --field region=-\n")
    assert CliRunner().invoke(app(), [*asked, "--field", "region=-"]).exit_code == 0
    (piece,) = load.find(str(out), routers.names()).doc.work
    assert (piece.place, piece.regions) == ("uniform", ["tokyo"])


def test_a_log_that_names_some_regions_only_is_placed_evenly(tmp_path: Path) -> None:
    log, out = written(tmp_path / "own", [*LINES, {**LINES[0], "region": "tokyo"}]), tmp_path / "mine.yaml"
    text = CliRunner().invoke(app(), ["sim", "import", log, "--out", str(out)])
    assert text.exit_code == 0, text.output
    assert "3 of 4 requests name no region, so all of them are placed evenly" in text.stderr
    assert load.find(str(out), routers.names()).doc.work[0].place == "uniform"
