"""The answer cache: which request gets a kept answer, which one shares the answer of another under way, and which one
leads (is sent upstream, for others to share).

Invariants: an answer is only given to the tenant that it was made for, by the law in force: the region that made it
must be lawful for the request that gets it, and the tenant's records and hints must be allowed where it is kept.
Another law makes all kept answers unreachable at once. A request that shares an answer is under the same rules as the
leader: same tenant, model, name that it came by, version, key and narrowing. Never reads a body, a clock or a socket.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

import msgspec

from farhop.balance.answer_store import AnswerStore
from farhop.balance.machine import Usage
from global_lb.routing import admission
from topology.law import Scope

if TYPE_CHECKING:
    from farhop.balance.machine import Request
    from global_lb.routing.policy import RouteConfig
    from topology.law import Law

H = TypeVar("H")
ShareKey: TypeAlias = "tuple[str, bytes, bool, str, str, tuple[tuple[str, ...], ...], frozenset[str] | None, int, str]"


class StoredAnswer(msgspec.Struct, frozen=True):
    """An answer as it is stored: the `lines` of its head, its `body` in pieces (of a stream up to its usage, the
    `usage_event`, if it has one, and its `end`), and for which decision it was made, where, and when (the machine's
    seconds)."""

    stream: bool
    lines: bytes
    body: tuple[bytes, ...]
    usage_event: bytes
    end: bytes
    region: str
    decision: str
    made_at: float
    usage: Usage | None


@dataclass(frozen=True, slots=True)
class Hit:
    """Answer with this stored answer, which is `age_s` old."""

    answer: StoredAnswer
    age_s: float


@dataclass(frozen=True, slots=True)
class Follow(Generic[H]):
    """Read this answer, which is being recorded. `share`: to lead by, in its place, if it has no room for a reader."""

    leader: H
    share: ShareKey | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Lead:
    """Ask upstream. Others may share the answer by `share`, None if not; `keeps`: the answer will be stored."""

    share: ShareKey | None
    keeps: bool


@dataclass(frozen=True, slots=True)
class Alone:
    """Ask upstream as if there were no cache; `why`: the reason in a word."""

    why: str


class AnswerCache(Generic[H]):
    """The stored answers of one balancer, and the requests whose answers are being recorded. `region`: its own; `H`:
    the type of an answer in progress.
    """

    def __init__(self, capacity_bytes: int, region: str) -> None:
        self._region = region
        self.store: AnswerStore[StoredAnswer] = AnswerStore(capacity_bytes)
        self.outcomes: Counter[tuple[str, str]] = Counter()  # of requests, and why
        self.saved_tokens: Counter[str] = Counter()  # that no engine computed, by kind
        self._leaders: dict[ShareKey, tuple[H, float]] = {}
        self._law: Law | None = None

    def under(self, law: Law) -> None:
        """Use this law from now on. If it differs from the one before, no answer kept before is given any more."""
        if law is not self._law:
            self._law = law
            self.store.clear()
            self._leaders.clear()

    def decide(
        self, request: Request, key: bytes, route: RouteConfig, law: Law, now: float, *,
        key_id: str = "", renew: bool = False, age_s_max: float | None = None, gives: bool = True,
    ) -> Hit | Follow[H] | Lead | Alone:  # fmt: skip
        """What to do with a request that may be repeated. `key_id`: the issued key, issuer or certificate that it came
        by, as limits know it. `renew`: what is there is not to be given, `age_s_max`: nor what is older. `gives`: False
        once what is kept turned out to be of no use."""
        self.under(law)
        if not self.store.largest:
            return Alone("room")
        keeps = route.keep_answers_s > 0 and self._may_keep(request, law)
        if keeps and gives and not renew:
            stored = self._stored(request, key, route, law, now, age_s_max)
            if stored is not None:
                return Hit(stored, now - stored.made_at)
        if not route.coalesce:
            return Lead(None, keeps) if keeps else Alone("law")
        # `lawful`: the bounds of a name that stands for this model (routing.cascade), or those of the law that it came
        # under. `alias`: another law may say of that name what it does not say of the leader's, which alone is judged
        # again once the answer is under way.
        share = (
            request.tenant, key, request.stream, request.key, request.alias, request.narrow, request.lawful,
            request.priority, key_id,
        )  # fmt: skip
        if renew:
            return Lead(None, keeps)
        leader = self._leaders.get(share)
        # A leader with a much earlier deadline would end this request's answer too soon.
        if leader is not None and request.deadline - now <= 2 * (leader[1] - now):
            return Follow(leader[0], share)
        return Lead(share, keeps)

    def _may_keep(self, request: Request, law: Law) -> bool:
        """Whether an answer to the request may be kept here: it is a record of the tenant, found by a hash of the
        prompt. A name that stands for the model may have a rule of its own."""
        return all(self._region in law.request_verdict(request, scope).lawful for scope in (Scope.LOGGING, Scope.HINTS))

    def _stored(
        self, request: Request, key: bytes, route: RouteConfig, law: Law, now: float, age_s_max: float | None
    ) -> StoredAnswer | None:
        stored = self.store.get(request.tenant, key)
        if stored is None:
            return None
        age_s = now - stored.made_at
        if age_s >= route.keep_answers_s:
            self.store.drop(request.tenant, key)
            return None
        lawful = admission.both(law.request_verdict(request).lawful, request.lawful)
        fresh = age_s_max is None or age_s <= age_s_max
        return stored if fresh and stored.region in lawful else None

    def leads(self, share: ShareKey, leader: H, deadline: float) -> None:
        """Other requests may share this one's answer from now on, until `stop_sharing`; its deadline bounds it."""
        self._leaders[share] = leader, deadline

    def stop_sharing(self, share: ShareKey, leader: H) -> None:
        """No further request can share this one's answer."""
        known = self._leaders.get(share)
        if known is not None and known[0] is leader:
            del self._leaders[share]

    def keep(self, tenant: str, key: bytes, answer: StoredAnswer, made_under: Law, law: Law) -> bool:
        """Keep an answer that was asked for under one law and is whole under another, if that is the same."""
        self.under(law)
        if made_under is not law:
            return False
        size = sum(map(len, (*answer.body, answer.usage_event, answer.end, answer.lines)))
        return self.store.put(tenant, key, answer, size)

    def counted(self, outcome: str, why: str, saved: Usage | None = None) -> None:
        """Count the outcome of a request whose route uses the cache. `saved`: the tokens that no engine had to
        compute.
        """
        self.outcomes[outcome, why] += 1
        if saved is not None:
            self.saved_tokens["prompt"] += saved.prompt_tokens
            self.saved_tokens["completion"] += saved.completion_tokens
