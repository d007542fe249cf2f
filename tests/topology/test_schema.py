from __future__ import annotations

from typing import Any

import pytest

from topology.problems import Problem


def _put(raw: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    at: Any = raw
    for part in path[:-1]:
        at = at[part]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value


TENANT = ("tenants", 0)
WRONG = [
    (("name",), ..., "name", "missing"),
    (("name",), "Three Regions", "name", "not a name"),
    (("epoch",), 0, "epoch", "greater than or equal to 1"),
    (("epoch",), "1", "epoch", "valid integer"),
    (("epoch",), True, "epoch", "valid integer"),
    (("regions",), [], "regions", "at least 1"),
    (("regions",), "x", "regions", "valid list"),
    (("regions", 0), "x", "regions[0]", "valid dictionary"),
    (("regions", 0, "latitude"), 90.1, "regions[0].latitude", "less than or equal to 90"),
    (("regions", 0, "longitude"), -181, "regions[0].longitude", "greater than or equal to -180"),
    (("regions", 0, "latitude"), float("nan"), "regions[0].latitude", "finite"),
    (("regions", 0, "latitude"), 10**400, "regions[0].latitude", "input should be"),
    (("regions", 0, "longitude"), ..., "regions[0].longitude", "missing"),
    (("regions", 0, "egress_usd_per_gb"), -0.1, "regions[0].egress_usd_per_gb", "greater than or equal to 0"),
    (("regions", 0, "usd_per_gpu_hour"), float("inf"), "regions[0].usd_per_gpu_hour", "finite"),
    (("regions", 0, "entry"), ["ftp://a"], "regions[0].entry[0]", "not the URL"),
    (("regions", 0, "entry"), ["http://u:p@a"], "regions[0].entry[0]", "not the URL"),
    (("regions", 0, "entry"), ["http://a/path"], "regions[0].entry[0]", "not the URL"),
    (("regions", 0, "entry"), ["http://a:99999"], "regions[0].entry[0]", "not the URL"),
    (("regions", 0, "entry"), ["http://[::1"], "regions[0].entry[0]", "not the URL"),
    (("hubs", "main"), ["etcd-1"], "hubs.main[0]", "not host:port"),
    (("hubs", "main"), ["http://etcd-1:2379"], "hubs.main[0]", "not host:port"),
    (("hubs", "main"), ["etcd-1:0"], "hubs.main[0]", "not host:port"),
    (("local_rtt_ms",), 0, "local_rtt_ms", "greater than 0"),
    (("rtt_ms", "virginia", "tokyo"), 0, "rtt_ms.virginia.tokyo", "greater than 0"),
    (("rtt_ms", "virginia", "tokyo"), -5.0, "rtt_ms.virginia.tokyo", "greater than 0"),
    (("rtt_ms", "virginia", "tokyo"), "166", "rtt_ms.virginia.tokyo", "valid number"),
    (("models", "m/x"), {"allow": []}, 'models["m/x"].allow', "at least 1"),
    ((*TENANT, "residency"), ..., "tenants[0].residency", "missing"),
    ((*TENANT, "residency"), None, "tenants[0].residency", "valid dictionary"),
    ((*TENANT, "residency", "processing"), ..., "tenants[0].residency.processing", "missing"),
    ((*TENANT, "residency", "processing", "allow"), ..., "tenants[0].residency.processing.allow", "missing"),
    ((*TENANT, "residency", "processing", "allow"), [], "tenants[0].residency.processing.allow", "at least 1"),
    (
        (*TENANT, "residency", "processing", "allow"),
        [False],
        "tenants[0].residency.processing.allow[0]",
        "valid string",
    ),
    ((*TENANT, "residency", "on_exhausted"), "retry", "tenants[0].residency.on_exhausted", "'refuse' or 'wait'"),
    ((*TENANT, "priority"), 10, "tenants[0].priority", "less than or equal to 9"),
    ((*TENANT, "weight"), 0, "tenants[0].weight", "greater than 0"),
    ((*TENANT, "share_prefixes"), "yes please", "tenants[0].share_prefixes", "valid boolean"),
    ((*TENANT, "resume"), "maybe", "tenants[0].resume", "'off', 'exact' or 'text'"),
    ((*TENANT, "keys", 0, "sha256"), "A" * 64, "tenants[0].keys[0].sha256", "not a SHA-256"),
    ((*TENANT, "keys", 0, "sha256"), "a" * 63, "tenants[0].keys[0].sha256", "not a SHA-256"),
    ((*TENANT, "keys", 0, "sha256"), ..., "tenants[0].keys[0].sha256", "missing"),
]


@pytest.mark.parametrize(("at", "value", "path", "message"), WRONG)
def test_each_fault_of_shape_is_reported(faults: Any, at: tuple[Any, ...], value: Any, path: str, message: str) -> None:
    found = [problem for problem in faults(lambda raw: _put(raw, at, value)) if problem.path == path]
    assert len(found) == 1
    assert message in found[0].message


def test_remedy_names_the_expected_value(faults: Any) -> None:
    [problem] = faults(lambda raw: _put(raw, ("regions", 1, "latitude"), 100))
    assert problem.remedy == "give degrees north, -90 to 90"
    [problem] = faults(lambda raw: _put(raw, ("tenants", 2, "residency", "wait_max_s"), 601))
    assert problem.remedy == "give seconds, 0 to 600"
    [problem] = faults(lambda raw: _put(raw, ("models", "m"), {"allow": []}))
    assert "`deny: [world]` for none" in problem.remedy


@pytest.mark.parametrize(
    ("at", "path", "remedy"),
    [
        (("epohc",), "epohc", 'did you mean "epoch"?'),
        (("regions", 0, "latitud"), "regions[0].latitud", 'did you mean "latitude"?'),
        (("tenants", 0, "residency", "procesing"), "tenants[0].residency.procesing", 'did you mean "processing"?'),
        (
            ("tenants", 0, "residency", "processing", "dney"),
            "tenants[0].residency.processing.dney",
            'did you mean "deny"?',
        ),
        (("tenants", 3, "keys", 0, "withn"), "tenants[3].keys[0].withn", 'did you mean "within"?'),
        (("models", "export-controlled-70b", "zzz"), "models.export-controlled-70b.zzz", "known here: allow, deny"),
    ],
)
def test_an_unknown_field_is_reported_with_the_nearest_known_there(
    faults: Any, at: tuple[Any, ...], path: str, remedy: str
) -> None:
    [problem] = faults(lambda raw: _put(raw, at, 1))
    assert (problem.path, problem.remedy) == (path, remedy)
    assert problem.message.startswith("unknown field")


def test_a_plaintext_key_is_refused_with_the_command_to_hash_it_and_never_repeated(faults: Any) -> None:
    secret = "sk-very-secret"
    found: list[Problem] = faults(lambda raw: _put(raw, ("tenants", 0, "keys", 0), {"name": "k", "key": secret}))
    [problem] = found
    assert problem.path == "tenants[0].keys[0].key"
    assert "farhop hash-key" in problem.remedy
    assert secret not in str(problem)
    [misplaced] = faults(lambda raw: _put(raw, ("tenants", 0, "keys", 0, "sha256"), secret))
    assert secret not in str(misplaced)


def test_valid_variants_of_a_topology_pass(faults: Any) -> None:
    for at, value in [
        (("hubs", "main"), ["etcd-1:2379", "10.0.0.1:2379", "[::1]:2379"]),
        (("regions", 0, "entry"), ["https://a.example.com:8443/", "http://[::1]:80"]),
        (("regions", 0, "entry"), []),
        (("regions", 0, "latitude"), 39),
        (("models", "org/any Model:v1"), {"allow": ["eu"]}),
    ]:
        assert faults(lambda raw, at=at, value=value: _put(raw, at, value)) == []
