"""A world that cannot come up: one line says why, and nothing of it is left. Worlds that do are in flows and drills."""

import asyncio
import socket
import sys
from pathlib import Path

import pytest
import uvloop

from farhop_lab.world.ports import free_ports
from farhop_lab.world.world import World, WorldError, WorldSettings, together


@pytest.mark.skipif(sys.platform != "linux", reason="children are found by /proc")
def test_a_part_that_does_not_start_is_named_and_the_others_end(tmp_path):
    (port,), before = free_ports(1), children()
    world = World(WorldSettings(replicas=1, entry_port=port), tmp_path)

    async def enter() -> None:
        async with world:
            pytest.fail("it came up")

    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(WorldError, match=f"global balancer of virginia: .*cannot listen on 127.0.0.1:{port}"),
    ):
        uvloop.run(enter())
    assert world.etcd is not None
    assert children() <= before


def children() -> set[str]:
    """This process's, by id."""
    return {pid for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()}


async def test_of_those_that_start_together_the_first_error_ends_the_rest_and_is_raised():
    ended = []

    async def goes_on() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def fails() -> None:
        raise WorldError("no")

    with pytest.raises(WorldError, match="no"):
        await together(goes_on(), fails(), goes_on())
    assert ended == [True, True]
