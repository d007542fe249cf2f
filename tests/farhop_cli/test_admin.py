"""Asking admin ports: answers, what is unknown, and every way not to answer."""

import asyncio
import contextlib

import pytest

from farhop_cli import admin
from farhop_cli.access import AdminError, QuestionError


@pytest.fixture
async def http():
    async with admin.AdminClient() as made:
        yield made


async def test_status_of_a_balancer_is_read(world, http, made):
    world.status["virginia", "global_admin"] = made.global_status(tokyo="up")
    status = await admin.get(http, world.file.regions["virginia"].global_admin + "/", "/status")
    assert status["regions"][0]["region"] == "tokyo"


async def test_unknown_decision_gives_none(world, http):
    assert await admin.get(http, world.file.regions["virginia"].global_admin, "/decisions/ffff") is None


async def test_a_bad_question_is_an_error_of_its_own(world, http):
    with pytest.raises(QuestionError, match="a bad question"):
        await admin.explain(http, world.file.regions["virginia"].global_admin, {"body": {}})


async def test_an_address_without_explain_is_reported(world, http):
    with pytest.raises(AdminError, match="no /explain"):
        await admin.explain(http, f"{world.file.regions['virginia'].global_admin}/elsewhere", {})


async def test_a_closed_admin_port_is_an_error(unused_tcp_port, http):
    with pytest.raises(AdminError, match="cannot be reached: connection refused"):
        await admin.get(http, f"http://127.0.0.1:{unused_tcp_port}", "/status")


async def test_an_admin_port_that_closes_the_connection_is_unreachable(world, http):
    world.silent.add(("tokyo", "global_admin"))
    with pytest.raises(AdminError, match="cannot be reached"):
        await admin.get(http, world.file.regions["tokyo"].global_admin, "/status")


@pytest.mark.parametrize(("answer", "says"), [
    (b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n[1]\n", "no JSON object"),
    (b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n\xff\xff{}", "no JSON object"),
    (b"HTTP/1.1 503 Busy\r\ncontent-length: 16\r\n\r\n{\"error\":\"busy\"}", "status 503: busy"),
    (b"nonsense\r\n\r\n", "cannot be reached"),
    (b"", "did not answer within"),
])  # fmt: skip
async def test_nonsense_is_an_error_and_silence_has_an_end(monkeypatch, answer, says):
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        if not answer:
            await reader.read()  # until the client gives up
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        over.set()

    over = asyncio.Event()
    monkeypatch.setattr(admin, "ANSWER_S", 0.3)
    async with await asyncio.start_server(speak, "127.0.0.1", 0) as server, admin.AdminClient() as http:
        host, port = server.sockets[0].getsockname()
        with pytest.raises(AdminError, match=says):
            await admin.get(http, f"http://{host}:{port}", "/status")
    await asyncio.wait_for(over.wait(), 60.0)


async def test_an_answer_without_end_is_cut(world, http, made, monkeypatch):
    monkeypatch.setattr(admin, "ANSWER_BYTES_MAX", 64)
    world.status["virginia", "global_admin"] = made.global_status(tokyo="up")
    with pytest.raises(AdminError, match="more than 64 bytes"):
        await admin.get(http, world.file.regions["virginia"].global_admin, "/status")
