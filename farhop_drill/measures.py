"""What a run showed: from canaries as clients saw them and balancers as they described themselves, to figures.

Pure; the names are `document.MEASURES`. Clients' counts are the authority: balancers' pages give t1 and utilisation
alone. t0 is when the first injection was requested, so that its own duration counts; "good" is a complete answer whose
first token came within the drill's objective. A figure without any observation is left out, never 0.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from math import ceil
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from farhop_drill.document import Drill

LIVE_S = 3.0  # how far abort conditions look back
WRONG = frozenset({"down", "draining", "suspect"})
BACK_S = 1.0  # how long everything must be served at home before it counts as back
BACK_SHARE = 0.9
BACK_AHEAD = 10  # of this many requests, from the first that is served at home on, nearly all must be
BACK_MAX = 1000  # canaries looked at for it
BACK_MIN = 3  # at least this many must have been served at home, however few requests there are
GIGABYTE = 1e9


class Canary(msgspec.Struct, frozen=True, kw_only=True):
    """One request of the probe, seconds from the run's beginning. `first_s` None: no first token. `region`: which one
    served it, by the answer's header; "" if it does not say. `code` "": it is complete. `prompt` names what may be
    compared."""

    entry: str
    tenant: str
    model: str
    began_s: float
    first_s: float | None
    ended_s: float
    region: str = ""
    code: str = ""
    status: int = 0
    prompt: str = ""
    text: str = ""
    sent_bytes: int = 0
    got_bytes: int = 0

    @property
    def ttft_ms(self) -> float | None:
        """To its first token."""
        return None if self.first_s is None else (self.first_s - self.began_s) * 1e3


class StatusSample(msgspec.Struct, frozen=True, kw_only=True):
    """What the global balancers that answered said at a moment: each region's worst state and fullest share, the epochs
    of the law that they apply, and which regions are pilot lights: True where all of them have woken it."""

    at_s: float
    states: Mapping[str, str]
    used: Mapping[str, float]
    epochs: tuple[int, ...] = ()
    pilots: Mapping[str, bool] = {}


class Timeline(msgspec.Struct):
    """When what was done: seconds from the run's beginning; None: not yet, or never."""

    began_s: float = 0.0
    t0_s: float | None = None
    restore_s: float | None = None
    restored_s: float | None = None
    ended_s: float | None = None
    law_epoch: int = 0
    steps: list[tuple[str, float]] = msgspec.field(default_factory=list)


def percentile(values: Iterable[float], share: float) -> float | None:
    """Nearest rank; None if there is nothing."""
    ranked = sorted(values)
    return ranked[max(0, ceil(share * len(ranked)) - 1)] if ranked else None


def homes(canaries: Iterable[Canary], before_s: float) -> dict[tuple[str, str], str]:
    """By entry and tenant, the region that served most of what began before."""
    seen: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for one in canaries:
        if one.began_s < before_s and one.region and not one.code:
            seen[one.entry, one.tenant][one.region] += 1
    return {who: counts.most_common(1)[0][0] for who, counts in seen.items()}


def live(
    drill: Drill, canaries: Sequence[Canary], looks: Sequence[StatusSample], now_s: float, violations: int
) -> dict[str, float]:
    """The measures over the last seconds, of canaries in the order they ended. `violations` are those of the whole run:
    none is ever forgotten."""
    recent: list[Canary] = []
    for one in reversed(canaries):
        if one.ended_s < now_s - LIVE_S:
            break
        recent.append(one)
    found = {"residency_violations": float(violations)}
    if recent:
        found["error_share"] = sum(bool(one.code) for one in recent) / len(recent)
        found["requests_failed"] = float(sum(bool(one.code) and one.first_s is None for one in recent))
    found |= _some("ttft_during_p99_ms", percentile(_ttfts(recent), 0.99))
    if looks and looks[-1].at_s >= now_s - LIVE_S:
        found |= _some("survivors_utilisation", max(_survivors(drill, looks[-1]), default=None))
    return found


def is_back(
    drill: Drill, canaries: Sequence[Canary], looks: Sequence[StatusSample], marks: Timeline, now_s: float
) -> bool:
    """Whether all regions are up, and the affected clients are all served where they were at first, for BACK_S now.

    A client that sent hardly any request in that time is judged by its last ones since the restoration.
    """
    if marks.t0_s is None or marks.restored_s is None or now_s < marks.restored_s + BACK_S or not looks:
        return False
    states = looks[-1].states
    if looks[-1].at_s < now_s - LIVE_S or any(state != "up" for state in states.values()):
        return False
    home = homes(canaries, marks.t0_s)
    theirs = _served_there(drill, home)
    some = [
        one
        for one in sorted(canaries[-BACK_MAX:], key=lambda one: one.began_s)
        if one.began_s >= marks.restored_s
        and (((one.entry, one.tenant) in theirs) if theirs else _affected(drill, home, one))
    ]
    recent = sum(one.began_s >= now_s - LIVE_S for one in some)
    some = some[-max(recent, BACK_MIN) :]
    return len(some) >= BACK_MIN and all(
        not one.code and one.region == home.get((one.entry, one.tenant)) for one in some
    )


