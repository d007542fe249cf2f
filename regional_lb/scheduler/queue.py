"""Where requests wait when every replica is full: a line per model, priority bands within a line, fair turns in a band.

If traffic is split between versions of a model, each version has its own line: here a "model" is any variant.

Within a band tenants take turns by virtual time (start-time fair queuing, Goyal et al. 1996). Serving a tenant advances
its virtual time by work / weight; a tenant that was absent starts at the lowest virtual time of those waiting; only
served requests count. Work is the prompt's tokens plus OUTPUT_WORTH times the answer's (Sheng et al. 2024, "Fairness in
Serving Large Language Models"): estimated when the turn is taken, corrected once it is known (`settle`).

Within a tenant the request with the longest wait per unit of work goes first (highest response ratio next, Brinch
Hansen 1971): short requests go before large ones, and waiting brings large ones forward, so that nothing starves. Of
requests of equal size the oldest is first.

A request that has waited too long in a standing queue steps back (`step_back`): it waits behind all that have not, so
that those are served promptly, and is served when there is room again, instead of being refused in every burst. Only
requests of tenants with at least their share of the queue step back (`crowds`): these tenants cause the queue; a tenant
that asks for less keeps its turns beside their flood.

Invariants: at most `requests_max` requests and `tokens_max` tokens wait, but one request alone always may; a request is
in the queue once or not at all; requests for one model never block another model's; no request waits behind a lower
band, except that every STARVED_EVERY-th turn is the oldest request's once that is older than `starvation_s` (not one
that stepped back, and not a foreign one while own work waits); a foreign request never keeps own work of its band out.
Never decides where a request goes, and never knows how large the reserve is.
"""

from __future__ import annotations

from collections import Counter
from heapq import heapify, heappop, heapreplace
from itertools import islice
from math import frexp
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec.structs import replace
from pydantic import Field

from farhop.config import Part, Seconds
from regional_lb.fleet.table import Line

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

OF_LATE_S = 30.0
RELIEVED_SHARE = 0.5  # of what is late
# The share of the time-to-first-token objective after which a request in a standing queue is late. With the whole
# objective less the prefill time, every request would be served at the last moment, and any that takes longer than
# expected would be late: in a random world at capacity 26 of 100 were in time then, and 38 with a half.
LATE_SHARE = 0.5
MODELS_MAX = 1024  # models whose bands are remembered after their last request
STARVED_EVERY = 4  # more often, and sustained overload, in which all requests are old, would undo bands and fairness
OUTPUT_WORTH = 2.0  # an answer's token takes about as much of an engine as two of a prompt; so are they priced
_FINISHES_MAX = 1024
# If the client gives no objective: in a standing queue a request is late once it has waited this many times its prefill
# time, as objectives are commonly set as such a multiple. With a smaller number the longest prompts step back first,
# and are prefilled one after another when all others are done: at 3, code completions at 0.9 of capacity ended 3 %
# later than with least load.
SLOWDOWN_MAX = 4.0
_SAME = 1.0 - 1e-9  # sums of weights drift
_COMPARED_MAX = 128  # of a tenant's oldest, at every turn: comparing one costs a fifth of a microsecond
_AVERAGED_MAX = 16  # of the oldest that wait: enough to tell long prompts from short ones
_BACK = 1 << 20  # how far below their own the bands of requests that stepped back are


def work(prompt_tokens: float, output_tokens: float) -> float:
    """What serving a request counts for its tenant, in prompt tokens: 1 or more."""
    return max(prompt_tokens + OUTPUT_WORTH * output_tokens, 1.0)


