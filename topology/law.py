"""The law: which regions may process, log or hint a tenant's request. A hard filter, compiled once per topology.

Deny wins, and no level widens another: a region is lawful if the rules of the tenant, the tenant's model, the
topology's model, the key and the request all allow it. Unknown tenants, regions and places are denied. An adapter is
bound by every rule of its base; an adapter of an unknown base is denied as soon as any model has a rule. `lawful` and
`excluded` partition the regions. The memo is bounded, because clients choose narrowings. Never reads a file or a clock.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from types import MappingProxyType
from typing import Protocol

from topology.lineage import NO_LINEAGE, Lineage
from topology.model import WORLD, Key, Residency, Rule, Tenant, Topology

NARROWINGS_MAX = 8
PLACES_MAX = 1024
_MEMO_MAX = 4096
_MEMO_PLACES_MAX = 64
_NAMES_SHOWN_MAX = 8
_NAME_CHARS_MAX = 64

_ANYWHERE = ("global", WORLD)  # how clients say that they wish for nothing

Narrow = tuple[tuple[str, ...], ...]
_Memo = tuple[str, str, str, Narrow, str]
_Excluded = Mapping[str, str]


class Scope(StrEnum):
    """A region's use of a request: reading its body, computing it, recording it, or holding hints of its prefix."""

    ENTRY = "entry"
    PROCESSING = "processing"
    LOGGING = "logging"
    HINTS = "hints"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Every region of the topology once: in `lawful`, or in `excluded` with the clause that decided, for people."""

    lawful: frozenset[str]
    excluded: Mapping[str, str]
    epoch: int

    def why_not(self, region: str) -> str | None:
        """The clause that keeps the region out; None if it is lawful. A region the topology lacks is kept out too."""
        if region in self.lawful:
            return None
        return self.excluded.get(region, f"region {_shown(region)} is not in the topology")


def _joined(one: Verdict, other: Verdict) -> Verdict:
    """What two verdicts of one law both leave."""
    if one.lawful <= other.lawful:
        return one
    excluded = MappingProxyType({**other.excluded, **one.excluded})
    return Verdict(one.lawful & other.lawful, excluded, one.epoch)


class RequestAttributes(Protocol):
    """The properties of a request that the law considers; `alias` is the name by which its model was asked for, "" if
    its own."""

    @property
    def tenant(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def alias(self) -> str: ...
    @property
    def narrow(self) -> Narrow: ...
    @property
    def key(self) -> str: ...


class Law:
    """The rules of one topology, for models of this lineage. Never changes: a new epoch is a new Law, and so are other
    models (`knowing`)."""

    __slots__ = (
        "_fingerprint", "_inside", "_places_of", "_ruled_models", "_topology", "bound_models", "epoch", "fresh",
        "lineage", "stale",
    )  # fmt: skip

    def __init__(self, topology: Topology, lineage: Lineage = NO_LINEAGE) -> None:
        self._compile(topology, lineage, _members(topology), _ruled(topology))

    def _compile(
        self, topology: Topology, lineage: Lineage, inside: dict[str, frozenset[str]], ruled: frozenset[str]
    ) -> None:
        self._topology, self.lineage = topology, lineage
        self.epoch = topology.epoch
        self._inside, self._ruled_models = inside, ruled
        self.bound_models = _bound(ruled, lineage)  # models that rules bind, by name: any other is any model
        self._fingerprint, self._places_of = 0, dict[str, int]()
        # Verdicts in two generations: bounded at 2 × _MEMO_MAX without bookkeeping on a hit (see _evaluate).
        self.fresh: dict[_Memo, Verdict] = {}
        self.stale: dict[_Memo, Verdict] = {}

    @property
    def topology(self) -> Topology:
        """The topology that it was compiled from."""
        return self._topology

    @property
    def held_epoch(self) -> int:
        """The epoch of the newest law document that is here. A law without tenants is a placeholder for one of its
        epoch that cannot be read (`LawBook._withhold`): then it is the epoch before."""
        return self.epoch if self._topology.tenants else self.epoch - 1

    @property
    def fingerprint(self) -> int:
        """A 64-bit hash, the same in all processes, of what decides verdicts beside the epoch: the map, and the rules
        that bind each model by its bases. Laws of one epoch and one fingerprint give the same verdicts."""
        if not self._fingerprint:
            inside = sorted((place, sorted(regions)) for place, regions in self._inside.items())
            self._fingerprint = _digest((inside, sorted(self.bound_models.items(), key=operator.itemgetter(0))))
        return self._fingerprint

    def places_of(self, region: str) -> int:
        """A 64-bit hash, the same in all processes, of the places that a region is in: laws of one epoch that agree on
        it agree on what may be known there. Unlike `fingerprint`, it does not change when other regions come or go."""
        known = self._places_of.get(region)
        if known is None:
            known = _digest(sorted(place for place, regions in self._inside.items() if region in regions))
            if region in self._inside[WORLD]:  # others' names have no end
                self._places_of[region] = known
        return known

    def knowing(self, lineage: Lineage) -> Law:
        """The same rules, where these models are served."""
        if lineage is self.lineage or lineage == self.lineage:
            return self
        law = Law.__new__(Law)
        law._compile(self._topology, lineage, self._inside, self._ruled_models)
        return law

    def supersedes(self, before: Law) -> bool:
        """Whether it replaces another law: its epoch is later, or the same and the other is a placeholder (see
        held_epoch)."""
        return self.epoch > before.epoch or (self.epoch == before.epoch and not before.topology.tenants)

    def within(self, word: str) -> tuple[str, ...] | None:
        """The places that a request stays within whose client names a residency by this word: () for anywhere, None
        where there is no such place, which then holds nothing."""
        if word in self._inside and word != WORLD:
            return (word,)
        return () if word in _ANYWHERE else None

    def residencies(self) -> list[str]:
        """The words that a client may name a residency by, but for regions."""
        return sorted((*self._topology.places, *_ANYWHERE))

    def patience_s(self, tenant: str) -> float:
        """How long a tenant's request may wait while regions are lawful and none serves; 0 for an unknown tenant."""
        known = self._topology.tenants.get(tenant)
        residency = known.residency if known is not None else None
        return residency.wait_max_s if residency is not None and residency.on_exhausted == "wait" else 0.0

    def widens(self, before: Law, scope: Scope, regions: frozenset[str]) -> bool:
        """Whether all that was lawful in these regions under another law still is, for for_all whom that law knew:
        what is gone (a tenant, a key) may do nothing any more. Under another map, also whatever requests asked for.

        A verdict intersects its clauses, and each of them may be absent (no key named, a model without a rule): so
        something is lost exactly if some single clause loses it inside what the tenant's own residency gave. Thus each
        clause is looked at once, and no verdict is made: 4,000 tenants take milliseconds.
        """
        return self._places_hold(before, regions) and self.keeps(before, scope, regions)

    def _places_hold(self, before: Law, regions: frozenset[str]) -> bool:
        """Whether every place of another law's map still holds those of these regions that it did: a request may ask
        to stay within any of them."""
        if self._inside == before._inside:
            return True
        none: frozenset[str] = frozenset()
        return all((held & regions) <= self._inside.get(place, none) for place, held in before._inside.items())

    def keeps(self, before: Law, scope: Scope, regions: frozenset[str]) -> bool:
        """As `widens`, but for what requests ask for themselves."""
        same_map = self._inside == before._inside
        then, now = _Reach(before, scope, regions), _Reach(self, scope, regions)
        lost_by, relearned = then.lost_by_models(now), self._relearned(before)
        lost_by_any = functools.reduce(operator.or_, lost_by.values(), 0)
        for name, tenant in before.topology.tenants.items():
            same = self._topology.tenants.get(name)
            if same is tenant and same_map and not lost_by_any and not relearned:
                continue
            reach = then.of_tenant(tenant)
            if reach & ~now.of_tenant(same):
                return False
            if reach & lost_by_any or relearned or tenant.models or (same is not None and same.models):
                models = {*lost_by, *relearned, *tenant.models, *(same.models if same is not None else ())}
                if any(reach & then.of_model(tenant, model) & ~now.of_model(same, model) for model in models):
                    return False
            kept = same.keys if same is not None else ()
            if tenant.keys and then.lost_by_keys(tenant.keys, now, kept, same_map=same_map) & reach:
                return False
        return True

    def _relearned(self, before: Law) -> list[str]:
        """Models that other rules bind now, or may. A model that was not served left nothing that could be lawful; one
        bound by the same rules as before is lawful where each of the models with those rules is."""
        return [
            name
            for name in before.lineage.keys() & self.lineage.keys()
            if (bound := self.bound_models.get(name, ())) is None or bound != before.bound_models.get(name, ())
        ]

    def left_by_rules(self, tenant: str, model: str) -> tuple[str, ...] | None:
        """Of the regions where anything may be done with a tenant's prompt, those that the rules about a model leave,
        sorted; None where they keep out none. Others are not named: they may not be for the tenant to know of."""
        who = self._topology.tenants.get(tenant)
        if who is None or model not in self.bound_models:
            return None
        kept_out = frozenset[str]().union(*self._model_clauses(who, model))
        scopes = (Scope.PROCESSING, Scope.LOGGING, Scope.HINTS)
        anywhere = frozenset[str]().union(*(self.verdict(tenant, "", scope).lawful for scope in scopes))
        return tuple(sorted(anywhere - kept_out)) if anywhere & kept_out else None

    def verdict(
        self, tenant: str, model: str, scope: Scope = Scope.PROCESSING, narrow: Narrow = (), key: str = ""
    ) -> Verdict:
        """Which regions may serve `tenant`'s request for `model` in `scope`.

        Each list in `narrow` keeps the regions inside at least one of its places; several lists intersect; an unknown
        place holds nothing. `key` names the tenant's key, whose own `within` then narrows every scope but entry, and
        is named in the reason. Model rules, a model's own and those of its bases, bind every scope but entry, where the
        model is not read yet.
        """
        # A model that no rule binds is any model: so clients cannot fill the memo with names.
        memo = (tenant, model if model in self.bound_models else "", scope, narrow, key)
        return self.fresh.get(memo) or self._evaluate(memo)

    def request_verdict(self, request: RequestAttributes, scope: Scope = Scope.PROCESSING) -> Verdict:
        """`verdict` of a request, by the name, too, that it came by where that stood for its model: both bind."""
        tenant, model, narrow, key = request.tenant, request.model, request.narrow, request.key
        memo = (tenant, model if model in self.bound_models else "", scope, narrow, key)
        verdict = self.fresh.get(memo) or self._evaluate(memo)
        if request.alias not in self.bound_models:
            return verdict
        return _joined(verdict, self.verdict(tenant, request.alias, scope, narrow, key))

    def _evaluate(self, memo: _Memo) -> Verdict:
        found = self.stale.get(memo)
        if found is None:
            found = self._decide(*memo)
            if not self._may_keep(memo):
                return found
        if len(self.fresh) >= _MEMO_MAX:
            self.stale, self.fresh = self.fresh, {}
        self.fresh[memo] = found
        return found

    def _may_keep(self, memo: _Memo) -> bool:
        """Only what is built from names of our own is kept, so a stranger's long names never occupy memory."""
        tenant, _, _, narrow, key = memo
        who = self._topology.tenants.get(tenant)
        places = [place for within in narrow for place in within]
        return (
            who is not None
            and (not key or any(one.name == key for one in who.keys))
            and len(narrow) <= NARROWINGS_MAX
            and len(places) <= _MEMO_PLACES_MAX
            and all(place in self._inside for place in places)
        )

    def _decide(self, tenant: str, model: str, scope: str, narrow: Narrow, key: str) -> Verdict:
        # The first level that excludes a region is the one to name, so later levels only fill the gaps.
        reasons: dict[str, str] = {}
        for clause in self._clauses(tenant, model, Scope(scope), narrow, key):
            reasons = {**clause, **reasons}
        regions = self._topology.regions
        lawful = frozenset(name for name in regions if name not in reasons)
        excluded = {name: reasons[name] for name in regions if name in reasons}
        return Verdict(lawful, MappingProxyType(excluded), self.epoch)

    def _clauses(self, tenant: str, model: str, scope: Scope, narrow: Narrow, key: str) -> Iterator[_Excluded]:
        who = self._topology.tenants.get(tenant)
        if who is None:
            yield self._nowhere(f"tenant {_shown(tenant)} is not in the topology")
            return
        if who.residency is None:
            yield self._nowhere(f"tenant {who.name} has no residency policy")
            return
        yield self._tenant_clause(who.name, who.residency, scope)
        if scope is not Scope.ENTRY:
            yield from self._model_clauses(who, model)
        yield self._key_clause(who, scope, key)
        yield from self._narrow_clauses(narrow)

    def _model_clauses(self, who: Tenant, model: str) -> Iterator[_Excluded]:
        """The rules of the model and of what it is based on, each for this tenant and for for_all."""
        for_all = self._topology.models
        names = self.bound_models.get(model, ())
        if names is None:
            if who.models or for_all:
                yield self._nowhere(f"models have rules, and nobody knows the base of adapter {_shown(model)}")
            return
        for name in names:
            shown = f"model {name}" if name == model else f"model {name}, the base of {_shown(model)}"
            if name in who.models:
                yield self._rule(f"tenant {who.name}, {shown}: processing", who.models[name])
            if name in for_all:
                yield self._rule(f"{shown}: processing", for_all[name])

    def _tenant_clause(self, tenant: str, residency: Residency, scope: Scope) -> _Excluded:
        own: Rule | None = getattr(residency, scope)
        if own is not None:
            return self._rule(f"tenant {tenant}: {scope}", own)
        if scope is Scope.ENTRY:
            return {}
        return self._rule(f"tenant {tenant}: processing", residency.processing)

    def _rule(self, subject: str, rule: Rule) -> _Excluded:
        """The regions that a rule excludes. Denying an unknown place cannot be honoured, so that excludes all
        regions."""
        excluded: dict[str, str] = {}
        for place in rule.deny:
            if place not in self._inside:
                return self._nowhere(f"{subject} denies {_shown(place)}, which is not in the topology")
            for region in self._inside[place]:
                excluded.setdefault(region, f"{subject} denies {place}")
        reason = f"{subject} allows only {_listed(rule.allow)}"
        for region in self._outside(rule.allow):
            excluded.setdefault(region, reason)
        return excluded

    def _key_clause(self, tenant: Tenant, scope: Scope, key: str) -> _Excluded:
        if not key:
            return {}
        held = next((one for one in tenant.keys if one.name == key), None)
        if held is None:
            return self._nowhere(f"tenant {tenant.name} has no key {_shown(key)}")
        if not held.within or scope is Scope.ENTRY:
            return {}
        reason = f"key {held.name} of tenant {tenant.name} stays within {_listed(held.within)}"
        return dict.fromkeys(self._outside(held.within), reason)

    def _narrow_clauses(self, narrow: Narrow) -> Iterator[_Excluded]:
        if len(narrow) > NARROWINGS_MAX or any(len(within) > PLACES_MAX for within in narrow):
            yield self._nowhere(f"request names more than {NARROWINGS_MAX} lists or {PLACES_MAX} places to stay within")
            return
        for within in narrow:
            yield dict.fromkeys(self._outside(within), f"request asked to stay within {_listed(within)}")

    def _outside(self, places: Iterable[str]) -> frozenset[str]:
        inside: frozenset[str] = frozenset().union(*(self._inside.get(place, frozenset()) for place in places))
        return self._inside[WORLD] - inside

    def _nowhere(self, reason: str) -> _Excluded:
        return dict.fromkeys(self._topology.regions, reason)


