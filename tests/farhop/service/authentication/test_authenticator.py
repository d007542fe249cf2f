"""Authentication by API key, on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inprocess import MODEL, Both, Engine, both, chat, head, send, tenant, topology

from farhop.balance.model_facts import ModelFacts
from farhop.identity.hop_token import HopClaims
from farhop.relay.formats.prompt import Preferences
from farhop.relay.http.head import Head
from farhop.relay.http.head import read as read_head
from farhop.service.authentication.authenticator import (
    Caller,
    GatewayAuthenticator,
    KeyAuthenticator,
    hint_scope,
    narrowed,
    recorded,
)
from regional_lb.app.serve import HopAuthenticator
from topology.law import Law, Scope

LIMITED = "weights-70b"


def under(law: Law) -> Any:
    return SimpleNamespace(law=law)


def world():  # type: ignore[no-untyped-def]
    rule = {"allow": ["jp"]}
    return topology(
        tenant("nowhere-near", residency={"processing": {"allow": ["world"]}, "entry": {"allow": ["eu"]}}),
        tenant("asia-first", residency={"processing": {"allow": ["world"]}, "entry": {"allow": ["jp", "de"]}}),
        tenant("split", models={LIMITED: rule}),
        entries={"frankfurt": []},
    )


@pytest.fixture
async def up() -> AsyncIterator[Both]:
    async with Engine().running() as engine, both(engine, world()) as running:
        yield running
        await running.at_rest()


@pytest.mark.parametrize(
    ("authorization", "code"),
    [
        (None, "missing_key"),
        ("Bearer", "missing_key"),
        ("Basic sk-farhop-anywhere", "missing_key"),
        ("sk-farhop-anywhere", "missing_key"),
        ("Bearer sk-farhop-anywhere extra", "missing_key"),
        ("Bearer " + "x" * 600, "unknown_key"),
        ("Bearer sk-farhop-nobody", "unknown_key"),
        ("Bearer sk-farhop-anywhere2", "unknown_key"),
    ],
)
async def test_a_request_without_a_key_is_refused_in_openai_s_format(
    up: Both, authorization: str | None, code: str
) -> None:
    for port in (up.entry, up.client):
        given = {} if authorization is None else {"authorization": authorization}
        answer = await send(port, chat(key=None, **given))
        assert (answer.status, answer.code) == (401, code)
        assert answer.json["error"]["type"] == "authentication_error"
        assert answer.headers["www-authenticate"] == "Bearer"
        assert b"nobody" not in answer.body
        assert ("redirected the client here" in answer.json["error"]["message"]) is (code == "missing_key")


async def test_the_scheme_is_of_any_case(up: Both) -> None:
    assert (await send(up.entry, chat(key=None, authorization="bEaReR sk-farhop-anywhere"))).status == 200


async def test_an_entry_that_may_not_read_redirects_with_the_body_unread(up: Both) -> None:
    """Only the head is sent: an answer that waited for the body would never come."""
    for port in (up.entry, up.client):
        for path in ("/v1/chat/completions", "/v1/chat/completions?x=1&y=%20"):
            answer = await send(
                port, head("POST", path, authorization="Bearer sk-farhop-japan-only", content_length="100000")
            )
            assert answer.status == 307
            assert answer.headers["location"] == f"http://127.0.0.1:8300{path}"
            assert answer.code == "entry_forbidden"
            assert "http://127.0.0.1:8300" in answer.json["error"]["message"]


async def test_an_entry_that_has_no_address_is_passed_over(up: Both) -> None:
    """asia-first may enter in Tokyo and Frankfurt; Frankfurt is nearer to Virginia but has no entry here."""
    answer = await send(up.entry, chat(key="sk-farhop-asia-first"))
    assert (answer.status, answer.headers["location"]) == (307, "http://127.0.0.1:8300/v1/chat/completions")


def test_the_nearest_lawful_entry_is_named() -> None:
    """From Tokyo, Virginia is nearer than Frankfurt."""
    residency = {"processing": {"allow": ["world"]}, "entry": {"allow": ["de", "us"]}}
    near = topology(tenant("elsewhere", residency=residency))
    authenticator = KeyAuthenticator("tokyo", under(Law(near)), lambda _regions: {}, 60.0)
    answer = authenticator.entry_refusal("elsewhere", b"/x")
    assert answer is not None
    assert b"location: http://127.0.0.1:8100/x\r\n" in answer.extra


async def test_where_no_entry_is_known_the_law_is_the_answer(up: Both) -> None:
    answer = await send(up.entry, chat(key="sk-farhop-nowhere-near"))
    assert (answer.status, answer.code) == (451, "entry_forbidden")
    assert "location" not in answer.headers
    assert "entry allows only eu" in answer.json["error"]["message"]


async def test_the_allow_header_narrows_the_lawful_regions_and_never_widens_them(up: Both) -> None:
    assert (await send(up.entry, chat(x_farhop_allow="us, jp"))).status == 200
    nowhere = await send(up.entry, chat(x_farhop_allow="atlantis"))
    assert (nowhere.status, nowhere.code) == (451, "no_lawful_region")
    wider = await send(up.entry, chat(key="sk-farhop-eu-only", x_farhop_allow="world,us"))
    assert wider.status == 503  # Frankfurt is lawful and does not serve; Virginia serves and is not lawful
    outside = await send(up.entry, chat(key="sk-farhop-eu-only", x_farhop_allow="us"))
    assert outside.status == 451


@pytest.mark.parametrize("wish", ["", ",", "eu,,jp", "eu jp", "a" * 65, ",".join(["eu"] * 33)])
async def test_a_malformed_allow_header_is_refused(up: Both, wish: str) -> None:
    answer = await send(up.entry, chat(x_farhop_allow=wish))
    assert (answer.status, answer.code) == (400, "invalid_field")
    assert answer.json["error"]["param"] == "x-farhop-allow"


async def test_an_allow_header_given_twice_is_refused(up: Both) -> None:
    """Two lists could be read as one or as the other: neither would be sure to narrow."""
    twice = chat(x_farhop_allow="eu").replace(b"host: farhop\r\n", b"host: farhop\r\nx-farhop-allow: us\r\n")
    assert (await send(up.entry, twice)).status == 400


async def test_only_lawful_models_are_listed(up: Both) -> None:
    ask = {
        name: head("GET", "/v1/models", authorization=f"Bearer sk-farhop-{name}")
        for name in ("anywhere", "eu-only", "not-us")
    }
    listed = {name: [m["id"] for m in (await send(up.entry, asked)).json["data"]] for name, asked in ask.items()}
    assert listed == {"anywhere": [MODEL], "eu-only": [], "not-us": []}
    direct = await send(up.client, ask["eu-only"])
    assert direct.json["data"] == []
    narrowed = head("GET", "/v1/models", authorization="Bearer sk-farhop-anywhere", x_farhop_allow="jp")
    assert (await send(up.entry, narrowed)).json["data"] == []


def test_a_list_of_models_is_judged_once_for_all_that_no_rule_binds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wish for a place that is none is not remembered: 2,000 models over 60 regions took 65 ms each time."""
    law, facts, judged = Law(world()), ModelFacts(max_model_len=8), list[str]()
    offered = {LIMITED: facts, **{f"sql-{number}": facts for number in range(200)}}
    decide = Law._decide
    monkeypatch.setattr(Law, "_decide", lambda of, *asked: judged.append(asked[1]) or decide(of, *asked))
    authenticator = KeyAuthenticator("virginia", under(law), lambda lawful: offered if lawful else {}, 60.0)
    caller = authenticator.trusted("split", (("nowhere",),))
    judged.clear()
    assert authenticator.models(caller) == {}
    assert sorted(judged) == ["", LIMITED]
    assert authenticator.models(authenticator.trusted("split", ())) == offered


