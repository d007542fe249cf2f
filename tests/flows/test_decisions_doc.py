"""The worked examples of docs/decisions.md, executed against the shipped policy."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

from worlds import request

from farhop.balance import chain
from farhop.balance.machine import Address
from global_lb.policy import Offer, Predictive
from global_lb.view import Capacity, Instance

DOCUMENT = Path(__file__).parents[2] / "docs" / "decisions.md"
BYTES_PER_TOKEN = 4.0


def _offer(region: str, said: dict[str, Any], prompt_bytes: int) -> Offer:
    capacity = Capacity(
        wait_ms=said.get("wait_ms", 0.0),
        prefill_ms_per_token=0.0938,
        tpot_ms=said.get("tpot_ms", 25.0),
        bytes_per_token=BYTES_PER_TOKEN,
        replicas_ready=2,
        slots_free=100,
    )
    return Offer(
        region=region,
        rtt_ms=said.get("rtt_ms", 1.0),
        instance=Instance(f"{region}-0", region, Address("127.0.0.1", 1), 1, 0.0, 0.0, False, 0.0, {}),
        capacity=capacity,
        outstanding_bytes=said.get("unacknowledged_tokens", 0) * BYTES_PER_TOKEN,
        # Rounded up to a whole block: a hit of all of the prompt is all of it.
        depth=chain.depth_at(int(said.get("hit", 0.0) * prompt_bytes) + chain.BLOCK_BYTES[-1] - 1)
        if "hit" in said
        else 0,
        residence=said.get("residence", 1.0),
        penalty_ms=said.get("penalty_ms", 0.0),
    )


def decide(
    *, prompt_tokens: int, virginia: dict[str, Any], tokyo: dict[str, Any], output_tokens: int = 0
) -> list[tuple[str, int]]:
    """Regions and their scores in whole milliseconds, best first."""
    prompt_bytes = int(prompt_tokens * BYTES_PER_TOKEN)
    asked = request("a", prompt_bytes=prompt_bytes, body_bytes=prompt_bytes)
    offers = [_offer("virginia", virginia, prompt_bytes), _offer("tokyo", tokyo, prompt_bytes)]
    scored = Predictive().score(asked, output_tokens, offers)
    return sorted(((s.region, round(s.score_ms)) for s in scored), key=lambda pair: pair[1])


def test_every_worked_example_is_what_the_policy_says() -> None:
    found = doctest.testfile(str(DOCUMENT), module_relative=False, globs={"decide": decide})
    assert found.attempted >= 9
    assert found.failed == 0
