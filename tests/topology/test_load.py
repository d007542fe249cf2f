from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from topology.law import Law, Scope
from topology.law_document import document_of, map_of
from topology.load import document, load, parse, shipped, shipped_names
from topology.model import Entry, Place
from topology.problems import Problem, TopologyError

TEXT = shipped("three-regions").read_text(encoding="utf-8")

MANY_FAULTS = """\
name: Bad Name
epoch: 0
surprise: 1
countries: [{name: us, within: [eu]}]
regions:
  - {name: a, country: uss, latitude: 100, longitude: 1, hub: q, entry: [ftp://x]}
  - {name: b, country: no, latitude: 1, longitude: 1, hub: main}
hubs: {main: [x]}
rtt_ms: {a: {c: -1}}
rtt_ms: {a: {b: 0}}
tenants:
  - {name: t, keys: [{name: k, key: sk-x}], weigth: 2}
  - name: t
    keys: [{name: k, sha256: sk-x}]
    residency: {processing: {allow: [wrld]}, entry: {deny: []}, on_exhausted: wait}
"""


@pytest.mark.parametrize("name", shipped_names())
def test_every_shipped_world_is_good(name: str) -> None:
    world = load(shipped(name))
    assert world.name == name
    assert world.epoch >= 1
    assert set(world.hubs) >= {region.hub for region in world.regions.values()}


def test_the_default_world() -> None:
    world = load(shipped("three-regions"))
    assert list(world.regions) == ["virginia", "frankfurt", "tokyo"]
    assert [
        world.rtt_ms(*pair) for pair in (("virginia", "frankfurt"), ("tokyo", "virginia"), ("tokyo", "frankfurt"))
    ] == [
        91,
        166,
        230,
    ]
    assert world.ancestors("frankfurt") == {"frankfurt", "de", "eu", "eea", "world"}
    assert world.places["eu"] == Place("eu", "jurisdiction", ("eea",))
    assert world.tenants["japan-only"].residency is not None
    assert world.tenants["japan-only"].residency.wait_max_s == 5.0


@pytest.mark.parametrize("tenant", ["anywhere", "eu-only", "japan-only", "not-us"])
def test_the_demo_keys_open_the_demo_tenants(tenant: str) -> None:
    found = load(shipped("three-regions")).key(hashlib.sha256(f"sk-farhop-{tenant}".encode()).hexdigest())
    assert found is not None
    assert found[0].name == tenant


def test_the_demo_tenants_live_under_the_law_their_names_say() -> None:
    law = Law(load(shipped("three-regions")))
    everywhere = {"virginia", "frankfurt", "tokyo"}
    assert law.verdict("anywhere", "m").lawful == everywhere
    assert law.verdict("eu-only", "m").lawful == {"frankfurt"}
    assert law.verdict("japan-only", "m").lawful == {"tokyo"}
    assert law.verdict("not-us", "m").lawful == {"frankfurt", "tokyo"}
    assert law.verdict("not-us", "export-controlled-70b").lawful == {"frankfurt"}
    assert law.verdict("eu-only", "m", Scope.ENTRY).lawful == everywhere
    assert law.verdict("japan-only", "m", Scope.ENTRY).lawful == {"tokyo"}


def test_every_fault_is_reported_at_once() -> None:
    with pytest.raises(TopologyError) as caught:
        parse(MANY_FAULTS, "bad.yaml")
    assert {problem.path for problem in caught.value.problems} == {
        "rtt_ms",
        "name",
        "epoch",
        "surprise",
        "countries[0].within[0]",
        "regions[0].latitude",
        "regions[0].country",
        "regions[0].hub",
        "regions[0].entry[0]",
        "regions[1].country",
        "hubs.main[0]",
        "rtt_ms.a.b",
        "tenants[0].keys[0].key",
        "tenants[0].residency",
        "tenants[0].weigth",
        "tenants[1].name",
        "tenants[1].keys[0].sha256",
        "tenants[1].residency.entry.allow",
        "tenants[1].residency.processing.allow[0]",
        "tenants[1].residency",
    }
    assert str(caught.value).startswith("bad.yaml: 20 problems\n  ")


def test_a_double_key_alone_is_enough_to_refuse() -> None:
    with pytest.raises(TopologyError, match=r"epoch: .*given twice"):
        parse(TEXT + "\nepoch: 1\n", "w")


def test_a_document_can_be_altered_and_written_back() -> None:
    raw = document(TEXT)
    raw["rtt_ms"]["virginia"]["tokyo"] = 16.6
    raw["regions"][0]["entry"] = ["http://127.0.0.1:9999"]
    world = parse(yaml.safe_dump(raw, sort_keys=False), "lab")
    assert world.rtt_ms("tokyo", "virginia") == 16.6
    assert world.regions["virginia"].entry == ("http://127.0.0.1:9999",)


