"""The special kinds of work: each is what its name says, whatever else is drawn around it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from farhop_lab.engine.core.profiles import PROFILES
from farhop_lab.scenarios.load import built, parse
from farhop_lab.scenarios.work import schedules
from farhop_lab.studies.special_kinds import CONFINED, KINDS, LATER, PRIOR, Drawn
from farhop_lab.workloads.program import Ask, Start

SEEDS = range(6)


def drawn(kind: str, seed: int) -> Drawn:
    return KINDS[kind](Random(f"{kind} {seed}"))


def first_asks(parts: Drawn, seconds: float) -> list[tuple[Start, Ask]]:
    """What is asked first in each program that begins within these seconds."""
    found = []
    doc = built({"name": "x", "sites": parts.sites, "work": parts.work, "topology": "five-regions"}, Path()).doc
    for i, work in enumerate(doc.work):
        for schedule in schedules(work, f"x {i}", 1, 3.0, {}, Path(), seconds):
            for start in schedule:
                if start.at >= seconds:
                    break
                found.append((start, next(start.make())[0]))
    return sorted(found, key=lambda one: one[0].at)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_a_scenario_that_can_be_run(kind: str) -> None:
    for seed in SEEDS:
        parts = drawn(kind, seed)
        document = {"name": "x", "sites": parts.sites, "work": parts.work, "topology": "five-regions"}
        scenario = built({**document, "warm_up_s": parts.warm_up_s, "timeout_s": parts.timeout_s}, Path())
        parse(scenario.doc.model_dump_json(), "x", Path(), ["farhop"])  # JSON is YAML; it finds every problem
        assert not parts.judged or parts.judged in {work["tenant"] for work in parts.work}


def test_documents_are_shared_by_all_regions_and_new_prefixes_soon_replaced() -> None:
    def prefixes(kind: str, since: float, until: float) -> dict[str, set[bytes]]:
        parts = drawn(kind, 1)
        n_bytes = 4 * parts.work[0]["figures"]["shared_tokens"]
        found: dict[str, set[bytes]] = {}
        for start, ask in first_asks(parts, until):
            if start.at >= since:
                found.setdefault(start.region, set()).add(ask.prompt[:n_bytes])
        return found

    by_region = prefixes("rag", 0.0, 60.0)
    assert len(by_region) > 1
    assert 20 <= len(set().union(*by_region.values())) <= 80
    before, behind = (set().union(*prefixes("new-prefixes", at, at + 2.0).values()) for at in (0.0, 2.0))
    assert before
    assert behind
    assert not before & behind


def test_bursts_come_at_one_instant_in_all_regions_and_after_pauses() -> None:
    for kind, most_s in (("bursts", 5.0), ("each-second-at-once", 1.0)):
        parts = drawn(kind, 2)
        (every_s,) = {work["bursts"]["every_s"] for work in parts.work}
        assert every_s <= most_s
        moments = Counter(start.at for start, _ in first_asks(parts, 30.0))
        assert all(at % every_s == 0.0 for at in moments)
        assert len(moments) <= 30.0 / every_s
    parts = drawn("after-a-pause", 2)
    moments = Counter(start.at for start, _ in first_asks(parts, parts.warm_up_s + 8.0))
    assert not [at for at in moments if 3.0 < at < parts.warm_up_s]
    assert [at for at in moments if at >= parts.warm_up_s]


def test_gpus_are_few_or_far_or_full_where_the_requests_come() -> None:
    for seed in SEEDS:
        few = drawn("few-gpus-at-home", seed)
        home = max(few.work[0]["per_s"], key=few.work[0]["per_s"].__getitem__)
        assert few.work[0]["per_s"][home] == pytest.approx(0.9 * sum(few.work[0]["per_s"].values()))
        assert few.sites[home]["replicas"] <= 0.15 * sum(site["replicas"] for site in few.sites.values())
        far = drawn("far-gpus", seed)
        assert set(far.work[0]["per_s"]) < set(far.sites)
        confined = drawn("confined-half", seed)
        bound, free = confined.work
        assert bound["per_s"] == {home: 1.0 for home, tenant in CONFINED.items() if tenant == bound["tenant"]}
        assert "tenant" not in free
        assert sum(free["per_s"].values()) == pytest.approx(1.0)


def test_lengths_are_those_of_their_kind() -> None:
    for seed in SEEDS:
        assert all(10_000 <= work["figures"]["prompt_tokens"] <= 60_000 for work in drawn("long-prompts", seed).work)
        assert drawn("long-answers", seed).work[0]["figures"]["answer_tokens"] >= 3_000
        assert drawn("classification", seed).work[0]["figures"]["answer_tokens"] == 1
        agents = drawn("large-contexts", seed)
        assert agents.work[0]["figures"]["first_tokens"] >= 20_000
        assert {PROFILES[site["gpu"]].context_tokens > 100_000 for site in agents.sites.values()} == {True}
        assert drawn("children", seed).work[0]["figures"]["branch"] >= 8
        assert drawn("cold-prefixes", seed).warm_up_s == 0.0
        interactive, batch = drawn("batch", seed).work
        assert (interactive["tenant"], batch["tenant"]) == (PRIOR, LATER)
