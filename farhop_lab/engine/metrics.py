"""/metrics with vLLM's names, labels and types, so that a reader of vLLM's page can read this one.

Counters and gauges are read from the core at scrape time; only the histograms are kept here, since a scrape cannot
recover them. Observing costs a bisection: it happens for every token.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from farhop_lab.engine.core.scheduler import FINISHED_REASONS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from farhop_lab.engine.core.scheduler import EngineCore

# Bucket bounds in seconds, as vLLM has them.
_TTFT_S: tuple[float, ...] = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
)
_TTFT_S += (80.0, 160.0, 640.0, 2560.0)
_ITL_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_REQUEST_S: tuple[float, ...] = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
)
_REQUEST_S += (960.0, 1920.0, 7680.0)


class Durations:
    """A histogram of seconds."""

    __slots__ = ("bounds_s", "counts", "sum_s")

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self.bounds_s = bounds_s
        self.counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration; a bucket includes its bound."""
        self.counts[bisect_left(self.bounds_s, seconds)] += 1
        self.sum_s += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """(bound, count up to it) in the exposition's form, ending with +Inf."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self.bounds_s), "+Inf"), self.counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets


class Observations:
    """What clients of one replica experienced, measured when the answer is sent."""

    __slots__ = ("e2e", "itl", "queue", "ttft")

    def __init__(self) -> None:
        self.ttft = Durations(_TTFT_S)
        self.itl = Durations(_ITL_S)
        self.e2e = Durations(_REQUEST_S)
        self.queue = Durations(_REQUEST_S)


class _VllmCollector(Collector):
    def __init__(self, core: EngineCore, observations: Observations, model: str) -> None:
        self._core = core
        self._observations = observations
        self._labels = {"model_name": model, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._adapters()
        yield from self._counters()
        seen = self._observations
        for name, about, durations in (
            ("time_to_first_token_seconds", "Histogram of time to first token in seconds.", seen.ttft),
            ("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", seen.itl),
            ("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", seen.e2e),
            ("request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", seen.queue),
        ):
            family = HistogramMetricFamily(f"vllm:{name}", about, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), durations.cumulative(), durations.sum_s)
            yield family

    def _gauges(self) -> Iterator[Metric]:
        core = self._core
        config = {
            "block_size": str(core.profile.block_tokens),
            "cache_dtype": "auto",
            "enable_prefix_caching": "True",
            "gpu_memory_utilization": "0.9",
            "num_gpu_blocks": str(core.kv.capacity),
            "prefix_caching_hash_algo": "xxhash",
        }
        labelled = self._labels
        for name, about, value, labels in (
            ("num_requests_running", "Number of requests in model execution batches.", core.running, labelled),
            ("num_requests_waiting", "Number of requests waiting to be processed.", core.waiting, labelled),
            ("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", core.kv.usage, labelled),
            ("cache_config_info", "Information of the LLMEngine CacheConfig", 1, config | {"engine": "0"}),
        ):
            family = GaugeMetricFamily(f"vllm:{name}", about, labels=list(labels))
            family.add_metric(list(labels.values()), value)
            yield family

    def _adapters(self) -> Iterator[Metric]:
        """As in vLLM: all in labels, and the time as the value, by which the latest line is known."""
        core = self._core
        if not core.adapters.names:
            return
        labels = {
            "max_lora": str(core.adapters.most),
            "running_lora_adapters": ",".join(core.adapters_of(running=True)),
            "waiting_lora_adapters": ",".join(core.adapters_of(running=False)),
        }
        family = GaugeMetricFamily("vllm:lora_requests_info", "Running stats on lora requests.", labels=list(labels))
        family.add_metric(list(labels.values()), time.time())
        yield family

    def _counters(self) -> Iterator[Metric]:
        counters = self._core.counters
        for name, about, value in (
            ("prefix_cache_queries", "Prefix cache queries, in number of queried tokens.", counters.prefix_queries),
            ("prefix_cache_hits", "Prefix cache hits, in number of cached tokens.", counters.prefix_hits),
            ("num_preemptions", "Cumulative number of preemption from the engine.", counters.preemptions),
            ("prompt_tokens", "Number of prefill tokens processed.", counters.prompt_tokens),
            ("generation_tokens", "Number of generation tokens processed.", counters.generation_tokens),
        ):
            family = CounterMetricFamily(f"vllm:{name}", about, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), value)
            yield family
        about = "Count of successfully processed requests."
        family = CounterMetricFamily("vllm:request_success", about, labels=[*self._labels, "finished_reason"])
        for reason in FINISHED_REASONS:
            family.add_metric([*self._labels.values(), reason], counters.finished[reason])
        yield family


class Exposition:
    """One replica's /metrics page."""

    def __init__(self, core: EngineCore, observations: Observations, model: str) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_VllmCollector(core, observations, model))

    def page(self) -> bytes:
        """The text of the page, in Prometheus' text format 0.0.4."""
        return generate_latest(self._registry)
