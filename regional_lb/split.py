"""Which version of a model a request is for: pins, rules, weights. The same request always draws the same version.

Who is not pinned and meets no rule draws by weighted rendezvous (Thaler and Ravishankar 1998; the weights as
Schindelhauer and Schomaker 2005): with u(version) in (0, 1) the hash of model, split, version and who draws,

    version = argmin over weights > 0 of  -ln u(version) / weight(version)

so that each version gets weight / sum of weights, and a weight that changes moves only whom it must: when one grows
beside others, everybody who moves moves to it. Invariants: a split that is not in force costs one look-up; a version
of weight 0 draws nobody and keeps nobody. Never looks at health or load.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from xxhash import xxh3_64_intdigest

from farhop.balance.machine import Event, Mark
from regional_lb.view import line_of

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping

    from farhop.balance.machine import Request
    from regional_lb.config import SplitConfig

Sticky = Literal["session", "tenant", "none"]

_HASHES = float(1 << 64)


class Rule(msgspec.Struct, frozen=True):
    """Requests that bear the mark, or are the tenant's, are for this version. Exactly one of the two is given."""

    version: str
    mark: Mark | None = None
    tenant: str = ""

    def holds(self, request: Request) -> bool:
        """Whether it is about this request."""
        return request.tenant == self.tenant if self.mark is None else self.mark in request.marks


class Terms(msgspec.Struct, frozen=True):
    """A split as configured or as written to etcd. `weights` by version, in any unit; `name` deals its cohorts.

    `fallback`: whether any other version may serve while nobody of the chosen one is able. `pinning`: whether clients
    may ask for a version that is served.
    """

    name: str = ""
    rules: tuple[Rule, ...] = ()
    weights: dict[str, float] = {}
    sticky: Sticky = "session"
    fallback: bool = True
    pinning: bool = False


class Assigned(msgspec.Struct, frozen=True):
    """The version a request is for, the line it waits in, and why: `pinned`, `rule 1`, `session`, `tenant`, `request`
    (by the weights, drawn by that) or `kept` (where its conversation is cached)."""

    version: str
    line: str
    why: str


class SplitsChanged(Event, frozen=True):
    """By model, what goes before the configuration from now on: of each only the terms that are said."""

    splits: dict[str, dict[str, Any]]


class Split:
    """One model's split in force. `marks` are what its rules look for, `shares` what of the rest each version draws."""

    __slots__ = ("_lines", "_stakes", "marks", "shares", "terms")

    def __init__(self, model: str, terms: Terms) -> None:
        self.terms = terms
        self.marks = tuple(rule.mark for rule in terms.rules if rule.mark is not None)
        weights = {version: weight for version, weight in sorted(terms.weights.items()) if weight > 0.0}
        total = sum(weights.values())
        shares = {version: weight / total for version, weight in weights.items()}
        self.shares = {version: share for version, share in shares.items() if share}  # the least weights come to none
        self._stakes = [
            (version, share, f"{model}\0{terms.name}\0{version}\0".encode()) for version, share in self.shares.items()
        ]
        named = {*terms.weights, *(rule.version for rule in terms.rules)}
        self._lines = {version: line_of(model, version) for version in named}

    @property
    def versions(self) -> tuple[str, ...]:
        """All versions it speaks of."""
        return tuple(sorted(self._lines))

    def assign(self, request: Request, served: Container[str], keeper: Callable[[Request], str]) -> Assigned | None:
        """The request's version; None if it is for any. `served` are the lines that replicas serve.

        `keeper` gives the version where the request's conversation is cached, "" if there is none.
        """
        terms = self.terms
        if request.version and terms.pinning:
            line = line_of(request.model, request.version)
            if line in served:
                return Assigned(request.version, line, "pinned")
        for n, rule in enumerate(terms.rules, 1):
            if rule.holds(request):
                return Assigned(rule.version, self._lines[rule.version], f"rule {n}")
        if not self._stakes:
            return None
        version, why = self._drawn(request, keeper)
        return Assigned(version, self._lines[version], why)

    def _drawn(self, request: Request, keeper: Callable[[Request], str]) -> tuple[str, str]:
        sticky = self.terms.sticky
        if sticky == "tenant":
            return self.draw(xxh3_64_intdigest(request.tenant.encode())), "tenant"
        if sticky == "session":
            if request.session:
                return self.draw(request.session), "session"
            kept = keeper(request)
            if kept in self.shares:
                return kept, "kept"
        return self.draw(xxh3_64_intdigest(request.id.encode())), "request"

    def draw(self, who: int) -> str:
        """The version that one draws (see the module's head). `who` is a hash of 64 bits."""
        drawing = who.to_bytes(8, "little")
        best, least = "", 0.0
        for version, share, salt in self._stakes:
            cost = -log((xxh3_64_intdigest(salt + drawing) + 0.5) / _HASHES) / share
            if not best or cost < least:
                best, least = version, cost
        return best


class Splits:
    """The splits in force, `by_model`: as configured (`configured`: the terms said of each), or as changed at work."""

    def __init__(self, configured: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._configured = dict(configured or {})
        self.by_model: dict[str, Split] = {}  # most regions have none: whoever asks for every request looks here first
        self.wants_session = False
        self.override({})

    def of(self, model: str) -> Split | None:
        """The model's split; None without one."""
        return self.by_model.get(model)

    def override(self, changes: Mapping[str, Mapping[str, Any]]) -> frozenset[str]:
        """From now on these terms go before what is configured, and no others do. The models whose split changed."""
        before = self.by_model
        terms = {
            model: Terms(**{**self._configured.get(model, {}), **changes.get(model, {})})
            for model in {*self._configured, *changes}
        }
        self.by_model = {
            model: before[model] if model in before and before[model].terms == said else Split(model, said)
            for model, said in terms.items()
        }
        self.wants_session = any(s.terms.sticky == "session" and s.shares for s in self.by_model.values())
        now = self.by_model
        return frozenset(model for model in {*before, *now} if before.get(model) is not now.get(model))

    def marks(self, model: str) -> tuple[Mark, ...]:
        """What is to be looked for in the head of a request for this model."""
        split = self.by_model.get(model)
        return split.marks if split is not None else ()

    def may_pin(self, model: str) -> bool:
        """Whether a request for this model may ask for a version."""
        split = self.by_model.get(model)
        return split is not None and split.terms.pinning

    def told(self, served: Container[str]) -> dict[str, Any]:
        """Those in force, by model, for people; `unserved` are versions that no replica here has."""
        return {model: _told(model, split, served) for model, split in sorted(self.by_model.items())}


def terms_said(config: SplitConfig) -> dict[str, Any]:
    """Of a split as it is written, the terms that are said."""
    said = {name: getattr(config, name) for name in config.model_fields_set}
    if "rules" in said:
        said["rules"] = tuple(Rule(rule.version, rule.mark, rule.tenant) for rule in config.rules)
    return said


def _told(model: str, split: Split, served: Container[str]) -> dict[str, Any]:
    terms = split.terms
    return {
        "name": terms.name,
        "rules": [f"{_about(rule)}: {rule.version}" for rule in terms.rules],
        "weights": terms.weights,
        "sticky": terms.sticky,
        "fallback": terms.fallback,
        "pinning": terms.pinning,
        "unserved": [version for version in split.versions if line_of(model, version) not in served],
    }


def _about(rule: Rule) -> str:
    mark = rule.mark
    return f"tenant {rule.tenant}" if mark is None else f"{mark.kind} {mark.name}={mark.value}"
