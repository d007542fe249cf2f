"""Traffic split between versions: the machine's ways with it, and a request's way through both tiers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from random import Random
from typing import Any

import msgspec
import pytest
from inprocess import HOP_KEY, Both, Engine, both, chat, send, streaming, tenant, topology, until
from inprocess import MODEL as SERVED
from playbook import answered, held, sent
from typer.testing import CliRunner
from worlds import MODEL, SEED, regional, replica, request, text

from farhop.balance import outcome
from farhop.balance.machine import AttemptBegan, AttemptEnded, AttemptFailed, HeaderMatch, RequestArrived
from farhop.balance.prefix.chain import chain
from farhop.service.admin.server import Question
from farhop.service.process.tasks import Tasks
from farhop.store.contract import split_key
from farhop.store.etcd import EtcdStore
from farhop.store.etcd_settings import EtcdSettings
from farhop_cli.main import app
from farhop_lab.world.etcd import EmbeddedEtcd
from regional_lb.fleet.view import ReplicaProbed, variant_of
from regional_lb.scheduler.flow import RegionalFlow
from regional_lb.scheduler.pick import Pick
from regional_lb.scheduler.split import RuleConfig, SplitConfig, SplitsChanged

V1, V2 = variant_of(MODEL, "v1"), variant_of(MODEL, "v2")
CANARY = HeaderMatch("header", "x-canary", "yes")


def terms(**picked_by: Any) -> SplitsChanged:
    return SplitsChanged({MODEL: SplitConfig(**picked_by)})


def split(*replicas: Any, **picked_by: Any) -> RegionalFlow:
    """London with these replicas, split so from the beginning."""
    flow = regional(*(replicas or (replica("b", version="v1", slots=1), replica("g", version="v2", slots=1))))
    flow.handle(terms(**picked_by), 0.0)
    return flow


def picked_by(version: str, why: str) -> Any:
    """A Forward's reasons: served in this version, for that reason."""
    return lambda choice: (choice.version, choice.split) == (version, why)


def ended(name: str, attempt: int = 1) -> AttemptEnded:
    return AttemptEnded(name, attempt, 200, None)


# -- the machine


def test_a_flip_moves_waiting_requests_and_leaves_those_under_way(play) -> None:
    flow = split(weights={"v1": 100.0, "v2": 0.0})
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "b", reasons=picked_by("v1", "request")))
        .at(1.0).on(RequestArrived(request("x"))).expect(held("x"))  # green is idle, and not for it
        .at(1.1).on(RequestArrived(request("y"))).expect(held("y"))
        .at(2.0).on(terms(weights={"v1": 0.0, "v2": 100.0})).expect(sent("x", "g", reasons=picked_by("v2", "request")))
        .at(3.0).on(AttemptBegan("a", 1, 200)).expect()
        .at(4.0).on(ended("a")).expect()  # blue has room now, and gets nothing
        .at(5.0).on(ended("x")).expect(sent("y", "g"))
        .at(6.0).on(ended("y")).expect()
    )  # fmt: skip
    assert (flow.under_way, len(flow.queue), len(flow.replicas.ledger)) == (0, 0, 0)


def test_a_request_that_failed_before_its_first_byte_follows_the_flip(play) -> None:
    flow = split(weights={"v1": 1.0})
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "b"))
        .at(1.0).on(terms(weights={"v2": 1.0})).expect()
        .at(2.0).on(AttemptFailed("a", 1, outcome.DIED_BEFORE_START)).expect(sent("a", "g", attempt=2))
    )  # fmt: skip


def test_after_a_split_ends_waiting_requests_go_to_any_version(play) -> None:
    flow = split(weights={"v1": 1.0})
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "b"))
        .on(RequestArrived(request("x"))).expect(held("x"))
        .at(1.0).on(SplitsChanged({})).expect(sent("x", "g", reasons=picked_by("v2", "")))
    )  # fmt: skip


