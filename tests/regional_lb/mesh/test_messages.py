"""Messages between balancers, encoded and decoded, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest
from farhop_wire import peers_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.prefix.chain import DEPTH_MAX
from regional_lb.fleet.recent import Cached
from regional_lb.fleet.shares import PeerLoad
from regional_lb.mesh.messages import LOADS_MAX, NODES_MAX, PeerUpdateError, cached_to_wire, event_of, load_to_wire
from topology.law import Law
from topology.model import Topology

LAW = Law(Topology("test", 3, {}))

_counts = st.integers(0, 2**53)
_nodes = st.lists(st.integers(1, 2**64 - 1), min_size=1, max_size=8, unique=True).map(tuple)


def update(**fields: Any) -> peers_pb2.PeerUpdate:
    told = {"law_epoch": LAW.epoch, "law_fingerprint": LAW.fingerprint}
    return peers_pb2.PeerUpdate(region="london", instance="r2", incarnation=7, seq=1, **{**told, **fields})


@given(
    st.builds(PeerLoad, st.just("h:1"), _counts, _counts, _counts, _counts, st.booleans()),
    st.builds(Cached, st.just("g1"), _nodes, st.none() | st.frozensets(st.sampled_from(("london", "tokyo")))),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_a_peer_update_is_read_as_it_was_written(load, cached) -> None:
    message = update(loads=[load_to_wire("g1", load)], cached=[cached_to_wire(cached)], queued={"m": 3, "n": 0})
    event = event_of(peers_pb2.PeerUpdate.FromString(message.SerializeToString()), LAW, first=True)
    assert (event.peer, event.loads, event.cached, event.whole) == ("r2", {"g1": load}, (cached,), True)
    assert (event.queued, event.epoch) == ({"m": 3}, 3)


@pytest.mark.parametrize("other", [{"law_epoch": 4}, {"law_fingerprint": 1}, {"law_fingerprint": 0}])
def test_under_another_law_map_or_base_no_balancer_outside_gets_anything(other: dict[str, int]) -> None:
    for audience in (None, frozenset({"london"})):
        message = update(cached=[cached_to_wire(Cached("g1", (1, 2), audience))], **other)
        assert event_of(message, LAW, first=False).cached == (Cached("g1", (1, 2), frozenset()),)


def _path(*nodes: int) -> peers_pb2.CachedPath:
    return peers_pb2.CachedPath(replica="g1", nodes=nodes)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (update(loads=[peers_pb2.ReplicaLoad(replica="g1", in_flight=-1)]), "peer_malformed"),
        (update(loads=[peers_pb2.ReplicaLoad(replica="g1", kv_tokens=2**53 + 1)]), "peer_malformed"),
        (update(loads=[peers_pb2.ReplicaLoad(replica="g" * 257)]), "peer_malformed"),
        (update(loads=[peers_pb2.ReplicaLoad(replica="g1")] * (LOADS_MAX + 1)), "peer_too_many"),
        (update(queued={f"m{n}": 1 for n in range(257)}), "peer_too_many"),
        (update(cached=[_path()]), "peer_malformed"),
        (update(cached=[_path()] * (NODES_MAX + 1)), "peer_too_many"),
        (update(cached=[peers_pb2.CachedPath(replica="g1", nodes=[1], regions=["r"] * NODES_MAX)]), "peer_too_many"),
        (update(cached=[_path(1, 0)]), "peer_malformed"),
        (update(cached=[_path(1, 2, 1)]), "peer_malformed"),
        (update(cached=[_path(*range(1, DEPTH_MAX + 2))]), "peer_malformed"),
        (update(cached=[_path(*range(1, 1000))] * (NODES_MAX // 999 + 1)), "peer_too_many"),
    ],
)
def test_a_message_with_impossible_values_is_refused(message, why) -> None:
    with pytest.raises(PeerUpdateError, match=why):
        event_of(message, LAW, first=False)
