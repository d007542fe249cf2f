"""How fast each replica is expected to be: its own recent measurements and, as far as they are lacking, its peers'.

    expected = peers' * (own / peers') ** (evidence^2 / (evidence^2 + OWN^2))     (the ratio less ALIKE)

Peers serve the same models on the same kind of GPU. Their figure is the weighted median of all their own figures;
without recent measurements, of earlier ones; if there never were any, the configured figure, times the ratio of
measured to configured of other kinds of GPU with the same model: a guess is never compared directly with a measurement.
All figures are relative to what is configured for each. The fewer recent measurements a replica has, the greater its
uncertainty. A whole request takes at least what `occupancy` estimates from those under way at all peers.

Invariants: every figure exists, is positive, finite and in its domain; without samples it goes to the peers' figure,
and its uncertainty to UNCERTAINTY; only observations and `refresh` (some times a second) write. Never chooses.
"""

from __future__ import annotations

from itertools import islice
from math import exp, inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farhop.balance.estimate.estimates import (
    CONTEXT_TOKENS,
    FIT_TAU_S,
    INTERFERENCE_SHARE,
    OUTPUT_TOKENS,
    PREFILL_MS,
    SERVICE_MS,
    SERVICE_TAU_S,
    TPOT_MS,
    Measured,
    Speed,
)
from farhop.balance.estimate.occupancy import Occupancy
from farhop.balance.estimate.windows import TAU_S
from farhop.balance.ledger import Load

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from regional_lb.fleet.view import Replica

    Columns = NDArray[np.float64]
    _Key = tuple[frozenset[str], str, str]  # models, GPU, role

REFRESH_S = 0.5
# Of thousands less often, so that it costs some 1 % of the time; and often enough for what fades with TAU_S.
_REFRESH_ROW_S, _REFRESH_KIND_S, _REFRESH_MOST_S = 1e-3, 5e-3, 2.5
# The evidence (in one-second windows) at which a replica's own figure counts as much as its peers'. It enters squared:
# a replica measured all the time (6 windows) counts to 97 %, one with a third of a window left to a tenth.
OWN = 1.0
# The share by which GPUs of one kind may differ by chance (prompts between two tokens). Within it they count as equal,
# and load decides between them.
ALIKE = 0.1
UNCERTAINTY = 0.5  # the uncertainty (a share) of a replica without recent measurements
SLOW = 1.5  # times its peers' figure: worth reporting
_PRIOR = 0.1  # weight of a guess, as evidence, beside the first measurement of its kind
# The peers' longer-term figure counts twice as much as what they measure now: regions are compared by it, and the
# prompts of a few seconds are no reason to send requests over an ocean. A replica that differs by more is known by its
# own figure.
_MEMORY = 2.0
_MEMORY_S, _MEMORY_TAU_S = 30.0, 600.0  # what peers measured: over how much time, and how long it is kept
# Without any measurement for this long it is forgotten: no request goes to a region that was slow when it was last
# measured, so it would never be seen to be fast again.
_SILENT_S = 120.0
_INTERFERENCE_DOUBT = 50.0  # the guess counts as measured over loads that differ by 7 requests
_SAME_SHARE = 0.01  # interference that changes by less of itself stays what it is
_OTHERS_MAX = 32  # kinds that a kind without samples is held against

_IDLE = Load()
_FIGURES = 3  # the rows: prefill of a token, a lone token, a whole request
_FIGURE = np.arange(_FIGURES)[:, np.newaxis]
_DOMAIN = np.array((PREFILL_MS, TPOT_MS, SERVICE_MS)).reshape(_FIGURES, 2, 1)
_FADES_S = np.array((TAU_S, TAU_S, SERVICE_TAU_S)).reshape(_FIGURES, 1)
_FADED = (np.exp(-_SILENT_S / _FADES_S) / _FADES_S)[:, 0]  # over the evidence that is left: forgotten with its tau then
_LEAST = 1e-30  # no division by nothing


