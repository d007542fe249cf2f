"""The law changed under traffic, both tiers on real sockets: what applies at once, what stays, what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest
from inprocess import MODEL, Both, Engine, both, chat, head, read, send, streaming, tenant, topology, until

from farhop.balance.health.region import Liveness
from farhop.service.admin.console import server as console_server
from farhop.store.contract import LAW_KEY, route_key
from farhop.store.sealed import inner
from farhop_lab.memory_store import MemoryStore
from farhop_lab.world.ports import free_ports
from topology import law_document

ANYWHERE = {"processing": {"allow": ["world"]}}


@pytest.fixture
async def up(engine: Engine) -> AsyncIterator[Both]:
    async with both(engine, topology(tenant("patient", residency={
        **ANYWHERE, "on_exhausted": "wait", "wait_max_s": 1.5}))) as running:  # fmt: skip
        yield running
        await running.at_rest()


def memory(up: Both) -> MemoryStore:
    """The global balancer's connection to the store that both follow."""
    store = inner(up.global_.store)
    assert isinstance(store, MemoryStore)
    return store


class Etcd:
    """An operator's hand in the store that both balancers follow."""

    def __init__(self, up: Both) -> None:
        self._up = up
        self._store = MemoryStore(Random(9), memory(up).cluster)

    async def law(self, epoch: int, *tenants: dict[str, Any], known: bool = True) -> None:
        """It stands there; `known`: both go by it."""
        await self._store.open()
        await self._store.put(
            LAW_KEY, law_document.encode({"tenants": tenants}, epoch, "ann", "drill", "2026-05-01T12:00:00Z")
        )
        if known:
            await until(lambda: {self._up.global_.flow.law.epoch, self._up.regional.flow.law.epoch} == {epoch})

    async def text(self, text: bytes) -> None:
        await self.put(LAW_KEY, text)

    async def put(self, key: str, text: bytes) -> None:
        await self._store.open()
        await self._store.put(key, text)

    async def wiped(self) -> None:
        memory(self._up).cluster.wipe()

    def stands(self) -> bytes:
        entry = memory(self._up).cluster.get(LAW_KEY)
        return b"" if entry is None else entry.value


async def admin(port: int, path: str) -> dict[str, Any]:
    answer = await send(port, head("GET", path))
    return dict(json.loads(answer.body))


async def test_tenants_and_keys_are_added_and_removed_immediately(up: Both) -> None:
    etcd = Etcd(up)
    for port in (up.entry, up.client):
        assert (await send(port, chat(key="sk-farhop-anywhere"))).status == 200
        assert (await send(port, chat(key="sk-farhop-newcomer"))).code == "unknown_key"
    await etcd.law(2, tenant("newcomer"))
    for port in (up.entry, up.client):
        assert (await send(port, chat(key="sk-farhop-newcomer"))).status == 200
        gone = await send(port, chat(key="sk-farhop-anywhere"))
        assert (gone.status, gone.code) == (401, "unknown_key")


async def test_running_requests_finish_and_new_ones_are_refused_with_the_clause(up: Both, engine: Engine) -> None:
    engine.behaviour = "pause"
    running = asyncio.create_task(send(up.entry, chat(body=streaming())))
    await until(lambda: engine.seen)
    await Etcd(up).law(2, tenant("anywhere", residency={"processing": {"allow": ["world"], "deny": ["us"]}}))
    engine.release.set()
    answer = await running
    assert answer.status == 200
    assert b"[DONE]" in answer.body
    refused = await send(up.client, chat())
    assert refused.status == 451
    assert "tenant anywhere: processing denies us" in refused.json["error"]["message"]
    nowhere = await send(up.entry, chat())  # Frankfurt and Tokyo are lawful, and neither is there
    assert (nowhere.status, nowhere.code) == (503, "no_region_serving")
    assert int(nowhere.headers["retry-after"]) == 2
    assert len(engine.seen) == 1