class QueueConfig(Part):
    """Bounds of the queue. `ttft_objective_s`: the objective for the time to the first token, if the client gives none.
    If the oldest request has always waited longer than half of it for `stands_s`, more requests come than are served.
    Then a request that has waited that long, and for SLOWDOWN_MAX times its own prefill time, steps back; otherwise all
    would wait that long. If another region may have room, it is released to that one when its time is over."""

    requests_max: Annotated[int, Field(ge=0, le=1_000_000)] = 1024
    tokens_max: Annotated[int, Field(ge=1, le=1_000_000_000_000)] = 4_000_000
    wait_s: Seconds = 30.0
    stands_s: Seconds = 2.0
    ttft_objective_s: Seconds = 2.0
    starvation_s: Seconds = 10.0

    @property
    def late_s(self) -> float:
        """The wait after which a request is late, if its client gives no objective."""
        return LATE_SHARE * self.ttft_objective_s


class Waiting(msgspec.Struct, frozen=True, eq=False):
    """One waiting request. `tokens` are its prompt's, `work` is what serving it counts, `left` the same without what
    was cached of it when it came. It waits since `since` (monotonic seconds), and waited `waited_s` in other regions
    before. `foreign`: it comes from another region. `late_s`: it is late when it has waited this long, as its client
    said; 0 if it said nothing. `late`: it stepped back."""

    id: str
    model: str
    tenant: str
    priority: int
    tokens: float
    work: float
    left: float
    since: float
    waited_s: float = 0.0
    foreign: bool = False
    late: bool = False
    late_s: float = 0.0

    @property
    def band(self) -> int:
        """Its rank: larger ones go first."""
        return self.priority - _BACK if self.late else self.priority


class _Tenant:
    """One tenant's requests in a band, oldest first; `start` is the virtual time at which its next one is due, `work`
    that of all of them, `tokens` their prompts'."""

    __slots__ = ("late", "requests", "start", "tokens", "weight", "work")

    def __init__(self, start: float, *, late: bool) -> None:
        self.late = late
        self.start, self.work, self.tokens = start, 0.0, 0.0
        self.weight = 0.0  # until its first request says it
        self.requests: dict[str, Waiting] = {}

    def cost(self, waiting: Waiting) -> float:
        """Virtual time that serving it takes."""
        return waiting.work / self.weight

    def due_by(self, virtual: float) -> int:
        """How many of them are due by then, as long as they are in the mean."""
        if virtual < self.start:
            return 0
        each, most = self.work / self.weight / len(self.requests), len(self.requests)
        return min(most, 1 + int((virtual - self.start) / each)) if each > 0.0 else most

    def in_order(self, now: float) -> Iterator[Waiting]:
        """Its requests as they are due among themselves."""
        if self.late:
            yield from self._latest_first(now)
            return
        requests = iter(self.requests.values())
        if len(self.requests) > 1:
            # By since - now, which is below 0: of equal ones the first stays first.
            oldest = list(islice(requests, _COMPARED_MAX))
            yield from sorted(oldest, key=lambda one: (one.since - one.waited_s - now) / one.left)
        yield from requests

    def _latest_first(self, now: float) -> Iterator[Waiting]:
        """Requests that stepped back, by octaves of how long they have waited, the shortest first: as it is unknown how
        long an answer is of use, one that waited half as long is likelier to be in time still. Within an octave as
        above."""

        def turn(one: Waiting) -> tuple[int, float]:
            waited_s = now - one.since + one.waited_s
            return frexp(waited_s)[1], -waited_s / one.left

        requests = reversed(self.requests.values())
        latest = list(islice(requests, _COMPARED_MAX))
        latest.reverse()  # of equal ones the first stays first
        yield from sorted(latest, key=turn)
        yield from requests