def test_requests_for_different_versions_do_not_wait_for_one_another(play) -> None:
    flow = split(rules=(RuleConfig(version="v2", header={"name": "x-canary", "value": "yes"}),), weights={"v1": 1.0})
    canary = {"header_matches": (CANARY,)}
    (
        play(flow)
        .on(RequestArrived(request("a"))).expect(sent("a", "b"))
        .on(RequestArrived(request("b"))).expect(held("b"))
        .on(RequestArrived(request("c", **canary))).expect(sent("c", "g", reasons=picked_by("v2", "rule")))
        .on(RequestArrived(request("d", **canary))).expect(held("d"))
        .on(ended("a")).expect(sent("b", "b"))
        .on(RequestArrived(request("e"))).expect(held("e"))
        .on(ended("c")).expect(sent("d", "g"))
        .on(ended("d")).expect()
        .on(RequestArrived(request("f", **canary))).expect(sent("f", "g"))
        .on(ended("b")).expect(sent("e", "b"))
    )  # fmt: skip


def test_while_a_version_has_no_replica_another_serves_unless_fallback_is_off(play) -> None:
    down = [ReplicaProbed("g", False)] * 3
    flow = split(weights={"v2": 1.0})
    book = play(flow)
    for event in down:
        book.on(event).expect()
    book.on(RequestArrived(request("a"))).expect(sent("a", "b", reasons=picked_by("v1", "fallback")))
    book.on(RequestArrived(request("b"))).expect(held("b"))
    book.on(ReplicaProbed("g", True)).expect().on(ReplicaProbed("g", True)).expect(sent("b", "g"))

    flow = split(weights={"v2": 1.0}, fallback=False)
    book = play(flow)
    for event in down:
        book.on(event).expect()
    nobody = answered("a", outcome.NO_REPLICA, detail="no replica of version v2 of this model is healthy")
    book.on(RequestArrived(request("a"))).expect(nobody)


def test_a_request_waiting_for_a_version_that_goes_down_is_served_or_answered(play) -> None:
    down = ReplicaProbed("g", False)
    busy = (RequestArrived(request("a")), RequestArrived(request("b")))
    book = play(split(weights={"v2": 1.0}))
    book.on(busy[0]).expect(sent("a", "g")).on(busy[1]).expect(held("b")).on(AttemptBegan("a", 1, 200)).expect()
    book.on(down).expect().on(down).expect().on(down).expect(sent("b", "b", reasons=picked_by("v1", "fallback")))

    book = play(split(weights={"v2": 1.0}, fallback=False))
    book.on(busy[0]).expect(sent("a", "g")).on(busy[1]).expect(held("b")).on(AttemptBegan("a", 1, 200)).expect()
    book.on(down).expect().on(down).expect().on(down).expect(answered("b", outcome.NO_REPLICA))


def test_after_a_failure_another_version_is_better_than_the_same_replica_again(play) -> None:
    failed = AttemptFailed("a", 1, outcome.DIED_BEFORE_START)
    book = play(split(weights={"v2": 1.0}))
    book.on(RequestArrived(request("a"))).expect(sent("a", "g"))
    book.on(failed).expect(sent("a", "b", reasons=picked_by("v1", "fallback")))
    roomy = (replica("b", version="v1"), replica("g", version="v2"))  # failures continue to count for a while
    book = play(split(*roomy, weights={"v2": 1.0}, fallback=False))
    book.on(RequestArrived(request("a"))).expect(sent("a", "g")).on(failed).expect(sent("a", "g", attempt=2))


# -- a conversation without a session stays where its earlier turns are


def turn(name: str, n_bytes: int, **fields: Any) -> Any:
    """A turn of alice's conversation: each begins with all that was said before."""
    return request(name, n_bytes, prefix="alice", **fields)


def served(flow: RegionalFlow, one: Any) -> Pick:
    """Let a request be served at once; the pick."""
    forward = next(c for c in flow.handle(RequestArrived(one), 0.0) if hasattr(c, "target"))
    flow.handle(AttemptBegan(one.id, 1, 200), 0.0)
    flow.handle(ended(one.id), 0.0)
    return forward.reasons  # type: ignore[no-any-return]


