"""The whole path under TLS: client, tiers, gRPC, engine and admin port, each verifying its peer."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import ssl
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import aiohttp
import grpc
import pytest
import uvloop
import yaml
from inprocess import HOP_KEY, MODEL, Engine, both, common, regional_config, send, topology, until

from farhop.balance.machine import LawChanged
from farhop.telemetry import logs
from farhop_lab.memory_store import MemoryCluster, MemoryStore
from farhop_lab.world.certs import Authority, Pair
from global_lb.app.main import run
from regional_lb.app.main import RegionalBalancer
from topology.law import Law
from topology.model import Residency, Rule

if TYPE_CHECKING:
    import openai

SDKS = ("openai",)
STRICT = {"client", "tier", "control"}  # the side that requires a certificate


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """What ships runs on uvloop."""
    return {"uvloop": uvloop.new_event_loop}


class Pki:
    """An authority for everybody, and one that nobody believes."""

    def __init__(self, folder: Path) -> None:
        self.authority, self.stranger = Authority(folder), Authority(folder, "stranger")
        here = ("127.0.0.1", "localhost")
        above = ("virginia.global.farhop.internal", "spiffe://farhop.internal/farhop/global/virginia")
        below = ("virginia.regional.farhop.internal", "spiffe://farhop.internal/farhop/regional/virginia")
        self.client = self.authority.issue("client", (*here, *above))
        self.names = self.authority.issue("names", ("virginia.tiers.example",))
        self.server = self.authority.issue("server", (*here, *below))
        self.intruder = self.stranger.issue("intruder")

    def listens(self, port: str, pair: Pair | None = None) -> dict[str, Any]:
        pair = pair or self.server
        mutual = {"client_ca_file": self.authority.ca_file} if port in STRICT else {}
        return {"port": 0, "tls": {"cert_file": pair.cert_file, "key_file": pair.key_file, **mutual}}

    def connects(self, pair: Pair | None, authority: Authority | None = None) -> dict[str, Any]:
        own = {} if pair is None else {"cert_file": pair.cert_file, "key_file": pair.key_file}
        return {"ca_file": (authority or self.authority).ca_file, **own}

    def context(self, pair: Pair | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.authority.ca_file)
        if pair is not None:
            context.load_cert_chain(pair.cert_file, pair.key_file)
        return context


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(autouse=True)
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """What the logs say under an event."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    out = io.StringIO()
    logs.configure("both", "virginia", "t", stream=out)
    return lambda event: [line for line in map(json.loads, out.getvalue().splitlines()) if line["event"] == event]


def everywhere(pki: Pki, tier: Pair | None = None, **tier_tls: Any) -> dict[str, Any]:
    """The configuration of both tiers with TLS on every port."""
    return {
        "regional": {
            **{port: pki.listens(port) for port in ("client", "admin")},
            **{port: pki.listens(port, tier) for port in ("tier", "control")},
        },
        "global_": {
            **{port: pki.listens(port) for port in ("listen", "admin")},
            "tier_tls": {**pki.connects(pki.client), **tier_tls},
        },
    }


async def asked(port: int, context: ssl.SSLContext, *, stream: bool = False) -> str:
    """What the official SDK gets at a port."""
    async with (
        openai.DefaultAsyncHttpx2Client(verify=context) as http,
        openai.AsyncOpenAI(
            base_url=f"https://127.0.0.1:{port}/v1", api_key="sk-farhop-anywhere", max_retries=0, http_client=http
        ) as sdk,
    ):
        messages: Any = [{"role": "user", "content": "hello"}]
        if not stream:
            answer = await sdk.chat.completions.create(model=MODEL, messages=messages)
            return answer.choices[0].message.content or ""
        pieces = await sdk.chat.completions.create(model=MODEL, messages=messages, stream=True)
        return " ".join([p.choices[0].delta.content or "" async for p in pieces if p.choices])


async def test_the_openai_sdk_through_two_tiers_to_an_engine_all_under_tls(pki: Pki) -> None:
    behind = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=pki.authority.ca_file)
    behind.verify_mode = ssl.CERT_REQUIRED
    behind.load_cert_chain(pki.server.cert_file, pki.server.key_file)
    setting = everywhere(pki)
    setting["regional"]["engine_tls"] = pki.connects(pki.client)
    async with Engine().running(behind) as engine, both(engine, topology(), **setting) as up:
        assert await asked(up.entry, pki.context()) == "hello"
        assert await asked(up.entry, pki.context(), stream=True) == "one two three"
        assert await asked(up.client, pki.context(pki.client)) == "hello"
        with pytest.raises(openai.APIConnectionError):
            await asked(up.client, pki.context())
        assert (await send(up.entry, b"GET /v1/models HTTP/1.1\r\n\r\n")).status == 0
        assert len(engine.seen) == 3
        async with aiohttp.ClientSession() as http:
            for port, refused in (
                (up.global_admin, 'listener="listen",reason="not_tls"'),
                (up.regional_admin, 'listener="client",reason="no_certificate"'),
            ):
                async with http.get(f"https://127.0.0.1:{port}/metrics", ssl=pki.context()) as answer:
                    text = await answer.text()
                assert f"farhop_handshakes_refused_total{{{refused}" in text
                assert 'farhop_certificate_expiry_timestamp_seconds{part="admin.tls"' in text


async def test_regions_are_known_by_the_name_in_their_certificate(pki: Pki) -> None:
    setting = everywhere(pki, pki.names, server_name="{region}.tiers.example")
    async with Engine().running() as engine, both(engine, topology(), **setting) as up:
        assert await asked(up.entry, pki.context()) == "hello"


