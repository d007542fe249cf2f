"""The regional balancer's gauges, read from its machine at each scrape: queue, replicas, gateways.

Never counts per request (TierMetrics does), and never changes what it reads.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from farhop.balance.health.replica import Mode

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.service.tokenization.tokenizer import Tokenizers
    from farhop.telemetry.metrics import TierMetrics
    from regional_lb.picker.server import PickerServer
    from regional_lb.scheduler.flow import RegionalFlow


def observe_flow(metrics: TierMetrics, flow: RegionalFlow, clock: Callable[[], float]) -> None:
    """The queue, what is known of caches, and the replicas."""
    gauge, counter = metrics.gauge, metrics.counter
    gauge("queued_requests", "Requests that wait here.", lambda: float(len(flow.queue)))
    gauge("queued_tokens", "Prompt tokens that wait here.", lambda: flow.queue.tokens)
    gauge("prefix_trie_nodes", "Nodes of the prefix trie.", lambda: float(flow.replicas.trie.nodes))
    gauge("kv_blocks", "Blocks of KV cache that replicas reported.", lambda: float(len(flow.replicas.blocks)))
    gauge("kv_exact_replicas", "Replicas whose cache is known wholly.", lambda: float(flow.replicas.blocks.exact))
    counter("kv_blocks_ignored", "Reported blocks that made no sense.", lambda: flow.replicas.blocks.ignored, "reason")
    gauge("replica_in_flight", "Requests at each replica.", partial(_in_flight, flow), "replica")
    gauge(
        "replica_kv_cache_usage_ratio",
        "Share of its KV cache in use, by its own metrics.",
        partial(_kv_shares, flow),
        "replica",
    )
    usable = partial(_usable_shares, flow, clock)
    gauge("replica_usable_ratio", "Share of its slots that each replica may use; 0: none.", usable, "replica")
    gauge("replicas", "Replicas by state.", lambda: flow.replicas.health_tracker.states(clock()), "state")
    counter("replica_ejections", "Ejections of replicas.", flow.replicas.health_tracker.ejections.copy, "reason")
    ready = partial(_ready_replicas, flow, clock)
    gauge("ready_replicas", "Replicas that can take work, by model.", ready, "model")
    gauge("desired_replicas", "Replicas that should be there.", partial(_desired_replicas, flow), "model")
    gauge("models_by_mode", "Models by how their replicas may be used.", partial(_modes, flow, clock), "mode")


def observe_tokenizers(metrics: TierMetrics, flow: RegionalFlow, tokenizers: Tokenizers) -> None:
    """Where prompts are read as tokens: how many were, and where engines count others."""
    counter = metrics.counter
    counter("tokenized_prompts", "Prompts read as tokens.", lambda: float(tokenizers.prompts))
    counter("untokenized_prompts", "Prompts that could not be read as tokens.", lambda: tokenizers.unread, "reason")
    counter(
        "miscounted_prompts",
        "Prompts for which an engine counts other tokens than this balancer.",
        lambda: flow.replicas.mirror.guard.miscounts,
    )
    counter(
        "mispredicted_prompts",
        "Prompts of which an engine found other tokens cached than its KV events had it hold.",
        lambda: flow.replicas.mirror.guard.mispredictions,
    )


def observe_picker(metrics: TierMetrics, picker: PickerServer, failing_open: Callable[[], list[str]]) -> None:
    """Metrics of the picker, which gateways ask."""
    gauge, counter = metrics.gauge, metrics.counter
    gauge("picker_streams", "Requests that gateways have open here.", lambda: float(picker.streams))
    counter("picker_moved", "Requests that a gateway sent to a later endpoint of their list.", lambda: picker.moved)
    counter("picker_misled", "Requests of gateways that cannot be served.", lambda: dict(picker.violations), "reason")
    gauge(
        "picker_fails_open",
        "1 if a gateway is said to send requests past a picker that does not answer.",
        lambda: float(picker.fails_open(failing_open())),
    )


def _in_flight(flow: RegionalFlow) -> dict[str, float]:
    return {name: float(flow.replicas.ledger.load(name).in_flight) for name in flow.replicas.view.replicas}


def _kv_shares(flow: RegionalFlow) -> dict[str, float]:
    samples = ((name, replica.sample) for name, replica in flow.replicas.view.replicas.items())
    return {name: sample.kv_usage for name, sample in samples if sample is not None and sample.kv_usage is not None}


def _usable_shares(flow: RegionalFlow, clock: Callable[[], float]) -> dict[str, float]:
    now, tracker = clock(), flow.replicas.health_tracker
    return {name: tracker.offered(name, now) for name in tracker.health}


def _desired_replicas(flow: RegionalFlow) -> dict[str, float]:
    return {model: float(replicas) for model, replicas in flow.scaling.desired().items()}


def _ready_replicas(flow: RegionalFlow, clock: Callable[[], float]) -> dict[str, float]:
    now = clock()
    return {model: float(len(flow.eligibility.serving_table(model, now))) for model in flow.replicas.view.by_model}


def _modes(flow: RegionalFlow, clock: Callable[[], float]) -> dict[str, float]:
    now = clock()
    modes = [flow.replicas.mode(model, now) for model in flow.replicas.view.by_model]
    return {mode: float(modes.count(mode)) for mode in (Mode.NORMAL, Mode.PANIC, Mode.ALL_DOWN)}
