"""Our own rows: both tiers' processes as shipped, with everything on.

Identity by API key, law, prefix trie, predictive policy, metrics, JSON logs and one trace in a hundred to a collector.
Slots and KV cache are so large that no request waits or is refused: the passage alone is measured.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from farhop_lab.bench import regions
from farhop_lab.bench.bodies import KEY, MODEL
from farhop_lab.bench.harness import HOST, REGIONS, BenchError, ProxyEnvironment, Running, answers, module
from farhop_lab.engine.core.kv_log import batch
from farhop_lab.engine.kv_publisher import KvPublisher
from farhop_lab.world.child import Child, ChildError
from farhop_lab.world.collector import Collector
from farhop_lab.world.etcd import EmbeddedEtcd, EtcdLabError, find_binary
from farhop_lab.world.ports import free_ports
from farhop_lab.world.world import serving

HERE = REGIONS[0]
SLOTS, KV_TOKENS, PREFILL_TOKENS_MAX = 1_000_000, 100_000_000, 1_000_000_000
_READY_S = 20.0


@dataclass(frozen=True, slots=True)
class Tiers:
    """One row of ours: which tiers run."""

    name: str
    run: Callable[[ProxyEnvironment], AbstractAsyncContextManager[Running]]
    tls: bool = True

    def missing(self) -> str | None:
        """Why it cannot be run here; None if it can."""
        try:
            find_binary()
        except EtcdLabError as error:
            return str(error)
        return None


def topology() -> dict[str, Any]:
    """Twelve regions in six countries of two jurisdictions, and a tenant whose law allows all of them."""
    return {
        "name": "bench",
        "epoch": 1,
        "jurisdictions": [{"name": "east"}, {"name": "west"}],
        "countries": [{"name": f"c{i}", "within": ["east" if i % 2 else "west"]} for i in range(6)] + [{"name": "cx"}],
        "hubs": {"main": []},
        "regions": [
            {"name": name, "country": f"c{i % 6}", "latitude": 5.0 * i, "longitude": 10.0 * i, "hub": "main"}
            for i, name in enumerate(REGIONS)
        ],
        "local_rtt_ms": 1.0,
        "rtt_ms": {a: dict.fromkeys(REGIONS[i + 1 :], 10.0) for i, a in enumerate(REGIONS[:-1])},
        "tenants": [
            {
                "name": "bench",
                "keys": [{"name": "bench", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}],
                "residency": {"processing": {"allow": ["east", "west"], "deny": ["cx"]}},
            }
        ],
    }


class TierEnvironment:
    """What both tiers need: a topology, an etcd, a collector of traces, a secret."""

    def __init__(self, environment: ProxyEnvironment) -> None:
        self._place = environment
        self.file = environment.folder / "topology.yaml"
        self._collector = Collector()
        self._etcd = EmbeddedEtcd(folder=environment.folder / "etcd")
        self._secret = secrets.token_urlsafe(32)
        self.stack = AsyncExitStack()
        self.admins: list[int] = []

    async def __aenter__(self) -> TierEnvironment:
        self.file.write_text(yaml.safe_dump(topology(), sort_keys=False))
        try:
            self.stack.push_async_callback(self._collector.stop)
            await self._collector.start(HOST)
            self.stack.push_async_callback(self._etcd.stop)
            await self._etcd.start()
        except BaseException:
            await self.stack.aclose()
            raise
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.stack.aclose()

    async def tier(self, role: str, config: dict[str, Any], number: int = 1) -> int:
        """Start a tier from its configuration file; `number` distinguishes processes of a kind. Returns its process
        id.
        """
        folder, name = self._place.folder, role if number == 1 else f"{role}-{number}"
        common: dict[str, Any] = {
            "region": HERE,
            "instance": f"bench-{name}",
            "topology": str(self.file),
            "etcd": {"endpoints": [self._etcd.endpoint]},
            "hop": {"keys": {"k1": "env:FARHOP_HOP_KEY"}, "active": "k1"},
            # All the load comes from one address, and may be as many streams as a process may have files.
            "limits": {"drain_s": 0.2, "connections_per_client_max": 1_000_000, "streams_per_upstream_max": 1_000_000},
        }
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**common, **config}, sort_keys=False))
        child = Child(f"farhop {name}", [role, "--config", str(path)], folder / f"{name}.log", self._environment())
        self.stack.push_async_callback(child.stop, 3.0)
        await child.start(_READY_S)
        assert child.pid is not None
        return child.pid

    async def other_regions(self, names: tuple[str, ...]) -> None:
        """Use the upstream in place of these regions' tier listeners, with real reports of each."""
        targets = self._place.targets
        job = regions.Job(
            topology=str(self.file),
            etcd=self._etcd.endpoint,
            tiers={name: targets[i] for i, name in enumerate(names)},
            replicas=len(targets),
            slots=SLOTS,
            kv_tokens=KV_TOKENS,
            prefill_tokens_max=PREFILL_TOKENS_MAX,
        )
        program, arguments = module("regions", job)
        child = Child("the benchmark's regions", arguments, self._place.folder / "regions.log", {}, program)
        self.stack.push_async_callback(child.stop, 3.0)
        await child.start(_READY_S)

    def _environment(self) -> dict[str, str]:
        return {
            "FARHOP_HOP_KEY": self._secret,
            "OTEL_EXPORTER_OTLP_ENDPOINT": self._collector.endpoint,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": "0.01",
        }


