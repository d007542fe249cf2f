from __future__ import annotations

from itertools import islice, pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop_lab.workloads.agents import LONG, Agent, agent, agents
from farhop_lab.workloads.program import Ask, WorkloadError, run
from farhop_lab.workloads.prose import common, prose


def echo(ask: Ask) -> bytes:
    return prose(f"{len(ask.prompt)}", ask.answer_tokens or 1)


def test_contexts_grow_to_100k_tokens_and_95_percent_of_each_was_there_before() -> None:
    asked = [batch[0] for batch in run(agent(LONG, "a", Random(1)), echo)]
    assert len(asked[0].prompt) == 4 * LONG.first_tokens
    assert 0.94 * 4 * LONG.last_tokens < len(asked[-1].prompt) <= 4 * LONG.last_tokens
    assert 25 <= len(asked) <= 40
    held = [len(before.prompt) + len(echo(before)) for before in asked[:-1]]
    for part, after in zip(held, asked[1:], strict=True):
        assert part / len(after.prompt) == pytest.approx(0.95, abs=0.002)
    assert sum(held) / sum(len(ask.prompt) for ask in asked[1:]) == pytest.approx(0.95, abs=0.002)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.3, 0.99), st.integers(0, 1000))
def test_each_call_holds_the_one_before(reuse: float, number: int) -> None:
    figures = Agent(shared_tokens=100, first_tokens=1000, last_tokens=5000, reuse=reuse)
    asked = [batch[0] for batch in run(agent(figures, f"a{number}", Random(number)), echo)]
    assert asked
    for before, after in pairwise(asked):
        assert after.prompt.startswith(before.prompt + echo(before))
        assert len(after.prompt) <= 4 * figures.last_tokens
        assert after.session == before.session
    assert asked[0].think_s == 0.0


def test_agents_share_their_tools_and_nothing_else() -> None:
    first, second = (next(program)[0].prompt for program in islice(agents(LONG, "c", 1), 2))
    assert 0 <= common(first, second) - 4 * LONG.shared_tokens < 32
    assert next(next(agents(LONG, "c", 1)))[0].prompt == first


@pytest.mark.parametrize(
    "figures", [{"reuse": 1.0}, {"reuse": 0.0}, {"shared_tokens": 30_000}, {"last_tokens": 10}, {"tool_s": -1.0}]
)
def test_impossible_agent_figures_are_refused(figures: dict[str, float]) -> None:
    with pytest.raises(WorkloadError, match="an agent"):
        Agent(**figures)  # type: ignore[arg-type]
