"""Callers' attempts on a running balancer with keys, tokens and sizes: each is answered, and nothing is miscounted."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jwt
import pytest
from inprocess import HOP_KEY, MODEL, Both, Engine, both, chat, head, send, tenant, topology, until
from provider import Provider

from farhop.accounts import segments
from farhop.accounts.usage import Reading
from farhop.identity.api_keys import digest, with_checksum
from farhop.identity.jwt_tokens import hidden_user
from farhop.store.contract import issued_key
from farhop.store.documents import issued_keys, limits
from farhop.store.documents.issued_keys import IssuedKey
from farhop.store.documents.limits import Limit, TenantLimits

NOW = datetime.now(UTC)
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
SERVED_TOKENS = 11 + 3
ACME = "authorization: Bearer sk-farhop-acme"
ISSUED = with_checksum("a".ljust(30, "0"))


def posted(body: Any, *lines: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    start = head("POST", "/v1/chat/completions", content_length=str(len(data))).removesuffix(b"\r\n")
    return start + "".join(f"{line}\r\n" for line in lines or (ACME,)).encode() + b"\r\n" + data


def of_key(provider: Provider, kid: str, now_s: float) -> str:
    """Signed with a key of this name that was never published."""
    claims = {"iss": "https://idp.example/", "aud": "farhop", "sub": "ann", "iat": now_s, "exp": now_s + 300}
    return jwt.encode(claims | {"tenant": "acme"}, provider.keys[list(provider.keys)[-1]], "ES256", {"kid": kid})


async def limited(up: Both, **sizes: Any) -> None:
    one = TenantLimits(tenant="acme", home="virginia", limits=(Limit(**sizes),), author="a", why="w", at=NOW)
    await up.global_.store.put(one.place, limits.encode(one))
    await until(lambda: up.global_.limiter.status()["lent_by"].get("virginia", {}).get("root"))


def answers(provider: Provider) -> dict[str, tuple[bytes, int, str, str]]:
    """What is asked, and status, code and a part of the message that it gets."""
    now_s = time.time()

    def bearing(token: str) -> bytes:
        return posted(BODY, f"authorization: Bearer {token}")

    none = ".".join([*provider.token(now_s, tenant="acme").split(".")[:2], ""])
    return {
        "two authorizations": (posted(BODY, ACME, ACME), 400, "malformed_http", "`authorization` may stand once"),
        "keys of two": (posted(BODY, ACME, "x-api-key: sk-farhop-anywhere"), 400, "invalid_field", "send one of them"),
        "a long key": (bearing("a" * 7000), 401, "unknown_key", "512 characters"),
        "a token of a megabyte": (bearing("a" * (1 << 20)), 431, "head_too_large", "32768 bytes"),
        "unsigned": (bearing(none), 401, "unknown_key", ""),
        "a path for a kid": (bearing(of_key(provider, "../../etc/passwd", now_s)), 401, "unknown_key", "kid"),
        "not yet": (bearing(provider.token(now_s, tenant="acme", nbf=now_s + 3600)), 401, "key_not_valid", "not valid"),
        "audiences": (bearing(provider.token(now_s, tenant="acme", aud=["a", "b"])), 401, "key_not_valid", "aud"),
        "below none": (posted(BODY | {"max_tokens": -2}), 400, "invalid_field", "`max_tokens` must be at least 1"),
        "a part of one": (posted(BODY | {"max_tokens": 8.5}), 400, "invalid_field", "max_tokens"),
        "a text": (posted(BODY | {"max_tokens": "eight"}), 400, "invalid_field", "max_tokens"),
        "no number": (posted(json.dumps(BODY).replace("8}", "NaN}").encode()), 400, "invalid_json", "JSON"),
        "more than all": (posted(BODY | {"max_tokens": 10**30}), 429, "rate_limit_exceeded", "ask for less"),
        "so many answers": (posted(BODY | {"n": 10**9}), 429, "rate_limit_exceeded", "ask for less"),
        "as a text": (posted(BODY | {"n": "1000000000"}), 429, "rate_limit_exceeded", "ask for less"),
        "a model of a megabyte": (posted(BODY | {"model": "m" * (1 << 20)}), 404, "model_not_found", "does not exist"),
        "a model of no letters": (posted(BODY | {"model": "\n\0\u202e"}), 404, "model_not_found", "does not exist"),
        "two models": (
            posted(json.dumps(BODY).replace("{", '{"model": "x", ', 1).encode()), 400, "invalid_json", "keep one"
        ),
    }  # fmt: skip


async def test_every_kind_of_caller_is_answered_and_counted_correctly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    monkeypatch.setenv("FARHOP_TEST_SALT", "salt-of-this-test")
    async with Provider().running() as provider, Engine().running() as engine:
        corp = provider.config(claims={"tenant": "tenant"})
        given = {"usage": {"dir": str(tmp_path), "sync": "never"},
                 "identity": {"issuers": {"corp": corp}, "user_salt": "env:FARHOP_TEST_SALT"}}  # fmt: skip
        salted = {"identity": {"user_salt": "env:FARHOP_TEST_SALT"}}
        async with both(engine, topology(tenant("acme")), global_=given, regional=salted) as up:
            users = {balancer.limiter._user("acme", "ann@acme.example") for balancer in (up.global_, up.regional)}
            assert users == {hidden_user(b"salt-of-this-test", "limits\nacme", "ann@acme.example")[:16]}
            await limited(up, requests_per_day=1000, tokens_per_day=10_000)
            good = await send(
                up.entry, posted(BODY, f"authorization: Bearer {provider.token(time.time(), tenant='acme')}")
            )
            assert good.status == 200
            for name, (asked, status, code, says) in answers(provider).items():
                answer = await send(up.entry, asked)
                assert (name, answer.status, answer.code) == (name, status, code)
                message = answer.json["error"]["message"]
                assert says in message, name
                assert len(answer.body) < 1000, name
                assert "Traceback" not in message, name
            assert len(engine.seen) == 1
            for more in ({"user": "u" * 100_000}, {"user": ["u"]}, {}):
                answer = await send(up.entry, posted(BODY | more, ACME, "x-api-key: a-placeholder"))
                assert answer.status == 200
            assert not any({"authorization", "x-api-key"} & heads.keys() for heads, _ in engine.seen)
            await up.at_rest()

            def used() -> list[float]:
                return sorted(one["used"] for one in up.regional.mesh.limit_root.status()["buckets"].values())

            # Of 10,000 tokens a day about two leak in the meantime.
            most = 4, 4 * SERVED_TOKENS
            await until(lambda: all(n - 4 < one <= n for one, n in zip(used(), most, strict=True)))
    reading = Reading()
    written = list(reading.events(line for _, line in segments.read(tmp_path)))
    assert Counter(one.data.status for one in written)[200] == 4
    assert sum(one.data.output_tokens or 0 for one in written) == 4 * 3
    assert all(len(one.data.model) <= 128 and len(one.data.user) < 100 for one in written)


async def test_a_key_revoked_during_its_stream_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What began goes on to its end, and is counted; what comes after is refused."""
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    given = {"usage": {"dir": str(tmp_path), "sync": "never"}}

    def issued(**more: Any) -> bytes:
        key = IssuedKey(id="k1", sha256=digest(ISSUED), tenant="acme", author="ann", why="test", at=NOW, **more)
        return issued_keys.encode(key)

    async with Engine().running() as engine, both(engine, topology(tenant("acme")), global_=given) as up:
        store, book = up.global_.store, up.global_.keys
        await store.put(issued_key("k1"), issued())
        await until(lambda: book.get(digest(ISSUED)) is not None)
        engine.behaviour = "pause"
        stream = asyncio.create_task(send(up.entry, chat(ISSUED, BODY | {"stream": True})))
        await until(lambda: engine.seen)
        await store.put(issued_key("k1"), issued(revoked=NOW))
        answer = await send(up.entry, chat(ISSUED, BODY))
        async with asyncio.timeout(60.0):
            while answer.status == 200:
                answer = await send(up.entry, chat(ISSUED, BODY))
        assert (answer.status, answer.code) == (401, "key_not_valid")
        engine.release.set()
        whole = await stream
        assert (whole.status, whole.body.endswith(b"data: [DONE]\n\n")) == (200, True)
        await up.at_rest()
    used = [one.data for one in Reading().events(line for _, line in segments.read(tmp_path))]
    assert [(one.key, one.output_tokens) for one in used if one.stream] == [("k1", 3)]
