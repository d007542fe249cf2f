"""`POST /v1/route`: the decision and nothing else, under the same law and the same errors as the request itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from math import inf

import msgspec
import pytest
from inprocess import MODEL, Both, Engine, both, chat, head, send, tenant, topology

from farhop_lab.world.ports import free_ports
from global_lb.fleet.view import RegionForced
from global_lb.routing.policy import RouteConfig
from global_lb.routing.routes import RoutesChanged

BODY = msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8})
WORLD = topology(tenant("eastern", residency={"processing": {"allow": ["jp"]}}))


@pytest.fixture
async def up(engine: Engine) -> AsyncIterator[Both]:
    (port,) = free_ports(1)
    client = {"port": port, "url": f"http://127.0.0.1:{port}"}
    async with both(engine, WORLD, regional={"client": client}) as running:
        yield running
        await running.at_rest()


@pytest.mark.parametrize("path", ["/v1/route", "/v1/route/v1/chat/completions", "/v1/route/v1/chat/completions?a=1"])
async def test_advice_gives_the_decision_and_sends_nothing(up: Both, engine: Engine, path: str) -> None:
    answer = await send(up.entry, chat(path=path))
    assert answer.status == 200
    found = answer.json
    query = "?a=1" if "?" in path else ""
    assert found["url"] == f"http://127.0.0.1:{up.client}/v1/chat/completions{query}"
    assert (found["region"], found["chosen"]["region"]) == ("virginia", "virginia")
    assert found["policy"] == "predictive"
    assert found["chosen"]["ttft_ms"] > 0
    assert found["runners_up"] == []
    assert found["expires_in_ms"] is None
    assert found["law_epoch"] == up.global_.flow.law.epoch
    assert (answer.headers["x-farhop-region"], answer.headers["x-farhop-decision"]) == ("virginia", found["decision"])
    assert f"127.0.0.1:{up.tier}" not in answer.body.decode(), "an address inside the fleet"
    assert up.global_.flow.ledger.load("virginia").in_flight == 0
    assert engine.seen == []
    record = up.global_.decisions.get(found["decision"])
    assert (record["outcome"], record["reasons"]["chosen"]) == ("advised", "virginia")


async def test_the_token_is_given_on_request_and_valid_for_one_use(up: Both, engine: Engine) -> None:
    found = (await send(up.entry, chat(path="/v1/route", x_farhop_token="yes"))).json
    assert found["expires_in_ms"] == 30_000
    target = found["url"].removeprefix(f"http://127.0.0.1:{up.client}")
    bare = head("POST", target, content_length=str(len(BODY))) + BODY
    answer = await send(up.client, bare)
    assert (answer.status, answer.headers["x-farhop-decision"]) == (200, found["decision"])
    assert (await send(up.client, bare)).code == "redirect_token_over"
    assert "farhop-pass" not in str(up.global_.decisions.get(found["decision"]))


@pytest.mark.parametrize(
    ("allow", "status", "code"), [("us", 200, ""), ("jp", 451, "unlawful_here"), ("a b", 400, "invalid_field")]
)
async def test_a_client_with_a_redirect_token_may_still_narrow_its_request(
    up: Both, engine: Engine, allow: str, status: int, code: str
) -> None:
    """The token is of what was asked about, and says nothing of what the request itself asks for."""
    found = (await send(up.entry, chat(path="/v1/route", x_farhop_token="yes"))).json
    target = found["url"].removeprefix(f"http://127.0.0.1:{up.client}")
    answer = await send(up.client, head("POST", target, content_length=str(len(BODY)), x_farhop_allow=allow) + BODY)
    assert answer.status == status
    assert status == 200 or answer.code == code
    assert len(engine.seen) == (status == 200)


async def test_client_does_not_see_author_and_reason_of_a_drain(up: Both) -> None:
    """By default the name is user@host, and the reason may name another tenant."""
    drained = RegionForced("frankfurt", drain=True, why="globex's leak (by root@bastion-3)", until=inf)
    up.global_.relay.react(drained)
    found = (await send(up.entry, chat(path="/v1/route"))).json
    assert found["not_serving"]["frankfurt"] == "draining"
    record = up.global_.decisions.get(found["decision"])
    assert record["reasons"]["not_serving"]["frankfurt"] == f"draining: {drained.why}"
    for path in ("/v1/route", "/v1/chat/completions"):
        refused = await send(up.entry, chat(path=path, x_farhop_allow="de"))
        assert (refused.status, refused.code) == (503, "no_region_serving")
        assert "(frankfurt: draining)" in refused.json["error"]["message"]


async def test_advice_is_refused_with_the_errors_of_the_request_itself(up: Both, engine: Engine) -> None:
    for request, status, code in (
        (chat(None, path="/v1/route"), 401, "missing_key"),
        (chat("sk-nobody", path="/v1/route"), 401, "unknown_key"),
        (chat(path="/v1/route", x_farhop_allow="cn"), 451, "no_lawful_region"),
        (chat("sk-farhop-eastern", path="/v1/route"), 503, "no_region_serving"),
        (chat(path="/v1/route/v1/completions", body={"model": "no-such", "prompt": "hi"}), 404, "model_not_found"),
        (chat(path="/v1/route", body=b"{"), 400, "invalid_json"),
        (head("GET", "/v1/route"), 405, "method_not_allowed"),
        (chat(path="/v1/route/v1/models"), 405, "method_not_allowed"),
        (head("GET", "/v1/route/v1/models", authorization="Bearer sk-farhop-anywhere"), 404, "path_not_allowed"),
        (chat(path="/v1/route/flush_cache"), 404, "path_not_allowed"),
        (chat(path="/v1/routes"), 404, "path_not_allowed"),
        (chat(path="/v1/route/v1/route"), 404, "path_not_allowed"),
    ):
        answer = await send(up.entry, request)
        assert (answer.status, answer.code) == (status, code), request
    assert (await send(up.client, chat(path="/v1/route"))).code == "path_not_allowed", (
        "a region does not choose regions"
    )
    assert engine.seen == []


async def test_advice_is_given_only_where_the_route_allows_it(up: Both) -> None:
    up.global_.relay.react(RoutesChanged({("anywhere", ""): RouteConfig(advise=False)}))
    answer = await send(up.entry, chat(path="/v1/route"))
    assert (answer.status, answer.code) == (404, "path_not_allowed")
    assert "not told for this tenant" in answer.json["error"]["message"]


async def test_other_inference_paths_have_a_route_too(up: Both) -> None:
    body = {"model": MODEL, "prompt": "Once"}
    found = (await send(up.entry, chat(path="/v1/route/v1/completions", body=body))).json
    assert found["url"].endswith("/v1/completions")
