"""The configuration of engines: address, models and capacity of each, how each is observed, and how more are
discovered.

Never opens a connection, a file or a socket: whether a source of replicas exists shows when it is asked.
"""

from __future__ import annotations

import re
from functools import cached_property
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, Literal, get_args
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationInfo, field_validator

from farhop.balance.machine import Address
from farhop.config import DAY_S, Model, Part, Seconds, Secret, rule
from farhop.service.config.endpoints import ConnectTls
from farhop.service.config.process import Process
from farhop.store.documents.report import GPU_TYPES_LIMIT, MODELS_LIMIT
from regional_lb.engines.signals.slots import SLOTS_MAX
from regional_lb.fleet.config import Health

if TYPE_CHECKING:
    from collections.abc import Iterator

# What a report may say (farhop.store.documents.report): a configuration beyond it would keep the region from reporting
# at all.
Milliseconds = Annotated[float, Field(gt=0, le=60_000)]
Port = Annotated[int, Field(ge=1, le=65535)]
Role = Literal["mixed", "prefill", "decode"]
Handover = Literal["vllm", "sglang"]
EngineName = Literal["vllm", "sglang", "tgi", "trtllm", "llamacpp", "lmdeploy", "aphrodite", "triton"]
ENGINE_NAMES: tuple[str, ...] = get_args(EngineName)
BOOTSTRAP_PORT = 8998  # SGLang's default
MODELS_MAX = 64  # of one replica
REPLICAS_MAX = 16_384  # of one balancer, wherever they come from
SOURCES_MAX = 32
_Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]  # of an object in Kubernetes
_DOMAIN = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})")
_SELECTOR = r"^[A-Za-z0-9!=(), ._/-]{1,1024}$"
_ENDPOINT = re.compile(r"tcp://(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,64}\]):(\d{1,5})")
_PORT_MAX = 65535
_PATH = re.compile(r"/[!-~]{0,255}")


def _plain(url: str) -> bool:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        return False
    extra = parts.query or parts.fragment or parts.username is not None
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and not extra


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def _offset(endpoint: str, rank: int) -> str:
    """The endpoint of a rank, as vLLM numbers them: the first port plus the rank."""
    return f"{endpoint.rpartition(':')[0]}:{_port(endpoint) + rank}" if endpoint else ""


def place_of(url: str) -> tuple[Address, str]:
    """A page's address, and its path there."""
    parts = urlsplit(url)
    host, path = parts.hostname or "", parts.path or "/"
    if parts.scheme == "https":
        return Address(host, parts.port or 443, tls=host), path
    return Address(host, parts.port or 80), path


class Watch(Part):
    """How often replicas are probed and scraped, and when they count as down. Seconds, and counts in a row. `orca`:
    they are asked to report their load with each answer, too, for which an engine has to read its own metrics."""

    probe_s: Seconds = 1.0
    scrape_s: Seconds = 0.5
    gpus_s: Seconds = 5.0
    models_s: Seconds = 30.0
    timeout_s: Seconds = 2.0
    rise: Annotated[int, Field(ge=1, le=1000)] = 2
    fall: Annotated[int, Field(ge=1, le=1000)] = 3
    orca: bool = False


class Probe(Part):
    """How a replica is asked for its health: `http` (200: ready; 503: alive, not ready; else failed), `tcp`, `grpc`.

    `path` and `port` are the engine's own by default. With `live_path`, that page says whether a replica whose `path`
    is not 200 is alive. `warmup` completions of one token come before its first work; after `generate_s` without an
    answer one such completion shows whether the engine still generates (0: never).
    """

    kind: Literal["http", "tcp", "grpc"] = "http"
    path: str = ""
    live_path: str = ""
    service: Annotated[str, Field(pattern=r"^[!-~]{0,256}$")] = ""
    port: Port | None = None
    warmup: Annotated[int, Field(ge=0, le=100)] = 0
    generate_s: Annotated[float, Field(ge=0, le=DAY_S)] = 0.0

    @field_validator("path", "live_path")
    @classmethod
    def _is_path(cls, path: str) -> str:
        if path and not _PATH.fullmatch(path):
            raise ValueError("must begin with / and be printable ASCII without spaces")
        return path

    @field_validator("generate_s")
    @classmethod
    def _patient(cls, every_s: float) -> float:
        if 0.0 < every_s < 1.0:
            raise ValueError("must be 1 s or more; 0 turns it off")
        return every_s

    @rule
    def _of_its_kind(self) -> Iterator[str]:
        for field, kind in (("path", "http"), ("live_path", "http"), ("service", "grpc")):
            if getattr(self, field) and self.kind != kind:
                yield f"{field} is for kind {kind}, and this is {self.kind}; leave it out"


