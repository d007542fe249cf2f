"""A region's ports: each with its own callers, and all of them closed, reconfigured and drained together."""

from __future__ import annotations

from inprocess import Both, chat, send

from farhop.balance import outcome
from farhop.relay import answers


async def test_a_key_opens_the_clients_port_and_a_token_the_tiers(up: Both) -> None:
    assert (await send(up.client, chat())).status == 200
    assert (await send(up.entry, chat())).status == 200
    assert (await send(up.tier, chat())).status == 401, "a client's key is nothing to it"


async def test_while_the_gate_is_shut_no_port_accepts_clients(up: Both) -> None:
    up.regional.listeners.gate(lambda: answers.refusal(outcome.ACCOUNTS_NOT_WRITABLE, "nothing is served unaccounted"))
    for port in (up.client, up.tier):
        answer = await send(port, chat())
        assert (answer.status, answer.code) == (503, outcome.ACCOUNTS_NOT_WRITABLE.reason)


async def test_priorities_by_objective_are_those_of_now(up: Both) -> None:
    up.regional.listeners.prioritise({"urgent": 7}.get)
    assert up.regional.listeners.authenticator.objective("urgent") == 7
    assert up.regional.listeners.authenticator.objective("gone") is None


async def test_a_configuration_is_made_ready_first_and_put_in_one_step(up: Both) -> None:
    listeners, plane = up.regional.listeners, up.regional.plane
    config = up.regional.config.model_copy(
        update={"limits": up.regional.config.limits.model_copy(update={"connect_s": 3.5})}
    )
    put = listeners.prepared(config)
    assert plane.pool.limits.connect_s != 3.5
    put()
    assert plane.pool.limits.connect_s == 3.5
    assert (await send(up.entry, chat())).status == 200, "the token's keys are the same ones"
