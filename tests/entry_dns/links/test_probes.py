from __future__ import annotations

import asyncio

import pytest

from entry_dns.links.config import Probe
from entry_dns.links.probes import Probes
from farhop_lab.world.ports import free_ports
from topology.model import Entry


async def answering(line: bytes) -> asyncio.Server:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(line)
        await writer.drain()
        writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", 0)


async def probed(config: Probe, entry: Entry) -> tuple[str, bool, str]:
    found: asyncio.Future[tuple[str, bool, str]] = asyncio.get_running_loop().create_future()

    def tell(name: str, good: bool, why: str) -> None:
        if not found.done():
            found.set_result((name, good, why))

    probes = Probes(config, tell, lambda: 0.01)
    probes.follow({entry.name: entry})
    try:
        async with asyncio.timeout(20):
            return await found
    finally:
        await probes.close()


@pytest.mark.parametrize(
    ("line", "good", "why"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", True, ""),
        (b"HTTP/1.1 204 No Content\r\n\r\n", True, ""),
        (b"HTTP/1.1 307 Elsewhere\r\n\r\n", False, ": 307"),
        (b"HTTP/1.1 503 Not now\r\n\r\n", False, ": 503"),
        (b"SSH-2.0-x\r\n", False, ": no HTTP"),
    ],
)
async def test_an_entry_is_asked_as_a_client_would_come(line: bytes, good: bool, why: str) -> None:
    server = await answering(line)
    port = server.sockets[0].getsockname()[1]
    name, was, found = await probed(Probe(scheme="http"), Entry("a", "tokyo", ("127.0.0.1",), port=port))
    server.close()
    assert (name, was) == ("a", good)
    assert found == (f"127.0.0.1:{port}{why}" if why else "")


async def test_an_unreachable_entry() -> None:
    (port,) = free_ports(1)
    _, good, why = await probed(Probe(scheme="tcp", at={"a": f"127.0.0.1:{port}"}), Entry("a", "tokyo", ("192.0.2.1",)))
    assert not good
    assert why.startswith(f"127.0.0.1:{port}: ")


def test_where_an_entry_is_asked() -> None:
    entry = Entry("a", "tokyo", ("192.0.2.1",), ("2001:db8::1",), port=8443)
    probes = Probes(Probe(scheme="tcp"), lambda *_: None, lambda: 1.0)
    assert probes.addresses(entry) == [("192.0.2.1", 8443), ("2001:db8::1", 8443)]
    probes = Probes(Probe(scheme="tcp", families=("ipv4",)), lambda *_: None, lambda: 1.0)
    assert probes.addresses(entry) == [("192.0.2.1", 8443)]
