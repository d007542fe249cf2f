"""Which version of a model a request is for: pins, rules, weights. The same request always draws the same version.

A request that is not pinned and matches no rule draws by weighted rendezvous hashing (farhop.balance.hashing) over
model, split, version and the drawing key (session, tenant or request). Each version gets weight / sum of weights, and a
changed weight moves only the keys that must move: if one weight grows, every key that moves goes to that version.
Invariants: a split that is not in force costs one look-up; a version of weight 0 draws no request and keeps none. Never
looks at health or load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from pydantic import Field, field_validator, model_validator

from farhop.balance import hashing
from farhop.balance.machine import Event, HeaderMatch
from farhop.config import Part
from farhop.relay.http.head import passes
from regional_lb.fleet.view import variant_of

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping

    from farhop.balance.machine import Request

VERSIONS_MAX = 16
RULES_MAX = 64

Version = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
_Value = Annotated[str, Field(pattern=r"^[!-~]([ -~]{0,254}[!-~])?$")]


class HeaderRule(Part):
    """A request header of this very value, whatever the case of its name."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    value: _Value

    @field_validator("name")
    @classmethod
    def _comes_here(cls, name: str) -> str:
        if not passes(name.lower().encode()) or name.lower() == "cookie":
            raise ValueError(f"{name} is not passed on between the tiers; name a header of your own, such as x-canary")
        return name.lower()


class CookieRule(Part):
    """A cookie of this very value."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    value: _Value


class RuleConfig(Part):
    """Requests with this header, or with this cookie, or of this tenant are for this version."""

    version: Version
    header: HeaderRule | None = None
    cookie: CookieRule | None = None
    tenant: Annotated[str, Field(pattern=r"^[!-~]{0,256}$")] = ""

    @model_validator(mode="after")
    def _one(self) -> RuleConfig:
        if sum((self.header is not None, self.cookie is not None, bool(self.tenant))) != 1:
            raise ValueError("a rule looks at one thing: give a header, a cookie or a tenant; rules are tried in order")
        return self

    @property
    def header_match(self) -> HeaderMatch | None:
        """What it looks for in a request's head; None if it matches by tenant."""
        if self.header is not None:
            return HeaderMatch("header", self.header.name, self.header.value)
        return HeaderMatch("cookie", self.cookie.name, self.cookie.value) if self.cookie is not None else None


class SplitConfig(Part):
    """One model's split, as configured or as written to etcd: the first rule that holds, else by `weights`.

    Fields not given in etcd stay as configured. `name` determines the assignment. `fallback`: whether any other version
    may serve while no replica of the chosen one is able. `pinning`: whether clients may ask for a version that is
    served.
    """

    name: Annotated[str, Field(pattern=r"^[!-~]{0,64}$")] = ""
    rules: list[RuleConfig] = Field(default_factory=list, max_length=RULES_MAX)
    weights: dict[Version, Annotated[float, Field(ge=0, le=1e6)]] = Field(default_factory=dict, max_length=VERSIONS_MAX)
    sticky: Literal["session", "tenant", "none"] = "session"
    fallback: bool = True
    pinning: bool = False

    @field_validator("weights")
    @classmethod
    def _not_all_zero(cls, weights: dict[str, float]) -> dict[str, float]:
        if weights and not any(weights.values()):
            raise ValueError("all are 0: give some version more, or leave the weights out for no preference")
        return weights

    @property
    def versions(self) -> set[str]:
        """All versions it speaks of."""
        return {*self.weights, *(rule.version for rule in self.rules)}

    def overridden(self, by: SplitConfig) -> SplitConfig:
        """This one, but for the fields that the other says."""
        return self.model_copy(update={name: getattr(by, name) for name in by.model_fields_set})


class Assigned(msgspec.Struct, frozen=True):
    """The version a request is for, the variant it waits for, and why: `pinned`, `rule 1`, `session`, `tenant`,
    `request` (by the weights, drawn by that) or `kept` (where its conversation is cached)."""

    version: str
    variant: str
    why: str


class SplitsChanged(Event, frozen=True):
    """By model, what overrides the configuration from now on: only the fields that are given."""

    splits: dict[str, SplitConfig]


