"""The wiring: every command is there, its help whole and with an example, and help imports nothing it does not need."""

import functools
import inspect
import io
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from farhop_cli import main, options
from farhop_cli.commands.sim import RunsByDefault

ROOT = Path(__file__).parents[2]
REGIONS = SimpleNamespace(regions={"virginia": None, "tokyo": None})


@functools.cache
def tree():
    """Every command's words, groups included."""
    group = typer.main.get_command(main.app())
    found = [()]
    for name in main.COMMANDS:
        command = group.get_command(None, name)
        found.append((name,))
        found += [(name, verb) for verb in getattr(command, "commands", ())]
    return found


def test_every_expected_command_exists_and_all_are_in_the_table():
    assert {words[0] for words in tree() if words} == set(main.COMMANDS) >= {
        "ask", "bench", "bias", "certs", "check", "demo", "drain", "engine", "explain", "global", "hash-key", "law",
        "picker", "pin", "plan", "policy", "regional", "route", "sim", "split", "status", "undrain", "up",
    }  # fmt: skip


@pytest.mark.parametrize("columns", [80, 120])
def test_every_help_is_whole_has_an_example_and_no_types_of_python(cli, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERMINAL_WIDTH", str(columns))
    for words in tree():
        result = cli.run(*words, "--help")
        assert result.exit_code == 0, words
        lines = result.stdout.splitlines()
        assert max(map(len, lines)) <= columns, words
        assert not [line for line in lines if line.endswith("...") and not line.startswith("Usage")], (columns, words)
        assert "list[" not in result.stdout, words
        example = " ".join(result.stdout.partition("Example")[2].split())
        assert " ".join(("farhop", *words)) in example, words


def test_the_line_of_a_command_is_the_first_of_its_own_help():
    group = typer.main.get_command(main.app())
    for name, wired in main.COMMANDS.items():
        first = inspect.cleandoc(group.get_command(None, name).help).split("\n\n")[0]
        assert wired.help == " ".join(first.split()), name


# Commands without --dry-run, and why. All others have it.
READS = frozenset((
    "ask", "explain", "status", "top", "usage", "check", "healthcheck", "where", "plan", "context list", "context show",
    "law get", "law diff", "law history", "law verify", "key list", "audit verify", "audit prove", "drill list",
    "drill report", "drill history", "dns check", "dns latencies", "anycast status",
    *(f"{noun} {verb}" for noun in ("route", "split", "policy", "bias", "pin", "drain", "limit")
      for verb in ("get", "diff", "history")),
))  # fmt: skip
RUNS = frozenset(("up", "demo", "console", "global", "regional", "picker", "engine", "anycast run", "drill faults"))
WRITES_A_NEW_FILE = frozenset(("bundle", "record", "audit export", "drill export", "sim run", "sim import"))
PRINTS = frozenset(("law sign", "hash-key", "certs hop-key"))  # its result appears only on the screen


def leaves(command, words=()):
    """Every command that can be given, by its words."""
    if not hasattr(command, "list_commands"):
        yield " ".join(words), command
        return
    for name in command.list_commands(None):
        yield from leaves(command.get_command(None, name), (*words, name))


def test_every_command_that_changes_something_has_a_dry_run():
    found = dict(leaves(typer.main.get_command(main.app())))
    dry = {words for words, command in found.items() if any("--dry-run" in one.opts for one in command.params)}
    measures = {words for words in found if words.startswith("bench ")}  # in worlds of its own
    assert found.keys() - dry == READS | RUNS | WRITES_A_NEW_FILE | PRINTS | measures
    assert {"log-level", "anycast withdraw", "certs init", "certs issue", "dns publish", "context use"} <= dry


def documented():
    """Each line of a code block in the documents that calls `farhop`, with its file."""
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))):
        if path.exists():
            blocks = path.read_text().split("```")[1::2]
            found = re.findall(r"^(?:\.venv/bin/)?farhop (.+)$", "\n".join(blocks), re.MULTILINE)
            yield from ((path.name, line) for line in found)


def test_every_command_in_the_documents_is_one(monkeypatch):
    monkeypatch.setenv("FARHOP_SIGNING_KEY", "ops.pem")  # a step that the documents describe before this one
    group, lines = typer.main.get_command(main.app()), list(documented())
    assert len(lines) > 50
    for name, line in lines:
        words = shlex.split(re.split(r" [|>&]", line)[0], comments=True)
        with group.make_context("farhop", words) as context:
            command, rest = group, words
            while hasattr(command, "list_commands"):
                if isinstance(command, RunsByDefault) and rest[0] not in command.commands:
                    rest = ["run", *rest]
                command = command.get_command(context, rest[0])
                assert command is not None, (name, line)
                rest = rest[1:]
            if "SCENARIO" not in rest:
                command.make_context("farhop", rest)  # wrong usage raises