def test_tenants_that_share_hints_have_one_scope_and_the_others_one_each() -> None:
    there = world()
    assert hint_scope(there, "anywhere") == ""
    assert hint_scope(there, "eu-only") == "tenant:eu-only"
    assert hint_scope(there, "nobody") == "tenant:nobody"


def test_records_follow_the_logging_scope_and_the_models_own_rule() -> None:
    law = Law(world())
    assert recorded(law, "anywhere", "", (), "virginia")
    assert not recorded(law, "eu-only", "", (), "virginia")
    assert recorded(law, "eu-only", "", (), "frankfurt")
    assert not recorded(law, "anywhere", "", (("eu",),), "virginia")
    assert recorded(law, "split", MODEL, (), "virginia")
    assert not recorded(law, "split", LIMITED, (), "virginia")
    assert not recorded(law, "nobody", "", (), "virginia")


def test_records_follow_the_key_that_a_later_law_narrows() -> None:
    """What came under an earlier law is looked at once more when it is over."""

    def law(within: list[str]) -> Law:
        one = tenant("acme")
        one["keys"][0]["within"] = within
        return Law(topology(one))

    now = law([])
    flow: Any = SimpleNamespace(law=now, config=SimpleNamespace(region="virginia"))
    asks = KeyAuthenticator("virginia", flow, lambda _regions: {}, 600.0)
    nothing: Any = SimpleNamespace()
    below = HopAuthenticator(nothing, flow, nothing, names_body=False)
    caller = asks.trusted("acme", (), "demo")
    assert caller.recorded
    assert asks.recorded(caller, MODEL)
    assert below.recorded(caller, MODEL)
    for within in (["eu"], None):
        now = law(within) if within is not None else Law(topology(tenant("acme", keys=[])))
        flow.law = now
        assert not asks.recorded(caller, MODEL)
        assert not below.recorded(caller, MODEL)
        assert not recorded(now, "acme", "", (), "virginia", "demo")


