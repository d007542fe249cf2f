"""`farhop check`: every fault at once, and what a sound topology's law comes to."""

import json
import re
from pathlib import Path

import pytest

from farhop.config import ConfigError, load
from farhop_lab import scenarios
from farhop_lab.world.certs import Authority
from global_lb.app.config import GlobalConfig
from regional_lb.app.config import RegionalConfig
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


def test_a_shipped_world_is_fine_and_its_law_is_shown(cli):
    result = cli.run("check", "three-regions")
    assert result.exit_code == 0
    assert not result.stderr
    row = next(line for line in result.stdout.splitlines() if "not-us" in line)
    assert "frankfurt, tokyo" in row
    assert "export-controlled-70b: frankfurt" in row
    assert "virginia" not in row


def test_json_names_the_lawful_regions_by_scope(cli):
    output = json.loads(cli.run("check", "three-regions", "--json").stdout)
    assert output["ok"] is True
    tenants = {tenant["tenant"]: tenant for tenant in output["tenants"]}
    assert tenants["eu-only"]["lawful"]["processing"] == ["frankfurt"]
    assert tenants["japan-only"]["lawful"]["entry"] == ["tokyo"]
    assert sorted(tenants["anywhere"]["lawful"]) == ["entry", "hints", "logging", "processing"]
    assert {region["region"] for region in output["regions"]} == {"virginia", "frankfurt", "tokyo"}


def test_all_problems_are_shown_with_path_and_remedy(cli, tmp_path):
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
    output = json.loads(result.stdout)
    assert output["ok"] is False
    assert all(one["path"] and one["message"] and one["remedy"] for one in output["problems"])


@pytest.mark.parametrize(("name", "says"), [
    ("three-region", "did you mean"),
    ("nowhere.yaml", "no such file"),
    ("./nowhere", "no such file"),
])  # fmt: skip
def test_missing_file_is_bad_usage(cli, name, says):
    assert says in cli.failed(cli.run("check", name), 2)


