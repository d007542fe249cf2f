"""Which region: gather what is lawful and serving, score it, and choose; near ties are drawn by free slots.

Never chooses outside the offers it is given, and gives its reasons with the choice. Offering and picking write nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farhop.balance import choose
from farhop.balance.ewma import Mean
from farhop.balance.health import Liveness, State
from farhop.balance.reckoning import Reckoning
from farhop.balance.trie import PrefixTrie
from global_lb.policy import Offer, reckoned_wait_ms
from global_lb.view import View

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from random import Random

    from farhop.balance.health import LivenessConfig
    from farhop.balance.machine import Request
    from global_lb.policy import Policy, Scored
    from global_lb.view import Instance
    from topology.law import Verdict

TIE_MS = 1.0  # below what a wire time is known to
RESIDENCE_MIN = 0.1  # never 0: a region believed to hold nothing would never be asked to prove the opposite
MODELS_MAX = 4096

_UNHEARD = Liveness()  # down: it never had a report or a channel


class Regions:
    """What is known of the regions beyond one view of them: life, cached prefixes, what was sent. Survives swaps.

    `residence` is the share (RESIDENCE_MIN..1) of the believed hits that proved true in a region lately.
    """

    def __init__(self, trie_bytes: int, config: LivenessConfig) -> None:
        self._trie_bytes, self._config = trie_bytes, config
        self.view = View({})
        self.trie = PrefixTrie()
        self.liveness: dict[str, Liveness] = {}
        self.residence: dict[str, Mean] = {}
        self._reckonings: dict[tuple[str, str], Reckoning] = {}
        self._models: set[str] = set()  # ever offered: a region that is gone takes none out of the catalogue

    def adopt(self, view: View) -> None:
        """Take a new view: what its reports acknowledge is no longer outstanding; what left is forgotten."""
        self.view = view
        known: dict[tuple[str, str], Reckoning] = {}
        for name, region in view.regions.items():
            if name not in self.trie:
                self.trie.add(name, self._trie_bytes)
                residence = self.residence[name] = Mean(0.05, RESIDENCE_MIN, 1.0)
                residence.update(1.0)
            for instance in region.instances:
                key = (name, instance.name)
                reckoning = known[key] = self._reckonings.get(key) or Reckoning()
                reckoning.acknowledged(instance.incarnation, instance.accepted)
                if len(self._models) < MODELS_MAX:
                    self._models.update(instance.models)
        self._reckonings = known

    def liveness_of(self, region: str) -> Liveness:
        """The region's liveness, to be told what was heard."""
        known = self.liveness.get(region)
        if known is None:
            known = self.liveness[region] = Liveness(self._config)
        return known

    def reckoning_of(self, instance: Instance) -> Reckoning:
        """The counts towards an instance of this view."""
        return self._reckonings[instance.region, instance.name]

    def may_exist(self, model: str) -> bool:
        """Whether some region offers the model or once did; before any has reported, whatever is asked for."""
        return model in self._models or not self._models or len(self._models) >= MODELS_MAX

    def caches(self, region: str, chain: tuple[int, ...]) -> None:
        """The region holds this prefix now."""
        if region in self.trie:
            self.trie.insert(region, chain)

    def compare(self, chosen: Scored | None, cached_tokens: int) -> None:
        """What share of a believed hit was true tells how long blocks stay resident in that region."""
        if chosen is not None and chosen.believed_tokens >= 1.0 and chosen.region in self.residence:
            share = cached_tokens / chosen.believed_tokens
            self.residence[chosen.region].update(max(RESIDENCE_MIN, min(1.0, share)))

    def offers(
        self,
        request: Request,
        lawful: frozenset[str],
        now: float,
        without: frozenset[str],
        rng: Random | None = None,
    ) -> tuple[list[Offer], dict[str, str]]:
        """Lawful regions that can be asked, and why the other lawful ones cannot. Suspects only if nobody is better.

        One drained at a pace is asked gladly by a shrinking share of the requests; `rng` draws them, None: none.
        """
        matches = self.trie.match(request.chain)
        sure: list[Offer] = []
        suspect: list[Offer] = []
        absent: dict[str, str] = {}
        for name in sorted(lawful):
            if name in without:
                absent[name] = "tried already"
                continue
            health = self.liveness.get(name, _UNHEARD).read(now)
            instance = self.best_instance(name, request.model)
            if health.state is State.DOWN or (health.state is State.DRAINING and not health.share):
                absent[name] = f"{health.state}: {health.why}"
            elif instance is None:
                absent[name] = "no ready replica of this model" if name in self.view.regions else "never heard of"
            else:
                offer = self._offer(instance, request.model, matches.get(name, 0))
                gladly = health.state is State.UP or (rng is not None and health.share and rng.random() < health.share)
                (sure if gladly else suspect).append(offer)
                if health.state is not State.UP:
                    absent[name] = f"{health.state}: {health.why}"
        return sure or suspect, absent

    def best_instance(self, region: str, model: str) -> Instance | None:
        """The region's instance to ask: the least wait, with what was sent to each."""
        known = self.view.regions.get(region)
        if known is None:
            return None
        able = [i for i in known.instances if not i.draining and model in i.models and i.models[model].replicas_ready]
        if len(able) < 2:
            return able[0] if able else None
        waits = [reckoned_wait_ms(i.models[model], self.reckoning_of(i).outstanding_bytes) for i in able]
        return able[waits.index(min(waits))]

    def _offer(self, instance: Instance, model: str, depth: int) -> Offer:
        name = instance.region
        return Offer(
            region=name,
            rtt_ms=self.view.regions[name].rtt_ms,
            instance=instance,
            capacity=instance.models[model],
            outstanding_bytes=self.reckoning_of(instance).outstanding_bytes,
            depth=depth,
            residence=self.residence[name].value or RESIDENCE_MIN,
        )


class Decision(msgspec.Struct, frozen=True):
    """The choice and why: the law's verdict, who was not serving and why, and the field best first."""

    verdict: Verdict
    absent: Mapping[str, str]
    field: tuple[Scored, ...]
    chosen: Scored | None


def pick(
    request: Request,
    output_tokens: float,
    offers: Sequence[Offer],
    verdict: Verdict,
    absent: Mapping[str, str],
    policy: Policy,
    rng: Random,
) -> Decision:
    """Choose among `offers`, all of them lawful and serving the model."""
    if not offers:
        return Decision(verdict, absent, (), None)
    scored = policy.score(request, output_tokens, offers)
    scores = [s.score_ms for s in scored]
    ties = choose.near_ties(scores, TIE_MS)
    index = ties[0] if len(ties) == 1 else ties[choose.draw([float(scored[i].slots_free) for i in ties], rng)]
    return Decision(verdict, absent, tuple(sorted(scored, key=lambda s: s.score_ms)), scored[index])
