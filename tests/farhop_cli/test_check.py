"""`farhop check`: every fault at once, and what a sound topology's law comes to."""

import json

import pytest

from topology.load import shipped

BROKEN = """
name: broken
epoch: 1
countries: [{name: us}]
regions:
  - {name: east, city: A, country: us, latitude: 95, longitude: 0}
rtt_ms: {}
tenants:
  - name: t
    residency: {processing: {allow: [mars]}}
"""


def test_a_shipped_world_is_fine_and_its_law_is_told(cli):
    result = cli.run("check", "three-regions")
    assert result.exit_code == 0
    assert not result.stderr
    row = next(line for line in result.stdout.splitlines() if "not-us" in line)
    assert "frankfurt, tokyo" in row
    assert "export-controlled-70b: frankfurt" in row
    assert "virginia" not in row


def test_json_names_the_lawful_regions_by_scope(cli):
    told = json.loads(cli.run("check", "three-regions", "--json").stdout)
    assert told["ok"] is True
    tenants = {tenant["tenant"]: tenant for tenant in told["tenants"]}
    assert tenants["eu-only"]["lawful"]["processing"] == ["frankfurt"]
    assert tenants["japan-only"]["lawful"]["entry"] == ["tokyo"]
    assert sorted(tenants["anywhere"]["lawful"]) == ["entry", "hints", "logging", "processing"]
    assert {region["region"] for region in told["regions"]} == {"virginia", "frankfurt", "tokyo"}


def test_every_problem_is_told_at_once_with_path_and_remedy(cli, tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text(BROKEN)
    result = cli.run("check", str(path))
    assert result.exit_code == 1
    assert not result.stdout
    *problems, total = result.stderr.splitlines()
    assert any("regions[0].latitude" in line for line in problems)
    assert any("tenants[0].residency.processing.allow[0]" in line and "mars" in line for line in problems)
    assert total == f"{path}: {len(problems)} problems"


def test_problems_as_json(cli, tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text(BROKEN)
    result = cli.run("check", str(path), "--json")
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert told["ok"] is False
    assert all(one["path"] and one["message"] and one["remedy"] for one in told["problems"])


@pytest.mark.parametrize(("name", "says"), [
    ("three-region", "did you mean"),
    ("nowhere.yaml", "no such file"),
    ("./nowhere", "no such file"),
])  # fmt: skip
def test_what_is_not_there_is_a_fault_of_usage(cli, name, says):
    assert says in cli.failed(cli.run("check", name), 2)


def test_a_file_without_the_usual_ending_is_read(cli, tmp_path):
    path = tmp_path / "world"
    path.write_bytes(shipped("three-regions").read_bytes())
    assert cli.run("check", str(path)).exit_code == 0


CONFIGURATION = """
region: virginia
instance: env:POD_NAME
admin: {port: 8082}
hop: {keys: {k1: env:HOP_KEY}, active: k1}
etcd: {endpoints: ["127.0.0.1:2379"]}
"""
REGIONAL = """
tier: {port: 9000}
control: {port: 9001}
replicas: [{url: "http://127.0.0.1:8000", models: []}]
"""


@pytest.mark.parametrize(
    ("tier", "more"),
    [("global", "listen: {port: 8080}"), ("regional", REGIONAL)],
)
def test_a_balancers_configuration_is_checked_as_at_its_start(cli, tmp_path, monkeypatch, tier, more):
    path = tmp_path / "balancer.yaml"
    path.write_text(f"{CONFIGURATION}{more}\n")
    monkeypatch.setenv("POD_NAME", f"{tier}-7c9f")
    monkeypatch.delenv("HOP_KEY", raising=False)
    result = cli.run("check", str(path))
    assert result.exit_code == 1
    assert "hop.keys.k1: environment variable HOP_KEY is not set" in result.stderr
    monkeypatch.setenv("HOP_KEY", "x" * 32)
    result = cli.run("check", str(path))
    assert (result.exit_code, result.stderr) == (0, "")
    expected = f"fine ({tier}, region virginia, instance {tier}-7c9f, topology three-regions, hubs main)"
    assert expected in " ".join(result.stdout.split())
    told = json.loads(cli.run("check", str(path), "--json").stdout)
    assert told == {
        "ok": True, "source": str(path), "tier": tier, "region": "virginia", "instance": f"{tier}-7c9f",
        "hubs": ["main"],
    }  # fmt: skip


def test_a_configuration_of_a_region_that_is_not_on_the_map(cli, tmp_path, monkeypatch):
    path = tmp_path / "balancer.yaml"
    path.write_text(f"{CONFIGURATION.replace('virginia', 'mars')}listen: {{port: 8080}}\n")
    monkeypatch.setenv("POD_NAME", "global-0")
    monkeypatch.setenv("HOP_KEY", "x" * 32)
    result = cli.run("check", str(path), "--json")
    assert result.exit_code == 1
    assert "mars" in json.loads(result.stdout)["problems"][0]