class _Band:
    """Tenants with something waiting, and the ranks of those that had something before: forgotten when it empties.
    `late_since`: since when its oldest request has always waited too long; None while that is not so."""

    __slots__ = ("by_id", "finishes", "late_since", "tenants", "weight")

    def __init__(self) -> None:
        self.weight = 0.0  # of all its tenants
        self.by_id: dict[str, Waiting] = {}  # in order of arrival
        self.late_since: float | None = None
        self.tenants: dict[str, _Tenant] = {}
        self.finishes: dict[str, float] = {}

    def note(self, late_s: float, now: float) -> None:
        """Note how long the oldest has waited. It is late above its own `late_s` (or else this one), and no longer late
        below half of it: the hysteresis keeps the state steady near the limit, where late requests are being
        refused."""
        oldest = next(iter(self.by_id.values()))
        since, late_s = oldest.since, oldest.late_s or late_s
        if now - since < RELIEVED_SHARE * late_s:
            self.late_since = None
        elif self.late_since is None and now - since >= late_s:
            self.late_since = since + late_s

    def push(self, waiting: Waiting, weight: float) -> None:
        self.by_id[waiting.id] = waiting
        tenant = self.tenants.get(waiting.tenant)
        if tenant is None:
            tenant = self.tenants[waiting.tenant] = _Tenant(self._begins(waiting.tenant), late=waiting.late)
            self.finishes.pop(waiting.tenant, None)
        self.weight += weight - tenant.weight
        tenant.weight = weight
        tenant.work += waiting.work
        tenant.tokens += waiting.tokens
        tenant.requests[waiting.id] = waiting

    def _begins(self, name: str) -> float:
        """The virtual time at which a tenant with nothing waiting is due."""
        return max(min((t.start for t in self.tenants.values()), default=0.0), self.finishes.get(name, 0.0))

    def ahead(self, name: str, weight: float) -> int:
        """How many are due before one more of this tenant."""
        own = self.tenants.get(name)
        due = self._begins(name) if own is None else own.start + own.work / weight
        return sum(len(t.requests) if t is own else t.due_by(due) for t in self.tenants.values())

    def remove(self, waiting: Waiting, *, served: bool) -> None:
        del self.by_id[waiting.id]
        tenant = self.tenants[waiting.tenant]
        del tenant.requests[waiting.id]
        tenant.work -= waiting.work
        tenant.tokens -= waiting.tokens
        if served:
            tenant.start += tenant.cost(waiting)
        if not tenant.requests:
            del self.tenants[waiting.tenant]
            self.weight -= tenant.weight
            self.finishes[waiting.tenant] = tenant.start
            if len(self.finishes) > _FINISHES_MAX:
                del self.finishes[next(iter(self.finishes))]

    def settle(self, name: str, virtual: float) -> None:
        """Correct a turn that the tenant took: it was this much longer in virtual time than estimated (negative:
        shorter)."""
        tenant = self.tenants.get(name)
        if tenant is not None:
            tenant.start += virtual
        elif name in self.finishes:
            self.finishes[name] += virtual

    def in_order(self, now: float) -> Iterator[Waiting]:
        """As they are due, were they served one after another."""
        frontier = []
        for n, tenant in enumerate(self.tenants.values()):
            requests = tenant.in_order(now)
            frontier.append((tenant.start, n, next(requests), requests, tenant))
        heapify(frontier)
        while frontier:
            start, n, waiting, requests, tenant = frontier[0]
            yield waiting
            following = next(requests, None)
            if following is None:
                heappop(frontier)
            else:
                heapreplace(frontier, (start + tenant.cost(waiting), n, following, requests, tenant))


class _Taken(msgspec.Struct, frozen=True, eq=False):
    """A turn that was taken: the tenant, the band, and the work counted for it. The band may have emptied and be
    gone."""

    band: _Band
    tenant: str
    work: float
    weight: float