def measured(
    drill: Drill,
    canaries: Sequence[Canary],
    looks: Sequence[StatusSample],
    marks: Timeline,
    violates: Callable[[Canary], bool],
    egress_usd_per_gb: Mapping[str, float],
) -> dict[str, float]:
    """Every figure for which there is an observation."""
    found: dict[str, float] = {"canaries": float(len(canaries))}
    if canaries:
        found["residency_violations"] = float(sum(map(violates, canaries)))
    t0 = marks.t0_s
    if t0 is None:
        return found
    until = marks.restore_s if marks.restore_s is not None else marks.ended_s or float("inf")
    home = homes(canaries, t0)
    during = [one for one in canaries if one.ended_s >= t0 and one.began_s < until]
    new = [one for one in during if one.began_s >= t0]
    if during:
        found["requests_failed"] = float(sum(bool(one.code) and one.first_s is None for one in during))
        found["error_share"] = sum(bool(one.code) for one in during) / len(during)
        found["streams_lost"] = float(sum(bool(one.code) and one.first_s is not None for one in during))
    found |= _bytes(canaries, during, t0)
    found |= _some("rto_s", _rto_s(drill, home, new, t0))
    found |= _some("detect_s", _detect_s(drill, looks, t0))
    found |= _some("pilot_light_s", _pilot_light_s(looks, t0))
    found |= _shift(drill, home, new, t0)
    found |= _failback(drill, home, canaries, marks)
    if marks.restore_s is not None and marks.restored_s is not None:
        found["restore_s"] = max(0.0, marks.restored_s - marks.restore_s)
    for name, some in (
        ("before", [one for one in canaries if one.ended_s < t0]),
        ("during", new),
        ("after", [one for one in canaries if marks.restored_s is not None and one.began_s >= marks.restored_s]),
    ):
        found |= _some(f"ttft_{name}_p99_ms", percentile(_ttfts(some), 0.99))
    found |= _some("ttft_during_p50_ms", percentile(_ttfts(new), 0.5))
    found |= _some("spill_usd", _spill_usd(home, new, egress_usd_per_gb))
    peak = [used for look in looks if t0 <= look.at_s < until for used in _survivors(drill, look)]
    found |= _some("survivors_utilisation", max(peak, default=None))
    if marks.law_epoch:
        followed = [one.at_s for one in looks if one.at_s >= t0 and one.epochs and min(one.epochs) >= marks.law_epoch]
        found |= _some("law_followed_s", followed[0] - t0 if followed else None)
    return found


# -- figure by figure


def _rto_s(drill: Drill, home: Mapping[tuple[str, str], str], new: Sequence[Canary], t0: float) -> float | None:
    """Of the client that waited longest: each entry and tenant by itself. A client with failures is restored by the
    first good answer to what it began after its last failure; one without, if affected, by its first answer."""
    worst: float | None = None
    for who, some in _by_client(new).items():
        bad = [one.began_s for one in some if not _good(drill, one)]
        if not bad and not _affected(drill, home, some[0]):
            continue
        later = [one for one in some if one.began_s > max(bad, default=-1.0) and _good(drill, one)]
        firsts = [one.first_s for one in later if one.first_s is not None]
        if not firsts:
            if bad and who:  # never restored while it was observed: at least this long
                worst = max(worst or 0.0, max(one.ended_s for one in some) - t0)
            continue
        worst = max(worst or 0.0, min(firsts) - t0)
    return worst


def _by_client(canaries: Iterable[Canary]) -> dict[tuple[str, str], list[Canary]]:
    found: dict[tuple[str, str], list[Canary]] = defaultdict(list)
    for one in sorted(canaries, key=lambda one: one.began_s):
        found[one.entry, one.tenant].append(one)
    return found


def _good(drill: Drill, one: Canary) -> bool:
    ttft_ms = one.ttft_ms
    return not one.code and ttft_ms is not None and ttft_ms <= drill.canaries.ttft_ms


def _affected(drill: Drill, home: Mapping[tuple[str, str], str], one: Canary) -> bool:
    """Whether its entry, or the region that served it at first, is in the blast radius."""
    radius = drill.blast_radius.regions
    return one.entry in radius or home.get((one.entry, one.tenant)) in radius