async def test_a_model_that_may_not_be_recorded_here_is_not(up: Both) -> None:
    """What is asked for is known once the body is read: only then it can be muted."""
    seen = await send(up.entry, chat(key="sk-farhop-split"))
    assert up.global_.decisions.get(seen.headers["x-farhop-decision"]) is not None
    body = {"model": LIMITED, "messages": [{"role": "user", "content": "x"}]}
    quiet = await send(up.entry, chat(key="sk-farhop-split", body=body))
    await asyncio.sleep(0)
    assert up.global_.decisions.get(quiet.headers["x-farhop-decision"]) is None
    assert len(up.global_.decisions) == 1


@pytest.mark.parametrize("message", ["0", "-5", "1e3", "1.5", "soon", "", "9" * 13])
async def test_a_timeout_that_is_none_is_refused(up: Both, message: str) -> None:
    answer = await send(up.entry, chat(x_farhop_timeout_ms=message))
    assert (answer.status, answer.code) == (400, "invalid_field")
    assert answer.json["error"]["param"] == "x-farhop-timeout-ms"


def test_a_timeout_only_shortens_the_deadline() -> None:
    authenticator = KeyAuthenticator("tokyo", under(Law(world())), lambda _regions: {}, 60.0)
    assert [authenticator.patience_of(one) for one in (None, b"2500", b"999999999999")] == [60.0, 2.5, 60.0]


async def test_a_deadline_of_the_clients_holds_in_the_region(up: Both) -> None:
    """Told to the global tier it travels in the hop token, and the region's machine goes by it."""
    seen: list[float] = []
    need_of = up.regional.flow.selector.need_of

    def noted(request):  # type: ignore[no-untyped-def]
        seen.append(request.deadline - up.regional.clock.now())
        return need_of(request)

    up.regional.flow.selector.need_of = noted  # type: ignore[method-assign]
    assert (await send(up.entry, chat(x_farhop_timeout_ms="7000"))).status == 200
    assert 0.0 < seen[0] <= 7.0


PLACES = ["eea", "eu", "us", "de", "jp", "cn", "world", "global", "virginia", "tokyo", "atlantis"]


