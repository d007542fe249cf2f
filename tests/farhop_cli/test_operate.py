"""The nouns are wired alike: the same verbs in one order, the same options; bad usage reaches no etcd."""

import pytest
import typer

from farhop_cli import main, operate

NOUNS = ("law", "route", "split", "policy", "bias", "pin", "drain")
VERBS = ["get", "set", "unset", "diff", "history"]


def group(noun):
    return typer.main.get_command(getattr(operate, main.COMMANDS[noun].app))


def options(command):
    return {name for one in command.params for name in one.opts}


@pytest.mark.parametrize("noun", NOUNS)
def test_every_noun_has_all_five_verbs_with_the_same_options(noun):
    commands = group(noun).list_commands(None)
    assert commands[:5] == VERBS
    assert commands[5:] == (["sign", "verify"] if noun == "law" else [])
    for verb in VERBS:
        has = options(group(noun).commands[verb])
        assert has >= {"--config", "--etcd", "--world", "--json"}
        assert ("--dry-run" in has) is (verb in ("set", "unset"))
    assert options(group(noun).commands["set"]) >= {"--why", "--by"}
    assert ("--for" in options(group(noun).commands["set"])) is (noun in ("bias", "pin", "drain"))


def test_every_noun_is_known_to_the_rooms():
    assert [operate.noun(name).name for name in NOUNS[1:]] == list(NOUNS[1:])


@pytest.mark.parametrize(
    "arguments",
    [
        ("drain", "set", "tokyo"), ("bias", "set", "tokyo", "--why", "x"), ("pin", "set", "tokyo"), ("policy", "set"),
        ("route", "set", "virginia", "{policy: nearest}"), ("split", "set", "tokyo", "--model", "m"), ("undrain",),
        ("drain", "unset"), ("law", "set", "law.yaml", "--author", "ann"), ("law", "unset"),
    ],
)  # fmt: skip
def test_what_is_left_out_or_unknown_is_bad_usage(cli, arguments):
    result = cli.run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == "" or "--why: say why" in result.stderr
