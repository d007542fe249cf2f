"""Bounds and paces of a regional balancer: its queue, guests, how often it looks. Never knows a replica."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from farhop.shell.config import Part, Seconds


class Queue(Part):
    """Bounds of what waits here. Where whoever is the oldest has waited longer than `standing_wait_s` for `stands_s`
    on end, more comes than is served: then that is all that anybody waits, or everybody would wait `wait_s`."""

    requests_max: Annotated[int, Field(ge=0, le=1_000_000)] = 1024
    tokens_max: Annotated[int, Field(ge=1, le=1_000_000_000_000)] = 4_000_000
    wait_s: Seconds = 30.0
    stands_s: Seconds = 2.0
    standing_wait_s: Seconds = 3.0
    starvation_s: Seconds = 10.0


class Foreign(Part):
    """Work from other regions: what share is kept from it, what of that where nobody else would take it, and when a
    promised time to first token is broken."""

    reserve_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    last_resort_reserve_share: Annotated[float, Field(ge=0, le=1)] = 0.05
    promise_factor: Annotated[float, Field(ge=1, le=1000)] = 2.0
    promise_slack_ms: Annotated[float, Field(ge=0, le=3_600_000)] = 500.0

    @model_validator(mode="after")
    def _last_resort_is_a_part(self) -> Self:
        if self.last_resort_reserve_share > self.reserve_share:
            raise ValueError(
                f"last_resort_reserve_share {self.last_resort_reserve_share:g} is above reserve_share "
                f"{self.reserve_share:g}: set it to that or less, 0 to keep nothing from guests with nowhere else to go"
            )
        return self


class Watch(Part):
    """How often replicas are looked at, and when they count as down. Seconds, and counts in a row."""

    probe_s: Seconds = 1.0
    scrape_s: Seconds = 0.5
    gpus_s: Seconds = 5.0
    models_s: Seconds = 30.0
    timeout_s: Seconds = 2.0
    rise: Annotated[int, Field(ge=1, le=1000)] = 2
    fall: Annotated[int, Field(ge=1, le=1000)] = 3
