"""What a balancer writes for its successor: read like a peer's message, and ignored if it is implausible."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from worlds import WORLD, law, regional, replica, request, swapped

from farhop.balance import machine
from farhop.balance.machine import Usage
from farhop.service.process.tasks import until
from farhop.store.state import StateDir
from regional_lb.mesh.feed import PeerFeed
from regional_lb.mesh.warm_restart import AGE_MAX_S, EVERY_S, NAME, RARELY_S, WarmRestart
from topology.law import Law
from topology.model import Residency, Rule

ELSEWHERE = Residency(processing=WORLD, hints=Rule(allow=("eu",)))  # computed in London; hashes of it may not be there


class Lone:
    """A balancer without a peer, as far as what it knows goes."""

    def __init__(
        self, folder: Path, wall_s: float | None = None, under: Law | None = None, piece_s: float = 0.0
    ) -> None:
        self.flow = regional(replica("a"), replica("b"), instance="r1", under=under)
        assert self.flow.replicas.shares is not None
        feed = PeerFeed(self.flow, self.flow.replicas.shares, 7, lambda: 1.0, lambda *_a, **_k: None)
        self.state_dir = StateDir(folder, "fleet", "regional.london.r1")
        self.refused: list[str] = []

        def now_s() -> float:
            return wall_s if wall_s is not None else self.state_dir.path(NAME).stat().st_mtime

        self.warm_restart = WarmRestart(
            self.state_dir,
            self.flow,
            feed,
            lambda event: self.flow.handle(event, 1.0),
            self.refused.append,
            now_s,
            partial(next, count(0.0, piece_s)),  # each reading is later by the work of a piece
        )

    def serve(self) -> None:
        made = request("1", 11_200, prefix="a conversation")
        sent = self.flow.handle(machine.RequestArrived(made), 1.0)
        (forward,) = [one for one in sent if isinstance(one, machine.Forward)]
        self.flow.handle(machine.AttemptBegan("1", 1, 200), 1.5)
        self.flow.handle(machine.AttemptEnded("1", 1, 200, Usage(2800, 77)), 3.5)
        self.replica = forward.target


async def test_a_restarted_balancer_begins_with_the_kept_state(tmp_path: Path) -> None:
    before, after = Lone(tmp_path), Lone(tmp_path)
    before.serve()
    await before.warm_restart.save()
    assert await after.warm_restart.restore() >= 1
    assert (after.refused, after.flow.replicas.trie.nodes) == ([], before.flow.replicas.trie.nodes)
    assert after.flow.replicas.trie.nodes > 0
    assert after.flow.replicas.estimates.learned() == before.flow.replicas.estimates.learned()
    for one in (before, after):
        one.flow.replicas.speeds.refresh(4.0)
    speed, was = after.flow.replicas.speeds[before.replica], before.flow.replicas.speeds[before.replica]
    assert speed.sampled_at is not None
    assert speed.tpot_ms == pytest.approx(was.tpot_ms, rel=0.2)
    assert after.flow.replicas.ledger.load(before.replica).in_flight == 0
    assert after.flow.replicas.shares is not None
    assert after.flow.replicas.shares.alone  # the peer that reported it is gone


@pytest.mark.parametrize(("piece_s", "pause_s"), [(0.001, EVERY_S), (0.2, 20.0), (5.0, RARELY_S)])
async def test_the_state_for_a_warm_restart_is_written_as_often_as_its_cost_allows(
    tmp_path: Path, piece_s: float, pause_s: float
) -> None:
    lone = Lone(tmp_path, piece_s=piece_s)
    lone.serve()  # one piece
    await lone.warm_restart.save()
    assert lone.warm_restart.pause_s == pytest.approx(pause_s)
    await lone.warm_restart.save()  # nothing is new
    assert lone.warm_restart.pause_s == pytest.approx(pause_s)


async def test_it_is_written_when_that_pause_is_over(tmp_path: Path) -> None:
    lone = Lone(tmp_path)
    lone.serve()
    lone.warm_restart.pause_s = 0.01
    keeping = asyncio.create_task(lone.warm_restart.keep())
    try:
        assert await until(lone.state_dir.path(NAME).exists, 5.0)
        assert lone.warm_restart.pause_s == EVERY_S
    finally:
        keeping.cancel()


async def test_hashes_that_the_law_keeps_out_of_the_region_are_not_written(tmp_path: Path) -> None:
    before, after = Lone(tmp_path, under=law(anyone=ELSEWHERE)), Lone(tmp_path)
    before.serve()
    await before.warm_restart.save()
    assert before.flow.replicas.trie.nodes > 0  # while it works
    assert await after.warm_restart.restore() >= 1
    assert (after.refused, after.flow.replicas.trie.nodes) == ([], 0)
    assert after.flow.replicas.estimates.learned() == before.flow.replicas.estimates.learned()


async def test_a_law_that_takes_hashes_away_takes_them_off_the_disk(tmp_path: Path) -> None:
    before, after = Lone(tmp_path), Lone(tmp_path)
    before.serve()
    await before.warm_restart.save()
    before.flow.handle(machine.LawChanged(law(2, anyone=ELSEWHERE)), 4.0)
    await before.warm_restart.save()
    assert await after.warm_restart.restore() >= 1
    assert after.flow.replicas.trie.nodes == 0


def _told(one: Lone, region: str) -> int:
    """How many nodes this region's global balancers are told of."""
    journal = one.flow.replicas.journal
    journal.listen()
    return sum(len(path.nodes) for paths in journal.snapshot(region, 1000) for path in paths)


