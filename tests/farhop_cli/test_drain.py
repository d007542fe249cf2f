"""`farhop drain` and `undrain` against a real etcd: what is written, refused and printed."""

import asyncio
import json
from datetime import UTC, datetime

import pytest
import yaml
from msgspec.structs import replace

from farhop.store.contract import entry_drain_key, override_key
from farhop.store.documents import overrides as documents
from farhop_cli.fleet import Fleet
from farhop_lab.world import world_file
from topology.load import shipped


def drained(stands, region="virginia"):
    """What stands there, decoded."""
    value = stands.get(override_key(region))
    return documents.decode_drain(value) if value is not None else None


def test_a_drain_is_written_under_a_lease_of_its_length(cli, stands):
    before = datetime.now(UTC)
    result = cli.run("drain", "set", "virginia", "--for", "30m", "--why", "kernel update", "--by", "ann@ops")
    assert (result.exit_code, result.stderr) == (0, "")
    one = drained(stands)
    assert (one.region, one.why, one.author) == ("virginia", "kernel update", "ann@ops")
    assert (one.for_s, one.over_s) == (1800.0, 10.0)
    assert before <= one.at <= datetime.now(UTC)
    for text in ("drained, over 10s", ", until 20", "farhop drain unset virginia", "3 of 3 balancers"):
        assert text in result.stdout


def test_drain_ends_with_its_lease(cli, stands):
    assert cli.run("drain", "set", "virginia", "--for", "1s", "--why", "x", "--over", "0s").exit_code == 0
    assert drained(stands).over_s == 0.0

    async def gone(store):
        async with asyncio.timeout(60.0):
            while await store.get(override_key("virginia")) is not None:
                await asyncio.sleep(0.02)

    stands.do(gone)


def test_streams_are_moved_only_if_requested(cli, stands):
    assert cli.run("drain", "set", "virginia", "--why", "x").exit_code == 0
    assert not drained(stands).move_streams
    result = cli.run("drain", "set", "virginia", "--why", "a rollout", "--move-streams")
    assert "drained of streams, too, over 10s" in result.output
    assert drained(stands).move_streams
    assert "--move-streams: is of a region" in cli.failed(
        cli.run("drain", "set", "--entry", "virginia", "--why", "x", "--move-streams"), 2
    )


def test_undrain_is_short_for_drain_unset(cli, stands):
    cli.run("drain", "set", "virginia", "--why", "new racks", "--by", "ann")
    result = cli.run("undrain", "virginia")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "by ann at " in result.stdout
    assert "virginia takes new requests again" in result.stdout
    assert drained(stands) is None
    assert "no drain is set; nothing was changed" in cli.failed(cli.run("undrain", "virginia"), 1)
    assert 'did you mean "tokyo"?' in cli.failed(cli.run("undrain", "tokio"), 2)


def test_the_last_region_of_a_tenant_is_kept_unless_forced(cli, stands):
    for more in ((), ("--dry-run",)):
        output = cli.failed(cli.run("drain", "set", "tokyo", "--why", "x", *more), 1)
        assert "last region serving japan-only (m)" in output
        assert "--force" in output
    assert drained(stands, "tokyo") is None
    assert cli.run("drain", "set", "tokyo", "--why", "x", "--force").exit_code == 0
    assert drained(stands, "tokyo") is not None


def test_the_state_of_the_others_counts(cli, stands):
    stands.states["frankfurt"] = stands.states["tokyo"] = "down"
    assert "anywhere (m)" in cli.failed(cli.run("drain", "set", "virginia", "--why", "x"), 1)


def test_drain_without_a_status_is_refused_unless_forced(cli, stands, monkeypatch):
    async def nobody():
        return []

    monkeypatch.setattr(Fleet, "statuses", lambda _self: nobody())
    assert "it is unknown whether" in cli.failed(cli.run("drain", "set", "virginia", "--why", "x"), 1)
    result = cli.run("drain", "set", "virginia", "--why", "x", "--force")
    assert result.exit_code == 0
    assert "0 of 3 balancers follow it by now" in result.stderr