@dataclass(frozen=True, slots=True)
class Reader:
    """How a region tokenizes the prompts of `model`: by this tokenizer.json, if any. `told`: replicas publish KV
    events, so that prompts are tokenized before the decision.
    """

    model: str = MODEL
    tokenizer: Path | None = None
    kv_events: bool = False


async def _regional(
    around: TierEnvironment, environment: ProxyEnvironment, kv_tokens: int = KV_TOKENS, reader: Reader = Reader()
) -> tuple[int, int]:
    """A regional balancer over the environment's replicas: its client port and process id."""
    client, admin, *kv_ports = free_ports(2 + (len(environment.targets) if reader.kv_events else 0))
    around.admins.append(admin)
    config = regional_config(environment, kv_tokens, reader, kv_ports)
    config |= {"admin": {"port": admin}, "client": _listen(client, environment)}
    if reader.tokenizer is not None:
        config["tokenizers"] = {reader.model: {"file": str(reader.tokenizer)}}
    pid = await around.tier("regional", config)
    if reader.kv_events:
        await _announce_kv(around, admin, kv_ports)
    return client, pid


async def _sharing(around: TierEnvironment, environment: ProxyEnvironment, count: int) -> tuple[int, tuple[int, ...]]:
    """So many regional balancers on one client port over the same replicas: the port and their process ids."""
    client, *admins = free_ports(1 + count)
    around.admins.extend(admins)
    entry = _listen(client, environment) | {"reuse_port": True}
    configs = [regional_config(environment) | {"admin": {"port": admin}, "client": entry} for admin in admins]
    return client, tuple([await around.tier("regional", one, number) for number, one in enumerate(configs, 1)])


def regional_config(
    environment: ProxyEnvironment, kv_tokens: int = KV_TOKENS, reader: Reader = Reader(), kv_ports: Sequence[int] = ()
) -> dict[str, Any]:
    """A regional balancer's configuration over these replicas, without its listeners."""
    replicas = [
        {
            "url": f"http://{host}:{port}",
            "name": f"gpu-{i}",
            "models": [reader.model],
            "gpu": "h100",
            "slots": SLOTS,
            "kv_tokens": kv_tokens,
            "prefill_tokens_max": PREFILL_TOKENS_MAX,
            "prefill_ms_per_token": 0.04,
            "tpot_ms": 10.0,
            **({"kv_events": f"tcp://{HOST}:{kv_ports[i]}"} if kv_ports else {}),
        }
        for i, (host, port) in enumerate(environment.targets)
    ]
    return {"tier": {"port": 0}, "control": {"port": 0}, "replicas": replicas}


async def _announce_kv(around: TierEnvironment, admin: int, ports: list[int]) -> None:
    """Report each replica's cache as empty, repeatedly until the region has received it for all."""
    publishers = [KvPublisher(HOST, port, None, "map") for port in ports]
    for publisher in publishers:
        around.stack.callback(publisher.close)
    async with aiohttp.ClientSession() as session:
        exact = False
        while not exact:
            for publisher in publishers:
                publisher.publish(batch([{"type": "AllBlocksCleared"}], 0.0, "map"))
            await asyncio.sleep(0.1)
            async with session.get(f"http://{HOST}:{admin}/status") as answer:
                exact = all(one["kv_events"] == "exact" for one in (await answer.json())["replicas"])


