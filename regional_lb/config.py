"""The regional balancer's configuration file, checked whole. Never opens a connection."""

from __future__ import annotations

import re
from ipaddress import IPv6Address
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from farhop.balance.machine import Address
from farhop.shell.config import Listen, Part, Process, Seconds, Secret
from farhop.store.report import GPU_TYPES_LIMIT, MODELS_LIMIT

# What a report may say (farhop.store.report): a configuration beyond it would keep the region from reporting at all.
Milliseconds = Annotated[float, Field(gt=0, le=60_000)]
Model = Annotated[str, Field(pattern=r"^[!-~]{1,256}$")]
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


class ReplicaConfig(Part):
    """One engine endpoint. Slots, KV tokens and speeds are starting points: metrics and measurement correct them."""

    url: str
    models: Annotated[list[Model], Field(min_length=1, max_length=64)]
    name: Annotated[str, Field(pattern=r"^[!-~]{0,128}$")] = ""
    gpu: Annotated[str, Field(pattern=r"^[ -~]{0,64}$")] = ""
    slots: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    kv_tokens: Annotated[int, Field(ge=1, le=1_000_000_000)] = 25_000
    prefill_tokens_max: Annotated[int, Field(ge=1, le=1_000_000_000)] = 2048
    prefill_ms_per_token: Milliseconds = 0.1
    tpot_ms: Milliseconds = 25.0
    usd_per_hour: Annotated[float, Field(ge=0, le=1e6)] = 0.0

    @field_validator("url")
    @classmethod
    def _plain_http(cls, url: str) -> str:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = 0
        extra = parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None
        if parts.scheme != "http" or not parts.hostname or port == 0 or extra:
            raise ValueError("must look like http://host:port, without a path")
        return url

    @property
    def address(self) -> Address:
        """Where the engine listens."""
        parts = urlsplit(self.url)
        return Address(parts.hostname or "", parts.port or 80)

    @property
    def origin(self) -> str:
        """The URL to which a path is added."""
        return f"http://{self.address}"

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
    timeout_s: Seconds = 2.0
    rise: Annotated[int, Field(ge=1, le=1000)] = 2
    fall: Annotated[int, Field(ge=1, le=1000)] = 3


class RegionalConfig(Process):
    """One regional balancer. `advertise` is the host by which the global tier reaches it.

    `prefix_nodes_per_s` bounds what each global balancer is told of the caches: 8 B a node.
    """

    tier: Listen
    control: Listen
    client: Listen | None = None
    advertise: str = "127.0.0.1"
    engine_key: Secret | None = None
    replicas: Annotated[list[ReplicaConfig], Field(min_length=1, max_length=4096)]
    queue: Queue = Queue()
    foreign: Foreign = Foreign()
    watch: Watch = Watch()
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
