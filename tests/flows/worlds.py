"""Small worlds for the machines: three regions under three laws, replicas and capacities with round numbers."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import TYPE_CHECKING, Any

from farhop.balance.estimate.estimates import Estimates
from farhop.balance.estimate.unacknowledged import UnacknowledgedLoad
from farhop.balance.health.replica import HealthConfig
from farhop.balance.ledger import Reservation
from farhop.balance.machine import Address, Command, Redirect, Request
from farhop.balance.prefix.chain import chain, seed_of
from farhop.store.documents.report import COUNT_LIMIT, ModelReport
from global_lb.fleet import view as global_view
from global_lb.fleet.table import Candidates, Price, Table, row_of
from global_lb.routing import flow as global_flow
from global_lb.routing.routes import Routes
from regional_lb.fleet import view as regional_view
from regional_lb.fleet.replicas import Replicas
from regional_lb.scheduler import flow as regional_flow
from regional_lb.scheduler.queue import QueueConfig
from topology.law import Law
from topology.model import Key, Region, Residency, Rule, Tenant, Topology

if TYPE_CHECKING:
    from farhop_lab.sim.measures import Measures
    from farhop_lab.sim.world import World

MODEL = "llama"
OTHER_MODEL = "qwen"
SEED = seed_of(MODEL, "", "", "")
WORLD = Rule(allow=("world",))

REGIONS = {
    "frankfurt": Region("frankfurt", "Frankfurt", "DE", frozenset({"eu"}), 50.1, 8.7, ("https://frankfurt.example",)),
    "london": Region("london", "London", "GB", frozenset({"uk"}), 51.5, -0.1, ("https://london.example",)),
    "tokyo": Region("tokyo", "Tokyo", "JP", frozenset({"apac"}), 35.7, 139.7, ("https://tokyo.example",)),
}
RTT_MS = {"frankfurt": 12.0, "london": 1.0, "tokyo": 220.0}  # from London


def until_concluded(world: World, at_least: float, at_most: float) -> Measures:
    """Let time pass until nobody is left of those who came: a world at rest goes on with its reports and its pings."""
    measures = world.run(at_least)
    while measures.open and world.now < at_most:
        measures = world.run(min(at_most, world.now + 1.0))
    return measures


def law(epoch: int = 1, **rules: Rule | Residency) -> Law:
    """Tenants by name. `anyone` may go anywhere, `european` to eu and uk, `german` to DE, unless said otherwise."""
    known: dict[str, Rule | Residency] = {
        "anyone": WORLD,
        "other": WORLD,
        "european": Rule(allow=("eu", "uk")),
        "german": Rule(allow=("DE",)),
        "lost": Rule(allow=("atlantis",)),
        **rules,
    }
    tenants = {
        name: Tenant(
            name,
            keys=(Key("front", f"{n:064x}"), Key("home", f"{n + 1000:064x}", within=("uk",))),
            residency=rule if isinstance(rule, Residency) else Residency(processing=rule),
        )
        for n, (name, rule) in enumerate(known.items())
    }
    tenants["stateless"] = Tenant("stateless")
    return Law(Topology("test", epoch, REGIONS, tenants))


def replicas_of(*replicas: regional_view.Replica, reserved: Iterable[Reservation] = ()) -> Replicas:
    """These replicas, with what is under way at them."""
    known = Replicas(HealthConfig(), Estimates())
    known.adopt(regional_view.view_of(list(replicas)))
    for n, reservation in enumerate(reserved):
        known.ledger.reserve(f"q{n}", reservation)
    return known


def text(name: str, n_bytes: int) -> bytes:
    """A prompt of this size that shares nothing with another name's."""
    line = f"{name} prefix hello. ".encode()
    return (line * (n_bytes // len(line) + 1))[:n_bytes]


def request(request_id: str, prompt_bytes: int = 1024, *, prefix: str = "", **fields: Any) -> Request:
    """A streaming request of `anyone` with a minute to live; `prefix` names its text, its id by default."""
    return Request(
        id=request_id,
        **{
            "tenant": "anyone",
            "model": MODEL,
            "prompt_bytes": prompt_bytes,
            "body_bytes": prompt_bytes + 200,
            "chain": chain(text(prefix or request_id, prompt_bytes), SEED),
            "deadline": 60.0,
            "max_tokens": 100,
            "stream": True,
            **fields,
        },
    )


# -- the regional tier


def replica(name: str, **fields: Any) -> regional_view.Replica:
    """Two slots, 10,000 tokens of KV cache, 2,000 tokens of prefill at a time, 0.1 ms and 20 ms per token."""
    return regional_view.Replica(
        name=name,
        **{
            "address": Address(f"{name}.example", 8000),
            "models": frozenset({MODEL}),
            "gpu": "L4",
            "slots": 2,
            "kv_tokens": 10_000,
            "prefill_tokens_max": 2_000,
            "prefill_ms_per_token": 0.1,
            "tpot_ms": 20.0,
            **fields,
        },
    )


def swapped(*replicas: regional_view.Replica) -> regional_view.ViewSwapped:
    return regional_view.ViewSwapped(regional_view.view_of(list(replicas)))


def regional(
    *replicas: regional_view.Replica,
    up: bool = True,
    weights: dict[str, float] | None = None,
    under: Law | None = None,
    seed: int = 7,
    **config: Any,
) -> regional_flow.RegionalFlow:
    """London's machine with these replicas, all of them proven by a probe unless `up` is False. `queue_*` are the
    queue's configuration."""
    bounds = {name.removeprefix("queue_"): config.pop(name) for name in tuple(config) if name.startswith("queue_")}
    settings = regional_flow.FlowConfig(region="london", queue=QueueConfig(**bounds), **config)
    flow = regional_flow.RegionalFlow(settings, under or law(), Random(seed), lambda t: (weights or {}).get(t, 1.0))
    flow.handle(swapped(*replicas), 0.0)
    for one in replicas if up else ():
        flow.handle(regional_view.ReplicaProbed(one.name, True), 0.0)
    return flow


# -- the global tier


def capacity(**fields: Any) -> ModelReport:
    """Of one model at one balancer that takes whatever comes from other regions."""
    return ModelReport(
        **{
            "model": MODEL,
            "replicas_total": 2,
            "slots_total": 0,
            "kv_tokens_total": 0,
            "kv_tokens_free": 0,
            "usable_share": 0.0,
            "headroom_foreign_tokens": COUNT_LIMIT,
            "wait_ms": 5.0,
            "prefill_ms_per_token": 0.1,
            "tpot_ms": 20.0,
            "bytes_per_token": 4.0,
            "replicas_ready": 2,
            "slots_free": 16,
            **fields,
        }
    )


def instance(region: str, name: str = "a", **fields: Any) -> global_view.Instance:
    """One balancer of a region; capacity fields are those of its only model."""
    own = {"incarnation", "draining", "accepted", "models", "received_at", "client_url"}
    about = {k: v for k, v in fields.items() if k in own}
    models = {MODEL: capacity(**{k: v for k, v in fields.items() if k not in own})}
    return global_view.Instance(
        name=name,
        region=region,
        tier=Address(f"{region}-{name}.example", 9000),
        clock_offset_ms=0.0,
        **{"received_at": 0.0, "incarnation": 1, "draining": False, "accepted": 0.0, "models": models, **about},
    )


def seen(*instances: global_view.Instance, rtt_ms: dict[str, float] | None = None) -> global_view.ViewSwapped:
    """A view of these instances, grouped by region."""
    regions: dict[str, list[global_view.Instance]] = {}
    for one in instances:
        regions.setdefault(one.region, []).append(one)
    wire = RTT_MS | (rtt_ms or {})
    return global_view.ViewSwapped(
        global_view.View({r: global_view.Region(r, wire.get(r, 50.0), tuple(i)) for r, i in regions.items()})
    )


def everywhere(**fields: Any) -> global_view.ViewSwapped:
    """All three regions with one instance each and the same capacity."""
    return seen(*(instance(region, **fields) for region in REGIONS))


def candidates(
    asked: Request, output_tokens: float = 100.0, here: str = "london", /, **regions: dict[str, Any]
) -> Candidates:
    """These regions with what is given of each: `rtt_ms`, `cache_hit_calibration`, `rates`, `depth`,
    `unacknowledged_bytes`, `usd_per_gpu_hour`, `egress_usd_per_gb`, and their capacity's fields."""
    about = {
        "rtt_ms",
        "cache_hit_calibration",
        "rates",
        "depth",
        "unacknowledged_bytes",
        "usd_per_gpu_hour",
        "egress_usd_per_gb",
    }
    table = Table(tuple(sorted(regions)), here)
    prices = {
        name: Price(one.get("usd_per_gpu_hour", 0.0), one.get("egress_usd_per_gb", 0.0))
        for name, one in regions.items()
    }
    rows = []
    for name, one in regions.items():
        unacknowledged = UnacknowledgedLoad()
        if "unacknowledged_bytes" in one:
            unacknowledged.sent(one["unacknowledged_bytes"])
        row = row_of(
            capacity(**{key: value for key, value in one.items() if key not in about}),
            unacknowledged,
            rtt_ms=one.get("rtt_ms", RTT_MS.get(name, 50.0)),
            cache_hit_calibration=one.get("cache_hit_calibration", 1.0),
            rates=one.get("rates", (0.0, 0.0, 0.0)),
            price=prices[name],
            price_here=None if name == here else prices.get(here, Price()),
        )
        rows.append((name, row))
    table.write(rows)
    made = Candidates(
        asked, output_tokens, table.names, table.at, table.block, table.sent, table.here, table.token_least_ms
    )
    made.hits({name: one["depth"] for name, one in regions.items() if one.get("depth")})
    made.moving, made.spill_ms = bool(table.moving), 300.0
    return made


def report_in(flow: global_flow.GlobalFlow, regions: Iterable[str], now: float) -> None:
    """These regions report and have their channel."""
    for region in regions:
        flow.handle(global_view.ChannelChanged(region, True), now)
        flow.handle(global_view.RegionReported(region), now)


def worldwide(
    *,
    patience_s: float = 0.0,
    under: Law | None = None,
    view: global_view.ViewSwapped | None = None,
    seed: int = 7,
    routes: Routes | None = None,
    **config: Any,
) -> global_flow.GlobalFlow:
    """London's global balancer; every region reports, idle, at 0.0."""
    settings = global_flow.FlowConfig(region="london", **config)
    flow = global_flow.GlobalFlow(settings, under or law(), Random(seed), lambda _tenant: patience_s, routes)
    event = view or everywhere()
    flow.handle(event, 0.0)
    report_in(flow, event.view.regions, 0.0)
    return flow


def sent_elsewhere(commands: list[Command]) -> str | None:
    """The region that a client is redirected to; None if it is not."""
    (last, *_) = commands[::-1]
    return last.forward.target if isinstance(last, Redirect) and last.forward is not None else None
