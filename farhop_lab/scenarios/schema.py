"""The schema of a scenario file: fields, types and ranges, each with a description.

It does not know how the parts refer to each other; `load` does. A field's description is shown as the remedy when the
field is missing or wrong, so it says what to write.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from topology.schema import Doc, Name

KINDS = ("chat", "trees", "agents", "requests", "mooncake", "azure", "burstgpt", "servegen", "log", "sessions")
TRACES = frozenset({"mooncake", "azure", "burstgpt", "servegen", "log", "sessions"})
RECORDED_REGIONS = frozenset({"log", "sessions"})  # traces that may record the region

Share = Annotated[float, Field(ge=0, le=1)]
_Count = Annotated[int, Field(ge=0, le=100_000)]
_PerSecond = Annotated[float, Field(ge=0, le=100_000)]

_SECONDS = "give seconds above 0, up to 604800"
_PLACES = "map regions of the topology to numbers: `{virginia: 40, tokyo: 30}`"


class SiteDoc(Doc):
    """A region's replicas, all alike."""

    gpu: str = Field(description="name an emulated GPU: l4, a100 or h100")
    replicas: int = Field(ge=1, le=10_000, description="give how many, 1 to 10000")


class DayDoc(Doc):
    """How demand goes over a region's day."""

    utc_hours: float = Field(ge=-12, le=14, description="give the time zone, hours from UTC, -12 to 14")
    swing: float = Field(default=8.0, ge=1, le=100, description="give peak over trough, 1 to 100")
    weight: float = Field(default=1.0, ge=0, le=1000, description="give 0 to 1000")


class BurstsDoc(Doc):
    """When requests come within each interval: all within its first `for_s`, at the mean rate that `per_s` says."""

    every_s: float = Field(gt=0, le=86_400, description="give the seconds from one burst's beginning to the next's")
    for_s: float = Field(default=0.0, ge=0, le=86_400, description="give how long each lasts; 0: all at one instant")


class WorkDoc(Doc):
    """One kind of work: what is asked, and by how many clients or how often."""

    kind: Literal[
        "chat", "trees", "agents", "requests", "mooncake", "azure", "burstgpt", "servegen", "log", "sessions"
    ] = Field(description=f"say one of {', '.join(KINDS)}")
    figures: dict[str, Any] = Field(
        default={}, max_length=32, description="map figures of this kind to numbers; docs/measurements lists them"
    )
    tenant: str = Field(default="anywhere", max_length=63, description="name a tenant of the topology")
    clients: dict[Name, _Count] = Field(
        default={}, max_length=256, description=f"closed loop: {_PLACES}, each one client after another"
    )
    per_s: dict[Name, _PerSecond] = Field(
        default={}, max_length=256, description=f"open loop: {_PLACES}, programs begun per second"
    )
    bursts: BurstsDoc | None = Field(
        default=None, description="with per_s: give `{every_s: 60, for_s: 5}`, or leave it out"
    )
    path: str = Field(default="", max_length=4096, description="give the trace's path; relative ones from this file")
    place: Literal["uniform", "zipf", "sun", "recorded"] = Field(
        default="uniform", description="say how sessions of a trace get a region: uniform, zipf, sun or recorded"
    )
    loop: Literal["open", "closed"] = Field(
        default="open", description="log: say open (each request at its moment) or closed (a pause after the answer)"
    )
    since_s: float = Field(default=0.0, ge=0, le=31_536_000, description="give the second of a trace to begin at")
    regions: list[Name] = Field(default=[], max_length=256, description="list the regions a trace's sessions come from")
    speed: float = Field(default=1.0, gt=0, le=1000, description="give how many times faster a trace passes, above 0")
    share: Share = Field(default=1.0, description="give the share of a trace to keep, 0 to 1")


OF_REPLICAS = ("oom", "fast-500", "slow", "stuck", "dead-green", "xid", "pause", "restart", "refuse")
LASTING = (*OF_REPLICAS, "restart-regional", "restart-global", "blackhole", "cut")


