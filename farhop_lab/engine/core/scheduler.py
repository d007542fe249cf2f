"""The engine's scheduler, as in vLLM V1: continuous batching, chunked prefill, prefix reuse, preemption.

Pure: no clock, no IO. Live server and simulator drive the same object: `step(now)` decides a whole step (a forward
pass), the driver lets `duration_ms` pass, hands out the emissions and calls `settle()`. If single tokens are not
needed, sequences that merely decode are kept in `decodes`, and `calm` and `leap` carry out many such steps at once.

Invariants:
- a step computes at most `prefill_tokens_per_step` tokens (decodes included) for at most `sequences_max` sequences;
- while there is work every step makes progress: what is submitted fits the KV cache alone, and the oldest goes first
  (only if blocks held for other engines fill the cache can a step be idle);
- a batch uses no more adapters than fit it; a preempted sequence keeps its place before all that came later;
- a sequence is waiting, running or gone; it holds blocks only while running;
- at least the last prompt token is computed, never taken from the cache.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from farhop_lab.engine.core.adapters import Adapters
from farhop_lab.engine.core.decodes import BY_ORDER, FAR, Decodes
from farhop_lab.engine.core.held import Held
from farhop_lab.engine.core.kv import PagedCache

if TYPE_CHECKING:
    from farhop_lab.engine.core.kv_log import KvLog
    from farhop_lab.engine.core.profiles import Profile
    from farhop_lab.engine.core.sequence import Sequence

FINISHED_REASONS = ("stop", "length", "abort")
IDLE_STEP_MS = 1.0  # at least: a driver must not spin while nothing can be done


class EngineFullError(Exception):
    """The queue is full."""


class Emission(msgspec.Struct, frozen=True):
    """One token of one sequence, due at the end of the step. `finished` is stop, length or None."""

    id: str
    text: str
    finished: str | None


class Step(msgspec.Struct, frozen=True):
    """One forward pass: its duration and the tokens at its end."""

    duration_ms: float
    emissions: list[Emission]
    prefill_tokens: int
    decode_sequences: int


class Counters(msgspec.Struct):
    """Totals since the engine started; they only grow. Prefix figures are tokens, counted at first admission."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    steps: int = 0
    finished: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(FINISHED_REASONS, 0))


