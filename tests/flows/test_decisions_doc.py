"""The worked examples of docs/understand/decisions.md, executed against the shipped policy."""

from __future__ import annotations

import doctest
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from worlds import candidates, law, request

from farhop.balance.prefix import chain
from global_lb.routing.pick import pick
from global_lb.routing.policy import Route, RouteConfig

DOCUMENT = Path(__file__).parents[2] / "docs" / "understand" / "decisions.md"
BYTES_PER_TOKEN = 4.0


def _region(text: dict[str, Any], prompt_bytes: int) -> dict[str, Any]:
    fields = {"rtt_ms": 1.0, "wait_ms": 0.0, "prefill_ms_per_token": 0.0938, "tpot_ms": 25.0, "slots_free": 100, **text}
    fields["bytes_per_token"] = BYTES_PER_TOKEN
    fields["unacknowledged_bytes"] = fields.pop("unacknowledged_tokens", 0) * BYTES_PER_TOKEN
    fields.pop("penalty_ms", None)
    if "hit" in fields:
        # Rounded up to a whole block: a hit of the whole prompt is the whole prompt.
        fields["depth"] = chain.depth_at(int(fields.pop("hit") * prompt_bytes) + chain.BLOCK_BYTES[-1] - 1)
    return fields


def decide(
    *,
    prompt_tokens: int,
    virginia: dict[str, Any],
    tokyo: dict[str, Any],
    output_tokens: int = 0,
    tools: bool = False,
    usual_tokens: int | None = None,
    route: dict[str, Any] | None = None,
) -> list[tuple[str, int]]:
    """Regions and their scores in whole milliseconds, best first."""
    prompt_bytes = int(prompt_tokens * BYTES_PER_TOKEN)
    asked = request("a", prompt_bytes=prompt_bytes, body_bytes=prompt_bytes, tools=tools)
    fields = {"virginia": virginia, "tokyo": tokyo}
    found = candidates(
        asked, output_tokens, "virginia", **{name: _region(one, prompt_bytes) for name, one in fields.items()}
    )
    found.mean_work_bytes = None if usual_tokens is None else usual_tokens * BYTES_PER_TOKEN
    penalty_ms = np.array([fields[name].get("penalty_ms", 0.0) for name in found.names])
    found.penalty_ms = penalty_ms if penalty_ms.any() else None
    decision = pick(
        found, law().request_verdict(asked), Route(RouteConfig(**(route or {}))), Random(1), 0.0, "virginia"
    )
    return [(s.region, round(s.score)) for s in decision.ranked]


def test_worked_examples_match_the_policy() -> None:
    found = doctest.testfile(str(DOCUMENT), module_relative=False, globs={"decide": decide})
    assert found.attempted >= 9
    assert found.failed == 0
