"""How the balancers of one region share its replicas: the peers' load, whose turn a free slot is, who owns which
replica.

Invariants: the peers' load at a replica is the sum of what each known peer last reported, and never negative; a replica
is owned by exactly one of the balancers that serve it and take part, the same for all that know the same peers; a
balancer leaves free slots to a peer for at most HEAD_START_S, unless that peer takes them. Never reads a clock, never
does IO.

Turns: the balancer that frees a slot knows it first, and with a queue of its own would take it again and again. So
while a peer waits for the same replica, too, we take at most TURNS more there than that peer has since it began to
wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farhop.balance.estimate.estimates import Learned, Measured
from farhop.balance.hashing import owner
from farhop.balance.ledger import Load
from farhop.balance.machine import Event
from regional_lb.fleet.recent import Cached, Recent

if TYPE_CHECKING:
    from regional_lb.fleet.view import View

TURNS = 2
HEAD_START_S = 0.2  # an update, the network, and a busy machine's delay


class PeerLoad(msgspec.Struct, frozen=True):
    """What one balancer has under way at a replica: requests, tokens to be prefilled, tokens of KV cache.

    `taken` counts what it ever dispatched there. `known`: it dispatches there at all.
    """

    address: str
    in_flight: int = 0
    prefill_tokens: int = 0
    kv_tokens: int = 0
    taken: int = 0
    known: bool = True


class PeerLearned(msgspec.Struct, frozen=True):
    """What one balancer learned about models and tenants, and measured of each replica (with its address)."""

    estimates: Learned
    replicas: dict[str, tuple[str, Measured]]


class PeerReported(Event, frozen=True):
    """A message of another balancer of the region. `loads`: those that changed (`whole`: all of them); `queued`:
    requests waiting there, by model. The audiences of `cached` are by the law of `epoch`. `learned` is sent once, to a
    balancer that starts."""

    peer: str
    loads: dict[str, PeerLoad]
    queued: dict[str, int]
    whole: bool = False
    cached: tuple[Cached, ...] = ()
    epoch: int = 0
    learned: PeerLearned | None = None


class PeersChanged(Event, frozen=True):
    """Which peers take part, and whether we do. The load of peers not in `speaking` counts no longer."""

    live: frozenset[str]
    speaking: frozenset[str]
    serving: bool = True


class TurnTimerFired(Event, frozen=True):
    """Time passed while a peer waits, too: a peer that has not used what was left to it has had its turn."""


class _Peer:
    """A peer's state as reported. `lead`: how much more we had taken when it began to wait; `passed`: replicas where it
    let its turn pass."""

    __slots__ = ("lead", "loads", "passed", "queued")

    def __init__(self) -> None:
        self.loads: dict[str, PeerLoad] = {}
        self.queued: dict[str, int] = {}
        self.lead: dict[str, int] = {}
        self.passed: set[str] = set()


class Shares:
    """See the module's docstring. `instance` is our own name."""

    def __init__(self, instance: str) -> None:
        self.instance = instance
        self.watched = False  # a peer follows this balancer
        self.alone = True  # no peer is known to have anything under way
        self.recent = Recent()
        self._peers: dict[str, _Peer] = {}
        self._waiting: dict[str, _Peer] = {}  # of them, those with a queue
        self._live: frozenset[str] = frozenset()
        self._serving = True
        self._models: dict[str, frozenset[str]] = {}
        self._addresses: dict[str, str] = {}
        self._in_flight: dict[str, int] = {}
        self._taken: dict[str, int] = {}
        self._moved: dict[str, int] = {}  # replica -> the change in which its load last changed, the latest last
        self._change = 0
        self._left: dict[str, float] = {}  # since when we leave what is free there to others
        self._owned: dict[str, bool] = {}

    # -- our own side

    def adopt(self, view: View) -> None:
        """Take the replicas of a new view."""
        addresses = {name: str(replica.address) for name, replica in view.replicas.items()}
        for name in self._addresses.keys() | addresses.keys():
            if self._addresses.get(name) != addresses.get(name):
                self._note(name)
        for name in self._taken.keys() - addresses.keys():
            del self._taken[name]
        if len(self._moved) > 2 * len(addresses) + 1024:
            self._moved = {name: at for name, at in self._moved.items() if name in addresses or name in self._in_flight}
        self._addresses = addresses
        self._models = {name: replica.models for name, replica in view.replicas.items()}
        self._owned.clear()

    def dispatched(self, replica: str, load: Load) -> None:
        """Set our own load at a replica. Without peers no changes need be recorded: a caller that is `alone` and not
        `watched` need not call this."""
        before = self._in_flight.pop(replica, 0)
        if load.in_flight:
            self._in_flight[replica] = load.in_flight
        if load.in_flight > before:
            self._taken[replica] = self._taken.get(replica, 0) + 1
        self._note(replica)

    def _note(self, replica: str) -> None:
        self._change += 1
        self._moved.pop(replica, None)
        self._moved[replica] = self._change

    def moved(self, change: int) -> tuple[int, list[str]]:
        """The replicas whose load changed after `change` (0: all), and the value to pass next time."""
        names: list[str] = []
        for name, at in reversed(self._moved.items()):
            if at <= change:
                break
            names.append(name)
        return self._change, names

    def own(self, replica: str, load: Load) -> PeerLoad:
        """What peers receive about a replica; `load`: what this balancer has in flight there."""
        address = self._addresses.get(replica)
        taken = self._taken.get(replica, 0)
        known = address is not None
        return PeerLoad(address or "", load.in_flight, load.prefill_tokens, load.kv_tokens, taken, known)

    # -- the others'

    def on_report(self, event: PeerReported) -> frozenset[str] | None:
        """Take a peer's message. Returns the replicas whose room it may have changed; None: any."""
        peer = self._peers.setdefault(event.peer, _Peer())
        self.alone = False
        waited, changed = peer.queued.keys(), set(event.loads)
        if event.whole:
            changed |= peer.loads.keys()
            peer.loads = {}
            peer.lead.clear()
        if any(self.serves(event.peer, name) != load.known for name, load in event.loads.items()) or event.whole:
            self._owned.clear()
        for name, load in event.loads.items():
            before = peer.loads.get(name)
            if name in peer.passed and (before is None or before.taken != load.taken):
                peer.passed.discard(name)
                peer.lead.pop(name, None)  # count from here: turns that it let pass are not given back
            peer.loads[name] = load
        peer.queued = event.queued
        if not event.queued:
            peer.lead.clear()
            peer.passed.clear()
            self._waiting.pop(event.peer, None)
        else:
            self._waiting[event.peer] = peer
        return None if waited != event.queued.keys() else frozenset(changed)

    def changed(self, event: PeersChanged) -> None:
        """Take the set of participating peers."""
        self._live, self._serving = event.live, event.serving
        for name in self._peers.keys() - event.speaking:
            self._waiting.pop(name, None)
            gone = self._peers.pop(name)
            if name in event.live:  # it still reports to the world: what it serves stays its own
                silent = self._peers[name] = _Peer()
                silent.loads = {r: PeerLoad(load.address, known=load.known) for r, load in gone.loads.items()}
        self.alone = not self._peers
        self._owned.clear()

    def serves(self, peer: str, replica: str) -> bool:
        """Whether a peer dispatches to the replica that we know by this name."""
        known = self._peers.get(peer)
        load = known.loads.get(replica) if known is not None else None
        return load is not None and load.known and load.address == self._addresses.get(replica)

    def same(self, replica: str, address: str) -> bool:
        """Whether a peer's replica of this name is the same as ours (by its address)."""
        return self._addresses.get(replica) == address

    def with_others(self, replica: str, load: Load) -> Load:
        """What all balancers have in flight at a replica; `load`: the own part."""
        in_flight, prefill, kv = load.in_flight, load.prefill_tokens, load.kv_tokens
        address = self._addresses.get(replica)
        for peer in self._peers.values():
            theirs = peer.loads.get(replica)
            if theirs is not None and theirs.address == address:
                in_flight += theirs.in_flight
                prefill += theirs.prefill_tokens
                kv += theirs.kv_tokens
        # Theirs is for answers, and has been answered for as long, as ours.
        answers = load.answer_tokens * kv // load.kv_tokens if load.kv_tokens else 0
        decoding = load.decoding * in_flight // load.in_flight if load.in_flight else 0
        began_s = load.began_s * decoding / load.decoding if load.decoding else 0.0
        return Load(in_flight, prefill, kv, answer_tokens=answers, decoding=decoding, began_s=began_s)

    def queued(self, model: str, most: float = float("inf")) -> int:
        """Requests for a model that wait at others: of each, at most `most`."""
        return int(sum(min(most, peer.queued.get(model, 0)) for peer in self._waiting.values()))

    # -- turns

    @property
    def contended(self) -> bool:
        """Whether a peer has waiting requests."""
        return bool(self._waiting)

    def gives_way(self, replica: str) -> bool:
        """Whether free room at the replica is a peer's turn."""
        if not self._waiting:
            return False
        return any(self._ahead(peer, replica) for peer in self._waiting.values())

    def _ahead(self, peer: _Peer, replica: str) -> bool:
        theirs = peer.loads.get(replica)
        if theirs is None or replica in peer.passed or self._models[replica].isdisjoint(peer.queued):
            return False
        if not theirs.known or theirs.address != self._addresses[replica]:
            return False
        lead = self._taken.get(replica, 0) - theirs.taken
        return lead - peer.lead.setdefault(replica, lead) >= TURNS

    def overdue(self, replica: str, free: bool, now: float) -> bool:
        """Whether peers have let their turn at a replica pass, so that this balancer may take the slot."""
        if not free or not self.gives_way(replica):
            self._left.pop(replica, None)
            return False
        if now - self._left.setdefault(replica, now) < HEAD_START_S:
            return False
        del self._left[replica]
        for peer in self._waiting.values():
            if self._ahead(peer, replica):
                peer.passed.add(replica)
        return True

    # -- which balancer owns which replica

    def owns(self, replica: str) -> bool:
        """Whether this balancer reports the replica."""
        known = self._owned.get(replica)
        if known is None:
            members = [peer for peer in self._live if self.serves(peer, replica)]
            if self._serving:
                members.append(self.instance)
            known = self._owned[replica] = owner(replica, members) == self.instance
        return known

    def status(self) -> list[tuple[str, int, int]]:
        """For operators: each peer, its requests at replicas, and its waiting requests."""
        return [
            (name, sum(load.in_flight for load in peer.loads.values()), sum(peer.queued.values()))
            for name, peer in sorted(self._peers.items())
        ]
