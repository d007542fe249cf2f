from __future__ import annotations

import asyncio
import time

import pytest

from farhop_lab.bench.anycast_client import Job, ask, request_of, served_by


@pytest.mark.parametrize(
    ("head", "site"),
    [
        (b"HTTP/1.1 200 OK\r\nX-Farhop-Region: Tokyo\r\n\r\n", "tokyo"),
        (b"HTTP/1.1 503 Service Unavailable\r\nx-farhop-region: tokyo\r\n\r\n", ""),
        (b"HTTP/1.1 200 OK\r\n\r\n", ""),
    ],
)
def test_a_site_counts_where_it_served(head, site) -> None:
    assert served_by(head) == site


@pytest.mark.parametrize(
    ("answer", "site"), [(b"HTTP/1.1 200 OK\r\nx-farhop-region: paris\r\n\r\n", "paris"), (b"", "")]
)
async def test_a_connection_is_reported_with_its_beginning(answer, site) -> None:
    took: list[bytes] = []

    async def serve(reader, writer) -> None:
        took.append(await reader.readuntil(b"}]"))
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        job = Job("127.0.0.1", server.sockets[0].getsockname()[1], "sk-1", "m", 1.0)
        before = time.time()
        reply = await ask(job, request_of(job))
    assert (reply.site, before <= reply.at <= time.time()) == (site, True)
    assert b"authorization: Bearer sk-1" in took[0]


async def test_refused_connection_does_not_count_as_an_answer(unused_tcp_port) -> None:
    job = Job("127.0.0.1", unused_tcp_port, "sk-1", "m", 1.0)
    assert (await ask(job, request_of(job))).site == ""