class _Reach:
    """What each clause of a law leaves of some regions in a scope, as bits, to compare it with another law's."""

    __slots__ = ("_all", "_allowed", "_bits", "_denied", "_law", "_scope")

    def __init__(self, law: Law, scope: Scope, regions: frozenset[str]) -> None:
        self._law, self._scope = law, scope
        self._bits = {region: 1 << n for n, region in enumerate(sorted(regions))}
        self._allowed: dict[tuple[str, ...], int] = {}
        self._denied: dict[tuple[str, ...], int] = {}
        self._all = self._within((WORLD,))

    def of_tenant(self, tenant: Tenant | None) -> int:
        residency = tenant.residency if tenant is not None else None
        if residency is None:
            return 0
        own: Rule | None = getattr(residency, self._scope)
        if own is None and self._scope is Scope.ENTRY:
            return self._all
        return self._rule(own or residency.processing)

    def of_model(self, tenant: Tenant | None, model: str) -> int:
        """By the topology's rules and the tenant's for it and what it is based on."""
        names = self._law.bound_models.get(model, ())
        if self._scope is Scope.ENTRY or names == ():
            return self._all
        each = [self._law.topology.models] + ([tenant.models] if tenant is not None else [])
        if names is None:
            return 0 if any(each) else self._all
        rules = (self._rule(held[name]) for held in each for name in names if name in held)
        return functools.reduce(operator.and_, rules, self._all)

    def of_key(self, key: Key | None) -> int:
        if key is None:
            return 0
        return self._all if not key.within or self._scope is Scope.ENTRY else self._within(key.within)

    def lost_by_keys(self, keys: tuple[Key, ...], now: _Reach, kept: tuple[Key, ...], *, same_map: bool) -> int:
        """What these keys leave here and those of the same names not there, all together."""
        lost, held = 0, None
        for n, key in enumerate(keys):
            other = kept[n] if n < len(kept) else None
            if other is None or other.name != key.name:  # hardly ever: keys keep their places from law to law
                held = {one.name: one for one in kept} if held is None else held
                other = held.get(key.name)
            if other is None or other.within != key.within or not same_map:
                lost |= self.of_key(key) & ~now.of_key(other)
        return lost

    def lost_by_models(self, now: _Reach) -> dict[str, int]:
        """By model, what the topology's own rule for it leaves here and not there."""
        models = {*self._law.topology.models, *now._law.topology.models}
        lost = {model: self.of_model(None, model) & ~now.of_model(None, model) for model in models}
        return {model: regions for model, regions in lost.items() if regions}

    def _rule(self, rule: Rule) -> int:
        denied = self._denied.get(rule.deny)
        if denied is None:
            known = all(place in self._law._inside for place in rule.deny)
            denied = self._denied[rule.deny] = self._within(rule.deny) if known else self._all
        return self._within(rule.allow) & ~denied

    def _within(self, places: tuple[str, ...]) -> int:
        found = self._allowed.get(places)
        if found is None:
            inside = frozenset().union(*(self._law._inside.get(place, frozenset()) for place in places))
            found = self._allowed[places] = sum(bit for region, bit in self._bits.items() if region in inside)
        return found


