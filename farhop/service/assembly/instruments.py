"""The observation of a balancer's process and its requests: log, metrics, spans, and decisions kept for `farhop
explain`.

Both tiers have the same instruments, each under its own name. Never decides what may be recorded: the law in force
does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farhop.service.observability.decisions import Decisions
from farhop.service.observability.request_telemetry import RequestTelemetry
from farhop.service.observability.workload_recorder import WorkloadRecorder
from farhop.telemetry import logs
from farhop.telemetry.metrics import TierMetrics
from farhop.telemetry.spans import Tracing

if TYPE_CHECKING:
    from random import Random

    from farhop.service.config.process import Process
    from farhop.service.observability.decisions import Reasons
    from farhop.service.process.clock import Clock


_LOG_EVERY_S = 10.0  # of what goes on being wrong


class Instruments:
    """Those of one process of this `tier`; `decision` is what its decisions are called on spans."""

    def __init__(self, tier: str, decision: str, config: Process, clock: Clock, rng: Random, reasons: Reasons) -> None:
        self.logger = logs.get(tier)
        self.log = logs.Throttled(self.logger, _LOG_EVERY_S, clock.now)
        self.metrics = TierMetrics(tier, config.region, config.instance)
        self.decisions = Decisions()
        self.tracing = Tracing(f"farhop-{tier}", config.region, config.instance)
        for problem in self.tracing.problems:
            self.log.warning("telemetry", problem, problem=problem)
        self.recorder = WorkloadRecorder(config.region)
        self.telemetry = RequestTelemetry(
            f"farhop.{tier}",
            f"farhop.{tier}.{decision}",
            tracing=self.tracing,
            metrics=self.metrics,
            decisions=self.decisions,
            clock=clock,
            rng=rng,
            reasons=reasons,
            traced_per_s_max=config.limits.traced_per_s_max,
            recorder=self.recorder,
        )