def begun(name: str, weights: dict[str, float]) -> RegionalFlow:
    """Two versions, and alice's first turn on v2."""
    flow = split(replica("b", version="v1"), replica("g", version="v2"), weights={"v2": 1.0})
    assert served(flow, turn(name, 2048)).version == "v2"
    flow.handle(terms(weights=weights), 0.0)
    return flow


def test_a_conversation_stays_with_the_version_that_holds_it() -> None:
    flow = begun("a", {"v1": 999.0, "v2": 1.0})
    for n, n_bytes in enumerate((3000, 4500, 8000)):
        pick = served(flow, turn(f"t{n}", n_bytes))
        assert (pick.version, pick.split) == ("v2", "kept")
    assert served(flow, turn("far", 40_000)).version == "v1"  # less than half of it is cached
    assert served(flow, request("other", 4096)).version == "v1"


def test_a_version_of_weight_zero_or_without_stickiness_keeps_no_session() -> None:
    flow = begun("a", {"v1": 1.0, "v2": 0.0})
    assert served(flow, turn("b", 4096)).version == "v1"
    flow = begun("a", {"v1": 1.0, "v2": 1.0})
    flow.handle(terms(weights={"v1": 999.0, "v2": 1.0}, sticky="none"), 0.0)
    assert served(flow, turn("b", 4096)).version == "v1"


def test_a_prefix_cached_by_both_versions_keeps_no_session() -> None:
    flow = begun("a", {"v1": 1.0})
    assert served(flow, turn("again", 2048)).version == "v1"
    flow.handle(terms(weights={"v1": 999.0, "v2": 1.0}), 0.0)
    assert served(flow, turn("b", 4000)).split == "request"


@pytest.mark.parametrize("own_bytes", [(100, 900), (1100, 1500), (100, 1500)])  # a block there is 1 KiB
def test_a_long_beginning_that_many_share_does_not_starve_the_canary(own_bytes: tuple[int, int]) -> None:
    """Else the first version to see a system prompt would keep everybody who sends it."""
    flow = split(replica("b", version="v1"), replica("g", version="v2"), weights={"v1": 70.0, "v2": 30.0})
    system, rng = text("system", 4096), Random(3)
    versions = []
    for n in range(200):
        body = system + text(f"user {n} asks", rng.randrange(*own_bytes))
        one = request(f"q{n}", len(body), chain=chain(body, SEED))
        versions.append(served(flow, one).version)
    assert 40 <= versions.count("v2") <= 80  # of 200, 60 by weight; 20 either way are 3 standard deviations


def test_session_keeps_its_version_whatever_is_cached() -> None:
    flow = begun("a", {"v1": 1.0, "v2": 1.0})
    picks = [served(flow, turn(f"s{n}", 3000, session=n + 1)) for n in range(12)]
    assert {pick.version for pick in picks} == {"v1", "v2"}
    assert {pick.split for pick in picks} == {"session"}


# -- what is told of the region


def test_a_canary_that_is_full_does_not_make_the_region_look_full() -> None:
    flow = split(
        weights={"v1": 95.0, "v2": 5.0}, rules=(RuleConfig(version="v2", header={"name": "x-canary", "value": "yes"}),)
    )
    for n in range(3):
        flow.handle(RequestArrived(request(f"c{n}", header_matches=(CANARY,))), 0.0)
    assert (flow.queue.waiting(V2), flow.wait_estimate.queued(MODEL)) == (2, 2)
    assert flow.foreign_admission.open_share(MODEL, 0.0) == pytest.approx(0.95)
    assert flow.wait_estimate.wait_ms(V1, 0.0) == 0.0
    canary_ms = flow.wait_estimate.wait_ms(V2, 0.0)
    assert canary_ms > 0.0
    assert flow.wait_estimate.wait_ms(MODEL, 0.0) == pytest.approx(0.05 * canary_ms)
    foreign = request("g", entry_region="tokyo", promised_ttft_ms=1000.0)
    need = flow.selector.need_of(foreign)
    assert flow.foreign_admission.turned_away(foreign, need, 0.0, V2) is not None
    assert flow.foreign_admission.turned_away(foreign, need, 0.0, V1) is None


