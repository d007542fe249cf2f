"""Bounds and paces of a regional balancer: its queue, guests, how often it looks. Never knows a replica."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from farhop.shell.config import Part, Seconds


class Queue(Part):
    """Bounds of what waits here. A queue that was not empty for `stands_s` is no burst: then `standing_wait_s` is all
    that anybody waits, or everybody would wait `wait_s`."""

    requests_max: Annotated[int, Field(ge=0, le=1_000_000)] = 1024
    tokens_max: Annotated[int, Field(ge=1, le=1_000_000_000_000)] = 4_000_000
    wait_s: Seconds = 30.0
    stands_s: Seconds = 2.0
    standing_wait_s: Seconds = 0.5
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
    models_s: Seconds = 30.0
    timeout_s: Seconds = 2.0
    rise: Annotated[int, Field(ge=1, le=1000)] = 2
    fall: Annotated[int, Field(ge=1, le=1000)] = 3
