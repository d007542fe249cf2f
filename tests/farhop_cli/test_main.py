"""The wiring: every command is there with an example, and help does not import what a command needs."""

import subprocess
import sys

import pytest
import typer

from farhop_cli import main

COMMANDS = sorted(typer.main.get_command(main.app).commands)  # type: ignore[attr-defined]


def test_the_commands_owed():
    assert set(COMMANDS) >= {
        "ask", "bench", "bias", "check", "demo", "drain", "engine", "explain", "global", "hash-key", "pin", "policy",
        "regional", "split", "status", "unbias", "undrain", "unpin", "up",
    }  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_an_example_that_names_it(cli, command):
    result = cli.run(command, "--help")
    assert result.exit_code == 0
    assert f"farhop {command}" in " ".join(result.stdout.partition("Example")[2].split())


@pytest.mark.parametrize(
    "arguments", [("nonsense",), ("ask",), ("status", "--nonsense"), ("ask", "hi", "--max-tokens", "0")]
)
def test_bad_usage_is_code_2_without_a_trace(cli, arguments):
    result = cli.run(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr


def test_help_is_quick_since_it_imports_no_balancer_no_network_no_telemetry():
    heavy = ("aiohttp", "uvloop", "grpc", "opentelemetry", "rich.table", "pydantic", "global_lb", "regional_lb")
    code = f"import sys, farhop_cli.main; sys.exit(', '.join(n for n in {heavy} if n in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupt_ends_quietly(monkeypatch):
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "app", interrupted)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 130
