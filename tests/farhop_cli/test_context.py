"""Contexts: made, chosen, shown and taken away; what is wrong with one is said in a line, and no secret ever."""

import json
import os
import stat

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from farhop_cli import context
from farhop_lab.world import world_file
from farhop_lab.world.certs import Authority


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv(world_file.ENVIRONMENT, raising=False)
    monkeypatch.setenv("FARHOP_TEST_TOKEN", "t" * 32)
    return tmp_path


def stands():
    return yaml.safe_load(context.path().read_text())


def test_dry_run_does_not_change_the_file(cli):
    first = ("context", "set", "prod", "--etcd", "127.0.0.1:2379")
    assert cli.run(*first, "--dry-run").stdout == "dry run, nothing is written: prod is the current context\n"
    assert not context.path().parent.exists()
    cli.run(*first)
    cli.run("context", "set", "lab", "--admin", "http://127.0.0.1:8082")
    before = context.path().read_bytes()
    for words in (
        ("use", "lab"), ("unset", "prod"), ("set", "more", "--admin", "http://127.0.0.1:1"),
        ("set", "lab", "--etcd", "127.0.0.1:1", "--use"),
    ):  # fmt: skip
        result = cli.run("context", *words, "--dry-run")
        assert (result.exit_code, result.stdout.startswith("dry run, nothing is written: ")) == (0, True)
        assert context.path().read_bytes() == before
    assert "there is lab, prod" in cli.failed(cli.run("context", "unset", "nobody", "--dry-run"), 1)


def test_the_first_one_made_is_current_and_the_file_its_owners_alone(cli):
    assert "no contexts" in cli.run("context", "list").stdout
    made = cli.run(
        "context", "set", "prod", "--etcd", "127.0.0.1:2379,127.0.0.1:2380", "--token", "env:FARHOP_TEST_TOKEN"
    )
    assert (made.exit_code, made.stdout) == (0, "prod is the current context\n")
    assert stat.S_IMODE(context.path().stat().st_mode) == 0o600
    second = cli.run("context", "set", "lab", "--admin", "http://127.0.0.1:8082")
    assert second.stdout == "lab stands; the current context is prod\n"
    assert cli.run("context", "set", "lab", "--server-name", "{region}.x", "--use").exit_code == 0
    assert stands() == {
        "current": "lab",
        "contexts": {
            "prod": {
                "etcd": {"endpoints": ["127.0.0.1:2379", "127.0.0.1:2380"]},
                "admin": {"token": "env:FARHOP_TEST_TOKEN"},
            },
            "lab": {"admin": {"urls": ["http://127.0.0.1:8082"], "server_name": "{region}.x"}},
        },
    }
    rows = json.loads(cli.run("context", "list", "--json").stdout)["contexts"]
    assert [(row["name"], row["current"]) for row in rows] == [("lab", True), ("prod", False)]
    assert cli.run("context", "use", "prod").exit_code == 0
    assert yaml.safe_load(cli.run("context", "show").stdout)["name"] == "prod"
    assert cli.run("context", "unset", "prod").stdout == "prod is no context any more; no context is current now\n"
    cli.failed(cli.run("context", "unset", "prod"), 1)
    cli.failed(cli.run("context", "show"), 1)


def test_hubs_and_files_are_kept_as_they_are_found_from_anywhere(cli, home, monkeypatch):
    authority = Authority(home)
    pair = authority.issue("ops")
    monkeypatch.chdir(home)
    (home / "token").write_text("z" * 32)
    for hub, endpoint in (("atlantic", "10.0.0.1:2379"), ("pacific", "10.0.0.2:2379")):
        words = ["--hub", hub, "--etcd", endpoint, "--etcd-ca", os.path.relpath(authority.ca_file)]
        assert cli.run("context", "set", "prod", *words).exit_code == 0, endpoint
    files = ["--ca", os.path.relpath(authority.ca_file), "--cert", pair.cert_file, "--key", pair.key_file]
    assert cli.run("context", "set", "prod", *files, "--token", "file:token").exit_code == 0
    monkeypatch.chdir("/")
    chosen = context.read().checked("prod")
    assert {name: hub.endpoints for name, hub in chosen.hubs.items()} == {
        "atlantic": ["10.0.0.1:2379"], "pacific": ["10.0.0.2:2379"],
    }  # fmt: skip
    assert chosen.admin.token.get_secret_value() == "z" * 32
    assert chosen.admin.ca_file == authority.ca_file


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["set", "prod"], "--etcd HOST:PORT"),
        (["set", "prod", "--etcd", "10.0.0.1:2379"], "ca_file: is not given, and etcd is not on loopback"),
        (["set", "prod", "--etcd", "nowhere"], "is not host:port"),
        (["set", "prod", "--etcd", "127.0.0.1:1", "--token", "hunter2hunter2hunter2"], "never in the clear"),
        (["set", "prod", "--etcd", "127.0.0.1:1", "--token", "env:FARHOP_NOT_SET"], "FARHOP_NOT_SET is not set"),
        (["set", "prod", "--etcd", "127.0.0.1:1", "--ca", "none.pem"], "admin: ca_file"),
        (["set", "prod", "--admin", "ftp://x"], "is no URL of an admin port"),
        (["set", "-", "--etcd", "127.0.0.1:1"], "NAME"),
        (["use", "prod"], 'no context "prod"'),
        (["show", "prod"], 'no context "prod"'),
    ],
)
def test_error_is_reported_in_one_line_and_changes_nothing(cli, words, says):
    text = cli.failed(cli.run("context", *words), 2)
    assert says in text
    assert text.count("\n") == 1
    assert "hunter2" not in text
    assert not context.path().exists() or stands()["contexts"] == {}


