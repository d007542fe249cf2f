"""Which policy decides for which model: the table of all policies, and those in force. Never scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farhop.balance.machine import Event
from regional_lb.policy.chance import Uniform, WeightedRandom
from regional_lb.policy.latency import LeastLatency
from regional_lb.policy.load import LeastLoad, PowerOfTwo
from regional_lb.policy.predictive import Predictive
from regional_lb.policy.ring import ConsistentHash, Prefix, Session
from regional_lb.policy.turns import RoundRobin, WeightedRoundRobin

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from regional_lb.policy.base import Policy


class Choice(msgspec.Struct, frozen=True):
    """A policy by name, and options: each is read by the policies it concerns.

    `load_factor`: how far above the mean a replica's load may go. `prefix_bytes`: how much of a prompt's beginning
    keeps prompts together. `weights`: by replica; without any, measured speed.
    """

    name: str = "predictive"
    load_factor: float = 1.25
    prefix_bytes: int = 1024
    weights: dict[str, float] = {}


KNOWN: dict[str, Callable[[Choice], Policy]] = {
    Predictive.name: lambda _: Predictive(),
    Prefix.name: lambda it: Prefix(it.load_factor, it.prefix_bytes),
    LeastLoad.name: lambda _: LeastLoad(),
    LeastLatency.name: lambda _: LeastLatency(),
    PowerOfTwo.name: lambda _: PowerOfTwo(),
    RoundRobin.name: lambda _: RoundRobin(),
    WeightedRoundRobin.name: lambda it: WeightedRoundRobin(it.weights),
    Uniform.name: lambda _: Uniform(),
    WeightedRandom.name: lambda it: WeightedRandom(it.weights),
    ConsistentHash.name: lambda _: ConsistentHash(),
    Session.name: lambda it: Session(it.load_factor),
}


def made(choice: Choice) -> Policy:
    """The policy, fresh. KeyError for a name that is not KNOWN: configuration sees to it."""
    return KNOWN[choice.name](choice)


class PoliciesChanged(Event, frozen=True):
    """By model, what goes before the configuration from now on; "" is every model without one of its own."""

    choices: dict[str, Choice]


class Policies:
    """The policies in force: as configured ("" is for all models without one of their own), or as changed at work."""

    def __init__(self, configured: Mapping[str, Choice] | None = None) -> None:
        self._configured = {"": Choice(), **(configured or {})}
        self._choices: dict[str, Choice] = {}
        self._by_model: dict[str, Policy] = {}
        self._names: tuple[str, ...] = ()
        self.override({})

    def of(self, model: str) -> Policy:
        """Who decides for a model."""
        return self._by_model.get(model) or self._default

    def adopt(self, names: tuple[str, ...]) -> None:
        """See Policy.adopt."""
        self._names = names
        for policy in self._by_model.values():
            policy.adopt(names)

    def override(self, choices: Mapping[str, Choice]) -> None:
        """From now on these go before what is configured, and nothing else does. One not heard of till now begins
        with nothing counted; one that stays goes on."""
        chosen = {**self._configured, **choices}
        kept = {model: self._by_model[model] for model, choice in chosen.items() if self._choices.get(model) == choice}
        fresh = {model: made(choice) for model, choice in chosen.items() if model not in kept}
        for policy in fresh.values():
            policy.adopt(self._names)
        self._choices, self._by_model = chosen, {**fresh, **kept}
        self._default = self._by_model[""]
        self._wants_session = any(policy.wants_session for policy in self._by_model.values())

    def told(self) -> dict[str, str]:
        """The names of those in force, by model; "" stands for all others."""
        return {model: self._by_model[model].name for model in sorted(self._by_model)}

    def want_session(self) -> bool:
        """Whether any of them asks for a request's session."""
        return self._wants_session
