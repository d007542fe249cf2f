"""One engine endpoint, as configured: where it is, what it serves, what it can take. Never opens a connection."""

from __future__ import annotations

import re
from typing import Annotated, Literal, get_args
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from farhop.balance.machine import Address
from farhop.shell.config import Part

# What a report may say (farhop.store.report): a configuration beyond it would keep the region from reporting at all.
Milliseconds = Annotated[float, Field(gt=0, le=60_000)]
Model = Annotated[str, Field(pattern=r"^[!-~]{1,256}$")]


Role = Literal["mixed", "prefill", "decode"]
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
    of its host's DCGM exporter, `gpus` are those it runs on there (index or UUID), all if it is empty. With role
    `prefill` it computes prompts for others and answers nobody (docs/disaggregation.md).
    """

    url: str
    engine: EngineName | None = None
    metrics: str = ""
    dcgm: str = ""
    gpus: Annotated[tuple[Annotated[str, Field(pattern=r"^[!-~]{1,64}$")], ...], Field(max_length=64)] = ()
    models: Annotated[list[Model], Field(min_length=1, max_length=64)]
    name: Annotated[str, Field(pattern=r"^[!-~]{0,128}$")] = ""
    role: Role = "mixed"
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
