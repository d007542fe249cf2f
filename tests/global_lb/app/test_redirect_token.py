"""The URL of a redirect, live through both tiers: who may use it, how often, where, and for what."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from random import Random
from typing import Any

import msgspec
import pytest
from inprocess import (
    HOP_KEY,
    MODEL,
    Answer,
    Both,
    Engine,
    both,
    chat,
    head,
    regional_config,
    send,
    tenant,
    topology,
    until,
)
from msgspec.structs import replace

from farhop.identity.api_keys import digest, with_checksum
from farhop.identity.redirect_token import RedirectToken, RedirectTokenSigner, RedirectTokenVerifier, holder
from farhop.store.documents import issued_keys, limits
from farhop.store.documents.issued_keys import IssuedKey
from farhop.store.documents.limits import Limit, TenantLimits
from farhop_lab.memory_store import MemoryStore
from farhop_lab.world.ports import free_ports
from global_lb.routing.policy import RouteConfig
from global_lb.routing.routes import RoutesChanged
from regional_lb.app.main import RegionalBalancer

BODY = msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8})
WORLD = topology(
    tenant("narrow", residency={"processing": {"allow": ["us"]}}),
    tenant("picky", residency={"processing": {"allow": ["world"]}, "entry": {"allow": ["us"]}}),
)


@pytest.fixture
async def up(engine: Engine) -> AsyncIterator[Both]:
    (port,) = free_ports(1)
    client = {"port": port, "url": f"http://127.0.0.1:{port}"}
    routes = [{"answer": "redirect"}]
    async with both(engine, WORLD, regional={"client": client}, global_={"routes": routes}) as running:
        yield running
        await running.at_rest()


def follow(target: str, **headers: str) -> bytes:
    return head("POST", target, content_length=str(len(BODY)), **headers) + BODY


async def asked(up: Both, path: str = "/v1/chat/completions", **headers: str) -> tuple[Answer, str]:
    """The redirect, and the target it names."""
    answer = await send(up.entry, chat(path=path, body=BODY, **headers))
    assert answer.status == 307, answer
    base = f"http://127.0.0.1:{up.client}"
    location = answer.headers["location"]
    assert location.startswith(f"{base}/")
    return answer, location.removeprefix(base)


def token_of(target: str) -> str:
    found = re.search(r"farhop-pass=([A-Za-z0-9._~-]+)", target)
    assert found is not None
    return found[1]


def signed(up: Both, target: str, **changed: Any) -> str:
    """The token in a target, signed anew by one who has the key, with some of its claims changed."""
    keys = {"k1": HOP_KEY.encode()}
    verifier = RedirectTokenVerifier(keys, "virginia", holder("r1", up.regional.incarnation))
    claims = verifier.use(token_of(target).encode(), up.regional.clock.now() * 1e3, target.partition("?")[0].encode())
    assert isinstance(claims, RedirectToken)
    anew = RedirectTokenSigner(keys, "k1", "virginia").sign(replace(claims, **changed)).decode()
    return f"/v1/chat/completions?farhop-pass={anew}"


async def test_the_token_alone_is_served_under_the_same_decision(up: Both, engine: Engine) -> None:
    redirect, target = await asked(up)
    assert redirect.headers["x-farhop-region"] == "virginia"
    assert redirect.headers["cache-control"] == "no-store"
    assert redirect.code == "redirected"
    assert token_of(target) not in redirect.body.decode()
    assert engine.seen == []
    answer = await send(up.client, follow(target))
    assert answer.status == 200
    assert answer.headers["x-farhop-decision"] == redirect.headers["x-farhop-decision"]
    assert up.global_.decisions.get(redirect.headers["x-farhop-decision"])["outcome"] == "redirected"
    assert up.regional.decisions.get(redirect.headers["x-farhop-decision"])["tenant"] == "anywhere"
    assert up.regional.flow.accepted_bytes == {}, "nobody waits for its acknowledgement"


async def test_a_redirect_token_is_accepted_once(up: Both, engine: Engine) -> None:
    _, target = await asked(up)
    assert (await send(up.client, follow(target))).status == 200
    again = await send(up.client, follow(target))
    assert (again.status, again.code) == (403, "redirect_token_over")
    with_key = await send(up.client, follow(target, authorization="Bearer sk-farhop-anywhere"))
    assert with_key.code == "redirect_token_over", "a key does not mend it"
    assert len(engine.seen) == 1


async def test_no_token_reaches_an_engine_and_the_rest_of_the_query_does(up: Both, engine: Engine) -> None:
    _, target = await asked(up, "/v1/chat/completions?api-version=1")
    seen: list[str] = []
    on_head = up.regional.listeners.client_ingress.head

    def watched(exchange: Any) -> Any:
        reply = on_head(exchange)
        seen.append(exchange.head.target.decode())
        return reply

    up.regional.listeners.client_listener._handler.head = watched
    assert (await send(up.client, follow(target))).status == 200
    assert seen == ["/v1/chat/completions?api-version=1"]
    (headers, _) = engine.seen[-1]
    assert token_of(target) not in str(headers)
    assert "x-farhop-pass" not in headers


@pytest.mark.parametrize(
    ("changed", "status", "code"),
    [
        ({"audience": "tokyo"}, 403, "redirect_token_misaddressed"),
        ({"holder": "r2/1"}, 403, "redirect_token_misaddressed"),
        ({"expires_ms": 1.0}, 403, "redirect_token_over"),
        ({"lawful": ("tokyo",)}, 451, "unlawful_here"),
        ({"key": "revoked"}, 451, "unlawful_here"),
        ({"tenant": "eu-only"}, 451, "unlawful_here"),
        ({"narrow": (("jp",),)}, 451, "unlawful_here"),
        ({"deadline_ms": 0.0}, 504, "deadline_exceeded"),
    ],
)
async def test_the_region_judges_by_token_and_its_own_law(
    up: Both, engine: Engine, changed: dict[str, Any], status: int, code: str
) -> None:
    _, target = await asked(up)
    answer = await send(up.client, follow(signed(up, target, **changed)))
    assert (answer.status, answer.code) == (status, code)
    assert token_of(target) not in answer.body.decode()
    assert engine.seen == []


@pytest.mark.parametrize("spoil", [lambda t: t[:-1], lambda t: t.replace("r2.", "v2."), lambda t: f"{t}&farhop-pass=x"])
async def test_a_token_tampered_with_is_no_token(up: Both, engine: Engine, spoil: Any) -> None:
    _, target = await asked(up)
    answer = await send(up.client, follow(spoil(target)))
    assert (answer.status, answer.code) == (401, "redirect_token_forged")
    assert engine.seen == []


async def test_a_token_is_valid_for_the_requested_path(up: Both, engine: Engine) -> None:
    """A key may be for some paths alone, and the token is what is left of it."""
    _, target = await asked(up)
    other = target.replace("/v1/chat/completions", "/v1/completions")
    body = msgspec.json.encode({"model": MODEL, "prompt": "hello", "max_tokens": 8})
    answer = await send(up.client, head("POST", other, content_length=str(len(body))) + body)
    assert (answer.status, answer.code) == (403, "redirect_token_misaddressed")
    assert engine.seen == []
    assert (await send(up.client, follow(target))).status == 200, "it was not used"


async def test_a_redirect_token_is_refused_by_the_tier_listener_and_by_entries(up: Both, engine: Engine) -> None:
    _, target = await asked(up)
    below = await send(up.tier, follow(target))
    assert below.code == "hop_token_missing"
    assert (
        await send(up.tier, follow("/v1/chat/completions", x_farhop_hop=token_of(target)))
    ).code == "hop_token_forged"
    assert (await send(up.entry, follow(target))).code == "missing_key"
    assert engine.seen == []


async def test_a_redirect_token_for_another_region_is_refused(up: Both, engine: Engine) -> None:
    _, target = await asked(up)
    other = RegionalBalancer(regional_config(engine, "tokyo"), WORLD, Random(8), MemoryStore(Random(9)))
    try:
        line = await other.open()
        found = re.search(r"clients on [^:]+:(\d+)", line)
        assert found is not None
        answer = await send(int(found[1]), follow(target))
        assert (answer.status, answer.code) == (403, "redirect_token_misaddressed")
    finally:
        await other.close()


async def test_a_tenant_whose_bodies_may_not_be_read_there_is_relayed_or_refused(up: Both, engine: Engine) -> None:
    """Virginia is in the US: picky's body may be read there, and the token says no less than the entry's law."""
    _, target = await asked(up, key="sk-farhop-picky")
    assert (await send(up.client, follow(target))).status == 200
    _, target = await asked(up)
    world = topology(tenant("picky", residency={"processing": {"allow": ["world"]}, "entry": {"allow": ["eu"]}}))
    up.regional.flow.law = type(up.regional.flow.law)(world)
    answer = await send(up.client, follow(signed(up, target, tenant="picky")))
    assert (answer.status, answer.code) == (451, "entry_forbidden")
    assert len(engine.seen) == 1


async def test_it_is_chosen_by_route_and_size_at_work(up: Both) -> None:
    up.global_.relay.react(RoutesChanged({("", ""): RouteConfig(answer="redirect", redirect_bytes=len(BODY) + 1)}))
    assert (await send(up.entry, chat(body=BODY))).status == 200
    up.global_.relay.react(RoutesChanged({("", ""): RouteConfig(answer="redirect", redirect_bytes=len(BODY))}))
    assert (await send(up.entry, chat(body=BODY))).status == 307
    up.global_.relay.react(RoutesChanged({("anywhere", ""): RouteConfig()}))
    assert (await send(up.entry, chat(body=BODY))).status == 200
    assert (await send(up.entry, chat(key="sk-farhop-narrow", body=BODY))).status == 307


# -- long streams that came by anycast, to this process's own name

STREAM = msgspec.json.encode({
    "model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "stream": True,
})  # fmt: skip


async def test_a_stream_by_anycast_comes_again_by_a_token_for_one_use(engine: Engine) -> None:
    unicast = {"url": "http://127.0.0.9:1", "anycast": ["127.0.0.1"]}
    global_ = {"routes": [{"unicast_tokens": 8}], "unicast": unicast}
    async with both(engine, WORLD, global_=global_) as up:
        short = await send(up.entry, chat(body=BODY))
        assert short.status == 200
        answer = await send(up.entry, chat(body=STREAM))
        assert answer.status == 307, answer
        base, target = answer.headers["location"][:18], answer.headers["location"][18:]
        assert base == "http://127.0.0.9:1"
        raw = head("POST", target, content_length=str(len(STREAM))) + STREAM
        # Here both are one address: a request with a token is not redirected again.
        assert (await send(up.entry, raw)).status == 200
        assert (await send(up.entry, raw)).status == 403
        forged = head("POST", target[:-4] + "AAAA", content_length=str(len(STREAM))) + STREAM
        assert (await send(up.entry, forged)).status == 401
        await up.at_rest()


async def test_a_name_that_stands_for_a_model_does_so_where_a_stream_by_anycast_comes_again(engine: Engine) -> None:
    unicast = {"url": "http://127.0.0.9:1", "anycast": ["127.0.0.1"]}
    routes = [{"unicast_tokens": 8}, {"model": "auto", "models": [{"model": MODEL}]}]
    body = STREAM.replace(MODEL.encode(), b"auto")
    async with both(engine, WORLD, global_={"routes": routes, "unicast": unicast}) as up:
        answer = await send(up.entry, chat(body=body))
        assert answer.status == 307, answer
        raw = head("POST", answer.headers["location"][18:], content_length=str(len(body))) + body
        assert (await send(up.entry, raw)).status == 200
        await up.at_rest()


async def test_regions_left_by_a_rule_about_an_alias_go_with_the_request(engine: Engine) -> None:
    world = topology(tenant("acme", models={"auto": {"allow": ["us", "eu"]}}))
    routes = [{"model": "auto", "models": [{"model": MODEL}]}]
    async with both(engine, world, global_={"routes": routes}) as up:
        verify, seen = up.regional.listeners.hop_authenticator.caller, list[Any]()

        def watched(head: Any) -> Any:
            seen.append(verify(head))
            return seen[-1]

        up.regional.listeners.hop_authenticator.caller = watched  # type: ignore[method-assign]
        assert (await send(up.entry, chat("sk-farhop-acme", BODY.replace(MODEL.encode(), b"auto")))).status == 200
        assert [one.narrow for one in seen] == [(("frankfurt", "virginia"),)]
        await up.at_rest()


async def test_a_key_issued_for_one_model_is_for_no_other_where_it_is_sent(up: Both) -> None:
    key = with_checksum("0" * 30)
    one = IssuedKey(
        id="k1", sha256=digest(key), tenant="anywhere", models=(MODEL,), author="ann", why="test", at=datetime.now(UTC)
    )
    await up.global_.store.put(one.key, issued_keys.encode(one))
    await until(lambda: up.global_.keys.get(one.sha256) is not None)
    _, target = await asked(up, key=key)
    other = BODY.replace(MODEL.encode(), b"other")
    answer = await send(up.client, head("POST", target, content_length=str(len(other))) + other)
    assert (answer.status, answer.code) == (403, "key_scope")
    _, target = await asked(up, key=key)
    assert (await send(up.client, follow(target))).status == 200


async def limited(up: Both, home: str, tenant_name: str = "anywhere") -> None:
    one = TenantLimits(
        tenant=tenant_name, home=home, limits=(Limit(tokens_per_minute=1000),), author="ann", why="test",
        at=datetime.now(UTC), seq=1,
    )  # fmt: skip
    await up.global_.store.put(one.place, limits.encode(one))
    for balancer in (up.global_, up.regional):
        await until(lambda balancer=balancer: balancer.limits.tenants().get(tenant_name) == one)  # type: ignore[misc]


async def test_where_another_regions_root_lends_its_limits_a_tenant_is_not_sent(up: Both, engine: Engine) -> None:
    """There it would be refused whenever it came: the entry relays, and charges. (Here nobody lends, so it refuses.)"""
    await asked(up)
    await limited(up, "tokyo")
    for path, gets in (("/v1/chat/completions", 429), ("/v1/route", 200)):
        answer = await send(up.entry, chat(path=path, body=BODY, x_farhop_token="yes"))
        assert answer.status == gets
        assert "location" not in answer.headers
    assert answer.json["url"] is None
    answer = await send(up.client, chat(body=BODY))
    assert (answer.status, answer.code, answer.headers["x-should-retry"]) == (429, "rate_limit_exceeded", "false")
    assert "are held in region tokyo" in answer.json["error"]["message"]
    assert "retry-after" not in answer.headers
    assert engine.seen == []


@pytest.mark.parametrize("way", ["redirect", "advise"])
async def test_a_redirected_request_is_charged_by_the_region_that_serves_it(up: Both, engine: Engine, way: str) -> None:
    """Neither advice, which nobody charges, nor a small request that was redirected pays for a large one."""
    await limited(up, "virginia")
    for balancer in (up.global_, up.regional):
        await until(lambda balancer=balancer: balancer.limiter.status()["lent_by"]["virginia"]["root"])  # type: ignore[misc]
    if way == "redirect":
        _, target = await asked(up)
    else:
        advice = (await send(up.entry, chat(path="/v1/route", body=BODY, x_farhop_token="yes"))).json
        target = advice["url"].removeprefix(f"http://127.0.0.1:{up.client}")
    large = BODY.replace(b'"max_tokens":8', b'"max_tokens":2000')
    answer = await send(up.client, head("POST", target, content_length=str(len(large))) + large)
    assert (answer.status, answer.code) == (429, "rate_limit_exceeded")
    assert engine.seen == []
    _, target = await asked(up)
    assert (await send(up.client, follow(target))).status == 200