class Traits(Part):
    """The properties of an engine, wherever it runs. KV tokens and speeds are first guesses: metrics and measurement
    correct them.

    `slots` is how many requests it runs at once; if not given, the engine is asked, and 256 is used if it does not
    report it. `engine` is recognised from its metrics page if not given; an empty `models` is filled from its list.
    `version` is that of its models, for `splits`; `adapters` are LoRA adapters served beside them. With role `prefill`
    it computes prompts for other replicas and answers no client; `disaggregation` is how these get them (by `engine` if
    not given), and `bootstrap_port` is where SGLang's engines meet (docs/understand/disaggregation.md).
    """

    engine: EngineName | None = None
    probe: Probe = Probe()
    models: list[Model] = Field(default_factory=list, max_length=MODELS_MAX)
    adapters: Annotated[tuple[Model, ...], Field(max_length=256)] = ()
    role: Role = "mixed"
    disaggregation: Handover | None = None
    bootstrap_port: Port = BOOTSTRAP_PORT
    gpu: Annotated[str, Field(pattern=r"^[ -~]{0,64}$")] = ""
    slots: Annotated[int, Field(ge=1, le=SLOTS_MAX)] | None = None
    kv_tokens: Annotated[int, Field(ge=1, le=1_000_000_000)] = 25_000
    prefill_tokens_max: Annotated[int, Field(ge=1, le=1_000_000_000)] = 2048
    prefill_ms_per_token: Milliseconds = 0.1
    tpot_ms: Milliseconds = 25.0
    version: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{0,64}$")] = ""

    @field_validator("engine", mode="before")
    @classmethod
    def _known(cls, engine: object) -> object:
        if engine is not None and engine not in ENGINE_NAMES:
            raise ValueError(f"is unknown; there is {', '.join(ENGINE_NAMES)}, and without one it is found out")
        return engine

    @property
    def handover(self) -> Handover:
        """How it passes computed prompts to other replicas, or receives them."""
        return self.disaggregation or ("sglang" if self.engine == "sglang" else "vllm")


class ReplicaConfig(Traits):
    """One engine endpoint.

    `metrics` is the URL of its metrics page, if that is not the usual one of such engines. `dcgm` is the page of its
    host's DCGM exporter; `gpus` are the GPUs that it runs on there (index or UUID), empty: all. `kv_events` and
    `kv_replay` are where it publishes its KV events over ZMQ, for rank 0: other ranks use the following ports.
    `draining`: it takes no new work.
    """

    url: str
    metrics: str = ""
    dcgm: str = ""
    gpus: Annotated[tuple[Annotated[str, Field(pattern=r"^[!-~]{1,64}$")], ...], Field(max_length=64)] = ()
    models: list[Model] = Field(max_length=MODELS_MAX)
    kv_events: str = ""
    kv_replay: str = ""
    kv_ranks: Annotated[int, Field(ge=1, le=64)] = 1
    name: Annotated[str, Field(pattern=r"^[!-~]{0,128}$")] = ""
    draining: bool = False

    @field_validator("url")
    @classmethod
    def _origin_only(cls, url: str) -> str:
        if not _plain(url) or urlsplit(url).path.strip("/"):
            raise ValueError("must look like http://host:port or https://host:port, without a path")
        return url

    @field_validator("metrics", "dcgm")
    @classmethod
    def _page(cls, url: str) -> str:
        if url and not (_plain(url) and _PATH.fullmatch(urlsplit(url).path)):
            raise ValueError("must look like http://host:port/path or https://host:port/path")
        return url

    @field_validator("kv_events", "kv_replay")
    @classmethod
    def _endpoint(cls, endpoint: str) -> str:
        port = _ENDPOINT.fullmatch(endpoint)
        if endpoint and (port is None or not 0 < int(port[1]) <= _PORT_MAX):
            raise ValueError("must look like tcp://host:port: where the engine publishes, seen from here")
        return endpoint

    @rule
    def _consistent(self) -> Iterator[str]:
        if not self.kv_events and (self.kv_replay or self.kv_ranks > 1):
            yield "kv_replay, kv_ranks: mean nothing without kv_events; give it, or leave them out"
        for name in ("kv_events", "kv_replay"):
            if getattr(self, name) and _port(getattr(self, name)) + self.kv_ranks - 1 > _PORT_MAX:
                yield f"{name}: the ports of {self.kv_ranks} ranks from there on go beyond {_PORT_MAX}"
        if self.bootstrap_port != BOOTSTRAP_PORT and self.handover != "sglang":
            yield "bootstrap_port: is SGLang's way; give disaggregation: sglang with it, or leave it out"
        twice = set(self.models) & set(self.adapters)
        if twice:
            yield f"adapters: {min(twice)} stands among models, too; keep it where it belongs"

    @cached_property
    def served(self) -> frozenset[str]:
        """All model names that the replica serves."""
        return frozenset(self.models).union(self.adapters)

    @property
    def kv_sources(self) -> list[tuple[str, str]]:
        """For each cache with events: the endpoint of its events, and that of its replay ("": none)."""
        if not self.kv_events:
            return []
        return [(_offset(self.kv_events, rank), _offset(self.kv_replay, rank)) for rank in range(self.kv_ranks)]

    @cached_property
    def address(self) -> Address:
        """The engine's address."""
        return place_of(self.url)[0]

    @cached_property
    def label(self) -> str:
        """The name of the replica; by default its address."""
        return self.name or str(self.address)


