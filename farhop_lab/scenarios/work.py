"""A scenario's `work`: the figures of its kind, the length of its longest request, and its programs.

Pure except for the trace files it is given. Invariants: the same piece of work, seed and load give the same requests,
whatever the router; every client, region and piece has its own random generator.
"""

from __future__ import annotations

from functools import partial
from itertools import count
from math import isfinite
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from farhop_lab.scenarios.schema import RECORDED_REGIONS
from farhop_lab.workloads import agents, arrivals, chat, load, places, traces, trees
from farhop_lab.workloads.daylight import Daylight
from farhop_lab.workloads.program import Ask, Program, Programs, Schedule, Start, WorkloadError, one
from farhop_lab.workloads.prose import prose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from farhop_lab.scenarios.schema import BurstsDoc, WorkDoc
    from farhop_lab.sim.clients import ClientPool

PLACED_ZIPF = 1.0
_TRACED = "a trace brings its own programs"
_READERS: dict[str, Callable[[Path], Sequence[Any]]] = {
    "mooncake": load.mooncake,
    "azure": load.azure,
    "burstgpt": load.burstgpt,
    "log": load.log,
    "sessions": load.sessions,
}


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """Single requests. The first `shared_tokens` of a prompt are one of `groups` texts, drawn evenly. In an open loop
    these are those of its region or, with `everywhere`, the same in all regions, and other ones every `renewed_s` (0:
    never). In a closed loop each client has its own, or `everywhere` those of all.
    """

    prompt_tokens: int = 1000
    shared_tokens: int = 0
    groups: int = 50
    everywhere: bool = False
    renewed_s: float = 0.0
    answer_tokens: int = 200
    max_tokens: int = 512

    def __post_init__(self) -> None:
        if not 0 <= self.shared_tokens <= self.prompt_tokens or self.prompt_tokens < 1 or self.groups < 1:
            raise WorkloadError(
                "requests need prompt_tokens and groups of 1 or more, shared_tokens up to prompt_tokens"
            )
        if not (isfinite(self.renewed_s) and self.renewed_s >= 0.0):
            raise WorkloadError("requests need renewed_s of 0 (never) or more seconds")
        if not 1 <= self.answer_tokens <= self.max_tokens:
            raise WorkloadError("requests need 1 <= answer_tokens <= max_tokens")


Figures = chat.Chat | trees.Tree | agents.Agent | Requests | traces.Limits
_KINDS: dict[str, type[Any]] = {"trees": trees.Tree, "agents": agents.Agent, "requests": Requests}


def figures_of(work: WorkDoc) -> Figures:
    """The figures of a piece of work: its kind's, overridden by the file's. WorkloadError in one line. A chat is `like`
    arena (or wildchat); `kind` of ServeGen's clients is left to `schedule`.
    """
    given = dict(work.figures)
    if work.kind == "chat":
        like = given.pop("like", "arena")
        known = chat.CHATS.get(like) if isinstance(like, str) else None
        if known is None:
            raise WorkloadError(f"like: {like!r} is none of {', '.join(chat.CHATS)}")
        traced: Figures = _with(known, given)
        return traced
    if work.kind == "servegen":
        given.pop("clients", None)
    figures: Figures = _with(_KINDS.get(work.kind, traces.Limits)(), given)
    return figures


def _with(base: Figures, given: Mapping[str, Any]) -> Any:
    kind = type(base)
    known = [name for name in kind.__struct_fields__ if name not in ("name", "tenant")]
    for name in given:
        if name not in known:
            raise WorkloadError(f"{name}: no figure of this kind; known here: {', '.join(known)}")
    try:
        return msgspec.convert({**msgspec.structs.asdict(base), **given}, kind)
    except msgspec.ValidationError as error:
        raise WorkloadError(str(error)) from None


