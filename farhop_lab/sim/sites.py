"""What a simulated world is made of: sites with their replicas, small topologies, and the intervals of checks.

Values only; a Site makes its engines when the world is built. Never decides, never draws random numbers.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from farhop.balance.machine import Address
from farhop.balance.model_facts import ModelFacts
from farhop_lab.engine.core.profiles import PROFILES
from farhop_lab.engine.core.sequence import TextModel
from farhop_lab.sim.engines import Gpu, Station
from regional_lb.fleet.view import Replica
from topology.model import Region, Residency, Rule, Tenant, Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from farhop_lab.sim.engines import Engine
    from farhop_lab.sim.timeline import Timeline

MODEL = "llama"


class Reporting(msgspec.Struct, frozen=True, kw_only=True):
    """When regions report. `every_s` None: on each change and every second, as live; otherwise at this interval, all
    aligned.

    `delay_s` is the age of a report when it is sent; `lost` the share (0..1) of reports that never arrive.
    """

    every_s: float | None = None
    delay_s: float = 0.0
    lost: float = 0.0


class Watching(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals of checks and time limits of an attempt, in seconds: the live defaults.

    `ping_jitter` is the most (as a share) that a ping takes longer than the wire.
    """

    probe_s: float = 1.0
    probe_timeout_s: float = 2.0
    scrape_s: float = 0.5
    gpus_s: float = 5.0
    ping_s: float = 1.0
    ping_timeout_s: float = 0.5
    ping_jitter: float = 0.02
    report_age_s: float = 3.0
    settle_s: float = 1.0  # how long a new global balancer accepts no clients (global_lb.app.main), then `warm_s`
    warm_s: float = 2.0
    first_byte_s: float = 480.0  # of a global balancer (global_lb.app.config.OuterLimits), as the next two
    whole_answer_s: float = 630.0
    between_bytes_s: float = 75.0
    engine_first_byte_s: float = 120.0  # of a regional balancer (farhop.relay.upstream.pool), as the next two
    engine_whole_answer_s: float = 600.0
    engine_between_bytes_s: float = 60.0


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """One region's replicas, all alike: what its balancer is configured with, and what each really is."""

    replica: Replica
    engine: Callable[[Timeline], Engine]
    replicas: int = 1

    @property
    def slots(self) -> int:
        """Sequences that run at once in the whole region."""
        return self.replicas * self.replica.slots

    def named(self) -> list[Replica]:
        """The replicas as listed in the region's configuration."""
        replace = msgspec.structs.replace
        return [
            replace(self.replica, name=f"gpu-{n}", address=Address(f"gpu-{n}.sim", 8000)) for n in range(self.replicas)
        ]


def station(
    slots: int,
    service_s: float,
    *,
    first_s: float = 0.02,
    answer_tokens: int = 100,
    replicas: int = 1,
    reported_slots: int | None = None,
) -> Site:
    """A site with fixed service times and `slots` in all, a multiple of `replicas`; the balancer's guesses of speed are
    right.

    Its slots work in parallel, while a machine expects a replica to prefill one prompt after another: keep `first_s`
    times the arrivals a second at one replica well below 1, or the machine sees a backlog that is not there.
    `reported_slots`: what the balancer takes the slots to be, if not `slots`.
    """
    if slots % replicas:
        raise ValueError(f"slots: {slots} cannot be shared evenly by {replicas} replicas; give a multiple")
    reported = slots if reported_slots is None else reported_slots
    replica = Replica(
        name="",
        address=Address("sim", 8000),
        models=frozenset((MODEL,)),
        gpu="station",
        slots=reported // replicas,
        kv_tokens=1_000_000_000,
        prefill_tokens_max=1_000_000,
        prefill_ms_per_token=first_s * 1e3 / 256,
        tpot_ms=(service_s - first_s) * 1e3 / max(1, answer_tokens - 1),
    )
    make = partial(
        Station,
        slots=slots // replicas,
        service_s=service_s,
        first_s=first_s,
        answer_tokens=answer_tokens,
    )
    return Site(replica=replica, engine=make, replicas=replicas)


def gpus(
    profile: str, replicas: int, *, seed: int = 0, answer_tokens_mean: float = 200.0, token_ids: bool = False
) -> Site:
    """A site of emulated GPUs. `token_ids`: they report token ids, so that streams continue at another replica.
    LookupError for a profile that does not exist.
    """
    known = PROFILES.get(profile)
    if known is None:
        raise LookupError(f"profile: {profile!r} is none of {', '.join(sorted(PROFILES))}")
    replica = Replica(
        name="",
        address=Address("sim", 8000),
        models=frozenset((MODEL,)),
        gpu=profile,
        slots=known.sequences_max,
        kv_tokens=known.kv_tokens,
        prefill_tokens_max=known.prefill_tokens_per_step,
        prefill_ms_per_token=known.prefill_ms_per_token,
        tpot_ms=known.decode_floor_ms,
        token_ids=token_ids,
        facts={MODEL: ModelFacts(known.context_tokens)},  # as in its list of models
    )
    make = partial(Gpu, profile=known, text_model=TextModel(MODEL, seed, answer_tokens_mean))
    return Site(replica=replica, engine=make, replicas=replicas)


def flat(
    regions: Sequence[str],
    rtt_ms: float | Mapping[tuple[str, str], float] = 50.0,
    tenants: Mapping[str, Rule] | None = None,
) -> Topology:
    """Regions without countries or hubs: one round-trip time between all pairs, or one for each pair. Tenant `t` may go
    anywhere, unless others are given.
    """
    pairs = [(a, b) for i, a in enumerate(regions) for b in regions[i + 1 :]]
    wires = dict.fromkeys(pairs, rtt_ms) if isinstance(rtt_ms, float | int) else rtt_ms
    rules = tenants if tenants is not None else {"t": Rule(("world",))}
    return Topology(
        "sim",
        1,
        {name: Region(name, name, "xx", frozenset(), 0.0, float(i)) for i, name in enumerate(regions)},
        {name: Tenant(name, residency=Residency(rule)) for name, rule in rules.items()},
        rtt=dict(wires),
    )