def mentioned():
    """Each command that a sentence names (`farhop …`), with its file; what stands in capitals is any word."""
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))):
        prose = "".join(path.read_text().split("```")[::2])
        yield from ((path.name, line) for line in re.findall(r"`(?:\.venv/bin/)?farhop ([a-z][^`]+)`", prose))


def test_every_command_in_a_sentence_is_one():
    group, lines = typer.main.get_command(main.app()), list(mentioned())
    assert len(lines) > 100
    for name, line in lines:
        command, words = group, shlex.split(line)
        while hasattr(command, "list_commands") and words and not words[0].startswith(("-", "…")):
            verbs = words[0].split("|")
            if isinstance(command, RunsByDefault) and verbs[0] not in command.commands:
                verbs = ["run"]
            if verbs[0].isupper():
                break
            found = [command.get_command(None, verb) for verb in verbs]
            assert all(found), (name, line)
            command, words = found[0], words[1:]
        known = {"--help"}.union(*(one.opts for one in command.params), *(one.secondary_opts for one in command.params))
        given = {re.split("[=.,]", word)[0] for word in words if word.startswith("--")}
        assert given <= known, (name, line)


@pytest.mark.parametrize(
    "arguments", [("nonsense",), ("ask",), ("status", "--nonsense"), ("ask", "hi", "--max-tokens", "0"), ("bench", "x")]
)
def test_bad_usage_is_code_2_without_a_trace(cli, arguments):
    result = cli.run(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr


def test_the_version(cli):
    assert cli.run("--version").stdout.startswith("farhop 0.")
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "farhop_cli", "--version"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stdout) == (0, cli.run("--version").stdout)
    assert "typer" not in done.stderr


