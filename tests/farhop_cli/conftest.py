"""A pretended world: real HTTP servers that speak as entries, admin ports and the collector do, a port each."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import structlog
from aiohttp import web
from typer.testing import CliRunner, Result

from farhop.store.contract import LAW_KEY, LIMIT_PREFIX, OVERRIDE_PREFIX, ROOT, STEER_PREFIX
from farhop.store.documents import authored, limits
from farhop.store.documents.document import DocumentError
from farhop.store.envelope import bare
from farhop.store.etcd import EtcdStore
from farhop.store.etcd_settings import EtcdSettings
from farhop_cli import setting
from farhop_cli.fleet import Fleet
from farhop_cli.main import app
from farhop_lab.world import world_file
from farhop_lab.world.etcd import EmbeddedEtcd
from farhop_lab.world.world_file import RegionFile, WorldFile
from topology.load import shipped

REGIONS = ("virginia", "frankfurt", "tokyo")
ROLES = ("entry", "global_admin", "regional_admin")
DECISION = "00000000deadbeef"
TENANTS = ("anywhere", "eu-only", "japan-only", "not-us")


@dataclass
class FakeWorld:
    """What the servers say, by region, and what they were asked. A region in `silent` (with a role) hangs up."""

    file: WorldFile = None  # type: ignore[assignment]
    path: Path = Path()
    served_by: str = "virginia"
    refusal: tuple[int, str] | None = None
    redirects: dict[str, str] = field(default_factory=dict)
    silent: set[tuple[str, str]] = field(default_factory=set)
    records: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    explained: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    status: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    span_names: tuple[str, ...] = ("farhop.global", "farhop.regional", "llm_request")
    laws: dict[str, dict[str, Any]] = field(default_factory=dict)
    pages: dict[tuple[str, str], str] = field(default_factory=dict)
    requests: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    questions: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)  # the path of each request
    ports: dict[int, tuple[str, str]] = field(default_factory=dict)

    def application(self) -> web.Application:
        """One application on all ports: who is spoken to is told by the port."""
        made = web.Application()
        made.router.add_post("/v1/chat/completions", self._infer)
        made.router.add_post("/v1/completions", self._infer)
        made.router.add_get("/status", self._status)
        made.router.add_get("/metrics", self._metrics)
        made.router.add_get("/law", self._law)
        made.router.add_get("/decisions/{id}", self._decision)
        made.router.add_post("/explain", self._explain)
        made.router.add_get("/traces/{id}", self._trace)
        return made

    def _who(self, request: web.Request) -> tuple[str, str]:
        who = self.ports[request.transport.get_extra_info("sockname")[1]]
        self.asked.append(request.path)
        if who in self.silent:
            request.transport.abort()
            raise web.HTTPServiceUnavailable  # which the aborted transport does not carry
        return who

    async def _infer(self, request: web.Request) -> web.StreamResponse:
        region, _ = self._who(request)
        self.requests.append((region, {k.lower(): v for k, v in request.headers.items()}, await request.json()))
        headers = {"x-farhop-region": self.served_by, "x-farhop-decision": DECISION}
        if region in self.redirects:
            return web.Response(status=307, headers={"location": self.redirects[region] + request.path})
        if self.refusal is not None:
            status, code = self.refusal
            error = {"message": f"because of {code}", "type": "t", "param": None, "code": code}
            return json({"error": error}, status, {"x-farhop-decision": DECISION})
        stream = web.StreamResponse(headers={**headers, "content-type": "text/event-stream"})
        await stream.prepare(request)
        chat = request.path.endswith("chat/completions")
        for text in ("", "the ", "far ", "hop"):
            choice = {"delta": {"content": text}} if chat else {"text": text}
            await stream.write(b"data: " + msgspec.json.encode({"choices": [choice]}) + b"\n\n")
        usage = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
        await stream.write(b"data: " + msgspec.json.encode({"choices": [], "usage": usage}) + b"\n\ndata: [DONE]\n\n")
        return stream

    async def _status(self, request: web.Request) -> web.Response:
        return json(self.status[self._who(request)])

    async def _metrics(self, request: web.Request) -> web.Response:
        page = self.pages.get(self._who(request))
        return web.Response(text=page or "", status=404 if page is None else 200)

    async def _law(self, request: web.Request) -> web.Response:
        region, role = self._who(request)
        answer = self.laws.get(region) if role == "global_admin" else None
        return json(answer) if answer is not None else json({"error": "no law here"}, 404)

    async def _decision(self, request: web.Request) -> web.Response:
        record = self.records.get(self._who(request))
        known = record is not None and request.match_info["id"] == DECISION
        return json(record) if known else json({"error": "no such decision here"}, 404)

    async def _explain(self, request: web.Request) -> web.Response:
        who = self._who(request)
        self.questions.append((*who, await request.json()))
        explained = self.explained.get(who, {"error": "a bad question"})
        return json(explained, 400 if "error" in explained else 200)

    async def _trace(self, request: web.Request) -> web.Response:
        assert self._who(request) == ("", "collector")
        spans = [{"name": name} for name in self.span_names]
        tree = [f"{name}  1 ms" for name in self.span_names]
        return json({"trace_id": request.match_info["id"], "spans": spans, "tree": tree})


def json(document: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(document), status=status, headers=headers, content_type="application/json"
    )


@pytest.fixture
async def world(tmp_path, monkeypatch):
    fake = FakeWorld()
    runner = web.AppRunner(fake.application(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    at: dict[tuple[str, str], str] = {}
    for who in [*((region, role) for region in REGIONS for role in ROLES), ("", "collector")]:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[-1][1]
        fake.ports[port], at[who] = who, f"http://127.0.0.1:{port}"
    fake.file = WorldFile(
        pid=os.getpid(),
        speedup=10.0,
        topology=str(shipped("three-regions")),
        etcd="127.0.0.1:2379",
        collector=at["", "collector"],
        model="llama-3.1-8b",
        keys={tenant: f"sk-farhop-{tenant}" for tenant in TENANTS},
        regions={name: RegionFile(*(at[name, role] for role in ROLES)) for name in REGIONS},
    )
    fake.path = tmp_path / "world.json"
    world_file.write(fake.path, fake.file)
    monkeypatch.setenv(world_file.ENVIRONMENT, str(fake.path))
    monkeypatch.delenv("FARHOP_KEY", raising=False)
    yield fake
    await runner.cleanup()


class Cli:
    """The command, run in this process."""

    def run(self, *arguments: str, stdin: str | None = None) -> Result:
        """Run it here."""
        return CliRunner().invoke(app(), list(arguments), input=stdin)

    async def in_thread(self, *arguments: str, stdin: str | None = None) -> Result:
        """Run it in a thread: it brings its own event loop, and the servers need this one."""
        return await asyncio.to_thread(self.run, *arguments, stdin=stdin)

    def failed(self, result: Result, code: int) -> str:
        """What stderr says, after the checks owed to any failure: its code, one prefix a line, no stack trace."""
        assert result.exit_code == code, result.output
        assert result.exception is None or isinstance(result.exception, SystemExit)
        lines = result.stderr.splitlines()
        assert lines
        assert all(line.startswith("farhop: ") for line in lines)
        return result.stderr


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """A command that runs a process in this one has its log go where the test's own output goes, which then ends."""
    before, root = structlog.get_config(), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.configure(**before)
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def cli(monkeypatch) -> Cli:
    monkeypatch.delenv("FARHOP_KEY", raising=False)
    return Cli()


