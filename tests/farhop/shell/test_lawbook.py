"""Which law is in force: epochs only move forward, the last good law stands, and whatever is passed over is loud."""

import asyncio
import json
from random import Random

import pytest

from farhop.shell import lawbook
from farhop.shell.lawbook import LawBook
from farhop.store.contract import LAW_KEY, Change, ChangeKind, Entry
from farhop.store.memory import MemoryCluster, MemoryStore
from farhop.telemetry.metrics import TierMetrics
from topology import policy
from topology.law import Law
from topology.load import load, shipped

WORLD = load(shipped("three-regions"))  # of epoch 1


def document(epoch, *allow, at="2026-05-01T12:00:00Z", tenant="acme", **more):
    tenants = [{"name": tenant, "residency": {"processing": {"allow": list(allow) or ["eu"]}}}]
    return json.dumps(
        {"epoch": epoch, "author": "ann", "why": f"no {epoch}", "at": at, "tenants": tenants, **more}
    ).encode()


def put(value, revision=5) -> Change:
    return Change(ChangeKind.PUT, revision, LAW_KEY, value)


def snapshot(value=b"", revision=5) -> Change:
    return Change(ChangeKind.SNAPSHOT, revision, entries=(Entry(LAW_KEY, value, revision),) if value else ())


DELETE = Change(ChangeKind.DELETE, 6, LAW_KEY)
LOST = Change(ChangeKind.LOST, why="connection refused")


class Log:
    def __init__(self) -> None:
        self.said: list[tuple[str, dict]] = []

    def warning(self, event, key="", **fields):
        self.said.append((event, fields))

    error = warning


class Stage:
    def __init__(self, store=None) -> None:
        self.adopted: list[Law] = []
        self.refused: list[str] = []
        self.log = Log()
        self.book = LawBook(store, Law(WORLD), self.adopted.append, self.refused.append, self.log)

    def tell(self, *changes) -> list[int]:
        """The epochs adopted at these steps."""
        self.adopted.clear()
        for change in changes:
            self.book.changed(change)
        return [law.epoch for law in self.adopted]

    def lawful(self, tenant="acme") -> set[str]:
        return set(self.book.law.verdict(tenant, "").lawful)


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_without_one_in_etcd_the_topologys_law_is_in_force(stage):
    assert stage.tell(snapshot()) == []
    assert stage.lawful("japan-only") == {"tokyo"}
    assert stage.book.told() == {
        "epoch": 1, "source": "topology three-regions", "revision": None, "trouble": [], "etcd_out_of_reach": None,
        "author": None, "why": None, "at": None,
    }  # fmt: skip
    assert stage.refused == []


def test_a_later_epoch_takes_its_place_and_says_whose_it_is(stage):
    assert stage.tell(snapshot(document(3), 9)) == [3]
    assert stage.lawful() == {"frankfurt"}
    assert stage.lawful("japan-only") == set()
    told = stage.book.told()
    assert (told["source"], told["revision"], told["author"], told["why"]) == ("etcd", 9, "ann", "no 3")
    assert stage.log.said == [("law in force", {"epoch": 3, "author": "ann", "why": "no 3"})]
    assert stage.tell(put(document(4, "us"))) == [4]
    assert stage.lawful() == {"virginia"}


@pytest.mark.parametrize("older", [2, 1])
def test_an_older_one_never_undoes_it_even_after_a_wipe_and_a_restore(stage, older):
    stage.tell(snapshot(document(3)))
    assert stage.tell(LOST, snapshot(), snapshot(document(older, "us"), 2)) == []
    assert stage.lawful() == {"frankfurt"}
    assert stage.refused == ["law_gone", "law_older"]
    [trouble] = stage.book.told()["trouble"]
    assert f"epoch {older}, older than this" in trouble
    assert stage.book.told()["epoch"] == 3


def test_a_process_whose_file_is_newer_goes_by_its_file():
    stage = Stage()
    newer = policy.read(document(8, "us"), WORLD, "x").over(WORLD)
    stage.book = LawBook(None, Law(newer), stage.adopted.append, stage.refused.append)
    assert stage.tell(snapshot(document(3))) == []
    assert stage.lawful() == {"virginia"}
    assert stage.refused == ["law_older"]


def test_authors_clocks_an_hour_apart_are_shown_and_not_compared(stage):
    ahead, behind = document(3, at="2026-05-01T13:00:00Z"), document(4, at="2026-05-01T12:00:00Z")
    assert stage.tell(snapshot(ahead), put(behind)) == [3, 4]
    assert stage.book.told()["at"] == "2026-05-01T12:00:00Z"
    assert stage.tell(put(document(2, at="2027-01-01T00:00:00Z"))) == []


def test_another_of_the_same_epoch_changes_nothing_and_is_told(stage):
    stage.tell(snapshot(document(3)))
    assert stage.tell(put(document(3, "us"))) == []
    assert stage.lawful() == {"frankfurt"}
    assert stage.refused == ["law_differs"]


