"""Random worlds of laws: whatever happens to laws, hubs, disks and balancers, no byte goes where the law forbids it.

A world is one number. It contains only the shipped parts that know the law: for each of two regions both tiers'
machines with their law books, disks and authenticators; two hubs. Its steps: laws are set (each clause appears,
vanishes or changes), forged, broken and restored; hubs are wiped, restored, lost and found; balancers restart; engines
report, or change, what their models are based on; balancers exchange laws; requests come, streams break and continue.
An oracle of set arithmetic (`law_oracle`) judges each place that a prompt reaches, and every prefix node that is sent
or kept, by the laws that each process was given: the valid document of the highest epoch, through all restarts.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import multiprocessing
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from random import Random
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from farhop.balance import outcome
from farhop.balance.machine import (
    Address,
    Answer,
    AttemptBegan,
    AttemptEnded,
    AttemptFailed,
    AttemptRefused,
    ClientLeft,
    Forward,
    LawChanged,
    Recall,
    Request,
    RequestArrived,
    Resume,
)
from farhop.balance.prefix import chain
from farhop.balance.prefix.journal import Stored
from farhop.relay.http import head as heads
from farhop.service.authentication.authenticator import Caller, KeyAuthenticator
from farhop.service.law.lawbook import LawBook
from farhop.store.contract import LAW_KEY, Change, ChangeKind, Conflict, KeyValue, StoreUnreachable
from farhop.store.documents.report import COUNT_LIMIT, ModelReport
from farhop.store.envelope import NO_KEYS, Keys, Signer, public_key
from farhop.store.state import SavedDocument
from farhop_lab.studies.law_oracle import INSIDE, MAP, REGIONS, Document, KnownBases, allows, lawful
from global_lb.fleet import view as global_view
from global_lb.routing import flow as global_flow
from regional_lb.fleet import view as regional_view
from regional_lb.scheduler.flow import FlowConfig, RegionalFlow
from topology import law_document
from topology.law import Law

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from farhop.balance.machine import Command, Event

STEPS = 40
SLICE = 250  # worlds that a process gets at a time
BREAKS_SHARE = 0.25  # of streams that began
TENANTS = ("t0", "t1")
MODELS = ("base", "sql", "mute", "plain")
_NOW = 1.0
_LATER = 1e6


def _signer(name: str) -> Signer:
    key = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest())
    return Signer(name, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


OPERATOR, INTERN, FORGER = _signer("operator"), _signer("intern"), _signer("forger")
KEYS = Keys({
    OPERATOR.name: (public_key(OPERATOR.public), ["law"]), INTERN.name: (public_key(INTERN.public), ["drain"]),
})  # fmt: skip


# -- random laws


def some(rng: Random, most: int) -> list[str]:
    """Random places."""
    return rng.sample(sorted(INSIDE), rng.randint(1, most))


def a_rule(rng: Random) -> Document:
    """A rule that leaves at least one region lawful, or the shipped code would refuse the whole document."""
    while True:
        rule: Document = {"allow": ["world"] if rng.random() < 0.4 else some(rng, 3)}
        if rng.random() < 0.4:
            rule["deny"] = some(rng, 2)
        if allows(rule):
            return rule


def a_tenant(rng: Random, name: str) -> Document:
    """A tenant, each of whose clauses may be missing."""
    residency: Document = {"processing": a_rule(rng)}
    for scope, share in (("entry", 0.3), ("hints", 0.4)):
        if rng.random() < share:
            residency[scope] = a_rule(rng)
    if rng.random() < 0.3:
        residency |= {"on_exhausted": "wait", "wait_max_s": 0.5}
    keys = [a_key(rng, name, key, residency) for key in "01" if rng.random() < 0.85]
    tenant: Document = {"name": name, "residency": residency, "keys": keys}
    ruled = {model: a_rule(rng) for model in MODELS if rng.random() < 0.15}
    return tenant | ({"models": ruled} if ruled else {})


def a_key(rng: Random, tenant: str, name: str, residency: Document) -> Document:
    """A key, narrowed or not."""
    key: Document = {"name": name, "sha256": hashlib.sha256(f"sk-{tenant}-{name}".encode()).hexdigest()}
    if rng.random() < 0.4:
        key["within"] = [rng.choice(sorted(allows(residency["processing"])))]
    return key


def a_law(rng: Random, epoch: int, before: Document | None = None) -> Document:
    """A document. Each part of the previous one may stay, change or go."""
    kept: Document = {one["name"]: one for one in before["tenants"]} if before is not None else {}
    tenants: list[Document] = [
        kept[name] if name in kept and rng.random() < 0.4 else a_tenant(rng, name)
        for name in TENANTS
        if rng.random() < 0.9
    ]
    for n, one in enumerate(tenants):
        if kept.get(one["name"]) is one and rng.random() < 0.5:  # the same, but for its keys
            keys = [a_key(rng, one["name"], key, one["residency"]) for key in "01" if rng.random() < 0.85]
            tenants[n] = {**one, "keys": keys}
    if before is not None and rng.random() < 0.5:
        models = before["models"]
    else:
        models = {model: a_rule(rng) for model in MODELS if rng.random() < 0.12}
    return {"epoch": epoch, "author": "ann", "why": "drill", "at": "2026-05-01T12:00:00Z",
            "tenants": tenants or [a_tenant(rng, "t0")], "models": models}  # fmt: skip


# -- what a balancer depends on


class Disk:
    """A process's state directory, which outlives the process."""

    def __init__(self) -> None:
        self.document: bytes | None = None

    def load(self, _name: str) -> SavedDocument | None:
        """See StateDir."""
        return None if self.document is None else SavedDocument(self.document, 0.0)

    def save(self, _name: str, document: bytes) -> None:
        """See StateDir."""
        self.document = document


