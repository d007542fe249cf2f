"""The map and the configuration change while balancers live: whole, within the law, or not at all."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from inprocess import (
    HOP_KEY,
    Both,
    Engine,
    chat,
    common,
    regional_config,
    send,
    until,
)
from msgspec.structs import replace as replace_struct
from playbook import Expected, answered, sent, timer
from worlds import MODEL, instance, law, report_in, request, seen, worldwide

from farhop.balance import outcome
from farhop.balance.machine import AttemptBegan, AttemptRefused, Recall, RequestArrived, TimerFired
from farhop.config import load
from farhop.service.assembly import stores
from farhop.store.contract import LAW_KEY
from farhop_lab.memory_store import MemoryCluster, MemoryStore
from global_lb.app.config import GlobalConfig
from global_lb.app.main import GlobalBalancer
from global_lb.fleet.table import Price
from global_lb.fleet.view import ChannelChanged, RegionKnown
from global_lb.routing.flow import Reconfigured
from global_lb.routing.policy import RouteConfig
from global_lb.routing.routes import RoutesChanged
from regional_lb.app.config import RegionalConfig
from regional_lb.app.main import RegionalBalancer
from topology import load as topologies
from topology.law import Law
from topology.law_document import encode
from topology.model import Rule

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


class Files:
    """A map and the two configurations that name it, in files."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        self.map_file, self.above, self.below = (folder / name for name in ("world.yaml", "above.yaml", "below.yaml"))
        self.world: dict[str, Any] = yaml.safe_load(topologies.shipped("three-regions").read_text())
        self.regions = {one["name"]: one for one in self.world["regions"]}
        topology = str(self.map_file)
        self.global_ = {**common("frankfurt", "g1"), "topology": topology, "listen": {"port": 0}}
        plain = regional_config(engine).model_dump(mode="json", include={"tier", "control", "client", "watch"})
        replica = {"url": f"{engine.scheme}://{engine.address}", "models": ["llama-3.1-8b"], "name": "one"}
        self.regional = {**common("virginia", "r1"), **plain, "topology": topology, "replicas": [replica]}
        self.regional["watch"] = {"probe_s": 0.05, "scrape_s": 0.05}
        self.write()

    def write(self, *regions: str, text: str = "") -> None:
        """The map with these regions, or all; or what is no map."""
        names = regions or tuple(self.regions)
        self.world["regions"] = [self.regions[name] for name in names]
        rtt: dict[str, dict[str, float]] = {}
        for a, b in itertools.combinations(names, 2):
            rtt.setdefault(a, {})[b] = 90.0
        self.map_file.write_text(text or yaml.safe_dump({**self.world, "rtt_ms": rtt}))
        self.above.write_text(yaml.safe_dump(self.global_))
        self.below.write_text(yaml.safe_dump(self.regional))


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engine]:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    async with Engine().running() as running:
        yield running


@asynccontextmanager
async def living(files: Files, cluster: MemoryCluster | None = None) -> AsyncIterator[Both]:
    """Virginia's regional balancer and Frankfurt's global one, each as its file says."""
    cluster = cluster or MemoryCluster()
    low, high = load(RegionalConfig, files.below), load(GlobalConfig, files.above)
    low_world = topologies.load(topologies.shipped("three-regions"))
    below = RegionalBalancer(low, low_world, Random(1), MemoryStore(Random(2), cluster), files.below)
    above = GlobalBalancer(high, stores.topology_of(high), Random(3), MemoryStore(Random(4), cluster), files.above)
    try:
        lines = (await below.open(), await above.open())
        yield Both(below, above, lines)
    finally:
        await above.close()
        await below.close()


def serves(above: GlobalBalancer) -> bool:
    status = above.tier_admin.status()
    return any(m["replicas_ready"] for r in status["regions"] for i in r["instances"] for m in i["models"].values())


def status_of(balancer: GlobalBalancer | RegionalBalancer) -> dict[str, Any]:
    return balancer.tier_admin.status()["configuration"]


async def test_a_region_joins_and_leaves_the_map_while_requests_under_way_stay(engine, tmp_path):
    files = Files(tmp_path, engine)
    files.world["tenants"] = [one for one in files.world["tenants"] if one["name"] in ("anywhere", "not-us", "eu-only")]
    files.write("frankfurt")
    async with living(files) as both:
        above = both.global_
        answer = await send(both.entry, chat())
        assert answer.code == "no_region_serving"
        files.write("frankfurt", "virginia")
        await above.reloader.reload()
        await until(lambda: serves(above))  # its earlier reports are accepted now
        answer = await send(both.entry, chat())
        assert (answer.status, answer.headers["x-farhop-region"]) == (200, "virginia")
        assert status_of(above)["generation"] == 2

        engine.behaviour = "wait"
        under_way = asyncio.create_task(send(both.entry, chat()))
        await until(lambda: len(engine.seen) == 2)
        files.write("frankfurt")
        await above.reloader.reload()
        assert status_of(above)["topology"] == {"name": "three-regions", "regions": 1}
        assert [one["region"] for one in above.tier_admin.status()["regions"]] == ["frankfurt"] or not serves(above)
        refused = await send(both.entry, chat())
        assert refused.status == 503
        engine.release.set()
        assert (await under_way).status == 200
        await both.at_rest()
        page = above.metrics.render().decode()
        assert "farhop_config_generation" in page
        assert 'farhop_config_reloads_total{region="frankfurt",result="taken",tier="global"} 2.0' in page