def test_the_files_own_law_in_etcd_says_who_set_it(stage):
    law = policy.encode(policy.document_of(WORLD), 1, "ann", "as ever", "2026-05-01T12:00:00Z")
    assert stage.tell(snapshot(law)) == [1]
    assert (stage.book.told()["source"], stage.refused) == ("etcd", [])


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (b"{nonsense", "not JSON"),
        (document(4, "atlantis"), 'unknown place "atlantis"'),
        (document(4, "tokyo", models={"m": {"deny": ["mars"]}}), 'unknown place "mars"'),
        (b'{"epoch": 4, "author": "ann", "why": "x", "at": "2026-05-01T12:00:00Z", "tenants": [{"name": "a"}]}',
         "tenants[0].residency: missing"),
    ],
)  # fmt: skip
def test_the_last_good_one_stands_loudly(stage, value, says):
    stage.tell(snapshot(document(3)))
    assert stage.tell(put(value)) == []
    assert stage.lawful() == {"frankfurt"}
    assert stage.refused == ["law_malformed"]
    assert any(says in one for one in stage.book.told()["trouble"])
    event, said = stage.log.said[-1]
    assert (event, said["in_force"]) == ("law passed over", 3)
    assert stage.tell(put(document(5, "us"))) == [5]
    assert stage.book.told()["trouble"] == []


def test_many_faults_are_told_in_few_lines(stage):
    tenants = [{"name": f"t{n}"} for n in range(50)]
    stage.tell(snapshot(document(3, tenants=tenants)))
    assert len(stage.book.trouble) == lawbook.PROBLEMS_TOLD_MAX + 1
    assert stage.book.trouble[-1] == "and 30 more"


def test_listed_anew_it_is_no_news_and_back_again_no_trouble(stage):
    stage.tell(snapshot(document(3)))
    assert stage.tell(LOST) == []
    assert stage.book.told()["etcd_out_of_reach"] == "connection refused"
    assert stage.tell(snapshot(document(3), 11)) == []
    assert (stage.book.told()["etcd_out_of_reach"], stage.book.told()["revision"]) == (None, 11)
    stage.tell(DELETE)
    assert "holds no law any more" in stage.book.told()["trouble"][0]
    stage.tell(put(document(3), 12))
    assert (stage.book.told()["trouble"], stage.book.told()["revision"]) == ([], 12)
    assert stage.refused == ["law_gone"]


def test_other_keys_are_none_of_it(stage):
    assert stage.tell(Change(ChangeKind.PUT, 4, f"{LAW_KEY}yer", document(9))) == []
    other = Entry(f"{LAW_KEY}s", document(9), 3)
    assert stage.tell(Change(ChangeKind.SNAPSHOT, 4, entries=(other,))) == []
    assert stage.refused == []


def test_it_can_be_read_whole(stage):
    stage.tell(snapshot(document(3)))
    told = stage.book.document()
    assert told["epoch"] == 3
    assert told["tenants"] == [{"name": "acme", "residency": {"processing": {"allow": ["eu"]}}}]


def test_metrics_show_the_epoch_and_that_something_is_wrong(stage):
    metrics = TierMetrics("global", "tokyo", "g1")
    stage.book.observe(metrics)
    stage.tell(snapshot(document(3)), put(b"{"))
    lines = metrics.render().decode().splitlines()
    values = {line.split("{")[0]: line.split()[-1] for line in lines if line.startswith("farhop_law_")}
    assert values == {"farhop_law_epoch": "3.0", "farhop_law_passed_over": "1.0"}


@pytest.mark.parametrize("inline", [0, 1 << 20])
async def test_from_a_store_small_ones_at_once_and_large_ones_beside_the_loop(monkeypatch, inline):
    monkeypatch.setattr(lawbook, "INLINE_BYTES_MAX", inline)
    cluster = MemoryCluster()
    writer, reader = MemoryStore(Random(1), cluster), MemoryStore(Random(2), cluster)
    await writer.open()
    await reader.open()
    await writer.put(LAW_KEY, document(3))
    stage = Stage(reader)
    task = asyncio.create_task(stage.book.follow())
    try:
        await stage.book.begun()
        assert stage.book.law.epoch == 3
        await writer.put(LAW_KEY, document(4, "us"))
        async with asyncio.timeout(10.0):
            while stage.book.law.epoch < 4:
                await asyncio.sleep(0.005)
        assert [law.epoch for law in stage.adopted] == [3, 4]
    finally:
        await reader.close()
        await writer.close()
        await asyncio.wait_for(task, 10.0)


async def test_nobody_waits_for_etcd_for_ever(monkeypatch):
    monkeypatch.setattr(lawbook, "BEGIN_S", 0.01)
    await Stage().book.begun()
