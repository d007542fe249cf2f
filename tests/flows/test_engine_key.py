"""An engine that does not accept our key for it is no fault of the client: another replica, then another region, has
the request, and a client that no engine serves learns that the operator must mend it."""

from __future__ import annotations

import pytest
from inprocess import MODEL, Engine, both, chat, send, topology, until

from farhop.balance import outcome

WORLD = topology()


@pytest.mark.parametrize("status", sorted(outcome.KEY_REFUSALS))
async def test_a_replica_that_refuses_our_key_is_passed_over(engine: Engine, status: int) -> None:
    async with Engine().running() as other:
        other.behaviour, other.status = "error", status
        replicas = [
            {"url": f"http://{one.address}", "models": [MODEL], "name": name}
            for name, one in (("accepts", engine), ("refuses", other))
        ]
        async with both(engine, WORLD, regional={"replicas": replicas}) as up:
            await until(lambda: all(r["state"] == "up" for r in up.regional.tier_admin.status()["replicas"]))
            for port in (up.entry, up.client):
                answers = [await send(port, chat()) for _ in range(8)]
                assert {answer.status for answer in answers} == {200}
            assert other.seen  # it was asked
            page = up.regional.metrics.render().decode()
            assert 'outcome="engine_key_refused"' in page


@pytest.mark.parametrize("status", sorted(outcome.KEY_REFUSALS))
async def test_where_no_engine_accepts_our_key_the_client_is_not_told_that_its_own_is_wrong(
    engine: Engine, status: int
) -> None:
    async with both(engine, WORLD) as up:
        engine.behaviour, engine.status = "error", status
        answers = [await send(port, chat()) for port in (up.client, up.entry)]
        codes = [(answer.status, answer.json["error"]["code"]) for answer in answers]
        assert codes == [(502, "engine_key_refused"), (503, "no_region_serving")]
        messages = [answer.json["error"]["message"] for answer in answers]
        assert "set `engine_key`" in messages[0]
        assert "engine_key_refused" in messages[1]
        assert not any("www-authenticate" in answer.headers for answer in answers)
