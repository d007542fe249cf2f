"""The picker behind a real Envoy: the Inference Extension's conformance cases, and what befalls a gateway's requests.

After gateway_following_epp_routing, its _dp, gateway_destination_endpoint_served, epp_unavailable_fail_open and
gateway_weighted_two_pools of its suite (v1.6.0).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import picking
import pytest
import yaml
from aiohttp import web
from gateways import SUBSET_HEADER, ask_of, by_tls, envoy, ext_proc, manager, narrow_by_header
from inprocess import HOP_KEY, MODEL, Engine, chat, common, global_config, head, send, tenant, topology, until
from picking import Stage, stage

from farhop.store.contract import LAW_KEY
from farhop_lab.memory_store import MemoryCluster, MemoryStore
from farhop_lab.world.certs import Authority
from farhop_lab.world.child import Child
from farhop_lab.world.etcd import EmbeddedEtcd
from farhop_lab.world.ports import free_ports
from global_lb.app.main import GlobalBalancer
from tests.conftest import NO_CERTIFICATES
from topology import law_document

pytestmark = pytest.mark.envoy
STREAM = {"model": MODEL, "messages": [{"role": "user", "content": "x" * 2000}], "stream": True}


def addresses(one: Stage) -> list[str]:
    return [engine.address for engine in one.engines]


def served(answer: Any) -> str:
    assert answer.status == 200, answer.body
    return str(answer.headers["x-farhop-replica"])


async def test_a_gateway_uses_the_given_endpoint_and_reports_which_served(tmp_path: Path) -> None:
    async with stage(3) as one, envoy(tmp_path, one.port, addresses(one), narrow_by_header) as port:
        a, b, c = addresses(one)
        # One endpoint, two, all ports of an address (the ranks of one pod), and one that does not exist.
        for hint, names in (
            (b, {"b"}),
            (f"{a},{c}", {"a", "c"}),
            ("127.0.0.1", {"a", "b", "c"}),
            (f"10.0.0.9:80,{a}", {"a"}),
        ):
            got = Counter([served(await send(port, chat(**{SUBSET_HEADER: hint}))) for _ in range(6)])
            assert set(got) <= names, (hint, got)
        none = await send(port, chat(**{SUBSET_HEADER: "10.0.0.9:80"}))
        assert (none.status, none.code) == (503, "no_replica_serving")
        found = sum(len(engine.seen) for engine in one.engines)
        assert found == 24
        # Engines see the same as from the relay, and nothing of the answer is lost.
        whole = await send(port, chat(body=STREAM, x_request_id="theirs"))
        assert whole.body.count(b"data: ") == 4
        assert whole.body.endswith(b"data: [DONE]\n\n")
        seen, body = next(
            engine.seen[-1] for engine in one.engines if len(engine.seen[-1][1]["messages"][0]["content"]) > 99
        )
        assert body["stream_options"] == {"include_usage": True}
        assert not {"authorization", "x-request-id", "x-farhop-decision"} & seen.keys()
        assert seen["via"] == "1.1 farhop"
        models = await send(port, head("GET", "/v1/models", authorization="Bearer sk-farhop-anywhere"))
        assert [model["id"] for model in models.json["data"]] == [MODEL]
        assert (await send(port, chat(key=None))).code == "missing_key"
        await one.at_rest()


async def test_large_bodies_and_trailers_arrive_whole(tmp_path: Path) -> None:
    def with_trailers(config: dict[str, Any]) -> None:
        # If a route has a retry policy, Envoy 1.40 sends a body that trailers follow twice (picker.md).
        manager(config)["http_protocol_options"] = {"enable_trailers": True}
        del manager(config)["route_config"]["virtual_hosts"][0]["routes"][0]["route"]["retry_policy"]

    async with stage(1) as one, envoy(tmp_path, one.port, addresses(one), with_trailers) as port:
        large = {"model": MODEL, "messages": [{"role": "user", "content": "0123456789" * 150_000}], "stream": True}
        answer = await send(port, chat(body=large))
        assert answer.status == 200
        assert one.engines[0].seen[-1][1]["messages"] == large["messages"]
        text = chat(body=STREAM).partition(b"\r\n\r\n")[2]
        lines = head("POST", "/v1/chat/completions", authorization="Bearer sk-farhop-anywhere",
                     content_type="application/json", transfer_encoding="chunked")  # fmt: skip
        pieces = [b"%x\r\n%b\r\n" % (len(part), part) for part in (text[:99], text[99:])]
        answer = await send(port, lines, *pieces, b"0\r\nx-checksum: 1\r\n\r\n")
        assert answer.status == 200
        assert one.engines[0].seen[-1][1]["messages"] == STREAM["messages"]
        await one.at_rest()


@pytest.mark.parametrize("mode", ["FULL_DUPLEX_STREAMED", "NONE"])
async def test_a_break_at_any_point_leaves_nothing_behind(tmp_path: Path, mode: str) -> None:
    def change(config: dict[str, Any]) -> None:
        ext_proc(config)["processing_mode"]["response_body_mode"] = mode

    async def begin(port: int, text: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(text)
        return reader, writer

    async with stage(2) as one, envoy(tmp_path, one.port, addresses(one), change) as port:
        flow = one.balancer.flow
        whole = chat(body=STREAM)
        _, writer = await begin(port, whole[:-500])  # mid-body
        await until(lambda: one.picker.streams == 1 and one.balancer.plane.budget.used_bytes > 1000)
        writer.transport.abort()
        await one.at_rest()
        for engine in one.engines:
            engine.behaviour = "wait"
        _, writer = await begin(port, whole)  # before the answer
        await until(lambda: len(flow.replicas.ledger) == 1)
        writer.transport.abort()
        await one.at_rest()
        for engine in one.engines:
            engine.behaviour = "pause"
        reader, writer = await begin(port, whole)  # mid-answer
        await reader.readuntil(b"\r\n\r\n")
        assert len(flow.replicas.ledger) == 1
        writer.transport.abort()
        await one.at_rest()
        for engine in one.engines:
            engine.behaviour = "wait"
        late = await send(port, chat(body={**STREAM, "stream": False}, x_farhop_timeout_ms="300"))
        assert (late.status, late.code) == (504, "deadline_exceeded")
        for engine in one.engines:
            engine.behaviour = "serve"
        assert (await send(port, whole)).status == 200
        await one.at_rest()
        assert flow.replicas.estimates.output_tokens("anywhere", MODEL, None) > 0


async def test_a_queued_request_is_sent_when_there_is_room(tmp_path: Path) -> None:
    async with stage(1, slots=1, queue={"wait_s": 20}) as one, envoy(tmp_path, one.port, addresses(one)) as port:
        engine, flow = one.engines[0], one.balancer.flow
        engine.behaviour = "wait"
        first = [asyncio.create_task(send(port, chat(body=STREAM))) for _ in range(3)]
        await until(lambda: len(flow.queue) == 2)
        await asyncio.sleep(0.5)  # longer than Envoy's default for a message
        assert len(flow.queue) == 2
        engine.behaviour = "serve"
        engine.release.set()
        assert {answer.status for answer in await asyncio.gather(*first)} == {200}
        await one.at_rest()


class Failing(Engine):
    """It answers 500 with this body."""

    body = b""

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        return web.Response(status=500, body=self.body)


@pytest.mark.parametrize("mode", ["FULL_DUPLEX_STREAMED", "NONE"])
async def test_no_stack_trace_and_no_empty_error_passes_a_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    def change(config: dict[str, Any]) -> None:
        ext_proc(config)["processing_mode"]["response_body_mode"] = mode

    monkeypatch.setattr(picking, "Engine", Failing)
    async with stage(1) as one, envoy(tmp_path, one.port, addresses(one), change) as port:
        for text in (b"", b"Traceback (most recent call last):\nValueError"):
            monkeypatch.setattr(Failing, "body", text)
            answer = await send(port, chat())
            assert (answer.status, answer.code) == (500, "engine_error")
            assert b"Traceback" not in answer.body
        await one.at_rest()


class Unread(Engine):
    """It reads no body before it may; `read` counts what came, and `broken` says whether the rest did not."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.broken, self.read = asyncio.Event(), asyncio.Event(), 0

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.asked.set()
        try:
            await self.release.wait()
            async for piece in request.content.iter_any():
                self.read += len(piece)
        except (ConnectionError, asyncio.CancelledError):
            self.broken.set()
            raise
        return web.json_response({})


