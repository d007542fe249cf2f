"""The vocabulary of all work: a program asks in batches, and what it asks next may hold the answers it was given.

    def chat() -> Program:
        (hello,) = yield (Ask(b"hi"),)
        yield (Ask(b"hi" + hello + b"and then?"),)

A chat yields batches of one, a tree of thoughts a batch for each level, an agent one call after the other. Invariants:
pure; equal dice give equal programs, whatever the world does to them; prompts are immutable bytes, never changed once
asked. A program is told answers only: whoever runs it closes it where an answer failed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

import msgspec

BATCH_MAX = 4096
"""The most requests that one batch may hold."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `answer_tokens` is the exact length of its answer, None for as long as the model likes, up to
    `max_tokens`. `session` names what belongs together (64 bits, 0 for nothing). `tools`: it offers the model
    some. It is sent `think_s` after the answers before, and not before `since_s` have passed since the batch before
    was sent.
    """

    prompt: bytes
    max_tokens: int = 512
    answer_tokens: int | None = None
    tenant: str = "t"
    session: int = 0
    tools: bool = False
    think_s: float = 0.0
    since_s: float = 0.0


Batch = tuple[Ask, ...]
"""Requests sent side by side; at least one."""

Program = Generator[Batch, tuple[bytes, ...], None]
"""Yields batches, and is sent the texts of their answers, in their order."""


class Start(msgspec.Struct, frozen=True):
    """In an open loop: this program begins at this moment (seconds), at this region, whatever became of others.

    Programs are made when they begin (`make`), so that a long schedule costs little. `session` names what belongs
    together and is kept or left out together; "" for nothing.
    """

    at: float
    region: str
    make: Callable[[], Program]
    session: str = ""


Schedule = Iterator[Start]
"""Starts in the order of time."""

Programs = Iterator[Program]
"""In a closed loop: what one client runs, one after another."""


class WorkloadError(ValueError):
    """Work that cannot be asked for: the text names what is wrong and the remedy."""


def one(ask: Ask) -> Program:
    """A program of a single request."""
    yield (ask,)


def run(program: Program, answer: Callable[[Ask], bytes]) -> list[Batch]:
    """All that a program asks if `answer` answers: for tests and for looking at workloads without a world."""
    asked: list[Batch] = []
    try:
        batch = next(program)
        while True:
            asked.append(batch)
            batch = program.send(tuple(answer(ask) for ask in batch))
    except StopIteration:
        return asked
