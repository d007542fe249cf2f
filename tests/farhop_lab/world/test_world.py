"""A world that cannot come up: one line says why, and nothing of it is left. Worlds that do are in flows and drills."""

import asyncio
import contextlib
import socket
import sys
from pathlib import Path

import pytest
import uvloop

from farhop_lab.world import fork_server
from farhop_lab.world.ports import free_ports
from farhop_lab.world.world import World, WorldError, WorldSettings, together


@pytest.mark.skipif(sys.platform != "linux", reason="children are found by /proc")
def test_a_part_that_does_not_start_is_named_and_the_others_end(tmp_path):
    (port,), before = free_ports(1), started()
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
    assert started() <= before


def started(by: str = "self") -> set[str]:
    """Processes that descend from this one, by id, but for the servers that fork programs: those stay while it does."""
    found = set()
    for children in Path(f"/proc/{by}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended during the check
            for pid in children.read_text().split():
                server = fork_server.__name__.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
                found |= started(pid) | (set() if server else {pid})
    return found


async def test_first_error_of_a_parallel_start_ends_the_others_and_is_raised():
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
