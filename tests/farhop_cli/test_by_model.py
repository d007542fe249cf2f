"""`farhop policy` and `farhop split` against a real etcd: one document for a region, changed a model at a time."""

import pytest

from farhop.store.etcd import EtcdStore
from farhop_cli.by_model import parsed
from farhop_cli.fleet import Fleet

SPLIT = ("split", "set", "virginia", "--model", "llama", "--weights", "v1=95,v2=5", "--why", "canary", "--by", "ann")
SPLIT_KEY, POLICY_KEY = "/farhop/v1/split/virginia", "/farhop/v1/pick/virginia"


def test_the_rest_of_the_document_stays(cli, stands):
    stands.put(SPLIT_KEY, b'{"qwen": {"weights": {"a": 1}}}')
    result = cli.run(*SPLIT)
    assert (result.exit_code, result.stderr) == (0, "")
    models, authorship = stands.authored("split")
    assert models == {"qwen": {"weights": {"a": 1}}, "llama": {"weights": {"v1": 95.0, "v2": 5.0}}}
    assert (authorship.author, authorship.why) == ("ann", "canary")


def test_one_model_or_all_models_can_be_unset(cli, stands):
    cli.run("policy", "set", "virginia", "p2c", "--why", "x")
    cli.run("policy", "set", "virginia", "random", "--model", "llama", "--why", "x")
    assert cli.run("policy", "unset", "virginia", "--model", "llama").exit_code == 0
    models, authorship = stands.authored("pick")
    assert (models, authorship.why) == ({"": "p2c"}, "back to the configuration")
    assert cli.run("policy", "unset", "virginia", "--model", "", "--why", "enough").exit_code == 0
    models, authorship = stands.authored("pick")
    assert (models, authorship.why) == ({}, "enough")
    assert "nothing was changed" in cli.failed(cli.run("policy", "unset", "virginia"), 1)
    assert "nothing was changed" in cli.failed(cli.run("split", "unset", "virginia", "--model", "llama"), 1)


def test_unset_without_a_model_removes_even_an_unreadable_document(cli, stands):
    stands.put(SPLIT_KEY, b"nonsense")
    assert "remove it with `farhop split unset`" in cli.failed(cli.run(*SPLIT), 1)
    assert "to unset it all" in cli.failed(cli.run("split", "unset", "virginia", "--model", "llama"), 1)
    assert cli.run("split", "unset", "virginia").exit_code == 0
    assert stands.authored("split")[0] == {}


def test_a_write_after_a_concurrent_change_is_refused(cli, stands, monkeypatch):
    get = EtcdStore.get
    stands.put(SPLIT_KEY, b'{"llama": {"weights": {"v1": 1}}}')

    async def overtaken(self, key):
        entry = await get(self, key)
        await self.put(key, b'{"qwen": {"weights": {"v1": 1}}}')
        return entry

    with monkeypatch.context() as patched:
        patched.setattr(EtcdStore, "get", overtaken)
        assert "another writer changed it" in cli.failed(cli.run(*SPLIT), 1)
        assert "another writer changed it" in cli.failed(cli.run("split", "unset", "virginia", "--model", "qwen"), 1)
    assert stands.authored("split") == ({"qwen": {"weights": {"v1": 1}}}, None)


def test_options_written_by_hand_are_shown(cli, stands):
    stands.put(POLICY_KEY, b'{"llama": {"name": "prefix", "load_factor": 1.5}, "qwen": 7}')
    shown = cli.run("policy", "get", "virginia").stdout
    assert "model llama: prefix load_factor 1.5" in shown
    assert "model qwen: 7" in shown
    assert "no author is named" in shown


def test_weights_change_and_the_rest_of_the_split_stays(cli, stands):
    stands.unserved = ["v3"]
    split = b'{"llama": {"weights": {"v1": 1}, "rules": [{"tenant": "acme", "version": "v1"}], "sticky": "tenant"}}'
    stands.put(SPLIT_KEY, split)
    put = ("split", "set", "virginia", "--model", "llama", "--weights", "v1=0, v2=30,v3=10", "--why", "flip")
    result = cli.run(*put)
    assert result.exit_code == 0
    assert "shares: v1 0 %, v2 75 %, v3 25 %" in result.stdout
    assert "no replica there has version v3" in result.stderr
    entry = stands.authored("split")[0]["llama"]
    assert entry["weights"] == {"v1": 0.0, "v2": 30.0, "v3": 10.0}
    assert (entry["sticky"], len(entry["rules"])) == ("tenant", 1)
    assert "model llama: v1=0,v2=30,v3=10, 1 rules, sticky tenant" in cli.run("split", "get", "virginia").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("policy", "set", "virginia", "fastest"), "POLICY: no policy 'fastest'; known are predictive"),
        (("policy", "set", "virginia", "p2c", "--model", "a b"), "--model"),
        (("split", "set", "virginia", "--model", "m", "--weights", "v1"), "no VERSION=WEIGHT"),
        (("split", "set", "virginia", "--model", "m", "--weights", "v1=x"), "no VERSION=WEIGHT"),
        (("split", "set", "virginia", "--model", "m", "--weights", "v1=1,v1=2"), "named twice"),
        (
            ("split", "set", "virginia", "--model", "m", "--weights", "v1=-1,v2=1"),
            "--weights: weights.v1: Input should",
        ),
        (("split", "set", "virginia", "--model", "m", "--weights", "v1=0"), "--weights: weights: all are 0"),
        (("split", "set", "virginia", "--model", "m", "--weights", "v 1=1"), "--weights: weights.v 1"),
        (("split", "set", "virginia", "--model", "m", "--weights", "v1=nan"), "--weights: weights.v1"),
    ],
)
def test_document_that_a_balancer_would_refuse_is_refused(cli, stands, arguments, message):
    output = cli.failed(cli.run(*arguments, "--why", "x"), 2)
    assert output.count("\n") == 1
    assert message in output
    assert (stands.authored("pick"), stands.authored("split")) == (None, None)


def test_weights_are_numbers_by_version():
    assert parsed("v1=95,v2=0.5") == {"v1": 95.0, "v2": 0.5}


def test_dry_run_of_a_split_shows_what_would_move(cli, stands, monkeypatch):
    async def status(_fleet, _region):
        return {"replicas": [{"models": ["m"], "version": "v1"}, {"models": ["m"], "version": "v2"}]}

    def effect(model: str, weights: str) -> str:
        whom = ("split", "set", "virginia", "--model", model, "--weights", weights)
        return cli.run(*whom, "--why", "x", "--dry-run").stdout

    monkeypatch.setattr(Fleet, "status_of", status)
    found = effect("m", "v2=1,v3=1")
    assert "strands: v3: no replica there has it" in found
    assert "moves: all of v1 elsewhere" in found
    assert "moves nothing: no replica there serves n" in effect("n", "v2=1")