async def test_region_sends_no_hints_while_its_map_has_the_entry_elsewhere(engine, tmp_path):
    files = Files(tmp_path, engine)
    files.world["tenants"] = [one for one in files.world["tenants"] if one["name"] != "japan-only"]
    files.write("frankfurt", "tokyo", "virginia")
    async with living(files) as both:
        known, law, here = both.global_.prefixes, both.global_.flow.law, both.global_.config.region
        await until(lambda: serves(both.global_) and known.state("virginia") == "connected")
        known.adopt(law.epoch, 1)  # as by a map that has it in other places
        asked = {"model": "llama-3.1-8b", "messages": [{"role": "user", "content": "long " * 2000}], "max_tokens": 8}
        assert (await send(both.entry, chat(body=asked))).status == 200
        await until(lambda: known.state("virginia") == "behind")
        await asyncio.sleep(2 * both.global_.config.watch.ping_s)
        assert known.state("virginia") == "behind", "what is asked by another map is not told"
        files.write("frankfurt", "virginia")
        await both.global_.reloader.reload()
        assert known.places == both.global_.flow.law.places_of(here) == law.places_of(here)
        await until(lambda: known.state("virginia") == "connected")


BAD = {
    "no YAML": ({}, "a: [", "not YAML"),
    "somebody stranded": (
        {"regions": ("virginia", "tokyo")},
        "",
        'no region is lawful for processing of tenant "eu-only"',
    ),
    "wider": ({"country": "de"}, "", 'regions.virginia: lies in "de" now and did not'),
}


@pytest.mark.parametrize("case", BAD)
async def test_a_bad_map_changes_nothing_and_is_reported(engine, tmp_path, case):
    change, text, says = BAD[case]
    files = Files(tmp_path, engine)
    async with living(files) as both:
        above = both.global_
        await until(lambda: serves(above))
        law = above.flow.law
        files.regions["virginia"]["country"] = change.get("country", "us")
        files.write(*change.get("regions", ()), text=text)
        await above.reloader.reload()
        assert above.flow.law is law
        assert status_of(above)["generation"] == 1
        assert says in status_of(above)["trouble"][0]
        assert "farhop_config_rejected" in above.metrics.render().decode()
        assert (await send(both.entry, chat())).status == 200
        files.regions["virginia"]["country"] = "us"
        files.write()
        await above.reloader.reload()
        assert (status_of(above)["trouble"], status_of(above)["generation"]) == ([], 1)


async def test_a_configuration_changes_live_but_for_what_is_named(engine, tmp_path):
    files = Files(tmp_path, engine)
    async with living(files) as both:
        above, below = both.global_, both.regional
        await until(lambda: serves(above))
        files.global_ |= {"routes": [{"policy": "nearest"}], "listen": {"port": 1}, "limits": {"body_bytes_max": 20}}
        files.regional |= {"policy": {"name": "round-robin"}, "queue": {"requests_max": 7}}
        files.regional["replicas"] = [{"url": "http://127.0.0.1:1", "models": ["other"], "name": "two"}]
        files.write()
        await above.reloader.reload()
        await below.reloader.reload()
        assert status_of(above)["awaits_restart"] == ["listen.port"]
        assert above.flow.routes.policies() == {"*/*": "nearest"}
        assert (await send(both.entry, chat())).status == 413
        assert below.flow.policies.status() == {"": "round-robin"}
        assert (below.flow.queue.requests_max, below.flow.config.queue.requests_max) == (7, 7)
        await until(lambda: set(below.flow.replicas.view.by_model) == {"other"})
        files.regional["nonsense"] = 1
        files.write()
        await below.reloader.reload()
        assert "nonsense" in status_of(below)["trouble"][0]
        assert status_of(below)["generation"] == 2


async def test_a_hop_key_is_rotated_without_a_restart(engine, tmp_path, monkeypatch):
    files = Files(tmp_path, engine)
    monkeypatch.setenv("FARHOP_TEST_HOP_2", "y" * 32)
    async with living(files) as both:
        await until(lambda: serves(both.global_))
        keys = {"k1": "env:FARHOP_TEST_HOP", "k2": "env:FARHOP_TEST_HOP_2"}
        files.regional["hop"] = {"keys": keys, "active": "k1"}
        files.global_["hop"] = {"keys": {"k2": keys["k2"]}, "active": "k2"}
        files.write()
        await both.regional.reloader.reload()
        await both.global_.reloader.reload()
        assert (await send(both.entry, chat())).status == 200


