"""Acts: shown first, confirmed by name, written only against what was shown."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from random import Random
from typing import Any

import msgspec
import pytest

from farhop.service.admin.console.acts import UNKNOWN_THERE, Act, ActError, Acts
from farhop.store.contract import DRILL_PREFIX, LAW_KEY, law_history_key, override_key, split_key
from farhop.store.documents import authored
from farhop.store.documents.overrides import bias_key, decode_drain
from farhop_lab.memory_store import MemoryStore
from topology import law_document
from topology.law import Law
from topology.load import load, shipped

LAW = Law(load(shipped("three-regions")))
AT = datetime(2027, 1, 15, tzinfo=UTC)


def _serving(*regions: str) -> dict[str, Any]:
    offer = {"models": {"m": {"replicas_ready": 1}}}
    return {"regions": [{"region": name, "state": "up", "instances": [offer], "in_flight": 2} for name in regions]}


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(Random(1))


def acts_of(store: MemoryStore, *statuses: dict[str, Any]) -> Acts:
    async def read_statuses() -> tuple[dict[str, Any], ...]:
        return statuses

    return Acts(store, lambda: LAW, read_statuses, lambda: AT)


ALL = _serving("virginia", "frankfurt", "tokyo")
VIRGINIA = {"do": "drain", "target": "virginia", "why": "patching"}


async def test_a_dry_run_writes_nothing_and_what_it_showed_is_written(store: MemoryStore) -> None:
    acts = acts_of(store, ALL)
    found = await acts.perform(Act(**VIRGINIA, over_s=30.0), "ann")
    assert (found["revision"], found["stands"], found["strands"]) == (0, None, [])
    assert any(line.startswith("moves: m of anywhere") for line in found["effects"])
    assert await store.get(override_key("virginia")) is None
    await acts.perform(Act(**VIRGINIA, over_s=30.0, dry_run=False, revision=0, confirm="virginia"), "ann")
    entry = await store.get(override_key("virginia"))
    assert entry is not None
    drain = decode_drain(entry.value)
    assert (drain.author, drain.why, drain.over_s, drain.at) == ("ann", "patching", 30.0, AT)
    back = {"do": "undrain", "target": "virginia", "why": "patched"}
    found = await acts.perform(Act(**back), "bob")
    assert found["stands"]["author"] == "ann"
    await acts.perform(Act(**back, dry_run=False, revision=found["revision"], confirm="virginia"), "bob")
    assert await store.get(override_key("virginia")) is None


async def test_an_act_does_not_overwrite_what_changed_since_it_was_shown(store: MemoryStore) -> None:
    acts = acts_of(store, ALL)
    await store.put(override_key("virginia"), b"{}")
    with pytest.raises(ActError, match="somebody else changed it") as caught:
        await acts.perform(Act(**VIRGINIA, dry_run=False, revision=0, confirm="virginia"), "ann")
    assert caught.value.status == 409


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"confirm": "virgina"}, "confirm: repeat the name"),
        ({"confirm": "virginia", "revision": -1}, "revision: give the revision"),
        ({"confirm": "virginia", "why": " "}, "why: give the reason"),
        ({"confirm": "virginia", "for_s": 1e9}, "for_s"),
        ({"confirm": "atlantis", "target": "atlantis"}, "no region 'atlantis'"),
        ({"confirm": "virginia", "do": "undrain"}, "no drain is set"),
    ],
)
async def test_refused_act_has_a_reason(store: MemoryStore, more: dict[str, Any], message: str) -> None:
    asked = {**VIRGINIA, "dry_run": False, "revision": 0, **more}
    with pytest.raises(ActError, match=message):
        await acts_of(store, ALL).perform(Act(**asked), "ann")
    assert await store.list("/") == ()


async def test_the_last_region_of_a_tenant_is_drained_only_by_force(store: MemoryStore) -> None:
    acts, frankfurt = acts_of(store, ALL), {"do": "drain", "target": "frankfurt", "why": "patching"}
    assert (await acts.perform(Act(**frankfurt), "ann"))["strands"] == ["eu-only (m)"]
    sure: dict[str, Any] = {**frankfurt, "dry_run": False, "revision": 0, "confirm": "frankfurt"}
    with pytest.raises(ActError, match="last region serving eu-only"):
        await acts.perform(Act(**sure), "ann")
    with pytest.raises(ActError, match="no global balancer answers"):
        await acts_of(store).perform(Act(**sure, force=True), "ann")
    await acts.perform(Act(**sure, force=True), "ann")


async def test_laws_lists_author_reason_and_effect_of_each_law(store: MemoryStore) -> None:
    document = law_document.document_of(LAW.topology)
    for epoch, why, key in ((1, "begun", law_history_key(1)), (2, "eu-only may go to tokyo", LAW_KEY)):
        law = {name: document[name] for name in ("models", "tenants")}
        if epoch == 2:
            (confined,) = (one for one in law["tenants"] if one["name"] == "eu-only")
            confined["residency"]["processing"] = {"allow": ["eu", "jp"]}
        await store.put(key, law_document.encode(law, epoch, "ann", why, "2027-01-15T00:00:00Z"))
    newest, oldest = (await acts_of(store, ALL).laws())["laws"]
    assert (newest["epoch"], newest["author"], newest["why"]) == (2, "ann", "eu-only may go to tokyo")
    assert newest["moved"] == ["eu-only: processing gains tokyo"]
    assert "moved" not in oldest
    await store.put(LAW_KEY, b"no law")
    assert len((await acts_of(store, ALL).laws())["laws"]) == 2


async def test_a_bias_and_a_drill_that_is_stopped(store: MemoryStore) -> None:
    acts = acts_of(store, ALL)
    bias = {
        "do": "bias",
        "target": "tokyo",
        "why": "dear",
        "ms": 40.0,
        "dry_run": False,
        "revision": 0,
        "confirm": "tokyo",
    }
    await acts.perform(Act(**bias), "ann")
    assert await store.get(bias_key("tokyo")) is not None
    stop = {"do": "stop-drill", "target": "run-1", "why": "enough", "dry_run": False, "revision": 0, "confirm": "run-1"}
    await acts.perform(Act(**stop), "ann")
    assert await store.get(f"{DRILL_PREFIX}stop/run-1") is not None
    assert (await acts.drills()) == {"running": None, "lever": None, "planned": [], "history": []}


async def test_a_split_changes_the_weights_of_one_model_and_is_taken_back(store: MemoryStore) -> None:
    replicas = [{"models": ["m"], "version": version} for version in ("v1", "v2")]

    async def statuses() -> tuple[dict[str, Any], ...]:
        return (ALL,)

    async def status_of(region: str) -> dict[str, Any] | None:
        return {"replicas": replicas} if region == "tokyo" else None

    acts = Acts(store, lambda: LAW, statuses, lambda: AT, status_of=status_of)
    await store.put(split_key("tokyo"), b'{"m": {"sticky": "none"}, "other": {"weights": {"a": 1}}}')
    asked = {"do": "split", "target": "tokyo", "why": "canary", "model": "m", "weights": "v1=95, v3=5"}
    shown = await acts.perform(Act(**asked), "ann")
    assert shown["effects"][:3] == [
        "shares: v1 95 %, v3 5 %",
        "strands: v3: no replica there has it; the split's fallback decides",
        "moves: all of v2 elsewhere: it gets no share",
    ]
    assert shown["stands"] == {"split": {"sticky": "none"}, "author": None, "why": None}

    async def standing() -> tuple[dict[str, Any], str]:
        entry = await store.get(split_key("tokyo"))
        assert entry is not None
        models, by = authored.split_authorship(entry.value)
        return msgspec.json.decode(models), by.author if by is not None else ""

    assert (await standing())[1] == ""  # nothing was written
    await acts.perform(Act(**asked, dry_run=False, revision=shown["revision"], confirm="tokyo"), "ann")
    other = {"other": {"weights": {"a": 1}}}
    assert await standing() == ({"m": {"sticky": "none", "weights": {"v1": 95.0, "v3": 5.0}}, **other}, "ann")
    with pytest.raises(ActError, match="somebody else changed it"):
        await acts.perform(Act(**asked, dry_run=False, revision=shown["revision"], confirm="tokyo"), "ann")
    back = {"do": "unsplit", "target": "tokyo", "why": "enough", "model": "m"}
    shown = await acts.perform(Act(**back), "bob")
    assert (shown["stands"]["author"], shown["effects"][0]) == ("ann", "m: as the region's configuration says")
    await acts.perform(Act(**back, dry_run=False, revision=shown["revision"], confirm="tokyo"), "bob")
    assert await standing() == (other, "bob")
    unknown = await acts.perform(Act(**{**asked, "target": "virginia"}), "ann")
    assert UNKNOWN_THERE in unknown["effects"]


class _Drills:
    """What runs drills, with one drill that is called `move`."""

    def __init__(self) -> None:
        self.begun: list[tuple[Any, ...]] = []

    async def offered(self) -> list[dict[str, Any]]:
        return [{"drill": "move"}]

    async def plan(self, name: str, values: Mapping[str, str]) -> dict[str, Any]:
        return {"revision": 7, "plan": [f"{name} {dict(values)}"], "checks": [], "may_run": True}

    async def begin(self, name: str, values: Mapping[str, str], revision: int, why: str, author: str) -> str:
        self.begun.append((name, dict(values), revision, why, author))
        return "move-1"

    def going(self) -> dict[str, Any] | None:
        return {"run": "move-1"}

    async def reported(self) -> list[str]:
        return ["move-1"]

    async def report(self, run: str) -> bytes | None:
        return b"whole" if run == "move-1" else None


async def test_a_drill_is_shown_first_confirmed_by_name_and_begun_as_shown(store: MemoryStore) -> None:
    async def read_statuses() -> tuple[dict[str, Any], ...]:
        return ()

    drills = _Drills()
    acts = Acts(store, lambda: LAW, read_statuses, lambda: AT, drills)
    asked: dict[str, Any] = {"do": "start-drill", "target": "move", "why": "rehearse", "values": {"region": "tokyo"}}
    answer = await acts.perform(Act(**asked), "ann")
    assert (answer["plan"], answer["revision"], drills.begun) == (["move {'region': 'tokyo'}"], 7, [])
    for change, what in (
        ({"why": " "}, "why: give the reason"),
        ({"dry_run": False, "revision": 7, "confirm": "mov"}, "confirm: repeat the name"),
        ({"dry_run": False, "confirm": "move"}, "revision: give the revision"),
    ):
        with pytest.raises(ActError, match=what):
            await acts.perform(Act(**{**asked, **change}), "ann")
    assert drills.begun == []
    done = await acts.perform(Act(**asked, dry_run=False, revision=7, confirm="move"), "ann")
    assert done["run"] == "move-1"
    assert drills.begun == [("move", {"region": "tokyo"}, 7, "rehearse", "ann")]
    answer = await acts.drills()
    assert (answer["going"], answer["reports"]) == ({"run": "move-1"}, ["move-1"])
    assert await acts.drill_report("move-1") == b"whole"


async def test_where_no_drill_can_be_begun_it_is_shown(store: MemoryStore) -> None:
    acts = acts_of(store, ALL)
    with pytest.raises(ActError, match="`farhop console`"):
        await acts.perform(Act("start-drill", "move", "rehearse"), "ann")
    found = await acts.drills_offered()
    assert found["offered"] == []
    assert "`farhop console`" in found["why"]
    assert "going" not in await acts.drills()
    assert await acts.drill_report("move-1") is None
