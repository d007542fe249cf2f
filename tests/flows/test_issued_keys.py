"""Keys that are issued, on real sockets: by the command, through a real etcd, in both tiers; their scopes and ends."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from inprocess import HOP_KEY, MODEL, Both, Engine, both, chat, head, send, streaming, tenant, topology, until
from typer.testing import CliRunner

from farhop.identity.api_keys import digest, with_checksum
from farhop.service.authentication.keybook import KeyBook
from farhop.service.process.tasks import Tasks
from farhop.store.contract import issued_key, route_key
from farhop.store.documents import issued_keys
from farhop.store.documents.issued_keys import IssuedKey
from farhop.store.etcd import EtcdStore
from farhop.store.etcd_settings import EtcdSettings
from farhop_cli.main import app
from farhop_lab.world.etcd import EmbeddedEtcd
from tests.conftest import unhindered

NOW = datetime.now(UTC)
HOUR = timedelta(hours=1)


def a_key(name: str) -> str:
    return with_checksum(name.ljust(30, "0"))


def document(name: str, **more: Any) -> bytes:
    fields: dict[str, Any] = {"tenant": "acme", "author": "ann", "why": "test", "at": NOW, **more}
    return issued_keys.encode(IssuedKey(id=name, sha256=digest(a_key(name)), **fields))


@pytest.fixture
async def up(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Both]:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    async with Engine().running() as engine, both(engine, topology(tenant("acme"))) as running:
        yield running
        await running.at_rest()


async def put(up: Both, name: str, **more: Any) -> None:
    await up.regional.store.put(issued_key(name), document(name, **more))
    books: tuple[KeyBook, ...] = (up.regional.keys, up.global_.keys)
    await until(lambda: all(book.get(digest(a_key(name))) is not None for book in books))


async def test_issued_key_is_restricted_to_its_scopes_in_both_tiers(up: Both) -> None:
    await put(up, "all")
    await put(up, "narrow", models=("other",), paths=("/v1/chat/completions", "/v1/models"))
    await put(up, "abroad", within=("jp",))
    for port in (up.entry, up.client):
        assert (await send(port, chat(key=a_key("all")))).status == 200
        refused = await send(port, chat(key=a_key("narrow")))
        assert (refused.status, refused.code, refused.json["error"]["param"]) == (403, "key_scope", "model")
        assert refused.json["error"]["type"] == "permission_error"
        listed = await send(port, head("GET", "/v1/models", authorization=f"Bearer {a_key('narrow')}"))
        assert listed.json["data"] == []
        elsewhere = await send(port, head("GET", "/version", x_api_key=a_key("narrow")))
        assert (elsewhere.status, elsewhere.code) == (403, "key_scope")
        lawful_elsewhere = "no_region_serving" if port == up.entry else "unlawful_here"
        assert (await send(port, chat(key=a_key("abroad")))).code == lawful_elsewhere


async def test_an_issued_key_may_see_receipts_if_it_says_so(up: Both) -> None:
    for name, fields in {"curious": {"explain": True}, "plain": {}}.items():
        await put(up, name, **fields)
        answer = await send(up.entry, chat(key=a_key(name), body=streaming("hello"), x_farhop_explain="1"))
        receipt = json.loads(answer.headers["x-farhop-receipt"])
        assert (receipt.get("chosen"), "refused" in receipt) == (("virginia", False) if fields else (None, True))
        assert (b": x-farhop-receipt {" in answer.body) == bool(fields)


async def test_key_limited_to_models_must_allow_an_alias_and_its_target(up: Both) -> None:
    route = [{"model": "auto", "models": [{"model": MODEL}]}]
    await up.global_.store.put(route_key("virginia"), json.dumps(route).encode())
    await until(lambda: up.global_.flow.routes.cascades)
    wanted = {"both": (("auto", MODEL), 200), "name": (("auto",), 403), "model": ((MODEL,), 403), "any": ((), 200)}
    listed = {"both": sorted(("auto", MODEL)), "name": [], "model": [MODEL], "any": sorted(("auto", MODEL))}
    for name, (models, status) in wanted.items():
        await put(up, name, models=models)
        body = {"model": "auto", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
        answer = await send(up.entry, chat(key=a_key(name), body=body))
        assert answer.status == status
        assert status == 200 or (answer.code, answer.json["error"]["param"]) == ("key_scope", "model")
        text = await send(up.entry, head("GET", "/v1/models", authorization=f"Bearer {a_key(name)}"))
        assert [model["id"] for model in text.json["data"]] == listed[name]


async def test_revoked_expired_early_and_stray_keys_are_refused_with_a_code(up: Both) -> None:
    ends = {
        "revoked": ("key_not_valid", {"revoked": NOW}), "expired": ("key_not_valid", {"expires": NOW - HOUR}),
        "early": ("key_not_valid", {"not_before": NOW + HOUR}), "stray": ("unknown_key", {"tenant": "nobody"}),
    }  # fmt: skip
    for name, (code, more) in ends.items():
        await put(up, name, **more)
        for port in (up.entry, up.client):
            answer = await send(port, chat(key=a_key(name)))
            assert (answer.status, answer.code) == (401, code)
            assert answer.json["error"]["type"] == "authentication_error"


async def test_an_unreadable_key_document_authenticates_no_client(up: Both) -> None:
    await put(up, "turned")
    assert (await send(up.entry, chat(key=a_key("turned")))).status == 200
    narrower = document("turned").replace(b'"tenant"', b'"from_next_year":1,"tenant"')
    await up.regional.store.put(issued_key("turned"), narrower)
    await until(lambda: up.global_.keys.get(digest(a_key("turned"))) is None)
    assert (await send(up.entry, chat(key=a_key("turned")))).code == "unknown_key"
    await up.regional.store.put(issued_key("copied"), document("all"))
    await until(lambda: b'reason="key_misplaced"' in up.global_.metrics.render())
    assert issued_key("copied") in up.global_.tier_admin.status()["keys"]["problems"]
    await put(up, "twin")
    again = document("twin").replace(b'"id":"twin"', b'"id":"twin2"')
    await up.regional.store.put(issued_key("twin2"), again)
    await until(lambda: up.global_.keys.get(digest(a_key("twin"))) is None)


async def test_key_is_issued_and_revoked_by_the_command_through_a_real_etcd(
    up: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        etcd = await stack.enter_async_context(EmbeddedEtcd())
        store = EtcdStore(EtcdSettings((etcd.endpoint,)), Random(1))
        stack.push_async_callback(store.close)
        await store.open()
        tasks = Tasks()
        stack.push_async_callback(tasks.close)
        for balancer in (up.global_, up.regional):
            monkeypatch.setattr(balancer.keys, "_store", store)
            tasks.start(balancer.keys.follow(), "watch a real etcd")

        async def farhop(*words: str) -> Any:
            command = ["key", *words, "--etcd", etcd.endpoint, "--why", "test", "--by", "ann", "--json"]
            result = await asyncio.to_thread(CliRunner().invoke, app(), command)
            assert (result.exit_code, result.stderr) == (0, "")
            return json.loads(result.stdout)

        made = await farhop("create", "acme", "--model", MODEL)
        key, id_ = made["key"], made["keys"][0]["id"]
        assert key not in str(await store.list("/farhop/v1/"))
        for port, balancer in ((up.entry, up.global_), (up.client, up.regional)):
            await until(lambda book=balancer.keys: book.get(digest(key)) is not None)  # type: ignore[misc]
            assert (await send(port, chat(key=key))).status == 200
        await farhop("revoke", id_)
        assert etcd.pid is not None
        took_s = unhindered(os.getpid(), etcd.pid)
        for port in (up.entry, up.client):
            async with asyncio.timeout(60.0):
                while (answer := await send(port, chat(key=key))).status == 200:
                    await asyncio.sleep(0.02)
            assert answer.code == "key_not_valid"
        assert took_s() < 2.0