class _Line:
    """What waits for one model. `turns` were served since the last that was the oldest. `late` are the requests that
    stepped back: they are in `bands`, and in no figure of the others."""

    __slots__ = ("bands", "by_id", "foreign", "late", "late_foreign", "turns")

    def __init__(self) -> None:
        self.by_id: dict[str, Waiting] = {}  # in order of arrival
        self.late: dict[str, Waiting] = {}
        self.foreign = self.late_foreign = 0  # of by_id, of late
        self.bands: dict[int, _Band] = {}
        self.turns = 0

    def __len__(self) -> int:
        return len(self.by_id) + len(self.late)

    def push(self, waiting: Waiting, weight: float) -> None:
        if waiting.late:
            self.late[waiting.id] = waiting
            self.late_foreign += waiting.foreign
        else:
            self.by_id[waiting.id] = waiting
            self.foreign += waiting.foreign
        band = self.bands.get(waiting.band)
        if band is None:
            band = self.bands[waiting.band] = _Band()
        band.push(waiting, weight)

    def remove(self, waiting: Waiting, *, served: bool) -> _Taken:
        if waiting.late:
            del self.late[waiting.id]
            self.late_foreign -= waiting.foreign
        else:
            if served:
                self.turns = 0 if waiting is self.eldest else self.turns + 1
            del self.by_id[waiting.id]
            self.foreign -= waiting.foreign
        band = self.bands[waiting.band]
        weight = band.tenants[waiting.tenant].weight
        band.remove(waiting, served=served)
        if not band.tenants:
            del self.bands[waiting.band]
        return _Taken(band, waiting.tenant, waiting.work, weight)

    @property
    def oldest(self) -> Waiting:
        return next(iter(self.by_id.values() or self.late.values()))

    @property
    def eldest(self) -> Waiting:
        """The oldest of own work; the oldest of all where only foreign requests wait."""
        oldest = self.oldest
        if not oldest.foreign or self.foreign == len(self.by_id):
            return oldest
        return next((waiting for waiting in self.by_id.values() if not waiting.foreign), oldest)

    def in_order(self, now: float) -> Iterator[Waiting]:
        for band in sorted(self.bands, reverse=True):
            yield from self.bands[band].in_order(now)


