"""Which policy decides for which model: the table of all policies, and those in force. Never scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from farhop.balance.machine import Event
from farhop.config import Part
from regional_lb.scheduler.policy.latency import LeastLatency
from regional_lb.scheduler.policy.load import LeastLoad, PowerOfTwo
from regional_lb.scheduler.policy.predictive import Predictive
from regional_lb.scheduler.policy.ring import ConsistentHash, PrefixHash, SessionHash
from regional_lb.scheduler.policy.round_robin import RoundRobin, WeightedRoundRobin
from regional_lb.scheduler.policy.uniform import Uniform, WeightedRandom

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from regional_lb.scheduler.policy.base import Policy


class PolicyConfig(Part):
    """How replicas are chosen: a policy's name alone, or with options, each read by the policies that it concerns.

    `load_factor`: how far above the mean a replica's load may go. `prefix_bytes`: how much of a prompt's beginning
    keeps prompts together. `weights`: by a replica's name; without any, measured speed.
    """

    name: str = "predictive"
    load_factor: Annotated[float, Field(ge=1, le=100)] = 1.25
    prefix_bytes: Annotated[int, Field(ge=256, le=4 * 1024 * 1024)] = 1024
    weights: dict[str, Annotated[float, Field(ge=0.001, le=1e6)]] = Field(default_factory=dict, max_length=4096)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        if isinstance(given, str):
            given = {"name": given}
        if not isinstance(given, dict):
            return given
        name = given.get("name", "predictive")
        if not isinstance(name, str) or name not in KNOWN:
            raise ValueError(f"no policy {str(name)[:64]!r}; known are {', '.join(KNOWN)}")
        for option in given:
            if option != "name" and option not in OPTIONS.get(name, ()):
                takes = ", ".join(OPTIONS.get(name, ())) or "none"
                raise ValueError(f"no option {str(option)[:64]!r} of policy {name}; its options: {takes}")
        return given


KNOWN: dict[str, Callable[[PolicyConfig], Policy]] = {
    Predictive.name: lambda _: Predictive(),
    PrefixHash.name: lambda it: PrefixHash(it.load_factor, it.prefix_bytes),
    LeastLoad.name: lambda _: LeastLoad(),
    LeastLatency.name: lambda _: LeastLatency(),
    PowerOfTwo.name: lambda _: PowerOfTwo(),
    RoundRobin.name: lambda _: RoundRobin(),
    WeightedRoundRobin.name: lambda it: WeightedRoundRobin(it.weights),
    Uniform.name: lambda _: Uniform(),
    WeightedRandom.name: lambda it: WeightedRandom(it.weights),
    ConsistentHash.name: lambda _: ConsistentHash(),
    SessionHash.name: lambda it: SessionHash(it.load_factor),
}
OPTIONS = {PrefixHash.name: ("load_factor", "prefix_bytes"), SessionHash.name: ("load_factor",)} | dict.fromkeys(
    (WeightedRoundRobin.name, WeightedRandom.name), ("weights",)
)


def made(config: PolicyConfig) -> Policy:
    """The policy, fresh. KeyError for a name that is not KNOWN."""
    return KNOWN[config.name](config)


class PoliciesChanged(Event, frozen=True):
    """By model, what goes before the configuration from now on; "" is every model without one of its own."""

    choices: dict[str, PolicyConfig]


class Policies:
    """The policies in force: as configured ("" is for all models without one of their own), or as changed at work.
    `wants_session`: whether any of them asks for a request's session."""

    def __init__(self, configured: Mapping[str, PolicyConfig] | None = None) -> None:
        self._configured = {"": PolicyConfig(), **(configured or {})}
        self._changes: Mapping[str, PolicyConfig] = {}
        self._choices: dict[str, PolicyConfig] = {}
        self._by_model: dict[str, Policy] = {}
        self._names: tuple[str, ...] = ()
        self.override({})

    def of(self, model: str) -> Policy:
        """The policy for a model."""
        return self._by_model.get(model) or self._default

    def adopt(self, names: tuple[str, ...]) -> None:
        """See Policy.adopt."""
        self._names = names
        for policy in self._by_model.values():
            policy.adopt(names)

    def configure(self, configured: Mapping[str, PolicyConfig]) -> None:
        """From now on these are what is configured; what goes before them goes on doing so."""
        self._configured = {"": PolicyConfig(), **configured}
        self.override(self._changes)

    def override(self, choices: Mapping[str, PolicyConfig]) -> None:
        """From now on these go before what is configured, and nothing else does. One not heard of till now begins
        with nothing counted; one that stays goes on."""
        self._changes = choices
        chosen = {**self._configured, **choices}
        kept = {model: self._by_model[model] for model, choice in chosen.items() if self._choices.get(model) == choice}
        fresh = {model: made(choice) for model, choice in chosen.items() if model not in kept}
        for policy in fresh.values():
            policy.adopt(self._names)
        self._choices, self._by_model = chosen, {**fresh, **kept}
        self._default = self._by_model[""]
        self.wants_session = any(policy.wants_session for policy in self._by_model.values())

    def status(self) -> dict[str, str]:
        """The names of those in force, by model; "" for all others."""
        return {model: self._by_model[model].name for model in sorted(self._by_model)}