async def test_files_are_reloaded_once_they_no_longer_change(engine, tmp_path):
    files = Files(tmp_path, engine)
    async with living(files) as both:
        reloader = both.global_.reloader
        files.global_["log_level"] = "error"
        files.write()
        await reloader.look()
        assert reloader.generation == 1  # it may be written only in part
        await reloader.look()
        assert (reloader.generation, reloader.config.log_level) == (2, "error")
        await reloader.look()
        assert (reloader.generation, dict(reloader.counts)) == (2, {"taken": 1})


async def test_rejected_topology_is_adopted_once_the_law_fits_it(engine, tmp_path):
    files = Files(tmp_path, engine)
    laws = {"models": {"m": {"deny": ["virginia"]}}, "tenants": files.world["tenants"]}
    store = MemoryStore(Random(5), (cluster := MemoryCluster()))
    async with living(files, cluster) as both:
        await until(lambda: serves(both.global_))
        reloader = both.global_.reloader
        await store.open()
        await store.put(LAW_KEY, encode(laws, 2, "ann", "x", "2026-01-01T00:00:00Z"))
        await until(lambda: both.global_.flow.law.epoch == 2)
        files.write("frankfurt", "tokyo")
        await reloader.look()
        await reloader.look()
        assert 'models.m.deny[0]: unknown place "virginia"' in reloader.trouble[0]
        await reloader.look()
        assert reloader.counts["rejected"] == 1  # once for each reason to read it
        await store.put(LAW_KEY, encode({**laws, "models": {}}, 3, "ann", "x", "2026-01-01T00:00:00Z"))
        await until(lambda: both.global_.flow.law.epoch == 3)
        await reloader.look()
        assert (reloader.trouble, set(both.global_.flow.law.topology.regions)) == ((), {"frankfurt", "tokyo"})
    await store.close()


# -- in the machine


def to(under: Law, *routes: RouteConfig) -> Reconfigured:
    flow = worldwide()
    return Reconfigured(
        under, flow.config, {(one.tenant, one.model): one for one in routes}, {"tokyo": Price(1.0, 1.0)}
    )


def test_a_further_attempt_must_be_lawful_by_the_old_and_the_new_map(play) -> None:
    flow = worldwide()
    smaller = law(1, anyone=Rule(allow=("JP",)))
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "london"))
        .on(to(smaller)).expect(Expected(Recall, id="a", attempt=1))
        .on(AttemptRefused("a", 1, outcome.QUEUE_FULL)).expect(sent("a", "tokyo", attempt=2))
        .on(AttemptRefused("a", 2, outcome.QUEUE_FULL)).expect(answered("a", outcome.NO_REGION))
    )  # fmt: skip


def test_requests_under_way_in_a_region_that_left_the_map_are_not_given_up(play) -> None:
    flow = worldwide()
    there = law(1).topology
    smaller = Law(replace(there, regions={name: one for name, one in there.regions.items() if name != "london"}))
    book = play(flow).on(RequestArrived(request("a"))).expect(sent("a", "london"))
    book.on(to(smaller)).expect(Expected(Recall, id="a", attempt=1))
    book.on(ChannelChanged("london", False, None)).expect(timer("a"))
    book.on(RegionKnown("london", None)).expect()
    report_in(flow, ("tokyo", "frankfurt"), 5.0)
    book.at(6.0).on(TimerFired("a")).expect(timer("a"))
    book.at(7.0).on(AttemptBegan("a", 1, 200)).expect()
    book.on(RequestArrived(request("b"))).expect(sent("b", "frankfurt"))


def test_what_a_region_that_left_the_map_said_of_models_bases_binds_no_more(play) -> None:
    """It bound until a restart, though the map is how an operator gets rid of a region that lies."""
    there = law(1).topology
    ruled = replace(there, models={"nobody's": Rule(allow=("atlantis",))})
    lying = replace_struct(instance("london"), lineage={MODEL: frozenset({"nobody's"})})
    honest = replace_struct(instance("tokyo"), lineage={MODEL: frozenset()})
    flow = worldwide(under=Law(ruled), view=seen(lying, honest))
    refused = answered("a", outcome.UNLAWFUL)
    smaller = Law(replace(ruled, regions={name: one for name, one in ruled.regions.items() if name != "london"}))
    (
        play(flow)
        .on(seen(lying, honest)).expect()
        .on(RequestArrived(request("a"))).expect(refused)
        .on(RegionKnown("london", None)).expect()  # it only fell silent
        .on(RequestArrived(request("a"))).expect(refused)
        .on(to(smaller)).expect()
        .on(RequestArrived(request("b"))).expect(sent("b", "tokyo"))
    )  # fmt: skip


def test_operator_overrides_take_precedence_over_a_reloaded_configuration(play) -> None:
    flow = worldwide()
    play(flow).on(RoutesChanged({("", ""): RouteConfig(policy="failover", regions=("tokyo",))})).expect()
    play(flow).on(to(flow.law, RouteConfig(policy="nearest"), RouteConfig(model="m", policy="least-load"))).expect()
    assert flow.routes.policies() == {"*/*": "failover", "*/m": "least-load"}
    play(flow).on(RoutesChanged({})).expect()
    assert flow.routes.policies() == {"*/*": "nearest", "*/m": "least-load"}