def test_a_scenario_is_named_so(cli):
    result = cli.run("check", str(Path(scenarios.__file__).parent / "arena.yaml"))
    assert result.exit_code == 1
    assert "a scenario, which is no part of a fleet; check it with `farhop sim " in result.output
    assert "1 problem" in result.output


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
    output = json.loads(cli.run("check", str(path), "--json").stdout)
    assert output == {
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


# -- several files


MAP = """
name: two
epoch: 3
countries: [{name: fr}, {name: us}]
hubs: {main: ["127.0.0.1:2379"]}
regions:
  - {name: paris, country: fr, latitude: 48.9, longitude: 2.4, hub: main}
  - {name: virginia, country: us, latitude: 39.0, longitude: -77.5, hub: main}
rtt_ms: {paris: {virginia: 80}}
tenants: [{name: acme, residency: {processing: {allow: [world]}}}]
"""


@pytest.fixture
def fleet(tmp_path, monkeypatch):
    """Writes files, each a document with changes; gives their paths."""
    monkeypatch.setenv("HOP_KEY", "x" * 32)
    monkeypatch.setenv("OTHER_KEY", "y" * 32)
    (tmp_path / "world.yaml").write_text(MAP)
    common = {"topology": str(tmp_path / "world.yaml"), "hop": {"keys": {"k1": "env:HOP_KEY"}, "active": "k1"}}
    above = {"region": "paris", "instance": "g1", "admin": {"port": 1}, "listen": {"port": 2}, **common}
    below = {
        "region": "paris", "instance": "r1", "admin": {"port": 3}, "tier": {"port": 4}, "control": {"port": 5},
        "replicas": [{"url": "http://127.0.0.1:6", "models": []}], **common,
    }  # fmt: skip
    law = {"tenants": [{"name": "acme", "residency": {"processing": {"allow": ["fr"]}}}]}

    def write(**changes):
        documents = {"above": above, "below": below, "law": law}
        for name, document in documents.items():
            (tmp_path / f"{name}.yaml").write_text(json.dumps(document | changes.get(name, {})))
        return [str(tmp_path / f"{name}.yaml") for name in ("world", *documents)]

    return write


def test_a_whole_fleets_files_are_fine_together(cli, fleet):
    result = cli.run("check", *fleet())
    assert (result.exit_code, result.stderr) == (0, "")
    output = " ".join(result.stdout.split())
    assert "law.yaml: fine (a law for 1 tenants)" in output
    assert output.endswith("together: fine")


TOGETHER = {
    "law": ({"law": {"tenants": [{"name": "a", "residency": {"processing": {"allow": ["mars"]}}}]}},
            'law.yaml: tenants[0].residency.processing.allow[0]: unknown place "mars"'),
    "region": ({"below": {"region": "mars"}}, "below.yaml: region: 'mars' is not in topology 'two'"),
    "route": ({"above": {"routes": [{"policy": "failover", "regions": ["rome"]}]}}, "no region 'rome' in the topology"),
    "pilot light": ({"above": {"pilot_light": {"rome": {}}}}, "pilot_light: no region 'rome' in the topology"),
    "key id": ({"above": {"hop": {"keys": {"k2": "env:HOP_KEY"}, "active": "k2"}}}, "hop.active: k2 is not among"),
    "secret": ({"below": {"hop": {"keys": {"k1": "env:OTHER_KEY"}, "active": "k1"}}}, "hop.keys.k1: not the secret"),
    "another map": ({"below": {"topology": "three-regions", "region": "tokyo", "etcd": {"endpoints": ["127.0.0.1:1"]}}},
                    "below.yaml: topology: another map or law than that of"),
    "trust": ({"below": {"trust_domain": "other.internal"}}, "trust_domain: other.internal, and"),
}  # fmt: skip


@pytest.mark.parametrize("case", TOGETHER)
def test_contradiction_between_files_names_file_and_field(cli, fleet, case):
    changes, says = TOGETHER[case]
    result = cli.run("check", *fleet(**changes))
    assert result.exit_code == 1
    assert says in " ".join(result.stderr.split())
    assert "x" * 8 not in result.stderr + result.stdout
    output = json.loads(cli.run("check", *fleet(**changes), "--json").stdout)
    assert output["ok"] is False


def test_a_name_given_twice_is_reported(cli, fleet, tmp_path):
    paths = fleet()
    (tmp_path / "again.yaml").write_text((tmp_path / "below.yaml").read_text())
    result = cli.run("check", *paths, str(tmp_path / "again.yaml"))
    assert "again.yaml: instance: r1 is also that of" in " ".join(result.stderr.split())


def test_a_law_needs_a_map(cli, fleet):
    assert "a law is checked for a map" in cli.failed(cli.run("check", fleet()[-1]), 2)


def test_check_without_secrets_lists_them_and_checks_everything_else(cli, fleet, monkeypatch):
    monkeypatch.delenv("HOP_KEY")
    tls = {"cert_file": "/nowhere/a.crt", "key_file": "/nowhere/a.key"}
    paths = fleet(above={"listen": {"port": 2, "tls": tls}})
    assert cli.run("check", *paths).exit_code == 1
    result = cli.run("check", *paths, "--no-secrets")
    assert (result.exit_code, result.stderr) == (0, "")
    output = " ".join(result.stdout.split())
    assert "not checked, as it is not here: environment variable HOP_KEY is not set" in output
    assert "/nowhere/a.crt: No such file or directory" in output
    wrong = cli.run("check", *fleet(above={"listen": {"port": 70000}}), "--no-secrets")
    assert wrong.exit_code == 1
    assert "listen.port" in wrong.stderr


def test_an_unknown_name_is_a_note(cli, fleet):
    more = {"routes": [{"tenant": "nobody"}], "region_hosts": {"rome": ["10.0.0.0/8"]}}
    result = cli.run("check", *fleet(above=more))
    output = " ".join(result.stdout.split())
    assert result.exit_code == 0
    assert "routes[0].tenant: the law knows no tenant nobody" in output
    assert "region_hosts: rome is no region of two" in output


@pytest.mark.parametrize(
    ("above", "below", "noted"),
    [
        ({}, {}, ""),
        ({"first_byte_s": 450}, {}, "first_byte_s: 450 is not above 3 × (queue.wait_s + limits.first_byte_s), 450"),
        ({}, {"first_byte_s": 140}, "first_byte_s: 480 is not above 3 × (queue.wait_s + limits.first_byte_s), 510"),
        ({"whole_answer_s": 600}, {}, "limits.whole_answer_s: 600 is not above that of"),
        ({"between_bytes_s": 5}, {}, "limits.between_bytes_s: 5 is not above that of"),
    ],
)
def test_time_outs_that_leave_a_region_no_time_for_its_own_are_a_note(cli, fleet, above, below, noted):
    result = cli.run("check", *fleet(above={"limits": above}, below={"limits": below}))
    output = " ".join(result.stdout.split())
    assert (result.exit_code, result.stderr) == (0, "")
    assert noted in output
    assert ("the region would not get to" in output) == bool(noted)


@pytest.mark.parametrize("everybody", [True, False])
@pytest.mark.parametrize(("rule", "is_noted"), [("Tiny-7B", True), ("tiny-7b", False), ("other", False)])
def test_a_rule_that_misses_a_served_model_by_its_case_alone_is_a_note(cli, fleet, rule, is_noted, everybody):
    rules = {"models": {rule: {"deny": ["fr"]}}}
    tenant = {"name": "acme", "residency": {"processing": {"allow": ["world"]}}, **({} if everybody else rules)}
    result = cli.run(
        "check",
        *fleet(
            law={"tenants": [tenant], **(rules if everybody else {})},
            below={"replicas": [{"url": "http://127.0.0.1:6", "models": ["tiny-7b"]}]},
        ),
    )
    assert result.exit_code == 0, result.stderr
    noted = f"replicas serve tiny-7b, and the law has a rule for {rule}, which does not bind it"
    assert (noted in " ".join(result.stdout.split())) == is_noted


DNS = """
region: frankfurt
instance: dns-1
topology: TOPOLOGY
admin: {port: 8092}
etcd: {endpoints: ["127.0.0.1:2379"]}
zones:
  - zone: e.example
    servers: [ns.e.example]
    addresses: {ns.e.example: [192.0.2.53]}
    names: [{name: api.e.example, families: [ipv4]}]
"""


def test_dns_and_anycast_configurations_are_checked_too(cli, tmp_path):
    world = tmp_path / "world.yaml"
    entry = "entries: [{name: fra-1, region: frankfurt, ipv4: [192.0.2.80]}]\n"
    world.write_text(shipped("three-regions").read_text() + entry)
    dns = tmp_path / "dns.yaml"
    dns.write_text(DNS.replace("TOPOLOGY", str(world)))
    result = cli.run("check", str(dns), str(world))
    assert result.exit_code == 0, result.stderr
    assert f"{dns}: fine (dns, region frankfurt, instance dns-1, topology three-regions, hubs " in result.stdout
    dns.write_text(DNS.replace("TOPOLOGY", str(world)).replace("families: [ipv4]", "tenant: nobody"))
    result = cli.run("check", str(dns))
    assert result.exit_code == 1
    assert "nobody" in result.stderr
    dns.write_text(DNS.replace("TOPOLOGY", str(world)) + "networks: {lists: [{cidrs: [nonsense], near: frankfurt}]}\n")
    result = cli.run("check", str(dns))
    assert result.exit_code == 1
    assert "nonsense" in result.stderr
    announcer = tmp_path / "anycast.yaml"
    announcer.write_text(
        f"region: frankfurt\ninstance: a-1\ntopology: {world}\nadmin: {{port: 8093}}\nentry: fra-2\n"
        "probe: {url: 'http://127.0.0.1:8080/ready'}\nspeaker: {bird: {file: /run/farhop.conf}}\n"
    )
    result = cli.run("check", str(announcer))
    assert result.exit_code == 1
    assert "fra-2" in result.stderr
    announcer.write_text(announcer.read_text().replace("fra-2", "fra-1"))
    assert "fine (anycast, region frankfurt" in cli.run("check", str(announcer)).stdout


# -- what would show only once the balancers run


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """TLS of both tiers of paris, as `farhop certs` issues it: ours, theirs, and by whom."""
    folder = tmp_path_factory.mktemp("certs")
    authority, other = Authority(folder), Authority(folder, "other-ca")
    made = {
        name: authority.issue(name, (f"{name}.farhop.internal",))
        for name in ("paris.regional", "virginia.regional", "paris.global")
    }

    def tls(ours=made["paris.global"], theirs=made["paris.regional"], ca=authority, client_ca=authority):
        tier_tls = {"ca_file": ca.ca_file, "cert_file": ours.cert_file, "key_file": ours.key_file}
        listen_tls = {"client_ca_file": client_ca.ca_file, "cert_file": theirs.cert_file, "key_file": theirs.key_file}
        ports = {"tier": {"port": 4, "tls": listen_tls}, "control": {"port": 5, "tls": listen_tls}}
        return {"above": {"tier_tls": tier_tls}, "below": ports}

    return made, other, tls


def test_certificates_of_the_two_tiers_that_do_not_go_together_are_named(cli, fleet, certificates):
    made, other, tls = certificates
    result = cli.run("check", *fleet(**tls()))
    assert result.exit_code == 0, result.stderr

    def wrong(**changes):
        result = cli.run("check", *fleet(**tls(**changes)))
        assert result.exit_code == 1
        (problem,) = result.stderr.splitlines()
        return problem

    assert f"above.yaml: tier_tls.ca_file: {other.ca_file} does not vouch for" in wrong(ca=other)
    assert f"below.yaml: tier.tls.client_ca_file: {other.ca_file} does not vouch for" in wrong(client_ca=other)
    expected = "is not in the name of paris.regional.farhop.internal"
    assert expected in wrong(theirs=made["virginia.regional"])


def test_documents_for_etcd_are_checked(cli, fleet, certificates):
    made, other, _ = certificates
    pair = made["paris.global"]
    etcd = {"ca_file": other.ca_file, "cert_file": pair.cert_file, "key_file": pair.key_file}
    assert cli.run("check", *fleet(above={"etcd": etcd})).exit_code == 0
    crossed = etcd | {"key_file": made["paris.regional"].key_file}
    result = cli.run("check", *fleet(above={"etcd": crossed}))
    assert f"above.yaml: etcd: key_file: {crossed['key_file']}: is not the key of the certificate in" in result.stderr
    paths = fleet(below={"hubs": {"main": etcd | {"ca_file": "/nowhere/ca.pem"}}})
    result = cli.run("check", *paths)
    assert "below.yaml: hubs.main: ca_file: /nowhere/ca.pem: No such file" in result.stderr
    result = cli.run("check", *paths, "--no-secrets")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "not checked, as it is not here: ca_file: /nowhere/ca.pem" in " ".join(result.stdout.split())


def test_one_port_for_two_listeners_is_reported(cli, fleet):
    result = cli.run("check", *fleet(below={"control": {"port": 4}}))
    assert result.exit_code == 1
    assert re.search(r"below\.yaml: (tier|control)\.port: 4 is (tier|control)'s, too; give each its own", result.stderr)
    apart = {"host": "127.0.0.2", "port": 4}
    assert cli.run("check", *fleet(below={"control": apart})).exit_code == 0


def test_missing_listeners_of_a_regional_configuration_are_named(cli, tmp_path):
    (tmp_path / "picks.yaml").write_text(
        "region: tokyo\ninstance: a\nadmin: {port: 1}\npicker: {port: 2}\nreplicas: []\n"
    )
    result = cli.run("check", str(tmp_path / "picks.yaml"))
    assert "picks.yaml: tier: Field required" in result.stderr
    assert "right file" not in result.stderr


@pytest.mark.parametrize(
    ("kind", "name", "problem"),
    [
        (GlobalConfig, "below", "tier: unknown field; it is one of a regional balancer's (farhop regional)"),
        (RegionalConfig, "above", "listen: unknown field; it is one of a global balancer's (farhop global)"),
        (RegionalConfig, "world", "regions: unknown field; it is one of a topology's"),
    ],
)
def test_configuration_of_another_process_is_recognised(fleet, tmp_path, kind, name, problem):
    fleet()
    with pytest.raises(ConfigError) as caught:
        load(kind, tmp_path / f"{name}.yaml")
    assert f"{problem}: is this the right file?" in caught.value.problems


def test_every_fault_across_fields_has_a_line(cli, fleet):
    """Of one file: by its own fields, and with the map."""
    far = {
        "tier": {"host": "0.0.0.0", "port": 4, "insecure": True},
        "engine_tls": {},
        "tokenizers": {"other": {"file": "t.json"}},
        "policies": {"another": {}},
        "replicas": [{"url": "http://127.0.0.1:6", "models": ["m"]}] * 2,
    }
    result = cli.run("check", *fleet(below=far))
    lines = [line.partition("below.yaml: ")[2] for line in result.stderr.splitlines() if "below.yaml: " in line]
    starts = ("engine_tls: no replica", "replicas: 127.0.0.1:6 is given twice", "advertise: is not given",
              "policies.another: no replica", "tokenizers.other: no replica")  # fmt: skip
    assert {start: sum(line.startswith(start) for line in lines) for start in starts} == dict.fromkeys(starts, 1)
    routes = [{"policy": "failover", "regions": ["mars"]}]
    result = cli.run("check", *fleet(above={"routes": routes, "hubs": {"moon": {}}, "admin": {"port": 2}}))
    for part in ("hubs.moon: ", "mars", "listen.port: 2 is admin's, too"):
        assert part in result.stderr