async def test_law_set_during_a_body_transfer_stops_it_at_the_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picking, "Engine", Unread)
    cluster = MemoryCluster()
    async with stage(1, cluster=cluster) as one, envoy(tmp_path, one.port, addresses(one)) as port:
        (engine,) = one.engines
        assert isinstance(engine, Unread)
        long = {"model": MODEL, "messages": [{"role": "user", "content": "x" * 14_000_000}]}
        asked = asyncio.create_task(send(port, chat(body=long)))
        await engine.asked.wait()
        narrowed = tenant("anywhere", residency={"processing": {"allow": ["world"], "deny": ["us"]}})
        text = law_document.encode({"tenants": [narrowed]}, 2, "ann", "drill", "2026-05-01T12:00:00Z")
        cluster.put(LAW_KEY, text)
        await until(lambda: one.balancer.flow.law.epoch == 2)
        refused = await asyncio.wait_for(asked, 10.0)
        assert (refused.status, refused.code) == (451, "unlawful_here")
        engine.release.set()
        await asyncio.wait_for(engine.broken.wait(), 10.0)
        assert engine.read < 12_000_000
        await one.at_rest()


async def test_the_next_endpoint_serves_if_the_first_refuses_connections(tmp_path: Path) -> None:
    quiet = {"watch": {"probe_s": 60, "scrape_s": 60}, "policy": {"name": "round-robin"}}
    plain = topology()  # with rules of models the connection that closes has the replica held back at once
    world = replace(plain, models={}, tenants={name: replace(one, models={}) for name, one in plain.tenants.items()})
    async with (
        stage(2, world=world, **quiet) as one,
        envoy(tmp_path, one.port, addresses(one), narrow_by_header) as port,
    ):
        await one.stop(0)  # not noticed yet
        answers = [await send(port, chat(body=STREAM)) for _ in range(4)]
        assert {served(answer) for answer in answers} == {"b"}
        assert one.picker.moved == 1
        assert one.balancer.flow.replicas.health_tracker.read("a", one.balancer.clock.now()).why == "connection refused"
        await one.at_rest()


