"""The samples for HAProxy and nginx with the real ones, where installed, in front of two balancers of a live world."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import machine
import pytest

from farhop_lab.bench.proxies import on_path
from farhop_lab.world.certs import Authority
from farhop_lab.world.ports import free_ports
from tests.conftest import RunningWorld

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = {"authorization": "Bearer sk-farhop-anywhere"}
BEFORE = ("virginia", "frankfurt")  # whose global balancers stand in for two of one region
SAMPLES = {"haproxy": "haproxy/haproxy.cfg", "nginx": "nginx/farhop.conf"}


def configured(name: str, running: RunningWorld, folder: Path, port: int, authority: Authority) -> list[str]:
    """Its arguments: the sample, with this machine's addresses and certificate, and the world's plain entries."""
    text = (machine.DEPLOY / SAMPLES[name]).read_text()
    for number, region in enumerate(BEFORE, 1):
        text = text.replace(
            f"farhop-global-{number}.example:443", f"127.0.0.1:{running.world.regions[region].ports['entry']}"
        )
    text = text.replace("0.0.0.0:8443", f"127.0.0.1:{port}")
    pair = authority.issue("proxy")
    path = folder / "conf"
    if name == "haproxy":
        (folder / "both.pem").write_text(Path(pair.cert_file).read_text() + Path(pair.key_file).read_text())
        text = re.sub(r" ssl verify required .*", "", text).replace("/etc/haproxy/farhop.pem", str(folder / "both.pem"))
        path.write_text(text)
        return ["-db", "-q", "-f", str(path)]
    text = re.sub(r"\n *proxy_ssl_.*", "", text).replace("https://farhop;", "http://farhop;")
    text = text.replace("/etc/nginx/tls.crt", pair.cert_file).replace("/etc/nginx/tls.key", pair.key_file)
    temporary = " ".join(
        f"{one}_temp_path {folder / one};" for one in ("proxy", "fastcgi", "uwsgi", "scgi", "client_body")
    )
    main = f"daemon off; pid {folder / 'pid'}; error_log stderr; events {{}}"
    path.write_text(f"{main} http {{ access_log off; {temporary}\n{text} }}")
    return ["-p", str(folder), "-c", str(path)]


@pytest.fixture(params=sorted(SAMPLES))
def proxy(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Its URL and the authority of its certificate."""
    binary = on_path(request.param)
    if binary is None:
        pytest.skip(f"{request.param} is not installed")
    running: RunningWorld = request.getfixturevalue("running")  # a world only where it is needed
    authority = Authority(tmp_path)
    (port,) = free_ports(1)
    arguments = configured(request.param, running, tmp_path, port, authority)
    with machine.running([binary, *arguments], tmp_path / "log"):
        yield f"https://127.0.0.1:{port}", Path(authority.ca_file)


async def streamed(
    session: aiohttp.ClientSession, url: str, tokens: int, prompt: str = "hi"
) -> tuple[int, list[bytes]]:
    """Status, and the chunks as they came."""
    body = {
        "model": "llama-3.1-8b", "stream": True, "max_tokens": tokens, "min_tokens": tokens,
        "messages": [{"role": "user", "content": prompt}],
    }  # fmt: skip
    async with session.post(
        f"{url}/v1/chat/completions", data=io.BytesIO(json.dumps(body).encode()), headers=KEY
    ) as answer:
        return answer.status, [chunk async for chunk in answer.content.iter_any()]


def test_it_passes_streams_and_large_prompts_and_loses_nothing_to_a_balancer_that_goes(
    running: RunningWorld, proxy: tuple[str, Path]
) -> None:
    url, ca = proxy
    world = running.world

    async def drill() -> None:
        connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=str(ca)), force_close=True)
        async with asyncio.timeout(60.0), aiohttp.ClientSession(connector=connector) as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    if (await streamed(session, url, 1))[0] == 200:
                        break
                await asyncio.sleep(0.1)
            status, chunks = await streamed(session, url, 300)
            assert status == 200
            assert b"".join(chunks).endswith(b"data: [DONE]\n\n")
            # An event at a time, at least once: what nginx's buffers hold back comes in pieces of 4 KiB.
            assert min(map(len, chunks[:-2])) < 1000
            status, refusal = await streamed(
                session, url, 1, prompt="long " * 300_000
            )  # by the engine, not by nginx's 1 MiB
            assert (status, b"context length" in b"".join(refusal)) == (400, True)
            async with session.post(f"{url}/v1/chat/completions", json={}) as refused:
                assert (refused.status, (await refused.json())["error"]["type"]) == (401, "authentication_error")
            gone = world.regions["frankfurt"].global_
            assert gone is not None
            await gone.stop()
            try:
                while [(await streamed(session, url, 2))[0] for _ in range(6)] != [200] * 6:
                    await asyncio.sleep(0.5)
            finally:
                await world.start_global("frankfurt")
                await world.wait_until_serving(frozenset(world.regions))

    running.call(drill(), timeout_s=90.0)