class Etcd:
    """A hub: the value of the law's key."""

    def __init__(self) -> None:
        self.value, self.revision, self.written = b"", 0, 0
        self.up = True
        self.backup = b""

    async def put(self, _key: str, value: bytes, expect_revision: int | None = None, ttl_s: float | None = None) -> int:
        """See Store."""
        del ttl_s
        if not self.up:
            raise StoreUnreachable("down")
        if expect_revision is not None and expect_revision != self.revision:
            raise Conflict(LAW_KEY, expect_revision)
        return self.write(value)

    def write(self, value: bytes) -> int:
        """A write by anyone; b"": deleted."""
        self.written += 1
        self.value, self.revision = value, self.written if value else 0
        return self.revision

    def listing(self) -> Change:
        """All keys, as for a new client."""
        entries = (KeyValue(LAW_KEY, self.value, self.revision),) if self.value else ()
        return Change(ChangeKind.SNAPSHOT, max(self.revision, 1), entries=entries)


class CachingLawBook(LawBook):
    """The shipped one, which reuses documents that another of its world has parsed: that is half of the work."""

    judged: dict[bytes, Any]

    def _parse_law(self, written: bytes) -> Any:
        if written not in self.judged:
            self.judged[written] = super()._parse_law(written)
        return self.judged[written]