class Made:
    """Records as balancers keep them (`serve` of either tier, farhop.service.observability.request_telemetry)."""

    decision = DECISION

    def candidate(self, region: str, **more: Any) -> dict[str, Any]:
        names = ("score", "ttft_ms", "rtt_ms", "upload_ms", "wait_ms", "prefill_ms", "tpot_ms")
        tokens = {"hit_tokens": 40.0, "uncached_tokens": 50.0}
        return {"region": region, **dict.fromkeys(names, 12.5), **tokens, "slots_free": 256, **more}

    def regions(self, chosen: str | None, candidates: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "policy": "predictive", "law_epoch": 7, "entry_region": "virginia", "chosen": chosen,
            "candidates": candidates, "not_serving": {}, "unlawful": {}, **more,
        }  # fmt: skip

    def replicas(self, chosen: str) -> dict[str, Any]:
        one = {
            "replica": chosen, "score": 3.25, "hit_tokens": 4.0, "uncached_tokens": 5.0, "backlog_tokens": 0,
            "prefill_ms_per_token": 0.1, "tpot_ms": 2.5, "full": False,
        }  # fmt: skip
        return {
            "policy": "predictive",
            "unit": "ms",
            "chosen": chosen,
            "candidates": [one, {**one, "replica": "other", "full": True}],
        }

    def record(self, reasons: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
        return {
            "decision": DECISION, "trace_id": "ab" * 16, "at_unix_ms": 1, "tenant": "anywhere",
            "model": "llama-3.1-8b", "prompt_bytes": 9, "outcome": "served", "status": 200, "ttft_ms": 5.5,
            "duration_ms": 9.5, "attempts": [{"target": "virginia", "outcome": "served"}],
            "usage": {"prompt_tokens": 9, "completion_tokens": 3, "cached_tokens": 4}, "reasons": reasons, **more,
        }  # fmt: skip

    def global_status(self, **states: str) -> dict[str, Any]:
        capacity = {
            "wait_ms": 1.5, "replicas_ready": 2, "slots_free": 512, "prefill_ms_per_token": 0.1, "tpot_ms": 2.0,
        }  # fmt: skip
        instance = {
            "instance": "r1", "tier": "h:1", "draining": False, "report_age_s": 0.25, "models": {"m": capacity},
        }  # fmt: skip
        return {"tier": "global", "regions": [
            {"region": name, "state": state, "why": f"why {state}", "forced": False, "rtt_ms": 9.25, "in_flight": 3,
             "cache_hit_calibration": 1.0, "instances": [instance, {**instance, "models": {}}]}
            for name, state in states.items()
        ]}  # fmt: skip

    def regional_status(self, replica: str) -> dict[str, Any]:
        return {
            "tier": "regional", "under_way": 5, "queued_requests": 2, "queued_tokens": 700.0, "trie_nodes": 11,
            "replicas": [{
                "replica": replica, "state": "up", "why": "proven", "in_flight": 4, "slots": 256, "kv_tokens": 1000,
                "kv_tokens_total": 137280, "engine_waiting": None, "engine_running": 3.0, "sample_age_s": 0.5,
                "engine_kv_usage": 0.43, "engine_hit_share": None,
                "prefill_ms_per_token": 0.0094, "tpot_ms": 2.61,
            }],
        }  # fmt: skip


@pytest.fixture
def made() -> Made:
    return Made()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def embedded_etcd():
    async with EmbeddedEtcd() as process:
        yield process


class SettingsWorld:
    """A world over a real etcd, whose six balancers say that they follow what stands there.

    The first `knowing` of them do: three global ones, then the regional ones of REGIONS. `states` are the regions' as
    global balancers see them; nobody there serves what is `unserved`; those who know no law go by `epoch`.
    Global balancers have `prices`, or are `silent`.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint, self.knowing, self.epoch = endpoint, 6, 1
        self.states, self.unserved = dict.fromkeys(REGIONS, "up"), []
        self.prices, self.silent = None, False

    async def _with_store(self, work):
        store = EtcdStore(EtcdSettings((self.endpoint,)), Random(1))
        await store.open()
        try:
            return await work(store)
        finally:
            await store.close()

    def do(self, work):
        """Something done to etcd, apart from the command."""
        return asyncio.run(self._with_store(work))

    def put(self, key: str, document: bytes) -> None:
        """Somebody writes by hand."""
        self.do(lambda store: store.put(key, document))

    def get(self, key: str) -> bytes | None:
        """What stands there."""
        entry = self.do(lambda store: store.get(key))
        return entry.value if entry is not None else None

    def all(self, prefix: str) -> dict[str, bytes]:
        """All that stands there."""
        return {entry.key: entry.value for entry in self.do(lambda store: store.list(prefix))}

    def authored(self, kind: str) -> Any:
        """What stands for virginia, and its authorship; None if nothing does."""
        value = self.get(f"{ROOT}{kind}/virginia")
        if value is None:
            return None
        apart = (
            authored.split_routes_authorship(value, 1 << 20) if kind == "route" else authored.split_authorship(value)
        )
        return msgspec.json.decode(apart[0]), apart[1]

    async def statuses(self, _fleet: Fleet) -> list[dict[str, Any]]:
        """As the global balancers tell."""
        entries = await self._with_store(lambda store: store.list(ROOT))
        return (
            []
            if self.silent
            else [
                self._global(region, {one.key: bare(one.value) for one in entries} if n < self.knowing else {})
                for n, region in enumerate(REGIONS)
            ]
        )

    def _global(self, own: str, stands: dict[str, bytes]) -> dict[str, Any]:
        instance = {"draining": False, "models": {"m": {"replicas_ready": 1}}}
        drains = {key.rpartition("/")[2]: one for key, one in stands.items() if key.startswith(OVERRIDE_PREFIX)}
        words = [msgspec.json.decode(one) for key, one in stands.items() if key.startswith(STEER_PREFIX)]
        regions = [
            {"region": r, "state": s, "in_flight": 2, "instances": [instance], "override": _value(drains.get(r))}
            for r, s in self.states.items()
        ]
        route = stands.get(f"{ROOT}route/{own}")
        return {
            "region": own, "regions": regions, "limits": {"prices": self.prices, "tenants": _limited(stands)},
            "operator_overrides": words, "law_epoch": self._epoch(stands),
            "routes_author": route and _authorship(authored.split_routes_authorship(route, 1 << 20)[1]),
        }  # fmt: skip

    def _epoch(self, stands: dict[str, bytes]) -> int:
        law = _value(stands.get(LAW_KEY)) or {}
        return law.get("epoch", self.epoch)

    async def status_of(self, _fleet: Fleet, region: str) -> dict[str, Any]:
        """As the region's balancer tells."""
        knows = 3 + REGIONS.index(region) < self.knowing
        entries = await self._with_store(lambda store: store.list(ROOT)) if knows else ()
        stands = {one.key: bare(one.value) for one in entries}
        fields = {
            what: stands.get(f"{ROOT}{kind}/{region}") for what, kind in (("policies", "pick"), ("splits", "split"))
        }
        overrides = {what: value and _authorship(authored.split_authorship(value)[1]) for what, value in fields.items()}
        splits = {"llama": {"unserved": self.unserved}}
        return {"overrides": overrides, "splits": splits, "law_epoch": self._epoch(stands)}


def _limited(stands: dict[str, bytes]) -> dict[str, str]:
    """Since when each tenant's limits are what they are."""
    found = {}
    for key, document in stands.items():
        if key.startswith(LIMIT_PREFIX):
            with contextlib.suppress(DocumentError):
                one = limits.decode(document)
                found[one.tenant] = one.at.isoformat()
    return found


def _value(document: bytes | None) -> Any:
    """As JSON; what cannot be read is told as nothing anybody wrote."""
    try:
        return document and msgspec.json.decode(document)
    except msgspec.DecodeError:
        return {"author": "?", "why": "?"}


def _authorship(authorship: authored.Authorship | None) -> dict[str, str] | None:
    return None if authorship is None else {"at": authorship.at.isoformat()}


@pytest.fixture
def stands(embedded_etcd, tmp_path, monkeypatch):
    made = SettingsWorld(embedded_etcd.endpoint)
    monkeypatch.setattr(Fleet, "status_of", lambda fleet, region: made.status_of(fleet, region))
    monkeypatch.setattr(Fleet, "statuses", lambda fleet: made.statuses(fleet))
    monkeypatch.setattr(setting, "KNOWN_WITHIN_S", 1.0)
    urls = {name: RegionFile(*(f"http://127.0.0.1:{n}" for n in (1, 2, 3))) for name in REGIONS}
    file = WorldFile(os.getpid(), 1.0, str(shipped("three-regions")), made.endpoint, "", "m", {}, urls)
    world_file.write(tmp_path / "world.json", file)
    monkeypatch.setenv(world_file.ENVIRONMENT, str(tmp_path / "world.json"))
    yield made

    async def clear(store):
        for entry in await store.list(ROOT):
            await store.delete(entry.key)

    made.do(clear)