def _served_there(drill: Drill, home: Mapping[tuple[str, str], str]) -> set[tuple[str, str]]:
    """The clients that were served in the blast radius at first."""
    return {who for who, region in home.items() if region in drill.blast_radius.regions}


def _detect_s(drill: Drill, looks: Sequence[StatusSample], t0: float) -> float | None:
    for look in looks:
        if look.at_s >= t0 and any(look.states.get(name) in WRONG for name in drill.blast_radius.regions):
            return look.at_s - t0
    return None


def _pilot_light_s(looks: Sequence[StatusSample], t0: float) -> float | None:
    """Only of pilot lights that were asleep at the beginning: one that was awake shows nothing."""
    before = next((look.pilots for look in reversed(looks) if look.at_s < t0), {})
    asleep = [name for name, awake in before.items() if not awake]
    woken = (look.at_s - t0 for look in looks if look.at_s >= t0 and any(look.pilots.get(name) for name in asleep))
    return next(woken, None)


def _shift(drill: Drill, home: Mapping[tuple[str, str], str], new: Sequence[Canary], t0: float) -> dict[str, float]:
    """Of requests that were served there at first: from when on that share of all that follow is served elsewhere."""
    theirs = _served_there(drill, home)
    some = [one for one in sorted(new, key=lambda one: one.began_s)
            if (one.entry, one.tenant) in theirs and one.region]  # fmt: skip
    if not some:
        return {}
    away = [one.region != home[one.entry, one.tenant] for one in some]
    found = {"elsewhere_share": sum(away) / len(some)}
    first = next((one for one, is_away in zip(some, away, strict=True) if is_away), None)
    if first is not None:
        found["decide_s"] = (first.first_s if first.first_s is not None else first.ended_s) - t0
    for name, share in (("shifted_90_s", 0.9), ("shifted_99_s", 0.99)):
        left = sum(away)
        for at, one in enumerate(some):
            if left >= share * (len(some) - at):
                found[name] = max(0.0, one.began_s - t0)
                break
            left -= away[at]
    return found


def _failback(
    drill: Drill, home: Mapping[tuple[str, str], str], canaries: Sequence[Canary], marks: Timeline
) -> dict[str, float]:
    if marks.restore_s is None:
        return {}
    since = marks.restore_s
    theirs = _served_there(drill, home)
    some = [one for one in sorted(canaries, key=lambda one: one.began_s)
            if one.began_s >= since and (one.entry, one.tenant) in theirs]  # fmt: skip
    at_home = [not one.code and one.region == home.get((one.entry, one.tenant)) for one in some]
    for at, one in enumerate(some):
        ahead = at_home[at : at + BACK_AHEAD]
        if at_home[at] and sum(ahead) >= BACK_SHARE * len(ahead):
            return {"failback_s": (one.first_s or one.ended_s) - since}
    return {}


def _bytes(canaries: Sequence[Canary], during: Sequence[Canary], t0: float) -> dict[str, float]:
    """Compared with the earlier answer to the same prompt; no figure where engines do not repeat themselves."""
    before: dict[str, set[str]] = defaultdict(set)
    for one in canaries:
        if one.prompt and not one.code and one.ended_s < t0:
            before[one.prompt].add(one.text)
    lost = doubled = compared = 0
    for one in during:
        known = before.get(one.prompt, set())
        if not one.prompt or len(known) != 1 or one.first_s is None:
            continue
        (whole,) = known
        compared += 1
        same = _common(whole, one.text)
        if one.text != whole:
            lost += len(whole) - same
            doubled += len(one.text) - same
    return {"stream_bytes_lost": float(lost), "stream_bytes_doubled": float(doubled)} if compared else {}


def _common(a: str, b: str) -> int:
    """The length of two texts' common prefix, in characters."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _spill_usd(
    home: Mapping[tuple[str, str], str], new: Sequence[Canary], egress_usd_per_gb: Mapping[str, float]
) -> float | None:
    """A prompt leaves the region of its entry, its answer the region that served it."""
    away = [one for one in new if one.region and one.region != home.get((one.entry, one.tenant), one.region)]
    if not new:
        return None
    return sum(
        one.sent_bytes / GIGABYTE * egress_usd_per_gb.get(one.entry, 0.0)
        + one.got_bytes / GIGABYTE * egress_usd_per_gb.get(one.region, 0.0)
        for one in away
        if one.region != one.entry
    )


def _survivors(drill: Drill, look: StatusSample) -> list[float]:
    lost = drill.lost()
    return [used for name, used in look.used.items() if name not in lost]


def _ttfts(canaries: Iterable[Canary]) -> list[float]:
    return [one.ttft_ms for one in canaries if one.ttft_ms is not None]


def _some(name: str, value: float | None) -> dict[str, float]:
    return {} if value is None else {name: value}
