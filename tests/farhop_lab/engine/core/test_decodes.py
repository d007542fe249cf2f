"""Members of a batch that are passed over: when they are looked at, and what they are when they are looked at."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from farhop_lab.engine.core.decodes import FAR, Decodes
from farhop_lab.engine.core.kv import PagedCache
from farhop_lab.engine.core.profiles import PROFILES
from farhop_lab.engine.core.scheduler import EngineCore
from farhop_lab.engine.core.sequence import EngineRequest, Sequence, TextModel

GPU = replace(PROFILES["l4"], kv_blocks=40, sequences_max=4, prefill_tokens_per_step=64)
VOICE = TextModel("m", 1, 40.0)


def begun(kv: PagedCache, tokens: int, *, max_tokens: int = 100, order: int = 1) -> Sequence:
    """A sequence whose prompt is computed, and whose first token is written."""
    sequence = Sequence(f"s{order}", EngineRequest(b"y" * 4 * tokens, max_tokens, ignore_eos=True), VOICE, GPU)
    sequence.order = order
    assert kv.grow(sequence.table, -(-tokens // 16))
    kv.fill(sequence.table, sequence.block_names(tokens // 16))
    sequence.computed_tokens = tokens
    sequence.write_token()
    return sequence


def test_member_is_visited_when_it_needs_and_when_it_fills_a_block() -> None:
    kv = PagedCache(40)
    decodes = Decodes(16, kv)
    sequence = begun(kv, 30)
    assert decodes.join(sequence)
    looked, before = [], kv.available
    needed = decodes.needs(40)
    for number in range(40):
        for found in decodes.edges():
            looked.append(number)
            decodes.grant(found)
        decodes.passed()
    # Tokens 31 and 32 (from 0) are written by passes 1 and 2: the one fills the second block, the other needs a third.
    assert looked == [1, 2, 17, 18, 33, 34]
    assert needed == before - kv.available == 3
    assert len(sequence.table.full) == 2  # alone by then: the others have no names yet
    decodes.caught_up()
    assert (len(sequence.table.full), sequence.table.private) == (4, 1)
    assert (sequence.output_tokens, sequence.total_tokens, sequence.computed_tokens) == (41, 71, 70)
    assert len(sequence.text) == 4 * 71


def test_due_returns_the_sequences_that_end_next() -> None:
    kv = PagedCache(40)
    decodes = Decodes(16, kv)
    one, other = begun(kv, 20, max_tokens=5, order=1), begun(kv, 9, max_tokens=4, order=2)
    assert decodes.join(one)
    assert decodes.join(other)
    assert (decodes.ahead, decodes.due()) == (2, [])
    decodes.passed()
    decodes.passed()
    assert decodes.due() == [other]
    decodes.leave(other)
    assert other.output_tokens == 3
    assert list(decodes) == [one]
    assert decodes.ahead == 1
    decodes.leave(one)
    assert decodes.ahead == FAR


def test_a_sequence_in_prefill_or_about_to_end_does_not_join() -> None:
    kv = PagedCache(40)
    decodes = Decodes(16, kv)
    assert not decodes.join(Sequence("s", EngineRequest(b"y" * 80, 9, ignore_eos=True), VOICE, GPU))
    assert not decodes.join(begun(kv, 20, max_tokens=2))
    assert not decodes


def test_members_that_leave_together_are_brought_up_to_date() -> None:
    kv = PagedCache(40)
    decodes = Decodes(16, kv)
    members = [begun(kv, tokens, order=tokens) for tokens in (1, 2, 3)]
    for one in members:
        assert decodes.join(one)
    decodes.passed()
    assert decodes.disband() == members
    assert [one.output_tokens for one in members] == [2, 2, 2]
    assert (len(decodes), decodes.ahead) == (0, FAR)


asked = st.tuples(
    st.integers(1, 60), st.integers(1, 40), st.booleans(), st.integers(0, 6), st.one_of(st.none(), st.integers(0, 9))
)


@given(st.lists(asked, min_size=1, max_size=12), st.integers(8, 40), st.sampled_from([1, 2, 16]), st.integers(1, 40))
@settings(deadline=None)
def test_sequences_in_decodes_equal_stepped_ones(
    asks: list[tuple[int, int, bool, int, int | None]], kv_blocks: int, block_tokens: int, look_every: int
) -> None:
    """Step by step: counts and caches' sizes are the same, with room for few and blocks for fewer; and in steps in
    which somebody looks, which must change nothing, the batch and the caches themselves."""
    profile = replace(GPU, kv_blocks=kv_blocks * 16 // block_tokens, block_tokens=block_tokens)
    cores = [EngineCore(profile, each_token=each_token) for each_token in (True, False)]
    now = 0.0
    for number, (tokens, max_tokens, exact, steps, leaver) in enumerate(asks):
        prompt = (b"%d" % (tokens % 3)) * 4 * tokens
        for core in cores:
            wanted = EngineRequest(prompt[: 4 * tokens - tokens % 4 + 1], max_tokens, ignore_eos=exact)
            core.submit(Sequence(str(number), wanted, VOICE, profile), now)
        for _ in range(steps):
            now = _alike(cores, now, look_every)
        if leaver is not None:
            assert len({core.abort(str(leaver)) for core in cores}) == 1
    for _ in range(3_000):
        if not cores[0].has_work:
            break
        now = _alike(cores, now, look_every)
    assert not any(core.has_work for core in cores)


def _alike(cores: list[EngineCore], now: float, look_every: int) -> float:
    steps = [core.step(now) for core in cores]
    assert len({(step.duration_ms, step.prefill_tokens, step.decode_sequences) for step in steps}) == 1
    each, some = ({(one.id, one.text, one.finished) for one in step.emissions} for step in steps)
    assert some <= each
    assert {one for one in each if one[2]} <= some
    counts = [(core.counters, core.waiting, core.running, core.kv.available, core.kv.evictions) for core in cores]
    assert counts[0] == counts[1]
    if cores[0].counters.steps % look_every == 0:
        states = [
            (
                [(o.id, bytes(o.text), o.computed_tokens, o.table.full, o.table.private) for o in core.batch],
                (core.kv.private, core.kv.line, core.kv.names),
            )
            for core in cores
        ]
        assert states[0] == states[1]
        for core in cores:
            core.kv.check()
    return now + steps[0].duration_ms / 1e3
