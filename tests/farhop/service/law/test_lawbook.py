"""Which law is in force: epochs only move forward, the last good law stands, and whatever is passed over is loud.

Through restarts and wipes, too: it is kept on disk, hubs that lack it are given it, and it counts only as signed.
"""

import asyncio
import itertools
import json
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.service.law import lawbook
from farhop.service.law.lawbook import LawBook
from farhop.store.contract import LAW_KEY, Change, ChangeKind, KeyValue, StoreError
from farhop.store.envelope import Keys, Signer, public_key
from farhop.store.state import StateDir
from farhop.telemetry.metrics import TierMetrics
from farhop_lab.memory_store import MemoryCluster, MemoryStore
from topology import law_document
from topology.law import Law
from topology.load import load, parse, shipped
from topology.model import Topology
from topology.problems import TopologyError

WORLD = load(shipped("three-regions"))  # of epoch 1


def document(epoch, *allow, at="2026-05-01T12:00:00Z", tenant="acme", **more):
    tenants = [{"name": tenant, "residency": {"processing": {"allow": list(allow) or ["eu"]}}}]
    return json.dumps(
        {"epoch": epoch, "author": "ann", "why": f"no {epoch}", "at": at, "tenants": tenants, **more}
    ).encode()


def put(value, revision=5) -> Change:
    return Change(ChangeKind.PUT, revision, LAW_KEY, value)


def snapshot(value=b"", revision=5) -> Change:
    return Change(ChangeKind.SNAPSHOT, revision, entries=(KeyValue(LAW_KEY, value, revision),) if value else ())


DELETE = Change(ChangeKind.DELETE, 6, LAW_KEY)
LOST = Change(ChangeKind.LOST, why="connection refused")


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[str, dict]] = []

    def warning(self, event, key="", **fields):
        self.lines.append((event, fields))

    error = warning


class Stage:
    def __init__(self, stores=None, law=None, **more) -> None:
        self.adopted: list[Law] = []
        self.refused: list[str] = []
        self.log = Log()
        law = law or Law(WORLD)
        self.book = LawBook(stores or {}, law, self.adopted.append, self.refused.append, self.log, **more)

    def apply(self, *changes) -> list[int]:
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
    assert stage.apply(snapshot()) == []
    assert stage.lawful("japan-only") == {"tokyo"}
    assert stage.book.status() == {
        "epoch": 1, "source": "topology three-regions", "revision": None, "trouble": [], "etcd_out_of_reach": None,
        "author": None, "why": None, "at": None, "signed_by": None, "must_be_signed": False, "kept_on_disk": False,
    }  # fmt: skip
    assert stage.refused == []


def test_law_of_a_later_epoch_replaces_the_present_one_and_shows_its_author(stage):
    assert stage.apply(snapshot(document(3), 9)) == [3]
    assert stage.lawful() == {"frankfurt"}
    assert stage.lawful("japan-only") == set()
    status = stage.book.status()
    assert (status["source"], status["revision"], status["author"], status["why"]) == ("etcd", 9, "ann", "no 3")
    assert stage.log.lines == [("law in force", {"epoch": 3, "author": "ann", "why": "no 3"})]
    assert stage.apply(put(document(4, "us"))) == [4]
    assert stage.lawful() == {"virginia"}


@pytest.mark.parametrize("older", [2, 1])
def test_a_law_of_an_older_epoch_is_refused_even_after_etcd_was_wiped(stage, older):
    stage.apply(snapshot(document(3)))
    assert stage.apply(LOST, snapshot(), snapshot(document(older, "us"), 2)) == []
    assert stage.lawful() == {"frankfurt"}
    assert stage.refused == ["law_gone", "law_older"]
    [trouble] = stage.book.status()["trouble"]
    assert f"epoch {older}, older than the law in force" in trouble
    assert stage.book.status()["epoch"] == 3


def test_a_process_whose_file_is_newer_uses_its_file():
    stage = Stage(law=Law(law_document.read(document(8, "us"), WORLD, "x").over(WORLD)))
    assert stage.apply(snapshot(document(3))) == []
    assert stage.lawful() == {"virginia"}
    assert stage.refused == ["law_older"]


