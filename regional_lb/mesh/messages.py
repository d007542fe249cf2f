"""Messages between the balancers of a region, and their conversion to the machine's types.

Invariant: a message is accepted whole or not at all: if one value is outside its domain, none is used. Keeps no state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farhop_wire import peers_pb2

from farhop.balance.estimate.estimates import ENTRIES_MAX, Learned, Measured
from farhop.balance.prefix.chain import DEPTH_MAX
from farhop.store.documents.report import COUNT_LIMIT, MODELS_LIMIT, TEXT_LIMIT
from regional_lb.fleet.recent import Cached
from regional_lb.fleet.shares import PeerLearned, PeerLoad, PeerReported

if TYPE_CHECKING:
    from topology.law import Law

LOADS_MAX = 8192
SPEEDS_MAX = 2048  # so that they fit into one message beside all loads; those of other replicas are soon measured
NODES_MAX = 4096  # and regions; a slice has some 2,000, and one path more (regional_lb.mesh.feed)


class PeerUpdateError(Exception):
    """A message that cannot be meant, or not for us. The text is the reason it is counted under."""


def event_of(update: peers_pb2.PeerUpdate, law: Law, *, first: bool) -> PeerReported:
    """A message as the machine takes it, by `law`. Raises PeerUpdateError for what no sound balancer would send."""
    if len(update.loads) > LOADS_MAX or len(update.queued) > MODELS_LIMIT:
        raise PeerUpdateError("peer_too_many")
    if len(update.cached) > NODES_MAX or sum(len(path.nodes) + len(path.regions) for path in update.cached) > NODES_MAX:
        raise PeerUpdateError("peer_too_many")
    # Of one epoch a map or a model's base may still differ: while they change, or since what is on disk was written.
    same_law = (update.law_epoch, update.law_fingerprint) == (law.epoch, law.fingerprint)
    return PeerReported(
        update.instance,
        {load.replica: _load(load) for load in update.loads},
        {model: count for model, count in update.queued.items() if count > 0},
        whole=first,
        cached=tuple(_cached(path, same_law=same_law) for path in update.cached),
        epoch=law.epoch,
        learned=_learned(update.learned) if first and update.HasField("learned") else None,
    )


def _learned(message: peers_pb2.Learned) -> PeerLearned:
    """Each figure's domain is checked by its reader."""
    if max(len(message.bytes_per_token), len(message.outputs)) > ENTRIES_MAX or len(message.speeds) > SPEEDS_MAX:
        raise PeerUpdateError("peer_too_many")
    outputs = {(one.tenant, one.model): one.tokens for one in message.outputs}
    names = [
        *message.bytes_per_token,
        *(name for of in outputs for name in of),
        *(one.replica for one in message.speeds),
    ]
    if any(len(name) > TEXT_LIMIT for name in names):
        raise PeerUpdateError("peer_malformed")
    speeds = {
        one.replica: (one.address, Measured(*(getattr(one, name) for name in Measured._fields)))
        for one in message.speeds
    }
    return PeerLearned(Learned(dict(message.bytes_per_token), outputs), speeds)


def learned_to_wire(learned: PeerLearned) -> peers_pb2.Learned:
    """What was learned here, as protobuf."""
    bytes_per_token, outputs = learned.estimates
    return peers_pb2.Learned(
        bytes_per_token=bytes_per_token,
        outputs=[peers_pb2.LearnedOutput(tenant=t, model=m, tokens=tokens) for (t, m), tokens in outputs.items()],
        speeds=[
            peers_pb2.LearnedSpeed(replica=name, address=address, **measured._asdict())
            for name, (address, measured) in list(learned.replicas.items())[:SPEEDS_MAX]
        ],
    )


def _load(load: peers_pb2.ReplicaLoad) -> PeerLoad:
    counts = (load.in_flight, load.prefill_tokens, load.kv_tokens, load.taken)
    if not all(0 <= count <= COUNT_LIMIT for count in counts) or len(load.replica) > TEXT_LIMIT:
        raise PeerUpdateError("peer_malformed")
    return PeerLoad(load.address, *counts, known=load.known)


def _cached(path: peers_pb2.CachedPath, *, same_law: bool) -> Cached:
    nodes = tuple(path.nodes)
    if not nodes or len(nodes) > DEPTH_MAX or 0 in nodes or len(set(nodes)) < len(nodes):
        raise PeerUpdateError("peer_malformed")
    # Under another law than ours its audience is unknown: it is used here all the same, and not passed on.
    nobody: frozenset[str] = frozenset()
    audience = (frozenset(path.regions) if path.restricted else None) if same_law else nobody
    return Cached(path.replica, nodes, audience)


def load_to_wire(replica: str, load: PeerLoad) -> peers_pb2.ReplicaLoad:
    """What this balancer has in flight at a replica, as protobuf."""
    return peers_pb2.ReplicaLoad(
        replica=replica,
        address=load.address,
        known=load.known,
        in_flight=load.in_flight,
        prefill_tokens=load.prefill_tokens,
        kv_tokens=load.kv_tokens,
        taken=load.taken,
    )


def cached_to_wire(entry: Cached) -> peers_pb2.CachedPath:
    """A path that a replica began to serve, as protobuf."""
    regions = sorted(entry.audience) if entry.audience is not None else ()
    return peers_pb2.CachedPath(
        replica=entry.replica, nodes=entry.chain, restricted=entry.audience is not None, regions=regions
    )
