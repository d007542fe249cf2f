"""What several engines say of one model, as one."""

from __future__ import annotations

from farhop.balance.model_facts import UNKNOWN_FACTS, ModelFacts, together


def test_the_shortest_length_and_the_names_that_all_agree_on() -> None:
    assert together([]) is UNKNOWN_FACTS
    assert together([UNKNOWN_FACTS, UNKNOWN_FACTS]) is UNKNOWN_FACTS
    long = ModelFacts(8192, "/models/llama", "")
    assert together([long, UNKNOWN_FACTS]) == long
    assert together([long, ModelFacts(4096, "/elsewhere/llama", "base")]) == ModelFacts(4096, "", "base")
    assert together([ModelFacts(0, "r"), ModelFacts(0, "r")]) == ModelFacts(0, "r")