class RequestQueue:
    """The queue of one regional balancer. For a model that nothing waits for, every reading is empty or 0."""

    __slots__ = ("_came", "_starvation_s", "by_id", "lines", "requests_max", "taken", "tokens", "tokens_max")

    def __init__(self, requests_max: int, tokens_max: int, starvation_s: float) -> None:
        self.requests_max, self.tokens_max, self._starvation_s = requests_max, tokens_max, starvation_s
        self.lines: dict[str, _Line] = {}
        self.by_id: dict[str, Waiting] = {}
        self.taken: dict[str, _Taken] = {}  # turns, by request, until it is known what they were
        self._came: dict[str, dict[int, float]] = {}  # by model and band: when the last one came
        self.tokens = 0.0

    def set_limits(self, requests_max: int, tokens_max: int, starvation_s: float) -> None:
        """Use these bounds from now on; requests that wait keep waiting."""
        self.requests_max, self.tokens_max, self._starvation_s = requests_max, tokens_max, starvation_s

    def __len__(self) -> int:
        return len(self.by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.by_id

    def waiting(self, model: str) -> int:
        """How many requests wait for the model."""
        line = self.lines.get(model)
        return len(line) if line is not None else 0

    def on_time(self, model: str) -> int:
        """How many of those have not stepped back: all that a new request finds ahead of it."""
        line = self.lines.get(model)
        return len(line.by_id) if line is not None else 0

    def line_of(self, model: str, but: int = 0) -> Line | None:
        """Those on time, with what one of the oldest needs in the mean; None if there are no more than `but`."""
        line = self.lines.get(model)
        if line is None or len(line.by_id) <= but:
            return None
        prompts = uncached = answers = 0.0
        oldest = list(islice(line.by_id.values(), _AVERAGED_MAX))
        for one in oldest:
            prompts += one.tokens
            uncached += one.tokens - (one.work - one.left)
            answers += (one.work - one.tokens) / OUTPUT_WORTH
        count = len(oldest)
        return Line(len(line.by_id), prompts / count, max(uncached, 0.0) / count, answers / count)

    def stepped_back(self, model: str) -> int:
        """How many of them have."""
        line = self.lines.get(model)
        return len(line.late) if line is not None else 0

    def by_tenant(self) -> Counter[tuple[int, str]]:
        """How many wait, by band and tenant."""
        return Counter((waiting.priority, waiting.tenant) for waiting in self.by_id.values())

    def foreign(self, model: str) -> int:
        """How many requests from other regions wait for the model."""
        line = self.lines.get(model)
        return line.foreign + line.late_foreign if line is not None else 0

    def foreign_waits_s(self, model: str, now: float, but: Collection[str] = ()) -> float:
        """For how long the oldest of those from other regions that did not step back has waited here, `but` for these
        requests; 0 if there is none."""
        line = self.lines.get(model)
        if line is None or not line.foreign:
            return 0.0
        return next((now - one.since for one in line.by_id.values() if one.foreign and one.id not in but), 0.0)

    def note(self, model: str, late_s: float, now: float) -> None:
        """Record how long the oldest of each band has waited for the model. Called whenever a request may come or go,
        so that `stands_s` can tell a standing queue from one that is being worked off."""
        line = self.lines.get(model)
        if line is not None:
            for at, band in line.bands.items():
                if at >= 0:
                    band.note(late_s, now)

    def stands_s(self, model: str, priority: int, now: float) -> float:
        """For how long (seconds) the oldest request of the band, whichever it was, has always been late (see `note`). 0
        if requests of a lower band came lately: those are to step back first."""
        line = self.lines.get(model)
        band = line.bands.get(priority) if line is not None else None
        if band is None or band.late_since is None:
            return 0.0
        if any(p < priority and now - at < OF_LATE_S for p, at in self._came[model].items()):
            return 0.0
        return now - band.late_since

    def outlived(self, request_id: str, most_s: float, now: float) -> bool:
        """Whether the request has waited longer than `most_s`, and another of its band or above has not. KeyError if it
        is not here."""
        waiting, since = self.by_id[request_id], now - most_s
        if waiting.since - waiting.waited_s >= since:
            return False
        for other in reversed(self.lines[waiting.model].by_id.values()):
            if other.since < since:
                break
            if other.priority >= waiting.priority and other.since - other.waited_s >= since:
                return True
        return False

    def ahead(self, model: str, priority: int, tenant: str, weight: float) -> int:
        """How many that wait for the model go before one more request of the tenant: those of higher bands, and of its
        own band those whose turn is before its. However many another tenant has waiting, its turn comes."""
        line = self.lines.get(model)
        if line is None:
            return 0
        above = (band for at, band in line.bands.items() if at > priority)
        own = line.bands.get(priority)
        return sum(len(band.by_id) for band in above) + (own.ahead(tenant, weight) if own is not None else 0)

    def crowds(self, model: str, priority: int, tenant: str, weight: float, more: int = 0) -> bool:
        """Whether the tenant, with `more` requests in addition, has at least its share by weight of the requests that
        wait for the model in its band and have not stepped back. If no tenant has more than its share, all of them
        count."""
        line = self.lines.get(model)
        band = line.bands.get(priority) if line is not None else None
        if band is None:
            return True
        own = band.tenants.get(tenant)
        waiting, weights = (0, band.weight + weight) if own is None else (len(own.requests), band.weight)
        return (waiting + more) * weights >= _SAME * (len(band.by_id) + more) * weight

    def models(self) -> list[str]:
        """The models waited for: those with the highest band first, then the one with the oldest request."""
        lines = self.lines
        return sorted(lines, key=lambda model: (-max(lines[model].bands), lines[model].oldest.since))

    def fits(self, tokens: float) -> bool:
        """Whether one more request of this many tokens may wait. A first one always may."""
        if not self.by_id:
            return self.requests_max > 0
        return len(self.by_id) < self.requests_max and self.tokens + tokens <= self.tokens_max

    def push(
        self,
        request_id: str,
        model: str,
        tenant: str,
        weight: float,
        priority: int,
        tokens: float,
        now: float,
        output_tokens: float = 0.0,
        *,
        cached_tokens: float = 0.0,
        waited_s: float = 0.0,
        foreign: bool = False,
        late: bool = False,
        late_s: float = 0.0,
    ) -> None:
        """Let a request wait: its prompt tokens, the cached ones of them, and the expected answer tokens. `late`:
        behind those that are not late; `late_s`: as Waiting's. ValueError if it waits already, or there is no room."""
        if request_id in self.by_id:
            raise ValueError(f"request {request_id!r} waits already")
        if not self.fits(tokens):
            raise ValueError("the queue is full: ask fits() first")
        counts, left = work(tokens, output_tokens), work(tokens - cached_tokens, output_tokens)
        waiting = Waiting(
            request_id, model, tenant, priority, tokens, counts, left, now, waited_s, foreign, late, late_s
        )
        self.by_id[request_id] = waiting
        self.lines.setdefault(model, _Line()).push(waiting, weight)
        self.tokens += tokens
        if late:
            return  # it holds up no other
        if len(self._came) > MODELS_MAX:
            self._came = {name: self._came[name] for name in self.lines if name in self._came}
        self._came.setdefault(model, {})[priority] = now

    def step_back(self, request_id: str) -> None:
        """Move the request behind all that are not late, whatever their band; among the late ones it keeps its order.
        KeyError if it is not here."""
        waiting = self.by_id[request_id]
        if waiting.late:
            return
        line = self.lines[waiting.model]
        weight = line.bands[waiting.band].tenants[waiting.tenant].weight
        line.remove(waiting, served=False)
        self.by_id[request_id] = waiting = replace(waiting, late=True)
        line.push(waiting, weight)

    def reassign(self, variants: Mapping[str, str]) -> None:
        """Let these requests, by id, wait for these variants from now on; each keeps its age. In lines that a request
        leaves or joins, turns start afresh."""
        moved = {i: line for i, line in variants.items() if i in self.by_id and self.by_id[i].model != line}
        touched = {*moved.values(), *(self.by_id[i].model for i in moved)}
        weights = {
            (line, tenant): known.weight
            for line in touched & self.lines.keys()
            for band in self.lines[line].bands.values()
            for tenant, known in band.tenants.items()
        }
        for line in touched:
            self.lines.pop(line, None)
        for request_id, waiting in self.by_id.items():  # in order of arrival
            before = waiting.model
            if before in touched:
                waiting = self.by_id[request_id] = replace(waiting, model=moved.get(request_id, before))
                if not waiting.late:
                    self._came.setdefault(waiting.model, {})[waiting.priority] = waiting.since
                self.lines.setdefault(waiting.model, _Line()).push(waiting, weights[before, waiting.tenant])

    def remove(self, request_id: str, *, served: bool) -> Waiting | None:
        """Take a request out, wherever it is. `served`: charge its tenant for the turn, to be corrected by `settle`.
        None if it is not here."""
        waiting = self.by_id.pop(request_id, None)
        if waiting is None:
            return None
        line = self.lines[waiting.model]
        taken = line.remove(waiting, served=served)
        if served:
            self.taken[request_id] = taken
        if not len(line):
            del self.lines[waiting.model]
        self.tokens = self.tokens - waiting.tokens if self.by_id else 0.0  # sums of floats drift: an empty room is 0
        return waiting

    def settle(self, request_id: str, actual: float | None) -> None:
        """A served request is over; it was this much `work` (None: unknown, the estimate stands). Ignored for a request
        that never waited, or is settled already."""
        taken = self.taken.pop(request_id, None)
        if taken is not None and actual is not None:
            taken.band.settle(taken.tenant, (actual - taken.work) / taken.weight)

    def victims(
        self,
        priority: int,
        tokens: float,
        model: str = "",
        tenant: str = "",
        weight: float = 1.0,
        *,
        foreign: bool = False,
    ) -> list[Waiting]:
        """The requests to evict for one that does not fit: the newest of the lowest bands below it; then, in its own
        band, the newest foreign requests, if the new one is not foreign; then the newest of the tenant that holds most
        of the queue for one model, by weight, while that is more than the new request's tenant would then hold: in
        requests, or in prompt tokens if there are too many of these. A foreign request never takes the place of own
        work. So neither one tenant nor one model fills the queue alone. Empty if none may be evicted for it, or all of
        them would not be enough.
        """
        chosen: list[Waiting] = []
        requests = len(self.by_id) + 1 - self.requests_max
        lacking = self.tokens + tokens - self.tokens_max
        by_tokens = requests <= 0
        own = self._holder(priority, model, tenant)
        held = 0.0 if own is None else own.tokens if by_tokens else len(own.requests)
        largest = self._of_largest(priority, (held + (tokens if by_tokens else 1)) / weight, by_tokens=by_tokens)
        for waiting in self._evictable(priority, largest, foreign=foreign):
            chosen.append(waiting)
            requests, lacking = requests - 1, lacking - waiting.tokens
            if requests <= 0 and lacking <= 0.0:
                break
        else:
            return []
        # Small ones that came after a large one need not go with it.
        for waiting in chosen[:-1]:
            if requests < 0 and lacking + waiting.tokens <= 0.0:
                chosen.remove(waiting)
                requests, lacking = requests + 1, lacking + waiting.tokens
        return chosen

    def _holder(self, priority: int, model: str, tenant: str) -> _Tenant | None:
        line = self.lines.get(model)
        band = line.bands.get(priority) if line is not None else None
        return band.tenants.get(tenant) if band is not None else None

    def _evictable(self, priority: int, largest: Iterator[Waiting], *, foreign: bool) -> Iterator[Waiting]:
        """Those that go after a request of this band, in the order in which they make way."""
        for band in sorted({at for line in self.lines.values() for at in line.bands if at < priority}):
            yield from (one for one in reversed(self.by_id.values()) if one.band == band)
        if not foreign and any(line.foreign for line in self.lines.values()):
            yield from (one for one in reversed(self.by_id.values()) if one.foreign and one.band == priority)
        for one in largest:
            if foreign and not one.foreign:
                return
            if foreign or not one.foreign:  # else it has had its turn
                yield one

    def _of_largest(self, priority: int, least: float, *, by_tokens: bool) -> Iterator[Waiting]:
        """The newest request of the tenant that holds most of the queue for one model in this band, by weight, again
        and again, while that is more than `least`."""
        bands = (line.bands[priority] for line in self.lines.values() if priority in line.bands)
        held = [
            (
                -(one.tokens if by_tokens else len(one.requests)) / one.weight,
                n,
                one.weight,
                reversed(one.requests.values()),
            )
            for n, one in enumerate(tenant for band in bands for tenant in band.tenants.values())
        ]
        heapify(held)
        while held and -held[0][0] > least:
            share, n, weight, newest = held[0]
            waiting = next(newest, None)
            if waiting is None:
                heappop(held)
            else:
                yield waiting
                heapreplace(held, (share + (waiting.tokens if by_tokens else 1) / weight, n, weight, newest))

    def starved(self, model: str, now: float) -> Waiting | None:
        """The oldest request waiting for the model, if it is starving and the next turn is its own."""
        line = self.lines.get(model)
        if (
            line is None
            or not line.by_id
            or line.turns < STARVED_EVERY - 1
            or now - line.oldest.since <= self._starvation_s
        ):
            return None
        eldest = line.eldest
        return eldest if now - eldest.since > self._starvation_s else None

    def first(self, model: str, most: int, now: float) -> list[Waiting]:
        """The next `most` requests for the model in the order they are due."""
        return list(islice(self.in_order(model, now), most))

    def in_order(self, model: str, now: float, *, own: bool = False) -> Iterator[Waiting]:
        """All of them; `own`: foreign requests left out. Nothing may be added or removed meanwhile."""
        line = self.lines.get(model)
        if line is None or (own and line.foreign + line.late_foreign == len(line)):
            return iter(())
        due = line.in_order(now)
        return (waiting for waiting in due if not waiting.foreign) if own else due
