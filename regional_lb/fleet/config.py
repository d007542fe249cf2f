"""When replicas are ejected, slowly started or spared, as configured. Never probes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from farhop.balance.health.replica import HealthConfig
from farhop.config import DAY_S, Part, Seconds, Share


class Health(Part):
    """How a replica is judged by the results of its requests, compared with its peers, and by its GPUs' exporter.

    `rise` and `fall` of its probes are under `watch`.
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

    def thresholds(self, rise: int, fall: int) -> HealthConfig:
        """With how many probes in a row bring a replica up, and down."""
        return HealthConfig(
            rise=rise,
            fall=fall,
            streak=self.streak,
            eject_s=self.eject_s,
            slow_start_s=self.slow_start_s,
            eject_share_max=self.eject_share_max,
            panic_share=self.panic_share,
            outlier_factor=self.outlier_factor,
        )
