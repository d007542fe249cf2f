"""The regional balancer's configuration file, checked whole. Never opens a connection."""

from __future__ import annotations

import re
from ipaddress import IPv6Address
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from farhop.balance.machine import Address
from farhop.shell.config import ConnectTls, Entry, Listen, Part, Process, Seconds, Secret
from farhop.store.report import GPU_TYPES_LIMIT, MODELS_LIMIT

# What a report may say (farhop.store.report): a configuration beyond it would keep the region from reporting at all.
Milliseconds = Annotated[float, Field(gt=0, le=60_000)]
Model = Annotated[str, Field(pattern=r"^[!-~]{1,256}$")]
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


EngineName = Literal["vllm", "sglang", "tgi", "trtllm", "triton"]
ENGINE_NAMES: tuple[str, ...] = get_args(EngineName)
_PATH = re.compile(r"/[!-~]{0,255}")


def _plain(url: str) -> bool:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        return False
    extra = parts.query or parts.fragment or parts.username is not None
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and not extra


def place_of(url: str) -> tuple[Address, str]:
    """Where a page is, and its path there."""
    parts = urlsplit(url)
    host, path = parts.hostname or "", parts.path or "/"
    if parts.scheme == "https":
        return Address(host, parts.port or 443, tls=host), path
    return Address(host, parts.port or 80), path


class ReplicaConfig(Part):
    """One engine endpoint. Slots, KV tokens and speeds are starting points: metrics and measurement correct them.

    `engine` is found out from the page where it is not told, `metrics` is where that engine has it. `dcgm` is the page
    of its host's DCGM exporter, `gpus` are those it runs on there (index or UUID), all if it is empty.
    """

    url: str
    engine: EngineName | None = None
    metrics: str = ""
    dcgm: str = ""
    gpus: Annotated[tuple[Annotated[str, Field(pattern=r"^[!-~]{1,64}$")], ...], Field(max_length=64)] = ()
    models: Annotated[list[Model], Field(min_length=1, max_length=64)]
    name: Annotated[str, Field(pattern=r"^[!-~]{0,128}$")] = ""
    gpu: Annotated[str, Field(pattern=r"^[ -~]{0,64}$")] = ""
    slots: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    kv_tokens: Annotated[int, Field(ge=1, le=1_000_000_000)] = 25_000
    prefill_tokens_max: Annotated[int, Field(ge=1, le=1_000_000_000)] = 2048
    prefill_ms_per_token: Milliseconds = 0.1
    tpot_ms: Milliseconds = 25.0
    usd_per_hour: Annotated[float, Field(ge=0, le=1e6)] = 0.0

    @field_validator("engine", mode="before")
    @classmethod
    def _known(cls, engine: object) -> object:
        if engine is not None and engine not in ENGINE_NAMES:
            raise ValueError(f"is unknown; there is {', '.join(ENGINE_NAMES)}, and without one it is found out")
        return engine

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

    @property
    def address(self) -> Address:
        """Where the engine listens."""
        return place_of(self.url)[0]

    @property
    def label(self) -> str:
        """Its name, by default its address."""
        return self.name or str(self.address)


class Queue(Part):
    """Bounds of what waits here."""

    requests_max: Annotated[int, Field(ge=0, le=1_000_000)] = 1024
    tokens_max: Annotated[int, Field(ge=1, le=1_000_000_000_000)] = 4_000_000
    wait_s: Seconds = 30.0
    starvation_s: Seconds = 10.0


class Foreign(Part):
    """Work from other regions: what share is kept from it, and when a promised time to first token is broken."""

    reserve_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    promise_factor: Annotated[float, Field(ge=1, le=1000)] = 2.0
    promise_slack_ms: Annotated[float, Field(ge=0, le=3_600_000)] = 500.0


class Watch(Part):
    """How often replicas are looked at, and when they count as down. Seconds, and counts in a row."""

    probe_s: Seconds = 1.0
    scrape_s: Seconds = 0.5
    gpus_s: Seconds = 5.0
    timeout_s: Seconds = 2.0
    rise: Annotated[int, Field(ge=1, le=1000)] = 2
    fall: Annotated[int, Field(ge=1, le=1000)] = 3


# Each policy, and the options it takes: regional_lb.policy reads them.
POLICIES: dict[str, tuple[str, ...]] = {
    "predictive": (),
    "prefix": ("load_factor", "prefix_bytes"),
    "least-load": (),
    "least-latency": (),
    "p2c": (),
    "round-robin": (),
    "weighted-round-robin": ("weights",),
    "random": (),
    "weighted-random": ("weights",),
    "consistent-hash": (),
    "session": ("load_factor",),
}


