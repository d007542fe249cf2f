"""Worlds drawn at random: by number the same for ever, and of every kind."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec
import pytest

from farhop_lab.scenarios.load import built
from farhop_lab.studies import bound, random_worlds
from farhop_lab.studies.special_kinds import KINDS
from farhop_lab.workloads.load import TraceError

if TYPE_CHECKING:
    from pathlib import Path


def test_a_random_world_is_determined_by_its_number() -> None:
    first, again, other = (random_worlds.drawn(n, 1, 5.0) for n in (6, 6, 24))
    assert first.scenario.document() == again.scenario.document()
    assert first.factor == again.factor
    assert first.scenario.document() != other.scenario.document()
    assert first.kind == other.kind
    assert 0.3 <= first.load <= 1.1
    assert first.factor > 0.0


@pytest.mark.parametrize(
    ("number", "digest"),
    [(0, "4230b47887295a91"), (3, "53237d964b48ba5f")],
)
def test_a_worlds_number_means_the_same_in_every_version(number: int, digest: str) -> None:
    """Of what the document says; fields that it leaves to their defaults may come to the schema."""
    world = random_worlds.drawn(number, 1, 8.0)
    document = world.scenario.doc.model_dump(mode="json", exclude_defaults=True)
    what = msgspec.json.encode([document, world.load, world.factor], order="deterministic")
    assert sha256(what).hexdigest().startswith(digest)


def test_special_worlds_are_of_each_kind_in_turn_and_of_another_family() -> None:
    names = list(KINDS)
    first, again, other = (random_worlds.special(number, 1, 5.0) for number in (12, 12, 12 + len(names)))
    assert (first.kind, other.kind) == (names[12], names[12])
    assert first.scenario.document() == again.scenario.document()
    assert first.factor == again.factor
    assert first.scenario.document() != other.scenario.document()
    assert first.scenario.doc.name == "special-1-12"  # results of both families may be in one folder
    assert 0.3 <= first.load <= 1.1


def test_load_of_bursts_is_of_the_time_in_which_they_come() -> None:
    """After a pause of a minute all of it comes within seconds, and is as much as the fleet can do in these."""
    world = random_worlds.special(list(KINDS).index("after-a-pause"), 1, 5.0)
    (work,) = world.scenario.doc.work
    assert work.bursts is not None
    whole_s, burst_s = world.scenario.doc.duration_s, 2 * work.bursts.for_s
    asked = bound.demands(world.scenario, 1, world.factor)
    share = 1.0 / bound.share_max(asked, bound.fleet_of(world.scenario), burst_s)
    assert share == pytest.approx(world.load, rel=0.35)  # few and random requests
    assert whole_s > 4 * burst_s


def test_worlds_have_confined_tenants_and_balancers_that_restart() -> None:
    world = random_worlds.drawn(51, 1, 5.0)
    document = world.scenario.doc
    assert {work.tenant: set(work.per_s) for work in document.work[1:]} == {
        "eu-only": {"frankfurt"},
        "japan-only": {"tokyo"},
    }
    in_the_middle_s = random_worlds.WARM_UP_S + 2.5
    assert [(fault.what, fault.at_s) for fault in document.faults] == [("restart-regional", in_the_middle_s)]


def test_worlds_are_drawn_from_the_traces_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no trace in it; give a folder"):
        random_worlds.traces(tmp_path)
    rows = (f"2023-11-16 18:15:{second:02}.0,{300 + second},{20 + second}" for second in range(60))
    (tmp_path / "azure_minute.csv").write_text("\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *rows)))
    (trace,) = random_worlds.traces(tmp_path)
    assert (trace.kind, trace.seconds) == ("azure", 59.0)
    kinds = len(random_worlds.KINDS)
    world = random_worlds.drawn(kinds, 1, 5.0, [trace])
    assert world.kind == "azure_minute"
    assert world.scenario.doc.work[0].since_s <= 0.8 * 59.0
    assert random_worlds.drawn(kinds + 5, 1, 5.0, [trace]).kind == random_worlds.KINDS[4]


def test_a_world_of_the_lightest_work_is_a_scenario_that_can_be_run() -> None:
    scenario = random_worlds.drawn(6, 1, 5.0).scenario.but(loads=[random_worlds.FACTOR_MAX])
    assert built(scenario.document(), scenario.folder).doc.loads == [random_worlds.FACTOR_MAX]