class EngineCore:
    """One replica's scheduler and KV cache. All times are of the driver's own monotonic clock, in seconds. Unless
    `each_token`, steps emit an answer's first and last tokens, and only some of the others.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        waiting_max: int = 8192,
        adapters: Adapters | None = None,
        each_token: bool = True,
        log: KvLog | None = None,
    ) -> None:
        self.profile, self.adapters = profile, adapters or Adapters()
        self.log = log
        self.kv = PagedCache(profile.kv_blocks, log)
        self.held = Held(self.kv)
        self.counters = Counters()
        self._waiting_max = waiting_max
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # sequences that are stepped, oldest first
        self._decodes = Decodes(profile.block_tokens, self.kv)  # sequences that merely decode
        self._passes_over = not each_token and profile.block_tokens > 1
        self._admissions = 0
        self._live: dict[str, Sequence] = {}
        self._leaving: list[Sequence] = []  # finished by the step under way, and in the batch until it ends
        self._blocked = False  # the last step could not admit the head of the queue, and nothing has changed since

    @property
    def waiting(self) -> int:
        """Sequences not in a batch: new or preempted."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences in the batch, including those that the step under way finishes."""
        return len(self._running) + len(self._decodes) + len(self._leaving)

    @property
    def batch(self) -> list[Sequence]:
        """The batch, oldest first; read only."""
        return sorted((*self._running, *self._decodes.caught_up()), key=BY_ORDER)

    def caught_up(self, sequence: Sequence) -> Sequence:
        """A sequence with its text up to now."""
        if sequence in self._decodes:
            self._decodes.caught_up()
        return sequence

    @property
    def line(self) -> deque[Sequence]:
        """The queue, in order; read only."""
        return self._waiting

    def adapters_of(self, *, running: bool) -> list[str]:
        """The adapters of sequences in the batch, or of those in the queue, by name."""
        those = (*self._running, *self._decodes) if running else self._waiting
        return sorted({one.adapter for one in those if one.adapter})

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._live)

    @property
    def full(self) -> bool:
        """Whether the queue is full, so that `submit` would refuse."""
        return len(self._waiting) >= self._waiting_max

    def submit(self, sequence: Sequence, now: float) -> None:
        """Put a sequence at the end of the queue. EngineFullError if it is full, ValueError for an id in use."""
        if self.full:
            raise EngineFullError(f"{len(self._waiting)} requests are waiting; try another replica")
        if sequence.id in self._live:
            raise ValueError(f"id: {sequence.id} is in use")
        sequence.submitted_at = now
        self._blocked = False
        self._live[sequence.id] = sequence
        self._waiting.append(sequence)

    def abort(self, id: str) -> bool:  # noqa: A002
        """Forget a sequence and free its blocks at once. False if it is not live (unknown or finished)."""
        sequence = self._live.pop(id, None)
        if sequence is None:
            for leaving in self._leaving:
                leaving.keeps &= leaving.id != id  # its client will never learn where it is
            return False
        if sequence in self._decodes:
            self._decodes.leave(sequence)
        elif sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._blocked = False
        self.kv.release(sequence.table)
        self._end(sequence, "abort")
        return True

    def end_step(self) -> None:
        """The step's time has passed: sequences that it finished leave. Does nothing if there is none."""
        for sequence in self._leaving:
            if sequence.keeps:
                self.held.keep(sequence, self.profile.block_tokens)
            self.kv.release(sequence.table)
        if self._leaving:
            self._blocked = False
        self._leaving.clear()

    def step(self, now: float) -> Step:
        """Decide one forward pass beginning at `now`. Without work: an empty step of 0 ms."""
        self.end_step()
        if not self._live:
            return Step(0.0, [], 0, 0)
        budget = self.profile.prefill_tokens_per_step
        scheduled: list[tuple[Sequence, int]] = []
        if self._decodes and self._may_pass(budget):
            budget, preempted = self._schedule_beside(budget - len(self._decodes), scheduled), False
        else:
            budget, preempted = self._schedule_running(budget, scheduled)
        admitted, passing = len(scheduled), len(self._decodes)
        loading_ms = self._admit(budget, scheduled, now) if self._waiting and not preempted else 0.0
        self._blocked = not preempted and len(scheduled) == admitted
        if not scheduled and not passing and self.held:
            return Step(max(IDLE_STEP_MS, self.profile.step_ms(0, 0)), [], 0, 0)
        assert scheduled or passing, "work without progress"
        decodes, context, prefill_tokens, prefill_ms = passing, self._decodes.context_tokens, 0, 0.0
        for sequence, tokens in scheduled:
            if tokens == 1 and sequence.output_tokens:
                decodes += 1
                context += sequence.total_tokens
            else:
                prefill_tokens += tokens
                prefill_ms += self.profile.prefill_ms(tokens, sequence.computed_tokens)
        emissions = self._compute(scheduled)
        self.counters.steps += 1
        duration_ms = self.profile.step_ms(prefill_ms, decodes, context) + loading_ms
        return Step(duration_ms, emissions, prefill_tokens, decodes)

    def calm(self, most: int) -> int:
        """How many steps from now on (at most `most`) would generate one token for each running sequence and do nothing
        else: admit, end and preempt none. Each takes `calm_ms`.
        """
        if not self._decodes or self._running or self._leaving or self.held or (self._waiting and not self._blocked):
            return 0
        if self._waiting and self._may_share():
            return 0
        most = min(most, self._decodes.ahead)
        if most <= 0:
            return 0
        if len(self._decodes) * (most // self.profile.block_tokens + 1) <= self.kv.available:
            return most  # usually: none needs more, and it takes counting to say how many it is
        return most if self._decodes.needs(most) <= self.kv.available else 0

    def _may_share(self) -> bool:
        """Whether a block that a decoding sequence fills may also be another's, or one that the head of the queue
        needs: then that one may find room although no sequence has left.
        """
        head = self._waiting[0]
        wanted = set(head.block_names(head.total_tokens // self.profile.block_tokens))
        for one in self._decodes:
            if one.table.end in wanted:
                self._decodes.watch(one.table.end, granted_before=-1)
            end = one.table.end
            if not end or end in wanted or self.kv.references(end) > 1:
                return True
        return False

    def calm_ms(self) -> tuple[float, float]:
        """The duration of the first of those steps, and by how much each takes longer than the previous one: each
        context grows by a token.
        """
        running, profile = len(self._decodes), self.profile
        first_ms = profile.step_ms(0.0, running, self._decodes.context_tokens)
        return first_ms, running * profile.kv_read_ms_per_token

    def leap(self, steps: int) -> None:
        """Carry out this many steps, at most as many as `calm` returned."""
        self._decodes.leap(steps)
        self.counters.steps += steps
        self.counters.generation_tokens += steps * len(self._decodes)

    def _may_pass(self, budget: int) -> bool:
        """Whether decoding sequences may stay in `decodes` in this step: there are tokens and blocks for all. Those
        that are due are stepped; all are if not.
        """
        decodes, running, size = self._decodes, self._running, self.profile.block_tokens
        if due := decodes.due():
            for sequence in due:
                decodes.leave(sequence)
            running += due
            running.sort(key=BY_ORDER)
        left = budget - len(decodes) - len(running)
        short = decodes.at_edges()
        for sequence in running:
            tokens = min(sequence.total_tokens - sequence.computed_tokens, budget)
            short += -(-(sequence.computed_tokens + tokens) // size) - sequence.table.blocks
        if left > 0 and short <= self.kv.available:
            return True
        running += decodes.disband()
        running.sort(key=BY_ORDER)
        return False

    def _schedule_beside(self, budget: int, scheduled: list[tuple[Sequence, int]]) -> int:
        """As `_schedule_running`, while others are in `decodes`: there are blocks for all (`_may_pass`)."""
        decodes, running = self._decodes, self._running
        if not running:
            decodes.grant_all()
            return budget
        edges = decodes.edges()
        for sequence in sorted((*edges, *running), key=BY_ORDER) if edges else running:
            if sequence in decodes:
                decodes.grant(sequence)
                continue
            tokens = min(sequence.total_tokens - sequence.computed_tokens, budget)
            granted = self._grant(sequence, tokens, sequence.order)
            assert granted, "the blocks were counted"
            scheduled.append((sequence, tokens))
            budget -= tokens
        return budget

    def _schedule_running(self, budget: int, scheduled: list[tuple[Sequence, int]]) -> tuple[int, bool]:
        """Give each running sequence, oldest first, its next tokens; preempt from the youngest if KV runs out."""
        at = 0
        preempted = False
        running, grant, size = self._running, self._grant, self.profile.block_tokens
        while at < len(running) and budget:
            sequence = running[at]
            tokens = min(sequence.total_tokens - sequence.computed_tokens, budget)
            # One token inside a block neither needs one nor fills one: nearly every token of every decode.
            if tokens > 1 or not 0 < sequence.computed_tokens % size < size - 1:
                while not grant(sequence, tokens):
                    preempted = True
                    if self._preempt_last() is sequence:
                        return budget, preempted
            scheduled.append((sequence, tokens))
            budget -= tokens
            at += 1
        return budget, preempted

    def _preempt_last(self) -> Sequence:
        """Send the last admitted back to the head of the queue; all it computed is forgotten except what stays
        cached.
        """
        victim = self._running.pop()
        self.kv.release(victim.table)
        victim.computed_tokens = 0
        self._waiting.appendleft(victim)
        self.counters.preemptions += 1
        return victim

    def _admit(self, budget: int, scheduled: list[tuple[Sequence, int]], now: float) -> float:
        """First come, first served: the head of the queue waits for blocks, and all behind it wait, too; one that waits
        for room for its adapter lets others pass. Returns the milliseconds that loading adapters takes.
        """
        passed: list[Sequence] = []
        used = {sequence.adapter for sequence in (*self._running, *self._decodes) if sequence.adapter}
        loading_ms = 0.0
        room = self.profile.sequences_max - len(self._decodes)
        while self._waiting and budget and len(self._running) < room:
            sequence = self._waiting[0]
            if not self.adapters.fits(sequence.adapter, used):
                passed.append(self._waiting.popleft())
                continue
            reusable = sequence.block_names((sequence.total_tokens - 1) // self.profile.block_tokens)
            depth = self._held(reusable, FAR)
            # As in vLLM: there must be room for all its text, not for this chunk alone; and a failed attempt changes
            # nothing: its cached blocks age.
            short = -(-sequence.total_tokens // self.profile.block_tokens) - depth
            if short > self.kv.available - self.kv.unreferenced(reusable[:depth]):
                break
            self.kv.share(sequence.table, reusable[:depth])
            sequence.computed_tokens = depth * self.profile.block_tokens
            tokens = min(sequence.total_tokens - sequence.computed_tokens, budget)
            granted = self._grant(sequence, tokens)
            assert granted, "the blocks were counted"
            self._waiting.popleft()
            self._running.append(sequence)
            if sequence.adapter:
                loading_ms += self.adapters.use(sequence.adapter, used)
                used.add(sequence.adapter)
            self._admitted(sequence, now)
            scheduled.append((sequence, tokens))
            budget -= tokens
        self._waiting.extendleft(reversed(passed))
        return loading_ms

    def _admitted(self, sequence: Sequence, now: float) -> None:
        """Record an admission; a preempted sequence comes back without being counted again."""
        self._admissions += 1
        sequence.order = self._admissions
        if sequence.queued_until is None:
            sequence.queued_until = now
            sequence.cached_tokens = sequence.computed_tokens
            self.counters.prefix_queries += sequence.prompt_tokens
            self.counters.prefix_hits += sequence.cached_tokens

    def _grant(self, sequence: Sequence, tokens: int, order: int = FAR) -> bool:
        """Blocks for the next `tokens`. Those they will fill become reusable at once, as vLLM names them on scheduling:
        a sequence scheduled later runs in the same step or a later one.
        """
        size = self.profile.block_tokens
        table = sequence.table
        computed = sequence.computed_tokens + tokens
        short = -(-computed // size) - table.blocks
        if short > 0 and not self.kv.grow(table, short):
            return False
        full, named = computed // size, table.named
        if full > named:
            names = sequence.block_names(full, since=named)
            self._held(names, order)
            held = self.kv.fill(table, names)
            if self.log is not None:
                self.log.stored(sequence, named, [at >= held for at in range(len(names))])
        return True

    def _held(self, names: list[int], order: int) -> int:
        """How many of these, the first ones, were held when every sequence admitted before number `order` was granted
        the blocks of this step.
        """
        while True:
            held = self.kv.match(names)
            if not held or not self._decodes.watch(names[held - 1], granted_before=order):
                return held

    def _compute(self, scheduled: list[tuple[Sequence, int]]) -> list[Emission]:
        """Advance the scheduled sequences; one whose whole text is computed generates its next token."""
        emissions: list[Emission] = []
        counters, decodes, passes_over = self.counters, self._decodes, self._passes_over and self.log is None
        counters.generation_tokens += len(decodes)
        decodes.passed()
        left = False
        for sequence, tokens in scheduled:
            sequence.computed_tokens += tokens
            if sequence.computed_tokens < sequence.total_tokens:
                continue
            if not sequence.output_tokens:
                counters.prompt_tokens += sequence.prompt_tokens
            text = sequence.write_token()
            counters.generation_tokens += sequence.output_tokens > 0
            finished = sequence.finished
            emissions.append(Emission(sequence.id, text, finished))
            if finished is not None:
                left = True
                self._leaving.append(sequence)
                del self._live[sequence.id]
                self._end(sequence, finished)
            elif passes_over:
                left |= decodes.join(sequence)
        if left:
            self._running = [one for one in self._running if one.finished is None and one not in decodes]
        return emissions

    def _end(self, sequence: Sequence, reason: str) -> None:
        sequence.finished = reason
        self.counters.finished[reason] += 1
