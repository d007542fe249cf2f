"""Routes, biases and pins changed at work: by steps of a watch, and through etcd while requests come."""

from __future__ import annotations

from datetime import UTC, datetime
from random import Random
from typing import Any

import msgspec
import pytest
from inprocess import HOP_KEY, Engine, both, chat, send, topology, until

from farhop.balance.machine import Event
from farhop.store.contract import STEER_PREFIX, Change, ChangeKind, KeyValue, route_key
from farhop.store.documents import overrides
from farhop.store.documents.authored import Authorship, routes_with_author
from farhop.store.documents.overrides import BiasOverride, PinOverride
from farhop_lab.memory_store import MemoryStore
from global_lb.app.overrides import DOCUMENT_LIMIT_BYTES, RoutingOverrides
from global_lb.routing.policy import Bias, OperatorOverrides, OverridesChanged, Pin, RouteConfig
from global_lb.routing.routes import RoutesChanged

KEY = route_key("london")
REGIONS = {"london", "tokyo"}
NEAREST = b'[{"policy": "nearest", "bias_ms": {"tokyo": 5}}, {"tenant": "acme", "foreign_quota": 0.5}]'
READ = RoutesChanged(
    {
        ("", ""): RouteConfig(policy="nearest", bias_ms={"tokyo": 5.0}),
        ("acme", ""): RouteConfig(tenant="acme", foreign_quota=0.5),
    }
)
AT = datetime(2026, 5, 1, tzinfo=UTC)
SAID: dict[str, Any] = {"why": "w", "author": "ann", "at": AT, "for_s": 60.0}
BIAS = BiasOverride(region="tokyo", ms=5.0, **SAID)
PIN = PinOverride(region="tokyo", tenant="acme", strict=True, **SAID)
BIASED = OperatorOverrides({"tokyo": Bias("tokyo", 5.0, "w", "ann", 1060.0)}, {})