def test_authors_clocks_an_hour_apart_are_shown_and_not_compared(stage):
    ahead, behind = document(3, at="2026-05-01T13:00:00Z"), document(4, at="2026-05-01T12:00:00Z")
    assert stage.apply(snapshot(ahead), put(behind)) == [3, 4]
    assert stage.book.status()["at"] == "2026-05-01T12:00:00Z"
    assert stage.apply(put(document(2, at="2027-01-01T00:00:00Z"))) == []


def test_a_different_law_of_the_same_epoch_changes_nothing_and_is_logged(stage):
    stage.apply(snapshot(document(3)))
    assert stage.apply(put(document(3, "us"))) == []
    assert stage.lawful() == {"frankfurt"}
    assert stage.refused == ["law_differs"]


def test_the_file_s_own_law_in_etcd_names_its_author(stage):
    law = law_document.encode(law_document.document_of(WORLD), 1, "ann", "as ever", "2026-05-01T12:00:00Z")
    assert stage.apply(snapshot(law)) == [1]
    assert (stage.book.status()["source"], stage.refused) == ("etcd", [])


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
def test_the_last_valid_law_stays_and_problems_are_logged(stage, value, says):
    stage.apply(snapshot(document(3)))
    assert stage.apply(put(value)) == []
    assert stage.lawful() == {"frankfurt"}
    assert stage.refused == ["law_malformed"]
    assert any(says in one for one in stage.book.status()["trouble"])
    event, found = stage.log.lines[-1]
    assert (event, found["in_force"]) == ("law rejected", 3)
    assert stage.apply(put(document(5, "us"))) == [5]
    assert stage.book.status()["trouble"] == []


def test_many_faults_are_logged_in_few_lines(stage):
    tenants = [{"name": f"t{n}"} for n in range(50)]
    stage.apply(snapshot(document(3, tenants=tenants)))
    assert len(stage.book.trouble) == lawbook.PROBLEMS_SHOWN_MAX + 1
    assert stage.book.trouble[-1] == "and 30 more"


def test_the_same_law_after_an_outage_or_a_deletion_is_no_change(stage):
    stage.apply(snapshot(document(3)))
    assert stage.apply(LOST) == []
    assert stage.book.status()["etcd_out_of_reach"] == "connection refused"
    assert stage.apply(snapshot(document(3), 11)) == []
    assert (stage.book.status()["etcd_out_of_reach"], stage.book.status()["revision"]) == (None, 11)
    stage.apply(DELETE)
    assert "no longer holds a law" in stage.book.status()["trouble"][0]
    stage.apply(put(document(3), 12))
    assert (stage.book.status()["trouble"], stage.book.status()["revision"]) == ([], 12)
    assert stage.refused == ["law_gone"]


# -- another map


def world(**changes) -> Topology:
    """The default one with other regions: `name=None` takes one away, `name={...}` changes or adds one."""
    raw = yaml.safe_load(shipped("three-regions").read_text())
    regions = {one["name"]: one for one in raw["regions"]}
    top = {name: changes.pop(name) for name in ("epoch", "tenants", "countries") if name in changes}
    for name, change in changes.items():
        if change is None:
            del regions[name]
        else:
            regions[name] = {
                **regions.get(name, {"latitude": 0.0, "longitude": 0.0, "hub": "main"}),
                "name": name,
                **change,
            }
    raw["regions"] = list(regions.values())
    pairs = itertools.combinations(regions, 2)
    raw["rtt_ms"] = {}
    for a, b in pairs:
        raw["rtt_ms"].setdefault(a, {})[b] = 100.0
    return parse(yaml.safe_dump(raw | top), "another.yaml")


def remap(stage, other) -> list[str]:
    """Take it; why not, if it was refused. Then nothing has changed."""
    swapped, before = [], (stage.book.law, stage.book.status())
    try:
        asyncio.run(stage.book.remap(other, swapped.append))
    except TopologyError as error:
        assert not swapped
        assert (stage.book.law, stage.book.status()) == before
        return [str(problem) for problem in error.problems]
    assert len(swapped) == 1
    return []


def test_a_changed_map_is_adopted_without_a_change_of_law(stage):
    stage.apply(snapshot(document(3)))
    assert remap(stage, world(paris={"country": "fr"}, virginia=None)) == []
    assert stage.lawful() == {"frankfurt", "paris"}
    assert set(stage.book.law.topology.regions) == {"frankfurt", "tokyo", "paris"}
    assert stage.book.status()["epoch"] == 3
    assert stage.apply(put(document(4, "fr"), 6)) == [4]
    assert stage.lawful() == {"paris"}