class Template(Traits):
    """Settings of every replica of a source, unless the source itself sets them."""

    scheme: Literal["http", "https"] = "http"


class FileSource(Part):
    """A file with a list of replicas, as `replicas` has them; looked at every `poll_s`."""

    kind: Literal["file"]
    path: Annotated[str, Field(min_length=1, max_length=4096)]
    poll_s: Seconds = 1.0
    replica: Template = Template()

    @property
    def label(self) -> str:
        """The source's name in the log and in /status."""
        return f"file {self.path}"


class EtcdSource(Part):
    """The region's keys `/farhop/v1/replica/<region>/<name>` in the balancer's own etcd."""

    kind: Literal["etcd"]
    replica: Template = Template()

    @property
    def label(self) -> str:
        """The source's name in the log and in /status."""
        return "etcd"


class DnsSource(Part):
    """A DNS name: `srv` gives hosts and ports, `address` (A and AAAA) hosts on `port`.

    A TTL below `ttl_floor_s` or above `ttl_ceiling_s` counts as that bound. `nameservers` are `address` or
    `address:port`; without any, the system's.
    """

    kind: Literal["dns"]
    host: str
    record: Literal["srv", "address"] = "srv"
    port: Port | None = None
    nameservers: list[str] = Field(default_factory=list, max_length=8)
    ttl_floor_s: Seconds = 5.0
    ttl_ceiling_s: Seconds = 60.0
    timeout_s: Seconds = 5.0
    replica: Template = Template()

    @field_validator("host")
    @classmethod
    def _domain(cls, host: str) -> str:
        if not _DOMAIN.fullmatch(host) or ".." in host or any(len(label) > 63 for label in host.split(".")):
            raise ValueError("must be a DNS name, such as _vllm._tcp.gpus.example or gpus.example")
        return host

    @field_validator("nameservers")
    @classmethod
    def _servers(cls, servers: list[str]) -> list[str]:
        for server in servers:
            nameserver(server)
        return servers

    @rule
    def _sound(self) -> Iterator[str]:
        if (self.record == "address") != (self.port is not None):
            yield "port: give one with `record: address`, and none with `srv`, whose records say it"
        if self.ttl_floor_s > self.ttl_ceiling_s:
            yield "ttl_floor_s: must not be above ttl_ceiling_s"

    @property
    def label(self) -> str:
        """The source's name in the log and in /status."""
        return f"dns {self.record} {self.host}" + (f":{self.port}" if self.port else "")


def nameserver(text: str) -> tuple[str, int]:
    """Address and port of `address`, `address:port` or `[v6]:port`. ValueError if it is neither."""
    host, _, port = text.rpartition(":") if text.count(":") == 1 or "]:" in text else (text, "", "53")
    try:
        address, number = str(ip_address(host.strip("[]"))), int(port)
    except ValueError:
        raise ValueError(f"{text[:64]!r} must be an IP address, or address:port") from None
    if not 1 <= number <= 65535:
        raise ValueError(f"{text[:64]!r}: a port is 1 to 65535")
    return address, number


