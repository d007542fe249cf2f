"""The region's present replicas: announced, leaving, gone."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from typing import Any

import pytest
from engine_pages import ENGINES, LLAMA, VLLM, Page, pages
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from farhop.balance.model_facts import ModelFacts
from farhop.store.documents.report import BASES_LIMIT, GPU_TYPES_LIMIT, MODELS_LIMIT
from regional_lb.engines.config import ReplicaConfig
from regional_lb.engines.members import Listing, Members, read_listing
from regional_lb.engines.signals.exposition import PageError


def config(name: str, host: str = "", models: tuple[str, ...] = ("m",), **more: object) -> ReplicaConfig:
    fields = {"name": name, "url": f"http://{host or name}:1", "models": list(models), **more}
    return ReplicaConfig.model_validate(fields)


def draining(members: Members) -> dict[str, bool]:
    return {replica.name: replica.draining for replica in members.replicas()}


def test_a_replica_no_longer_announced_drains_until_idle_or_its_deadline() -> None:
    members = Members(leave_s=10.0)
    assert members.announce([config("a"), config("b"), config("c")], 0.0)
    assert not members.announce([config("a"), config("b"), config("c")], 1.0)  # the same list changes nothing
    assert members.announce([config("a")], 2.0)
    assert draining(members) == {"a": False, "b": True, "c": True}
    assert set(members.watched) == {"a", "b", "c"}  # probes go on as long as it works
    assert not members.sweep(3.0, lambda _: False)
    assert members.sweep(4.0, lambda name: name == "b")
    assert draining(members) == {"a": False, "c": True}
    assert not members.sweep(11.9, lambda _: False)
    assert members.sweep(12.0, lambda _: False)
    assert set(members.watched) == {"a"}
    assert members.leaving == 0


def test_a_replica_that_comes_back_while_leaving_stays() -> None:
    members = Members(10.0)
    members.announce([config("a")], 0.0)
    members.announce([], 1.0)
    members.announce([config("a")], 2.0)
    assert draining(members) == {"a": False}
    assert not members.sweep(99.0, lambda _: True)


def test_a_replica_that_is_announced_as_draining_stays_for_as_long_as_it_is_announced() -> None:
    members = Members(10.0)
    members.announce([config("a", draining=True)], 0.0)
    assert not members.sweep(99.0, lambda _: True)
    assert draining(members) == {"a": True}


def test_without_configured_models_an_engine_serves_those_that_it_lists() -> None:
    members = Members(10.0)
    members.announce([config("asked", models=()), config("told", models=("base", "other"))], 0.0)
    assert members.replicas()[0].models == frozenset()
    listing = Listing(("lora",), frozenset({"lora", "base"}))
    assert members.listed("asked", listing)
    assert not members.listed("asked", listing)
    assert members.listed("told", listing)
    assert not members.listed("told", Listing(("base",), frozenset({"base"})))  # nothing new for its models
    assert not members.listed("stranger", listing)
    asked, found = members.replicas()
    assert (asked.models, asked.missing) == (frozenset({"lora"}), frozenset())
    assert (found.models, found.missing) == (frozenset({"base", "other"}), frozenset({"other"}))
    assert members.missing("told") == {"other"}
    members.announce([config("asked", host="new", models=()), config("told", models=("base",))], 1.0)
    asked, found = members.replicas()
    assert asked.models == frozenset()  # another process: the list of the one before says nothing
    assert found.missing == frozenset()


def test_models_that_a_report_cannot_carry_are_left_out_and_named() -> None:
    members = Members(10.0)
    models = [tuple(f"m{n}-{k}" for k in range(64)) for n in range(MODELS_LIMIT // 64)]
    members.announce([config(f"r{n}", models=some) for n, some in enumerate(models)] + [config("over")], 0.0)
    assert "over" not in draining(members)
    assert f"more than {MODELS_LIMIT} models" in members.left_out["over"]
    members = Members(10.0)
    kinds = [config(f"g{n}", gpu=f"g{n}") for n in range(GPU_TYPES_LIMIT + 1)]
    members.announce([*kinds, config("late", gpu="g0")], 1.0)
    assert "late" in draining(members)  # others of a known kind still come in
    assert list(members.left_out) == [f"g{GPU_TYPES_LIMIT}"]


@pytest.mark.parametrize(
    ("body", "ids", "names"),
    [
        (b'{"object":"list","data":[{"id":"a"},{"id":"b","root":"/models/x","parent":"a"}]}', ("a", "b"),
         {"a", "b", "/models/x"}),
        (b'{"data":[{"id":"a"},{"id":"a"},{"id":"with space","root":null}]}', ("a",), {"a", "with space"}),
    ],
)  # fmt: skip
def test_a_listing_is_read(body: bytes, ids: tuple[str, ...], names: set[str]) -> None:
    listing = read_listing(body)
    assert (listing.ids, listing.names) == (ids, names)


@pytest.mark.parametrize("key", ['"id"', '"\\u0069d"'])
def test_a_listing_of_very_many_models_is_not_read_however_its_keys_are_spelled(key: str) -> None:
    """800 KB of them took the loop for 160 ms."""
    models = ",".join(f'{{{key}:"m{n}"}}' for n in range(5000))
    with pytest.raises(PageError, match="more than 4096 objects"):
        read_listing(f'{{"data":[{models}]}}'.encode())


def test_valid_model_facts_of_an_engine_are_kept() -> None:
    listing = read_listing(
        b'{"data":[{"id":"a","root":"/w/a","max_model_len":4096,"owned_by":"vllm"},{"id":"b","parent":"a"},{"id":"c"},'
        b'{"id":"d","max_model_len":"many","root":"line\\nbreak"},{"id":"e","max_model_len":-1}]}'
    )
    assert listing.engine == "vllm"
    assert listing.facts == {"a": ModelFacts(4096, "/w/a"), "b": ModelFacts(parent="a")}
    members = Members(10.0)
    members.announce([config("one", models=("a",))], 0.0)
    assert members.listed("one", listing)
    (one,) = members.replicas()
    assert one.facts["a"].max_model_len == 4096
    other = replace(listing, facts={"a": ModelFacts(8192)})
    assert members.listed("one", other)
    assert not members.listed("one", other)


def test_an_adapter_is_based_on_its_parent_as_listed_and_as_configured() -> None:
    listing = read_listing(
        b'{"data":[{"id":"base","root":"org/base-70b","parent":null},{"id":"sql","root":"/loras/sql","parent":"base"},'
        b'{"id":"mute","root":"/loras/mute"}]}'
    )
    members = Members(10.0)
    of = {
        "told": config("told", models=()),
        "both": config("both", models=("alias",), adapters=("sql",)),
        "mute": config("mute", models=(), adapters=("mute",)),
        "alone": config("alone", models=(), adapters=("mute",)),
    }
    members.announce(list(of.values()), 0.0)
    for name in ("told", "both", "mute"):
        assert members.listed(name, listing)
        assert not members.listed(name, listing)
    lineage = {replica.name: replica.lineage for replica in members.replicas()}
    assert lineage["told"] == {"base": {"org/base-70b"}, "sql": {"base", "org/base-70b"}, "mute": {"/loras/mute"}}
    assert lineage["both"] == {"alias": frozenset(), "sql": {"base", "org/base-70b", "alias"}}
    assert lineage["mute"]["mute"] == {"base"}
    assert lineage["alone"] == {"mute": None}


@pytest.mark.parametrize(
    ("listed", "bases"),
    [
        ([{"id": "alias", "root": "org/base"}, {"id": "sql", "root": "/loras/sql", "parent": "alias"}],
         {"alias", "org/base"}),  # vLLM's, with --served-model-name
        ([{"id": "mod\u00e8le", "root": "org/base"}, {"id": "sql", "parent": "mod\u00e8le"}],
         {"mod\u00e8le", "org/base"}),
        ([{"id": "sql", "root": "/my models/base", "parent": None}], {"/my models/base"}),
        ([{"id": "sql", "root": "x" * 257}, {"id": "sql", "root": "two\nlines"}], set()),
        ([*({"id": f"m{n}"} for n in range(70)), {"id": "sql", "root": "org/base"}], {"org/base"}),
        ([{"id": "sql", "root": "org/base", "parent": "sql"}], {"org/base"}),
        ([{"id": "sql", "parent": "b"}, {"id": "b", "parent": "c"}, {"id": "c", "parent": "sql", "root": "x"},
          {"id": "b", "root": "org/base"}], {"b", "c", "org/base"}),
        ([{"id": "sql", "parent": "p0"}, *({"id": f"p{n}", "parent": f"p{n + 1}"} for n in range(40))], None),
        ([{"id": "sql", "root": "org/base"}, {"id": None}, {"id": 3}, {"object": "model"}, "sql", None, ["sql"],
          {"id": "odd", "parent": 3}], {"org/base"}),
        ([{"id": "sql", "parent": ["org/base"]}], None),
        ([{"id": "sql", "root": {"name": "org/base"}}], None),
        ([{"id": "sql", "root": 3, "parent": "org/base"}], {"org/base"}),
        ([{"id": "sql", "root": "org/base"}, {"id": "sql", "root": 3}], None),
        ([{"id": "sql", "parent": "b"}, {"id": "b", "parent": 3}], None),
    ],
)  # fmt: skip
def test_a_model_is_based_on_all_that_its_engine_names_above_it(listed: list[Any], bases: set[str] | None) -> None:
    """Whether or not that is served here, or could be asked for: the law's rules for it bind the model. What is odd
    beside it hides none of it, and what it is based on is unknown where that cannot be read."""
    members = Members(10.0)
    members.announce([config("one", models=("sql",))], 0.0)
    members.listed("one", read_listing(json.dumps({"data": listed}).encode()))
    (one,) = members.replicas()
    assert one.lineage["sql"] == bases


def test_the_bytes_of_a_model_name_in_a_report_are_bounded() -> None:
    for letters, known in ((128, True), (129, False)):
        root = "\N{LATIN SMALL LETTER E WITH ACUTE}" * letters
        facts = read_listing(f'{{"data":[{{"id":"a","root":"{root}"}}]}}'.encode()).facts
        assert (facts["a"].root == root) if known else not facts


@pytest.mark.parametrize(("models", "known"), [(BASES_LIMIT, True), (BASES_LIMIT + 1, False)])
def test_an_adapter_with_more_possible_bases_than_the_list_holds_has_an_unknown_base(models: int, known: bool) -> None:
    """A rule of one that was left out would not bind it."""
    beside = tuple(f"m{n:02}" for n in range(models))
    members = Members(10.0)
    members.announce([config("a", models=beside, adapters=("sql",))], 0.0)
    (found,) = members.replicas()
    assert found.lineage["sql"] == (frozenset(beside) if known else None)


@pytest.mark.parametrize(
    "body", [b"", b"{}", b'{"data":[]}', b'{"data":[{"id":7}]}', b"<html>", b"[" * 100_000, b"\xff"]
)
def test_a_listing_without_models_is_refused(body: bytes) -> None:
    with pytest.raises(PageError):
        read_listing(body)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sets(st.sampled_from("abcd")), st.sets(st.sampled_from("abcd"))), max_size=12))
def test_no_replica_is_removed_while_it_works(steps: list[tuple[set[str], set[str]]]) -> None:
    """Each step announces some, and then some are busy at the sweep."""
    members = Members(leave_s=3.0)
    left_at: dict[str, float] = {}
    before: set[str] = set()
    for now, (announced, busy) in enumerate(steps):
        members.announce([config(name) for name in sorted(announced)], float(now))
        left_at |= dict.fromkeys(before - announced, float(now))
        left_at = {name: at for name, at in left_at.items() if name not in announced}
        assert draining(members) == {**dict.fromkeys(announced, False), **dict.fromkeys(left_at, True)}
        members.sweep(now + 0.5, lambda name, busy=busy: name not in busy)
        left_at = {name: at for name, at in left_at.items() if name in busy and now + 0.5 < at + 3.0}
        assert draining(members) == {**dict.fromkeys(announced, False), **dict.fromkeys(left_at, True)}
        before = announced


def test_listings_of_real_engines_are_read() -> None:
    found = read_listing(Page(VLLM, "models").body)
    assert found.ids == ("tiny", "adapted")
    assert found.names == {"tiny", "adapted", "/models/model", "/models/lora"}
    assert found.bases == {"tiny": {"/models/model"}, "adapted": {"tiny"}}
    assert found.adapters == {"adapted"}
    assert read_listing(Page(LLAMA, "models").body) == Listing(
        ("tiny",), frozenset({"tiny"}), {"tiny": frozenset()}, engine="llamacpp"
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_else_that_real_engines_say_is_a_list_of_models(engine: str) -> None:
    for page in pages(engine):
        if page.name != "models":
            with pytest.raises(PageError):
                read_listing(page.body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"data":[{"id":"a","max_model_len":[' + b"[]," * 300_000 + b"1]}]}",
        b'{"data":[{"id":"a","owned_by":[' + b"{}," * 300_000 + b"1]}]}",
        b'{"data":[' + b'{"id":"a"},' * 90_000 + b'{"id":"a"}]}',
    ],
)
def test_of_a_listing_nothing_is_built_that_is_of_no_use(body: bytes) -> None:
    """1 MiB took up to 145 ms."""
    tracemalloc.start()
    try:
        with contextlib.suppress(PageError):
            assert read_listing(body).ids == ("a",)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(body)
