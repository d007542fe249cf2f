"""`farhop bias`, `pin` and their undoing against a real etcd: what is written, what is refused, what is told."""

import asyncio
import json
import os
from random import Random

import pytest
import pytest_asyncio

from farhop.store import steer as words
from farhop.store.contract import STEER_PREFIX
from farhop.store.etcd import EtcdStore
from farhop.store.etcd_link import EtcdSettings
from farhop_cli import drain
from farhop_cli.fleet import Fleet
from farhop_lab import world_file
from farhop_lab.etcd import EmbeddedEtcd
from farhop_lab.world_file import RegionFile, WorldFile
from topology.load import shipped

REGIONS = ("virginia", "frankfurt", "tokyo")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def etcd():
    async with EmbeddedEtcd() as process:
        yield process


class Stage:
    """A world whose balancers know at once what stands in etcd."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint, self.knowing = endpoint, 3

    def with_store(self, work):
        async def run():
            store = EtcdStore(EtcdSettings((self.endpoint,)), Random(1))
            await store.open()
            try:
                return await work(store)
            finally:
                await store.close()

        return asyncio.run(run())

    def said(self):
        """All that stands there, by key."""
        entries = self.with_store(lambda store: store.list(STEER_PREFIX))
        return {entry.key: words.decode(entry.value) for entry in entries}

    async def statuses(self, _fleet):
        store = EtcdStore(EtcdSettings((self.endpoint,)), Random(1))
        await store.open()
        entries = await store.list(STEER_PREFIX)
        await store.close()
        decoded = [words.decode(entry.value) for entry in entries]
        told = [{"region": one.region, "author": one.author, "why": one.why} for one in decoded]
        return [{"words": told if n < self.knowing else None} for n in range(3)]


@pytest.fixture
def stage(etcd, tmp_path, monkeypatch):
    made = Stage(etcd.endpoint)
    monkeypatch.setattr(Fleet, "statuses", lambda self: made.statuses(self))
    monkeypatch.setattr(drain, "KNOWN_WITHIN_S", 1.0)
    urls = {name: RegionFile(*(f"http://127.0.0.1:{n}" for n in (1, 2, 3))) for name in REGIONS}
    file = WorldFile(os.getpid(), 1.0, str(shipped("three-regions")), etcd.endpoint, "", "m", {}, urls)
    world_file.write(tmp_path / "world.json", file)
    monkeypatch.setenv(world_file.ENVIRONMENT, str(tmp_path / "world.json"))
    yield made

    async def clear(store):
        for entry in await store.list(STEER_PREFIX):
            await store.delete(entry.key)

    made.with_store(clear)


def test_a_bias_stands_under_a_lease_with_who_and_why_and_is_taken_back(cli, stage):
    result = cli.run("bias", "tokyo", "--ms", "-50", "--for", "30m", "--why", "new link", "--author", "ann@ops")
    assert (result.exit_code, result.stderr) == (0, "")
    for said in ("tokyo counts as 50 ms better", "for 30m", "by ann@ops: new link", "unbias tokyo", "3 of 3"):
        assert said in result.stdout
    (word,) = stage.said().values()
    assert (word.region, word.ms, word.for_s) == ("tokyo", -50.0, 1800.0)
    assert "this replaces: tokyo counts" in cli.run("bias", "tokyo", "--ms", "5", "--why", "x").stdout
    told = json.loads(cli.run("unbias", "tokyo", "--json").stdout)
    assert (told["lifted"]["ms"], told["balancers"], told["aware"]) == (5.0, 3, 3)
    assert "not biased; nothing was changed" in cli.failed(cli.run("unbias", "tokyo"), 1)


def test_a_pin_is_for_a_tenant_or_a_model(cli, stage):
    result = cli.run("pin", "frankfurt", "--tenant", "eu-only", "--why", "gpu test", "--author", "ann")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "requests of --tenant eu-only go to frankfurt, while it serves" in result.stdout
    told = json.loads(cli.run("pin", "tokyo", "--model", "a/b", "--strict", "--why", "x", "--json").stdout)
    assert (told["word"]["model"], told["word"]["strict"], told["replaced"]) == ("a/b", True, None)
    assert {(word.tenant, word.model, word.strict) for word in stage.said().values()} == {
        ("eu-only", "", False), ("", "a/b", True),
    }  # fmt: skip
    assert "by ann: gpu test" in cli.run("unpin", "--tenant", "eu-only").stdout
    assert "and nowhere else" in cli.run("unpin", "--model", "a/b").stdout
    assert stage.said() == {}
    assert "a/b is not pinned" in cli.failed(cli.run("unpin", "--model", "a/b"), 1)


def test_a_pin_that_the_law_passes_over_is_refused(cli, stage):
    said = cli.failed(cli.run("pin", "tokyo", "--tenant", "eu-only", "--why", "x"), 1)
    assert "tokyo is not lawful for eu-only" in said
    assert stage.said() == {}


def test_balancers_that_do_not_know_yet_are_told_of(cli, stage):
    stage.knowing = 1
    assert "1 of 3 global balancers know by now" in cli.run("bias", "tokyo", "--ms", "5", "--why", "x").stderr


def test_what_cannot_be_read_is_taken_away(cli, stage, monkeypatch):
    stage.with_store(lambda store: store.put(words.bias_key("tokyo"), b"nonsense"))
    assert "cannot be read" in cli.run("unbias", "tokyo").stdout
    assert stage.said() == {}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("bias", "tokio", "--ms", "1", "--why", "x"), 'did you mean "tokyo"?'),
        (("bias", "tokyo", "--ms", "70000", "--why", "x"), "--ms: 70000.0 is outside"),
        (("bias", "tokyo", "--ms", "nan", "--why", "x"), "--ms"),
        (("bias", "tokyo", "--ms", "1", "--why", " "), "--why"),
        (("bias", "tokyo", "--ms", "1", "--why", "x", "--for", "8d"), "--for: give 1s to 7d"),
        (("pin", "tokyo", "--why", "x"), "give either --tenant or --model"),
        (("pin", "tokyo", "--why", "x", "--tenant", "a", "--model", "b"), "give either --tenant or --model"),
        (("pin", "tokyo", "--why", "x", "--tenant", "nobody"), "is no tenant of topology"),
        (("unpin",), "give either --tenant or --model"),
    ],
)
def test_what_is_at_fault_is_one_line_and_code_2(cli, stage, arguments, said):
    told = cli.failed(cli.run(*arguments), 2)
    assert told.count("\n") == 1
    assert said in told
    assert stage.said() == {}
