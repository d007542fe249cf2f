"""When replicas are taken out, eased in or spared, and how each is asked for its health. Never probes."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from farhop.shell.config import DAY_S, Part, Seconds

_PATH = re.compile(r"/[!-~]{0,255}")
Share = Annotated[float, Field(ge=0, le=1)]


class Health(Part):
    """What becomes of a replica by what its requests meet, beside its peers, and by what its GPUs' exporter says.

    `rise` and `fall` of its probes stand under `watch`.
    """

    streak: Annotated[int, Field(ge=1, le=1000)] = 5
    eject_s: Seconds = 5.0
    eject_share_max: Share = 0.5
    panic_share: Share = 0.5
    slow_start_s: Annotated[float, Field(ge=0, le=DAY_S)] = 10.0
    outlier_factor: Annotated[float, Field(ge=0, le=1000)] = 3.0
    gpu_temperature_c_max: Annotated[float, Field(gt=0, le=1000)] = 95.0
    gpu_free_mib_min: Annotated[float, Field(ge=0, le=1e9)] = 0.0

    @field_validator("outlier_factor")
    @classmethod
    def _factor(cls, factor: float) -> float:
        if 0.0 < factor < 1.5:
            raise ValueError("must be 1.5 or more: less is noise; 0 turns it off")
        return factor


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
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
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

    @model_validator(mode="after")
    def _of_its_kind(self) -> Probe:
        for field, kind in (("path", "http"), ("live_path", "http"), ("service", "grpc")):
            if getattr(self, field) and self.kind != kind:
                raise ValueError(f"{field} is for kind {kind}, and this is {self.kind}; leave it out")
        return self
