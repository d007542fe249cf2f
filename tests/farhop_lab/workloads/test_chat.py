from __future__ import annotations

from itertools import combinations, islice, pairwise
from random import Random
from statistics import fmean

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_hexdigest

from farhop_lab.workloads.chat import ARENA, CHATS, TURNS_MAX, Chat, chats, conversation
from farhop_lab.workloads.program import Ask, WorkloadError, run
from farhop_lab.workloads.prose import common, prose


def echo(ask: Ask) -> bytes:
    """An answer as long as was asked for, of this prompt alone."""
    return prose(f"answer to {xxh3_64_hexdigest(ask.prompt)}", ask.answer_tokens or 1)


def asked_by(chat: Chat, client: str, seed: int = 1) -> list[bytes]:
    """All prompts of a client's first user."""
    talks = islice(chats(chat, client, seed), chat.conversations)
    return [batch[0].prompt for talk in talks for batch in run(talk, echo)]


def similar(a: bytes, b: bytes) -> float:
    return common(a, b) / min(len(a), len(b))


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
def test_prompt_similarity_within_and_across_users_matches_the_measurements(chat: Chat) -> None:
    users = [asked_by(chat, f"u{number}") for number in range(200)]
    within = fmean(fmean(similar(a, b) for a, b in combinations(mine, 2)) for mine in users if len(mine) > 1)
    dice = Random(5)
    pairs = (dice.sample(users, 2) for _ in range(6_000))
    across = fmean(similar(dice.choice(a), dice.choice(b)) for a, b in pairs)
    assert 0.17 < within < 0.22
    assert 0.025 < across < 0.08


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
def test_lengths_and_turns_have_their_means(chat: Chat) -> None:
    talks = [run(conversation(chat, f"c{n}", Random(n)), echo) for n in range(1000)]
    assert fmean(map(len, talks)) == pytest.approx(chat.turns, rel=0.1)
    bare = [run(conversation(msgspec.structs.replace(chat, opening_share=0.0), f"c{n}", Random(n)), echo)
            for n in range(1000)]  # fmt: skip
    assert fmean(len(talk[0][0].prompt) / 4 for talk in bare) == pytest.approx(chat.question_tokens, rel=0.15)
    answers = [batch[0].answer_tokens or 0 for talk in talks for batch in talk]
    assert max(answers) <= chat.max_tokens
    assert 0.6 * chat.answer_tokens < fmean(answers) < chat.answer_tokens  # the long ones are cut at max_tokens


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(list(CHATS.values())))
def test_each_turn_begins_with_the_one_before_and_its_answer(number: int, chat: Chat) -> None:
    talk = run(conversation(chat, f"n{number}", Random(number)), echo)
    assert 1 <= len(talk) <= TURNS_MAX
    for (before,), (after,) in pairwise(talk):
        assert after.prompt.startswith(before.prompt + echo(before))
        assert after.session == before.session != 0
    for (ask,) in talk[1:]:
        assert len(ask.prompt) // 4 + (ask.answer_tokens or 0) <= chat.context_tokens
    assert talk == run(conversation(chat, f"n{number}", Random(number)), echo)


def test_requests_do_not_depend_on_the_fate_of_earlier_programs() -> None:
    whole = asked_by(ARENA, "u1")
    talks = chats(ARENA, "u1", 1)
    for _ in range(ARENA.conversations - 1):
        next(next(talks))  # asked once, and abandoned
    last = [batch[0].prompt for batch in run(next(talks), echo)]
    assert whole[-len(last) :] == last


def test_seeds_and_clients_and_users_share_no_conversation() -> None:
    bare = msgspec.structs.replace(ARENA, opening_share=0.0)
    firsts = [asked_by(bare, client, seed)[0] for client in ("a", "b") for seed in (1, 2)]
    firsts.append(next(next(islice(chats(bare, "a", 1), bare.conversations, None)))[0].prompt)  # the second user's
    for a, b in combinations(firsts, 2):
        assert common(a, b) < 32


def test_thinking_is_between_turns() -> None:
    slow = msgspec.structs.replace(ARENA, think_s=5.0, turns=4.0)
    talks = [run(conversation(slow, f"s{n}", Random(n)), echo) for n in range(300)]
    assert all(talk[0][0].think_s == 0.0 for talk in talks)
    assert fmean(ask.think_s for talk in talks for (ask,) in talk[1:]) == pytest.approx(5.0, rel=0.2)


@pytest.mark.parametrize(
    ("field", "value"),
    [("turns", 0.5), ("opening_share", 1.5), ("sigma", -1.0), ("question_tokens", 0), ("conversations", 0)],
)
def test_impossible_chat_figures_are_refused(field: str, value: float) -> None:
    with pytest.raises(WorkloadError, match=rf"chat arena: .*{field}|chat arena: lengths"):
        msgspec.structs.replace(ARENA, **{field: value}).__class__(**{**msgspec.structs.asdict(ARENA), field: value})
