"""Policies changed at work: by steps of a watch, and by a store while requests come."""

from __future__ import annotations

from random import Random

import pytest
from inprocess import HOP_KEY, Engine, both, chat, send, topology, until

from farhop.store.contract import Change, ChangeKind, Entry, pick_key
from farhop.store.memory import MemoryStore
from regional_lb.overrides import DOCUMENT_LIMIT_BYTES, Overrides
from regional_lb.policy import Choice, PoliciesChanged

KEY = pick_key("tokyo")
PREFIX = b'{"": "p2c", "llama": {"name": "prefix", "load_factor": 2}}'
READ = PoliciesChanged({"": Choice("p2c"), "llama": Choice("prefix", load_factor=2.0)})
NONE = PoliciesChanged({})


class Stage:
    """The watcher of policies, and what it told."""

    def __init__(self) -> None:
        self.told: list[PoliciesChanged] = []
        self.refused: list[str] = []
        self.overrides = Overrides(MemoryStore(Random(1)), "tokyo", self.told.append, self.refused.append)

    def tell(self, *changes: Change) -> list[PoliciesChanged]:
        """What these steps made it say."""
        self.told.clear()
        for change in changes:
            self.overrides.changed(change)
        return list(self.told)


def put(value: bytes, key: str = KEY) -> Change:
    return Change(ChangeKind.PUT, 2, key, value)


def snapshot(**values: bytes) -> Change:
    return Change(ChangeKind.SNAPSHOT, 1, entries=tuple(Entry(pick_key(r), v, 1) for r, v in values.items()))


DELETE = Change(ChangeKind.DELETE, 3, KEY)
LOST = Change(ChangeKind.LOST, why="gone")


def test_a_word_its_end_and_an_outage() -> None:
    stage = Stage()
    assert stage.tell(snapshot()) == []
    assert stage.tell(put(PREFIX), LOST, snapshot(tokyo=PREFIX)) == [READ]
    assert stage.tell(DELETE, DELETE) == [NONE]
    assert stage.tell(snapshot(tokyo=PREFIX), LOST, snapshot()) == [READ, NONE]
    assert stage.refused == []


def test_another_regions_word_is_not_ours() -> None:
    stage = Stage()
    assert stage.tell(snapshot(tokyo2=PREFIX), put(PREFIX, pick_key("tokyo2"))) == []
    stage.tell(put(PREFIX))
    assert stage.tell(Change(ChangeKind.DELETE, 3, pick_key("tokyo2"))) == []


@pytest.mark.parametrize(
    "document",
    [
        b"p2c", b"[]", b'"p2c"', b'{"": "fastest"}', b'{"llama": {"name": "p2c", "load_factor": 2}}', b"\xff",
        b'{"a b": "p2c"}', b'{"": {"name": "prefix", "load_factor": NaN}}', b"[" * 10_000,
        b" " * DOCUMENT_LIMIT_BYTES + b"{}",
    ],
)  # fmt: skip
def test_what_is_absurd_changes_nothing_and_is_counted(document: bytes) -> None:
    stage = Stage()
    stage.tell(put(PREFIX))
    assert stage.tell(put(document)) == []
    assert stage.refused == ["policies_malformed"]
    assert stage.tell(put(PREFIX), DELETE) == [NONE]  # the last good was in force


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
        await until(lambda: flow.policies.told() == {"": "round-robin"})
        assert await decided_by() == "round-robin"
        assert up.regional.desk.status()["policies"] == {"": "round-robin"}
        await up.regional.store.delete(key)
        await until(lambda: flow.policies.told() == {"": "predictive"})
        assert await decided_by() == "predictive"
        await up.at_rest()