def test_last_lawful_region_is_unknown_without_reports(cli, stands):
    stands.put("/farhop/v1/region/virginia/lb/a", b"{}")
    arguments = ("--why", "x", "--etcd", stands.endpoint)
    assert "give --config" in cli.failed(cli.run("drain", "set", "virginia", *arguments), 1)
    assert "no region of those that report" in cli.failed(cli.run("drain", "set", "tokyo", *arguments, "--force"), 2)
    assert cli.run("drain", "set", "virginia", *arguments, "--force").exit_code == 0
    assert drained(stands) is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--for", "8d"), "--for: give 1s to 7d"),
        (("--for", "0s"), "--for"),
        (("--for", "soon"), "no duration"),
        (("--over", "2h"), "--over: give 0s to 1h"),
    ],
)
def test_lengths_have_bounds(cli, stands, arguments, message):
    assert message in cli.failed(cli.run("drain", "set", "virginia", "--why", "x", *arguments), 2)
    assert drained(stands) is None


def test_a_dry_run_lists_moved_traffic_and_stranded_tenants(cli, stands):
    result = cli.run("drain", "set", "virginia", "--why", "x", "--dry-run")
    output = " ".join(result.stdout.split())
    assert "moves: m of not-us" not in output
    assert "moves: m of anywhere: to frankfurt, tokyo" in output
    assert "in flight there now, and finishing there: 6" in output
    assert drained(stands) is None
    forced = json.loads(cli.run("drain", "set", "tokyo", "--why", "x", "--dry-run", "--force", "--json").stdout)
    assert forced["effects"][0] == "strands: japan-only (m)"


@pytest.fixture
def entries(stands, tmp_path):
    """The map with two entries."""
    listed = [{"name": name, "region": name[:5], "ipv4": ["192.0.2.1"]} for name in ("tokyo-1", "tokyo-2")]
    path = tmp_path / "map.yaml"
    path.write_text(shipped("three-regions").read_text() + yaml.safe_dump({"entries": listed}))
    at = tmp_path / "world.json"
    world_file.write(at, replace(world_file.read(at), topology=str(path)))


def test_entry_can_be_drained_in_addition_to_regions(cli, stands, entries):
    result = cli.run("drain", "set", "--entry", "tokyo-1", "--for", "30m", "--why", "new kernel", "--by", "ann")
    assert (result.exit_code, result.stderr) == (0, "")
    one = documents.decode_entry_drain(stands.get(entry_drain_key("tokyo", "tokyo-1")))
    assert (one.region, one.entry, one.why, one.for_s) == ("tokyo", "tokyo-1", "new kernel", 1800.0)
    assert "farhop drain unset --entry tokyo-1" in result.stdout
    assert "entry tokyo-1: drained, over 10s" in cli.run("drain", "get").stdout
    assert "entry tokyo-1: drained, over 10s" in cli.run("drain", "history").stdout
    assert cli.run("undrain", "--entry", "tokyo-1").exit_code == 0
    assert "no drain is set" in cli.failed(cli.run("drain", "unset", "--entry", "tokyo-1"), 1)
    assert 'did you mean "tokyo-2"?' in cli.failed(cli.run("drain", "set", "--entry", "tokyo-3", "--why", "x"), 2)


@pytest.mark.parametrize("which", [(), ("tokyo", "--entry", "tokyo-1")])
def test_a_drain_is_of_a_region_or_of_an_entry(cli, which):
    assert "either a region or --entry" in cli.failed(cli.run("drain", "set", *which, "--why", "x"), 2)


def test_entries_are_read_from_the_topology(cli, stands):
    output = cli.failed(cli.run("drain", "set", "--entry", "tokyo-1", "--why", "x"), 2)
    assert '"tokyo-1" is no entry of topology' in output
    bare = cli.run("drain", "set", "--entry", "tokyo-1", "--why", "x", "--etcd", stands.endpoint)
    assert "--entry" in cli.failed(bare, 2)
