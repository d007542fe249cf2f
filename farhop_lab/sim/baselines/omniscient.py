"""A greedy scheduler, not a bound (that is `studies.bound`): one that knows every engine's true state.

It also knows every answer's length, and has no network delay. Each request goes where it would end first by the
engine's own timing model, with what it costs the other requests there added, and waits here until an engine has memory
for its prompt. Without these two it is worse than others: sending each to where it alone ends first scatters the
siblings of a tree and thrashes full caches, so that SkyWalker beats it. It is still greedy and does not know what comes
next. Reads engines, never changes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farhop_lab.sim.baselines.caches import EngineCaches
from farhop_lab.sim.engines import Gpu

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from farhop.balance.machine import Request
    from farhop_lab.engine.core.profiles import Profile
    from farhop_lab.engine.core.sequence import Sequence as Work
    from farhop_lab.sim.baselines.process import EnginePool
    from farhop_lab.sim.baselines.router import RouterState

PROBE_S = 0.1


class Oracle:
    """Eligibility and Picker in one. Engines that are not a Gpu always have room, and are judged by their requests."""

    def __init__(self, pools: Mapping[str, EnginePool]) -> None:
        self._rooms, self._caches = pools, EngineCaches(pools)

    def candidates(self, request: Request, state: RouterState, now: float) -> Sequence[str]:
        """See router.Eligibility. If no engine lives, a request is sent and fails."""
        living = [name for name in state.engines if self._rooms[state.targets[name].region].alive]
        return [name for name in living if self._has_room(request, name, state)] if living else state.engines

    def choose(self, request: Request, among: Sequence[str], state: RouterState, now: float) -> str:
        """See router.Picker."""
        return min(among, key=lambda name: self._costs_ms(request, name, state))

    def sent(self, request: Request, target: str, state: RouterState, now: float) -> None:
        """See router.Picker."""

    def _has_room(self, request: Request, name: str, state: RouterState) -> bool:
        engine = self._rooms[state.targets[name].region].processes[name].engine
        work = self._caches.work(request, engine) if isinstance(engine, Gpu) else None
        return work is None or not isinstance(engine, Gpu) or has_room(engine, work)

    def _costs_ms(self, request: Request, name: str, state: RouterState) -> float:
        engine = self._rooms[state.targets[name].region].processes[name].engine
        work = self._caches.work(request, engine) if isinstance(engine, Gpu) else None
        if work is not None and isinstance(engine, Gpu):
            return ends_ms(engine, work) + delays_ms(engine, work)
        waiting, running, _ = engine.metrics()
        return float(waiting + running)


def has_room(gpu: Gpu, work: Work) -> bool:
    """Whether its prompt fits the memory that is free or merely cached, beside the queued prompts. An idle engine
    always has room.
    """
    core = gpu.core
    if not core.has_work:
        return True
    missing: set[int] = set()
    private = 0
    for one in (*core.line, work):
        names = one.block_names(one.total_tokens // core.profile.block_tokens)
        missing.update(names[core.kv.match(names) :])
        private += 1
    return len(missing) + private <= core.kv.available


def to_compute(gpu: Gpu, work: Work) -> int:
    """Tokens of a text that its engine would compute: all but the cached ones, and the last one always."""
    size = gpu.core.profile.block_tokens
    return work.total_tokens - gpu.core.kv.match(work.block_names((work.total_tokens - 1) // size)) * size


def ends_ms(gpu: Gpu, work: Work) -> float:
    """Milliseconds from now until its answer would be complete, if no other request came after it.

    First the prompt tokens still to be computed, of those ahead and its own; then one step per token of its answer,
    which each sequence beside it makes longer for as long as that lasts.
    """
    core, profile = gpu.core, gpu.core.profile
    left = [(to_compute(gpu, one), one) for one in (work, *core.line)]
    left += [(max(0, one.total_tokens - one.computed_tokens - 1), one) for one in core.batch]
    steps = -(-sum(tokens for tokens, _ in left) // profile.prefill_tokens_per_step)
    arithmetic_ms = sum(profile.prefill_ms(tokens, one.total_tokens - tokens) for tokens, one in left)
    compute_ms = max(steps * profile.decode_floor_ms, arithmetic_ms)
    context = sum(one.total_tokens for one in core.batch)
    decodes_ms = steps * (profile.step_ms(0, len(core.batch), context) - profile.decode_floor_ms)
    write_ms = work.max_tokens * profile.step_ms(0, 1, work.total_tokens + work.max_tokens // 2)
    others = [(one.max_tokens - one.output_tokens, one.total_tokens) for one in core.batch]
    others += [(one.max_tokens, one.total_tokens) for one in core.line]
    beside_ms = sum(min(work.max_tokens, tokens) * _beside_ms(profile, context) for tokens, context in others)
    return compute_ms + decodes_ms + write_ms + beside_ms


def delays_ms(gpu: Gpu, work: Work) -> float:
    """Its cost to the other requests there, in all: its prefill, and its decoding beside theirs."""
    core, profile = gpu.core, gpu.core.profile
    tokens = to_compute(gpu, work)
    left = [one.max_tokens - one.output_tokens for one in core.batch] + [one.max_tokens for one in core.line]
    beside_ms = sum(min(work.max_tokens, tokens) for tokens in left) * _beside_ms(profile, work.total_tokens)
    return profile.prefill_ms(tokens, work.total_tokens - tokens) * len(left) + beside_ms


def _beside_ms(profile: Profile, context_tokens: int) -> float:
    """By how much a sequence in the batch makes a step longer."""
    return profile.decode_ms_per_sequence + context_tokens * profile.kv_read_ms_per_token