async def test_who_may_not_be_picked_by_a_law_with_rules_of_models_is_told_before_it_is_in_force(
    up: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that never said what it serves gets no prompt between the law and its next probe."""
    flow = up.regional.flow
    epochs = list[int]()
    monkeypatch.setattr(up.regional.watcher, "models_bound", lambda: epochs.append(flow.law.epoch))
    etcd = Etcd(up)
    await etcd.law(2, tenant("anywhere"))
    assert epochs == []
    await etcd.law(3, tenant("anywhere", models={MODEL: {"deny": ["jp"]}}))
    assert epochs == [2]


class SlowProxy:
    """An HTTP proxy on the way to a region, which lets nobody through while it `holds`, and then no byte upwards."""

    def __init__(self) -> None:
        self.goes = asyncio.Event()
        self.goes.set()
        self.waiting, self.passed = 0, bytearray()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        self.waiting += 1
        await self.goes.wait()
        host, port = asked.split()[1].decode().split(":")
        there, onward = await asyncio.open_connection(host, int(port))
        writer.write(b"HTTP/1.1 200 ok\r\n\r\n")
        await asyncio.gather(self._pump(reader, onward, self.passed), self._pump(there, writer, bytearray()))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: bytearray) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                await self.goes.wait()
                seen += data
                writer.write(data)
        writer.close()


@pytest.mark.parametrize("size", [0, 14_000_000])
async def test_no_byte_is_sent_to_a_region_after_the_law_forbids_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """While the way there is being opened, and while a long prompt is on its way. It is no failure of the region."""
    failures: list[float] = []
    monkeypatch.setattr(Liveness, "relay_failed", lambda _, now: failures.append(now))
    proxy = SlowProxy()
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, both(engine, topology(), global_={"proxies": {"virginia": url}}) as up:
        if size:  # on a connection that stands
            assert (await send(up.entry, chat())).status == 200
        proxy.goes.clear()
        proxy.waiting, before = 0, len(engine.seen)
        asked = asyncio.create_task(send(up.entry, chat(body=streaming("x" * size + "THE END"))))
        await until(lambda: up.global_.flow.under_way == 1 and (size or proxy.waiting))
        (state,) = up.global_.flow.requests.values()
        await until(lambda: state.attempt is not None)
        await Etcd(up).law(2, tenant("anywhere", residency={"processing": {"allow": ["world"], "deny": ["us"]}}))
        proxy.goes.set()
        answer = await asked
        assert (answer.status, answer.code) == (503, "no_region_serving")
        assert "virginia: unlawful_here" in answer.json["error"]["message"]
        await up.at_rest()
        assert b"THE END" not in proxy.passed
        assert len(engine.seen) == before
        assert not failures


class EagerRegion(SlowProxy):
    """In place of a region, it answers a prompt of which it has read no more than the beginning, and then `reads`."""

    def __init__(self, answer: bytes) -> None:
        super().__init__()
        self.answer, self.reads = answer, asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        host, port = asked.split()[1].decode().split(":")
        writer.write(b"HTTP/1.1 200 ok\r\n\r\n")
        first = await reader.read(1024)
        if first.startswith(b"POST /v1/"):
            writer.write(self.answer)
            await self.reads.wait()
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(65536):
                    self.passed += data
            writer.close()
            return
        there, onward = await asyncio.open_connection(host, int(port))
        onward.write(first)
        await asyncio.gather(self._pump(reader, onward, bytearray()), self._pump(there, writer, bytearray()))


EVENT = b'data: {"choices":[]}\n\n'
NAMED = b"x-farhop-region: virginia\r\n"
BEGUN = b"HTTP/1.1 200 OK\r\n%bcontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (
    NAMED, len(EVENT), EVENT
)  # fmt: skip
WHOLE = b"HTTP/1.1 400 Bad Request\r\n%bcontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}" % NAMED


@pytest.mark.parametrize(("said", "status"), [(BEGUN, 200), (WHOLE, 400)])
async def test_no_byte_is_sent_to_a_region_that_answers_before_the_whole_prompt_was_sent(
    engine: Engine, said: bytes, status: int
) -> None:
    """Once the law forbids it, where its answer has begun; at all, where that is whole."""
    region = EagerRegion(said)
    server = await asyncio.start_server(region.serve, "127.0.0.1", 0, limit=1024)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, both(engine, topology(), global_={"proxies": {"virginia": url}}) as up:
        asked = asyncio.create_task(send(up.entry, chat(body=streaming("x" * 14_000_000 + "THE END"))))
        flow = up.global_.flow
        await until(lambda: asked.done() or any(one.attempt and one.attempt.started for one in flow.requests.values()))
        await Etcd(up).law(2, tenant("anywhere", residency={"processing": {"allow": ["world"], "deny": ["us"]}}))
        region.reads.set()
        answer = await asked
        assert answer.status == status
        assert (b'"code":"unlawful_here"' in answer.body) is (said is BEGUN)
        await up.at_rest()
        await asyncio.sleep(0.2)
        assert b"THE END" not in region.passed


async def test_body_in_transfer_is_not_read_after_the_law_closes_the_entry(up: Both, engine: Engine) -> None:
    whole = chat(body=streaming())
    for port in (up.entry, up.client):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(whole[:-20])
        await until(lambda: up.global_.metrics.in_flight + up.regional.metrics.in_flight == 1)
        epoch = up.global_.flow.law.epoch + 1
        await Etcd(up).law(epoch, tenant("anywhere", residency={**ANYWHERE, "entry": {"allow": ["jp"]}}))
        writer.write(whole[-20:])
        answer = read(await reader.read())
        writer.close()
        assert (answer.status, answer.code) == (451, "entry_forbidden")
        assert "entry allows only jp" in answer.json["error"]["message"]
        await Etcd(up).law(epoch + 1, tenant("anywhere"))
    assert engine.seen == []


@pytest.mark.parametrize("size", [0, 300_000])  # read here, and in a process of its own
async def test_body_in_transfer_stays_within_the_law_that_its_head_came_under(
    up: Both, engine: Engine, size: int
) -> None:
    """What another law lets in it does not let in who came before."""
    epoch = up.global_.flow.law.epoch
    whole = chat(body=streaming("x" * size) | {"user": "ann"})
    for port, code in ((up.entry, "no_lawful_region"), (up.client, "unlawful_here")):
        await Etcd(up).law(epoch + 1, tenant("anywhere", residency={"processing": {"allow": ["eu"]}}))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(whole[:-20])
        await until(lambda: up.global_.metrics.in_flight + up.regional.metrics.in_flight == 1)
        epoch += 2
        await Etcd(up).law(epoch, tenant("anywhere", residency={"processing": {"allow": ["us"]}}))
        writer.write(whole[-20:])
        answer = read(await reader.read())
        writer.close()
        assert (answer.status, answer.code) == (451, code)
    assert engine.seen == []


async def test_a_model_fallen_back_to_stays_within_the_law_that_the_head_came_under(engine: Engine) -> None:
    """Which models a name may stand for is asked once its body is here."""
    names = [{"model": "auto", "models": [{"model": "other"}, {"model": MODEL}]}]
    async with both(engine, topology(), global_={"routes": names}, regional={"replicas": [
        {"url": f"http://{engine.address}", "models": [MODEL, "other"], "name": "one"}]}) as up:  # fmt: skip
        engine.behaviour = "vanish"
        denied = tenant("anywhere", models={MODEL: {"allow": ["world"], "deny": ["us"]}})
        await Etcd(up).law(2, denied)
        whole = chat(body=streaming() | {"model": "auto"})
        reader, writer = await asyncio.open_connection("127.0.0.1", up.entry)
        writer.write(whole[:-20])
        await until(lambda: up.global_.metrics.in_flight == 1)
        await Etcd(up).law(3, tenant("anywhere"))
        writer.write(whole[-20:])
        await reader.read()
        writer.close()
        assert {body["model"] for _, body in engine.seen} == {"other"}
        await up.at_rest()


@pytest.mark.parametrize(
    ("residency", "code"),
    [
        ({"processing": {"allow": ["jp"]}}, "unlawful_here"),
        ({**ANYWHERE, "entry": {"allow": ["jp"]}}, "entry_forbidden"),
        (None, "entry_forbidden"),
    ],
)
async def test_redirect_is_valid_only_under_the_law_in_force_when_it_is_followed(
    engine: Engine, residency: dict[str, Any] | None, code: str
) -> None:
    """The law changes after the redirect, or while the body is on its way by it; or it no longer knows the tenant."""
    (port,) = free_ports(1)
    client = {"port": port, "url": f"http://127.0.0.1:{port}"}
    async with both(engine, topology(), regional={"client": client}) as up:
        etcd = Etcd(up)
        await etcd.put(route_key("virginia"), b'[{"answer": "redirect"}]')
        tokens = list[str]()
        while len(tokens) < 3:
            found = await send(up.entry, chat())
            if found.status == 307:
                tokens.append(found.headers["location"].removeprefix(client["url"]))
        followed = [chat(key=None, path=path) for path in tokens]
        assert (await send(port, followed[0])).status == 200
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(followed[1][:-20])
        await until(lambda: up.regional.metrics.in_flight == 1)
        changed = tenant("newcomer") if residency is None else tenant("anywhere", residency=residency)
        await etcd.law(2, changed)
        writer.write(followed[1][-20:])
        answers = [read(await reader.read()), await send(port, followed[2])]
        writer.close()
        assert [answer.code for answer in answers] == [code] * 2
        assert {answer.status for answer in answers} == {451}
        assert client["url"] not in (await send(up.entry, chat())).headers.get("location", "")
        assert len(engine.seen) == 1
        await up.at_rest()


async def test_region_with_a_newer_law_refuses_by_that_law(up: Both, engine: Engine) -> None:
    """The global tier has lost etcd: its token names an epoch, and the region's own copy is a later one."""
    memory(up).outage()
    etcd = Etcd(up)
    await etcd.law(4, tenant("anywhere", residency={"processing": {"allow": ["jp"]}}), known=False)
    await until(lambda: up.regional.flow.law.epoch == 4)
    assert up.global_.flow.law.epoch == 1  # frozen
    elsewhere = await send(up.entry, chat())  # Frankfurt and Tokyo are lawful as far as it knows, and neither is there
    assert (elsewhere.status, elsewhere.code) == (503, "no_region_serving")
    answer = await send(up.entry, chat(x_farhop_allow="us"))
    assert (answer.status, answer.code) == (451, "no_lawful_region")
    assert "virginia: unlawful_unread" in answer.json["error"]["message"]
    assert engine.seen == []
    law = (await admin(up.global_admin, "/status"))["law"]
    assert law["etcd_out_of_reach"]
    memory(up).restore()
    await until(lambda: up.global_.flow.law.epoch == 4)


async def test_invalid_or_older_law_is_reported_and_changes_nothing(up: Both) -> None:
    """What may be a later one stays where it is, for whoever can read it; an older one, and none, is made good."""
    etcd = Etcd(up)
    await etcd.law(7, tenant("anywhere"))
    law_of_7 = etcd.stands()
    for text, reason, says in (
        (b'{"tenants": [{"name": "x"}]}', "law_malformed", "residency: missing"),
        (law_document.encode({"tenants": [tenant("x", residency={"processing": {"allow": ["mars"]}})]}, 8, "a", "w",
                       "2026-05-01T12:00:00Z"), "law_malformed", 'unknown place "mars"'),
    ):  # fmt: skip
        await etcd.text(text)
        for balancer, port in ((up.global_, up.global_admin), (up.regional, up.regional_admin)):
            await until(lambda balancer=balancer, says=says: any(says in one for one in balancer.laws.trouble))
            assert f'reason="{reason}"' in (await send(port, head("GET", "/metrics"))).body.decode()
            law = (await admin(port, "/status"))["law"]
            assert (law["epoch"], law["author"]) == (7, "ann")
    for bring, reason in (
        (etcd.text(law_document.encode({"tenants": [tenant("x")]}, 3, "a", "w", "2026-05-01T12:00:00Z")), "law_older"),
        (etcd.wiped(), "law_gone"),
    ):
        await bring
        await until(lambda: etcd.stands() == law_of_7)
        for port in (up.global_admin, up.regional_admin):
            assert f'reason="{reason}"' in (await send(port, head("GET", "/metrics"))).body.decode()
    await until(lambda: not up.global_.laws.trouble and not up.regional.laws.trouble)
    assert (await send(up.entry, chat())).status == 200
    assert (up.global_.flow.law.epoch, up.regional.flow.law.epoch) == (7, 7)


async def test_hop_token_names_the_epoch_and_explain_names_the_author_of_the_law(up: Both) -> None:
    await Etcd(up).law(5, tenant("anywhere"))
    answer = await send(up.entry, chat())
    assert answer.status == 200
    assert (await admin(up.regional_admin, "/status"))["law"]["newest_named"] == 5
    await up.at_rest()
    record = await admin(up.global_admin, f"/decisions/{answer.headers['x-farhop-decision']}")
    assert record["reasons"]["law_epoch"] == 5
    question = json.dumps({"tenant": "anywhere", "body": {"model": "llama-3.1-8b", "prompt": "x"},
                           "path": "/v1/completions"}).encode()  # fmt: skip
    for port in (up.global_admin, up.regional_admin):
        found = (await send(port, head("POST", "/explain", content_length=str(len(question))) + question)).json
        assert (found["law"]["epoch"], found["law"]["author"], found["law"]["source"]) == (5, "ann", "etcd")
    law = await admin(up.global_admin, "/law")
    assert [one["name"] for one in law["tenants"]] == ["anywhere"]


async def test_tenants_patience_is_set_by_the_law(up: Both, engine: Engine) -> None:
    nowhere = {"processing": {"allow": ["jp"]}}

    began = time.monotonic()
    waited = await send(up.entry, chat(key="sk-farhop-patient", x_farhop_allow="jp"))
    assert (waited.status, waited.code) == (503, "no_region_serving")
    assert time.monotonic() - began > 1.4
    patient = tenant("patient", residency={**nowhere, "on_exhausted": "wait", "wait_max_s": 30.0})
    await Etcd(up).law(2, patient, tenant("anywhere"))
    held = asyncio.create_task(send(up.entry, chat(key="sk-farhop-patient")))
    await until(lambda: up.global_.flow.under_way == 1)
    refused = await send(
        up.entry, chat(key="sk-farhop-anywhere", x_farhop_allow="jp")
    )  # the request with the least patience goes first
    assert (refused.status, refused.headers["retry-after"]) == (503, "2")
    assert not held.done()
    await Etcd(up).law(3, tenant("patient", residency={"processing": {"allow": ["de"]}}))
    found = await held  # nothing is lawful both by the law at its arrival and by the present one
    assert (found.status, found.code) == (451, "no_lawful_region")
    assert engine.seen == []


async def test_records_are_dropped_when_a_new_law_forbids_them(up: Both) -> None:
    answers = [await send(up.entry, chat(key=f"sk-farhop-{name}")) for name in ("anywhere", "patient")]
    await up.at_rest()
    etcd, decisions = Etcd(up), [answer.headers["x-farhop-decision"] for answer in answers]
    await etcd.law(2, tenant("anywhere", priority=1), tenant("patient"))
    for port in (up.global_admin, up.regional_admin):
        kept = await admin(port, "/decisions")
        assert {one["decision"] for one in kept["decisions"]} == {*decisions}
    await etcd.law(3, tenant("anywhere", residency={**ANYWHERE, "logging": {"allow": ["jp"]}}), tenant("patient"))
    for port in (up.global_admin, up.regional_admin):
        assert "error" in await admin(port, f"/decisions/{decisions[0]}")
        assert [one["tenant"] for one in (await admin(port, "/decisions"))["decisions"]] == ["patient"]


async def _in_the_last_hour(port: int) -> bytes:
    """All that a balancer's console shows of it."""
    chunks = (await admin(port, "/console/of/past"))["chunks"]
    return b"".join([(await send(port, head("GET", f"/console/of/past/{one['number']}"))).body for one in chunks])


async def test_the_console_s_last_hour_is_dropped_when_a_new_law_forbids_records(
    up: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console_server, "is_address", lambda _host: True)
    answers = [await send(up.entry, chat(key=f"sk-farhop-{name}")) for name in ("anywhere", "patient")]
    await up.at_rest()
    etcd, (gone, stays) = Etcd(up), [answer.headers["x-farhop-decision"].encode() for answer in answers]
    consoles = [balancer.admin.console for balancer in (up.global_, up.regional)]
    for port, one in zip((up.global_admin, up.regional_admin), consoles, strict=True):
        await one.look()
        assert gone in await _in_the_last_hour(port)
    await etcd.law(2, tenant("anywhere", residency={**ANYWHERE, "logging": {"allow": ["jp"]}}), tenant("patient"))
    for port, one in zip((up.global_admin, up.regional_admin), consoles, strict=True):
        assert gone not in await _in_the_last_hour(port)
        await one.look()
        shown = await _in_the_last_hour(port)
        assert gone not in shown
        assert stays in shown


async def test_no_record_is_kept_after_a_law_forbids_records(up: Both, engine: Engine) -> None:
    engine.behaviour = "pause"
    running = asyncio.create_task(send(up.entry, chat(body=streaming())))
    await until(lambda: engine.seen)
    await Etcd(up).law(2, tenant("anywhere", residency={**ANYWHERE, "logging": {"allow": ["jp"]}}))
    engine.release.set()
    answer = await running
    assert answer.status == 200
    await up.at_rest()
    decision = answer.headers["x-farhop-decision"]
    for port in (up.global_admin, up.regional_admin):
        assert "error" in await admin(port, f"/decisions/{decision}")


async def test_no_recording_names_blocks_of_prompts_whose_hashes_may_not_be_known_here(up: Both) -> None:
    """Whoever has the recording's salt can tell from a fingerprint whether a text began the prompt, as from a hint."""
    salt = "0123456789abcdef"
    recorders = [balancer.telemetry.recorder for balancer in (up.global_, up.regional)]
    with contextlib.ExitStack() as stack:
        recordings = [stack.enter_context(recorder.listening(salt.encode())) for recorder in recorders if recorder]
        for epoch, hints in ((2, ["world"]), (3, ["jp"])):
            residency = {**ANYWHERE, "logging": {"allow": ["world"]}, "hints": {"allow": hints}}
            await Etcd(up).law(epoch, tenant("anywhere", residency=residency))
            for port in (up.entry, up.client):
                assert (await send(port, chat(body=streaming("x" * 600)))).status == 200
            await up.at_rest()
        assert len(recordings) == 2
        for recording in recordings:
            rows = [json.loads(row) for row in recording.rows]
            assert [len(row["blocks"]) for row in rows] == [2, 0]
            assert {row["input_tokens"] for row in rows} == {11}


@pytest.mark.parametrize("size", [0, 300_000])  # read here, and in a process of its own
async def test_unknown_field_names_are_not_recorded_where_records_are_forbidden(up: Both, size: int) -> None:
    """A body's member that nobody knows is counted; its name is the client's word."""
    await Etcd(up).law(2, tenant("anywhere", residency={**ANYWHERE, "logging": {"allow": ["jp"]}}), tenant("patient"))
    messages = [{"role": "user", "content": "x" * size + "hello"}]
    for key, field in (("sk-farhop-anywhere", "patient_4711"), ("sk-farhop-patient", "nothing_secret")):
        body = {"model": MODEL, "messages": messages, field: 1}
        assert (await send(up.entry, chat(body=body, key=key))).status == 200
    for balancer in (up.global_, up.regional):
        assert dict(balancer.plane.guard.unknown) == {"(other)": 1, "nothing_secret": 1}