def _elsewhere(before: Law) -> Law:
    """The same law on a map where Frankfurt is no longer in the EU."""
    regions = before.topology.regions
    moved = replace(regions["frankfurt"], jurisdictions=frozenset({"efta"}))
    return Law(replace(before.topology, regions={**regions, "frankfurt": moved}))


async def test_hashes_saved_under_another_map_of_the_epoch_are_sent_to_no_region(tmp_path: Path) -> None:
    under = law(anyone=Rule(allow=("uk", "eu")))
    before, again, after = (Lone(tmp_path, under=one) for one in (under, under, _elsewhere(under)))
    before.serve()
    await before.warm_restart.save()
    for one in (again, after):
        assert await one.warm_restart.restore() >= 1
        assert one.flow.replicas.trie.nodes == before.flow.replicas.trie.nodes > 0  # used here
    assert _told(again, "frankfurt") == _told(before, "frankfurt") > 0
    assert _told(after, "frankfurt") == 0


async def test_a_start_waits_until_the_models_bases_are_known_as_they_were(tmp_path: Path) -> None:
    rules = {"base": Rule(allow=("uk", "eu"))}
    before, after = (Lone(tmp_path, under=Law(replace(law().topology, models=rules))) for _ in range(2))
    based = swapped(replica("a", lineage={"llama": frozenset({"base"})}), replica("b"))
    before.flow.handle(based, 1.0)
    before.serve()
    await before.warm_restart.save()
    restoring = asyncio.create_task(after.warm_restart.restore())
    await asyncio.sleep(0.05)
    assert after.flow.replicas.trie.nodes == 0
    after.flow.handle(based, 1.0)
    assert await restoring >= 1
    assert _told(after, "frankfurt") == _told(before, "frankfurt") > 0


async def test_a_restored_state_does_not_overwrite_what_was_learned_meanwhile(tmp_path: Path) -> None:
    before, after = Lone(tmp_path), Lone(tmp_path)
    before.serve()
    await before.warm_restart.save()
    after.flow.replicas.estimates.learn("anyone", "llama", 8000, Usage(1000, 5))
    await after.warm_restart.restore()
    assert after.flow.replicas.estimates.output_tokens("anyone", "llama", None) == pytest.approx(5.0, rel=0.1)


@pytest.mark.parametrize("age_s", [AGE_MAX_S + 5.0, -3600.0])
async def test_a_kept_state_that_is_old_or_from_the_future_is_refused(tmp_path: Path, age_s: float) -> None:
    before = Lone(tmp_path)
    before.serve()
    await before.warm_restart.save()
    after = Lone(tmp_path, before.state_dir.path(NAME).stat().st_mtime + age_s)
    assert await after.warm_restart.restore() == 0
    assert after.flow.replicas.trie.nodes == 0


@pytest.mark.parametrize("document", [b"\0\0\0\x09short", b"\0\0\0\x04\xff\xff\xff\xff"])
async def test_a_kept_state_that_is_no_message_is_counted_and_changes_nothing(tmp_path: Path, document: bytes) -> None:
    lone = Lone(tmp_path)
    lone.state_dir.save(NAME, document)
    assert await lone.warm_restart.restore() == 0
    assert lone.refused == ["warm_restart_malformed"]


async def test_a_file_that_is_broken_is_counted(tmp_path: Path) -> None:
    lone = Lone(tmp_path)
    lone.state_dir.save(NAME, b"")
    lone.state_dir.path(NAME).write_bytes(b"not one of ours")
    assert await lone.warm_restart.restore() == 0
    assert lone.refused == ["warm_restart_broken"]
    await lone.warm_restart.save()
    assert await lone.warm_restart.restore() == 1
