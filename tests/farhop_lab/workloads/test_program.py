from __future__ import annotations

from farhop_lab.workloads.program import Ask, Program, one, run


def chat() -> Program:
    (first,) = yield (Ask(prompt=b"hi"),)
    left, right = yield Ask(prompt=b"hi" + first + b"A"), Ask(prompt=b"hi" + first + b"B")
    yield (Ask(prompt=left + right),)


def test_next_prompt_contains_the_previous_answer() -> None:
    asked = run(chat(), lambda ask: b"<" + ask.prompt + b">")
    assert [[ask.prompt for ask in batch] for batch in asked] == [
        [b"hi"],
        [b"hi<hi>A", b"hi<hi>B"],
        [b"<hi<hi>A><hi<hi>B>"],
    ]


def test_one_makes_a_program_of_a_single_request() -> None:
    ask = Ask(prompt=b"x", answer_tokens=3)
    assert run(one(ask), lambda _ask: b"") == [(ask,)]


def test_a_program_without_requests_sends_nothing() -> None:
    empty: Program = (batch for batch in ())  # type: ignore[assignment]
    assert run(empty, lambda _ask: b"") == []
