"""What both commands owe: compare-and-set, who and why, what cannot be read, and whom they are for. On a real etcd."""

import json
from datetime import UTC, datetime

import pytest

from farhop.store.etcd import EtcdStore
from farhop_cli import drain

SPLIT = ("split", "virginia", "--model", "llama", "--weights", "v1=95,v2=5", "--why", "canary", "--author", "ann")
POLICY = ("policy", "virginia", "p2c", "--why", "comparing", "--author", "ann")


def test_a_word_is_signed_and_the_rest_of_the_document_stays(cli, steering):
    before = datetime.now(UTC)
    steering.put("split", b'{"qwen": {"weights": {"a": 1}}}')
    result = cli.run(*SPLIT)
    assert (result.exit_code, result.stderr) == (0, "")
    models, signature = steering.stands("split")
    assert models == {"qwen": {"weights": {"a": 1}}, "llama": {"weights": {"v1": 95.0, "v2": 5.0}}}
    assert (signature.author, signature.why) == ("ann", "canary")
    assert before <= signature.at <= datetime.now(UTC)


def test_the_author_is_whoever_is_at_the_keyboard(cli, steering, monkeypatch):
    monkeypatch.setattr(drain.getpass, "getuser", lambda: "bob")
    monkeypatch.setattr(drain.socket, "gethostname", lambda: "desk")
    assert cli.run(*POLICY[:-2]).exit_code == 0
    assert steering.stands("pick")[1].author == "bob@desk"


def test_what_goes_last_takes_the_document_with_it(cli, steering):
    cli.run(*POLICY)
    cli.run("policy", "virginia", "random", "--model", "llama", "--why", "x")
    assert cli.run("policy", "virginia", "--model", "llama", "--clear").exit_code == 0
    models, signature = steering.stands("pick")
    assert (models, signature.why) == ({"": "p2c"}, "llama: back to the configuration")
    assert cli.run("policy", "virginia", "--model", "", "--clear").exit_code == 0
    assert steering.stands("pick") is None
    assert "nothing stands there" in cli.failed(cli.run("policy", "virginia", "--clear"), 1)
    assert "nothing stands there" in cli.failed(cli.run("split", "virginia", "--model", "llama", "--clear"), 1)


def test_without_a_model_all_goes_even_what_cannot_be_read(cli, steering):
    steering.put("split", b"nonsense")
    for arguments in (SPLIT, ("split", "virginia"), ("split", "virginia", "--model", "llama", "--clear")):
        assert "cannot be read; take it away with --clear" in cli.failed(cli.run(*arguments), 1)
    assert cli.run("split", "virginia", "--clear").exit_code == 0
    assert steering.stands("split") is None


def test_two_operators_at_once_do_not_overwrite_each_other(cli, steering, monkeypatch):
    get = EtcdStore.get
    steering.put("split", b'{"llama": {"weights": {"v1": 1}}}')

    async def overtaken(self, key):
        entry = await get(self, key)
        await self.put(key, b'{"qwen": {"weights": {"v1": 1}}}')
        return entry

    with monkeypatch.context() as patched:
        patched.setattr(EtcdStore, "get", overtaken)
        assert "somebody else changed it" in cli.failed(cli.run(*SPLIT), 1)
        assert "somebody else changed it" in cli.failed(cli.run("split", "virginia", "--model", "qwen", "--clear"), 1)
    assert steering.stands("split") == ({"qwen": {"weights": {"v1": 1}}}, None)


def test_it_says_whether_the_regions_balancer_follows(cli, steering, monkeypatch):
    steering.follows = False
    monkeypatch.setattr(drain, "KNOWN_WITHIN_S", 0.1)
    result = cli.run(*SPLIT)
    assert result.exit_code == 0
    assert "does not say so yet" in result.stderr
    steering.follows = True
    told = json.loads(cli.run(*SPLIT, "--json").stdout)
    assert told == {
        "region": "virginia", "model": "llama", "set": {"weights": {"v1": 95.0, "v2": 5.0}}, "known": True,
    }  # fmt: skip
    told = json.loads(cli.run("split", "virginia", "--model", "llama", "--clear", "--json").stdout)
    assert told == {"region": "virginia", "cleared": "llama", "known": True}


def test_an_etcd_alone_is_enough(cli, steering):
    assert cli.run(*SPLIT, "--etcd", steering.endpoint).exit_code == 0
    assert "v1=95,v2=5" in cli.run("split", "virginia", "--etcd", steering.endpoint).stdout


def test_what_is_shown_is_what_stands(cli, steering):
    assert "its configuration decides" in cli.run("policy", "virginia").stdout
    cli.run(*POLICY)
    shown = cli.run("policy", "virginia").stdout
    assert "all other models: p2c" in shown
    assert "by ann at 20" in shown
    told = json.loads(cli.run("policy", "virginia", "--json").stdout)
    assert (told["policies"], told["signed"]["why"]) == ({"": "p2c"}, "comparing")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("policy", "virginai", "p2c", "--why", "x"), 'did you mean "virginia"?'),
        (("split", "virginai"), 'did you mean "virginia"?'),
        (("policy", "virginia", "p2c"), "--why"),
        (("policy", "virginia", "p2c", "--why", " "), "--why: must be"),
        (("policy", "virginia", "p2c", "--why", "x", "--author", "a\tb"), "--author: must be"),
        (("policy", "virginia", "p2c", "--why", "x", "--model", "a b"), "--model"),
        (("policy", "virginia", "p2c", "--why", "x", "--etcd", "127.0.0.1:1"), "etcd"),
    ],
)
def test_what_is_at_fault_is_one_line_and_code_2(cli, steering, arguments, said):
    told = cli.failed(cli.run(*arguments), 2)
    assert told.count("\n") == 1
    assert said in told
    assert steering.stands("pick") is None