class KubernetesSource(Part):
    """What Kubernetes knows: endpoints of a `service`, EndpointSlices by `selector`, or the pods of an InferencePool.

    `port` is a port's name or number where there are several. `objectives` is the group and version whose
    InferenceObjectives name the pool (`llm-d.ai/v1alpha2`), for the priorities that they give; None: none are read.

    Without `api` the pod's own service account is used; an
    `http://` API (kubectl proxy) is asked without a token.
    """

    kind: Literal["kubernetes"]
    service: _Name | None = None
    selector: Annotated[str, Field(pattern=_SELECTOR)] | None = None
    pool: _Name | None = None
    namespace: _Name | None = None
    port: Port | Annotated[str, Field(pattern=r"^[a-z0-9-]{1,63}$")] | None = None
    objectives: Annotated[str, Field(pattern=r"^[a-z0-9.-]{1,253}/v[a-z0-9]{1,31}$")] | None = None
    api: Annotated[str, Field(pattern=r"^https?://[^/\s?#@]{1,512}$")] | None = None
    token_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/token"  # noqa: S105 - a path
    ca_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"
    namespace_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
    replica: Template = Template()

    @rule
    def _one(self) -> Iterator[str]:
        if sum(what is not None for what in (self.service, self.selector, self.pool)) != 1:
            yield "give one of service, selector and pool"
        if self.pool is not None and self.port is not None:
            yield "port: an InferencePool says its own targetPorts; leave this out"
        if self.pool is None and self.objectives is not None:
            yield "objectives: are those of an InferencePool; give pool, or leave this out"

    @property
    def label(self) -> str:
        """The source's name in the log and in /status."""
        what = f"service {self.service}" if self.service else f"pool {self.pool}" if self.pool else self.selector
        return f"kubernetes {self.namespace or ''} {what}".replace("  ", " ")


SourceConfig = Annotated[FileSource | EtcdSource | DnsSource | KubernetesSource, Field(discriminator="kind")]


class EnginesConfig(Process):
    """The region's engines: `replicas` are fixed, `discovery` finds more of them at work."""

    engine_key: Secret | None = None
    engine_tls: ConnectTls | None = None
    discovery: list[SourceConfig] = Field(default_factory=list, max_length=SOURCES_MAX)
    replicas: list[ReplicaConfig] = Field(default_factory=list, max_length=REPLICAS_MAX, validate_default=True)
    watch: Watch = Watch()
    health: Health = Health()

    @field_validator("discovery")
    @classmethod
    def _once(cls, discovery: list[SourceConfig]) -> list[SourceConfig]:
        seen: set[str] = set()
        for source in discovery:
            if source.label in seen:
                raise ValueError(f"{source.label} is given twice; leave one out")
            seen.add(source.label)
        return discovery

    @field_validator("replicas")
    @classmethod
    def _some(cls, replicas: list[ReplicaConfig], info: ValidationInfo) -> list[ReplicaConfig]:
        if not replicas and not info.data.get("discovery", True):  # absent where it is itself in error
            raise ValueError("there is none; list one or more, or say under `discovery` where they are found")
        return replicas

    @field_validator("engine_key")
    @classmethod
    def _one_header(cls, key: SecretStr | None) -> SecretStr | None:
        text = key.get_secret_value() if key is not None else "-"
        if not text.isascii() or not text.isprintable() or " " in text:
            raise ValueError("must be printable ASCII without spaces: it is sent as a bearer token")
        return key

    @rule
    def _encrypted_engines(self) -> Iterator[str]:
        # What is found later may have any scheme, any name and any model: then only what is listed can be wrong.
        found_later = bool(self.discovery)
        if self.engine_tls is not None and not found_later and not any(one.address.tls for one in self.replicas):
            yield "engine_tls: no replica has an https:// url; give them one, or leave this out"

    @rule
    def _decoded(self) -> Iterator[str]:
        answered = {model for replica in self.replicas if replica.role != "prefill" for model in replica.models}
        for replica in self.replicas:
            if alone := set(replica.models) - answered:
                yield (
                    f"replicas: {min(alone)[:128]!r} has replicas of role prefill only; give it one of role decode or "
                    "mixed, which answers"
                )
        prefilled = {m for r in self.replicas if (r.role, r.handover) == ("prefill", "sglang") for m in r.models}
        for replica in self.replicas if not self.discovery else ():
            if (replica.role, replica.handover) == ("decode", "sglang") and (alone := set(replica.models) - prefilled):
                yield (
                    f"replicas: {min(alone)[:128]!r} has a decode engine of SGLang's, which answers nothing alone, and "
                    "none of role prefill with disaggregation: sglang; give it one"
                )

    @rule
    def _unique(self) -> Iterator[str]:
        seen: set[str] = set()
        for replica in self.replicas:
            if replica.label in seen:
                yield f"replicas: {replica.label} is given twice; give each its own url and name"
            seen.add(replica.label)
        for what, kinds, most in (
            ("models", {model for replica in self.replicas for model in replica.served}, MODELS_LIMIT),
            ("kinds of GPU", {replica.gpu for replica in self.replicas}, GPU_TYPES_LIMIT),
        ):
            if len(kinds) > most:
                yield f"replicas: {len(kinds)} {what}, at most {most} in one balancer; run several"
