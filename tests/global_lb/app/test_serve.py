"""What the global tier writes upstream and to clients, and shows an operator."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace as with_
from hashlib import sha256
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from inprocess import HOP_KEY, MODEL, Both, Engine, both, chat, global_config, send, topology, until
from msgspec.structs import replace

from farhop.balance.machine import Address, Forward, Request
from farhop.identity.hop_token import BUDGET_MAX_MS, HopClaims, HopSigner, HopVerifier, is_of, request_line
from farhop.relay.http.listener import PortTakenError
from farhop.service.observability.request_telemetry import CacheUse
from farhop.telemetry import logs
from farhop_lab.memory_store import MemoryStore
from global_lb.app.main import GlobalBalancer
from global_lb.app.serve import DecisionReasons, GlobalTier
from global_lb.fleet.table import Scored
from global_lb.fleet.view import Instance, Region, View
from global_lb.routing.pick import Decision
from topology.law import Law, Verdict
from topology.model import Rule

WORLD = topology()


@pytest.fixture
async def up(engine: Engine) -> AsyncIterator[Both]:
    async with both(engine, WORLD) as running:
        yield running
        await running.at_rest()


class Clock:
    def now(self) -> float:
        return 1000.0

    def wall_ns(self, now: float) -> int:
        return int(now * 1e9)


class Flow:
    """As much of the machine as headers are made of."""

    def __init__(self) -> None:
        self.law = Law(WORLD)
        self.config = global_config()
        instances = tuple(
            Instance(name, "tokyo", Address("10.0.0.1", port), 1, 0.0, offset_ms, False, 0.0, {})
            for name, port, offset_ms in (("a", 1, 5_000.0), ("b", 2, -7_000.0))
        )
        self.regions = SimpleNamespace(view=View({"tokyo": Region("tokyo", 166.0, instances)}))


class Observed:
    attempt_over: Any = None
    concluded: Any = None

    def upstream_context(self, _visit: Any) -> bytes:
        return b"traceparent: x\r\n"


class Passage:
    def __init__(self, **forward: Any) -> None:
        self.body, self.target = b"{}", b""
        head = SimpleNamespace(method=b"POST", target=b"/v1/chat/completions", known={}, get=lambda _name: None)
        self.reasons = None
        self.exchange = SimpleNamespace(head=head)
        self.context = type(
            "RequestContext", (), {"decision_id": "d" * 16, "body_sha256": b"", "charge": None, "given": None}
        )()
        self.request = Request(
            "1", "anywhere", MODEL, 100, 200, (), 1012.0, priority=3, narrow=(("jp", "us"),), key="demo"
        )
        fields = {
            "address": Address("10.0.0.1", 2),
            "promised_ttft_ms": 42.0,
            "lawful": frozenset({"tokyo", "virginia"}),
        }
        self.forward: Any = Forward("1", 1, "tokyo", **{**fields, **forward})


SIGNER = HopSigner({"k1": HOP_KEY.encode()}, "k1", "virginia")


def tier(flow: Flow | None = None) -> GlobalTier:
    log = logs.Throttled(logs.get("test"), 1.0, Clock().now)
    return GlobalTier(Observed(), log, flow=flow or Flow(), signer=SIGNER, instance="virginia/g1", clock=Clock())  # type: ignore[arg-type]


REQUEST = request_line(b"POST", b"/v1/chat/completions", 2)


def claims(written: bytes, audience: str = "tokyo", clock_ms: float = 993_000.0) -> HopClaims:
    line = next(line for line in written.split(b"\r\n") if line.startswith(b"x-farhop-hop: "))
    read = HopVerifier({"k1": HOP_KEY.encode()}, audience).verify(line.partition(b": ")[2], clock_ms, REQUEST)
    assert isinstance(read, HopClaims), read
    return read


def test_the_token_keeps_to_a_later_rule_about_the_name_that_the_region_does_not_know() -> None:
    """Records and hints of the request may be kept within what that rule leaves alone."""
    flow, passage = Flow(), Passage()
    passage.request = replace(passage.request, alias="auto")
    assert claims(tier(flow).upstream_headers(passage)).narrow == (("jp", "us"),)  # type: ignore[arg-type]
    flow.law = Law(with_(WORLD, epoch=2, models={"auto": Rule(("world",), ("eu",))}))
    for _ in range(2):
        assert claims(tier(flow).upstream_headers(passage)).narrow == (("jp", "us"), ("tokyo", "virginia"))  # type: ignore[arg-type]


def test_hop_token_has_all_that_the_region_needs() -> None:
    written = tier().upstream_headers(Passage())  # type: ignore[arg-type]
    assert written.endswith(b"traceparent: x\r\n")
    found = claims(written)
    assert (found.audience, found.entry_region, found.issuer) == ("tokyo", "virginia", "virginia/g1")
    assert (found.tenant, found.lawful, found.epoch, found.priority) == ("anywhere", ("tokyo", "virginia"), 1, 3)
    assert (found.deadline_ms, found.decision_id, found.narrow) == (12_000.0, "d" * 16, (("jp", "us"),))
    assert (found.promised_ttft_ms, found.waited_ms) == (42.0, 0.0)
    assert claims(tier().upstream_headers(Passage(waited_s=1.5))).waited_ms == 1500.0  # type: ignore[arg-type]
    assert found.ttft_ms is None
    for by_s, left_ms in ((1000.25, 250.0), (999.0, 0.0)):  # it is 1000.0 here
        assert claims(tier().upstream_headers(Passage(first_token_by=by_s))).ttft_ms == left_ms  # type: ignore[arg-type]
    # Stamped by the clock of instance b, which is 7 s behind ours; it lives for 10 s.
    assert found.expires_ms == 1_000_000.0 - 7_000.0 + 10_000.0


def read(tier_: GlobalTier, passage: Passage) -> tuple[HopClaims, Any]:
    """What a region of this build reads of the token, and the body's mac in it, if it has one."""
    line = next(line for line in tier_.upstream_headers(passage).split(b"\r\n") if line.startswith(b"x-farhop-hop: "))  # type: ignore[arg-type]
    request = request_line(b"POST", passage.target or b"/v1/chat/completions", len(passage.body))
    found = HopVerifier({"k1": HOP_KEY.encode()}, "tokyo").admit(line.partition(b": ")[2], 993_000.0, request)
    assert isinstance(found, tuple), found
    return found