class PolicyConfig(Part):
    """How replicas are chosen: a policy's name alone, or with its options. `weights` go by a replica's name."""

    name: str = "predictive"
    load_factor: Annotated[float, Field(ge=1, le=100)] = 1.25
    prefix_bytes: Annotated[int, Field(ge=256, le=4 * 1024 * 1024)] = 1024
    weights: dict[str, Annotated[float, Field(ge=0.001, le=1e6)]] = Field(default_factory=dict, max_length=4096)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        if isinstance(given, str):
            given = {"name": given}
        if not isinstance(given, dict):
            return given
        name = given.get("name", "predictive")
        if not isinstance(name, str) or name not in POLICIES:
            raise ValueError(f"no policy {str(name)[:64]!r}; known are {', '.join(POLICIES)}")
        for option in given:
            if option != "name" and option not in POLICIES[name]:
                takes = ", ".join(POLICIES[name]) or "none"
                raise ValueError(f"no option {str(option)[:64]!r} of policy {name}; its options: {takes}")
        return given


class Session(Part):
    """Where a request's session is looked for, in this order; "" not at all. Only if a policy in force goes by it."""

    header: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{0,64}$")] = "x-session-id"
    cookie: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{0,64}$")] = ""
    field: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{0,64}$")] = "user"


class RegionalConfig(Process):
    """One regional balancer. `advertise` is the host by which the global tier reaches it.

    `policy` is for all models but those of `policies`.

    `prefix_nodes_per_s` bounds what each global balancer is told of the caches: 8 B a node.
    """

    tier: Listen
    control: Listen
    client: Entry | None = None
    advertise: str = "127.0.0.1"
    engine_key: Secret | None = None
    engine_tls: ConnectTls | None = None
    replicas: Annotated[list[ReplicaConfig], Field(min_length=1, max_length=4096)]
    queue: Queue = Queue()
    foreign: Foreign = Foreign()
    watch: Watch = Watch()
    policy: PolicyConfig = PolicyConfig()
    policies: dict[Model, PolicyConfig] = Field(default_factory=dict, max_length=MODELS_LIMIT)
    session: Session = Session()
    prefix_nodes_per_s: Annotated[int, Field(ge=1000, le=10_000_000)] = 50_000

    @field_validator("advertise")
    @classmethod
    def _host(cls, host: str) -> str:
        if _HOST.fullmatch(host):
            return host
        try:
            return f"[{IPv6Address(host[1:-1] if host.startswith('[') and host.endswith(']') else host)}]"
        except ValueError:
            raise ValueError("must be a host name or an address, without a port") from None

    @field_validator("engine_key")
    @classmethod
    def _one_header(cls, key: SecretStr | None) -> SecretStr | None:
        text = key.get_secret_value() if key is not None else "-"
        if not text.isascii() or not text.isprintable() or " " in text:
            raise ValueError("must be printable ASCII without spaces: it is sent as a bearer token")
        return key

    @model_validator(mode="after")
    def _encrypted(self) -> RegionalConfig:
        if (self.tier.tls is None) != (self.control.tls is None):
            raise ValueError("tier.tls, control.tls: give both or neither: the global tier speaks TLS to both or none")
        if self.engine_tls is not None and not any(replica.address.tls for replica in self.replicas):
            raise ValueError("engine_tls: no replica has an https:// url; give them one, or leave this out")
        return self

    @model_validator(mode="after")
    def _weighed(self) -> RegionalConfig:
        known = {replica.label for replica in self.replicas}
        for where, policy in (("policy", self.policy), *((f"policies.{m}", p) for m, p in self.policies.items())):
            for name in policy.weights.keys() - known:
                raise ValueError(
                    f"{where}.weights: no replica {name[:128]!r}; known are {', '.join(sorted(known)[:8])}"
                )
        for model in self.policies.keys() - {model for replica in self.replicas for model in replica.models}:
            raise ValueError(f"policies.{model}: no replica serves this model; correct its name, or leave it out")
        return self

    @model_validator(mode="after")
    def _unique(self) -> RegionalConfig:
        seen: set[str] = set()
        for replica in self.replicas:
            if replica.label in seen:
                raise ValueError(f"replicas: {replica.label} stands twice; give each its own url and name")
            seen.add(replica.label)
        for what, kinds, most in (
            ("models", {model for replica in self.replicas for model in replica.models}, MODELS_LIMIT),
            ("kinds of GPU", {replica.gpu for replica in self.replicas}, GPU_TYPES_LIMIT),
        ):
            if len(kinds) > most:
                raise ValueError(f"replicas: {len(kinds)} {what}, at most {most} in one balancer; run several")
        return self
