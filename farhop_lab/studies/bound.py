"""An upper bound for every router: a relaxation of the engines' arithmetic on the same work, by weak duality.

Relaxed, each in the routers' favour: no network, no law, no arrivals (all work is there from the start), requests may
be split over replicas, every prefix that any earlier request has is cached everywhere, and only steps take time. What
is left is `Profile.step_ms` summed over a replica's steps: with S steps, U milliseconds of arithmetic for prompts, D
decoded tokens and C tokens of context that they read, time >= overhead * S + max(floor * S, U) + per_sequence * D +
kv_read * C. A step decodes at most `sequences_max`, and what these hold alone must fit the KV cache, so S is at least
each of two sums over requests. Any convex mixture of these is a price in milliseconds that a request cannot fall below
on that GPU; any prices of GPU time then bound the linear program from above (weak duality), so the search below may
stop anywhere and stay valid.

Pure. Uses the work and the fleet alone, never a router's results.
"""

from __future__ import annotations

from functools import reduce
from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from farhop_lab.engine.core.profiles import PROFILES
from farhop_lab.engine.core.text import TOKEN_BYTES, token_count
from farhop_lab.scenarios.work import days_of, schedules
from farhop_lab.workloads.prose import prose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from farhop_lab.engine.core.profiles import Profile
    from farhop_lab.scenarios.load import Scenario
    from farhop_lab.workloads.program import Ask, Start

Column: TypeAlias = NDArray[np.float64]

_MIXTURES = tuple((theta / 4.0, alpha) for theta in range(5) for alpha in (0.0, 0.5, 1.0))
_ROUNDS, _HALVINGS = 4, 24
_BLOCK_TOKENS = 16


class Demand(msgspec.Struct, frozen=True):
    """One request, in tokens: the part of its prompt that no earlier request has, its answer, and the context before
    its own.
    """

    own_tokens: int
    answer_tokens: int
    shared_tokens: int = 0


def demands(scenario: Scenario, seed: int, load: float) -> list[Demand]:
    """All requests of an open-loop scenario until its end, whatever serves them. ValueError for closed loops: what
    their clients ask depends on the router.
    """
    doc = scenario.doc
    if any(work.clients for work in doc.work):
        raise ValueError("work: a closed loop asks the faster router for more; give `per_s` or a trace")
    days = days_of(doc.days, doc.day_s)
    asks: list[Ask] = []
    answers: list[bytes] = []
    for i, work in enumerate(doc.work):
        for schedule in schedules(work, f"{scenario.work_name} {i}", seed, load, days, scenario.folder, doc.duration_s):
            for start in schedule:
                if start.at >= doc.duration_s:
                    break
                for ask, answer in _asked(start, doc.duration_s, _token_s(scenario)):
                    asks.append(ask)
                    answers.append(answer)
    return _uncached(asks, answers)


def _token_s(scenario: Scenario) -> float:
    """Seconds between tokens on the fastest GPU, alone."""
    return min(PROFILES[name].step_ms(0, 1) for name in fleet_of(scenario)) / 1e3


def _asked(start: Start, until: float, token_s: float) -> Iterator[tuple[Ask, bytes]]:
    """The requests of a program before the end, if every answer came as fast as the fastest GPU decodes it alone."""
    program, at, before = start.make(), start.at, start.at
    batch = next(program, None)
    while batch is not None:
        answers = tuple(
            prose(f"answer {xxhash.xxh3_64_hexdigest(ask.prompt)}", ask.answer_tokens or 0) for ask in batch
        )
        sends = [max(at + ask.think_s, before + ask.since_s) for ask in batch]
        yield from ((ask, text) for ask, text, sent in zip(batch, answers, sends, strict=True) if sent < until)
        took = (token_s * ((ask.answer_tokens or 1) - 1) for ask in batch)
        before, at = min(sends), max(map(sum, zip(sends, took, strict=True)))
        if at >= until:
            program.close()
            return
        try:
            batch = program.send(answers)
        except StopIteration:
            return


def _uncached(asks: Sequence[Ask], answers: Sequence[bytes]) -> list[Demand]:
    """The union of all prompts, each block counted for the first that has it: whichever of them are served, in whatever
    order, at least the sum of theirs is computed.
    """
    known: set[int] = set()
    found = []
    for ask, answer in zip(asks, answers, strict=True):
        hit, chain, fresh = 0, xxhash.xxh3_64(), False
        text, size = ask.prompt + answer, _BLOCK_TOKENS * TOKEN_BYTES
        for at in range(0, len(text) - size + 1, size):
            chain.update(text[at : at + size])
            digest = chain.intdigest()
            fresh = fresh or digest not in known
            hit += not fresh and at + size <= len(ask.prompt)
            known.add(digest)
        own = max(0, token_count(ask.prompt) - hit * _BLOCK_TOKENS)
        found.append(Demand(own, ask.answer_tokens or 1, hit * _BLOCK_TOKENS))
    return found


def cost_ms(demand: Demand, profile: Profile, theta: float, alpha: float) -> float:
    """The least milliseconds of this GPU that it takes, by one mixture of the bounds; both shares within 0..1."""
    return float(_mixed(_parts(demand, profile), profile, theta, alpha))