def test_a_map_that_the_law_does_not_fit_changes_nothing(stage):
    stage.apply(snapshot(document(3, "world", models={"m": {"deny": ["virginia"]}})))
    [problem] = remap(stage, world(virginia=None))
    assert problem.startswith('models.m.deny[0]: unknown place "virginia"')


def test_widening_map_has_no_effect_until_a_later_law_allows_it(stage):
    stage.apply(snapshot(document(3)))
    [problem] = remap(stage, world(virginia={"country": "de"}))
    assert problem.startswith('regions.virginia: lies in "de" now and did not')
    assert remap(stage, world(virginia=None)) == []
    [problem] = remap(stage, world(virginia={"country": "de"}))  # nor by leaving and coming back
    assert "virginia" in problem
    assert remap(stage, world(virginia={"country": "us"})) == []
    assert remap(stage, world(virginia={"country": "de"}, epoch=4)) == []
    assert stage.book.law.epoch == 4
    assert stage.lawful("eu-only") == {"frankfurt", "virginia"}


_INSIDE = st.sampled_from(["us", "de", "fr", "jp"])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.dictionaries(st.sampled_from(["r1", "r2", "r3"]), _INSIDE), min_size=1, max_size=5))
def test_whatever_maps_come_and_go_no_region_is_lawful_for_more_than_when_it_was_first_seen(maps):
    stage = Stage(law=Law(world()))
    first: dict[str, dict] = {}
    for regions in ({}, *maps):
        remap(stage, world(**{name: {"country": country} for name, country in regions.items()}))
        law = stage.book.law
        for name in law.topology.regions:
            whose = {
                (tenant, narrow)
                for tenant in law.topology.tenants
                for narrow in ((), (("eu",),), (("us",),), (("jp",),))
                if name in law.verdict(tenant, "", narrow=narrow).lawful
            }
            assert whose <= first.setdefault(name, whose)
            first[name] = whose
    assert law.epoch == 1


def test_a_files_own_law_changes_under_a_later_epoch_alone(stage):
    tenants = [{"name": "acme", "residency": {"processing": {"allow": ["jp"]}}}]
    assert remap(stage, world(tenants=tenants))[0].startswith("epoch: is unchanged, though `tenants`")
    assert remap(stage, world(tenants=tenants, epoch=2)) == []
    assert stage.lawful() == {"tokyo"}
    assert remap(stage, world(tenants=tenants, epoch=1))[0].startswith("epoch: was 2 and is 1")
    stage.apply(snapshot(document(3)))
    assert remap(stage, world(tenants=tenants, epoch=3))[0].startswith("epoch: another law of this epoch is in force")
    assert stage.lawful() == {"frankfurt"}


def test_a_law_that_did_not_fit_the_map_is_tried_again_with_the_next_map(stage):
    assert stage.apply(snapshot(document(3, "paris"))) == []
    assert remap(stage, world(paris={"country": "fr"})) == []
    assert stage.book.law.epoch == 3
    assert stage.lawful() == {"paris"}


def test_other_keys_are_ignored(stage):
    assert stage.apply(Change(ChangeKind.PUT, 4, f"{LAW_KEY}yer", document(9))) == []
    other = KeyValue(f"{LAW_KEY}s", document(9), 3)
    assert stage.apply(Change(ChangeKind.SNAPSHOT, 4, entries=(other,))) == []
    assert stage.refused == []


def test_the_law_in_force_is_shown_whole(stage):
    stage.apply(snapshot(document(3)))
    found = stage.book.document()
    assert found["epoch"] == 3
    assert found["tenants"] == [{"name": "acme", "residency": {"processing": {"allow": ["eu"]}}}]


def test_metrics_show_the_epoch_and_that_something_is_wrong(stage):
    metrics = TierMetrics("global", "tokyo", "g1")
    stage.book.observe(metrics)
    stage.apply(snapshot(document(3)), put(b"{"))
    lines = metrics.render().decode().splitlines()
    values = {line.split("{")[0]: line.split()[-1] for line in lines if line.startswith("farhop_law_")}
    assert values == {"farhop_law_epoch": "3.0", "farhop_law_rejected": "1.0"}