def longest_tokens(figures: Figures) -> int:
    """Tokens of the longest possible prompt and answer."""
    if isinstance(figures, chat.Chat):
        # A first question may take half the context, behind an opening.
        return max(figures.context_tokens, figures.opening_tokens + figures.context_tokens // 2) + figures.max_tokens
    if isinstance(figures, trees.Tree):
        step = figures.max_tokens + figures.instruction_tokens
        return figures.examples_tokens + figures.question_tokens + figures.levels * step
    if isinstance(figures, agents.Agent):
        return figures.last_tokens + figures.max_tokens
    if isinstance(figures, Requests):
        return figures.prompt_tokens + figures.max_tokens
    return figures.context_tokens


def days_of(doc_days: Mapping[str, Any], day_s: float) -> dict[str, Daylight]:
    """The regions' days, by name."""
    return {
        name: Daylight(utc_hours=day.utc_hours, swing=day.swing, weight=day.weight, day_s=day_s)
        for name, day in doc_days.items()
    }


# -- closed and open loops


def send(
    clients: ClientPool, work: WorkDoc, name: str, seed: int, scale: float, days: Mapping[str, Daylight], folder: Path
) -> None:
    """Start the clients of one piece of work, `scale` times as much of it as the file says. `name` distinguishes
    pieces. Raises TraceError and WorkloadError.
    """
    figures = figures_of(work)
    for region, wanted in work.clients.items():
        n = round(wanted * scale)
        for i in range(n):
            day, threshold = days.get(region), (i + 0.5) / n
            awake = None if day is None else _awake(day, threshold)
            clients.closed(region, programs(figures, work.tenant, f"{name} {region} {i}", seed, name), awake=awake)
    for found in schedules(work, name, seed, scale, days, folder, clients.until):
        clients.open(found)


def schedules(
    work: WorkDoc, name: str, seed: int, scale: float, days: Mapping[str, Daylight], folder: Path, until: float
) -> Iterator[Schedule]:
    """The open loops of a piece of work, as in `send`: to know the requests without a world. Raises TraceError and
    WorkloadError.
    """
    figures = figures_of(work)
    for region, per_s in work.per_s.items():
        rng = Random(f"{seed} {name} {region}")
        moments = _moments(per_s * scale, days.get(region), work.bursts, rng)
        yield _at_moments(figures, work.tenant, region, name, seed, moments)
    if work.path:
        yield schedule(figures, work, seed, scale, days, folder, until)


def _awake(day: Daylight, threshold: float) -> Any:
    return lambda now: day.awake(now, threshold)


def programs(figures: Figures, tenant: str, client: str, seed: int, piece: str = "") -> Programs:
    """One client's programs, without end. `piece`: the name of the work that its texts `everywhere` are of."""
    if isinstance(figures, chat.Chat):
        return chat.chats(figures, client, seed, tenant=tenant)
    if isinstance(figures, trees.Tree):
        return trees.trees(figures, client, seed, tenant=tenant)
    if isinstance(figures, agents.Agent):
        return agents.agents(figures, client, seed, tenant=tenant)
    assert isinstance(figures, Requests), _TRACED
    mine = f"requests {seed} {client}"
    texts = f"{seed} {piece}" if figures.everywhere else mine
    return (_single(figures, f"{mine} {n}", tenant, texts) for n in count())


def _maker(figures: Figures, tenant: str) -> arrivals.Maker:
    if isinstance(figures, chat.Chat):
        return lambda name, rng: chat.conversation(figures, name, rng, tenant=tenant)
    if isinstance(figures, trees.Tree):
        return lambda name, rng: trees.tree(figures, name, rng, tenant=tenant)
    assert isinstance(figures, agents.Agent), _TRACED
    return lambda name, rng: agents.agent(figures, name, rng, tenant=tenant)


def _single(figures: Requests, name: str, tenant: str, texts: str) -> Program:
    """One request. Equal `texts` share their beginnings."""
    shared = prose(f"{texts} group {Random(name).randrange(figures.groups)}", figures.shared_tokens)
    return one(
        Ask(
            prompt=shared + prose(name, figures.prompt_tokens - figures.shared_tokens),
            max_tokens=figures.max_tokens,
            answer_tokens=figures.answer_tokens,
            tenant=tenant,
        )
    )


def _moments(per_s: float, day: Daylight | None, bursts: BurstsDoc | None, rng: Random) -> Iterator[float]:
    if day is None:
        moments = arrivals.poisson(per_s, rng)
    else:
        moments = arrivals.varying(lambda at: per_s * day.level(at), per_s * day.peak, rng)
    return moments if bursts is None else arrivals.bunched(moments, bursts.every_s, bursts.for_s)


def _at_moments(
    figures: Figures, tenant: str, region: str, piece: str, seed: int, moments: Iterator[float]
) -> Schedule:
    name = f"{seed} {piece} {region}"
    if not isinstance(figures, Requests):
        yield from arrivals.programs(moments, lambda *_: region, _maker(figures, tenant), name)
        return
    texts = f"{seed} {piece}" if figures.everywhere else name
    for number, at in enumerate(moments):
        since = f" since {at // figures.renewed_s:.0f}" if figures.renewed_s else ""
        yield Start(at, region, partial(_single, figures, f"{name} {number}", tenant, texts + since))


# -- traces


def schedule(
    figures: Figures,
    work: WorkDoc,
    seed: int,
    scale: float,
    days: Mapping[str, Daylight],
    folder: Path,
    until: float,
) -> Schedule:
    """A trace's schedule. Raises TraceError, WorkloadError."""
    assert isinstance(figures, traces.Limits)
    limits = msgspec.structs.replace(figures, tenant=work.tenant)
    path, recorded, since = folder / work.path, work.place == "recorded", work.since_s
    if work.kind == "log":
        rows = load.log(path)
        place = None if recorded else _place(work, days, seed)
        if work.loop == "closed":
            found = traces.sessions(traces.sessions_of(rows), place, limits)
        else:
            found = traces.log(rows, place, limits)
    elif work.kind == "sessions":
        found = traces.sessions(load.sessions(path), None if recorded else _place(work, days, seed), limits)
    elif work.kind == "mooncake":
        rng = Random(f"{seed} {work.kind}")
        found = traces.mooncake(load.mooncake(path), _place(work, days, seed), rng, limits)
    elif work.kind == "azure":
        found = traces.azure(load.azure(path), _place(work, days, seed), limits)
    elif work.kind == "burstgpt":
        found = traces.azure(load.burstgpt(path), _place(work, days, seed), limits)
    else:
        clients = load.servegen(path, str(work.figures.get("clients", "deepseek-r1")))
        by, ends = _place(work, days, seed), since + until * work.speed
        found = traces.servegen(clients, by, seed, limits=limits, scale=scale / work.speed, since=since, until=ends)
        scale, since = 1.0, 0.0  # as many more of them, not faster; and its first time is 0 already
    fast = arrivals.sped(found, work.speed * scale, since=since)
    return arrivals.thinned(fast, work.share, Random(f"{seed} kept"))


def _place(work: WorkDoc, days: Mapping[str, Daylight], seed: int) -> places.PlaceRule:
    salt = str(seed)
    if work.place == "sun":
        return places.following_sun({name: days[name] for name in work.regions if name in days}, salt)
    if work.place == "zipf":
        return places.zipf(work.regions, PLACED_ZIPF, salt)
    return places.uniform(work.regions, salt)


def check_trace(work: WorkDoc, folder: Path) -> None:
    """Read it whole. TraceError, also if it lacks what the work needs."""
    path = folder / work.path
    if work.kind == "servegen":
        clients = load.servegen(path, str(work.figures.get("clients", "deepseek-r1")))
        bare = next((client.name for client in clients if not client.lengths), None)
        if bare is not None:
            raise load.TraceError(f"{path}: {bare} was recorded without lengths; give other `clients` in `figures`")
        return
    rows = _READERS[work.kind](path)
    if work.place == "recorded" and work.kind in RECORDED_REGIONS:
        strangers = {row.region for row in rows} - set(work.regions)
        if "" in strangers:
            raise load.TraceError(f"{path}: it does not record where each request came in; give another `place`")
        if strangers:
            named = ", ".join(sorted(strangers))[:200]
            raise load.TraceError(f"{path}: it says of requests that they came in {named}; list these in `regions`")
    last = _moment(rows[-1])
    if work.since_s > last:
        raise load.TraceError(f"{path}: since_s {work.since_s:g} is past its end at {last:g} s; begin earlier")


def _moment(row: Any) -> float:
    """A row's time in seconds."""
    if isinstance(row, traces.MooncakeRow):
        return row.at_ms / 1e3
    at: float = row.at if isinstance(row, traces.AzureRow) else row.at_s
    return at
