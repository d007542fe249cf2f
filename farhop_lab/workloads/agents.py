"""Agents with long contexts: one call after the other, each with the whole conversation and all tool results so far.

A context begins with the instructions and tools that all agents of a kind share and with the files of its own task. It
grows by a constant share with every call until it is full: call n contains call n-1 and its answer, which make up
`reuse` of it. So the share of tokens that a cache could serve is `reuse` from the second call on, whatever the lengths.
With 20k to 100k tokens and 95 % these are 32 calls. Pure: takes random generators. Needs an engine with room: an H100's
131k tokens.
"""

from __future__ import annotations

from itertools import count
from random import Random

import msgspec
from xxhash import xxh3_64_intdigest

from farhop_lab.workloads.program import Ask, Program, Programs, WorkloadError
from farhop_lab.workloads.prose import TOKEN_BYTES, prose


class Agent(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of agent. Lengths in tokens; `reuse` (0..1, exclusive) is the share of a call that the previous one
    contained.

    `answer_tokens` is a mean (exponential, at most `max_tokens`), `tool_s` the mean time of a tool call.
    """

    shared_tokens: int = 4_000
    first_tokens: int = 20_000
    last_tokens: int = 100_000
    reuse: float = 0.95
    answer_tokens: float = 200.0
    max_tokens: int = 1024
    tool_s: float = 2.0

    def __post_init__(self) -> None:
        if not 0.0 < self.reuse < 1.0:
            raise WorkloadError(f"an agent's reuse must lie within 0 and 1, not {self.reuse}")
        if not 1 <= self.shared_tokens < self.first_tokens <= self.last_tokens:
            raise WorkloadError("an agent needs 1 <= shared_tokens < first_tokens <= last_tokens")
        if not (self.answer_tokens >= 1.0 and self.max_tokens >= 1 and self.tool_s >= 0.0):
            raise WorkloadError("an agent's answer_tokens and max_tokens must be 1 or more, its tool_s 0 or more")


LONG = Agent()


def agent(figures: Agent, name: str, rng: Random, *, tenant: str = "t") -> Program:
    """One task from its first call to a full context. `name` distinguishes its files and session from all others'."""
    session = xxh3_64_intdigest(name.encode()) or 1
    own = figures.first_tokens - figures.shared_tokens
    prompt = prose("agent tools", figures.shared_tokens) + prose(name, own)
    for call in count(1):
        answer_tokens = max(1, min(figures.max_tokens, round(rng.expovariate(1.0 / figures.answer_tokens))))
        tool_s = rng.expovariate(1.0 / figures.tool_s) if figures.tool_s > 0.0 else 0.0
        (answer,) = yield (
            Ask(
                prompt=prompt,
                max_tokens=figures.max_tokens,
                answer_tokens=answer_tokens,
                tenant=tenant,
                session=session,
                tools=True,
                think_s=tool_s if call > 1 else 0.0,
            ),
        )
        prompt += answer
        held = len(prompt) // TOKEN_BYTES
        # At least a block of new text, even if answers alone make up for the growth.
        prompt += prose(f"{name} tool {call}", max(16, round(held / figures.reuse) - held))
        if len(prompt) > figures.last_tokens * TOKEN_BYTES:
            return


def agents(figures: Agent, client: str, seed: int, *, tenant: str = "t") -> Programs:
    """One client of a closed loop: tasks without end, each with its own files and random generator."""
    for number in count():
        name = f"agent {seed} {client} {number}"
        yield agent(figures, name, Random(name), tenant=tenant)
