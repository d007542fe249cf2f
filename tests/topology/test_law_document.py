"""The law as a document of its own: it is encoded and decoded without loss, and its errors are reported at once."""

import json
from dataclasses import replace

import pytest

from topology import law_document
from topology.load import load, of, shipped, shipped_names
from topology.problems import TopologyError

WORLD = load(shipped("three-regions"))


def document(**changes):
    fields = {"epoch": 7, "author": "ann", "why": "audit", "at": "2026-05-01T12:00:00+00:00"}
    return json.dumps({**fields, **law_document.document_of(WORLD), **changes}).encode()


def tenant(**residency):
    return {"name": "acme", "residency": {"processing": {"allow": ["eu"]}, **residency}}


def faults(text):
    with pytest.raises(TopologyError) as caught:
        law_document.read(text, WORLD, "etcd")
    assert caught.value.source == "etcd"
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("name", shipped_names())
def test_a_law_is_read_as_it_was_written(name):
    world = load(shipped(name))
    read = law_document.read(
        law_document.encode(law_document.document_of(world), 9, "ann", "why", "2026-05-01T12:00:00Z"), world, "etcd"
    )
    made = read.over(world)
    assert (made.tenants, made.models, made.epoch) == (world.tenants, world.models, 9)
    assert (made.regions, made.rtt_ms("virginia", "tokyo") if name == "three-regions" else 0) == (
        world.regions, world.rtt_ms("virginia", "tokyo") if name == "three-regions" else 0,
    )  # fmt: skip
    assert (read.author, read.why, read.at) == ("ann", "why", "2026-05-01T12:00:00Z")


def test_everything_a_tenant_may_say_is_kept():
    full = {
        "name": "acme", "priority": 3, "weight": 2.5, "share_prefixes": True, "resume": "exact",
        "keys": [{"name": "k", "sha256": "a" * 64, "within": ["eu"]}],
        "residency": {
            "processing": {"allow": ["eu", "us"], "deny": ["virginia"]}, "entry": {"allow": ["eu"]},
            "logging": {"allow": ["eu"]}, "hints": {"allow": ["world"], "deny": ["us"]},
            "on_exhausted": "wait", "wait_max_s": 3.0,
        },
        "models": {"m": {"allow": ["world"], "deny": ["us"]}},
    }  # fmt: skip
    made = law_document.read(document(tenants=[full], models={}), WORLD, "etcd").over(WORLD)
    assert law_document.document_of(made) == {"models": {}, "tenants": [full]}


def test_keys_of_a_new_law_are_those_it_names():
    made = law_document.read(document(tenants=[tenant()]), WORLD, "etcd").over(WORLD)
    [held] = WORLD.tenants["eu-only"].keys
    assert WORLD.key(held.sha256) is not None
    assert made.key(held.sha256) is None


def test_every_fault_is_reported_at_once_with_its_path():
    twice = {"name": "k", "sha256": "b" * 64}
    found = faults(
        document(
            epoch=0, author=" ", at="yesterday", extra=1,
            tenants=[
                tenant(entry={"allow": ["atlantis"]}) | {"keys": [twice]},
                tenant(on_exhausted="wait") | {"keys": [twice]},
                {"name": "nobody"},
                {"name": "nowhere", "residency": {"processing": {"allow": ["eu"], "deny": ["eu"]}}},
            ],
            models={"m": {"deny": ["mars"]}},
        )
    )  # fmt: skip
    for path in (
        "epoch: ", "author: ", "at: ", "extra: unknown field", "tenants[0].residency.entry.allow[0]: unknown place",
        'tenants[1].name: "acme" is already', "tenants[1].residency: on_exhausted and wait_max_s disagree",
        "tenants[1].keys[0].sha256: the same key", "tenants[2].residency: missing", "models.m.deny[0]: unknown place",
        "tenants[3].residency.processing: no region is lawful",
    ):  # fmt: skip
        assert any(one.startswith(path) for one in found), (path, found)


def test_a_region_that_the_map_lacks_makes_the_law_unreadable():
    smaller = replace(
        WORLD, regions={name: one for name, one in WORLD.regions.items() if name != "tokyo"},
        rtt={("virginia", "frankfurt"): 91.0},
    )  # fmt: skip
    named = document(tenants=[{"name": "acme", "residency": {"processing": {"allow": ["tokyo", "eu"]}}}])
    assert law_document.read(named, WORLD, "etcd").tenants
    with pytest.raises(TopologyError, match=r'unknown place "tokyo"'):
        law_document.read(named, smaller, "etcd")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"why": "\xff"}', "no text"),
        (b"[" * 200_000, "nested too deeply"),
        (b'["a"]', "a law is a mapping"),
        (b'{"epoch": 1' + b"1" * 5000 + b"}", "no text"),
        (b'{"tenants": [], "tenants": []}', "given twice"),
        (b'{"epoch": NaN}', "epoch: "),
        (b" " * (law_document.DOCUMENT_LIMIT_BYTES + 1), "at most"),
        (b"{}", "tenants: missing"),
        (b'{"tenants": 5, "models": []}', "tenants: "),
    ],
)
def test_a_document_that_is_no_law_is_refused_with_a_line_for_each_fault(text, says):
    line = faults(text)
    assert any(says in one for one in line), line
    assert not any("\n" in one for one in line)


def test_problems_are_bounded():
    tenants = [tenant(entry={"allow": [f"nowhere-{n}"]}) | {"name": f"t{n}"} for n in range(500)]
    assert len(faults(document(tenants=tenants))) == law_document.PROBLEMS_MAX


def test_no_secret_is_quoted():
    found = faults(document(tenants=[tenant() | {"keys": [{"name": "k", "key": "sk-secret", "sha256": "sk-secret"}]}]))
    assert found
    assert not any("sk-secret" in one for one in found)


def test_the_difference_between_two_laws_is_listed():
    law = law_document.document_of(WORLD)
    tenants = [one for one in law["tenants"] if one["name"] != "not-us"]
    tenants[1] = {**tenants[1], "priority": 5}
    changed = law_document.read(document(tenants=[*tenants, tenant()], models={}), WORLD, "etcd").over(WORLD)
    assert law_document.changed(WORLD, changed) == {
        "added": ["acme"], "removed": ["not-us"], "changed": [tenants[1]["name"]], "models": ["export-controlled-70b"],
    }  # fmt: skip


@pytest.mark.parametrize("name", shipped_names())
def test_a_map_written_and_read_again_is_the_same_world(name):
    world = load(shipped(name))
    body = json.loads(json.dumps({**law_document.map_of(world), **law_document.document_of(world)}))
    assert of(body, name) == world
