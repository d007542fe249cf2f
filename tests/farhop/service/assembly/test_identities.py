"""Tokens and certificates on real sockets, at both tiers alike: who is admitted, as which tenant, and what is
recorded.
"""

from __future__ import annotations

import asyncio
import hmac
import io
import logging
import re
import ssl
import time
import warnings
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from aiohttp import ClientError, ClientSession
from inprocess import MODEL, Both, Engine, both, chat, global_config, head, regional_config, send, tenant, topology
from provider import Provider
from pydantic import ValidationError
from yarl import URL

from farhop.accounts import segments
from farhop.accounts.usage import Reading
from farhop.telemetry import logs
from farhop_lab.world.certs import Authority

SALT = "salt-of-this-test"
URI = "spiffe://corp.example/ns/batch/sa/nightly"


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """What ships runs on uvloop."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def salted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARHOP_TEST_SALT", SALT)


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    async with Provider().running() as running:
        yield running


@pytest.fixture
async def up(provider: Provider, tmp_path: Path) -> AsyncIterator[Both]:
    claims = {"tenant": "tenant", "places": "places", "priority": "priority"}
    corp = provider.config(tenants=["acme", "stray"], claims=claims)
    given: dict[str, Any] = {
        "identity": {"issuers": {"corp": corp}, "user_salt": "env:FARHOP_TEST_SALT"},
        "usage": {"dir": str(tmp_path), "sync": "never"},
    }
    world = topology(tenant("acme", priority=5, tiers={"high": 9}))
    async with Engine().running() as engine, both(engine, world, regional=given, global_=given) as running:
        yield running
        await running.at_rest()


def token(provider: Provider, **claims: Any) -> str:
    return provider.token(time.time(), **{"tenant": "acme", "places": "world", "priority": 9, **claims})


async def test_a_token_is_its_tenants_at_both_tiers_and_its_user_is_written_down_salted(
    provider: Provider, up: Both, tmp_path: Path
) -> None:
    out = io.StringIO()
    logs.configure("both", "virginia", "t", stream=out)
    good, now_s = token(provider), time.time()
    bad = {
        good[:-2] + ("AA" if good[-2:] != "AA" else "BB"): "unknown_key",
        token(provider, tenant="stray"): "unknown_key",  # its issuer may set the tenant, and the law does not name it
        token(provider, tenant="other"): "unknown_key",
        token(provider, aud="other"): "key_not_valid",
        token(provider, exp=now_s - 60): "key_not_valid",
        token(provider, nbf=now_s + 60): "key_not_valid",
        token(provider, places=[]): "key_not_valid",
        token(provider, pad="x" * 9000): "missing_key",
    }
    for port in (up.entry, up.client):
        assert (await send(port, chat(key=good))).status == 200
        assert (await send(port, chat(key=None, x_api_key=good))).status == 200
        assert (await send(port, head("GET", "/v1/models", authorization=f"Bearer {good}"))).status == 200
        assert (await send(port, chat(key="sk-farhop-acme"))).status == 200
        named = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "user": "bob"}
        assert (await send(port, chat(key="sk-farhop-acme", body=named))).status == 200
        assert (await send(port, chat(key=good, body=named))).status == 200  # and the token's counts
        for one, code in bad.items():
            answer = await send(port, chat(key=one))
            assert (answer.status, answer.code) == (401, code)
            assert answer.headers["www-authenticate"] == "Bearer"
            assert one[:20].encode() not in answer.body
            assert b"Traceback" not in answer.body
        elsewhere = "no_region_serving" if port == up.entry else "unlawful_here"
        assert (await send(port, chat(key=token(provider, places=["jp"])))).code == elsewhere
        assert (await send(port, chat(key=token(provider, places="nowhere")))).status == 451
    await up.at_rest()
    for balancer in (up.global_, up.regional):
        assert balancer.tier_admin.status()["keys"]["issuers"]["corp"]["stale"] is False
        assert b'farhop_issuer_keys_age_seconds{issuer="corp"' in balancer.metrics.render()
        await balancer.close_accounts()
    found = [one.data for one in Reading().events(line for _, line in segments.read(tmp_path))]
    user = hmac.digest(SALT.encode(), b"https://idp.example/\nann", "sha256")[:16].hex()
    bob = hmac.digest(SALT.encode(), b"acme\nbob", "sha256")[:16].hex()
    users = {(data.key, data.user) for data in found if data.status == 200}
    assert users == {("jwt:corp", user), ("demo", ""), ("demo", bob)}
    everything = out.getvalue() + "".join(line.decode() for _, line in segments.read(tmp_path))
    assert not any(part in everything for one in (good, *bad) for part in (one, one.rpartition(".")[2]) if part)


async def test_a_token_lowers_priority_and_no_tier_raises_it_again(provider: Provider, up: Both) -> None:
    engine_body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "service_tier": "high"}
    for says, gets in ((9, 9), (2, 2)):
        seen = list[int]()
        authenticator = up.global_.authenticator
        asking = authenticator.with_preferences

        def watching(*given: Any, asking: Any = asking, seen: list[int] = seen) -> Any:
            caller = asking(*given)
            seen.append(caller.priority)
            return caller

        authenticator.with_preferences = watching  # type: ignore[method-assign]
        assert (await send(up.entry, chat(key=token(provider, priority=says), body=engine_body))).status == 200
        authenticator.with_preferences = asking  # type: ignore[method-assign]
        assert seen == [gets]


async def test_a_rotated_key_is_fetched_beside_requests(provider: Provider, up: Both) -> None:
    provider.rotate()
    assert (await send(up.entry, chat(key=token(provider)))).code == "unknown_key"
    keys = up.global_.identities.issuer_keys
    assert keys is not None
    keys.sources["corp"].asked_at -= 30  # as if that much later
    async with asyncio.timeout(60.0):
        while (await send(up.entry, chat(key=token(provider)))).status != 200:
            await asyncio.sleep(0.05)


async def authorized(at: str, user: str, audience: str) -> str:
    """The ID token that a provider gives a user who signs in: authorization code flow, found by its discovery."""
    async with ClientSession() as session:
        async with session.get(f"{at}/.well-known/openid-configuration") as answer:
            found = await answer.json()
        back = {"client_id": audience, "redirect_uri": "http://app.example/back"}
        asked = {**back, "response_type": "code", "scope": "openid", "state": "s"}
        signing_in = session.post(
            found["authorization_endpoint"], params=asked, data={"sub": user}, allow_redirects=False
        )
        async with signing_in as answer:
            code = URL(answer.headers["location"]).query["code"]
        claimed = {**back, "client_secret": "secret", "grant_type": "authorization_code", "code": code}
        async with session.post(found["token_endpoint"], data=claimed) as answer:
            return str((await answer.json())["id_token"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the API of Authlib that it uses is deprecated
async def test_tokens_of_an_openid_provider_that_others_wrote(tmp_path: Path) -> None:
    """Its keys are found by its own discovery, its tokens come by a sign-in; they name no key, as it has one alone."""
    with warnings.catch_warnings():
        import authlib.deprecate  # noqa: F401 - it has a filter of its own

        warnings.simplefilter("ignore")
        from oidc_provider_mock import User, run_server_in_thread
    users = [User(sub="ann", claims={"org": "acme"}), User(sub="eve", claims={"org": "globex"}), User(sub="tom")]
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with run_server_in_thread(user_claims=users) as provider:
        at = f"http://localhost:{provider.server_port}"
        async with ClientSession() as session, session.get(f"{at}/.well-known/openid-configuration") as answer:
            found = await answer.json()
        corp = {"issuer": found["issuer"], "jwks_url": found["jwks_uri"], "audience": ["farhop"],
                "algorithms": found["id_token_signing_alg_values_supported"], "tenants": ["acme"],
                "claims": {"tenant": "org"}}  # fmt: skip
        given: dict[str, Any] = {
            "identity": {"issuers": {"corp": corp}, "user_salt": "env:FARHOP_TEST_SALT"},
            "usage": {"dir": str(tmp_path), "sync": "never"},
        }
        async with (
            Engine().running() as engine,
            both(engine, topology(tenant("acme")), regional=given, global_=given) as up,
        ):
            good = await authorized(at, "ann", "farhop")
            for port in (up.entry, up.client):
                assert (await send(port, chat(key=good))).status == 200
                for user, audience in (("ann", "other"), ("eve", "farhop"), ("tom", "farhop")):
                    answer = await send(port, chat(key=await authorized(at, user, audience)))
                    code = "key_not_valid" if audience == "other" else "unknown_key"
                    assert (answer.status, answer.code) == (401, code)
            await up.at_rest()
            for balancer in (up.global_, up.regional):
                await balancer.close_accounts()
    results = [one.data for one in Reading().events(line for _, line in segments.read(tmp_path))]
    user = hmac.digest(SALT.encode(), f"{at}\nann".encode(), "sha256")[:16].hex()
    assert {(data.tenant, data.key, data.user) for data in results} == {("acme", "jwt:corp", user)}


async def test_identification_by_certificate(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    server, nightly = authority.issue("server"), authority.issue("nightly", (URI,))
    other, narrow = authority.issue("other", (f"{URI}/other",)), authority.issue("narrow", (f"{URI}/jp",))
    two, strange = authority.issue("two", (URI, f"{URI}/jp")), stranger.issue("strange", (URI,))
    tls = {"cert_file": server.cert_file, "key_file": server.key_file, "client_ca_file": authority.ca_file,
           "client_certificate": "optional"}  # fmt: skip
    certificates = {"nightly": {"uri": URI, "tenant": "acme"},
                    "narrow": {"uri": f"{URI}/jp", "tenant": "acme", "within": ["jp"]}}  # fmt: skip
    listen, identity = {"port": 0, "tls": tls}, {"certificates": certificates}
    given: dict[str, Any] = {
        "regional": {"client": listen, "identity": identity}, "global_": {"listen": listen, "identity": identity},
    }  # fmt: skip

    async def asked(port: int, pair: Any, key: str | None = None) -> tuple[int, str]:
        context = ssl.create_default_context(cafile=authority.ca_file)
        if pair is not None:
            context.load_cert_chain(pair.cert_file, pair.key_file)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
        url = f"https://127.0.0.1:{port}/v1/chat/completions"
        async with ClientSession() as http:
            answers = set[tuple[int, str]]()
            for _ in range(2):  # on one connection
                async with http.post(url, json=body, headers=headers, ssl=context) as answer:
                    document = await answer.json()
                    answers.add((answer.status, document.get("error", {}).get("code", "")))
        (one,) = answers
        return one

    async with Engine().running() as engine, both(engine, topology(tenant("acme")), **given) as up:
        for port in (up.entry, up.client):
            assert await asked(port, nightly) == (200, "")
            assert await asked(port, nightly, "sk-nobody") == (401, "unknown_key")  # an explicit value takes precedence
            assert await asked(port, nightly, "sk-farhop-anywhere") == (200, "")
            assert await asked(port, None, "sk-farhop-anywhere") == (200, "")
            assert await asked(port, None) == (401, "missing_key")
            assert await asked(port, other) == (401, "unknown_key")
            assert await asked(port, two) == (401, "unknown_key")
            assert (await asked(port, narrow))[1] == ("no_region_serving" if port == up.entry else "unlawful_here")
            with pytest.raises((ClientError, OSError)):
                await asked(port, strange)
        await up.at_rest()


async def test_without_issuers_nothing_of_it_is_there() -> None:
    async with Engine().running() as engine, both(engine, topology()) as up:
        sent = chat(key=None).replace(b"connection: close", b":certificate: x\r\nconnection: close")
        assert (await send(up.entry, sent)).code == "malformed_http"
        identities = up.global_.identities
        assert (identities.tokens, identities.issuer_keys, identities.certificates) == (None, None, None)
        assert "issuers" not in up.global_.tier_admin.status()["keys"]


GOOD = {"issuer": "https://i", "audience": ["a"], "jwks_url": "https://i/k", "algorithms": ["RS256"], "tenants": ["t"]}


@pytest.mark.parametrize(
    ("identity", "says"),
    [
        ({"issuers": {"a": {**GOOD, "algorithms": ["HS256"]}}}, "algorithms"),
        ({"issuers": {"a": {**GOOD, "algorithms": ["none"]}}}, "algorithms"),
        ({"issuers": {"a": {**GOOD, "algorithms": []}}}, "algorithms"),
        ({"issuers": {"a": {**GOOD, "jwks_url": "http://idp.example/k"}}}, "insecure: true"),
        ({"issuers": {"a": {**GOOD, "jwks_url": "https://u:p@i/k"}}}, "jwks_url: must be"),
        ({"issuers": {"a": {**GOOD, "jwks_url": "file:///etc/passwd"}}}, "jwks_url: must be"),
        ({"issuers": {"a": {**GOOD, "tenants": ["t", "u"]}}}, "claims.tenant"),
        ({"issuers": {"a": {**GOOD, "tenants": ["*"]}}}, "claims.tenant"),
        ({"issuers": {"a": {**GOOD, "leeway_s": 31}}}, "leeway_s"),
        ({"issuers": {"a": {**GOOD, "stale_s": 60}}}, "stale_s"),
        ({"issuers": {"a": {**GOOD, "ca_file": "/not/here"}}}, "ca_file"),
        ({"issuers": {"a": GOOD, "b": GOOD}}, "two have the same `issuer`"),
        ({"certificates": {"a": {"uri": URI, "tenant": "t"}, "b": {"uri": URI, "tenant": "u"}}}, "the same `uri`"),
        ({"certificates": {"a": {"uri": "CN=acme", "tenant": "t"}}}, "uri"),
        ({"certificates": {"a": {"uri": URI, "tenant": "t"}}}, "tls.client_ca_file is not"),
        ({"issuers": {}, "user_salt": "env:FARHOP_TEST_SHORT"}, "user_salt"),
    ],
)  # fmt: skip
def test_a_configuration_that_cannot_be_meant_is_refused(
    monkeypatch: pytest.MonkeyPatch, identity: dict[str, Any], says: str
) -> None:
    monkeypatch.setenv("FARHOP_TEST_SHORT", "short")
    engine = Engine()
    engine.address = "127.0.0.1:1"
    for make in (lambda: global_config(identity=identity), lambda: regional_config(engine, identity=identity)):
        with pytest.raises(ValidationError, match=re.escape(says)):
            make()
