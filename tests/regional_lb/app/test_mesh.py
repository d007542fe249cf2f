"""A region's balancer among others: where it borrows quota, and that it can end at any time."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from farhop_wire import region_pb2
from inprocess import Both, Engine, regional_config, topology

from farhop.store.documents.limits import RootClaim
from farhop_lab.memory_store import MemoryCluster, MemoryStore
from regional_lb.app.main import RegionalBalancer


def claim(**more: Any) -> RootClaim:
    return RootClaim(
        **{"region": "virginia", "instance": "r1", "address": "127.0.0.1:1", "seq": 1, "first_lease": 1, "marks": {}}
        | more
    )


async def test_limits_are_borrowed_from_the_regions_root_here_or_at_a_peer(
    up: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, asked = up.regional.mesh, list[str]()
    request, reply = region_pb2.BorrowRequest(), region_pb2.BorrowReply()

    async def borrow(address: str, _: region_pb2.BorrowRequest) -> region_pb2.BorrowReply:
        asked.append(address)
        return reply

    monkeypatch.setattr(mesh.peers, "borrow", borrow)
    monkeypatch.setattr(mesh.limit_root, "borrowed", lambda _: reply)
    own = up.regional.config.instance
    assert await mesh.borrow(claim(instance=own), request) is reply
    assert asked == []
    assert await mesh.borrow(claim(instance="another"), request) is reply
    assert asked == ["127.0.0.1:1"]
    with pytest.raises(OSError, match="own region"):
        await mesh.borrow(claim(region="tokyo"), request)
    monkeypatch.setattr(mesh.limit_root, "borrowed", lambda _: None)
    with pytest.raises(OSError, match="not the root"):
        await mesh.borrow(claim(instance=own), request)


async def test_trouble_with_reports_is_shown_by_hub(up: Both) -> None:
    assert [one["trouble"] for one in up.regional.mesh.published()] == [None]


@pytest.mark.usefixtures("hop_key")
async def test_a_mesh_that_never_opened_can_be_withdrawn_and_closed() -> None:
    async with Engine().running() as engine:
        made = RegionalBalancer(regional_config(engine), topology(), Random(1), MemoryStore(Random(2), MemoryCluster()))
        assert made.mesh.published() == []
        await made.mesh.withdraw()
        await made.close()
