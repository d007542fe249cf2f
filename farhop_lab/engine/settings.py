"""An engine process's settings: checked once, all errors at once, each naming its field."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from farhop_lab.engine.bootstrap import WAIT_S, Mode
from farhop_lab.engine.core.adapters import Adapters
from farhop_lab.engine.core.held import GBPS, HOLD_S, KV_BYTES_PER_TOKEN, TransferLink
from farhop_lab.engine.core.profiles import PROFILES, Profile

REPLICAS_MAX = 64


class EngineSettings(BaseModel):
    """One process of emulated replicas. One port and `replicas` > 1: consecutive ports. Port 0: any free one.

    Likewise the ports for KV events (those of the second replica follow the first's), and SGLang's bootstrap ports.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    ports: list[Annotated[int, Field(ge=0, le=65535)]] = Field(min_length=1, max_length=REPLICAS_MAX)
    replicas: Annotated[int, Field(ge=1, le=REPLICAS_MAX)] = 1
    model: Annotated[str, Field(min_length=1, max_length=256)] = "llama-3.1-8b"
    profile: str = "l4"
    speedup: Annotated[float, Field(gt=0, le=1000)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    wide: bool = False
    kv_blocks: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    adapters: list[Annotated[str, Field(pattern=r"^[!-~]{1,256}$")]] = Field(default=[], max_length=1024)
    max_loras: Annotated[int, Field(ge=1, le=1024)] = 1
    lora_load_ms: Annotated[float, Field(ge=0, le=600_000)] = 200.0
    kv_link_gbps: Annotated[float, Field(gt=0, le=100_000)] = GBPS
    kv_hold_s: Annotated[float, Field(gt=0, le=3600)] = HOLD_S
    disaggregation_mode: Mode | None = None
    bootstrap_port: Annotated[int, Field(ge=1, le=65535)] = 8998
    kv_wait_s: Annotated[float, Field(gt=0, le=3600)] = WAIT_S
    dcgm_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    mean_output_tokens: Annotated[float, Field(ge=1, le=100_000)] = 200.0
    kv_events_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    kv_replay_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    kv_events_schema: Literal["map", "array"] = "map"
    tokenizer: Path | None = None

    @field_validator("profile")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in PROFILES:
            raise ValueError(f"{name!r} is unknown; use one of {', '.join(PROFILES)}")
        return name

    @model_validator(mode="after")
    def _one_port_each(self) -> EngineSettings:
        if len(self.ports) > 1 and self.replicas not in (1, len(self.ports)):
            raise ValueError(f"replicas: {self.replicas} do not match {len(self.ports)} ports; leave replicas out")
        named = [port for port in self.listen_ports() if port]
        if len(set(named)) < len(named) or max(named, default=0) > 65535:
            raise ValueError("ports: each replica needs its own port, at most 65535")
        if self.kv_replay_port is not None and self.kv_events_port is None:
            raise ValueError("kv-replay-port: needs --kv-events-port, whose events are said again")
        return self

    def kv_ports(self, index: int) -> tuple[int, int | None] | None:
        """The ports where replica number `index` publishes and replays KV events; None if it does not."""
        if self.kv_events_port is None:
            return None
        replay = None if self.kv_replay_port is None else self.kv_replay_port + index
        return self.kv_events_port + index, replay

    def listen_ports(self) -> list[int]:
        """The port of each replica, in order."""
        if len(self.ports) > 1:
            return list(self.ports)
        first = self.ports[0]
        return [first + offset if first else 0 for offset in range(self.replicas)]

    def loras(self) -> Adapters:
        """A new set of the adapters of one replica."""
        return Adapters(self.adapters, self.max_loras, self.lora_load_ms / self.speedup)

    def link(self) -> TransferLink:
        """The link by which KV travels between replicas."""
        ms_per_token = KV_BYTES_PER_TOKEN * 8 / (self.kv_link_gbps * 1e6)
        return TransferLink(ms_per_token / self.speedup, self.kv_hold_s / self.speedup)

    def gpu(self) -> Profile:
        """The profile with this process's overrides applied."""
        profile = PROFILES[self.profile].scaled(self.speedup)
        return profile if self.kv_blocks is None else replace(profile, kv_blocks=self.kv_blocks)
