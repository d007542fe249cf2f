"""`farhop engine`: options become settings; all errors are reported at once; a port in use is one line."""

import socket

import pytest

from farhop_cli import engine


def test_every_wrong_option_is_shown_on_a_line_of_its_own(cli):
    arguments = ("--profile", "foo", "--speedup", "0", "--port", "99999", "--kv-blocks", "0", "--seed", "-1")
    output = cli.failed(cli.run("engine", *arguments), 2).splitlines()
    assert len(output) == 5
    for option in ("--profile:", "--speedup:", "--port:", "--kv-blocks:", "--seed:"):
        assert any(f"engine: {option}" in line for line in output)
    assert any("l4, a100, h100" in line for line in output)


def test_faults_between_options_are_shown_too(cli):
    output = cli.failed(cli.run("engine", "--port", "1", "--port", "2", "--replicas", "3"), 2)
    assert "replicas: 3 do not match 2 ports" in output


def test_options_reach_the_settings_and_the_rest_keeps_its_defaults(cli, monkeypatch):
    ran = []
    monkeypatch.setattr(engine, "run_engine", ran.append)
    assert cli.run("engine", "--port", "7001", "--port", "7002", "--model", "m", "--speedup", "5").exit_code == 0
    (settings,) = ran
    assert (settings.ports, settings.model, settings.speedup) == ([7001, 7002], "m", 5.0)
    assert (settings.host, settings.profile, settings.kv_blocks) == ("127.0.0.1", "l4", None)


@pytest.mark.parametrize("arguments", [(), ("--profile", "h100")])
def test_the_engines_default_port_is_8001(cli, monkeypatch, arguments):
    ran = []
    monkeypatch.setattr(engine, "run_engine", ran.append)
    assert cli.run("engine", *arguments).exit_code == 0
    assert ran[0].ports == [8001]


def test_a_port_taken_ends_in_one_line(capfd, cli):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        result = cli.run("engine", "--port", str(held.getsockname()[1]))
    assert result.exit_code == 2
    output = result.stderr + capfd.readouterr().err
    assert "cannot listen" in output
    assert "Traceback" not in output
