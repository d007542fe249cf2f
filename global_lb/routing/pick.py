"""Which region: the route's policy and modifiers score the candidates; near ties are drawn by headroom.

Scores are a near tie if they differ by less than the uncertainty of the waits: the reports' age times how fast their
values change. Never chooses outside the candidates that it is given, and gives its reasons with the choice. Picking
writes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

import msgspec
import numpy as np

from farhop.balance import choose
from global_lb.fleet.table import Candidates, Scored
from global_lb.routing.policy import OperatorOverrides, Route, RouteConfig, modify

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from random import Random

    from numpy.typing import NDArray

    from farhop.balance.session_affinity import SessionAffinity
    from global_lb.fleet.table import Column
    from global_lb.routing.policy import Policy
    from topology.law import Verdict

FRESH_S = 1.5  # regions report once a second at the least
IDLE_SHARE = 0.5  # a local region used less than this has no wait that a hop could save
_NO_OVERRIDES = OperatorOverrides()
_PLAIN = Route(RouteConfig())


class ScoredCandidates(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The candidates as they were scored, in their order; made when looked at, since hardly any decision is."""

    _candidates: Candidates
    _score: Column
    _shift: float
    _bias_ms: Column | None

    @overload
    def __getitem__(self, place: int) -> Scored: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Scored]: ...
    def __getitem__(self, place: int | slice) -> Scored | Sequence[Scored]:
        """One of them, or some."""
        if isinstance(place, slice):
            return [self[at] for at in range(*place.indices(len(self)))]
        bias_ms = self._bias_ms.item(place) if self._bias_ms is not None else 0.0
        return self._candidates.scored(place, self._score.item(place) - self._shift, bias_ms)

    def __iter__(self) -> Iterator[Scored]:
        return (self[place] for place in range(len(self)))

    def __len__(self) -> int:
        return len(self._candidates)


class Decision(msgspec.Struct, frozen=True, gc=False):
    """The choice and why: the law's verdict, the regions not serving and why, and the regions scored, in no order.

    `ties`: the near ties that it was drawn from, with the uncertainty of each one's wait (ms). `spilled_from`: the
    region that would have been best if none were hot; None if it was chosen, hot or not. `notes`: what modifiers and
    operators had to say. `candidates` are all that was known of those regions, `foreign` whether the chosen region is
    not the entry's, and `lawful_here` whether the entry's region is lawful.
    """

    verdict: Verdict
    absent: Mapping[str, str]
    scored: ScoredCandidates | Sequence[Scored]
    chosen: Scored | None
    ties: Mapping[str, float] = {}
    spilled_from: str | None = None
    notes: tuple[str, ...] = ()
    route: Route = _PLAIN
    candidates: Candidates | None = None
    foreign: bool = False
    lawful_here: bool = True

    def is_last_resort(self, now: float) -> bool:
        """Whether only one region may be asked, or the choice takes no foreign requests by a fresh report and is
        better than all others though it pays for that. Then no promise is made: it would only be a reason to refuse,
        in one region after another."""
        candidates, chosen = self.candidates, self.chosen
        if candidates is None or chosen is None:
            return False
        return len(candidates.names) == 1 or (
            candidates.any_full and candidates.at[chosen.region] in candidates.full(now - FRESH_S)
        )

    @property
    def ranked(self) -> tuple[Scored, ...]:
        """The scored regions, best first. Sorted when asked for, since hardly any decision is looked at."""
        return tuple(sorted(self.scored, key=lambda s: s.score))

    def terms(self) -> dict[str, dict[str, float]]:
        """The terms of each region's score, if scores are milliseconds: they add up to the score. Empty for policies
        with another unit."""
        policy, usd_weight_ms = self.route.policy, self.route.config.usd_weight_ms
        if not policy.in_ms or not self.scored:
            return {}
        least_usd = min(s.usd for s in self.scored)
        return {
            s.region: {
                **policy.terms(s),
                "penalty": s.penalty_ms,
                "bias": s.bias_ms,
                "price": usd_weight_ms * (s.usd - least_usd),
            }
            for s in self.scored
        }