def test_the_shell_completes_commands_and_verbs(cli, monkeypatch):
    monkeypatch.setattr("shellingham.detect_shell", lambda *_: ("bash", "/bin/bash"))  # whatever started the tests
    shown = cli.run("--show-completion", "bash")
    assert "_COMPLETE" in shown.stdout + shown.stderr
    monkeypatch.setenv("_ROOT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "root drain un")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert cli.run().stdout.split() == ["unset"]
    monkeypatch.setattr(options, "world_file", SimpleNamespace(read=lambda _path: REGIONS, WorldFileError=OSError))
    monkeypatch.setenv("COMP_WORDS", "root drain unset to")
    monkeypatch.setenv("COMP_CWORD", "3")
    assert cli.run().stdout.split() == ["tokyo"]


def test_help_is_quick_since_it_imports_no_balancer_no_network_no_telemetry():
    heavy = ("aiohttp", "uvloop", "grpc", "opentelemetry", "rich.table", "pydantic", "global_lb", "regional_lb")
    code = f"""
import sys
from farhop_cli import main
from farhop_cli.commands import bench, look, verbs, wiring
try:
    main.app()(["--help"])
except SystemExit:
    pass
sys.exit(', '.join(n for n in {heavy} if n in sys.modules) or 0)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupt_ends_quietly(monkeypatch):
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "app", interrupted)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 130


HEAVY = ("aiohttp", "grpc", "numpy", "jwt", "cryptography", "google.protobuf", "opentelemetry", "structlog", "uvloop")
NOWHERE = "127.0.0.1:1"  # nothing listens there


LINES = {
    "--version": (),
    "--help": (),
    "limit --help": (),
    "context": (),
    "usage {folder}": (),
    "limit get": ("cryptography",),  # no fleet is named here, so that no balancer is asked
    "status": ("aiohttp", "cryptography"),
    f"limit get --etcd {NOWHERE}": ("cryptography", "grpc", "google.protobuf"),
    f"law get --etcd {NOWHERE}": ("cryptography", "grpc", "google.protobuf"),
    "limit get --context one": ("cryptography", "grpc", "google.protobuf"),
    f"status --admin http://{NOWHERE}": ("aiohttp", "cryptography"),
}


def test_a_command_imports_what_it_uses(tmp_path):
    """Counted by module: what an operator waits for before anything is asked is nearly all imports.

    An interpreter forks for each line. It has imported what reads any command line, which is none of the heavy ones.
    """
    contexts = tmp_path / "farhop" / "contexts.yaml"
    contexts.parent.mkdir()
    contexts.write_text(f"contexts: {{one: {{etcd: {{endpoints: ['{NOWHERE}']}}}}}}")
    code = f"""
import os, sys, traceback
import pydantic, typer, typer._adapters
for line in {list(LINES)}:
    if os.fork() == 0:
        sys.argv = ["farhop", *line.format(folder={str(tmp_path)!r}).split()]
        try:
            from farhop_cli.main import main
            main()
        except SystemExit:
            pass
        except BaseException:
            traceback.print_exc()
        print("IMPORTED", *(name for name in {HEAVY} if name in sys.modules), flush=True)
        os._exit(0)
    os.wait()
    assert not any(name in sys.modules for name in {HEAVY})"""
    environment = {"PATH": os.environ["PATH"], "XDG_CONFIG_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    imported = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("IMPORTED")]
    too_many = {
        line: found for (line, used), found in zip(LINES.items(), imported, strict=True) if not set(found) <= set(used)
    }
    assert too_many == {}


def test_a_commands_tree_is_built_once_a_process():
    first, second = (typer.main.get_command(main.app()) for _ in range(2))
    assert first is not second
    assert all(first.get_command(None, name) is second.get_command(None, name) for name in main.COMMANDS)
    assert first.get_command(None, "drian") is None


@pytest.mark.parametrize(
    ("words", "right"), [(("topp",), "'top'"), (("lw", "get"), "'law'"), (("key", "creat"), "'create'")]
)
def test_a_mistyped_command_is_reported_with_the_right_one(cli, words, right):
    result = cli.run(*words)
    assert result.exit_code == 2
    assert f"Did you mean {right}" in result.stderr


def test_a_missing_verb_is_answered_with_the_list_of_verbs(cli):
    result = cli.run("drain", "tokyo")
    assert result.exit_code == 2
    assert "drain`; use one of get, set, unset, diff, history" in result.stderr


# -- where standard output is not what a command is used to


def shell(command, **environment):
    """The exit code of a command line, and what it says on stderr."""
    found = subprocess.run(
        ["sh", "-c", command], env=os.environ | {"FARHOP": f"{sys.executable} -m farhop_cli"} | environment, cwd=ROOT,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return found.returncode, found.stderr


# Buffered, an error appears at the end, unbuffered as it is written, whoever writes it (typer, JSON).
@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [
        ("--version", ""),
        ("--version", "1"),
        ("--help", "1"),
        ("check three-regions", ""),
        ("check three-regions --json", "1"),
    ],
)
def test_a_full_disk_behind_standard_output_is_one_line(words, unbuffered):
    said = shell(f"$FARHOP {words} > /dev/full", PYTHONUNBUFFERED=unbuffered)
    assert said == (2, "farhop: standard output: No space left on device\n")


def test_closed_standard_streams_cause_no_error():
    assert shell("$FARHOP check three-regions <&- >&-") == (0, "")
    assert shell("$FARHOP check nowhere <&- >&- 2>&-") == (2, "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_unencodable_characters_are_printed_as_question_marks(monkeypatch, capsys, encoding):
    out = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "argv", ["farhop", "check", "three-regions"])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert (end.value.code, capsys.readouterr().err) == (0, "")
    assert b"?" in out.buffer.getvalue()  # a dash if there is no value


def test_a_stream_that_was_a_file_and_is_a_pipe_is_written_to(monkeypatch):
    """So it is in what is forked by a process whose output goes to a file."""

    class Swapped(io.TextIOWrapper):
        def reconfigure(self, **_given):
            raise OSError(29, "Illegal seek")

    for encoding in ("utf-8", "ascii"):
        out = Swapped(io.BytesIO(), encoding)
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "argv", ["farhop", "--version"])
        with pytest.raises(SystemExit) as end:
            main.main()
        assert end.value.code == 0
        assert out.buffer.getvalue().startswith(b"farhop ")


@pytest.mark.parametrize(
    ("command", "ends"),
    [("global", False), ("regional", False), ("picker", False), ("dns", False), ("anycast", False), ("status", True)],
)
def test_a_reload_that_comes_while_a_process_is_still_importing_does_not_end_it(monkeypatch, command, ends):
    """Seconds, on a busy host; its files are read after that anyway."""
    found = []
    monkeypatch.setattr(sys, "argv", ["farhop", command])
    monkeypatch.setattr(main, "app", lambda: lambda: found.append(signal.getsignal(signal.SIGHUP)))
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        main.main()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (found == [signal.SIG_DFL]) is ends
    assert found != [signal.SIG_IGN]  # which programs that it starts would inherit
