"""`farhop drain` and `undrain` against a real etcd: what is written, what is refused, what is told."""

import asyncio
import json
import os
from datetime import UTC, datetime
from random import Random

import pytest
import pytest_asyncio
import typer

from farhop.store import override as words
from farhop.store.contract import Conflict, override_key
from farhop.store.etcd import EtcdStore
from farhop.store.etcd_link import EtcdSettings
from farhop.store.override import OverrideError
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

    def __init__(self, endpoint: str, states: dict[str, str]) -> None:
        self.endpoint, self.states = endpoint, states
        self.knowing = 3  # how many of the three have heard by now

    def with_store(self, work):
        """Something done to etcd, apart from the command."""

        async def run():
            store = EtcdStore(EtcdSettings((self.endpoint,)), Random(1))
            await store.open()
            try:
                return await work(store)
            finally:
                await store.close()

        return asyncio.run(run())

    def word(self, region="virginia"):
        """What stands there, decoded."""
        entry = self.with_store(lambda store: store.get(override_key(region)))
        return words.decode(entry.value) if entry is not None else None

    def put(self, region="virginia", value=b"nonsense"):
        self.with_store(lambda store: store.put(override_key(region), value))

    async def statuses(self, _fleet):
        store = EtcdStore(EtcdSettings((self.endpoint,)), Random(1))
        await store.open()
        entries = await store.list("/farhop/v1/override/")
        await store.close()
        told = {entry.key.rpartition("/")[2]: _told(entry.value) for entry in entries}
        return [self._status(told if n < self.knowing else {}) for n in range(3)]

    def _status(self, told):
        instance = {"draining": False, "models": {"m": {"replicas_ready": 1}}}
        return {"regions": [
            {"region": r, "state": s, "in_flight": 2, "instances": [instance], "override": told.get(r)}
            for r, s in self.states.items()
        ]}  # fmt: skip


def _told(value):
    try:
        word = words.decode(value)
    except OverrideError:
        return {"author": "?", "why": "?"}
    return {"author": word.author, "why": word.why}


@pytest.fixture
def stage(etcd, tmp_path, monkeypatch):
    made = Stage(etcd.endpoint, dict.fromkeys(REGIONS, "up"))
    monkeypatch.setattr(Fleet, "statuses", lambda self: made.statuses(self))
    monkeypatch.setattr(drain, "KNOWN_WITHIN_S", 1.0)
    urls = {name: RegionFile(*(f"http://127.0.0.1:{n}" for n in (1, 2, 3))) for name in REGIONS}
    file = WorldFile(os.getpid(), 1.0, str(shipped("three-regions")), etcd.endpoint, "", "m", {}, urls)
    world_file.write(tmp_path / "world.json", file)
    monkeypatch.setenv(world_file.ENVIRONMENT, str(tmp_path / "world.json"))
    yield made

    async def clear(store):
        for region in REGIONS:
            await store.delete(override_key(region))

    made.with_store(clear)


def test_a_drain_stands_under_a_lease_with_who_and_why(cli, stage):
    before = datetime.now(UTC)
    result = cli.run("drain", "virginia", "--for", "30m", "--why", "kernel update", "--author", "ann@ops")
    assert (result.exit_code, result.stderr) == (0, "")
    word = stage.word()
    assert (word.region, word.action, word.why, word.author) == ("virginia", "drain", "kernel update", "ann@ops")
    assert (word.for_s, word.over_s) == (1800.0, 10.0)
    assert before <= word.at <= datetime.now(UTC)
    for said in ("for 30m", "by ann@ops: kernel update", "over 10s", "(6 now)", "undrain virginia", "3 of 3"):
        assert said in result.stdout


def test_the_author_is_whoever_is_at_the_keyboard(cli, stage, monkeypatch):
    monkeypatch.setattr(drain.getpass, "getuser", lambda: "bob")
    monkeypatch.setattr(drain.socket, "gethostname", lambda: "desk")
    assert cli.run("drain", "virginia", "--why", "x").exit_code == 0
    assert (stage.word().author, stage.word().for_s) == ("bob@desk", 3600.0)


def test_it_goes_with_its_lease(cli, stage):
    assert cli.run("drain", "virginia", "--for", "1s", "--why", "x", "--over", "0s").exit_code == 0
    assert stage.word().over_s == 0.0

    async def gone(store):
        async with asyncio.timeout(10.0):
            while await store.get(override_key("virginia")) is not None:
                await asyncio.sleep(0.02)

    stage.with_store(gone)


def test_a_second_drain_replaces_the_first_and_says_so(cli, stage):
    cli.run("drain", "virginia", "--why", "one", "--author", "ann")
    result = cli.run("drain", "virginia", "--why", "two", "--author", "bob")
    assert "this replaces: drain of virginia by ann at " in result.stdout
    assert stage.word().why == "two"


def test_undrain_tells_whose_it_was(cli, stage):
    cli.run("drain", "virginia", "--why", "new racks", "--author", "ann")
    result = cli.run("undrain", "virginia")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "by ann at " in result.stdout
    assert "new racks" in result.stdout
    assert stage.word() is None
    assert "not drained" in cli.failed(cli.run("undrain", "virginia"), 1)


