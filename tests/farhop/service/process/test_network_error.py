"""Network errors in words: a cause for an operator, never the address of an object in memory."""

from __future__ import annotations

import asyncio
import ssl

import aiohttp
import pytest

from farhop.service.process.network_error import in_words


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TimeoutError(), "timed out"),
        (ConnectionRefusedError(111, "x"), "connection refused"),
        (aiohttp.ServerDisconnectedError(), "Server disconnected"),
        (OSError(), "OSError"),
        (ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)"), "TLS failed"),
    ],
)
def test_network_error_is_described_by_its_cause(error: Exception, text: str) -> None:
    assert in_words(error).startswith(text)


async def asked(port: int, scheme: str) -> str:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError) as raised:
            await session.get(f"{scheme}://127.0.0.1:{port}/", ssl=ssl.create_default_context())
    return in_words(raised.value)


async def no_tls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.write(b"not TLS\r\n")
    writer.close()
    await writer.wait_closed()


async def test_real_errors_of_an_https_client() -> None:
    server = await asyncio.start_server(no_tls, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert (await asked(port, "https")).startswith("TLS failed")
    assert await asked(port, "https") == "connection refused"
