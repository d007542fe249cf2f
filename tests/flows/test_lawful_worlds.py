"""No byte of a prompt goes where the law forbids it: random worlds, both tiers' machines, and a law that changes.

The oracle is set arithmetic on the documents as they were written (`law_oracle`). Each process's own knowledge counts:
of the documents that were brought to it, the sound one of the highest epoch. FARHOP_LAW_WORLDS gives another number of
worlds than the suite's (some 2 s): they are numbered from 0, and one number is one world. Here requests run in time,
through both tiers' whole machines; far more worlds, of disks, hubs, keys and adapters, are in `farhop bench law`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from random import Random
from typing import Any

import pytest

from farhop_lab.sim.sites import MODEL, Reporting, Watching, station
from farhop_lab.sim.world import World
from farhop_lab.studies.law_oracle import INSIDE, MAP, REGIONS, Document, lawful
from farhop_lab.studies.law_worlds import a_key, a_rule
from topology import law_document

WORLDS = int(os.environ.get("FARHOP_LAW_WORLDS", "20"))
BATCHES = max(2, WORLDS // 50)
ASKED_UNTIL, UNTIL = 2.0, 4.0

WATCHING = Watching(probe_s=2.0, scrape_s=1.0, ping_s=0.5, ping_timeout_s=0.5, report_age_s=1.2, first_byte_s=1.5)
TENANTS = ("t0", "t1", "t2", "t3")
# In each batch, unless it is smaller than the suite's.
HAPPENS = (
    "served", "sent again", "computed again", "redirected", "law new", "law old", "law broken", "hints known",
    "no_lawful_region", "unlawful_here", "unknown_key", "no_region_serving",
)  # fmt: skip


class Oracle:
    """What each process was brought, and whether each prompt went where it might."""

    def __init__(self, first: Document) -> None:
        self.first, self.sound = first, dict[bytes, Document]()
        self.held: dict[str, Document] = {}
        self.asking = ("", "", "")  # tenant, key and requested places of the request that is being sent
        self.came: dict[str, tuple[Document, tuple[str, str, str]]] = {}
        self.gone: set[tuple[str, str]] = set()
        self.owners: dict[int, set[tuple[str, str, str]]] = {}  # by node: the tenants whose prompts it belongs to
        self.violations: list[str] = []
        self.seen: Counter[str] = Counter()

    def known_to(self, process: str) -> Document:
        return self.held.get(process, self.first)

    def observer(self, what: str, region: str, process: str, of: Any) -> None:
        if what == "born":
            self.held.pop(process, None)
        elif what == "heard":
            document = self.sound.get(of)
            if document is not None and document["epoch"] > self.known_to(process)["epoch"]:
                self.held[process] = document
        elif what == "read":
            self.came[of.id] = (self.known_to(process), self.asking)
            self._check_lawful("entry", region, process, of.id, self.known_to(process))
        else:
            request_id, _, attempt = of.id.partition("/")
            self.seen[f"{what} again"] += attempt not in ("", "1") or (what, of.id) in self.gone
            self.gone.add((what, of.id))
            for node in of.chain:
                self.owners.setdefault(node, set()).add(self.came[request_id][1])
            for document in (self.came[request_id][0], self.known_to(process)):
                self._check_lawful("processing", region, process, request_id, document)
        self.seen[what] += 1

    def _check_lawful(self, scope: str, region: str, process: str, request_id: str, document: Document) -> None:
        whose = self.came[request_id][1]
        if region not in lawful(document, scope, *whose, MODEL, {}):
            self.violations.append(f"{process}: {request_id} of {whose} in {region} against epoch {document['epoch']}")


# -- random worlds


def a_tenant(rng: Random, name: str) -> Document:
    residency: Document = {"processing": a_rule(rng)}
    for scope, share in (("entry", 0.35), ("hints", 0.4)):
        if rng.random() < share:
            residency[scope] = a_rule(rng)
    if rng.random() < 0.3:
        residency |= {"on_exhausted": "wait", "wait_max_s": 0.5}
    keys = [a_key(rng, name, key, residency) for key in "01"]
    tenant: Document = {"name": name, "residency": residency, "keys": keys if rng.random() < 0.8 else keys[:1]}
    if rng.random() < 0.2:
        tenant["models"] = {MODEL: {"allow": ["world"], "deny": [rng.choice(sorted(INSIDE))]}}
    return tenant


def a_document(rng: Random, epoch: int) -> Document:
    tenants = [a_tenant(rng, name) for name in TENANTS if rng.random() < 0.9] or [a_tenant(rng, "t0")]
    models = {MODEL: {"allow": ["world"], "deny": [rng.choice(sorted(REGIONS))]}} if rng.random() < 0.15 else {}
    return {"epoch": epoch, "author": "ann", "why": "drill", "at": "2026-05-01T12:00:00Z", "tenants": tenants,
            "models": models}  # fmt: skip


class Play:
    """One world, from its number."""

    def __init__(self, number: int) -> None:
        rng = self.rng = Random(f"law {number}")
        first = a_document(rng, 3)
        self.oracle, self.documents = Oracle(first), [first]
        world = law_document.read(json.dumps(first).encode(), MAP, "test").over(MAP)
        site = station(2, 0.3, first_s=0.02)
        self.world = World(
            number, world, dict.fromkeys(REGIONS, site), reporting=Reporting(every_s=0.5), watching=WATCHING,
            observer=self.oracle.observer,
        )  # fmt: skip
        self.refusals: Counter[str] = Counter()
        self.killed: set[str] = set()
        for at in (rng.uniform(0.2, ASKED_UNTIL) for _ in range(30)):
            self.world.at(at, self.ask)
        for at in (rng.uniform(0.3, ASKED_UNTIL) for _ in range(rng.randint(1, 4))):
            self.world.at(at, self.enact)
        for _ in range(rng.randint(0, 3)):
            self.fault()

    def ask(self) -> None:
        rng, world = self.rng, self.world
        tenant, key = rng.choice(TENANTS), rng.choice("001")
        asked = rng.choice((*INSIDE, "atlantis")) if rng.random() < 0.2 else ""
        entry, direct = rng.choice(list(REGIONS)), rng.random() < 0.15
        if direct and entry in self.killed:
            return
        self.oracle.asking = (tenant, key, asked)
        prefix = f"{tenant} {rng.randint(0, 2)}"
        answer = world.ask(entry, f"sk-{tenant}-{key}", allow=asked, prefix=prefix, direct=direct)
        if isinstance(answer, str):
            self.oracle.seen["redirected"] += world.last_entry != entry
        else:
            self.refusals[answer.outcome.reason] += 1

    def enact(self) -> None:
        rng, world = self.rng, self.world
        processes = [*REGIONS, *(f"{name}/g0" for name in REGIONS)]
        deaf = [name for name in processes if rng.random() < 0.15]
        kind = rng.choices(("new", "old", "broken", "gone"), (14, 2, 3, 1))[0]
        document = a_document(rng, max(one["epoch"] for one in self.documents) + rng.randint(1, 3))
        if kind == "old":
            document["epoch"] = rng.randint(1, 3)
        elif kind == "broken":
            rng.choice((
                lambda one: one["tenants"][0].pop("residency"),
                lambda one: one["tenants"][0]["residency"]["processing"].update(allow=["atlantis"]),
                lambda one: one.update(epoch="next"),
                lambda one: one.update(tenants=[]),
            ))(document)  # fmt: skip
        text = b"" if kind == "gone" else json.dumps(document).encode()
        if kind == "new":
            self.documents.append(document)
            self.oracle.sound[text] = document
        self.oracle.seen[f"law {kind}"] += 1
        world.publish_law(text, rng.choice((0.0, 0.1, 0.8)), deaf)

    def fault(self) -> None:
        rng, world = self.rng, self.world
        at, region, other = rng.uniform(0.4, ASKED_UNTIL), *rng.sample(list(REGIONS), 2)
        until = at + rng.uniform(0.1, 1.0)
        kind = rng.choice(("kill", "drain", "freeze"))
        if kind == "kill":
            self.world.at(at, self.kill, region)
            self.world.at(until, self.revive, region)
        elif kind == "drain":
            world.at(at, world.drain, region)
            world.at(until, world.undrain, region)
        else:
            world.at(at, world.freeze, region, other)
            world.at(until, world.heal, region, other)

    def kill(self, region: str) -> None:
        self.killed.add(region)
        self.world.kill(region)

    def revive(self, region: str) -> None:
        self.killed.discard(region)
        self.world.revive(region)

    def run(self) -> None:
        self.world.journal.violations_only()
        measures = self.world.run(UNTIL)
        assert self.oracle.violations == []
        assert measures.journal.first_violations == []
        self.hints()

    def hints(self) -> None:
        """No global balancer knows of a prefix whose tenant forbids that in its region, by the law it knows."""
        for region, (balancer,) in self.world.balancers.items():
            document = self.oracle.known_to(balancer.name)
            for node, owners in self.oracle.owners.items():
                known = bool(balancer.flow.regions.trie.match((node,)))
                self.oracle.seen["hints known"] += known
                if known and not any(region in lawful(document, "hints", *one, MODEL, {}) for one in owners):
                    raise AssertionError(f"{balancer.name} knows of a prefix of {owners}")


@pytest.mark.parametrize("batch", range(BATCHES))
def test_no_prompt_goes_where_the_law_forbids_it(batch: int) -> None:
    seen: Counter[str] = Counter()
    for number in range(batch, WORLDS, BATCHES):
        play = Play(number)
        try:
            play.run()
        except AssertionError as error:
            raise AssertionError(f"world {number}") from error
        seen += play.oracle.seen + Counter(play.world.measures.outcomes) + play.refusals
    scarce = [what for what in HAPPENS if not seen[what]]
    assert not scarce, "a test of what never happens"