class FaultDoc(Doc):
    """A fault or an operator's act, at its time. Kinds in LASTING end after `for_s` (sim.faults)."""

    at_s: float = Field(ge=0, le=604_800, description="give the second at which it happens")
    what: Literal[
        "kill", "revive", "freeze", "heal", "drain", "undrain", "lose_reports",
        "oom", "fast-500", "slow", "stuck", "dead-green", "xid", "pause", "restart", "refuse",
        "restart-regional", "restart-global", "blackhole", "cut",
    ] = Field(
        description=f"say kill, revive, freeze, heal, drain, undrain, lose_reports, {', '.join(LASTING[:-1])} or cut"
    )  # fmt: skip
    region: Name = Field(description="name a region that has a site")
    to: Name | None = Field(default=None, description="freeze, heal, blackhole, cut: name the link's other region")
    replica: Name | None = Field(default=None, description="name the replica: gpu-0, gpu-1, ...")
    for_s: float | None = Field(default=None, gt=0, le=604_800, description=f"{_SECONDS}, or leave it out (drain)")
    share: Share = Field(default=1.0, description="lose_reports: give the share that is lost, 0 to 1")
    factor: float = Field(default=10.0, ge=1, le=1e6, description="slow: give how many times slower, 1 or more")


class WireDoc(Doc):
    """How round-trip times differ from the topology's."""

    jitter: float = Field(default=0.0, ge=0, le=10, description="give the most a way takes longer, as a share of it")
    drift: float = Field(
        default=0.0, ge=0, le=1, description="give how far a round-trip time wanders, as a share of it"
    )
    drift_every_s: float = Field(default=30.0, gt=0, le=86_400, description=_SECONDS)
    lost: Share = Field(default=0.0, description="give the share of reports that never arrives, 0 to 1")


class ObjectiveDoc(Doc):
    """When an answer is good."""

    ttft_ms: float = Field(default=2000.0, gt=0, le=3_600_000, description="give milliseconds above 0")
    tpot_ms: float = Field(default=100.0, gt=0, le=3_600_000, description="give milliseconds above 0")
    declared: bool = Field(default=False, description="say true if clients declare ttft_ms in each request")
    good: Share = Field(default=0.9, description="plan: give the share of answers that must be good, 0 to 1")


class ScenarioDoc(Doc):
    """A whole scenario."""

    name: Name = Field(description="use 1 to 63 of a-z 0-9 . _ -")
    work_name: Name | None = Field(None, description="name the scenario whose clients come here, too")
    about: str = Field(default="", max_length=500, description="say in at most 500 characters what it shows")
    topology: str = Field(default="three-regions", max_length=4096, description="name a ready-made world or a file")
    sites: dict[Name, SiteDoc] = Field(
        min_length=1, max_length=256, description="map regions to replicas: `virginia: {gpu: l4, replicas: 3}`"
    )
    balancers: dict[Name, Annotated[int, Field(ge=0, le=64)]] = Field(
        default={}, max_length=256, description="map regions to numbers of global balancers, 0 to 64; 1 if left out"
    )
    work: list[WorkDoc] = Field(min_length=1, max_length=64, description="list at least one kind of work")
    days: dict[Name, DayDoc] = Field(
        default={}, max_length=256, description="map regions to days, such as `{utc_hours: -6, swing: 8}`"
    )
    day_s: float = Field(default=86_400.0, gt=0, le=604_800, description=f"how long a day lasts here: {_SECONDS}")
    duration_s: float = Field(default=600.0, gt=0, le=604_800, description=_SECONDS)
    warm_up_s: float = Field(default=60.0, ge=0, le=604_800, description="give seconds at the start that do not count")
    timeout_s: float = Field(default=100.0, gt=0, le=3600, description="give how long a client waits, in seconds")
    retries: int = Field(default=0, ge=0, le=10, description="give how often clients ask again by themselves")
    objective: ObjectiveDoc = Field(default=ObjectiveDoc(), description="give `ttft_ms` and `tpot_ms`")
    faults: list[FaultDoc] = Field(default=[], max_length=1024, description="list faults, each with `at_s` and `what`")
    wire: WireDoc = Field(default=WireDoc(), description="give `jitter`, `drift` or `lost`")
    loads: list[Annotated[float, Field(gt=0, le=100)]] = Field(
        default=[1.0], min_length=1, max_length=64, description="list factors of all clients and rates, above 0"
    )
    routers: list[str] = Field(default=["farhop"], min_length=1, max_length=64, description="list routers by name")
    seeds: int = Field(default=3, ge=1, le=1000, description="give how many seeds, 1 to 1000")
