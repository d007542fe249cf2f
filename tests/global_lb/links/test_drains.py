"""Operators' drains at the global tier: by steps of a watch, and from a real etcd."""

import asyncio
from datetime import UTC, datetime
from random import Random

import pytest

from farhop.store.contract import Change, ChangeKind, KeyValue, override_key
from farhop.store.documents.overrides import DrainOverride, encode
from farhop.store.etcd import EtcdStore
from farhop.store.etcd_settings import EtcdSettings
from farhop_lab.world.etcd import EmbeddedEtcd
from global_lb.fleet.view import RegionForced
from global_lb.links.drains import Drains

AT = datetime(2026, 5, 1, tzinfo=UTC)


def word(region="tokyo", **fields) -> bytes:
    given = {"why": "new racks", "author": "ann", "at": AT, "for_s": 60.0, "over_s": 10.0}
    return encode(DrainOverride(region=region, **{**given, **fields}))


def put(region, value) -> Change:
    return Change(ChangeKind.PUT, 2, override_key(region), value)


def snapshot(**values) -> Change:
    return Change(ChangeKind.SNAPSHOT, 1, entries=tuple(KeyValue(override_key(r), v, 1) for r, v in values.items()))


DELETE = Change(ChangeKind.DELETE, 3, override_key("tokyo"))
LOST = Change(ChangeKind.LOST, why="gone")


class Stage:
    """The watcher of overrides, what it told, and its clock."""

    def __init__(self, store=None) -> None:
        self.now = 1000.0
        self.events: list[RegionForced] = []
        self.refused: list[str] = []
        regions = ("tokyo", "london")
        self.overrides = Drains(store, regions, self.events.append, self.refused.append, lambda: self.now)

    def apply(self, *changes: Change) -> list[RegionForced]:
        """What these steps made it say."""
        self.events.clear()
        for change in changes:
            self.overrides.changed(change)
        return list(self.events)


def drained(over_s=10.0, until=1060.0, why="new racks (by ann)") -> RegionForced:
    return RegionForced("tokyo", True, why, until, over_s)


LIFTED = RegionForced("tokyo", False)


@pytest.fixture
def stage() -> Stage:
    stage = Stage()
    stage.apply(snapshot())
    return stage


def test_a_drain_lasts_until_its_own_end_at_its_own_pace(stage):
    assert stage.apply(put("tokyo", word())) == [drained()]
    assert stage.apply(DELETE) == [LIFTED]
    assert stage.apply(DELETE) == []


def test_drain_event_has_moves_if_streams_are_to_move(stage):
    (found,) = stage.apply(put("tokyo", word(move_streams=True)))
    assert found.moves


def test_a_balancer_that_has_only_begun_keeps_no_pace():
    stage = Stage()
    assert stage.apply(snapshot(tokyo=word())) == [drained(over_s=0.0)]


def test_a_balancer_that_started_in_an_outage_applies_the_drain_at_its_pace():
    stage = Stage()
    assert stage.apply(LOST, snapshot(tokyo=word())) == [drained(over_s=10.0)]


def test_the_same_drain_listed_again_changes_nothing_and_its_end_stays(stage):
    stage.apply(put("tokyo", word()))
    stage.now = 1030.0
    assert stage.apply(LOST, snapshot(tokyo=word())) == []
    assert stage.overrides.status("tokyo")["left_s"] == 30.0


def test_another_drain_replaces_it(stage):
    stage.apply(put("tokyo", word()))
    stage.now = 1030.0
    assert stage.apply(put("tokyo", word(why="longer", for_s=100.0))) == [drained(why="longer (by ann)", until=1130.0)]


def test_a_snapshot_without_it_lifts_it_and_a_loss_does_not(stage):
    stage.apply(put("tokyo", word()))
    assert stage.apply(LOST) == []
    assert stage.apply(snapshot(london=word("london"))) == [
        LIFTED, RegionForced("london", True, "new racks (by ann)", 1060.0, 10.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (put("tokyo", b"drain it!"), "override_malformed"),
        (put("tokyo", word("london")), "override_misplaced"),
        (put("atlantis", word("atlantis")), "override_of_unknown_region"),
        (Change(ChangeKind.PUT, 2, "/farhop/v1/override/tokyo/x", word()), "override_misplaced"),
    ],
)
def test_a_refused_document_is_counted_and_the_last_valid_drain_stays(stage, change, reason):
    stage.apply(put("tokyo", word()))
    assert stage.apply(change) == []
    assert stage.refused == [reason]
    assert stage.overrides.status("tokyo") is not None
    assert stage.overrides.status("atlantis") is None


def test_drains_in_force_are_shown_to_operators(stage):
    stage.apply(put("tokyo", word()))
    stage.now = 1015.0
    assert stage.overrides.status("tokyo") == {
        "action": "drain", "why": "new racks", "author": "ann", "until": "2026-05-01T00:01:00+00:00", "left_s": 45.0,
    }  # fmt: skip
    stage.now = 1060.0
    assert stage.overrides.status("tokyo") is None


async def test_from_a_real_etcd_set_changed_expired_and_deleted():
    async with EmbeddedEtcd() as etcd:
        store = EtcdStore(EtcdSettings((etcd.endpoint,)), Random(1))
        await store.open()
        stage = Stage(store)
        task = asyncio.create_task(stage.overrides.follow())

        async def until_events(count: int) -> None:
            async with asyncio.timeout(60.0):
                while len(stage.events) < count:
                    await asyncio.sleep(0.01)

        try:
            key = override_key("tokyo")
            await store.put(key, word(), ttl_s=60.0)
            await until_events(1)
            await store.put(key, word(why="sooner"), ttl_s=1.0)
            await until_events(2)
            await until_events(3)  # by the lease's expiry, without any action
            await store.put(key, word(), ttl_s=60.0)
            await until_events(4)
            await store.delete(key)
            await until_events(5)
        finally:
            await store.close()
            await asyncio.wait_for(task, 60.0)
    assert [event.drain for event in stage.events] == [True, True, False, True, False]
    assert stage.refused == []
