"""Which region: score what is lawful and serving, and choose; near ties are drawn in proportion to free slots.

Never chooses outside the offers it is given, and gives its reasons with the choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farhop.balance import choose

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from random import Random

    from farhop.balance.machine import Request
    from global_lb.policy import Offer, Policy, Scored
    from topology.law import Verdict

TIE_MS = 1.0  # below what a wire time is known to


class Decision(msgspec.Struct, frozen=True):
    """The choice and why: the law's verdict, who was not serving and why, and the field best first."""

    verdict: Verdict
    absent: Mapping[str, str]
    field: tuple[Scored, ...]
    chosen: Scored | None


def pick(
    request: Request,
    output_tokens: float,
    offers: Sequence[Offer],
    verdict: Verdict,
    absent: Mapping[str, str],
    policy: Policy,
    rng: Random,
) -> Decision:
    """Choose among `offers`, all of them lawful and serving the model."""
    if not offers:
        return Decision(verdict, absent, (), None)
    scored = policy.score(request, output_tokens, offers)
    scores = [s.score_ms for s in scored]
    ties = choose.near_ties(scores, TIE_MS)
    index = ties[0] if len(ties) == 1 else ties[choose.draw([float(scored[i].slots_free) for i in ties], rng)]
    return Decision(verdict, absent, tuple(sorted(scored, key=lambda s: s.score_ms)), scored[index])