async def test_gateway_without_a_picker_refuses_if_fail_closed_and_passes_if_fail_open(tmp_path: Path) -> None:
    def fails_open(config: dict[str, Any]) -> None:
        ext_proc(config)["failure_mode_allow"] = True

    async with stage(1) as one:
        engines = addresses(one)
        async with (
            envoy(tmp_path, one.port, engines) as closed,
            envoy(tmp_path, one.port, engines, fails_open) as opened,
        ):
            assert {(await send(port, chat(body=STREAM))).status for port in (closed, opened)} == {200}
            one.engines[0].behaviour = "pause"
            reader, writer = await asyncio.open_connection("127.0.0.1", closed)
            writer.write(chat(body=STREAM))
            await reader.readuntil(b"\r\n\r\n")
            await one.kill()
            broken = await reader.read()
            assert b"[DONE]" not in broken
            assert not broken.endswith(b"0\r\n\r\n")  # the client can see that it is not complete
            writer.close()
            one.engines[0].behaviour = "serve"
            before = len(one.engines[0].seen)
            refused = await send(closed, chat(body=STREAM))
            assert refused.status in (500, 503)
            assert len(one.engines[0].seen) == before
            # Fail-open: once its health check has noticed, it bypasses law, keys and queue, as `farhop status` reports.
            async with asyncio.timeout(60.0):
                while (await send(opened, chat(key=None, body=STREAM))).status != 200:
                    await asyncio.sleep(0.05)
            assert len(one.engines[0].seen) > before
            # And back again.
            await one.reopen()
            async with asyncio.timeout(60.0):
                while (await send(closed, chat(body=STREAM))).status != 200:
                    await asyncio.sleep(0.05)
            await one.at_rest()