class Process:
    """A balancer of a tier in a region: its machine, law book and authenticator. `disk` outlives it."""

    def __init__(self, world: World, tier: str, region: str) -> None:
        self.world, self.tier, self.region, self.name = world, tier, region, f"{tier} {region}"
        self.disk = Disk()
        self.start()

    def start(self) -> None:
        """A new process, which knows nothing of what was sent before."""
        world, law = self.world, self.world.first
        rng = Random(f"{self.name} {world.number}")
        self.flow: global_flow.GlobalFlow | RegionalFlow
        if self.tier == "global":
            self.flow = global_flow.GlobalFlow(global_flow.FlowConfig(self.region), law, rng, lambda _tenant: 0.0)
        else:
            self.flow = RegionalFlow(FlowConfig(self.region, "lb"), law, rng, lambda _tenant: 1.0)
        self.recalled: set[tuple[str, int]] = set()  # attempts
        self.read: dict[str, int] = {}  # by asker's region: how far the journal was read
        self.bases: dict[str, dict[str, frozenset[str] | None]] = {}  # by region: what its models are based on
        self.book = CachingLawBook(
            dict(world.hubs), law, self._adopt, lambda reason: world.seen.update((reason,)),  # type: ignore[arg-type]
            keys=world.keys, state=self.disk,  # type: ignore[arg-type]
        )  # fmt: skip
        self.book.judged = world.judged
        self.authenticator = KeyAuthenticator(self.region, self.flow, lambda _regions: {}, 600.0)
        self.book.remember()
        if isinstance(self.flow, RegionalFlow):
            self.flow.replicas.journal.listen()

    def _adopt(self, law: Law) -> None:
        self.handle(LawChanged(law))

    def handle(self, event: Event) -> list[Command]:
        """One event for the machine. A command that another law recalls before its turn sends nothing."""
        commands = self.flow.handle(event, _NOW)
        self.recalled |= {(one.id, one.attempt) for one in commands if isinstance(one, Recall)}
        for command in commands:  # requests on hold that may go now, or may not stay
            if not isinstance(command, Forward) or command.id not in self.world.asked:
                continue
            if (command.id, command.attempt) in self.recalled:
                self.handle(AttemptFailed(command.id, command.attempt, outcome.UNLAWFUL_HERE))
            else:
                self.world.forwarded(self, command)
        return commands

    def read_hub(self, hub: str) -> None:
        """Read the hub's present value, or find it lost."""
        etcd = self.world.hubs[hub]
        if etcd.up:
            self.world.brought(self, etcd.value)
            self.book.changed(etcd.listing(), hub)
        else:
            self.book.changed(Change(ChangeKind.LOST, why="down"), hub)

    def learn(self, region: str, bases: dict[str, frozenset[str] | None]) -> None:
        """Learn what the models of a region are based on: a global balancer by reports alone, as its links bring them,
        a regional one by its engines' listing.
        """
        self.bases[region] = bases
        if isinstance(self.flow, RegionalFlow):
            replicas = [
                regional_view.Replica(
                    name=name, address=Address(name, 80), models=frozenset(bases), gpu="", slots=64, kv_tokens=1 << 30,
                    prefill_tokens_max=1 << 20, prefill_ms_per_token=0.01, tpot_ms=10.0, lineage=dict(bases),
                    token_ids=True,
                )
                for name in ("gpu-0", "gpu-1")
            ]  # fmt: skip
            self.handle(regional_view.ViewSwapped(regional_view.view_of(replicas)))
            for one in replicas:
                self.handle(regional_view.ReplicaProbed(one.name, True))
            return
        known = self._reported(region, bases)
        self.handle(global_view.RegionReported(region, known=known))
        self.handle(global_view.ChannelChanged(region, True, known))

    def _reported(self, region: str, bases: dict[str, frozenset[str] | None]) -> global_view.Region:
        offer = ModelReport(
            "", replicas_ready=1, replicas_total=1, slots_total=64, slots_free=64, kv_tokens_total=0, kv_tokens_free=0,
            wait_ms=1.0, prefill_ms_per_token=0.01, tpot_ms=10.0, bytes_per_token=4.0,
            headroom_foreign_tokens=COUNT_LIMIT,
        )  # fmt: skip
        instance = global_view.Instance(
            "lb",
            region,
            Address(region, 80),
            1,
            _NOW,
            0.0,
            False,
            0.0,
            dict.fromkeys(bases, offer),
            lineage=dict(bases),
        )
        return global_view.Region(region, MAP.rtt_ms(self.region, region), (instance,))