class Stage:
    """The watcher, what it told, and its clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.events: list[Event] = []
        self.refused: list[str] = []
        self.overrides = RoutingOverrides(
            MemoryStore(Random(1)), "london", REGIONS, self.events.append, self.refused.append, lambda: self.now
        )

    def routes(self, *changes: Change) -> list[Event]:
        return self._apply(self.overrides.routes_changed, changes)

    def biases_and_pins(self, *changes: Change) -> list[Event]:
        return self._apply(self.overrides.overrides_changed, changes)

    def _apply(self, take: Any, changes: tuple[Change, ...]) -> list[Event]:
        self.events.clear()
        for change in changes:
            take(change)
        return list(self.events)


def put(value: bytes, key: str = KEY) -> Change:
    return Change(ChangeKind.PUT, 2, key, value)


def snapshot(entries: dict[str, bytes]) -> Change:
    return Change(ChangeKind.SNAPSHOT, 1, entries=tuple(KeyValue(key, value, 1) for key, value in entries.items()))


LOST = Change(ChangeKind.LOST, why="gone")


def test_routes_are_read_from_etcd_survive_an_outage_and_end_with_their_key() -> None:
    stage = Stage()
    assert stage.routes(snapshot({})) == []
    assert stage.routes(put(NEAREST), LOST, snapshot({KEY: NEAREST})) == [READ]
    assert stage.routes(Change(ChangeKind.DELETE, 3, KEY)) == [RoutesChanged({})]
    assert stage.routes(put(NEAREST, route_key("london2"))) == []
    assert stage.refused == []


@pytest.mark.parametrize(
    "document",
    [
        b"nearest", b"{}", b'[{"policy": "fastest"}]', b'[{"policy": "nearest", "fill_at": 0.5}]', b"\xff",
        b'[{"tenant": "a"}, {"tenant": "a"}]', b'[{"bias_ms": {"mars": 1}}]', b'[{"foreign_quota": 1.5}]',
        b'[{"policy": "nearest"}, {"tenant": "a", "canary": {"tokyo": 0.7, "london": 0.7}}]',
        b'[{"policy": "failover"}]', b'[{"policy": "weighted", "weights": {"tokyo": 0}}]',
        b'[{"usd_weight_ms": NaN}]', b"[" * 10_000, b" " * DOCUMENT_LIMIT_BYTES + b"[]",
    ],
)  # fmt: skip
def test_absurd_routes_change_nothing_and_are_counted(document: bytes) -> None:
    stage = Stage()
    stage.routes(put(NEAREST))
    assert stage.routes(put(document)) == []
    assert stage.refused == ["routes_malformed"]
    assert stage.routes(put(NEAREST), Change(ChangeKind.DELETE, 3, KEY)) == [RoutesChanged({})]


def test_routes_may_be_signed_and_the_signer_is_shown() -> None:
    stage = Stage()
    at = datetime(2026, 11, 21, tzinfo=UTC)
    document = routes_with_author(msgspec.json.decode(NEAREST), Authorship("ann", "trying", at))
    assert stage.routes(put(document)) == [READ]
    assert stage.overrides.author() == {"author": "ann", "why": "trying", "at": at.isoformat(), "routes": 2}
    assert stage.routes(put(routes_with_author([], Authorship("ann", "done", at))))
    assert (stage.overrides.author() or {})["routes"] == 0
    stage.routes(put(document))
    assert stage.routes(put(b'{"routes": [], "author": " ", "why": "x", "at": "2026-11-21T00:00:00Z"}')) == []
    assert stage.refused == ["routes_malformed"]
    assert stage.overrides.author() is not None, "the last good stands"
    stage.routes(put(NEAREST))
    assert stage.overrides.author() is None
    stage.routes(put(document), Change(ChangeKind.DELETE, 3, KEY))
    assert stage.overrides.author() is None


def test_overrides_come_change_and_go() -> None:
    stage = Stage()
    assert stage.biases_and_pins(snapshot({})) == []
    assert stage.biases_and_pins(put(overrides.encode(BIAS), BIAS.key)) == [OverridesChanged(BIASED)]
    assert stage.biases_and_pins(put(overrides.encode(BIAS), BIAS.key), LOST) == []
    (both_,) = stage.biases_and_pins(put(overrides.encode(PIN), PIN.key))
    assert both_ == OverridesChanged(
        OperatorOverrides(BIASED.biases, {("tenant", "acme"): Pin("tokyo", True, "w", "ann", 1060.0)})
    )
    assert stage.biases_and_pins(snapshot({BIAS.key: overrides.encode(BIAS)})) == [OverridesChanged(BIASED)]
    assert stage.biases_and_pins(Change(ChangeKind.DELETE, 3, BIAS.key)) == [OverridesChanged(OperatorOverrides())]
    assert stage.refused == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (put(b"pin it!", BIAS.key), "steer_malformed"),
        (put(overrides.encode(PIN), BIAS.key), "steer_misplaced"),
        (put(overrides.encode(BIAS), STEER_PREFIX), "steer_misplaced"),
        (
            put(overrides.encode(BiasOverride(region="mars", ms=1.0, **SAID)), overrides.bias_key("mars")),
            "steer_to_unknown_region",
        ),
    ],
)
def test_refused_overrides_are_counted(change: Change, reason: str) -> None:
    stage = Stage()
    stage.biases_and_pins(put(overrides.encode(BIAS), BIAS.key))
    assert stage.biases_and_pins(change) == []
    assert stage.refused == [reason]
    assert len(stage.overrides.status()) == 1


def test_overrides_in_force_are_shown_to_operators() -> None:
    stage = Stage()
    stage.biases_and_pins(put(overrides.encode(BIAS), BIAS.key), put(overrides.encode(PIN), PIN.key))
    stage.now = 1015.0
    end = {"region": "tokyo", "why": "w", "author": "ann", "until": "2026-05-01T00:01:00+00:00", "left_s": 45.0}
    assert stage.overrides.status() == [
        {"action": "bias", "ms": 5.0, **end},
        {"action": "pin", "tenant": "acme", "model": "", "strict": True, **end},
    ]
    stage.now = 1060.0
    assert stage.overrides.status() == []


async def test_a_balancer_is_steered_without_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)

    async def decided() -> dict[str, Any]:
        answer = await send(up.entry, chat())
        record = up.global_.decisions.get(answer.headers["x-farhop-decision"])
        assert record is not None
        return dict(record["reasons"])

    async with Engine().running() as engine, both(engine, topology()) as up:
        flow, store, region = up.global_.flow, up.global_.store, up.global_.config.region
        assert (await decided())["policy"] == "predictive"
        await store.put(route_key(region), b'[{"policy": "waterfall"}]')
        await until(lambda: flow.routes.policies() == {"*/*": "waterfall"})
        word = BiasOverride(region=region, ms=7.0, why="w", author="ann", at=datetime.now(UTC), for_s=60.0)
        pin = PinOverride(region=region, model="m", why="w", author="ann", at=datetime.now(UTC), for_s=60.0)
        for one in (word, pin):
            await store.put(one.key, overrides.encode(one))
        await until(lambda: bool(flow.routes.overrides.biases and flow.routes.overrides.pins))
        reasons = await decided()
        assert (reasons["policy"], reasons["unit"]) == ("waterfall", "ms, those with room first")
        status = up.global_.tier_admin.status()
        assert status["policies"] == {"*/*": "waterfall"}
        assert [(one["policy"], one["answer"], one["egress_spent_usd"]) for one in status["routes"]] == [
            ("waterfall", "proxy", None)
        ]
        assert status["routes_author"] is None
        assert [one["action"] for one in status["operator_overrides"]] == ["bias", "pin"]
        await store.delete(route_key(region))
        await until(lambda: flow.routes.policies() == {"*/*": "predictive"})
        reasons = await decided()
        assert reasons["candidates"][0]["bias_ms"] == 7.0
        assert reasons["notes"][-1] == f"bias in ms: {region} +7"
        await up.at_rest()


async def test_sessions_are_read_as_soon_as_a_route_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    async with Engine().running() as engine, both(engine, topology()) as up:
        flow, region = up.global_.flow, up.global_.config.region
        assert (await send(up.entry, chat(x_session_id="alice"))).status == 200
        assert len(flow.routes.affinity) == 0
        await up.global_.store.put(route_key(region), b'[{"affinity_ms": 50}]')
        await until(flow.routes.want_session)
        for session in ("alice", "bob", "alice"):
            assert (await send(up.entry, chat(x_session_id=session))).status == 200
        assert len(flow.routes.affinity) == 2
        await up.at_rest()
