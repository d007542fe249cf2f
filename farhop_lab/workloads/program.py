"""The vocabulary of all work: a program asks in batches, and its next requests may contain the answers it was given.

    def chat() -> Program:
        (hello,) = yield (Ask(b"hi"),)
        yield (Ask(b"hi" + hello + b"and then?"),)

A chat yields batches of one, a tree of thoughts a batch for each level, an agent one call after the other. Invariants:
pure; equal random numbers give equal programs, whatever the world does to them; prompts are immutable bytes, never
changed once asked. A program only gets answers: its runner closes it if an answer failed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

import msgspec

BATCH_MAX = 4096
"""The most requests that one batch may hold."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `answer_tokens` is the exact length of its answer; None: the model decides, up to `max_tokens`.
    `session` (64 bits, 0 for none) is shared by requests that belong together. `tools`: it offers the model some. It is
    sent `think_s` after the previous answers, and not before `since_s` have passed since the previous batch was sent.
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
"""Requests that are sent together; at least one."""

Program = Generator[Batch, tuple[bytes, ...], None]
"""Yields batches, and is sent the texts of their answers, in the same order."""


class Start(msgspec.Struct, frozen=True):
    """In an open loop: this program begins at this time (seconds) in this region, whatever became of others.

    Programs are made when they begin (`make`), so that a long schedule costs little. Starts of the same `session` are
    kept or left out together; "" for none.
    """

    at: float
    region: str
    make: Callable[[], Program]
    session: str = ""


Schedule = Iterator[Start]
"""Starts in order of time."""

Programs = Iterator[Program]
"""In a closed loop: what one client runs, one after another."""


class WorkloadError(ValueError):
    """Work that cannot be requested: the text names the problem and the remedy."""


def one(ask: Ask) -> Program:
    """A program of a single request."""
    yield (ask,)


def run(program: Program, answer: Callable[[Ask], bytes]) -> list[Batch]:
    """All requests of a program if `answer` answers: for tests and for inspecting workloads without a world."""
    asked: list[Batch] = []
    try:
        batch = next(program)
        while True:
            asked.append(batch)
            batch = program.send(tuple(answer(ask) for ask in batch))
    except StopIteration:
        return asked