class ExpectedSpeed(NamedTuple):
    """One replica's expected speeds. `peers_*`: its peers' figures; `uncertainty` is a share, at most UNCERTAINTY.
    `sampled_at`: when it was last measured (monotonic seconds), None if never."""

    prefill_ms_per_token: float
    tpot_ms: float  # of an answer that is alone there
    batch_interference_ms: float  # what each request under way adds to a token of every other
    service_ms: float
    uncertainty: float
    sampled_at: float | None
    peers: int  # how many there are beside it
    peers_prefill_ms_per_token: float
    peers_tpot_ms: float

    def tpot_at(self, load: float) -> float:
        """Milliseconds per token with this many requests in flight (1 or more)."""
        return self.tpot_ms + self.batch_interference_ms * (load - 1.0)


class _Kind:
    """Peers: their rows, and what is known of them together, as logarithms of shares of what is configured."""

    __slots__ = (
        "answered", "began", "context_token_s", "in_flight_s", "interference_share", "level", "memory", "models",
        "occupancy", "remembered_s", "role", "rows",
    )  # fmt: skip

    def __init__(self, models: frozenset[str], role: str) -> None:
        self.models, self.role = models, role
        self.began = self.answered = False  # whether any of them ever measured a prefill, and a whole answer
        self.rows: NDArray[np.intp] = np.empty(0, dtype=np.intp)
        self.level = np.zeros(_FIGURES)
        self.memory = np.zeros(_FIGURES)
        self.remembered_s = np.zeros(_FIGURES)  # over how much time with samples, less what was forgotten
        self.occupancy = Occupancy()
        self.in_flight_s = self.context_token_s = 0.0  # integrals over time of the members' loads, forgetting
        self.interference_share = INTERFERENCE_SHARE  # as all members have it

    def learn(self, own: Columns, evidence: Columns, wider: Columns, dt_s: float) -> None:
        """Take the members' own figures: rows are figures, columns are members."""
        middle, weight = _medians(own, evidence)
        seen_s = dt_s * np.minimum(weight / _FADES_S[:, 0], 1.0)  # each second counts once, however slowly it fades
        forgotten_per_s = 1.0 / _MEMORY_TAU_S + _FADED / np.maximum(weight, _LEAST)
        self.remembered_s = np.minimum(self.remembered_s * np.exp(-dt_s * forgotten_per_s) + seen_s, _MEMORY_S)
        self.memory += (middle - self.memory) * np.minimum(seen_s / np.maximum(self.remembered_s, 1e-9), 1.0)
        now, known = np.minimum(weight, 1.0), _MEMORY * self.remembered_s / _MEMORY_S
        self.level = (now * middle + known * self.memory + _PRIOR * wider) / (now + known + _PRIOR)


def _medians(own: Columns, evidence: Columns) -> tuple[Columns, Columns]:
    """Of each row the weighted median (of two the lower: an uncertain replica is better tried) and the total weight."""
    if own.shape[1] == 1:
        return own[:, 0], evidence[:, 0]
    order = own.argsort(axis=1)
    reached = evidence[_FIGURE, order].cumsum(axis=1)
    weight = reached[:, -1]
    at = (reached >= 0.5 * weight[:, np.newaxis]).argmax(axis=1)
    return own[_FIGURE[:, 0], order[_FIGURE[:, 0], at]], weight


