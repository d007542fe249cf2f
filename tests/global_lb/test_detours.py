"""Ways round: the arithmetic, what is not believed, and two balancers that tell one another."""

from __future__ import annotations

import asyncio
from functools import partial
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inprocess import HOP_KEY, global_config, topology, until
from regions import told as report

from farhop.store.contract import WIRE_PREFIX, Change, ChangeKind, Entry, report_key, wire_key
from farhop.store.memory import MemoryCluster, MemoryStore
from farhop.store.report import encode as encode_report
from global_lb import detours
from global_lb.detours import (
    DOCUMENT_LIMIT_BYTES,
    GAP_S,
    MARGIN_MS,
    MARGIN_SHARE,
    OTHERS_MAX,
    REGIONS_MAX,
    Detours,
    Way,
    Wires,
    decode,
    encode,
    moved,
    ways,
)
from global_lb.main import GlobalBalancer

HERE = "london"
KEY = wire_key("tokyo", "g1")
TOKYO = Wires("tokyo/g1", "tokyo", {"sydney": 100.0, "tokyo": 1.0, "london": 150.0})
DIRECT = {"london": 1.0, "tokyo": 150.0, "sydney": 300.0}

regions = st.sampled_from("abcde")
figures = st.dictionaries(regions, st.one_of(st.floats(0.0, 400.0), st.integers(0, 40).map(float)), max_size=5)
everyone = st.lists(st.tuples(regions, figures), max_size=8).map(
    lambda those: [Wires(f"{region}/g{n}", region, rtt_ms) for n, (region, rtt_ms) in enumerate(those)]
)


@given(figures, everyone, regions)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_a_way_is_the_best_there_is_and_told_only_where_it_saves_the_margin(
    direct: dict[str, float], others: list[Wires], here: str
) -> None:
    found = ways(direct, others, here)
    for region, wire_ms in direct.items():
        sums = [
            direct[o.region] + o.rtt_ms[region]
            for o in others
            if o.region not in (here, region) and o.region in direct and region in o.rtt_ms and region != here
        ]
        limit_ms = wire_ms - max(MARGIN_SHARE * wire_ms, MARGIN_MS)
        if region not in found:
            assert all(way_ms > limit_ms for way_ms in sums)
            continue
        way = found[region]
        assert way.region not in (here, region)
        assert way.rtt_ms == min(sums)
        assert way.rtt_ms <= wire_ms * (1.0 - MARGIN_SHARE) + 1e-9
        assert way.rtt_ms <= wire_ms - MARGIN_MS + 1e-9
    assert found.keys() <= direct.keys() - {here}


def test_a_way_round_and_who_is_named_of_equals() -> None:
    twin = Wires("tokyo/g0", "tokyo", TOKYO.rtt_ms)
    assert ways(DIRECT, [TOKYO], HERE) == {"sydney": Way("tokyo/g1", "tokyo", 250.0)}
    assert ways(DIRECT, [TOKYO, twin], HERE) == {"sydney": Way("tokyo/g0", "tokyo", 250.0)}
    assert ways({**DIRECT, "sydney": 270.0}, [TOKYO], HERE) == {}, "20 ms are less than a tenth"
    assert ways({"tokyo": 1.0, "sydney": 14.0}, [Wires("tokyo/g1", "tokyo", {"sydney": 9.0})], HERE) == {}


def test_a_document_is_read_as_it_was_written() -> None:
    assert decode(KEY, encode(TOKYO)) == TOKYO


def test_where_not_all_regions_go_in_the_nearest_do() -> None:
    many = {f"{n:04d}{'x' * 59}": 60_000.0 - n for n in range(REGIONS_MAX + 10)}
    document = encode(Wires("tokyo/g1", "tokyo", many))
    assert len(document) <= DOCUMENT_LIMIT_BYTES
    kept = decode(KEY, document).rtt_ms
    assert len(kept) > REGIONS_MAX // 2
    assert max(kept.values()) < min(ms for region, ms in many.items() if region not in kept)


def document(rtt_ms: str = "{}", balancer: str = '"tokyo/g1"', region: str = '"tokyo"') -> bytes:
    return f'{{"balancer": {balancer}, "region": {region}, "rtt_ms": {rtt_ms}}}'.encode()


MALFORMED = {
    "no JSON": b"wire",
    "empty": b"",
    "not UTF-8": b"\xff",
    "no fields": b"{}",
    "a list": b"[]",
    "below 0": document('{"a": -1}'),
    "beyond a minute": document('{"a": 60000.1}'),
    "beyond a float": document('{"a": 1e999}'),
    "no number": document('{"a": NaN}'),
    "text": document('{"a": "5"}'),
    "null": document('{"a": null}'),
    "a region without a name": document('{"": 1}'),
    "a name too long": document(f'{{"{"a" * 257}": 1}}'),
    "too many regions": msgspec.json.encode(Wires("tokyo/g1", "tokyo", {str(n): 1.0 for n in range(REGIONS_MAX + 1)})),
    "too long": document() + b" " * DOCUMENT_LIMIT_BYTES,
    "too deep": document("[" * 10_000),
    "too deep where nobody looks": b'{"more": ' + b"[" * 60_000,
    "text that is not UTF-8": b'{"balancer": "\xff", "region": "tokyo", "rtt_ms": {}}',
    "another balancer's": document(balancer='"tokyo/g2"'),
    "another region's": document(region='"london"'),
}