@pytest.mark.parametrize(
    "text", ["[", "5", "other: 1", "current: 5", "contexts: [a]", "contexts: {1: {}}", "a: 1\na: 2"]
)
def test_a_malformed_context_file_is_named_and_left_unchanged(cli, text):
    context.path().parent.mkdir(parents=True)
    context.path().write_text(text)
    line = cli.failed(cli.run("context", "list"), 2)
    assert str(context.path()) in line
    assert context.path().read_text() == text


def test_a_broken_context_does_not_affect_others(cli):
    context.path().parent.mkdir(parents=True)
    context.path().write_text(
        "contexts: {bad: {etcd: 5, admin: {token: hunter2}}, good: {etcd: {endpoints: ['[::1]:1']}}}"
    )
    assert cli.run("context", "use", "good").exit_code == 0
    text = cli.failed(cli.run("context", "use", "bad"), 2)
    assert "etcd" in text
    assert "hunter2" not in text
    shown = cli.run("context", "show", "bad")
    assert "hunter2" not in shown.stdout
    assert "(withheld)" in shown.stdout


@given(secret=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=8, max_size=40))
def test_a_secret_in_the_clear_is_never_shown(secret):
    secret = f"zq{secret}qz"
    fields = {
        "etcd": {"password": secret},
        "hubs": {"a": {"password": secret}},
        "admin": {"token": secret, "urls": ["u"]},
    }
    assert secret not in json.dumps(context.without_secrets(fields))


def test_a_world_has_its_own_context_while_it_runs(cli, world, monkeypatch):
    monkeypatch.delenv(world_file.ENVIRONMENT)
    assert context.world_began(world.path) == ("up", "up")
    assert context.world_began(world.path) == ("up-2", "up")
    context.world_ended("up", world.path)
    assert stands() == {"current": "", "contexts": {"up-2": {"world": str(world.path)}}}
    assert cli.run("context", "set", "prod", "--etcd", "127.0.0.1:1").exit_code == 0
    assert context.world_began(world.path) == ("up", "prod")  # no user's choice is overwritten
    context.world_ended("up", world.path.with_name("other.json"))
    assert "up" in stands()["contexts"]  # another world's by now


def test_context_of_a_killed_world_is_replaced(cli, home, world):
    context.world_began(home / "gone.json")
    assert context.world_began(world.path) == ("up", "up")


def test_a_deployment_brings_its_context_along(cli, home):
    shipped = home / "shipped" / "context.yaml"
    shipped.parent.mkdir()
    shipped.write_text("hubs: {a: {endpoints: ['127.0.0.1:2379']}}\ntopology: config/world.yaml\n")
    made = cli.run("context", "set", "trial", "--file", str(shipped), "--admin", "http://127.0.0.1:8082")
    assert (made.exit_code, made.stdout) == (0, "trial is the current context\n")
    assert stands()["contexts"]["trial"] == {
        "hubs": {"a": {"endpoints": ["127.0.0.1:2379"]}},
        "topology": str(shipped.parent / "config" / "world.yaml"),
        "admin": {"urls": ["http://127.0.0.1:8082"]},
    }
    shipped.write_text("hubs: {a: {}}\n")
    assert "hubs.a.endpoints" in cli.failed(cli.run("context", "set", "x", "--file", str(shipped)), 2)
    assert "no such file" in cli.failed(cli.run("context", "set", "x", "--file", str(home / "none.yaml")), 2)