def pick(
    candidates: Candidates,
    verdict: Verdict,
    route: Route,
    rng: Random,
    now: float,
    here: str = "",
    overrides: OperatorOverrides = _NO_OVERRIDES,
    affinity: SessionAffinity | None = None,
    soft_affinity: SessionAffinity | None = None,
) -> Decision:
    """Choose among `candidates`, all of them lawful and serving the model. `here`: the entry region.
    `soft_affinity`: where sessions were if no route asks for affinity; it only decides near ties.

    They are the decision's from then on.
    """
    notes: list[str] = []
    lawful_here = here in verdict.lawful
    if not route.plain or overrides.pins:
        candidates = _narrowed(candidates, route, overrides, lawful_here, now, notes)
    if not candidates.names:
        return Decision(verdict, candidates.absent, (), None, notes=tuple(notes), route=route)
    policy, bias_ms = route.policy, None
    score = policy.score(candidates)
    shift = policy.shift(candidates)
    if policy.in_ms and (not route.plain or overrides.biases):
        score, bias_ms = _moved(candidates, score, route, overrides, now, notes)
    unguarded = ready = score
    avoided = _avoided(candidates, policy)
    if avoided is not None:
        if policy.in_ms:
            assert candidates.penalty_ms is not None
            score = ready = score + candidates.penalty_ms
        elif not avoided.all():  # no milliseconds to add to: avoided regions come last
            ready = np.where(avoided, np.inf, score)
    ties = _near_ties(candidates, ready, avoided, policy, now)
    place = ties[0][0] if len(ties) == 1 else _one_of(candidates, ties, avoided, soft_affinity, rng, notes)
    if place != candidates.here and policy.replicates_prefixes:
        place = _replicated_here(candidates, place, ready, avoided, soft_affinity, rng, notes)
    if not route.plain:
        place = _canary_or_home(candidates, place, avoided, route, affinity, notes)
    candidates.forget()
    scored = ScoredCandidates(candidates, score, shift, bias_ms)
    return Decision(
        verdict,
        candidates.absent,
        scored,
        scored[place],
        {candidates.names[at]: uncertainty_ms for at, uncertainty_ms in ties} if len(ties) > 1 else {},
        _spilled_from(candidates, unguarded, avoided, place) if avoided is not None else None,
        tuple(notes),
        route,
        candidates,
        place != candidates.here,
        lawful_here,
    )


def _narrowed(
    candidates: Candidates, route: Route, overrides: OperatorOverrides, lawful_here: bool, now: float, notes: list[str]
) -> Candidates:
    """The candidates that pins, quota and budget leave."""
    pin = overrides.pin(candidates.request.tenant, candidates.request.model, now) if overrides.pins else None
    if pin is not None:
        candidates, why = modify.pinned(candidates, pin)
        notes.append(why)
    if route.quota is not None and lawful_here:
        candidates, why = modify.within_quota(candidates, route.quota)
        if why:
            notes.append(why)
    if route.budget is not None:
        candidates, why = modify.within_budget(candidates, route.budget, now)
        if why:
            notes.append(why)
    return candidates


def _moved(
    candidates: Candidates, score: Column, route: Route, overrides: OperatorOverrides, now: float, notes: list[str]
) -> tuple[Column, Column | None]:
    """The scores with biases and prices, and the biases."""
    config, bias_ms = route.config, None
    override_ms = overrides.bias_ms(now) if overrides.biases else {}
    if config.bias_ms or override_ms:
        bias_ms, why = modify.biased(candidates, config.bias_ms, override_ms)
        score = score + bias_ms
        if why:
            notes.append(why)
    if config.usd_weight_ms:
        score = score + modify.priced(candidates, config.usd_weight_ms)
        notes.append(
            f"a dollar a request is worth {config.usd_weight_ms:g} ms: each pays for what it costs above the least"
        )
    return score, bias_ms


def _avoided(candidates: Candidates, policy: Policy) -> NDArray[np.bool_] | None:
    """Which regions pay the penalty: hot, full, or not fully back yet. None: no region does."""
    full = policy.full(candidates)
    if full is not None and full.any():
        candidates.penalise(full)
    return candidates.penalty_ms > 0.0 if candidates.penalty_ms is not None else None


def _canary_or_home(
    candidates: Candidates,
    place: int,
    avoided: NDArray[np.bool_] | None,
    route: Route,
    affinity: SessionAffinity | None,
    notes: list[str],
) -> int:
    """The place of the canary's or the session's region, if one applies; else `place`."""
    config, request, why = route.config, candidates.request, ""
    if config.canary:
        region, why = modify.canary(request, config.canary, config.canary_by)
        tries = candidates.at.get(region)
        if tries is not None and (avoided is None or not avoided[tries]):
            notes.append(why)
            return tries
    if config.affinity_ms and affinity is not None and request.session:
        home = affinity.of(request.session, request.model)
        if home is not None:
            place, why = modify.at_home(candidates, home, place, avoided, config.affinity_ms)
            if why:
                notes.append(why)
    return place