def _parts(demand: Demand, profile: Profile) -> tuple[float, float, float, float]:
    """What its cost is made of in all mixtures: steps, tokens held in each, tokens read in all, its prefill."""
    decoded = max(0, demand.answer_tokens - 1)
    held = demand.own_tokens + decoded / 2.0
    read = decoded * (demand.shared_tokens + held)
    return decoded, held, read, profile.prefill_ms(demand.own_tokens, demand.shared_tokens)


def _mixed(parts: Any, profile: Profile, theta: float, alpha: float) -> Any:
    """The cost, of parts that are numbers or columns of them."""
    decoded, held, read, prefill_ms = parts
    steps = decoded * (alpha / profile.sequences_max + (1.0 - alpha) * held / profile.kv_tokens)
    return (
        profile.decode_ms_per_sequence * decoded
        + profile.kv_read_ms_per_token * read
        + (1.0 - theta) * prefill_ms
        + (profile.step_overhead_ms + theta * profile.decode_floor_ms) * steps
    )


def answers_max(work: Sequence[Demand], fleet: Mapping[str, int], seconds: float) -> float:
    """The most of these requests that the fleet (replicas by GPU) can answer within this many seconds."""
    counts = np.array(list(fleet.values()), dtype=float)

    def dual(prices: Column, least: Column) -> float:
        rent = float(prices @ counts) * seconds * 1e3
        return rent + float(np.maximum(0.0, 1.0 - least).sum())

    return min(float(len(work)), _least(work, fleet, dual))


def share_max(work: Sequence[Demand], fleet: Mapping[str, int], seconds: float) -> float:
    """The largest share of *every* request that the fleet can do within this many seconds, above 1 if it can do more:
    the capacity that a load is a share of. Infinite for no work.
    """
    counts = np.array(list(fleet.values()), dtype=float)

    def dual(prices: Column, least: Column) -> float:
        rent = float(prices @ counts) * seconds * 1e3
        needed = float(least.sum())
        return rent / needed if needed > 0.0 else inf

    return _least(work, fleet, dual)


def fleet_of(scenario: Scenario) -> dict[str, int]:
    """Replicas by GPU."""
    fleet: dict[str, int] = {}
    for site in scenario.doc.sites.values():
        fleet[site.gpu] = fleet.get(site.gpu, 0) + site.replicas
    return fleet


def _least(work: Sequence[Demand], fleet: Mapping[str, int], dual: Callable[[Column, Column], float]) -> float:
    """The least over all mixtures and some prices by GPU; `dual` has each request's cost where it costs least, too.
    Every value of it is a bound, so the least value seen is one, too.
    """
    if not work:
        return dual(np.zeros(len(fleet)), np.ones(0))
    best = inf
    profiles = [PROFILES[name] for name in fleet]
    parts = [np.array([_parts(one, profile) for one in work]).T.copy() for profile in profiles]
    for theta, alpha in _MIXTURES:
        costs = [_mixed(of, profile, theta, alpha) for of, profile in zip(parts, profiles, strict=True)]
        means = [mean or 1e-9 for mean in np.array(costs).T.copy().mean(axis=0).tolist()]
        prices = 1.0 / np.array(means)
        for _ in range(_ROUNDS if len(prices) > 1 else 1):
            for gpu, mean in enumerate(means):
                # While one price is searched, what each request costs at the others stays.
                elsewhere = _cheapest(costs, prices, but=gpu)

                def value(
                    at: float,
                    gpu: int = gpu,
                    prices: Column = prices,
                    costs: Column = costs[gpu],
                    elsewhere: Column | None = elsewhere,
                ) -> float:
                    prices[gpu] = at
                    here = costs * at
                    return dual(prices, here if elsewhere is None else np.minimum(here, elsewhere))

                prices[gpu] = _searched(value, mean)
        every = _cheapest(costs, prices)
        assert every is not None
        best = min(best, dual(prices, every))
    return best


def _cheapest(costs: Sequence[Column], prices: Column, but: int = -1) -> Column | None:
    """Each request's cost at the GPU where it costs least; None if there is no GPU but that one."""
    columns = [column * prices[gpu] for gpu, column in enumerate(costs) if gpu != but]
    return reduce(np.minimum, columns) if columns else None


def _searched(value: Callable[[float], float], mean: float) -> float:
    """The price (1 / ms) with the least value, by ternary search over its logarithm around 1 / `mean`."""
    low, high = 1e-3 / mean, 1e3 / mean
    for _ in range(_HALVINGS):
        ratio = (high / low) ** (1.0 / 3.0)
        if value(low * ratio) <= value(high / ratio):
            high /= ratio
        else:
            low *= ratio
    return float((low * high) ** 0.5)


def of(scenario: Scenario, seed: int, load: float) -> float:
    """The most good answers that any router can give in a whole run: `sum(Result.good)` of no cell exceeds it."""
    return answers_max(demands(scenario, seed, load), fleet_of(scenario), scenario.doc.duration_s)


__all__ = ["Demand", "answers_max", "cost_ms", "demands", "fleet_of", "of", "share_max"]