# -- both tiers, on real sockets

WORLD = topology(tenant("acme"))
RULES = [
    {"header": {"name": "X-Canary", "value": "yes"}, "version": "v2"},
    {"cookie": {"name": "ab", "value": "b"}, "version": "v2"},
    {"tenant": "acme", "version": "v2"},
]


@pytest.fixture
async def engines(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Engine, Engine]]:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    async with Engine().running() as one, Engine().running() as two:
        yield one, two


def configured(engines: tuple[Engine, Engine], **split: Any) -> dict[str, Any]:
    return {
        "replicas": [
            {"url": f"http://{engine.address}", "models": [SERVED], "name": f"r{n}", "version": f"v{n}"}
            for n, engine in enumerate(engines, 1)
        ],
        "splits": {SERVED: split} if split else {},
    }


@pytest.fixture
async def up(engines: tuple[Engine, Engine]) -> AsyncIterator[Both]:
    found = configured(engines, rules=RULES, weights={"v1": 1, "v2": 0}, pinning=True)
    async with both(engines[0], WORLD, regional=found) as running:
        flow = running.regional.flow
        await until(
            lambda: all(h.read(running.regional.clock.now()).state == "up" for h in flow.replicas.health.values())
        )
        yield running
        await running.at_rest()


async def version(port: int, **headers: str) -> str:
    answer = await send(port, chat(**headers))
    assert answer.status == 200
    return answer.headers["x-farhop-version"]


async def test_headers_cookies_and_pins_count_through_both_tiers(up: Both, engines: tuple[Engine, Engine]) -> None:
    for port in (up.entry, up.client):
        assert await version(port) == "v1"
        assert await version(port, x_canary="yes") == "v2"
        assert await version(port, x_canary="no") == "v1"
        assert await version(port, cookie="a=1; ab=b") == "v2"
        assert await version(port, x_farhop_version="v2") == "v2"
        assert await version(port, x_farhop_version="v1", x_canary="yes") == "v1"
        assert await version(port, x_farhop_version="v9", x_canary="yes") == "v2"
        assert await version(port, x_farhop_version="no such thing") == "v1"
        assert (await send(port, chat("sk-farhop-acme"))).headers["x-farhop-version"] == "v2"
    seen = [head for engine in engines for head, _ in engine.seen]
    assert len(seen) == 18
    assert not [name for head in seen for name in head if name.startswith("x-farhop-")]


async def test_records_metrics_spans_and_status_show_version_and_reason(up: Both) -> None:
    answer = await send(up.entry, chat(x_canary="yes", body=streaming()))
    record = up.regional.decisions.get(answer.headers["x-farhop-decision"])
    assert record is not None
    assert (record["reasons"]["version"], record["reasons"]["split"]) == ("v2", "rule 1: v2")
    assert [one["replica"] for one in record["reasons"]["candidates"]] == ["r2"]
    await version(up.entry, x_farhop_version="v1")
    await up.at_rest()
    page = up.regional.metrics.render().decode()
    labels = 'region="virginia"'
    for line in (
        f'farhop_version_requests_total{{code="2xx",{labels},split="rule",tier="regional",version="v2"}} 1.0',
        f'farhop_version_requests_total{{code="2xx",{labels},split="pinned",tier="regional",version="v1"}} 1.0',
        f'farhop_version_ttft_seconds_count{{{labels},tier="regional",version="v2"}} 1.0',
    ):
        assert line in page
    status = up.regional.tier_admin.status()
    assert status["splits"][SERVED]["weights"] == {"v1": 1.0, "v2": 0.0}
    assert status["splits"][SERVED]["unserved"] == []
    assert [one["version"] for one in status["replicas"]] == ["v1", "v2"]


