"""How many replicas of each model this region should have for its own load: the signal that autoscalers follow.

Computed once every LOOK_S, however often it is read; farhop.balance.scaling has the arithmetic. Never starts or stops a
replica, and never reads a request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, model_validator

from farhop.balance.scaling import DesiredReplicas, ScalingBounds
from farhop.config import Part
from regional_lb.fleet.table import TOTAL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regional_lb.fleet.replicas import Replicas
    from regional_lb.scheduler.eligibility import Eligibility
    from regional_lb.scheduler.wait_estimate import WaitEstimate

LOOK_S = 1.0


class ScalingConfig(Part):
    """Bounds and timing of a model's scaling signal. `target_share`: of a replica's slots or KV cache, how much is
    to be used. `spare_replicas`: how many may be lost and the rest still stays within it. `warm_up_s`: how long a new
    replica takes until it serves. `down_after_s`: for how long fewer must do before fewer are asked for."""

    replicas_min: Annotated[int, Field(ge=0, le=100_000)] = 1
    replicas_max: Annotated[int, Field(ge=1, le=100_000)] = 1024
    target_share: Annotated[float, Field(gt=0, le=1)] = 0.7
    spare_replicas: Annotated[int, Field(ge=0, le=1000)] = 1
    warm_up_s: Annotated[float, Field(ge=0, le=86_400)] = 120.0
    down_after_s: Annotated[float, Field(ge=0, le=86_400)] = 300.0

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.replicas_min > self.replicas_max:
            raise ValueError(
                f"replicas_min {self.replicas_min} is above replicas_max {self.replicas_max}: set it to that or less"
            )
        return self

    @property
    def bounds(self) -> ScalingBounds:
        """For the arithmetic."""
        return ScalingBounds(**self.model_dump())


class Scaling:
    """See the module's docstring. `config` is for all models but those of `by_model`."""

    def __init__(
        self,
        replicas: Replicas,
        eligibility: Eligibility,
        wait_estimate: WaitEstimate,
        config: ScalingConfig,
        by_model: Mapping[str, ScalingConfig],
    ) -> None:
        self._replicas, self._eligibility, self._wait_estimate = replicas, eligibility, wait_estimate
        self._config, self._by_model = config, by_model
        self._signals: dict[str, DesiredReplicas] = {}
        self._due = 0.0

    def configure(self, config: ScalingConfig, by_model: Mapping[str, ScalingConfig]) -> None:
        """By these from now on."""
        self._config, self._by_model = config, by_model
        for model, signal in self._signals.items():
            signal.configure(self._bounds(model))

    def _bounds(self, model: str) -> ScalingBounds:
        return self._by_model.get(model, self._config).bounds

    def look(self, now: float) -> None:
        """See how things are, if it is time to."""
        if now < self._due:
            return
        self._due = now + LOOK_S
        models = self._replicas.view.by_model
        for gone in self._signals.keys() - models.keys():
            del self._signals[gone]
        for model in models:
            load, present = self.load(model, now), len(self._eligibility.serving_table(model, now))
            signal = self._signals.get(model)
            if signal is None:
                if not load and not present:
                    continue  # no replica has been probed yet: no reason to remove any
                signal = self._signals[model] = DesiredReplicas(self._bounds(model))
            signal.observe(load, present, now)

    def load(self, model: str, now: float) -> float:
        """Requests under way and waiting, at all balancers of the region, in replicas: by slots or by KV cache,
        whichever is more."""
        replicas = [self._replicas.view.replicas[name] for name in self._replicas.view.by_model[model]]
        able, estimate = self._eligibility.serving_table(model, now), self._wait_estimate
        under_way = float(TOTAL(able.in_flight))
        wanted = under_way + estimate.queued(model) + estimate.queued_elsewhere(model)
        if not wanted or not replicas:
            return 0.0
        by_slots = wanted * len(replicas) / max(1, sum(replica.slots for replica in replicas))
        kv_tokens = sum(replica.kv_tokens for replica in replicas)
        if not under_way or not kv_tokens:
            return by_slots
        taken = float(TOTAL(able.kv_taken_tokens)) * wanted / under_way  # waiting requests count as much as the others
        return max(by_slots, taken * len(replicas) / kv_tokens)

    def desired(self) -> dict[str, int]:
        """How many replicas should be there, by model, within the bounds."""
        return {model: signal.desired for model, signal in self._signals.items()}

    def reported(self, model: str) -> dict[str, Any]:
        """What the region's report says of it (ModelReport)."""
        bounds, signal = self._by_model.get(model, self._config), self._signals.get(model)
        bounds_only = {"replicas_min": bounds.replicas_min, "replicas_max": bounds.replicas_max}
        return (
            bounds_only
            if signal is None
            else {**bounds_only, "load_replicas": signal.load, "replicas_needed": signal.needed}
        )

    def status(self) -> dict[str, dict[str, float]]:
        """The state as a JSON-ready value, for operators."""
        return {
            model: {
                "desired": signal.desired,
                "needed": signal.needed,
                "load_replicas": signal.load,
                "min": signal.bounds.replicas_min,
                "max": signal.bounds.replicas_max,
            }
            for model, signal in self._signals.items()
        }