def test_a_country_and_a_region_bring_their_jurisdictions_along() -> None:
    raw = document(TEXT)
    raw["jurisdictions"] += [{"name": "g7"}, {"name": "asia", "within": ["g7"]}]
    raw["regions"][2]["jurisdictions"] = ["asia"]
    assert parse(yaml.safe_dump(raw), "w").regions["tokyo"].jurisdictions == {"asia", "g7"}


def test_fields_left_out_have_their_default() -> None:
    world = parse(
        "{name: w, epoch: 1, hubs: {main: []}, countries: [{name: de}],"
        " regions: [{name: r, country: de, latitude: 0, longitude: 0, hub: main}]}",
        "w",
    )
    region = world.regions["r"]
    assert (region.entry, region.city, region.usd_per_gpu_hour, region.egress_usd_per_gb) == ((), "", 0.0, 0.0)
    assert (world.local_rtt_ms, dict(world.tenants), dict(world.models)) == (1.0, {}, {})


def _refusal(path: Path | str) -> str:
    with pytest.raises(TopologyError) as caught:
        load(path)
    assert len(caught.value.problems) == 1
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    assert "No such file" in _refusal(tmp_path / "missing.yaml")
    assert "directory" in _refusal(tmp_path)
    assert "not a path" in _refusal("a\x00b")
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"name: M\xfcnchen\n")
    assert "not UTF-8 at byte 7" in _refusal(latin)
    empty = tmp_path / "empty.yaml"
    empty.touch()
    assert "holds nothing" in _refusal(empty)


def test_a_byte_order_mark_is_no_matter(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(TEXT, encoding="utf-8-sig")
    assert load(path) == load(str(path)) == load(shipped("three-regions"))


@pytest.mark.parametrize("name", ["three-region", "../three-regions", "", "three-regions.yaml"])
def test_only_shipped_worlds_are_found_by_name(name: str) -> None:
    with pytest.raises(TopologyError, match="three-regions"):
        shipped(name)


def _spots(node: Any) -> list[tuple[Any, Any]]:
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [spot for key, value in children for spot in [(node, key), *_spots(value)]]


_ODD = [
    None,
    True,
    -1,
    10**400,
    1e308,
    float("nan"),
    "",
    "world",
    "eu",
    "x" * 300,
    [],
    [[]],
    [None],
    {},
    {1: 2},
    {"a": {}},
]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_no_spoilt_document_raises_anything_else(data: st.DataObject) -> None:
    raw = document(TEXT)
    for _ in range(data.draw(st.integers(1, 3))):
        holder, key = data.draw(st.sampled_from(_spots(raw)))
        if data.draw(st.booleans()):
            holder[key] = data.draw(st.sampled_from(_ODD))
        else:
            del holder[key]
    found: tuple[Problem, ...] = ()
    served = False
    try:
        world = parse(yaml.safe_dump(raw, sort_keys=False), "spoilt")
        served = all(Law(world).verdict(name, "").lawful for name in world.tenants)
    except TopologyError as error:
        found = error.problems
    assert served or found
    assert all("\n" not in str(problem) for problem in found)


ENTRIES = {
    "entries": [
        {
            "name": "tokyo-1",
            "region": "tokyo",
            "ipv4": ["203.0.113.3"],
            "ipv6": ["2001:DB8:0::3"],
            "host": "T.example.",
        },
        {"name": "any", "region": "virginia", "ipv4": ["203.0.113.3"], "port": 8443},
    ]
}


def test_entries_are_the_public_addresses_of_global_balancers_and_may_share_them() -> None:
    world = parse(yaml.safe_dump({**document(TEXT), **ENTRIES}), "w")
    assert world.entries["tokyo-1"] == Entry("tokyo-1", "tokyo", ("203.0.113.3",), ("2001:db8::3",), "t.example", 443)
    assert world.entries["any"].port == 8443
    assert parse(yaml.safe_dump({**map_of(world), **document_of(world)}), "again") == world


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"ipv4": ["2001:db8::1"]}, "entries[0].ipv4[0]: not an IPv4 address"),
        ({"ipv6": ["fe80::1%eth0"]}, "entries[0].ipv6[0]: not an IPv6 address"),
        ({"ipv4": ["224.0.0.1"]}, "entries[0].ipv4[0]: not an IPv4 address"),
        ({"region": "osaka"}, "entries[0].region: unknown region"),
        ({"host": "a b"}, "entries[0].host"),
        ({"ipv4": [], "ipv6": []}, "has no address"),
        ({"name": "any"}, "is already the name of an entry"),
        ({"port": 0}, "entries[0].port"),
    ],
)
def test_an_invalid_entry_is_reported_by_its_field(fault: dict[str, Any], message: str) -> None:
    first, other = ENTRIES["entries"]
    with pytest.raises(TopologyError) as refused:
        parse(yaml.safe_dump({**document(TEXT), "entries": [{**first, **fault}, other]}), "w")
    assert message in str(refused.value)
    assert len(refused.value.problems) == 1
