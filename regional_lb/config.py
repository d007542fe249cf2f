"""The regional balancer's configuration file, checked whole. Never opens a connection."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from farhop.balance.machine import Address
from farhop.shell.config import Listen, Part, Process, Secret

Positive = Annotated[float, Field(gt=0)]


class ReplicaConfig(Part):
    """One engine endpoint. Slots, KV tokens and speeds are starting points: metrics and measurement correct them."""

    url: str
    models: Annotated[list[str], Field(min_length=1)]
    name: str = ""
    gpu: str = ""
    slots: Annotated[int, Field(ge=1)] = 256
    kv_tokens: Annotated[int, Field(ge=1)] = 25_000
    prefill_tokens_max: Annotated[int, Field(ge=1)] = 2048
    prefill_ms_per_token: Positive = 0.1
    tpot_ms: Positive = 25.0
    usd_per_hour: Annotated[float, Field(ge=0)] = 0.0

    @field_validator("url")
    @classmethod
    def _plain_http(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.path.strip("/"):
            raise ValueError("must look like http://host:port, without a path")
        return url

    @property
    def address(self) -> Address:
        """Where the engine listens."""
        parts = urlsplit(self.url)
        return Address(parts.hostname or "", parts.port or 80)

    @property
    def label(self) -> str:
        """Its name, by default its address."""
        return self.name or str(self.address)


class Queue(Part):
    """Bounds of what waits here."""

    requests_max: Annotated[int, Field(ge=0)] = 1024
    tokens_max: Annotated[int, Field(ge=1)] = 4_000_000
    wait_s: Positive = 30.0
    starvation_s: Positive = 10.0


class Watch(Part):
    """How often replicas are looked at, and when they count as down. Seconds, and counts in a row."""

    probe_s: Positive = 1.0
    scrape_s: Positive = 0.5
    timeout_s: Positive = 2.0
    rise: Annotated[int, Field(ge=1)] = 2
    fall: Annotated[int, Field(ge=1)] = 3


class RegionalConfig(Process):
    """One regional balancer. `advertise` is the host by which the global tier reaches it."""

    tier: Listen
    control: Listen
    client: Listen | None = None
    advertise: str = "127.0.0.1"
    engine_key: Secret | None = None
    replicas: Annotated[list[ReplicaConfig], Field(min_length=1)]
    queue: Queue = Queue()
    watch: Watch = Watch()

    @model_validator(mode="after")
    def _unique(self) -> RegionalConfig:
        seen: set[str] = set()
        for replica in self.replicas:
            if replica.label in seen:
                raise ValueError(f"replicas: {replica.label} stands twice; give each its own url and name")
            seen.add(replica.label)
        return self