def reporting(*versions: tuple[int, int]) -> GlobalTier:
    """Over instances of Tokyo, each at this port, that read these versions of the hop token."""
    instances = tuple(
        Instance(f"i{n}", "tokyo", Address("10.0.0.1", port), 1, 0.0, -7_000.0, False, 0.0, {}, hop_version=version)
        for n, (port, version) in enumerate(versions)
    )
    flow = Flow()
    flow.regions = SimpleNamespace(view=View({"tokyo": Region("tokyo", 166.0, instances)}))  # type: ignore[assignment]
    return tier(flow)


def test_a_region_that_reads_it_gets_the_bodys_mac_and_any_other_its_hash() -> None:
    found, mac = read(reporting((1, 0), (2, 3)), Passage())
    assert found.body == b""
    assert is_of(mac, b"{}")
    assert not is_of(mac, b"[]")
    for older in (reporting((1, 3), (2, 0)), reporting((2, 2)), reporting((2, 3), (2, 0)), reporting()):
        passage = Passage(address=Address("10.0.0.1", 2))
        assert read(older, passage) == (replace(read(older, passage)[0], body=sha256(b"{}").digest()), None)
    mutual = reporting((2, 3))
    mutual.resign(SIGNER, lambda _region: True)
    found, mac = read(mutual, Passage())
    assert (found.body, mac) == (b"", None), "mutual TLS keeps the body"


def test_each_attempt_is_bound_to_what_it_sends() -> None:
    sends, passage = reporting((2, 3)), Passage()
    passage.context.body_sha256 = sha256(b"what came").digest()
    assert is_of(read(sends, passage)[1], b"{}")
    passage.body, passage.target, passage.progress = b'{"goes":"on"}', b"/v1/completions", None  # type: ignore[attr-defined]
    assert is_of(read(sends, passage)[1], b'{"goes":"on"}')


def test_a_requested_version_is_passed_on_to_the_region() -> None:
    passage = Passage()
    assert b"x-farhop-version" not in tier().upstream_headers(passage)  # type: ignore[arg-type]
    passage.request = replace(passage.request, version="v2")
    assert b"\r\nx-farhop-version: v2\r\n" in tier().upstream_headers(passage)  # type: ignore[arg-type]


def test_each_instance_gets_an_expiry_in_its_own_clock() -> None:
    first = claims(tier().upstream_headers(Passage(address=Address("10.0.0.1", 1))), clock_ms=1_005_000.0)  # type: ignore[arg-type]
    assert first.expires_ms == 1_000_000.0 + 5_000.0 + 10_000.0