class World:
    """One world, from its number."""

    def __init__(self, number: int) -> None:
        self.number = number
        rng = self.rng = Random(f"laws {number}")
        self.signed = rng.random() < 0.6
        self.keys = KEYS if self.signed else NO_KEYS
        self.judged: dict[bytes, Any] = {}
        self.seen: Counter[str] = Counter()
        self.violations: list[str] = []
        self.documents = [a_law(rng, 3)]
        self.sound: dict[bytes, Document] = {}
        self.held: dict[str, Document] = {}
        self.asked: dict[str, tuple[Request, Document, tuple[str, str, str]]] = {}
        self.owners: dict[int, set[tuple[str, str, str, str]]] = {}
        self.hubs = {"a": Etcd(), "b": Etcd()}
        first_document = law_document.read(json.dumps(self.documents[0]).encode(), MAP, "first")
        self.first = Law(first_document.over(MAP))
        self.sites = rng.sample(sorted(REGIONS), 2)
        self.engines = {region: self._listing() for region in self.sites}
        self.above = {region: Process(self, "global", region) for region in self.sites}
        self.below = {region: Process(self, "regional", region) for region in self.sites}
        self.processes = [*self.above.values(), *self.below.values()]
        for one in self.processes:
            self._introduce(one)

    def _introduce(self, one: Process) -> None:
        for hub in self.hubs:
            one.read_hub(hub)
        for region in self.sites if one.tier == "global" else [one.region]:
            one.learn(region, self.engines[region])

    def _listing(self) -> dict[str, frozenset[str] | None]:
        """What a region's engines report that their models are based on: `sql` on base, of `mute` sometimes nothing."""
        rng = self.rng
        mute = rng.choice((None, None, frozenset({"base"}), frozenset({"sql"})))
        plain = frozenset({"base"}) if rng.random() < 0.2 else frozenset[str]()
        return {"base": frozenset(), "sql": frozenset({"base"}), "mute": mute, "plain": plain}

    # -- the oracle

    def known_to(self, process: Process) -> Document:
        """The law that a process must follow: the valid one of the highest epoch that it was ever given."""
        return self.held.get(process.name, self.documents[0])

    def brought(self, process: Process, value: bytes) -> None:
        """A process was given this document."""
        document = self.sound.get(value)
        if document is not None and document["epoch"] > self.known_to(process)["epoch"]:
            self.held[process.name] = document

    def bases_known_to(self, process: Process) -> KnownBases:
        """What a process was told of models' bases: all that are named; unknown if one is declared and none named."""
        bases: dict[str, set[str] | None] = {}
        for model in MODELS:
            named_by = [one[model] for one in process.bases.values()]
            named = set[str]().union(*(one for one in named_by if one))
            bases[model] = named or (None if None in named_by else set())
        return bases

    def judge(self, what: str, scope: str, region: str, process: Process, request: str) -> None:
        """A prompt comes to a region; judged by the laws that the process was given by now, and by the request's
        arrival.
        """
        asked, came_under, (tenant, key, wish) = self.asked[request]
        self.seen[what] += 1
        for document in (came_under, self.known_to(process)) if process.tier == "global" else (self.known_to(process),):
            if region not in lawful(document, scope, tenant, key, wish, asked.model, self.bases_known_to(process)):
                self.violations.append(
                    f"{process.name}: {what} in {region}, {(tenant, key, wish, asked.model)}, epoch {document['epoch']}"
                )

    def may_know(self, node: int, region: str, process: Process) -> bool:
        """Whether any of the tenants whose prompts brought a node allows it to be known in a region."""
        document, bases = self.known_to(process), self.bases_known_to(process)
        return any(
            region in lawful(document, "hints", tenant, key, wish, model, bases)
            for tenant, key, wish, model in self.owners.get(node, ())
        )

    # -- steps

    async def play(self) -> list[str]:
        """Run all steps; returns the violations of the law."""
        steps: list[tuple[Callable[[], object], int]] = [
            (self.ask, 14), (self.set_law, 4), (self.forge, 2), (self.hub_fault, 3), (self.spread, 7),
            (self.restart, 2), (self.relearn, 2), (self.share_prefixes, 4),
        ]  # fmt: skip
        does, weights = [step for step, _ in steps], [weight for _, weight in steps]
        for step in self.rng.choices(does, weights, k=STEPS):
            step()
            if self.rng.random() < 0.15:
                await self.mend()
            if self.rng.random() < 0.15:
                await self.exchange()
            for process in self.processes:
                if process.book.law.epoch < (must := self.known_to(process)["epoch"]):
                    self.violations.append(f"{process.name} goes by epoch {process.book.law.epoch} after {must}")
            if self.violations:
                return self.violations
        for region in self.sites:
            self.share_prefixes(region)
        self.kept()
        return self.violations

    def set_law(self) -> None:
        """An operator sets a law in the reachable hubs."""
        rng = self.rng
        epoch = max(one["epoch"] for one in self.documents) + rng.randint(1, 2)
        document = a_law(rng, epoch, self.documents[-1])
        text = json.dumps(document).encode()
        value = OPERATOR.seal(LAW_KEY, text) if self.signed else text
        reached = [hub for hub in self.hubs.values() if hub.up and rng.random() < 0.8]
        if not reached:
            return
        self.documents.append(document)
        self.sound[value] = document
        for hub in reached:
            hub.write(value)
        self.seen["law set"] += 1
        self.spread()

    def forge(self) -> None:
        """An attacker who may write to a hub but not sign writes a law; or one is corrupted, or an old one restored."""
        rng, hub = self.rng, self.rng.choice(list(self.hubs.values()))
        epoch = max(one["epoch"] for one in self.documents) + 50
        kind = rng.choice(("older", "broken", "unsigned", "forged"))
        document = a_law(rng, rng.randint(1, 3) if kind == "older" else epoch)
        if kind == "broken":
            document["tenants"][0]["residency"]["processing"]["allow"] = ["atlantis"]
        value = json.dumps(document).encode()
        if kind in ("unsigned", "forged") and not self.signed:
            return
        if self.signed and kind in ("older", "broken"):
            value = OPERATOR.seal(LAW_KEY, value)
        elif kind == "forged":
            value = rng.choice((FORGER.seal(LAW_KEY, value), INTERN.seal(LAW_KEY, value), OPERATOR.seal("else", value)))
        hub.write(value)
        self.seen[f"law {kind}"] += 1
        self.spread()

    def hub_fault(self) -> None:
        """A hub is wiped, restored to an old value, lost or found."""
        rng, hub = self.rng, self.rng.choice(list(self.hubs.values()))
        kind = rng.choice(("wiped", "restored", "lost", "found", "found"))
        if kind == "wiped":
            hub.written = 0
            hub.write(b"")
        elif kind == "restored":
            hub.write(hub.backup)
        else:
            hub.up = kind == "found"
        hub.backup = hub.value if rng.random() < 0.5 else hub.backup
        self.seen[f"hub {kind}"] += 1

    def spread(self) -> None:
        """Some processes read some hubs."""
        for process in self.processes:
            for hub in self.hubs:
                if self.rng.random() < 0.4:
                    process.read_hub(hub)

    def restart(self) -> None:
        """A balancer restarts with its disk, and reads the hubs."""
        process = self.rng.choice(self.processes)
        for request in [name for name in self.asked if name.endswith(process.name)]:
            del self.asked[request]
        process.start()
        self.seen["restarted"] += 1
        self._introduce(process)

    def relearn(self) -> None:
        """The engines of a region change what their models are based on; some processes learn it now, others later."""
        region = self.rng.choice(self.sites)
        self.engines[region] = self._listing()
        self.below[region].learn(region, self.engines[region])
        for above in self.above.values():
            if self.rng.random() < 0.7:
                above.learn(region, self.engines[region])

    async def mend(self) -> None:
        """A process updates the hubs."""
        process = self.rng.choice(self.processes)
        before = [hub.written for hub in self.hubs.values()]
        await process.book.mend()
        self.seen["mended"] += before != [hub.written for hub in self.hubs.values()]

    async def exchange(self) -> None:
        """A global and a regional balancer compare their laws: the later one is handed over, if it is valid."""
        one, other = self.rng.choice(self.processes), self.rng.choice(self.processes)
        document = one.book.document_after(other.book.law.epoch)
        proven = self.rng.random() < 0.5
        if document and one is not other:
            if self.signed or proven:
                self.brought(other, document)
            self.seen["exchanged"] += await other.book.offer(document, one.name, proven=proven)

    def ask(self) -> None:
        """A request comes to an entry, or directly to a region."""
        rng = self.rng
        tenant, key, model = rng.choice(TENANTS), rng.choice("01"), rng.choice(MODELS)
        wish = rng.choice((*INSIDE, "atlantis")) if rng.random() < 0.15 else ""
        entry = rng.choice(self.sites)
        process = (self.below if rng.random() < 0.25 else self.above)[entry]
        lines = [b"POST /v1/chat/completions HTTP/1.1", b"host: x", f"authorization: Bearer sk-{tenant}-{key}".encode()]
        lines += [b"x-farhop-allow: " + wish.encode()] if wish else []
        caller = process.authenticator.caller(heads.read(b"\r\n".join(lines), 16))
        if not isinstance(caller, Caller):
            self.seen[caller.outcome.reason] += 1
            return
        nodes = chain.chain(f"{tenant} {rng.randint(0, 1)} ".encode() * 64, chain.seed_of(model, "", "", tenant))
        number = f"r{len(self.asked)}.{rng.randrange(1 << 30)} {process.name}"
        request = Request(
            id=number, tenant=tenant, model=model, prompt_bytes=512, body_bytes=600, chain=nodes, deadline=_LATER,
            max_tokens=8, stream=True, key=caller.key, entry_region=entry, narrow=caller.narrow,
        )  # fmt: skip
        self.asked[number] = (request, self.known_to(process), (tenant, key, wish))
        self.judge("read", "entry", entry, process, number)
        for command in process.handle(RequestArrived(request)):
            if isinstance(command, Answer):
                self.seen[command.outcome.reason] += 1
        if rng.random() < 0.3:
            process.handle(ClientLeft(number))

    def forwarded(self, process: Process, forward: Forward) -> None:
        """A machine sends a request on."""
        request = self.asked[forward.id][0]
        self.seen[f"resumed by a {process.tier} balancer"] += isinstance(forward, Resume)
        if process.tier == "regional":
            self.judge("computed", "processing", process.region, process, forward.id)
            self._computed(process, request, forward)
            return
        self.judge("sent", "processing", forward.target, process, forward.id)
        below = self.below[forward.target]
        number = f"{forward.id.split(' ')[0]}.{forward.attempt} {below.name}"
        hop = Request(
            **{name: getattr(request, name) for name in request.__struct_fields__}
            | {"id": number, "lawful": forward.lawful, "issuer": process.name}
            | {"continues": "ids" if isinstance(forward, Resume) else None}
        )
        self.asked[number] = (hop, self.asked[forward.id][1], self.asked[forward.id][2])
        answers = [one for one in below.handle(RequestArrived(hop)) if isinstance(one, Answer)]
        if answers:
            self.seen[answers[0].outcome.reason] += 1
            refused = answers[0].outcome
            known = outcome.by_reason(refused.reason) or refused
            process.handle(AttemptRefused(forward.id, forward.attempt, known))
            return
        self._answered(process, request, forward)

    def _computed(self, process: Process, request: Request, forward: Forward) -> None:
        self._answered(process, request, forward)

    def _answered(self, process: Process, request: Request, forward: Forward) -> None:
        """Complete; or its stream breaks, perhaps under another law than it began, and may continue elsewhere."""
        self._own(request)
        process.handle(AttemptBegan(forward.id, forward.attempt, 200))
        if self.rng.random() >= BREAKS_SHARE:
            process.handle(AttemptEnded(forward.id, forward.attempt, 200, None))
            return
        self.seen["broken"] += 1
        if self.rng.random() < 0.5:
            self.spread()
        process.handle(AttemptFailed(forward.id, forward.attempt, outcome.DIED_MID_STREAM, resumable=True))

    def _own(self, request: Request) -> None:
        tenant, key, wish = self.asked[request.id][2]
        for node in request.chain:
            self.owners.setdefault(node, set()).add((tenant, key, wish, request.model))

    def share_prefixes(self, region: str = "") -> None:
        """A region sends a global balancer its cached prefixes, and a peer what it cached lately."""
        below = self.below[region or self.rng.choice(self.sites)]
        flow = below.flow
        assert isinstance(flow, RegionalFlow)
        for above in self.above.values():
            if above.flow.law.epoch != flow.law.epoch:
                continue  # the stream sends nothing to a process that follows another law
            at, nodes = below.read.get(above.region, -1), list[int]()
            if not flow.replicas.journal.reaches(at):
                at = flow.replicas.journal.seq
                nodes += [
                    n
                    for slice_ in flow.replicas.journal.snapshot(above.region, 1000)
                    for path in slice_
                    for n in path.nodes
                ]
            at, changes, _ = flow.replicas.journal.read(at, above.region, 1 << 20)
            nodes += [node for change in changes if isinstance(change, Stored) for node in change.nodes]
            below.read[above.region] = at
            self._check_shared(nodes, above.region, below, "told")
        assert flow.replicas.shares is not None
        for entry in flow.replicas.shares.recent.read(0, 0, 1 << 20)[1]:
            for name in REGIONS if entry.audience is None else entry.audience:
                self._check_shared(entry.chain, name, below, "told to a peer")

    def _check_shared(self, nodes: Iterable[int], region: str, process: Process, what: str) -> None:
        for node in nodes:
            self.seen[what] += 1
            if not self.may_know(node, region, process):
                self.violations.append(f"{process.name}: {what} for {region} by {self.owners.get(node)}")
                return

    def kept(self) -> None:
        """The prefixes that global balancers remember."""
        for above in self.above.values():
            assert isinstance(above.flow, global_flow.GlobalFlow)
            for node in self.owners:
                if above.flow.regions.trie.match((node,)):
                    self.seen["kept"] += 1
                    if not self.may_know(node, above.region, above):
                        self.violations.append(f"{above.name}: keeps a node of {self.owners[node]}")
                        return


