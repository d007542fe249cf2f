"""Policies and splits changed at work: by steps of a watch, and by a store while requests come."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from random import Random

import pytest
from inprocess import HOP_KEY, Engine, both, chat, send, topology, until

from farhop.balance.machine import Event
from farhop.store.contract import Change, ChangeKind, KeyValue, pick_key, split_key
from farhop.store.documents.authored import DOCUMENT_LIMIT_BYTES, Authorship, with_author
from farhop_lab.memory_store import MemoryStore
from regional_lb.app import overrides
from regional_lb.scheduler.policy import PoliciesChanged, PolicyConfig
from regional_lb.scheduler.split import RuleConfig, SplitConfig, SplitsChanged

AT = datetime(2026, 11, 21, tzinfo=UTC)


class Kind:
    """One of the two documents: where it stands, a good one, and what it says."""

    def __init__(self, name: str, key_of: Callable[[str], str], document: bytes, read: Event, none: Event) -> None:
        self.name, self.key_of, self.document, self.read, self.none = name, key_of, document, read, none
        self.key = key_of("tokyo")


POLICIES = Kind(
    "policies", pick_key, b'{"": "p2c", "llama": {"name": "prefix", "load_factor": 2}}',
    PoliciesChanged({"": PolicyConfig(name="p2c"), "llama": PolicyConfig(name="prefix", load_factor=2.0)}),
    PoliciesChanged({}),
)  # fmt: skip
SPLITS = Kind(
    "splits", split_key, b'{"llama": {"weights": {"v1": 9, "v2": 1}, "rules": [{"tenant": "acme", "version": "v2"}]}}',
    SplitsChanged({"llama": SplitConfig(weights={"v1": 9, "v2": 1}, rules=[RuleConfig(version="v2", tenant="acme")])}),
    SplitsChanged({}),
)  # fmt: skip
both_kinds = pytest.mark.parametrize("kind", [POLICIES, SPLITS], ids=lambda kind: kind.name)


class Stage:
    """The watcher of one document, and what it told."""

    def __init__(self, kind: Kind) -> None:
        self.events: list[Event] = []
        self.refused: list[str] = []
        make = getattr(overrides, kind.name)
        self.overrides = make(MemoryStore(Random(1)), "tokyo", self.events.append, self.refused.append)

    def apply(self, *changes: Change) -> list[Event]:
        """What these steps made it say."""
        self.events.clear()
        for change in changes:
            self.overrides.changed(change)
        return list(self.events)


def put(value: bytes, key: str) -> Change:
    return Change(ChangeKind.PUT, 2, key, value)


def snapshot(kind: Kind, **values: bytes) -> Change:
    return Change(ChangeKind.SNAPSHOT, 1, entries=tuple(KeyValue(kind.key_of(r), v, 1) for r, v in values.items()))


LOST = Change(ChangeKind.LOST, why="gone")


@both_kinds
def test_an_override_its_end_and_an_outage(kind: Kind) -> None:
    stage, delete, word = Stage(kind), Change(ChangeKind.DELETE, 3, kind.key), kind.document
    assert stage.apply(snapshot(kind)) == []
    assert stage.apply(put(word, kind.key), LOST, snapshot(kind, tokyo=word)) == [kind.read]
    assert stage.apply(delete, delete) == [kind.none]
    assert stage.apply(snapshot(kind, tokyo=word), LOST, snapshot(kind)) == [kind.read, kind.none]
    assert stage.refused == []


@both_kinds
def test_override_of_another_region_is_ignored(kind: Kind) -> None:
    stage = Stage(kind)
    elsewhere = kind.key_of("tokyo2")
    assert stage.apply(snapshot(kind, tokyo2=kind.document), put(kind.document, elsewhere)) == []
    stage.apply(put(kind.document, kind.key))
    assert stage.apply(Change(ChangeKind.DELETE, 3, elsewhere)) == []


@both_kinds
def test_a_signed_override_has_the_same_effect_and_names_its_signer(kind: Kind) -> None:
    stage, bare = Stage(kind), kind.document
    word = b'{"models": %b, "author": "ann", "why": "try", "at": "2026-11-21T00:00:00Z"}' % bare
    assert stage.overrides.status() is None
    assert stage.apply(put(word, kind.key)) == [kind.read]
    assert stage.overrides.status() == {"author": "ann", "why": "try", "at": AT.isoformat()}
    stage.apply(put(word.replace(b'"ann"', b'""'), kind.key))
    assert (stage.overrides.status() or {}).get("author") == "ann"
    stage.apply(put(bare, kind.key))
    assert stage.overrides.status() is None
    assert stage.apply(put(with_author({}, Authorship("ann", "none", AT)), kind.key)) == [kind.none]
    assert stage.refused == [f"{kind.name}_malformed"]


ABSURD = [
    b"p2c", b"[]", b'"p2c"', b"\xff", b"[" * 10_000, b" " * DOCUMENT_LIMIT_BYTES + b"{}", b'{"a b": {}}',
    b'{"llama": {"nonsense": 1}}', b'{"llama": 1}',
]  # fmt: skip
ABSURD_POLICIES = [
    b'{"": "fastest"}', b'{"llama": {"name": "p2c", "load_factor": 2}}',
    b'{"": {"name": "prefix", "load_factor": NaN}}',
]  # fmt: skip
ABSURD_SPLITS = [
    b'{"": {"weights": {"v1": 1}}}', b'{"llama": {"weights": {"v1": 0}}}', b'{"llama": {"weights": {"v1": NaN}}}',
    b'{"llama": {"weights": {"v1": 1}}, "qwen": {"rules": [{"version": "v1"}]}}',
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "document"),
    [(kind, word) for kind, more in ((POLICIES, ABSURD_POLICIES), (SPLITS, ABSURD_SPLITS)) for word in ABSURD + more],
)
def test_refused_documents_change_nothing_and_are_counted(kind: Kind, document: bytes) -> None:
    stage, good = Stage(kind), put(kind.document, kind.key)
    stage.apply(good)
    assert stage.apply(put(document, kind.key)) == []
    assert stage.refused == [f"{kind.name}_malformed"]
    assert stage.apply(good, Change(ChangeKind.DELETE, 3, kind.key)) == [kind.none]  # the last good one was in force


async def test_a_balancer_changes_its_policy_without_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)

    async def decided_by() -> str:
        answer = await send(up.client, chat())
        record = up.regional.decisions.get(answer.headers["x-farhop-decision"])
        assert record is not None
        return str(record["reasons"]["policy"])

    async with Engine().running() as engine, both(engine, topology()) as up:
        flow, key = up.regional.flow, pick_key(up.regional.config.region)
        assert await decided_by() == "predictive"
        await up.regional.store.put(key, b'{"": "round-robin"}')
        await until(lambda: flow.policies.status() == {"": "round-robin"})
        assert await decided_by() == "round-robin"
        assert up.regional.tier_admin.status()["policies"] == {"": "round-robin"}
        await up.regional.store.delete(key)
        await until(lambda: flow.policies.status() == {"": "predictive"})
        assert await decided_by() == "predictive"
        await up.at_rest()
