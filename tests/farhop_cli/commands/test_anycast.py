"""`farhop anycast status` against a real etcd, and what the command says of a configuration that cannot be."""

from __future__ import annotations

import json
import re
import socket

import pytest
import yaml

from entry_anycast.announcing.machine import Phase
from entry_anycast.speakers import bird
from farhop.store.contract import announce_key
from farhop.store.documents.announce import AnnounceReport, encode
from farhop_cli import fleet, show, status


def report(**more) -> AnnounceReport:
    given = {"entry": "tokyo-1", "region": "tokyo", "instance": "a", "prefixes": ("192.0.2.1/32",), "speaker": "exabgp"}
    given["since"] = 1795403110.0
    return AnnounceReport(**{**given, "wanted": "announced", "actual": "announced", "healthy": True, **more})


def stand(stands, *reports):
    async def put(store):
        for one in reports:
            await store.put(announce_key(one.region, one.instance), encode(one))

    stands.do(put)


def test_status_shows_the_wanted_and_the_actual_state_and_the_reason(cli, stands):
    assert "no announcer" in cli.run("anycast", "status").stdout
    stand(stands, report(sessions={"10.0.0.1": True}))
    result = cli.run("anycast", "status", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout)["announcers"][0]["sessions"] == {"10.0.0.1": True}
    assert "2026-11-23T03:05:10Z" in cli.run("anycast", "status").stdout.replace("\n", "")
    stand(stands, report(region="paris", entry="paris-1", differs=True, actual="", healthy=False, why="no session"))
    result = cli.run("anycast", "status")
    assert result.exit_code == 1
    assert "(differs)" in result.stdout.replace("\n", "")


def test_fleet_status_shows_announcers_found_in_etcd(cli, stands):
    why = "the entry is not fit: it answers 503"
    stand(stands, report(), report(region="paris", entry="paris-1", wanted="withdrawn", healthy=False, why=why))
    result = fleet.find(None, etcd=stands.endpoint)
    assert [(one.entry, one.wanted) for one in result.announcers] == [
        ("paris-1", "withdrawn"),
        ("tokyo-1", "announced"),
    ]
    with show.captured() as captured:
        status.draw(result, status.StatusOptions(regions=True), [], [], [])
    found = re.sub(r"\s+", " ", captured())
    assert f"wrong: a has entry paris-1 withdrawn: {why}" in found
    assert "announcers of entries" in found
    assert "tokyo-1 a 192.0.2.1/32 exabgp announced 2026-11-23T" in found


def config(tmp_path, **more) -> str:
    peer = {"address": "127.0.0.1", "asn": 65000, "local_address": "127.0.0.1"}
    given = {
        "region": "tokyo", "instance": "a", "admin": {"port": 0}, "entry": "tokyo-1",
        "probe": {"url": "http://127.0.0.1:1/readyz"}, "etcd": {"endpoints": ["127.0.0.1:1"]},
        "speaker": {"exabgp": {"local_as": 65001, "router_id": "10.0.0.1", "peers": [peer]}},
    }  # fmt: skip
    path = tmp_path / "anycast.yaml"
    path.write_text(yaml.safe_dump({**given, **more}))
    return str(path)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"prefixes": ["192.0.2.1/24"]}, "prefixes[0]: '192.0.2.1/24' is no prefix such as"),
        ({"entry": "tokio-1"}, '"tokio-1" is no entry of topology'),
        ({"speaker": {}}, "give either exabgp or bird"),
        ({"budget": {"hold_s": 10}}, "budget: hold_s: must be window_s or more"),
    ],
)
def test_invalid_usage_is_reported_in_one_line(cli, tmp_path, more, says):
    result = cli.run("anycast", "run", "--config", config(tmp_path, **more))
    assert result.exit_code == 2
    assert says in result.stderr


def test_missing_speaker_is_reported_in_one_line(cli, stands, tmp_path):
    from topology.load import shipped

    world = yaml.safe_load(shipped("three-regions").read_text())
    world["entries"] = [{"name": "tokyo-1", "region": "tokyo", "ipv4": ["192.0.2.1"]}]
    (tmp_path / "map.yaml").write_text(yaml.safe_dump(world))
    bird = {"bird": {"socket": str(tmp_path / "none.ctl"), "file": str(tmp_path / "farhop.conf")}}
    path = config(
        tmp_path, topology=str(tmp_path / "map.yaml"), speaker=bird, etcd={"endpoints": [stands.endpoint]}
    )  # fmt: skip
    result = cli.run("anycast", "run", "--config", path)
    assert result.exit_code == 2
    line = result.stderr.splitlines()[-1]
    assert line.startswith(f"anycast: speaker: bird: {tmp_path}/none.ctl: No such file or directory; start bird, or")


def test_without_exabgp_there_is_nothing_to_withdraw(cli, tmp_path):
    assert cli.run("anycast", "withdraw", "--config", config(tmp_path)).exit_code == 0
    bird = {"bird": {"socket": str(tmp_path / "none.ctl"), "file": str(tmp_path / "farhop.conf")}}
    assert "none.ctl" in cli.failed(cli.run("anycast", "withdraw", "--config", config(tmp_path, speaker=bird)), 1)


def test_dry_run_lists_routes_to_withdraw_and_keeps_them(cli, tmp_path):
    said = cli.run("anycast", "withdraw", "--config", config(tmp_path), "--dry-run").stdout
    assert said.startswith("dry run, nothing is written: nothing is left to withdraw")
    file, control = tmp_path / "farhop.conf", tmp_path / "bird.ctl"
    path = config(tmp_path, speaker={"bird": {"socket": str(control), "file": str(file)}})
    assert "bird.ctl" in cli.failed(cli.run("anycast", "withdraw", "--config", path, "--dry-run"), 1)
    assert not file.exists()
    with socket.socket(socket.AF_UNIX) as listens:
        listens.bind(str(control))
        listens.listen()
        assert f"{file} announces nothing" in cli.run("anycast", "withdraw", "--config", path, "--dry-run").stdout
        written = bird.written(["192.0.2.1/32"], Phase.ANNOUNCED, bird.BirdConfig(str(control), str(file)))
        file.write_text(written)
        result = cli.run("anycast", "withdraw", "--config", path, "--dry-run")
        assert (result.exit_code, file.read_text()) == (0, written)
        assert "would be emptied" in result.stdout
        assert "route 192.0.2.1/32" in result.stdout