@pytest.mark.parametrize("wrong", ["authority", "name", "certificate"])
async def test_a_failed_tls_handshake_between_tiers_is_logged_with_its_reason(pki: Pki, lines: Any, wrong: str) -> None:
    setting = everywhere(pki, **({"server_name": "{region}.example"} if wrong == "name" else {}))
    if wrong != "name":
        ours = (pki.client, pki.stranger) if wrong == "authority" else (pki.intruder,)
        setting["global_"]["tier_tls"] = pki.connects(*ours)
    async with Engine().running() as engine, both(engine, topology(), **setting, states=("up", "suspect")) as up:
        status, error = await _answered(up.entry, pki)
        assert status == 503
        assert ("connect_failed" if wrong != "certificate" else "before_first_byte") in error
        assert engine.seen == []
        if wrong == "certificate":
            (line,) = lines("TLS handshake refused")[:1]
            assert (line["listener"], line["reason"]) == ("tier", "bad_certificate")
            return
        await until(lambda: len({line["upstream"] for line in lines("upstream trouble")}) == 2)  # by HTTP and by gRPC
        assert f"127.0.0.1:{up.tier}" in {line["upstream"] for line in lines("upstream trouble")}
        problems = [line["problem"].lower() for line in lines("upstream trouble")]
        assert all("certificate" in problem or "hostname" in problem for problem in problems)


async def _answered(port: int, pki: Pki, text: str = "hello") -> tuple[int, str]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}]}
    head = {"authorization": "Bearer sk-farhop-anywhere"}
    async with (
        aiohttp.ClientSession(headers=head) as http,
        http.post(
            f"https://127.0.0.1:{port}/v1/chat/completions",
            data=io.BytesIO(json.dumps(body).encode()),
            ssl=pki.context(),
        ) as answer,
    ):
        return answer.status, await answer.text()


async def test_no_byte_is_sent_to_a_region_after_the_law_forbids_it_under_tls(pki: Pki) -> None:
    """A long prompt is on its way: TLS did not tell that most of it was here, and all followed."""
    goes, passed, size = asyncio.Event(), [0], 14_000_000
    goes.set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counts: list[int]) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                await goes.wait()
                counts[0] += len(data)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def slow_proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode().split(":")
        there, onward = await asyncio.open_connection(host, int(port))
        writer.write(b"HTTP/1.1 200 ok\r\n\r\n")
        await asyncio.gather(pump(reader, onward, passed), pump(there, writer, [0]))

    proxy, setting = await asyncio.start_server(slow_proxy, "127.0.0.1", 0), everywhere(pki)
    setting["global_"]["proxies"] = {"virginia": f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"}
    async with proxy, Engine().running() as engine, both(engine, topology(), **setting) as up:
        assert await asked(up.entry, pki.context()) == "hello"
        goes.clear()
        before, world = passed[0], up.global_.flow.law.topology
        tokyo = replace(world.tenants["anywhere"], residency=Residency(processing=Rule(allow=("jp",))))
        asking = asyncio.create_task(_answered(up.entry, pki, "x" * size))
        await until(lambda: any(state.attempt for state in up.global_.flow.requests.values()))
        await asyncio.sleep(0.2)  # for whatever can leave to have left
        law = Law(replace(world, tenants={**world.tenants, "anywhere": tokyo}, epoch=2))
        up.global_.relay.react(LawChanged(law))
        goes.set()
        assert (await asking)[0] == 503
        await up.at_rest()
        assert passed[0] - before < size
        assert len(engine.seen) == 1


async def test_untrusted_engine_is_down_with_the_reason_logged(pki: Pki, lines: Any) -> None:
    behind = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    behind.load_cert_chain(pki.intruder.cert_file, pki.intruder.key_file)
    engine = Engine()
    async with engine.running(behind):
        config = regional_config(engine, engine_tls=pki.connects(None), client={"port": 0})
        balancer = RegionalBalancer(config, topology(), Random(1), MemoryStore(Random(2), MemoryCluster()))
        try:
            await balancer.open()
            await until(lambda: lines("upstream trouble"))
            (line,) = lines("upstream trouble")
            assert line["upstream"] == engine.address
            assert "the certificate is not trusted: unable to get local issuer" in line["problem"]
            await until(lambda: not balancer.tier_admin.ready())
        finally:
            await balancer.close()


async def test_the_tiers_take_up_renewed_certificates_of_a_new_authority_without_a_restart(
    pki: Pki, tmp_path: Path
) -> None:
    """Every file changes, the authority's too: what came before is believed no more, and the tiers find together."""
    moving = Pki(tmp_path)
    async with Engine().running() as engine, both(engine, topology(), **everywhere(moving)) as up:
        assert await asked(up.entry, moving.context()) == "hello"
        before, (link,) = moving.context(), up.global_.watcher.links.values()
        renewed = Pki(tmp_path)
        for balancer in (up.regional, up.global_):
            await balancer.plane.tls.manager.look()
        assert await asked(up.entry, renewed.context()) == "hello"
        with pytest.raises(openai.APIConnectionError):
            await asked(up.entry, before)
        with pytest.raises(openai.APIConnectionError):
            await asked(up.client, before)
        assert await asked(up.client, renewed.context(renewed.client)) == "hello"
        (again,) = up.global_.watcher.links.values()
        assert again is not link
        await until(lambda: again.channel.get_state() is grpc.ChannelConnectivity.READY)


def test_a_configuration_that_cannot_be_used_is_one_line_and_exit_code_2(
    pki: Pki, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = {
        **common("virginia", "g1"),
        "listen": {"port": 0, "tls": {"cert_file": pki.server.cert_file, "key_file": pki.client.key_file}},
    }
    path = tmp_path / "global.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(SystemExit) as ended:
        run(path)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "listen.tls: key_file: " in line
    assert "is not the key of the certificate in" in line