def _spilled_from(candidates: Candidates, unguarded: Column, avoided: NDArray[np.bool_], chosen: int) -> str | None:
    best = int(unguarded.argmin())
    return candidates.names[best] if best != chosen and avoided[best] else None


def _near_ties(
    candidates: Candidates, ready: Column, avoided: NDArray[np.bool_] | None, policy: Policy, now: float
) -> list[tuple[int, float]]:
    """The regions that may be the best, given the uncertainty of the waits: place and uncertainty (ms). Only the cold
    (not hot) ones of these, if there are any."""
    best = int(ready.argmin())
    limit = ready.item(best) + policy.ties
    if policy.uncertain_waits and candidates.moving:
        uncertainty_ms = candidates.uncertainty_ms(now)
        near = (ready - uncertainty_ms <= np.array(limit + uncertainty_ms.item(best))).nonzero()[0].tolist()
        ties = [(place, uncertainty_ms.item(place)) for place in near]
    elif policy.ties:
        ties = [(place, 0.0) for place in (ready <= np.array(limit)).nonzero()[0].tolist()]
    else:
        return [(best, 0.0)]
    if avoided is None or len(ties) == 1:
        return ties
    return [tie for tie in ties if not avoided[tie[0]]] or ties


def _affine(candidates: Candidates, affinity: SessionAffinity | None, ties: Sequence[int]) -> int | None:
    """The region where the request's session, or its parent session, was, if that is among the ties."""
    request = candidates.request
    if affinity is None or not request.soft_session:
        return None
    place = candidates.at.get(affinity.near(request.soft_session, request.parent_session, request.model))
    return place if place in ties else None


def _one_of(
    candidates: Candidates,
    ties: Sequence[tuple[int, float]],
    avoided: NDArray[np.bool_] | None,
    soft_affinity: SessionAffinity | None,
    rng: Random,
    notes: list[str],
) -> int:
    """One of the near ties: the region of the session, or else a random one."""
    among = [place for place, _ in ties]
    home = _affine(candidates, soft_affinity, among)
    if home is None:
        return _drawn(candidates, among, avoided, rng)
    notes.append(f"near tie: the session stays in {candidates.names[home]}")
    return home


def _replicated_here(
    candidates: Candidates,
    place: int,
    ready: Column,
    avoided: NDArray[np.bool_] | None,
    soft_affinity: SessionAffinity | None,
    rng: Random,
    notes: list[str],
) -> int:
    """`place`, or the local region if the prefix that leads the request to `place` should be prefilled here, so that
    later requests with it need not leave.

    Either every later request pays the trip, or one pays the prefill; how many will come is unknown. Prefilling with
    probability trip / prefill spends on average as much on trips as on the prefill, so at most twice the cost of
    knowing the number in advance (ski rental, Karlin et al. 1988; this randomised form keeps no state). Only if no
    request waits here: a queue would grow by the prefill. Not for a session that is there already, nor for an agent,
    whose prefix is used only by its own session and only until that ends (brought home, agents had 0.96 of their
    turns).
    """
    here = candidates.here
    if here is None or candidates.request.tools or (avoided is not None and avoided[here]):
        return place
    fill_ms = candidates.fill_ms(here, place)
    if fill_ms <= 0.0 or candidates.waits(here) or _affine(candidates, soft_affinity, (place,)) is not None:
        return place
    way_ms = candidates.rtt_ms.item(place) - candidates.rtt_ms.item(here)
    spared_ms = min(way_ms, ready.item(place) - ready.item(here) + fill_ms)  # less where here is slower besides
    if spared_ms <= 0.0 or rng.random() * fill_ms >= spared_ms:
        return place
    notes.append(f"{candidates.names[here]} is to hold what {candidates.names[place]} holds of it, too")
    return here


def _drawn(candidates: Candidates, ties: Sequence[int], avoided: NDArray[np.bool_] | None, rng: Random) -> int:
    """Draw one of the ties in proportion to headroom; the local region if it is idle, since no request is drawn away
    from that."""
    headroom = candidates.headroom()
    here = candidates.here if candidates.here in ties else None
    if here is not None and (avoided is None or not avoided[here]):
        idle = headroom.item(here) >= 1.0 and candidates.used_share().item(here) < IDLE_SHARE
        if idle:
            return here
    return ties[choose.draw(headroom[list(ties)].tolist(), rng)]