def test_a_promise_beyond_all_bounds_does_not_make_the_token_a_forgery() -> None:
    """A region whose wait is at its limit would else answer 401, and the client be told that it was forged."""
    found = claims(tier().upstream_headers(Passage(promised_ttft_ms=BUDGET_MAX_MS * 2)))  # type: ignore[arg-type]
    assert found.promised_ttft_ms == BUDGET_MAX_MS
    assert claims(tier().upstream_headers(Passage(promised_ttft_ms=None))).promised_ttft_ms is None  # type: ignore[arg-type]


def test_a_deadline_that_passed_is_zero_and_not_less() -> None:
    passage = Passage()
    passage.request = Request("1", "anywhere", MODEL, 100, 200, (), 999.0)
    assert claims(tier().upstream_headers(passage)).deadline_ms == 0.0  # type: ignore[arg-type]


def test_the_client_learns_where_and_under_which_decision() -> None:
    passage = Passage()
    assert tier().answer_headers(passage) == b"x-farhop-region: tokyo\r\nx-farhop-decision: dddddddddddddddd\r\n"  # type: ignore[arg-type]
    passage.forward = None
    assert tier().answer_headers(passage) == b"x-farhop-decision: dddddddddddddddd\r\n"  # type: ignore[arg-type]
    passage.context.given = CacheUse("shared", region="frankfurt")
    assert tier().answer_headers(passage) == (  # type: ignore[arg-type]
        b"x-farhop-region: frankfurt\r\nx-farhop-cache: hit\r\nx-farhop-decision: dddddddddddddddd\r\n"
    )


def test_the_reasons_of_a_decision() -> None:
    names = Scored.__struct_fields__
    scored = Scored(**{**dict.fromkeys(names, 1.0), "region": "tokyo", "score": 12.5, "ttft_ms": 9.5})
    verdict = Verdict(frozenset({"tokyo"}), {"virginia": "tenant x allows only jp"}, 7)
    decision = Decision(verdict, {"tokyo": "suspect: no recent report"}, (scored,), scored)
    reasons = DecisionReasons("virginia")
    record = reasons.record(decision)
    assert (record["chosen"], record["law_epoch"], record["entry_region"]) == ("tokyo", 7, "virginia")
    assert record["unlawful"] == {"virginia": "tenant x allows only jp"}
    assert record["not_serving"] == {"tokyo": "suspect: no recent report"}
    assert reasons.attributes(decision)["farhop.region"] == "tokyo"
    assert reasons.predicted_ttft_ms(decision) == 9.5
    assert reasons.predicted_hit(decision) == (scored.hit_tokens, "trie")
    nowhere = Decision(verdict, {}, (), None)
    assert "farhop.region" not in reasons.attributes(nowhere)
    assert (reasons.predicted_hit(nowhere), reasons.predicted_ttft_ms(nowhere)) == ((0.0, "trie"), None)


async def test_sent_bytes_are_acknowledged_under_the_balancers_name(up: Both) -> None:
    assert (await send(up.entry, chat())).status == 200
    accepted = up.regional.flow.accepted_bytes
    assert accepted.keys() == {"virginia/g1"}
    (instance,) = up.global_.flow.regions.view.regions["virginia"].instances
    await until(
        lambda: up.global_.flow.regions.view.regions["virginia"].instances[0].accepted == accepted["virginia/g1"]
    )
    assert up.global_.flow.regions.load_of(instance).outstanding_bytes == 0.0


@pytest.mark.parametrize("taken", ["listen", "admin"])
async def test_a_start_that_fails_closes_what_it_opened(up: Both, taken: str) -> None:
    config = global_config(instance="g2", **{taken: {"port": up.entry}})
    balancer = GlobalBalancer(config, WORLD, Random(1), MemoryStore(Random(2)))
    with pytest.raises(PortTakenError, match=f"{taken}: cannot listen on 127.0.0.1:{up.entry}"):
        await balancer.open()
    await balancer.close()


async def test_the_client_listener_does_not_hear_of_hop_outcomes(up: Both) -> None:
    """What a tier says to a tier stays between them."""
    answer = await send(up.entry, chat(key="sk-farhop-eu-only"))
    assert answer.status == 503
    assert "x-farhop-outcome" not in answer.headers
    assert answer.headers["retry-after"]
