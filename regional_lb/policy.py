"""Scoring replicas for one request: `predictive`, in milliseconds, lower is better.

    score_ms(i) = (prefill backlog(i) + uncached(i)) * prefill_ms_per_token(i) + beta * m * (tpot_ms(i) - min tpot)

Scoring never writes, and never filters: who may be scored is `pick`'s business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from farhop.balance import chain, cost

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from farhop.balance.estimate import Speed
    from farhop.balance.ledger import Ledger
    from regional_lb.view import Replica

BETA = 0.25  # how much of a later token counts against the first: TTFT alone drowns decode (DESIGN: GORGO's finding)


class Need(msgspec.Struct, frozen=True):
    """One request in the model's tokens."""

    prompt_tokens: float
    output_tokens: float
    bytes_per_token: float


class Scored(msgspec.Struct, frozen=True):
    """A replica's score and what it is made of."""

    replica: str
    score_ms: float
    hit_tokens: float
    uncached_tokens: float
    backlog_tokens: float
    prefill_ms_per_token: float
    tpot_ms: float


class Policy(Protocol):
    """How a replica is preferred."""

    def score(
        self,
        need: Need,
        replicas: Sequence[Replica],
        hits: Mapping[str, int],
        ledger: Ledger,
        speeds: Mapping[str, Speed],
    ) -> list[Scored]:
        """One Scored per replica, in the same order. `hits` gives the matched depth of the prefix chain by name."""
        ...


class Predictive:
    """The default: predicted milliseconds until the first token, and what later tokens cost."""

    def score(
        self,
        need: Need,
        replicas: Sequence[Replica],
        hits: Mapping[str, int],
        ledger: Ledger,
        speeds: Mapping[str, Speed],
    ) -> list[Scored]:
        """See the module's head."""
        tpots_ms = [speeds[replica.name].tpot_ms for replica in replicas]
        tpot_best_ms = min(tpots_ms, default=0.0)
        prompt, output = need.prompt_tokens, need.output_tokens
        hit_of, load_of = hits.get, ledger.load
        scored: list[Scored] = []
        for replica, tpot_ms in zip(replicas, tpots_ms, strict=True):
            name = replica.name
            depth = hit_of(name)
            hit = min(chain.bytes_at(depth) / need.bytes_per_token, prompt) if depth else 0.0
            uncached, backlog = prompt - hit, load_of(name).prefill_tokens
            prefill_ms = speeds[name].prefill_ms_per_token
            score_ms = cost.replica_score_ms(backlog, uncached, prefill_ms, output, tpot_ms, tpot_best_ms, BETA)
            scored.append(Scored(name, score_ms, hit, uncached, backlog, prefill_ms, tpot_ms))
        return scored