async def _play(numbers: Iterable[int]) -> tuple[Counter[str], list[str]]:
    seen: Counter[str] = Counter()
    for number in numbers:
        world = World(number)
        violations = await world.play()
        seen += world.seen
        if violations:
            return seen, [f"world {number}: {violation}" for violation in violations]
    return seen, []


def play(numbers: Iterable[int]) -> tuple[Counter[str], list[str]]:
    """Play these worlds until one breaks the law: the events, and how it was broken."""
    return asyncio.run(_play(numbers))


def prove(
    first: int, worlds: int, workers: int, progress: Callable[[str], None] = lambda _now: None
) -> tuple[int, Counter[str], list[str]]:
    """Play this many worlds from this number on, in this many processes. Returns how many were played, the events, and
    how the law was broken in the first world that broke it, if any.
    """
    slices = [range(n, min(n + SLICE, first + worlds)) for n in range(first, first + worlds, SLICE)]
    seen: Counter[str] = Counter()
    played = 0
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(play, numbers): numbers for numbers in slices[:workers]}
        ahead = iter(slices[workers:])
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for one in done:
                numbers, (happened, violations) = running.pop(one), one.result()
                played, seen = played + len(numbers), seen + happened
                if violations:
                    return played, seen, violations
                if (more := next(ahead, None)) is not None:
                    running[pool.submit(play, more)] = more
            progress(f"{played:,} of {worlds:,} worlds")
    return played, seen, []
