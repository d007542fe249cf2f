"""The tier listener's own ingress, and the regional tier's pages about itself."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import numpy as np
import pytest
from inprocess import (
    HOP_KEY,
    MODEL,
    Both,
    Engine,
    both,
    chat,
    head,
    regional_config,
    send,
    streaming,
    tenant,
    topology,
    until,
)  # fmt: skip
from msgspec.structs import replace
from worlds import replica, replicas_of

from farhop.balance.machine import LawChanged
from farhop.identity.hop_token import HopClaims, HopSigner, request_line
from farhop.relay.http.listener import PortTakenError
from farhop.store.documents.report import check
from farhop.telemetry.attributes import admit
from farhop_lab.memory_store import MemoryStore
from regional_lb.app.main import RegionalBalancer
from regional_lb.app.serve import PickReasons
from regional_lb.scheduler.pick import Pick, Scored
from regional_lb.scheduler.pick import pick as choose
from regional_lb.scheduler.policy import Need, PolicyConfig, Predictive
from regional_lb.scheduler.policy.round_robin import RoundRobin
from regional_lb.scheduler.split import Assigned
from topology.law import Law

WORLD = topology(tenant("split", models={"weights-70b": {"allow": ["us"]}}, residency={
    "processing": {"allow": ["world"]}, "logging": {"allow": ["jp"]},
}))  # fmt: skip


@pytest.fixture
async def up(engine: Engine) -> AsyncIterator[Both]:
    async with both(engine, WORLD) as running:
        yield running
        await running.at_rest()


POST = (b"POST", b"/v1/chat/completions")
BODY = chat().partition(b"\r\n\r\n")[2]


def token(
    up: Both,
    key: str = HOP_KEY,
    body: bytes = BODY,
    line: tuple[bytes, bytes] = (b"POST", b"/v1/chat/completions"),
    **claims: Any,
) -> str:
    now_ms = up.regional.clock.now() * 1e3
    fields = {
        "audience": "virginia", "entry_region": "tokyo", "issuer": "tokyo/g1", "tenant": "anywhere",
        "lawful": ("virginia", "tokyo"), "epoch": 1, "priority": 0, "deadline_ms": 10_000.0,
        "expires_ms": now_ms + 5_000.0, "decision_id": "d" * 16, "body": hashlib.sha256(body).digest(), **claims,
    }  # fmt: skip
    if claims.pop("unbound", False):
        del fields["unbound"], fields["body"]
    request = request_line(*line, len(body))
    return HopSigner({"k1": key.encode()}, "k1", "tokyo").sign(HopClaims(**fields), request).decode()


async def _ask(up: Both, hop: str | None, **headers: str) -> Any:
    given = {} if hop is None else {"x_farhop_hop": hop}
    return await send(up.tier, chat(key=None, **given, **headers))


async def test_a_token_lets_a_request_in(up: Both, engine: Engine) -> None:
    answer = await _ask(up, token(up))
    assert answer.status == 200
    assert answer.headers["x-farhop-decision"] == "d" * 16  # the decision is that of the tier above
    assert answer.headers["x-farhop-replica"] == "one"
    got, _ = engine.seen[-1]
    assert not [name for name in got if name.startswith("x-farhop-")]
    assert up.regional.flow.accepted_bytes.keys() == {"tokyo/g1"}


@pytest.mark.parametrize("behaviour", ["serve", "error", "vanish", "die"])
async def test_a_replica_s_address_does_not_reach_clients_where_it_has_no_other_name(
    engine: Engine, behaviour: str
) -> None:
    nameless = [{"url": f"http://{engine.address}", "models": [MODEL]}]
    async with both(engine, WORLD, regional={"replicas": nameless}) as up:
        assert list(up.regional.flow.replicas.view.replicas) == [engine.address]
        engine.behaviour = behaviour
        for port in (up.client, up.entry):
            answer = await send(port, chat(body=streaming()))
            assert answer.headers["x-farhop-region"] == "virginia"
            assert engine.address not in repr((answer.headers, answer.body))
            assert engine.address.partition(":")[0] not in repr((answer.headers, answer.body))


async def test_neither_a_token_nor_a_set_of_regions_is_held_for_each_request(up: Both, engine: Engine) -> None:
    engine.behaviour = "wait"
    asked = [asyncio.create_task(_ask(up, token(up))) for _ in range(2)]
    await until(lambda: len(engine.seen) == 2)
    held = list(up.regional.relay.live.values())
    assert not any(b"x-farhop-hop" in one.exchange.head.known for one in held)
    assert held[0].request.lawful is held[1].request.lawful
    engine.release.set()
    await asyncio.gather(*asked)


@pytest.mark.parametrize(
    ("make", "status", "code"),
    [
        (lambda up: None, 401, "hop_token_missing"),
        (lambda up: "", 401, "hop_token_missing"),
        (lambda up: "nonsense", 401, "hop_token_forged"),
        (lambda up: token(up, key="y" * 32), 401, "hop_token_forged"),
        (lambda up: token(up)[:-2], 401, "hop_token_forged"),
        (lambda up: "x" * 5000, 401, "hop_token_forged"),
        (lambda up: token(up, expires_ms=up.regional.clock.now() * 1e3 - 1), 401, "hop_token_expired"),
        (lambda up: token(up, expires_ms=up.global_.clock.now() * 1e3), 401, "hop_token_expired"),
        (lambda up: token(up, audience="tokyo"), 421, "hop_token_misaddressed"),
        (lambda up: token(up, issuer="tokyo/a\x00b"), 401, "hop_token_forged"),
        (lambda up: token(up, issuer="paris/g1"), 401, "hop_token_forged"),
        (lambda up: token(up, entry_region="paris"), 401, "hop_token_forged"),
        (lambda up: token(up, unbound=True), 401, "hop_token_forged"),
        (lambda up: token(up, issuer="tokyo/" + "a" * 300), 401, "hop_token_forged"),
    ],
)
async def test_requests_with_an_invalid_hop_token_are_refused(
    up: Both, engine: Engine, make: Any, status: int, code: str
) -> None:
    answer = await _ask(up, make(up))
    assert (answer.status, answer.code) == (status, code)
    assert answer.headers["x-farhop-outcome"] == code  # so that the tier above knows it was us, not an engine
    assert engine.seen == []


async def test_an_api_key_does_not_replace_a_hop_token(up: Both, engine: Engine) -> None:
    answer = await send(up.tier, chat())
    assert (answer.status, answer.code) == (401, "hop_token_missing")
    assert engine.seen == []


@pytest.mark.parametrize(
    ("claims", "code", "words"),
    [
        ({"lawful": ("tokyo",)}, "unlawful_here", "the hop token, or the law that came before, does not allow"),
        ({"lawful": ()}, "unlawful_here", "the hop token, or the law that came before, does not allow"),
        ({"tenant": "eu-only"}, "unlawful_unread", "allows only eu"),
        ({"tenant": "nobody"}, "unlawful_unread", "not in the topology"),
        ({"narrow": (("jp",),)}, "unlawful_unread", "asked to stay within jp"),
    ],
)
async def test_a_region_refuses_by_its_own_law_whatever_the_hop_token_says(
    up: Both, engine: Engine, claims: dict[str, Any], code: str, words: str
) -> None:
    """Also under the epoch that the token names: another map may be here. No body is read that it keeps out."""
    answer = await _ask(up, token(up, **claims))
    assert (answer.status, answer.code) == (451, code)
    assert words in answer.json["error"]["message"]
    assert engine.seen == []


async def test_the_budget_that_is_left_comes_with_the_token(up: Both, engine: Engine) -> None:
    engine.behaviour = "wait"
    answer = await _ask(up, token(up, deadline_ms=80.0))
    assert (answer.status, answer.code) == (504, "deadline_exceeded")
    spent = await _ask(up, token(up, deadline_ms=0.0))
    assert (spent.status, spent.code) == (504, "deadline_exceeded")


async def test_a_request_that_may_not_be_recorded_here_leaves_no_record(up: Both) -> None:
    assert (await _ask(up, token(up, tenant="split"))).status == 200
    assert len(up.regional.decisions) == 0
    assert (await _ask(up, token(up))).status == 200
    assert len(up.regional.decisions) == 1


async def test_the_law_in_force_decides_which_decisions_are_kept(up: Both) -> None:
    assert (await _ask(up, token(up, tenant="split"))).status == 200
    assert len(up.regional.decisions) == 0
    up.regional.relay.react(LawChanged(Law(dataclasses.replace(topology(tenant("split")), epoch=2))))
    assert (await _ask(up, token(up, tenant="split"))).status == 200
    assert len(up.regional.decisions) == 1
    up.regional.relay.react(LawChanged(Law(dataclasses.replace(WORLD, epoch=3))))
    assert (await _ask(up, token(up, tenant="split"))).status == 200
    assert len(up.regional.decisions) == 0  # nor the answer that was kept before


async def test_an_issuer_that_was_let_in_can_be_reported(up: Both) -> None:
    for issuer in ("tokyo/" + "a" * 250, "tokyo/ü", "tokyo/a b"):
        assert (await _ask(up, token(up, issuer=issuer))).status == 200
    assert up.regional.mesh.reporter is not None
    check(up.regional.mesh.reporter.build())


async def test_models_of_the_tier_listener_are_those_served_here(up: Both) -> None:
    answer = await send(
        up.tier, head("GET", "/v1/models", x_farhop_hop=token(up, line=(b"GET", b"/v1/models"), body=b""))
    )
    assert [model["id"] for model in answer.json["data"]] == [MODEL]


async def test_the_engine_gets_its_own_key_and_never_the_clients(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARHOP_TEST_ENGINE", "sk-engine")
    async with both(engine, WORLD, regional={"engine_key": "env:FARHOP_TEST_ENGINE"}) as up:
        for port in (up.entry, up.client):
            assert (await send(port, chat())).status == 200
            assert engine.seen[-1][0]["authorization"] == "Bearer sk-engine"


async def test_out_of_memory_in_an_answer_takes_its_replica_out_and_is_shown(engine: Engine) -> None:
    replicas = [{"url": f"http://{engine.address}", "models": [MODEL], "name": name} for name in ("one", "two")]
    async with both(engine, WORLD, regional={"replicas": replicas}) as up:
        await until(lambda: all(r["state"] == "up" for r in up.regional.tier_admin.status()["replicas"]))
        engine.behaviour, engine.complaint = "error", "CUDA out of memory. Tried to allocate 2.00 GiB"
        answer = await send(up.client, chat())
        assert (answer.status, answer.json["error"]["message"]) == (500, engine.complaint)  # unchanged from the engine
        hit = answer.headers["x-farhop-replica"]
        status = up.regional.tier_admin.status()
        fields = {replica["replica"]: replica for replica in status["replicas"]}
        assert (fields[hit]["state"], fields[hit]["why"]) == ("down", "an answer said: out of GPU memory")
        assert 3.0 < fields[hit]["until_s"] <= 5.0
        other = fields["two" if hit == "one" else "one"]
        assert (other["state"], other["share"], other["failing_share"]) == ("up", 1.0, 0.0)
        assert status["ejections"] == {"engine_out_of_memory": 1.0}
        assert status["modes"] == {MODEL: "normal"}
        page = up.regional.metrics.render().decode()
        labels = 'region="virginia",tier="regional"'
        for line in (
            f'farhop_attempts_total{{outcome="engine_out_of_memory",{labels.replace(",", f",target=%{hit}%,")}}} 1.0',
            f'farhop_replica_ejections_total{{reason="engine_out_of_memory",{labels}}} 1.0',
            f"farhop_replicas{{{labels.replace(',', ',state=%down%,')}}} 1.0",
            f"farhop_replica_usable_ratio{{{labels.replace(',', f',replica=%{hit}%,')}}} 0.0",
            f'farhop_models_by_mode{{mode="normal",{labels}}} 1.0',
        ):
            assert line.replace("%", '"') in page
        engine.behaviour = "serve"
        assert (await send(up.client, chat())).headers["x-farhop-replica"] == other["replica"]


async def test_metrics_problems_of_a_replica_share_one_log_throttle(up: Both, engine: Engine) -> None:
    (name,) = up.regional.flow.replicas.view.replicas
    for number in range(5):
        engine.page = f"vllm:num_requests_waiting word{number}\nvllm:num_requests_running 0\n"
        await until(lambda word=f"word{number}": word in str(up.regional.watcher.problems(name)))
    said = [key for event, key in up.regional._log.faults if event == "replicas"]
    assert said == [f"{name}: metrics"]


@pytest.mark.parametrize("taken", ["tier", "client", "admin", "control"])
async def test_a_start_that_fails_closes_what_it_opened(engine: Engine, up: Both, taken: str) -> None:
    """Of each port in turn; nothing may be left behind (the test run fails on what is), nor hide why."""
    port = {"tier": up.tier, "client": up.client, "admin": up.regional_admin, "control": _control(up)}[taken]
    config = regional_config(engine, instance="r2", **{taken: {"port": port}})
    balancer = RegionalBalancer(config, WORLD, Random(1), MemoryStore(Random(2)))
    with pytest.raises(PortTakenError, match=rf"{taken}: cannot listen on 127\.0\.0\.1:{port}.*; choose another port"):
        await balancer.open()
    await balancer.close()


def _control(up: Both) -> int:
    assert up.regional.mesh.reporter is not None
    return int(up.regional.mesh.reporter.build().control_address.rpartition(":")[2])


def seen(room: bool) -> Pick:
    """A pick from a field of one: 100 prompt tokens, 36 of them not cached, behind 100 others."""
    speeds, own = np.array([[0.5], [1.0], [19.0]]), np.array([36.0, 12.5, 100.0, 1.0])
    return Pick(RoundRobin(), ("one",), 100.0, 10.0, speeds, own.tobytes(), np.array([room]))


def test_the_reasons_of_a_pick() -> None:
    pick = seen(room=True)
    pick.chosen = pick.ranked[0]
    reasons = PickReasons()
    record = reasons.record(pick)
    assert (record["chosen"], record["candidates"][0]["full"]) == ("one", False)
    assert reasons.attributes(pick)["farhop.reasons"] == ["one 12.5 turns"]
    assert reasons.attributes(pick)["farhop.policy"] == record["policy"] == "round-robin"
    assert (reasons.predicted_hit(pick), record["candidates"][0]["hit_exact"]) == ((64.0, "trie"), False)
    pick.chosen = replace(pick.chosen, exact=True)
    assert reasons.predicted_hit(pick) == (64.0, "exact")
    step_ms = 0.5 * 20.0  # it is at 1 when the request comes
    assert reasons.predicted_ttft_ms(pick) == record["ttft_ms"] == (100.0 + 36.0) * 0.5 + step_ms
    pick.residual_ms = 7.0
    assert reasons.predicted_ttft_ms(pick) == (100.0 + 36.0) * 0.5 + step_ms + 7.0
    pick.residual_ms = -500.0
    assert reasons.predicted_ttft_ms(pick) == pytest.approx(7.8)  # never below a share of the known time
    pick.residual_ms = 0.0
    assert record["prefill"] is None
    assert "farhop.prefill_replica" not in reasons.attributes(pick)
    pick.prefill = Scored("two", 0.0, 0.0, 100.0, 100.0, 20.0, 0.25, 20.0)
    assert reasons.record(pick)["prefill"] == reasons.attributes(pick)["farhop.prefill_replica"] == "two"
    assert reasons.predicted_hit(pick)[0] == 100.0  # all of it, after it was fetched
    assert reasons.predicted_ttft_ms(pick) == (20.0 + 100.0) * 0.25 + step_ms
    nobody = seen(room=False)
    assert reasons.attributes(nobody) == {}
    record = reasons.record(nobody)
    assert (record["chosen"], record["candidates"][0]["full"], record["ttft_ms"]) == (None, True, None)
    assert (reasons.predicted_hit(nobody), reasons.predicted_ttft_ms(nobody)) == ((0.0, "trie"), None)


def test_pick_has_the_terms_of_its_scores_and_explored() -> None:
    rows = replicas_of(replica("r1"), replica("r2", tpot_ms=30.0)).whole
    record = PickReasons().record(choose(Need(256.0, 100.0, 4.0), rows, (), Predictive(), 0.0, Random(1)))
    assert record["explored"] is False
    for one in record["candidates"]:
        assert list(one["terms_ms"]) == ["backlog", "prefill", "decode", "interference", "stall"]
        assert sum(one["terms_ms"].values()) == pytest.approx(one["score"])


def test_the_version_of_a_pick_is_shown_with_why() -> None:
    pick, reasons = seen(room=True), PickReasons()
    pick.chosen = pick.ranked[0]
    assert not {"farhop.version", "farhop.split"} & set(reasons.attributes(pick))
    pick.version, pick.assigned = "v1", Assigned("v2", f"{MODEL} v2", "rule 3")
    found, record = reasons.attributes(pick), reasons.record(pick)
    assert (found["farhop.version"], found["farhop.split"]) == ("v1", "rule 3: v2, fallback")
    assert (record["version"], record["split"]) == ("v1", "rule 3: v2, fallback")
    assert admit(found)[1] == 0


async def test_a_session_comes_through_both_tiers_as_a_hash(up: Both) -> None:
    policies, asked = up.regional.flow.policies, []
    policies.override({"": PolicyConfig(name="session")})
    consider = up.regional.flow.selector.need_of
    up.regional.flow.selector.need_of = lambda request: asked.append(request.session) or consider(request)  # type: ignore[method-assign,func-returns-value]
    for name in ("mine", "mine", "theirs"):
        answer = await send(up.entry, chat(x_session_id=name))
        record = up.regional.decisions.get(answer.headers["x-farhop-decision"])
        assert record is not None
        assert record["reasons"]["policy"] == "session"
        assert "mine" not in str(record)
    assert asked[0] == asked[1] != asked[2]
    assert 0 not in asked


async def test_a_draining_region_finishes_what_it_has(up: Both, engine: Engine) -> None:
    engine.behaviour = "pause"
    asked = asyncio.create_task(send(up.entry, chat(body=streaming())))
    await until(lambda: up.regional.flow.under_way == 1 and up.regional.metrics.in_flight == 1)
    draining = asyncio.create_task(up.regional.listeners.drain())
    await until(lambda: up.regional.listeners.tier_listener.stopping and up.regional.listeners.client_listener.stopping)
    for port in (up.tier, up.client):  # neither takes anything new while the other drains
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", port)
    engine.release.set()
    answer = await asked
    assert answer.body.endswith(b"data: [DONE]\n\n")
    await draining


async def test_connections_and_refusals_of_the_listeners_are_in_the_metrics(up: Both) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", up.client)
    assert (await send(up.tier, b"garbage\r\n\r\n")).status == 400
    assert (await send(up.client, chat())).status == 200
    listeners = up.regional.listeners
    await until(lambda: listeners.client_listener.connections == 1 and not listeners.tier_listener.connections)
    page = up.regional.metrics.render().decode()
    labels = 'region="virginia",tier="regional"'
    for line in (
        f'farhop_connections_refused_total{{reason="malformed_http",{labels}}} 1.0',
        f'farhop_connections{{listener="client",{labels}}} 1.0',
        f'farhop_connections{{listener="tier",{labels}}} 0.0',
        f"farhop_upstream_connections{{{labels}}} 1.0",
        f"farhop_buffered_bytes{{{labels}}} 0.0",
        f"farhop_buffered_bytes_max{{{labels}}} 5.36870912e+08",
    ):
        assert line in page
    writer.close()
    assert await reader.read() == b""