@given(
    st.sampled_from(["anywhere", "eu-only", "japan-only", "not-us", "nobody"]),
    st.lists(st.lists(st.sampled_from(PLACES), min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
    st.lists(st.tuples(st.sampled_from(["inference_geo", "data_residency"]), st.sampled_from(PLACES)), max_size=2),
    st.sampled_from(list(Scope)),
)
def test_a_residency_only_ever_narrows(
    tenant: str, narrow: tuple[tuple[str, ...], ...], words: list[tuple[str, str]], scope: Scope
) -> None:
    """In every scope, at the entry and once more in the region; what comes with the hop token narrows no less."""
    law = Law(world())
    caller = Caller(tenant, 1.0, "", recorded=True, narrow=narrow)
    preferences = Preferences(tuple(words))
    asked = narrowed(law, caller, preferences)
    before, after = (law.verdict(tenant, "m", scope, one.narrow).lawful for one in (caller, asked))
    assert after <= before
    for _, word in words:
        if word not in ("world", "global"):
            inside = {name for name in law.topology.regions if word in law.topology.ancestors(name)}
            assert after <= inside, "an unknown place holds nothing"
    # The region reads the same fields: those of the token are not sent twice, and nothing is lost.
    again = narrowed(law, asked, preferences)
    assert again.narrow == asked.narrow
    assert narrowed(law, caller, Preferences()) is caller
    claims = HopClaims("tokyo", "virginia", "i", tenant, (), 1, 0, 1.0, 1.0, "d", narrow=asked.narrow)
    carried = msgspec.msgpack.decode(msgspec.msgpack.encode(claims), type=HopClaims)
    assert law.verdict(tenant, "m", scope, carried.narrow).lawful == after


def _head(*lines: bytes) -> Head:
    return read_head(b"\r\n".join((b"POST /v1/chat/completions HTTP/1.1", b"host: h", *lines)), 50)


def test_a_gateway_names_the_tenant_once_and_only_known_tenants_count() -> None:
    law = Law(world())
    for name in ("x-farhop-tenant", "x-tenant"):
        asks = GatewayAuthenticator("virginia", under(law), lambda _: [], 60.0, name)
        line = name.encode() + b": "
        caller = asks.caller(_head(line + b"anywhere", b"authorization: Bearer sk-farhop-split"))
        assert isinstance(caller, Caller)
        assert (caller.tenant, caller.key, caller.entry_region) == ("anywhere", "", "virginia")
        for wrong, code in (((), "missing_key"), ((line + b"nobody",), "unknown_key")):
            refused = asks.caller(_head(*wrong, b"authorization: Bearer sk-farhop-anywhere"))
            assert not isinstance(refused, Caller)
            assert (refused.status, refused.outcome.reason) == (401, code)
            assert name.encode() in refused.body
    twice = asks.caller(_head(b"x-tenant: anywhere", b"x-tenant: split"))
    assert not isinstance(twice, Caller)  # a client may have sent one of them
    elsewhere = asks.caller(_head(b"x-tenant: nowhere-near"))
    assert not isinstance(elsewhere, Caller)  # its law forbids reading here, whatever its credential


def test_an_objective_lowers_the_priority_of_any_caller_and_raises_it_only_for_a_gateway() -> None:
    law = Law(topology(tenant("mid", priority=4, tiers={"flex": 1})))
    fields = {"chat": 99, "batch": -3, "flex": 8, "low": 2}
    keys = KeyAuthenticator("virginia", under(law), lambda _: [], 60.0)
    gateway = GatewayAuthenticator("virginia", under(law), lambda _: [], 60.0, "x-farhop-tenant")
    for asks, raised in ((keys, 4), (gateway, 9)):
        asks.objective = fields.get

        def priority(name: str, header: str = "x-gateway-inference-objective", by: KeyAuthenticator = asks) -> int:
            caller = by.trusted("mid", ())
            asking = by.with_preferences(caller, Preferences(), f"{header}: {name}\r\n".encode())
            assert isinstance(asking, Caller)
            return asking.priority

        assert (priority("chat"), priority("batch"), priority("low"), priority("nobody's")) == (raised, 0, 2, 4)
        assert priority("chat", "x-llm-d-inference-objective") == raised
        assert priority("flex") == 1  # the law takes precedence