async def test_explain_shows_the_version_and_does_not_take_a_version_for_a_model(up: Both) -> None:
    def explained(model: str, tenant: str) -> Any:
        body = msgspec.json.encode({"model": model, "messages": [{"role": "user", "content": "hello"}]})
        return up.regional.tier_admin.explain(up.regional.tier_admin.compose(Question(msgspec.Raw(body), tenant)))[
            "reasons"
        ]

    assert (explained(SERVED, "acme")["version"], explained(SERVED, "acme")["split"]) == ("v2", "rule 3: v2")
    assert explained(SERVED, "anywhere")["split"] == "request: v1"
    assert explained(f"{SERVED} v1", "anywhere") is None


async def test_cookie_values_are_recorded_nowhere(up: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    need_of = up.regional.flow.selector.need_of
    monkeypatch.setattr(up.regional.flow.selector, "need_of", lambda one: asked.append(one) or need_of(one))
    answer = await send(up.entry, chat(cookie="ab=secret; other=b", x_canary="mine"))
    record = up.regional.decisions.get(answer.headers["x-farhop-decision"])
    assert "secret" not in str(record) + str(asked)
    assert [one.header_matches for one in asked] == [()]


async def test_headers_are_not_read_without_a_split_and_the_version_is_shown(engines: tuple[Engine, Engine]) -> None:
    async with both(engines[0], WORLD, regional=configured(engines)) as up:
        asked = []
        need_of = up.regional.flow.selector.need_of
        up.regional.flow.selector.need_of = lambda one: asked.append(one) or need_of(one)  # type: ignore[method-assign,func-returns-value]
        assert await version(up.entry, x_farhop_version="v2", x_session_id="s", cookie="ab=b") in ("v1", "v2")
        assert [(one.version, one.header_matches, one.session) for one in asked] == [("", (), 0)]
        await up.at_rest()


async def test_a_live_etcd_flips_a_region(monkeypatch: pytest.MonkeyPatch, engines: tuple[Engine, Engine]) -> None:
    """By the command, the balancer's own client and a real etcd: flipped, nonsense ignored, given back."""
    async with AsyncExitStack() as stack:
        etcd = await stack.enter_async_context(EmbeddedEtcd())
        found = configured(engines, weights={"v1": 1})
        up = await stack.enter_async_context(both(engines[0], WORLD, regional=found))
        store = EtcdStore(EtcdSettings((etcd.endpoint,)), Random(1))
        stack.push_async_callback(store.close)
        await store.open()
        balancer = up.regional
        _, followed, *_ = balancer.overrides
        monkeypatch.setattr(followed, "_store", store)
        tasks = Tasks()
        stack.push_async_callback(tasks.close)
        tasks.start(followed.follow(), "watch a real etcd")
        assert await version(up.entry) == "v1"
        key = split_key("virginia")
        command = ["split", "set", "virginia", "--etcd", etcd.endpoint, "--model", SERVED, "--weights", "v1=0,v2=100"]
        result = await asyncio.to_thread(CliRunner().invoke, app(), [*command, "--why", "flip", "--by", "ann"])
        assert (result.exit_code, result.stderr) == (0, "")
        await until(lambda: balancer.flow.splits.of(SERVED).shares == {"v2": 1.0})
        assert balancer.tier_admin.status()["overrides"]["splits"]["why"] == "flip"
        assert await version(up.entry) == "v2"
        await store.put(key, msgspec.json.encode({SERVED: {"weights": {"v1": 1, "v2": "many"}}}))
        await until(lambda: b'reason="splits_malformed"' in balancer.metrics.render())
        assert await version(up.entry) == "v2"
        await store.delete(key)
        await until(lambda: balancer.flow.splits.of(SERVED).shares == {"v1": 1.0})
        assert await version(up.entry) == "v1"
        await up.at_rest()
