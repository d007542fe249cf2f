"""Which replica prefills for another: the earliest done with room, and only if it is worth it."""

from __future__ import annotations

import pytest
from worlds import MODEL, replica, replicas_of, request

from farhop.balance.ledger import Reservation
from regional_lb.fleet.replicas import Replicas
from regional_lb.scheduler.pairs import PAIR_MIN_TOKENS, prefiller
from regional_lb.scheduler.pick import NOTHING, Scored
from regional_lb.scheduler.policy import Need

NEED = Need(prompt_tokens=1000.0, output_tokens=50.0, bytes_per_token=4.0, chain=request("q", 4000).chain)


def _chosen(uncached: float = 1000.0) -> Scored:
    return Scored("d", 0.0, 1000.0 - uncached, uncached, uncached, 0.0, 0.1, 20.0)


def _p(name: str, **fields: object) -> object:
    return replica(name, role="prefill", **fields)


def _best(known: Replicas, hits: dict[str, int] | None = None, uncached: float = 1000.0) -> str | None:
    for name in known.view.replicas:
        known.health[name].probed(True, 0.0)
    table = known.table(known.able_to_prefill(MODEL, "vllm", 0.0))
    held = [(depth, table.of.at[name]) for name, depth in (hits or {}).items()]
    found = prefiller(NEED, _chosen(uncached), table, held, NOTHING, 0.0)
    return found.replica if found is not None else None


def test_the_replica_that_would_finish_the_prefill_first_is_chosen() -> None:
    busy = [Reservation("p1", 900, 900)]
    assert _best(replicas_of(_p("p1"), _p("p2"), reserved=busy)) == "p2"
    assert _best(replicas_of(_p("p1"), _p("p2", prefill_ms_per_token=0.3), reserved=busy)) == "p1"
    assert _best(replicas_of(_p("p1"), _p("p2")), {"p2": 4}) == "p2"  # it has some of it cached


def test_a_prefill_replica_without_room_is_skipped() -> None:
    full = [Reservation("p1", 2000, 2000), Reservation("p2", 0, 9500), Reservation("p3", 0, 1), Reservation("p3", 0, 1)]
    assert _best(replicas_of(_p("p1"), _p("p2"), _p("p3"), reserved=full)) is None


@pytest.mark.parametrize(("uncached", "found"), [(PAIR_MIN_TOKENS, None), (PAIR_MIN_TOKENS + 1, "p1")])
def test_few_uncached_tokens_are_not_prefilled_elsewhere(uncached: float, found: str | None) -> None:
    assert _best(replicas_of(_p("p1")), uncached=uncached) == found


def test_only_those_of_that_role_and_model_and_in_health() -> None:
    assert _best(replicas_of(replica("r1"), replica("r2", role="decode"))) is None
    assert _best(replicas_of(_p("p1", models=frozenset({"another"})))) is None
    known = replicas_of(_p("p1"), _p("p2"), replica("r1"))
    assert _best(known) == "p1"
    known.health["p1"].refused(0.0)
    known._able.clear()
    assert _best_now(known) == "p2"
    assert known.able(MODEL, 0.0).names == ("r1",)


def _best_now(known: Replicas) -> str | None:
    found = prefiller(NEED, _chosen(), known.table(known.able_to_prefill(MODEL, "vllm", 0.0)), (), NOTHING, 0.0)
    return found.replica if found is not None else None