class Speeds:
    """See the module's docstring. Its columns have a row for each replica of the view, in its order."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._of: list[Speed] = []
        self._replicas: list[Replica] = []
        self._changed: set[str] = set()
        self._kinds: dict[_Key, _Kind] = {}
        self._kind_of: list[_Kind] = []
        self._loads: list[Load] = []
        self._kind_at: NDArray[np.intp] = np.empty(0, dtype=np.intp)  # the place of each row's kind among the kinds
        self._at: float | None = None
        self.due = -inf
        self._resize(0)

    def _resize(self, n_rows: int) -> None:
        self._own = np.zeros((_FIGURES, n_rows))
        self._evidence = np.zeros((_FIGURES, n_rows))
        self._load_fit = np.zeros((2, n_rows))  # how loads and tokens go together, and how far loads differ
        self._configured = np.ones((_FIGURES, n_rows))
        self._level = np.zeros((_FIGURES, n_rows))
        self._expected = np.ones((_FIGURES, n_rows))
        self.batch_interference_ms, self.uncertainty = np.zeros(n_rows), np.full(n_rows, UNCERTAINTY)

    # -- reading

    @property
    def prefill_ms_per_token(self) -> Columns:
        """Milliseconds to prefill a token, by row of the table."""
        prefill_ms: Columns = self._expected[0]
        return prefill_ms

    @property
    def tpot_alone_ms(self) -> Columns:
        """Milliseconds between two tokens of an answer that is alone there, by row."""
        tpot_ms: Columns = self._expected[1]
        return tpot_ms

    @property
    def service_ms(self) -> Columns:
        """Milliseconds of a whole request, by row of the table."""
        service_ms: Columns = self._expected[2]
        return service_ms

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def __getitem__(self, name: str) -> ExpectedSpeed:
        """One replica's figures. Raises KeyError if it is not in the view."""
        row = self._rows[name]
        prefill_ms, tpot_ms, service_ms = self._expected[:, row].tolist()
        peers_ms = (self._configured[:, row] * np.exp(self._level[:, row])).tolist()
        return ExpectedSpeed(
            prefill_ms, tpot_ms, self.batch_interference_ms.item(row), service_ms, self.uncertainty.item(row),
            self._of[row].sampled_at, len(self._kind_of[row].rows) - 1, peers_ms[0], peers_ms[1],
        )  # fmt: skip

    def slow(self, name: str, load: float, now: float) -> str:
        """In words, by how much the replica is expected to be slower than its peers; "" if it is not, or has no
        peers."""
        speed = self[name]
        if not speed.peers or speed.sampled_at is None:
            return ""
        reason = ""
        if speed.tpot_ms >= SLOW * speed.peers_tpot_ms:
            mine_ms = speed.tpot_at(max(load, 1.0))
            reason = f"{mine_ms:.3g} ms against {mine_ms * speed.peers_tpot_ms / speed.tpot_ms:.3g} of its peers"
        elif speed.prefill_ms_per_token >= SLOW * speed.peers_prefill_ms_per_token:
            mine_ms, peers_ms = speed.prefill_ms_per_token, speed.peers_prefill_ms_per_token
            reason = f"{mine_ms:.2g} ms to prefill a token against {peers_ms:.2g} of its peers"
        return f"slow: {reason}, last sample {max(0.0, now - speed.sampled_at):.0f} s ago" if reason else ""

    # -- the replicas that there are

    def adopt(self, replicas: Mapping[str, Replica]) -> None:
        """Take the replicas of a new view, in this order. A new process under a known name starts without
        measurements."""
        before = {name: (self._of[row], self._replicas[row]) for name, row in self._rows.items()}
        loads = {name: self._loads[row] for name, row in self._rows.items()}
        self._rows = {name: row for row, name in enumerate(replicas)}
        self._loads = [loads.get(name, _IDLE) for name in replicas]
        self._replicas = list(replicas.values())
        self._of = [_speed_of(before.get(replica.name), replica) for replica in self._replicas]
        self._resize(len(self._of))
        for row, replica in enumerate(self._replicas):
            guesses = replica.prefill_ms_per_token, replica.tpot_ms, OUTPUT_TOKENS * replica.tpot_ms
            self._configured[:, row] = guesses
        lo, hi = _DOMAIN[:, 0], _DOMAIN[:, 1]
        self._configured = np.clip(np.nan_to_num(self._configured, nan=1.0), lo, hi)
        self._group()
        for speed, kind in zip(self._of, self._kind_of, strict=True):
            if speed.interference_share != kind.interference_share:
                speed.interference_share = kind.interference_share
        self._changed = {name for name in self._rows if self._of[self._rows[name]].sampled_at is not None}
        self.refresh(self._at if self._at is not None else 0.0)
        self.due = -inf

    def _group(self) -> None:
        known, self._kinds = self._kinds, {}
        members: dict[_Key, list[int]] = {}
        for row, replica in enumerate(self._replicas):
            key: _Key = (replica.models - replica.adapters, replica.gpu, replica.role)
            members.setdefault(key, []).append(row)
        self._kind_at = np.zeros(len(self._replicas), dtype=np.intp)
        self._kind_of = [_Kind(frozenset(), "")] * len(self._replicas)
        for place, (key, rows) in enumerate(members.items()):
            kind = self._kinds[key] = known.get(key) or _Kind(key[0], key[2])
            kind.rows = np.array(rows, dtype=np.intp)
            self._kind_at[kind.rows] = place
            kind.occupancy.are_now([self._loads[row] for row in rows], self._at or 0.0)
            for row in rows:
                self._kind_of[row] = kind

    def restarted(self, name: str) -> None:
        """The replica is a new process: discard what was measured of the former one."""
        row = self._rows.get(name)
        if row is not None:
            self._of[row] = Speed()
            self._of[row].interference_share = self._kind_of[row].interference_share
            self._changed.add(name)

    # -- what was measured

    def began(self, name: str, elapsed_ms: float, tokens: float, now: float) -> bool:
        """See Speed.began. False for a replica that is not in the view."""
        row = self._rows.get(name)
        if row is None:
            return False
        if not self._of[row].began(elapsed_ms, tokens, self._expected.item(1, row), now):
            return False
        self._note(name, self._kind_of[row], began=True)
        return True

    def prefilled(self, name: str, elapsed_ms: float, tokens: float, now: float) -> None:
        """See Speed.prefilled."""
        row = self._rows.get(name)
        if row is not None and self._of[row].prefilled(elapsed_ms, tokens, now):
            self._note(name, self._kind_of[row], began=True)

    def loaded(self, name: str, load: Load, now: float) -> None:
        """Set the load of a replica from `now` on."""
        row = self._rows.get(name)
        if row is not None:
            self._kind_of[row].occupancy.changed(self._loads[row], load, now)
            self._loads[row] = load

    def ended(
        self, name: str, decode_ms: float, service_ms: float, completion_tokens: int, load: float, now: float
    ) -> None:
        """See Speed.ended."""
        row = self._rows.get(name)
        if row is not None:
            self._of[row].ended(decode_ms, service_ms, completion_tokens, load, now)
            self._changed.add(name)
            if not self._kind_of[row].answered:
                self._note(name, self._kind_of[row], answered=True)

    def measured(self, now: float) -> dict[str, Measured]:
        """The measurements by replica, for those that have any."""
        return {name: self._of[row].measured(now) for name, row in self._rows.items() if self._of[row].sampled_at}

    def begin_with(self, name: str, other: Measured, now: float) -> None:
        """Start from what another balancer measured of a replica that was not measured here."""
        row = self._rows.get(name)
        if row is None or self._of[row].sampled_at is not None:
            return
        self._of[row].adopt(other, now)
        self._note(name, self._kind_of[row], began=other.prefill_evidence > 0.0, answered=other.service_evidence > 0.0)

    def _note(self, name: str, kind: _Kind, *, began: bool = False, answered: bool = False) -> None:
        """Note that something was measured. The first measurement of a kind is used at once: guesses may be wrong by
        any factor."""
        self._changed.add(name)
        if (began and not kind.began) or (answered and not kind.answered):
            kind.began |= began
            kind.answered |= answered
            self.due = -inf

    # -- estimates

    def refresh(self, now: float) -> None:
        """Update all figures with new measurements and with the ageing of old ones."""
        dt_s = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now if self._at is None else max(now, self._at)
        more_s = _REFRESH_ROW_S * len(self._of) + _REFRESH_KIND_S * len(self._kinds)
        self.due = self._at + min(REFRESH_S + more_s, _REFRESH_MOST_S)
        if dt_s:
            self._evidence *= np.exp(-dt_s / _FADES_S)
            self._load_fit *= exp(-dt_s / FIT_TAU_S)
        rows = [self._rows[name] for name in self._changed]
        self._changed.clear()
        if rows:
            self._write(rows, now)
        self._sum_contexts(dt_s)
        self._fit_interference(now)
        levels = self._learned(dt_s)
        if not levels:
            return
        self._level = level = np.array(levels).T[:, self._kind_at]
        differs = self._own - level
        differs = np.sign(differs) * np.maximum(np.abs(differs) - ALIKE, 0.0)
        squares = self._evidence * self._evidence
        share = squares / (squares + OWN * OWN)
        expected = self._configured * np.exp(level + differs * share)
        least_ms = np.array([kind.occupancy.service_ms(now) for kind in self._kinds.values()])
        expected[2] = np.maximum(expected[2], least_ms[self._kind_at])
        self._expected = np.minimum(np.maximum(expected, _DOMAIN[:, 0]), _DOMAIN[:, 1])
        self.uncertainty = UNCERTAINTY * np.sqrt(1.0 - np.maximum(share[0], share[1]))
        share_of_kind = np.array([kind.interference_share for kind in self._kinds.values()])
        self.batch_interference_ms = self._expected[1] * share_of_kind[self._kind_at]

    def _write(self, rows: list[int], now: float) -> None:
        measured, at = np.array([self._of[row].measured(now) for row in rows]).T, np.array(rows)
        own_ms = measured[:_FIGURES]
        self._own[:, at] = np.log(np.where(own_ms > 0.0, own_ms / self._configured[:, at], 1.0))
        self._evidence[:, at] = measured[_FIGURES : 2 * _FIGURES]
        self._load_fit[:, at] = measured[2 * _FIGURES :]

    def _learned(self, dt_s: float) -> list[Columns]:
        """The current figures of each kind."""
        kinds = list(self._kinds.values())
        for kind in kinds:
            wider = _wider(kind, kinds) if len(kinds) > 1 else np.zeros(_FIGURES)
            kind.learn(self._own[:, kind.rows], self._evidence[:, kind.rows], wider, dt_s)
        return [kind.level for kind in kinds]

    def _sum_contexts(self, dt_s: float) -> None:
        keep = exp(-dt_s / FIT_TAU_S)
        for kind in self._kinds.values():
            loads = [self._loads[row] for row in kind.rows.tolist()]
            kind.in_flight_s = kind.in_flight_s * keep + dt_s * sum([load.in_flight for load in loads])
            kind.context_token_s = kind.context_token_s * keep + dt_s * sum([load.context_tokens for load in loads])

    def _fit_interference(self, now: float) -> None:
        """By what share of a lone token's time each request lengthens a token: one figure per kind, from the loads of
        all its members and, as far as these did not differ, from the contexts, which each token reads. A figure for
        each member would be noise, and would separate equals. What tokens took at the loads that there were stays, and
        so does what is known of the kind."""
        kinds = self._kinds.values()
        in_flight_s, context_token_s = (
            sum(kind.in_flight_s for kind in kinds),
            sum(kind.context_token_s for kind in kinds),
        )
        usual_tokens = context_token_s / in_flight_s if in_flight_s else CONTEXT_TOKENS
        for kind in kinds:
            tokens = kind.context_token_s / kind.in_flight_s if kind.in_flight_s else usual_tokens
            guess = INTERFERENCE_SHARE * tokens / CONTEXT_TOKENS
            cov, var = np.add.reduce(self._load_fit[:, kind.rows], axis=1).tolist()
            share = (cov + _INTERFERENCE_DOUBT * guess) / (var + _INTERFERENCE_DOUBT)
            share = min(max(share, 0.0), 1.0)  # a token alone takes no less than nothing
            if abs(share - kind.interference_share) <= _SAME_SHARE * kind.interference_share:
                continue
            kind.interference_share = share
            for row in kind.rows.tolist():
                self._of[row].interference_share = share
            known = [row for row in kind.rows.tolist() if self._of[row].sampled_at is not None]
            before = self._own[1, known]
            if known:
                self._write(known, now)
                kind.memory[1] += (self._own[1, known] - before).mean()


def _wider(kind: _Kind, kinds: list[_Kind]) -> Columns:
    """The factor by which other kinds with one of the same models differ from their configured figures: the median (of
    two the lower)."""
    alike = (one for one in kinds if one is not kind and one.role == kind.role)
    others = (one for one in alike if not one.models.isdisjoint(kind.models))
    levels = [one.level for one in islice(others, _OTHERS_MAX)]
    return np.sort(np.array(levels), axis=0)[(len(levels) - 1) // 2] if levels else np.zeros(_FIGURES)


def _speed_of(before: tuple[Speed, Replica] | None, replica: Replica) -> Speed:
    if before is None or (before[1].address, before[1].version) != (replica.address, replica.version):
        return Speed()
    return before[0]