class Split:
    """One model's split in force. `header_matches` are what its rules look for, `shares` what of the rest each version
    draws."""

    __slots__ = ("_rules", "_variants", "_weighted", "config", "header_matches", "shares")

    def __init__(self, model: str, config: SplitConfig) -> None:
        self.config = config
        self._rules = [(rule.header_match, rule.tenant, rule.version) for rule in config.rules]
        self.header_matches = tuple(match for match, _, _ in self._rules if match is not None)
        weights = {version: weight for version, weight in sorted(config.weights.items()) if weight > 0.0}
        total = sum(weights.values())
        shares = {version: weight / total for version, weight in weights.items()}
        self.shares = {version: share for version, share in shares.items() if share}  # the least weights come to none
        self._weighted = [
            (version, share, f"{model}\0{config.name}\0{version}\0".encode()) for version, share in self.shares.items()
        ]
        self._variants = {version: variant_of(model, version) for version in config.versions}

    @property
    def versions(self) -> tuple[str, ...]:
        """All versions it speaks of."""
        return tuple(sorted(self._variants))

    def assign(self, request: Request, served: Container[str], cached_at: Callable[[Request], str]) -> Assigned | None:
        """The request's version; None if it is for any. `served` are the variants that replicas serve.

        `cached_at` gives the version where the request's conversation is cached, "" if there is none.
        """
        if request.version and self.config.pinning:
            variant = variant_of(request.model, request.version)
            if variant in served:
                return Assigned(request.version, variant, "pinned")
        for n, (match, tenant, version) in enumerate(self._rules, 1):
            if request.tenant == tenant if match is None else match in request.header_matches:
                return Assigned(version, self._variants[version], f"rule {n}")
        if not self._weighted:
            return None
        version, why = self._drawn(request, cached_at)
        return Assigned(version, self._variants[version], why)

    def _drawn(self, request: Request, cached_at: Callable[[Request], str]) -> tuple[str, str]:
        sticky = self.config.sticky
        if sticky == "tenant":
            return self.draw(hashing.key_of(request.tenant)), "tenant"
        if sticky == "session":
            if request.session:
                return self.draw(request.session), "session"
            version = cached_at(request)
            if version in self.shares:
                return version, "kept"
        return self.draw(hashing.key_of(request.id)), "request"

    def draw(self, who: int) -> str:
        """The version that one draws. `who` is a hash of 64 bits."""
        return hashing.draw(who, self._weighted)


class Splits:
    """The splits in force, `by_model`: as configured, or as changed at work."""

    def __init__(self, configured: Mapping[str, SplitConfig] | None = None) -> None:
        self._configured = dict(configured or {})
        self._changes: Mapping[str, SplitConfig] = {}
        self.by_model: dict[str, Split] = {}  # most regions have none: callers look here first for every request
        self.wants_session = False
        self.override({})

    def of(self, model: str) -> Split | None:
        """The model's split; None without one."""
        return self.by_model.get(model)

    def configure(self, configured: Mapping[str, SplitConfig]) -> frozenset[str]:
        """From now on these are what is configured; what goes before them goes on doing so. See `override`."""
        self._configured = dict(configured)
        return self.override(self._changes)

    def override(self, changes: Mapping[str, SplitConfig]) -> frozenset[str]:
        """From now on what these say goes before what is configured, and nothing else does. The models whose split
        changed."""
        self._changes = changes
        before = self.by_model
        unsplit = SplitConfig()
        configs = {
            model: self._configured.get(model, unsplit).overridden(changes.get(model, unsplit))
            for model in {*self._configured, *changes}
        }
        self.by_model = {
            model: before[model] if model in before and before[model].config == config else Split(model, config)
            for model, config in configs.items()
        }
        self.wants_session = any(s.config.sticky == "session" and s.shares for s in self.by_model.values())
        now = self.by_model
        return frozenset(model for model in {*before, *now} if before.get(model) is not now.get(model))

    def header_matches(self, model: str) -> tuple[HeaderMatch, ...]:
        """What to look for in the head of a request for this model."""
        split = self.by_model.get(model)
        return split.header_matches if split is not None else ()

    def may_pin(self, model: str) -> bool:
        """Whether a request for this model may ask for a version."""
        split = self.by_model.get(model)
        return split is not None and split.config.pinning

    def status(self, served: Container[str]) -> dict[str, Any]:
        """Those in force, by model, for people; `unserved` are versions that no replica here has."""
        return {model: _status(model, split, served) for model, split in sorted(self.by_model.items())}


def _status(model: str, split: Split, served: Container[str]) -> dict[str, Any]:
    config = split.config
    return {
        "name": config.name,
        "rules": [f"{_about(rule)}: {rule.version}" for rule in config.rules],
        "weights": config.weights,
        "sticky": config.sticky,
        "fallback": config.fallback,
        "pinning": config.pinning,
        "unserved": [version for version in split.versions if variant_of(model, version) not in served],
    }


def _about(rule: RuleConfig) -> str:
    match = rule.header_match
    return f"tenant {rule.tenant}" if match is None else f"{match.kind} {match.name}={match.value}"