@pytest.mark.parametrize("inline", [0, 1 << 20])
async def test_small_laws_are_parsed_inline_and_large_ones_in_a_thread(monkeypatch, inline):
    monkeypatch.setattr(lawbook, "INLINE_BYTES_MAX", inline)
    cluster = MemoryCluster()
    writer, reader = MemoryStore(Random(1), cluster), MemoryStore(Random(2), cluster)
    await writer.open()
    await reader.open()
    await writer.put(LAW_KEY, document(3))
    stage = Stage({"etcd": reader})
    task = asyncio.create_task(stage.book.follow())
    try:
        await stage.book.begun()
        assert stage.book.law.epoch == 3
        await writer.put(LAW_KEY, document(4, "us"))
        async with asyncio.timeout(60.0):
            while stage.book.law.epoch < 4:
                await asyncio.sleep(0.005)
        assert [law.epoch for law in stage.adopted] == [3, 4]
    finally:
        await reader.close()
        await writer.close()
        await asyncio.wait_for(task, 60.0)


async def test_the_start_waits_for_etcd_only_for_a_limited_time(monkeypatch):
    monkeypatch.setattr(lawbook, "BEGIN_S", 0.01)
    await Stage().book.begun()


# -- signed


def signer(name: str) -> Signer:
    key = Ed25519PrivateKey.from_private_bytes(name.encode().ljust(32, b"."))
    return Signer(name, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


OPS, INTERN = signer("ops"), signer("intern")
KEYS = Keys({"ops": (public_key(OPS.public), ["law"]), "intern": (public_key(INTERN.public), ["drain"])})


def sealed(epoch, *allow, by=OPS, place=LAW_KEY) -> bytes:
    return by.seal(place, document(epoch, *allow))


def test_with_a_configured_key_only_laws_with_its_signature_are_accepted():
    stage = Stage(keys=KEYS)
    assert stage.apply(snapshot(document(50, "us"))) == []
    assert stage.apply(put(sealed(51, by=INTERN)), put(sealed(52, by=signer("stranger")))) == []
    assert stage.apply(put(sealed(53, place=f"{LAW_KEY}-of-elsewhere"))) == []
    assert (
        stage.apply(put(sealed(54).replace(b'"epoch":54', b'"epoch": 5').replace(b'"epoch": 54', b'"epoch": 99'))) == []
    )
    assert stage.refused == [
        "law_unsigned", "law_not_allowed", "law_unknown_key", "law_bad_signature", "law_bad_signature",
    ]  # fmt: skip
    assert "sign it with `farhop law sign`" in stage.book.status()["trouble"][0]
    assert stage.apply(put(sealed(3))) == [3]
    assert (stage.book.status()["signed_by"], stage.book.status()["must_be_signed"]) == ("ops", True)
    assert stage.book.status()["trouble"] == []


def test_without_a_configured_key_a_signed_law_is_used_and_shown_as_unverified(stage):
    assert stage.apply(snapshot(sealed(3)), put(document(4))) == [3, 4]
    assert (stage.book.status()["signed_by"], stage.book.status()["must_be_signed"]) == (None, False)


def test_a_signed_copy_of_the_law_in_force_is_no_change_and_no_problem():
    keyless = Stage()
    keyless.apply(snapshot(document(3)))
    assert keyless.apply(put(sealed(3))) == []
    assert keyless.refused == []


# -- on disk


def kept(tmp_path, owner="global.tokyo.g1", fleet="f1") -> StateDir:
    return StateDir(tmp_path, fleet, owner)


def test_a_start_never_goes_below_the_newest_law_seen(tmp_path):
    Stage(state=kept(tmp_path)).apply(snapshot(document(5, "us")))
    again = Stage(state=kept(tmp_path))
    again.book.remember()
    assert [law.epoch for law in again.adopted] == [5]
    assert again.lawful() == {"virginia"}
    assert (again.book.status()["source"], again.book.status()["kept_on_disk"]) == ("its own disk", True)
    assert again.apply(snapshot(document(4, "eu"))) == []
    assert again.refused == ["law_older"]
    fresh = Stage(state=kept(tmp_path, fleet="f2"))  # a law of another fleet does not apply to this one
    fresh.book.remember()
    assert fresh.book.law.epoch == 1


def test_a_newer_topology_file_goes_before_what_is_on_disk(tmp_path):
    Stage(state=kept(tmp_path)).apply(snapshot(document(5, "us")))
    newer = Stage(law=Law(law_document.read(document(8), WORLD, "x").over(WORLD)), state=kept(tmp_path))
    newer.book.remember()
    assert (newer.adopted, newer.book.law.epoch) == ([], 8)


@pytest.mark.parametrize("broken", ["key", "file"])
def test_where_the_newest_law_cannot_be_had_nothing_is_lawful_until_it_is(tmp_path, broken):
    state, keys = kept(tmp_path), Keys({})
    Stage(state=state).apply(snapshot(document(5, "us")))
    if broken == "file":
        path = state.path("law")
        path.write_bytes(path.read_bytes()[:-1])
    else:
        keys = KEYS
    again = Stage(state=state, keys=keys)
    again.book.remember()
    assert again.lawful() == set()
    assert again.book.status()["trouble"]
    assert not again.book.status()["kept_on_disk"]
    if broken == "key":
        assert again.apply(snapshot(sealed(4))) == []
    assert again.apply(put(sealed(5, "us"))) == [5]
    assert again.lawful() == {"virginia"}
    assert again.book.status()["trouble"] == []


def test_unwritable_state_does_not_stop_a_law_and_is_reported(tmp_path):
    (tmp_path / "f1").write_text("in the way")
    stage = Stage(state=kept(tmp_path))
    assert stage.apply(snapshot(document(3))) == [3]
    assert stage.refused == ["law_not_kept"]
    assert "a restart may fall back" in stage.book.status()["trouble"][0]


async def test_a_law_that_a_full_disk_refused_is_written_once_there_is_room(tmp_path):
    (tmp_path / "f1").write_text("in the way")
    stage = Stage(state=kept(tmp_path))
    assert stage.apply(snapshot(document(3, "us"))) == [3]
    await stage.book.mend()
    assert not stage.book.status()["kept_on_disk"]
    (tmp_path / "f1").unlink()
    await stage.book.mend()
    assert stage.book.status()["kept_on_disk"]
    again = Stage(state=kept(tmp_path))
    again.book.remember()
    assert (again.book.law.epoch, again.lawful()) == (3, {"virginia"})


async def test_a_balancer_that_lost_its_law_gets_it_from_one_with_the_same_epoch(tmp_path):
    """It keeps the place of an epoch, and does not have it: what it names is the one before."""
    other = Stage()
    other.apply(snapshot(document(2, "us")))
    state = kept(tmp_path)
    Stage(state=state).apply(snapshot(document(2, "us")))
    path = state.path("law")
    path.write_bytes(path.read_bytes()[:-1])
    lost = Stage(state=state)
    lost.book.remember()
    assert (lost.lawful(), lost.book.law.held_epoch) == (set(), 1)
    epoch, written = await other.book.exchanged(lost.book.law.held_epoch, b"", "g1", proven=True)
    assert await lost.book.offer(written, "g2", proven=True)
    assert (epoch, lost.book.law.epoch, lost.lawful()) == (2, 2, {"virginia"})
    lost = Stage(state=state)
    path.write_bytes(path.read_bytes()[:-1])
    lost.book.remember()
    theirs, _ = await lost.book.exchanged(2, b"", "g2", proven=True)  # the other way round: it is asked for its law
    assert theirs < other.book.law.held_epoch
    await lost.book.exchanged(2, other.book.document_after(theirs), "g2", proven=True)
    assert lost.lawful() == {"virginia"}


# -- hubs that were away


@asynccontextmanager
async def following(**stores):
    async with AsyncExitStack() as closing:
        for store in stores.values():
            await store.open()
            closing.push_async_callback(store.close)
        stage = Stage(stores, rng=Random(1))
        task = asyncio.create_task(stage.book.follow())
        closing.push_async_callback(asyncio.wait, [task])
        closing.callback(task.cancel)
        await stage.book.begun()
        yield stage


async def until(condition):
    async with asyncio.timeout(60.0):
        while not await condition():
            await asyncio.sleep(0.01)


async def test_a_hub_that_was_away_or_wiped_is_brought_up_to_date(monkeypatch):
    monkeypatch.setattr(lawbook, "MEND_S", 0.02)
    clusters = {"a": MemoryCluster(), "b": MemoryCluster()}
    clusters["a"].put(LAW_KEY, document(3))
    clusters["b"].put(LAW_KEY, document(2))
    stores = {name: MemoryStore(Random(1), cluster) for name, cluster in clusters.items()}

    async def even():
        held = [cluster.get(LAW_KEY) for cluster in clusters.values()]
        return all(entry is not None and entry.value == document(3) for entry in held)

    async with following(**stores) as stage:
        await until(even)
        assert stage.book.law.epoch == 3
        clusters["b"].wipe()
        await until(even)
        stores["b"].outage()
        clusters["b"].wipe()
        clusters["b"].put(LAW_KEY, document(1))
        stores["b"].restore()
        await until(even)

        async def settled():
            return stage.book.status()["trouble"] == []

        await until(settled)


async def test_law_in_etcd_that_may_be_later_is_never_overwritten(monkeypatch):
    monkeypatch.setattr(lawbook, "MEND_S", 0.01)
    cluster, other = MemoryCluster(), MemoryCluster()
    cluster.put(LAW_KEY, document(3))
    other.put(LAW_KEY, document(9, "atlantis"))  # for a map that this process does not have yet
    async with following(a=MemoryStore(Random(1), cluster), b=MemoryStore(Random(2), other)) as stage:

        async def told():
            return any("atlantis" in one for one in stage.book.status()["trouble"])

        await until(told)
        await asyncio.sleep(0.1)  # ten times as long as it takes until it would be overwritten
        assert other.get(LAW_KEY).value == document(9, "atlantis")
        assert stage.book.law.epoch == 3


async def test_a_hub_that_takes_nothing_is_tried_again(monkeypatch):
    class ReadOnly(MemoryStore):
        tries = 0

        async def put(self, *args, **more):
            self.tries += 1
            if self.tries < 3:
                raise StoreError("permission denied")
            return await super().put(*args, **more)

    monkeypatch.setattr(lawbook, "MEND_S", 0.01)
    monkeypatch.setattr(lawbook, "MEND_AGAIN_S", 0.01)
    cluster, other = MemoryCluster(), MemoryCluster()
    cluster.put(LAW_KEY, document(3))
    async with following(a=MemoryStore(Random(1), cluster), b=ReadOnly(Random(2), other)):

        async def there():
            return other.get(LAW_KEY) is not None

        await until(there)


# -- from balancers


async def test_a_later_law_from_a_balancer_counts_if_signed_or_if_that_balancer_is_proven():
    stage = Stage()
    assert stage.book.named("tokyo/r1", 3)
    assert stage.book.status()["trouble"] == ["tokyo/r1 uses a law of epoch 3, which has not arrived here yet"]
    assert not await stage.book.offer(document(3), "tokyo/r1", proven=False)
    assert await stage.book.offer(document(3), "tokyo/r1", proven=True)
    assert stage.book.status()["trouble"] == []
    assert (stage.book.law.epoch, stage.book.status()["source"]) == (3, "tokyo/r1")
    signed = Stage(keys=KEYS)
    assert not await signed.book.offer(document(3), "tokyo/r1", proven=True)
    assert await signed.book.offer(sealed(3), "tokyo/r1", proven=False)
    assert not await signed.book.offer(sealed(2), "tokyo/r1", proven=False)
    assert signed.refused == ["law_offered_malformed"]


async def test_in_an_exchange_the_balancer_with_the_earlier_law_gets_the_later_one():
    ahead, behind = Stage(keys=KEYS), Stage(keys=KEYS)
    ahead.apply(snapshot(sealed(4)))
    assert await ahead.book.exchanged(1, b"", "g1", proven=False) == (4, sealed(4))
    assert await behind.book.exchanged(4, sealed(4), "g1", proven=False) == (4, b"")
    assert behind.book.law.epoch == 4
    assert await ahead.book.exchanged(9, b"", "g1", proven=False) == (4, b"")
    assert "g1 uses a law of epoch 9" in ahead.book.status()["trouble"][0]
    ahead.book.left("g1")
    assert ahead.book.status()["trouble"] == []
