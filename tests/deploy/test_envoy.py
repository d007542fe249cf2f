"""deploy/envoy/envoy.yaml in a real Envoy, in front of two global balancers of a live world."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import machine
import pytest
import yaml

from farhop_lab.bench.proxies import ENVOY
from farhop_lab.world.certs import Authority
from farhop_lab.world.ports import free_ports
from tests.conftest import RunningWorld

pytestmark = pytest.mark.envoy
SAMPLE = machine.DEPLOY / "envoy" / "envoy.yaml"
KEY = {"authorization": "Bearer sk-farhop-anywhere"}
BEFORE = ("virginia", "frankfurt")  # whose global balancers stand in for two of one region


def configured(running: RunningWorld, folder: Path, port: int, authority: Authority) -> Path:
    """The sample, with this machine's addresses and certificate and nothing else changed."""
    document: dict[str, Any] = yaml.safe_load(SAMPLE.read_text())
    (listener,), (cluster,) = document["static_resources"]["listeners"], document["static_resources"]["clusters"]
    listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
    (chain,) = listener["filter_chains"]
    (shown,) = chain["transport_socket"]["typed_config"]["common_tls_context"]["tls_certificates"]
    pair = authority.issue("envoy")
    shown["certificate_chain"]["filename"], shown["private_key"]["filename"] = pair.cert_file, pair.key_file
    del cluster["transport_socket"]  # the world's entries speak plain HTTP
    (group,) = cluster["load_assignment"]["endpoints"]
    for endpoint, region in zip(group["lb_endpoints"], BEFORE, strict=True):
        ports = running.world.regions[region].ports
        address = endpoint["endpoint"]["address"]["socket_address"]
        address["address"], address["port_value"] = "127.0.0.1", ports["entry"]
    path = folder / "envoy.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


@pytest.fixture
def envoy(running: RunningWorld, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Its URL and the authority of its certificate."""
    program = ENVOY.find()
    assert program is not None
    folder = tmp_path_factory.mktemp("envoy")
    authority = Authority(folder)
    (port,) = free_ports(1)
    path = configured(running, folder, port, authority)
    checked = subprocess.run(
        [program, "--mode", "validate", "-c", str(path)], capture_output=True, text=True, timeout=60.0, check=False
    )
    assert checked.returncode == 0, checked.stderr[-2000:]
    command = [program, "-c", str(path), "--concurrency", "1", "--use-dynamic-base-id", "-l", "warning"]
    with machine.running(command, folder / "log"):
        yield f"https://127.0.0.1:{port}", Path(authority.ca_file)


async def streamed(session: aiohttp.ClientSession, url: str, tokens: int) -> tuple[int, list[bytes], str]:
    """Status, the chunks as they came, and who served."""
    body = {
        "model": "llama-3.1-8b", "stream": True, "max_tokens": tokens, "min_tokens": tokens,
        "messages": [{"role": "user", "content": "through Envoy"}],
    }  # fmt: skip
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=KEY) as answer:
        return (
            answer.status,
            [chunk async for chunk in answer.content.iter_any()],
            answer.headers.get("x-farhop-region", ""),
        )


def test_it_streams_and_sends_nothing_to_a_balancer_that_is_not_ready(
    running: RunningWorld, envoy: tuple[str, Path]
) -> None:
    url, ca = envoy
    world = running.world

    async def drill() -> None:
        trust = ssl.create_default_context(cafile=str(ca))
        connector = aiohttp.TCPConnector(ssl=trust, force_close=True)
        async with asyncio.timeout(60.0), aiohttp.ClientSession(connector=connector) as session:
            while True:  # it knows which ones are healthy a second after its start
                with contextlib.suppress(aiohttp.ClientError):
                    if (await streamed(session, url, 1))[0] == 200:
                        break
                await asyncio.sleep(0.1)
            status, chunks, region = await streamed(session, url, 1500)
            text = b"".join(chunks)
            assert (status, region != "") == (200, True)
            assert text.endswith(b"data: [DONE]\n\n")
            assert len(chunks) >= 3  # chunk by chunk, not in one piece at its end
            # Farhop's refusals come through unchanged: Envoy retries nothing.
            async with session.post(f"{url}/v1/chat/completions", json={}, headers={}) as refused:
                assert (refused.status, (await refused.json())["error"]["type"]) == (401, "authentication_error")
            # One of the two goes: Envoy uses the other alone, and loses no new request once it knows.
            gone = world.regions["frankfurt"].global_
            assert gone is not None
            await gone.stop()
            try:
                # It asks once a second, and accepts the first answer: however busy the machine, it knows after a while.
                while [(await streamed(session, url, 2))[0] for _ in range(6)] != [200] * 6:
                    await asyncio.sleep(0.5)
                assert [(await streamed(session, url, 2))[0] for _ in range(6)] == [200] * 6
            finally:
                await world.start_global("frankfurt")
                await world.wait_until_serving(frozenset(world.regions))

    running.call(drill(), timeout_s=90.0)