def _listen(port: int, environment: ProxyEnvironment) -> dict[str, Any]:
    """The listener for clients."""
    pair = environment.pair
    tls = {"cert_file": pair.cert_file, "key_file": pair.key_file} if pair is not None else None
    return {"port": port, "tls": tls}


async def _global(around: TierEnvironment, environment: ProxyEnvironment, seen: frozenset[str]) -> tuple[int, int]:
    """A global balancer, from when it sees these regions serve: its port and process id."""
    port, admin = free_ports(2)
    around.admins.append(admin)
    pid = await around.tier("global", {"admin": {"port": admin}, "listen": _listen(port, environment)})
    async with aiohttp.ClientSession() as session:
        while not seen <= await serving(session, f"http://{HOST}:{admin}"):
            await asyncio.sleep(0.05)
    return port, pid


@asynccontextmanager
async def _row(
    environment: ProxyEnvironment, start: Callable[[TierEnvironment], Any], model: str = MODEL
) -> AsyncIterator[Running]:
    try:
        async with TierEnvironment(environment) as around:
            async with asyncio.timeout(_READY_S):
                port, pids = await start(around)
                while not await answers(HOST, port, model=model, tls=environment.pair is not None):
                    await asyncio.sleep(0.05)
            yield Running(port, pids, tls=environment.pair is not None, admins=tuple(around.admins))
    except TimeoutError:
        raise BenchError(f"our tiers do not serve within {_READY_S:g} s; is the machine too busy?") from None
    except (ChildError, EtcdLabError) as error:
        raise BenchError(str(error)) from None


def regional(environment: ProxyEnvironment, kv_tokens: int = KV_TOKENS) -> AbstractAsyncContextManager[Running]:
    """Clients at a region's own listener."""

    async def start(around: TierEnvironment) -> tuple[int, tuple[int, ...]]:
        port, pid = await _regional(around, environment, kv_tokens)
        return port, (pid,)

    return _row(environment, start)


def two_regional(environment: ProxyEnvironment) -> AbstractAsyncContextManager[Running]:
    """Clients at two regional balancers of one region that share a port; the CPU of both."""
    return _row(environment, lambda around: _sharing(around, environment, 2))


def global_(environment: ProxyEnvironment) -> AbstractAsyncContextManager[Running]:
    """Clients at a global balancer over twelve regions."""

    async def start(around: TierEnvironment) -> tuple[int, tuple[int, ...]]:
        await around.other_regions(REGIONS)
        port, pid = await _global(around, environment, frozenset(REGIONS))
        return port, (pid,)

    return _row(environment, start)


def both(environment: ProxyEnvironment) -> AbstractAsyncContextManager[Running]:
    """Clients at a global balancer, which sends them to its own region's regional balancer."""

    async def start(around: TierEnvironment) -> tuple[int, tuple[int, ...]]:
        _, lower = await _regional(around, environment)
        port, upper = await _global(around, environment, frozenset((HERE,)))
        return port, (upper, lower)

    return _row(environment, start)


@asynccontextmanager
async def side_by_side(environment: ProxyEnvironment, reader: Reader) -> AsyncIterator[tuple[Running, Running]]:
    """Both tiers, open to clients at the region and at the global balancer at the same time. Raises BenchError."""
    regional_port, lower = 0, 0

    async def start(around: TierEnvironment) -> tuple[int, tuple[int, ...]]:
        nonlocal regional_port, lower
        regional_port, lower = await _regional(around, environment, reader=reader)
        port, upper = await _global(around, environment, frozenset((HERE,)))
        return port, (upper, lower)

    async with _row(environment, start, reader.model) as running:
        yield Running(regional_port, (lower,), tls=running.tls, admins=running.admins), running


OURS = (
    Tiers("farhop regional", regional),
    Tiers("farhop global", global_),
    Tiers("both tiers", both),
    Tiers("two instances on one port", two_regional),
)
# For soaks: a KV cache of an H100's size with a small model, so that the prefix trie has to evict.
SOAKED = Tiers("farhop regional", partial(regional, kv_tokens=400_000))
