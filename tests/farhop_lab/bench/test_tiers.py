from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from farhop_lab.bench import bodies, tiers
from farhop_lab.bench.harness import HOST, answers, engines, open_files
from farhop_lab.world.etcd import EtcdLabError
from topology import load as topologies
from topology.law import Law, Scope


def test_the_world_is_sound_and_its_law_leaves_all_twelve(tmp_path: Path) -> None:
    file = tmp_path / "topology.yaml"
    file.write_text(yaml.safe_dump(tiers.topology()))
    world = topologies.load(file)
    assert tuple(world.regions) == tiers.REGIONS
    assert Law(world).verdict("bench", bodies.MODEL, Scope.PROCESSING).lawful == frozenset(tiers.REGIONS)


def test_farhop_tiers_are_left_out_without_etcd(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise EtcdLabError("no etcd binary: install one on PATH")

    assert tiers.OURS[0].missing() is None
    monkeypatch.setattr(tiers, "find_binary", nowhere)
    assert tiers.OURS[0].missing() == "no etcd binary: install one on PATH"


@pytest.mark.long
async def test_two_instances_share_a_port(tmp_path: Path) -> None:
    async with engines(tmp_path, open_files(), None) as environment, tiers.two_regional(environment) as running:
        assert len(set(running.pids)) == len(set(running.admins)) == 2
        assert all([await answers(HOST, running.port) for _ in range(8)])
