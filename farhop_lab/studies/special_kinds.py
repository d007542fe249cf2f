"""Fifteen kinds of work that most worlds drawn at random lack, each with one difficulty of its own.

A kind draws the parts of a scenario that make it what it is: its sites, its work, and where it needs them other times.
All else is drawn by `random_worlds`, which also scales the rates: they sum up to a few a second here, and only what
they are to each other counts. Pure: takes random generators. A kind's draws are the definition of its worlds: another
order of them is another world under the same number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from random import Random

Fields = dict[str, Any]
REGIONS = ("virginia", "tokyo", "frankfurt", "oregon", "singapore")
CONFINED = {"frankfurt": "eu-only", "tokyo": "japan-only"}
"""By region, the topology's tenant that may not leave it."""
PRIOR, LATER = "interactive", "anywhere"
"""The topology's tenants of a larger and of the smallest priority."""
_SMALL, _LARGE = ("l4", "a100"), ("a100", "h100")
_FAR = (("virginia", "singapore"), ("frankfurt", "tokyo"), ("virginia", "tokyo"), ("oregon", "singapore"))
"""A round trip between them takes 163 to 222 ms."""


class Drawn(msgspec.Struct, frozen=True):
    """What a kind draws: fields of a scenario. `judged`: the tenant whose requests are judged; "" for all."""

    sites: Fields
    work: list[Fields]
    warm_up_s: float = 10.0
    timeout_s: float = 100.0
    judged: str = ""


def _fleet(rng: Random, gpus: Sequence[str]) -> tuple[Fields, dict[str, float]]:
    """Two to five regions of one to three replicas each, and how much of the work comes where."""
    regions = REGIONS[: rng.choice((2, 3, 3, 3, 4, 5))]
    sites = {name: {"gpu": rng.choice(gpus), "replicas": rng.randint(1, 3)} for name in regions}
    return sites, {name: rng.choice((0.2, 1.0, 1.0, 3.0)) for name in regions}


def _requests(per_s: Mapping[str, float], prompt: int, answer: int, **others: Any) -> Fields:
    """A piece of work; `others`: more figures, and `tenant` and `bursts` of the piece."""
    piece: Fields = {name: others.pop(name) for name in ("tenant", "bursts") if name in others}
    figures = {"prompt_tokens": prompt, "answer_tokens": answer, "max_tokens": max(512, answer), **others}
    return {"kind": "requests", "figures": figures, "per_s": dict(per_s), **piece}


def _log(rng: Random, least: int, most: int) -> int:
    """A whole number between, evenly by its logarithm."""
    return int(least * (most / least) ** rng.random())


def _ordinary(rng: Random, per_s: Mapping[str, float], **others: Any) -> Fields:
    """Prompts and answers of common lengths, of which a part is shared within a region."""
    prompt = _log(rng, 300, 3_000)
    shared = int(prompt * rng.choice((0.0, 0.3, 0.8)))
    groups = rng.choice((3, 20, 100))
    return _requests(per_s, prompt, _log(rng, 20, 200), shared_tokens=shared, groups=groups, **others)


def _rag(rng: Random) -> Drawn:
    """Each prompt begins with one of some documents, the same everywhere."""
    sites, weights = _fleet(rng, _LARGE)
    document, question = rng.randint(6_000, 10_000), rng.randint(100, 500)
    groups = rng.choice((20, 40, 80))
    shared = {"shared_tokens": document, "groups": groups, "everywhere": True}
    return Drawn(sites, [_requests(weights, document + question, _log(rng, 50, 200), **shared)])


def _long_prompts(rng: Random) -> Drawn:
    """10,000 to 60,000 tokens of which nothing is shared, answers of a few."""
    sites, weights = _fleet(rng, ("h100",))
    lengths = [_log(rng, 10_000, 60_000) for _ in range(3)]
    return Drawn(sites, [_requests(weights, length, rng.randint(1, 20)) for length in lengths])


def _long_answers(rng: Random) -> Drawn:
    """Thousands of tokens, as of reasoning: they take a minute, so it takes as long until as many end as begin."""
    sites, weights = _fleet(rng, _LARGE)
    work = _requests(weights, _log(rng, 200, 1_000), rng.randint(3_000, 6_000))
    return Drawn(sites, [work], warm_up_s=40.0, timeout_s=300.0)


def _classification(rng: Random) -> Drawn:
    """One token is the answer, by instructions that all share: hundreds a second."""
    sites, weights = _fleet(rng, _SMALL)
    rates = {name: 10.0 * weight for name, weight in weights.items()}
    prompt = _log(rng, 150, 800)
    shared = {"shared_tokens": int(prompt * rng.uniform(0.3, 0.8)), "groups": rng.choice((1, 3)), "everywhere": True}
    return Drawn(sites, [_requests(rates, prompt, 1, **shared)])


def _bursts(rng: Random) -> Drawn:
    """The requests of some seconds come at one instant, in all regions."""
    sites, weights = _fleet(rng, _SMALL)
    return Drawn(sites, [_ordinary(rng, weights, bursts={"every_s": rng.choice((3.0, 5.0))})])


def _ticks(rng: Random) -> Drawn:
    """Those of each second do, mostly on slow GPUs."""
    sites, weights = _fleet(rng, ("l4", "l4", "a100"))
    return Drawn(sites, [_ordinary(rng, weights, bursts={"every_s": 1.0})])


def _large_contexts(rng: Random) -> Drawn:
    """Agents that begin with tens of thousands of tokens."""
    sites, weights = _fleet(rng, ("h100",))
    figures = {"first_tokens": rng.randint(20_000, 60_000), "tool_s": rng.choice((0.5, 2.0, 8.0))}
    return Drawn(sites, [{"kind": "agents", "figures": figures, "per_s": weights}])