async def test_two_weighted_pools_each_use_their_own_picker(tmp_path: Path) -> None:
    async with stage(1) as one, stage(1) as two:

        def change(config: dict[str, Any]) -> None:
            clusters = config["static_resources"]["clusters"]
            pools = [ask_of(config, one.port, addresses(one), "one"), ask_of(config, two.port, addresses(two), "two")]
            clusters[:] = [cluster for pool in pools for cluster in pool]
            kind = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
            ext_proc(config)["grpc_service"]["envoy_grpc"]["cluster_name"] = "picker-one"
            weighted = [
                {"name": f"engines-{name}", "weight": weight, "typed_per_filter_config": {"picker": {
                    "@type": kind,
                    "overrides": {"grpc_service": {"envoy_grpc": {"cluster_name": f"picker-{name}"}}},
                }}}
                for name, weight in (("one", 70), ("two", 30))
            ]  # fmt: skip
            (route,) = manager(config)["route_config"]["virtual_hosts"][0]["routes"]
            del route["route"]["cluster"]
            route["route"]["weighted_clusters"] = {"clusters": weighted}

        async with envoy(tmp_path, one.port, addresses(one), change) as port:
            for _ in range(10):  # 0.3 ** 100 and less: never
                assert {answer.status for answer in await asyncio.gather(*(send(port, chat()) for _ in range(10)))} == {
                    200
                }
            counts = [len(side.engines[0].seen) for side in (one, two)]
            assert sum(counts) == 100
            assert counts[0] > counts[1] > 0
            await one.at_rest()
            await two.at_rest()


async def test_a_global_balancer_reaches_a_region_by_its_gateway(tmp_path: Path) -> None:
    """Envoy stands where the region says that it is reached; the hop token goes by it to the picker."""
    cluster, (tier,) = MemoryCluster(), free_ports(1)
    there = {"tier": {"port": tier}, "control": {"host": "127.0.0.2", "port": 0}, "advertise": "127.0.0.2"}
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(stage(1, cluster=cluster, picker={"callers": "hop"}, **there))
        at = f"127.0.0.2:{tier}"
        await stack.enter_async_context(envoy(tmp_path, one.port, addresses(one), at=at))
        above = GlobalBalancer(global_config(), topology(), Random(3), MemoryStore(Random(4), cluster))
        line = await above.open()
        stack.push_async_callback(above.close)
        entry = int(line.split("127.0.0.1:")[1].split(",")[0].split()[0])
        async with asyncio.timeout(20.0):
            while (answer := await send(entry, chat(body=STREAM))).status != 200:
                await asyncio.sleep(0.05)
        assert answer.body.endswith(b"data: [DONE]\n\n")
        seen, body = one.engines[0].seen[-1]
        assert body["messages"] == STREAM["messages"]
        assert not [name for name in seen if name.startswith("x-farhop-")]
        plain = await send(entry, chat(body={**STREAM, "stream": False}))
        assert (plain.status, plain.json["choices"][0]["message"]["content"]) == (200, "hello")
        # No other caller: neither a client's key nor a self-made token.
        found = len(one.engines[0].seen)
        for more in ({}, {"x_farhop_hop": "v1.k1.made.up"}):
            reader, writer = await asyncio.open_connection("127.0.0.2", tier)
            writer.write(chat(body=STREAM, **more))
            assert (await reader.readline()).split()[1] in (b"401", b"403"), more
            writer.close()
        assert len(one.engines[0].seen) == found
        await one.at_rest()


