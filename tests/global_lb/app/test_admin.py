"""What a global balancer shows its operators."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from inprocess import Both, Engine, both, chat, send, topology, until

from farhop.identity.hop_token import HopSigner


@pytest.fixture
async def up(engine: Engine) -> AsyncIterator[Both]:
    async with both(engine, topology()) as running:
        yield running
        await running.at_rest()


async def test_the_status_names_every_known_region(up: Both) -> None:
    status = up.global_.tier_admin.status()
    assert status["store_trouble"] is None
    (region,) = status["regions"]
    assert (region["region"], region["state"]) == ("virginia", "up")
    assert region["rtt_ms"] > 0.0  # the map's, or what a ping took here
    assert region["instances"][0]["report_age_s"] < 3.0
    assert up.global_.tier_admin.ready()
    found = [{"hub": "main", "trouble": None}]  # operators' commands find it there
    await until(lambda: up.global_.tier_admin.status()["published"] == found)


async def test_a_region_that_takes_none_of_our_tokens_is_named(up: Both) -> None:
    """All else of it looks well: it reports, and its channel works."""

    def age_s() -> float | None:
        (region,) = up.global_.tier_admin.status()["regions"]
        age: float | None = region["token_rejected_age_s"]
        return age

    assert (await send(up.entry, chat())).status == 200
    assert age_s() is None
    up.global_.tier.resign(HopSigner({"k1": b"y" * 32}, "k1", "virginia"), lambda _region: False)
    answer = await send(up.entry, chat())
    assert (answer.status, "hop_token_rejected" in answer.json["error"]["message"]) == (503, True)
    found = age_s()
    assert found is not None
    assert found < 60.0
