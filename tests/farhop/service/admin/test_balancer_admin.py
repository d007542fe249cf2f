"""What both tiers' admin ports show: the process and the law, and the request that a question describes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from inprocess import MODEL, Both, Engine, both, topology

from farhop.service.admin.server import ExplainError, Question
from farhop.telemetry.release import release


@pytest.fixture
async def up(engine: Engine) -> AsyncIterator[Both]:
    async with both(engine, topology()) as running:
        yield running
        await running.at_rest()


def question(path: str = "/v1/completions", **body: Any) -> Question:
    whole = {"model": MODEL, "prompt": "why", **body}
    return Question(msgspec.Raw(msgspec.json.encode(whole)), "anywhere", path)


async def test_both_tiers_show_their_process_and_what_they_know_themselves(up: Both) -> None:
    above, below = up.global_.tier_admin.status(), up.regional.tier_admin.status()
    of_both = ("version", "law_epoch", "configuration", "kept", "ignored", "accounts", "under_way")
    assert {name: above[name] for name in of_both} == {name: below[name] for name in of_both}
    assert (above["version"], above["law_epoch"], above["accounts"]) == (release(), 1, {})
    assert (above["tier"], below["tier"]) == ("global", "regional")
    assert "regions" in above
    assert "root" in below["limits"]
    assert below["law"].keys() - above["law"].keys() == {"newest_named"}


async def test_a_question_becomes_the_request_that_a_client_would_send(up: Both) -> None:
    for balancer in (up.global_, up.regional):
        request = balancer.tier_admin.compose(question(max_tokens=7))
        assert (request.model, request.tenant, request.max_tokens) == (MODEL, "anywhere", 7)


@pytest.mark.parametrize(
    ("asked", "why"), [(question("/v1/models"), "GET, HEAD only"), (question(prompt={}), "prompt")]
)
async def test_a_question_that_no_client_could_ask_is_refused_with_the_reason(
    up: Both, asked: Question, why: str
) -> None:
    for balancer in (up.global_, up.regional):
        with pytest.raises(ExplainError, match=why):
            balancer.tier_admin.compose(asked)
