"""Limits on real sockets: one tenant, two regions, one quota; a real etcd; what clients and the OpenAI SDK see."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from inprocess import (
    HOP_KEY,
    Answer,
    Both,
    Engine,
    chat,
    global_config,
    regional_config,
    send,
    streaming,
    tenant,
    topology,
    until,
)

from farhop.store.documents import limits as documents
from farhop.store.documents.limits import Limit, TenantLimits
from farhop.store.etcd import EtcdStore
from farhop.store.etcd_settings import EtcdSettings
from farhop_lab.world.etcd import EmbeddedEtcd
from global_lb.app.main import GlobalBalancer
from regional_lb.app.main import RegionalBalancer

if TYPE_CHECKING:
    import openai

SDKS = ("openai",)  # see conftest.py
NOW = datetime.now(UTC)


BOOK = """
epochs:
- epoch: 1
  since: 2020-01-01T00:00:00Z
  models:
    llama-3.1-8b: {input: 10.0, output: 100.0}
"""


class Regions:
    """Virginia and Frankfurt, each with both tiers, over one etcd and one engine."""

    def __init__(self, store: EtcdStore, engine: Engine) -> None:
        self.store, self.engine, self.both = store, engine, list[Both]()

    async def limit(self, home: str = "virginia", seq: int = 1, tenant: str = "acme", **sizes: Any) -> None:
        """Limit a tenant, and wait until everybody knows."""
        one = TenantLimits(
            tenant=tenant, home=home, limits=(Limit(**sizes),), author="ann", why="test", at=NOW, seq=seq
        )
        await self.store.put(one.place, documents.encode(one))
        for both in self.both:
            await until(lambda both=both: both.global_.limits.tenants().get(tenant) == one)  # type: ignore[misc]
        lends = [both.regional.mesh.limit_root.status for both in self.both]
        await until(lambda: any(status()["lends"] for status in lends))
        await until(lambda: all(b.global_.limiter.status()["lent_by"][home]["root"] for b in self.both))


@pytest.fixture
async def up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Regions]:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    for module in ("limits.limiter", "admission.ingress"):  # a loan in time, also on a busy machine
        monkeypatch.setattr(f"farhop.service.{module}.WAIT_S", 30.0)
    (tmp_path / "prices.yaml").write_text(BOOK)
    usage = {"dir": str(tmp_path / "usage"), "prices": str(tmp_path / "prices.yaml")}
    async with AsyncExitStack() as stack:
        etcd = await stack.enter_async_context(EmbeddedEtcd())
        engine = await stack.enter_async_context(Engine().running())
        world = topology(tenant("acme"), tenant("globex"))

        def store(seed: int) -> EtcdStore:
            return EtcdStore(EtcdSettings((etcd.endpoint,)), Random(seed))

        own = store(1)
        await own.open()
        stack.push_async_callback(own.close)
        regions = Regions(own, engine)
        for seed, name in enumerate(("virginia", "frankfurt")):
            below = RegionalBalancer(regional_config(engine, name, usage=usage), world, Random(seed), store(10 + seed))
            above = GlobalBalancer(global_config(name, usage=usage), world, Random(seed), store(20 + seed))
            stack.push_async_callback(below.close)
            stack.push_async_callback(above.close)
            lines = (await below.open(), await above.open())
            regions.both.append(Both(below, above, lines))
        for both in regions.both:
            await until(both.global_.tier_admin.ready)
        yield regions
        for both in regions.both:
            await both.at_rest()


def asked() -> bytes:
    return chat(key="sk-farhop-acme")


async def test_a_quota_does_not_multiply_by_regions(up: Regions) -> None:
    await up.limit(requests_per_minute=10)
    entries = [*(both.entry for both in up.both), up.both[0].client]  # the last is the region's own if it is lent out
    answers = await asyncio.gather(*(send(entries[n % 3], asked()) for n in range(24)))
    while (served := [answer for answer in answers if answer.status == 200])[9:] == []:
        answers.append(await send(entries[0], asked()))  # on a busy machine some got no loan in time
    refused = [answer for answer in answers if answer.status == 429]
    assert (len(served), len(refused)) == (10, len(answers) - 10)
    while (last := await send(entries[0], asked())).status == 200:
        pass  # one comes free every six seconds
    error, headers = last.json["error"], last.headers
    assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
    assert "10 requests per minute" in error["message"]
    assert headers["x-ratelimit-limit-requests"] == "10"
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert headers["x-should-retry"] == "true"
    assert 0 < int(headers["retry-after-ms"]) <= 1000 * int(headers["retry-after"]) <= 60_000
    assert headers["ratelimit-policy"] == '"requests";q=10;w=60'
    assert headers["ratelimit"].startswith('"requests";r=0;t=')
    assert served[0].headers["x-ratelimit-limit-requests"] == "10"


@pytest.mark.long
async def test_idle_quota_of_a_pool_of_two_tenants_is_lent_and_each_tenant_keeps_its_own(up: Regions) -> None:
    for name in ("acme", "globex"):
        await up.limit(tenant=name, requests_per_minute=120, pool="gold")
    entries, began = [both.entry for both in up.both], time.monotonic()
    served = dict.fromkeys(("acme", "globex"), 0)

    async def ask(name: str, n: int) -> int:
        """So many at once; how many were served."""
        answers = await asyncio.gather(*(send(entries[i % 2], chat(key=f"sk-farhop-{name}")) for i in range(n)))
        assert {one.status for one in answers} <= {200, 429}
        won = sum(one.status == 200 for one in answers)
        served[name] += won
        return won

    def borrowed() -> dict[str, float]:
        buckets = up.both[0].regional.mesh.limit_root.status()["buckets"]
        return {name: one.get("borrowed", 0.0) for name, one in buckets.items()}

    async with asyncio.timeout(60.0):
        while sum(borrowed().values()) < 20:
            await ask("acme", 8)
            await asyncio.sleep(0.1)
    assert [name for name, n in borrowed().items() if n] == [name for name in borrowed() if "acme" in name]
    won = 0
    async with asyncio.timeout(60.0):
        while won < 110:  # of the 120 that are its own; acme continues
            won += await ask("globex", 20)
            await ask("acme", 4)
    assert sum(served.values()) <= 2 * 120 + (10 + time.monotonic() - began) * 2 * 2


async def test_tokens_are_settled_by_what_the_engine_counts_and_what_never_fits_is_refused(up: Regions) -> None:
    await up.limit(home="frankfurt", tokens_per_minute=500)
    entry = up.both[0].entry
    body = {"model": "llama-3.1-8b", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 400}
    ask = chat(key="sk-farhop-acme", body=body)
    first = await send(entry, ask)
    assert first.status == 200
    root = up.both[1].regional.mesh.limit_root
    # 11 tokens of prompt and 3 of answer, by the engine's own count.
    await until(lambda: 10 <= next(iter(root.status()["buckets"].values()))["used"] <= 14)
    assert (await send(entry, ask)).status == 200
    large = await send(entry, chat(key="sk-farhop-acme", body={**body, "max_tokens": 600}))
    assert (large.status, large.json["error"]["type"]) == (429, "tokens")
    assert large.headers["x-should-retry"] == "false"
    assert "retry-after" not in large.headers


async def test_sdk_retries_after_the_retry_after_time(up: Regions) -> None:
    await up.limit(requests_per_minute=60)
    both = up.both[0]
    sdk = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{both.entry}/v1", api_key="sk-farhop-acme", max_retries=2)
    async with sdk:

        async def refused_once() -> Answer:
            """One comes free each second: where that many are asked in less, one is refused."""
            for _ in range(60):
                if (answer := await send(both.entry, asked())).status == 429:
                    return answer
            raise AssertionError("none was refused")

        async def say() -> None:
            await sdk.chat.completions.create(
                model="llama-3.1-8b", messages=[{"role": "user", "content": "hello"}], max_tokens=8
            )

        answers = await asyncio.gather(*(send(both.entry, asked()) for _ in range(60)))
        while sum(answer.status == 200 for answer in answers) < 60:
            answers.append(await send(both.entry, asked()))  # on a busy machine some got no loan in time
        async with asyncio.timeout(60.0):  # Retry-After is two seconds if there was no loan in time
            while int((await refused_once()).headers["retry-after-ms"]) > 1100:
                pass
        await say()  # refused at first; it waits for the given time, and is served
        with pytest.raises(openai.RateLimitError) as failed:
            for _ in range(60):
                await refused_once()
                await sdk.with_options(max_retries=0).chat.completions.create(
                    model="llama-3.1-8b", messages=[{"role": "user", "content": "hello"}], max_tokens=8
                )
        assert failed.value.code == "rate_limit_exceeded"


async def test_successor_of_a_quota_root_keeps_all_usage(up: Regions) -> None:
    await up.limit(requests_per_minute=10)
    virginia = up.both[0].regional
    assert [answer.status for answer in [await send(up.both[1].entry, asked()) for _ in range(6)]] == [200] * 6
    await virginia.mesh.limit_root.close()
    claim = documents.decode_root((await up.store.get("/farhop/v1/limit-root/virginia")).value)  # type: ignore[union-attr]
    assert claim.instance == ""
    assert set(claim.marks.values()) == {10}, "of a minute's limit all counts as used"


def opened() -> bytes:
    return chat(key="sk-farhop-acme", body=streaming())


@pytest.mark.long
async def test_concurrency_limit_holds_in_all_regions_however_requests_end(up: Regions) -> None:
    await up.limit(concurrency=4)
    entries = [*(both.entry for both in up.both), up.both[0].client]
    up.engine.behaviour = "pause"
    asking = [asyncio.create_task(send(entries[n % 3], opened())) for n in range(12)]
    await until(lambda: sum(one.done() for one in asking) + len(up.engine.seen) == 12)
    answers, open_ = [one.result() for one in asking if one.done()], [one for one in asking if not one.done()]
    assert [one.status for one in answers] == [429] * 8
    assert len(up.engine.seen) == len(open_) == 4
    refused = answers[0]
    assert (refused.json["error"]["type"], refused.json["error"]["code"]) == ("concurrency", "rate_limit_exceeded")
    assert refused.headers["x-ratelimit-limit-concurrency"] == "4"
    assert refused.headers["ratelimit-policy"] == '"concurrency";q=4;qu="concurrent-requests"'
    assert int(refused.headers["retry-after-ms"]) > 0
    for one in open_[:2]:
        one.cancel()  # its client has left

    def held() -> float:
        (slots,) = up.both[0].regional.mesh.limit_root.status()["buckets"].values()
        return float(slots["used"] + slots["lent"])

    await until(lambda: held() == 2)
    up.engine.behaviour = "serve"
    assert (await send(entries[1], opened())).status == 200
    up.engine.release.set()
    ended = await asyncio.gather(*open_[2:])
    assert [one.status for one in ended] == [200, 200]
    up.engine.behaviour = "error"
    assert (await send(entries[0], asked())).status >= 500
    await until(lambda: held() == 0)
    up.engine.behaviour = "serve"
    answers = [await send(entries[n % 3], asked()) for n in range(12)]
    assert {one.status for one in answers} == {200}, "one after the other"


async def test_money_budget_holds_across_regions_and_is_settled_at_usage_prices(
    up: Regions,
) -> None:
    # A request may cost up to 40 x 100 microdollars and its prompt; it comes to 11 x 10 + 3 x 100.
    await up.limit(micro_usd_per_day=40_000)
    entries = [*(both.entry for both in up.both), up.both[0].client]
    body = {"model": "llama-3.1-8b", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 40}
    ask, cost = chat(key="sk-farhop-acme", body=body), 11 * 10 + 3 * 100
    answers = [await send(entries[n % 3], ask) for n in range(6)]
    assert {answer.status for answer in answers} == {200}
    assert answers[-1].headers["x-ratelimit-limit-micro-usd"] == "40000"
    (root,) = [both.regional.mesh.limit_root for both in up.both if both.regional.mesh.limit_root.status()["lends"]]

    def spent() -> float:
        (level,) = root.status()["buckets"].values()
        return float(level["used"])

    await until(lambda: 6 * cost - 20 <= spent() <= 6 * cost)  # about 10 leak in the meantime
    up.engine.behaviour = "pause"
    slow = chat(key="sk-farhop-acme", body={**streaming(), "max_tokens": 90})
    asking = [asyncio.create_task(send(entries[n % 3], slow)) for n in range(9)]

    async def refusals() -> list[Answer]:
        """Once each request is either refused or with the engine."""
        await until(lambda: sum(one.done() for one in asking) + len(up.engine.seen) - 6 == len(asking))
        assert 0 < len(up.engine.seen) - 6 <= 4, "no more than the budget could pay for at most"
        answers = [one.result() for one in asking if one.done()]
        assert {(one.status, one.code) for one in answers} == {(429, "insufficient_quota")}
        return answers

    # On a busy machine a root may not lend in time, and then reports that one request may come again.
    while not (used_up := [one for one in await refusals() if one.headers["x-should-retry"] == "false"]):
        asking.append(asyncio.create_task(send(entries[0], slow)))
    refused = used_up[0]
    assert refused.json["error"]["type"] == "insufficient_quota"
    assert "budget used up: 0.04 USD per day" in refused.json["error"]["message"]
    assert int(refused.headers["retry-after-ms"]) > 0
    up.engine.release.set()
    await asyncio.gather(*asking)


async def test_a_model_without_a_price_is_refused_where_money_is_limited(up: Regions) -> None:
    await up.limit(micro_usd_per_day=40_000)
    body = {"model": "unknown", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 40}
    for entry in (up.both[1].entry, up.both[0].client):
        refused = await send(entry, chat(key="sk-farhop-acme", body=body))
        assert (refused.status, refused.code) == (429, "model_not_priced")
        assert (refused.json["error"]["type"], refused.json["error"]["param"]) == ("insufficient_quota", "model")
    assert up.engine.seen == []
