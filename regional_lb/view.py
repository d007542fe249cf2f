"""What the regional tier knows of its replicas: who there is, swapped whole, and what each last said of itself.

A swap is for who comes and goes; a sample renews one replica's entry (by the fleet, and nobody else), since a thousand
replicas say something twice a second. Never holds what must survive a swap: reservations are in the ledger, health and
speed in the flow.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from farhop.balance.machine import Address, Event


class Sample(msgspec.Struct, frozen=True):
    """One scrape of a replica's metrics. `at` is when it was received here, monotonic seconds.

    `waiting` and `running` are requests; `kv_usage` is a share 0..1; `kv_tokens` the whole cache, None if not told.
    """

    at: float
    waiting: int
    running: int
    kv_usage: float
    kv_tokens: int | None = None
    prefix_queries: float = 0.0
    prefix_hits: float = 0.0


class Replica(msgspec.Struct, frozen=True):
    """One engine endpoint. `slots` are sequences it runs at once; `prefill_tokens_max` is how much uncached prompt may
    be on its way to it before more waits here (its own step budget: beyond that its queue would grow).
    `prefill_ms_per_token` and `tpot_ms` are guesses to start from: its speed is measured. `role` prefill: it computes
    prompts for the others, and answers nobody."""

    name: str
    address: Address
    models: frozenset[str]
    gpu: str
    slots: int
    kv_tokens: int
    prefill_tokens_max: int
    prefill_ms_per_token: float
    tpot_ms: float
    usd_per_hour: float = 0.0
    sample: Sample | None = None
    role: Literal["mixed", "prefill", "decode"] = "mixed"


class View(msgspec.Struct, frozen=True):
    """All replicas by name, and the names of those that serve a model, and of those that only prefill for it."""

    replicas: dict[str, Replica]
    by_model: dict[str, tuple[str, ...]]
    prefillers: dict[str, tuple[str, ...]] = {}


def view_of(replicas: list[Replica]) -> View:
    """Index replicas. Names are unique (configuration sees to it)."""
    by_model: dict[str, list[str]] = {}
    prefillers: dict[str, list[str]] = {}
    for replica in replicas:
        index = prefillers if replica.role == "prefill" else by_model
        for model in sorted(replica.models):
            index.setdefault(model, []).append(replica.name)
    return View(
        {r.name: r for r in replicas},
        {model: tuple(names) for model, names in by_model.items()},
        {model: tuple(names) for model, names in prefillers.items()},
    )


class ViewSwapped(Event, frozen=True):
    """Replicas came or went. Those whose sample is None keep the one they had."""

    view: View


class ReplicaSampled(Event, frozen=True):
    """A replica said how it is doing."""

    target: str
    sample: Sample


class ReplicaProbed(Event, frozen=True):
    """An active probe of a replica came back. `fault`: what is broken in its hardware, "" if nothing is known to be."""

    target: str
    ok: bool
    fault: str = ""