def _new_prefixes(rng: Random) -> Drawn:
    """What prompts share is new to everybody again and again."""
    sites, weights = _fleet(rng, _SMALL)
    prefix, own = rng.randint(2_000, 5_000), rng.randint(50, 300)
    shared: Fields = {"shared_tokens": prefix, "groups": rng.choice((1, 2, 4)), "everywhere": True}
    shared["renewed_s"] = rng.choice((0.5, 1.0, 2.0))
    return Drawn(sites, [_requests(weights, prefix + own, _log(rng, 20, 100), **shared)])


def _cold_prefixes(rng: Random) -> Drawn:
    """All caches are empty when the window begins, and prompts share a few long prefixes."""
    sites, weights = _fleet(rng, _SMALL)
    prefix, own = rng.randint(3_000, 5_000), rng.randint(50, 300)
    shared = {"shared_tokens": prefix, "groups": rng.choice((4, 8, 16)), "everywhere": True}
    return Drawn(sites, [_requests(weights, prefix + own, _log(rng, 20, 200), **shared)], warm_up_s=0.0)


def _after_a_pause(rng: Random) -> Drawn:
    """A burst of some seconds after a pause of up to a minute, which the warm-up is, behind a first such burst."""
    sites, weights = _fleet(rng, _SMALL)
    every_s = rng.choice((20.0, 40.0, 60.0))
    work = _ordinary(rng, weights, bursts={"every_s": every_s, "for_s": rng.choice((1.0, 3.0))})
    return Drawn(sites, [work], warm_up_s=every_s)


def _children(rng: Random) -> Drawn:
    """Many requests at once go on from one prompt and its answer, as where answers are sampled or searched."""
    sites, weights = _fleet(rng, _SMALL)
    figures = {
        "branch": rng.choice((8, 16, 32, 32)),
        "levels": 2,
        "examples_tokens": rng.choice((0, 300)),
        "question_tokens": _log(rng, 500, 4_000),
        "thought_tokens": _log(rng, 30, 200),
    }
    return Drawn(sites, [{"kind": "trees", "figures": figures, "per_s": {name: w / 10 for name, w in weights.items()}}])


def _few_gpus_at_home(rng: Random) -> Drawn:
    """Nine of ten requests come where one of ten GPUs is."""
    gpu = rng.choice(_SMALL)
    home, *others = rng.sample(REGIONS, rng.randint(2, 4))
    sites = {home: {"gpu": gpu, "replicas": 1}, **{name: {"gpu": gpu, "replicas": 9 // len(others)} for name in others}}
    weights = {home: 0.9, **{name: 0.1 / len(others) for name in others}}
    return Drawn(sites, [_ordinary(rng, weights)])


def _far_gpus(rng: Random) -> Drawn:
    """All requests come to a small region, and all other GPUs are on another continent."""
    gpu = rng.choice(_SMALL)
    home, far = rng.choice(_FAR)[:: rng.choice((1, -1))]
    sites = {home: {"gpu": gpu, "replicas": 1}, far: {"gpu": gpu, "replicas": rng.randint(2, 6)}}
    return Drawn(sites, [_ordinary(rng, {home: 1.0})])


def _confined(rng: Random) -> Drawn:
    """Half of the requests may not leave a region that they alone fill, and as many others come there and elsewhere."""
    home, tenant = rng.choice(list(CONFINED.items()))
    gpu = rng.choice(_SMALL)
    others = [name for name in REGIONS if name != home][: rng.randint(1, 3)]
    replicas = rng.randint(2, 3)
    sites = {home: {"gpu": gpu, "replicas": replicas}, **{name: {"gpu": gpu, "replicas": 1} for name in others}}
    sites[others[0]]["replicas"] = max(1, replicas - len(others) + 1)
    work = _ordinary(rng, {home: 1.0})
    elsewhere = {home: 0.5, **{name: 0.5 / len(others) for name in others}}
    return Drawn(sites, [{**work, "tenant": tenant}, {**work, "per_s": elsewhere}])


def _batch(rng: Random) -> Drawn:
    """Interactive requests, which are judged, beside batches of a lower priority: many at once, of longer prompts."""
    sites, weights = _fleet(rng, _SMALL)
    interactive = _requests(weights, _log(rng, 200, 1_000), _log(rng, 50, 200), tenant=PRIOR)
    share = rng.uniform(0.3, 0.7) * sum(weights.values())
    place, every_s = rng.choice(list(sites)), rng.choice((4.0, 8.0))
    batch = _requests(
        {place: share}, _log(rng, 1_000, 4_000), _log(rng, 100, 400), tenant=LATER, bursts={"every_s": every_s}
    )
    return Drawn(sites, [interactive, batch], judged=PRIOR)


KINDS: dict[str, Callable[[Random], Drawn]] = {
    "rag": _rag,
    "long-prompts": _long_prompts,
    "long-answers": _long_answers,
    "classification": _classification,
    "bursts": _bursts,
    "each-second-at-once": _ticks,
    "large-contexts": _large_contexts,
    "new-prefixes": _new_prefixes,
    "cold-prefixes": _cold_prefixes,
    "after-a-pause": _after_a_pause,
    "children": _children,
    "few-gpus-at-home": _few_gpus_at_home,
    "far-gpus": _far_gpus,
    "confined-half": _confined,
    "batch": _batch,
}
"""By name, in the order of their worlds' numbers."""

__all__ = ["CONFINED", "KINDS", "REGIONS", "Drawn"]
