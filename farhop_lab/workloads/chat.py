"""Chats like those of Chatbot Arena and WildChat, made up by stated rules; the data sets themselves are not needed.

Lengths: means as published with WildChat (Zhao et al. 2024, table 2): LMSYS-Chat-1M, which Arena's chats are part of,
has 2.0 turns a conversation, 70 tokens a question, 215 an answer and 4.8 conversations a user; WildChat 2.5, 296, 441
and 4.9 (here 5 and 6, by which the similarity comes out). Turns are drawn geometrically, lengths log-normally (sigma
1.0: the mean is 1.65 times the median); answers end at `max_tokens` at the latest.

Similarity: the length of the common prefix of two requests over the shorter one's, in the mean over a user's pairs and
over users (SkyWalker measured 19-20 % within a user and 2.5-8 % across users). Three rules make it:
- a turn holds all earlier turns of its conversation, with the answers that were really given;
- some conversations begin with a well-known opening (an app's system prompt), drawn anew for each by Zipf's law:
  the only thing that users share;
- a user has `conversations` of them and is gone; the client goes on as the next user.
The test measures both figures. Pure: all dice are given.
"""

from __future__ import annotations

from itertools import accumulate, count
from math import exp, log
from random import Random

import msgspec
from xxhash import xxh3_64_intdigest

from farhop_lab.workloads.program import Ask, Program, Programs, WorkloadError
from farhop_lab.workloads.prose import prose

TURNS_MAX = 40


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a kind of chat: means, in tokens where nothing else is said. `opening_share` (0..1) of conversations
    begin with one of `openings` texts of `opening_tokens`; `context_tokens` is where a conversation ends at the latest.
    """

    name: str
    turns: float
    question_tokens: float
    answer_tokens: float
    conversations: int
    opening_share: float
    openings: int
    opening_tokens: int
    max_tokens: int = 512
    think_s: float = 0.0
    context_tokens: int = 8192
    sigma: float = 1.0

    def __post_init__(self) -> None:
        if not (self.turns >= 1.0 and self.conversations >= 1 and self.openings >= 1):
            raise WorkloadError(f"chat {self.name}: turns, conversations and openings must be 1 or more")
        if not (0.0 <= self.opening_share <= 1.0 and self.sigma >= 0.0 and self.think_s >= 0.0):
            raise WorkloadError(f"chat {self.name}: opening_share must lie within 0 and 1, sigma and think_s be >= 0")
        if min(self.question_tokens, self.answer_tokens, self.opening_tokens, self.max_tokens) < 1:
            raise WorkloadError(f"chat {self.name}: lengths must be 1 token or more")


ARENA = Chat(
    name="arena",
    turns=2.0,
    question_tokens=70,
    answer_tokens=215,
    conversations=5,
    opening_share=0.4,
    openings=3,
    opening_tokens=80,
)
WILDCHAT = Chat(
    name="wildchat",
    turns=2.5,
    question_tokens=296,
    answer_tokens=441,
    conversations=6,
    opening_share=0.4,
    openings=3,
    opening_tokens=240,
)
CHATS = {chat.name: chat for chat in (ARENA, WILDCHAT)}


def conversation(chat: Chat, name: str, rng: Random, *, tenant: str = "t") -> Program:
    """One conversation. `name` tells its texts and its session apart from all others'."""
    session = xxh3_64_intdigest(name.encode()) or 1
    prompt = _opening(chat, rng)
    turns = _geometric(chat.turns, rng)
    # All dice first: what the world answers must not change what is drawn.
    lengths = [(_length(chat.question_tokens, chat, rng), _answer(chat, rng), _think(chat, rng)) for _ in range(turns)]
    for turn, (question_tokens, answer_tokens, think_s) in enumerate(lengths):
        question = prose(f"{name} {turn}", question_tokens)
        prompt += question
        if turn and len(prompt) // 4 + answer_tokens > chat.context_tokens:
            return
        (answer,) = yield (
            Ask(
                prompt=prompt,
                max_tokens=chat.max_tokens,
                answer_tokens=answer_tokens,
                tenant=tenant,
                session=session,
                think_s=think_s if turn else 0.0,
            ),
        )
        prompt += answer


def chats(chat: Chat, client: str, seed: int, *, tenant: str = "t") -> Programs:
    """One client of a closed loop: conversations without end, a new user after each `chat.conversations`. `client`
    names it; each conversation has dice of its own, so that none depends on what became of those before."""
    for number in count():
        name = f"{chat.name} {seed} {client} {number // chat.conversations} {number % chat.conversations}"
        yield conversation(chat, name, Random(name), tenant=tenant)


def _opening(chat: Chat, rng: Random) -> bytes:
    at, which = rng.random(), rng.random()
    if at >= chat.opening_share:
        return b""
    marks = list(accumulate(1.0 / rank for rank in range(1, chat.openings + 1)))
    found = next(rank for rank, mark in enumerate(marks) if which * marks[-1] < mark)
    return prose(f"{chat.name} opening {found}", chat.opening_tokens)


def _geometric(mean: float, rng: Random) -> int:
    """1, 2, ... with this mean, up to TURNS_MAX."""
    if mean <= 1.0:
        return 1
    return min(TURNS_MAX, 1 + int(log(1.0 - rng.random()) / log(1.0 - 1.0 / mean)))


def _length(mean: float, chat: Chat, rng: Random) -> int:
    # A log-normal's mean is exp(mu + sigma^2 / 2). Past half the context a question would leave no room for its answer.
    drawn = mean * exp(chat.sigma * rng.gauss(0.0, 1.0) - chat.sigma**2 / 2.0)
    return max(1, min(round(drawn), chat.context_tokens // 2))


def _answer(chat: Chat, rng: Random) -> int:
    return min(chat.max_tokens, _length(chat.answer_tokens, chat, rng))


def _think(chat: Chat, rng: Random) -> float:
    return rng.expovariate(1.0 / chat.think_s) if chat.think_s > 0.0 else 0.0