def narrowing(*lists: tuple[str, ...]) -> Narrow:
    """The lists that do narrow, for `Law.verdict`: here an empty list means that nothing was asked for. Use it for a
    request's own wish or a key's `within`, never for a hop token's lawful regions, of which an empty list means that
    nothing is lawful."""
    return tuple(within for within in lists if within)


def _ruled(topology: Topology) -> frozenset[str]:
    """The models that have any rule."""
    return frozenset(topology.models).union(*(tenant.models for tenant in topology.tenants.values()))


def _digest(of: object) -> int:
    by = repr(of).encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(by, digest_size=8).digest(), "big") or 1


def _bound(ruled: frozenset[str], lineage: Lineage) -> dict[str, tuple[str, ...] | None]:
    """By model, whose rules bind it, itself first; None: a base is unknown. Other models are bound by none."""
    if not ruled:
        return {}
    bound: dict[str, tuple[str, ...] | None] = {}
    for model in {*ruled, *lineage}:
        known, ahead, orphan = {model: None}, [model], False
        while ahead:
            bases = lineage.get(ahead.pop(), frozenset())
            orphan |= bases is None
            for base in sorted(bases or ()):
                if base not in known:
                    known[base] = None
                    ahead.append(base)
        names = tuple(name for name in known if name in ruled)
        if orphan or names:
            bound[model] = None if orphan else names
    return bound


def _members(topology: Topology) -> dict[str, frozenset[str]]:
    """The regions inside each place the topology knows, places without a region included."""
    inside: dict[str, set[str]] = {name: set() for name in (*topology.places, WORLD)}
    for region in topology.regions:
        for place in topology.ancestors(region):
            inside.setdefault(place, set()).add(region)
    return {place: frozenset(regions) for place, regions in inside.items()}


def _listed(places: tuple[str, ...]) -> str:
    if not places:
        return "nothing"
    more = f" and {len(places) - _NAMES_SHOWN_MAX} more" if len(places) > _NAMES_SHOWN_MAX else ""
    return ", ".join(_shown(place) for place in places[:_NAMES_SHOWN_MAX]) + more


def _shown(name: str) -> str:
    """A name as it may stand in a reason: reasons go into answers and logs, and some names come from clients."""
    if len(name) <= _NAME_CHARS_MAX and name.isascii() and name.isprintable():
        return name
    return ascii(name[:_NAME_CHARS_MAX])
