"""One engine endpoint, as configured: where it is, what it serves, what it can take. Never opens a connection."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Annotated, Literal, get_args
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from farhop.balance.machine import Address
from farhop.shell.config import Part
from regional_lb.config.health import Probe

# What a report may say (farhop.store.report): a configuration beyond it would keep the region from reporting at all.
Milliseconds = Annotated[float, Field(gt=0, le=60_000)]
Model = Annotated[str, Field(pattern=r"^[!-~]{1,256}$")]


Role = Literal["mixed", "prefill", "decode"]
Handover = Literal["vllm", "sglang"]
EngineName = Literal["vllm", "sglang", "tgi", "trtllm", "triton"]
ENGINE_NAMES: tuple[str, ...] = get_args(EngineName)
BOOTSTRAP_PORT = 8998  # SGLang's default
MODELS_MAX = 64  # of one replica
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
    """As vLLM does it: a rank's port is so many after the first's."""
    return f"{endpoint.rpartition(':')[0]}:{_port(endpoint) + rank}" if endpoint else ""


def place_of(url: str) -> tuple[Address, str]:
    """Where a page is, and its path there."""
    parts = urlsplit(url)
    host, path = parts.hostname or "", parts.path or "/"
    if parts.scheme == "https":
        return Address(host, parts.port or 443, tls=host), path
    return Address(host, parts.port or 80), path


class Traits(Part):
    """What an engine is, wherever it is. Slots, KV tokens and speeds are starting points: metrics and measurement
    correct them. `engine` is found out from its page where it is not told, `models` is asked of it if it is empty.
    `version` is that of its models, for `splits`; `adapters` are LoRA adapters served beside them. With role `prefill`
    it computes prompts for others and answers nobody; `disaggregation` is how they get them, by `engine` where it is
    not told, and `bootstrap_port` where SGLang's meet (docs/disaggregation.md)."""

    engine: EngineName | None = None
    probe: Probe = Probe()
    models: list[Model] = Field(default_factory=list, max_length=MODELS_MAX)
    adapters: Annotated[tuple[Model, ...], Field(max_length=256)] = ()
    role: Role = "mixed"
    disaggregation: Handover | None = None
    bootstrap_port: Annotated[int, Field(ge=1, le=65535)] = BOOTSTRAP_PORT
    gpu: Annotated[str, Field(pattern=r"^[ -~]{0,64}$")] = ""
    slots: Annotated[int, Field(ge=1, le=1_000_000)] = 256
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
        """How it gives others what it computed, or takes it from them."""
        return self.disaggregation or ("sglang" if self.engine == "sglang" else "vllm")


class ReplicaConfig(Traits):
    """One engine endpoint.

    `metrics` is where its page is if not where such engines have it. `dcgm` is the page of its host's DCGM exporter,
    `gpus` are those it runs on there (index or UUID), all if it is empty. `kv_events` and
    `kv_replay` are where it tells of its KV cache over ZMQ, rank 0's: those of other ranks are on the ports after them.
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

    @model_validator(mode="after")
    def _consistent(self) -> ReplicaConfig:
        if not self.kv_events and (self.kv_replay or self.kv_ranks > 1):
            raise ValueError("kv_replay, kv_ranks: mean nothing without kv_events; give it, or leave them out")
        for name in ("kv_events", "kv_replay"):
            if getattr(self, name) and _port(getattr(self, name)) + self.kv_ranks - 1 > _PORT_MAX:
                raise ValueError(f"{name}: the ports of {self.kv_ranks} ranks from there on go beyond {_PORT_MAX}")
        if self.bootstrap_port != BOOTSTRAP_PORT and self.handover != "sglang":
            raise ValueError("bootstrap_port: is SGLang's way; give disaggregation: sglang with it, or leave it out")
        twice = set(self.models) & set(self.adapters)
        if twice:
            raise ValueError(f"adapters: {min(twice)} stands among models, too; keep it where it belongs")
        return self

    @cached_property
    def served(self) -> frozenset[str]:
        """All names it answers to."""
        return frozenset(self.models).union(self.adapters)

    @property
    def kv_sources(self) -> list[tuple[str, str]]:
        """Of each cache it has events of: where they are, and where they are said again ("" nowhere)."""
        if not self.kv_events:
            return []
        return [(_offset(self.kv_events, rank), _offset(self.kv_replay, rank)) for rank in range(self.kv_ranks)]

    @cached_property
    def address(self) -> Address:
        """Where the engine listens."""
        return place_of(self.url)[0]

    @cached_property
    def label(self) -> str:
        """Its name, by default its address."""
        return self.name or str(self.address)