async def test_a_gateway_is_known_by_its_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    ours, theirs = authority.issue("server"), authority.issue("gateway")
    tls = {"cert_file": ours.cert_file, "key_file": ours.key_file, "client_ca_file": authority.ca_file}
    picker = {"tls": tls, "callers": "gateway"}
    shown = by_tls(authority.ca_file, (theirs.cert_file, theirs.key_file))
    nothing = by_tls(authority.ca_file, None)
    async with (
        stage(1, picker=picker) as one,
        envoy(tmp_path, one.port, addresses(one), shown) as known,
        envoy(tmp_path, one.port, addresses(one), nothing) as stranger,
        envoy(tmp_path, one.port, addresses(one)) as plaintext,
    ):
        async with asyncio.timeout(20.0):
            while (answer := await send(known, chat(key=None, body=STREAM, x_farhop_tenant="anywhere"))).status != 200:
                await asyncio.sleep(0.05)
        assert answer.body.endswith(b"data: [DONE]\n\n")
        found = len(one.engines[0].seen)
        for port in (stranger, plaintext):
            assert (await send(port, chat(key=None, body=STREAM, x_farhop_tenant="anywhere"))).status in (500, 503)
        assert len(one.engines[0].seen) == found
        assert one.picker.status([])["protocol_violated"] == {}
        await one.at_rest()


async def _picker_process(stack: AsyncExitStack, folder: Path, name: str) -> Child:
    """A picker by the folder's picker.yaml, in a process of its own."""
    environment = {"FARHOP_TEST_HOP": HOP_KEY, **NO_CERTIFICATES}
    made = Child(name, ["picker", "--config", str(folder / "picker.yaml")], folder / f"{name}.log", environment)
    stack.push_async_callback(made.stop, 2.0)
    await made.start()
    return made


async def _until_served(port: int, key: str | None = "sk-farhop-anywhere") -> None:
    async with asyncio.timeout(30.0):
        while (await send(port, chat(key=key, body=STREAM))).status != 200:
            await asyncio.sleep(0.05)


async def test_picker_killed_under_load_lets_no_request_past_and_recovers(tmp_path: Path) -> None:
    """A process of its own, killed by SIGKILL while clients stream; beside it a gateway that fails open."""

    def fails_open(config: dict[str, Any]) -> None:
        ext_proc(config)["failure_mode_allow"] = True

    gate, admin = free_ports(2)
    async with AsyncExitStack() as stack:
        etcd = await stack.enter_async_context(EmbeddedEtcd(folder=tmp_path / "etcd"))
        guarded = await stack.enter_async_context(Engine().running())
        (tmp_path / "picker.yaml").write_text(yaml.safe_dump({
            **common("virginia", "r1"), "admin": {"port": admin}, "tier": {"port": 0}, "control": {"port": 0},
            "etcd": {"endpoints": [etcd.endpoint.removeprefix("http://")]}, "picker": {"port": gate},
            "replicas": [{"url": f"http://{guarded.address}", "models": [MODEL], "name": "one", "slots": 64}],
            "watch": {"probe_s": 0.1, "scrape_s": 0.1},
        }))  # fmt: skip
        process = await _picker_process(stack, tmp_path, "picker")
        closed = await stack.enter_async_context(envoy(tmp_path, gate, [guarded.address]))
        opened = await stack.enter_async_context(envoy(tmp_path, gate, [guarded.address], fails_open))
        await asyncio.gather(_until_served(closed), _until_served(opened))

        dead, over = asyncio.Event(), asyncio.Event()
        answers: list[tuple[bool, int, bytes]] = []

        async def client() -> None:
            while not over.is_set():
                before = dead.is_set()
                with contextlib.suppress(OSError, IndexError):  # a cut answer may have no head
                    one = await send(closed, chat(body=STREAM), within_s=30.0)
                    answers.append((before, one.status, one.body))

        clients = [asyncio.create_task(client()) for _ in range(6)]
        await until(lambda: len(answers) >= 30)
        assert {status for _, status, _ in answers} == {200}
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        dead.set()
        last = len(answers)
        await until(lambda: sum(before for before, _, _ in answers[last:]) >= 30)
        over.set()
        await asyncio.gather(*clients)
        # Requests after its end were refused, and reached no engine.
        late = {status for before, status, _ in answers if before}
        assert late <= {500, 503}, late
        found = len(guarded.seen)
        refused = await send(closed, chat(body=STREAM))
        assert refused.status in (500, 503)
        assert len(guarded.seen) == found
        await _until_served(opened, key=None)  # past law and keys, once its health check has noticed
        await _picker_process(stack, tmp_path, "again")
        await _until_served(closed)