class Stage:
    """One balancer's view of the others."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        self.detours = Detours(
            MemoryStore(Random(1)), HERE, "g1", lambda: DIRECT, self.refused.append, lambda: 0.0
        )  # fmt: skip

    def told(self, *changes: Change) -> dict[str, object]:
        for change in changes:
            self.detours.changed(change)
        return dict(self.detours.told())


def put(value: bytes, key: str = KEY) -> Change:
    return Change(ChangeKind.PUT, 2, key, value)


def snapshot(entries: dict[str, bytes]) -> Change:
    return Change(ChangeKind.SNAPSHOT, 1, entries=tuple(Entry(key, value, 1) for key, value in entries.items()))


WAY = {"sydney": {"balancer": "tokyo/g1", "region": "tokyo", "rtt_ms": 250.0}}


@pytest.mark.parametrize("value", MALFORMED.values(), ids=MALFORMED)
def test_what_is_malformed_is_counted_and_passed_over(value: bytes) -> None:
    stage = Stage()
    assert stage.told(put(value)) == {}
    assert stage.refused == ["wire_malformed"]
    assert stage.told(put(encode(TOKYO)), put(value)) == WAY, "the last good stands"
    assert len(stage.refused) == 2


def test_who_is_gone_is_forgotten_and_an_outage_changes_nothing() -> None:
    stage = Stage()
    assert stage.told(snapshot({KEY: encode(TOKYO)})) == WAY
    assert stage.told(Change(ChangeKind.LOST, why="gone")) == WAY
    assert stage.told(Change(ChangeKind.DELETE, 3, KEY)) == {}
    assert stage.told(put(encode(TOKYO))) == WAY
    assert stage.told(snapshot({})) == {}
    assert stage.refused == []


def test_more_balancers_than_are_held_are_counted_and_ours_is_none_of_them() -> None:
    stage = Stage()
    stage.told(put(b"ours, whatever it says", wire_key(HERE, "g1")))
    assert stage.refused == []
    for n in range(OTHERS_MAX):
        stage.told(put(encode(Wires(f"mars/{n}", "mars", {})), wire_key("mars", str(n))))
    assert stage.told(put(encode(TOKYO))) == {}
    assert stage.refused == ["too_many_wires"]
    stage.told(put(encode(Wires("mars/0", "mars", {"a": 1.0})), wire_key("mars", "0")))
    assert stage.refused == ["too_many_wires"], "who is held may say more"
    assert stage.told(Change(ChangeKind.DELETE, 3, wire_key("mars", "0")), put(encode(TOKYO))) == WAY


def test_what_is_worth_saying_at_once() -> None:
    assert not moved({"a": 100.0, "b": 1.0}, {"a": 119.0, "b": 1.9})
    assert moved({"a": 100.0}, {"a": 120.0})
    assert moved({"a": 100.0}, {"a": 80.0})
    assert moved({}, {"a": 1.0})


async def test_small_moves_are_said_after_the_gap_and_great_ones_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detours, "LOOK_S", 0.005)
    now, looks, measured = 0.0, 0, {"a": 100.0}
    store = MemoryStore(Random(1))
    await store.open()

    def clock() -> float:
        nonlocal looks
        looks += 1
        return now

    async def stands() -> float:
        """After it has looked twice more, so that what the first look led to is done."""
        until_look = looks + 3
        await until(lambda: looks >= until_look)
        entry = await store.get(wire_key(HERE, "g1"))
        assert entry is not None
        return decode(entry.key, entry.value).rtt_ms["a"]

    task = asyncio.create_task(Detours(store, HERE, "g1", lambda: measured, print, clock).publish())
    try:
        assert await stands() == 100.0
        measured["a"] = 105.0
        assert await stands() == 100.0
        now = GAP_S
        assert await stands() == 105.0
        measured["a"] = 200.04
        assert await stands() == 200.0
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await store.close()


def pinged(balancer: GlobalBalancer) -> None:
    """Its pings told it so."""
    figures = {"virginia": {"tokyo": 40.0, "frankfurt": 200.0}, "tokyo": {"virginia": 40.0, "frankfurt": 50.0}}
    now = balancer.clock.now()
    for region, ms in figures[balancer.config.region].items():
        assert balancer.watcher.distances.pinged((region, "r1"), 1, 0.0, now - ms / 1e3, now)


async def test_two_balancers_tell_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    cluster, plaintext = MemoryCluster(), partial(global_config, tier_insecure=True)
    here, there = (
        GlobalBalancer(plaintext(region), topology(), Random(n), MemoryStore(Random(n), cluster))
        for n, region in enumerate(("virginia", "tokyo"))
    )

    def via(balancer: GlobalBalancer) -> object:
        listed = {one["region"]: one["via"] for one in balancer.desk.status()["regions"]}
        return listed.get("frankfurt", "not listed")

    try:
        pinged(here)
        pinged(there)
        await here.open()
        await here.store.put(report_key("frankfurt", "r1"), encode_report(report("frankfurt")))
        await until(lambda: via(here) is None)
        await there.open()
        await until(lambda: via(here) == {"balancer": "tokyo/g1", "region": "tokyo", "rtt_ms": pytest.approx(90.0)})
        await until(lambda: via(there) is None)
        keys = [entry.key for entry in await here.store.list(WIRE_PREFIX)]
        assert keys == [wire_key("tokyo", "g1"), wire_key("virginia", "g1")]
        await there.close()
        await until(lambda: via(here) is None)
    finally:
        await here.close()
        await there.close()