def test_undrain_takes_away_what_cannot_be_read(cli, stage):
    stage.put()
    assert "cannot be read" in cli.run("undrain", "virginia").stdout
    assert stage.with_store(lambda store: store.get(override_key("virginia"))) is None


def test_json_is_all_there_is(cli, stage):
    cli.run("drain", "virginia", "--why", "one", "--author", "ann")
    told = json.loads(cli.run("drain", "virginia", "--why", "two", "--author", "bob", "--json").stdout)
    assert (told["override"]["why"], told["replaced"]["why"]) == ("two", "one")
    assert (told["balancers"], told["aware"]) == (3, 3)
    told = json.loads(cli.run("undrain", "virginia", "--json").stdout)
    assert (told["lifted"]["author"], told["aware"]) == ("bob", 3)


def test_the_last_region_of_a_tenant_is_kept_unless_forced(cli, stage):
    said = cli.failed(cli.run("drain", "tokyo", "--why", "x"), 1)
    assert "last region serving japan-only (m)" in said
    assert "--force" in said
    assert stage.word("tokyo") is None
    assert cli.run("drain", "tokyo", "--why", "x", "--force").exit_code == 0
    assert stage.word("tokyo") is not None


def test_the_state_of_the_others_counts(cli, stage):
    stage.states["frankfurt"] = stage.states["tokyo"] = "down"
    assert "anywhere (m)" in cli.failed(cli.run("drain", "virginia", "--why", "x"), 1)


def test_where_nobody_answers_nobody_can_tell(cli, stage, monkeypatch):
    async def nobody():
        return []

    monkeypatch.setattr(Fleet, "statuses", lambda _self: nobody())
    assert "nobody can tell" in cli.failed(cli.run("drain", "virginia", "--why", "x"), 1)
    result = cli.run("drain", "virginia", "--why", "x", "--force")
    assert result.exit_code == 0
    assert "0 of 3 global balancers know" in result.stderr


def test_balancers_that_do_not_know_yet_are_told_of(cli, stage):
    stage.knowing = 2
    result = cli.run("drain", "virginia", "--why", "x")
    assert result.exit_code == 0
    assert "2 of 3 global balancers know by now" in result.stderr


def test_an_etcd_alone_cannot_tell_the_last_nor_a_region_that_does_not_report(cli, stage):
    key = "/farhop/v1/region/virginia/lb/a"
    stage.with_store(lambda store: store.put(key, b"{}", ttl_s=60.0))
    arguments = ("--why", "x", "--etcd", stage.endpoint)
    assert "give --config" in cli.failed(cli.run("drain", "virginia", *arguments), 1)
    assert "no region of those that report" in cli.failed(cli.run("drain", "tokyo", *arguments, "--force"), 2)
    assert cli.run("drain", "virginia", *arguments, "--force").exit_code == 0
    assert stage.word() is not None
    assert cli.run("undrain", "virginia", "--etcd", stage.endpoint).exit_code == 0
    stage.with_store(lambda store: store.delete(key))


def test_two_operators_at_once_do_not_overwrite_each_other(cli, stage, monkeypatch):
    async def conflict(_self, key, *_arguments, **_options):
        raise Conflict(key, 1)

    cli.run("drain", "virginia", "--why", "x")
    with monkeypatch.context() as patched:
        patched.setattr(EtcdStore, "put", conflict)
        patched.setattr(EtcdStore, "delete", conflict)
        for arguments in (("drain", "virginia", "--why", "y"), ("undrain", "virginia")):
            assert "somebody else changed it" in cli.failed(cli.run(*arguments), 1)
    assert stage.word().why == "x"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("drain", "tokio", "--why", "x"), 'did you mean "tokyo"?'),
        (("undrain", "tokio"), 'did you mean "tokyo"?'),
        (("drain", "virginia", "--why", " "), "--why"),
        (("drain", "virginia", "--why", "x", "--author", "a\tb"), "--author"),
        (("drain", "virginia", "--why", "x", "--for", "8d"), "--for: give 1s to 7d"),
        (("drain", "virginia", "--why", "x", "--for", "0s"), "--for"),
        (("drain", "virginia", "--why", "x", "--for", "soon"), "no duration"),
        (("drain", "virginia", "--why", "x", "--over", "2h"), "--over: give 0s to 1h"),
        (("drain", "virginia", "--why", "x", "--etcd", "127.0.0.1:1"), "etcd"),
        (("drain", "virginia", "--why", "x", "--etcd", "nonsense"), "HOST:PORT"),
    ],
)
def test_what_is_at_fault_is_one_line_and_code_2(cli, stage, arguments, said):
    told = cli.failed(cli.run(*arguments), 2)
    assert told.count("\n") == 1
    assert said in told
    assert stage.word() is None


def test_without_a_reason_there_is_no_drain(cli, stage):
    assert cli.run("drain", "virginia").exit_code == 2


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("2h", 7200), ("1d", 86400), ("1.5h", 5400)])
def test_durations(text, seconds):
    assert drain.duration_s("--for", text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-1s", "1", "1w", "1h30m", "nan s", "9999999999s", "1e3s"])
def test_no_durations(text, capsys):
    with pytest.raises(typer.Exit):
        drain.duration_s("--for", text)
    assert "--for" in capsys.readouterr().err
