"""What several engines say of one model, as one."""

from __future__ import annotations

from farhop.balance.model_facts import UNTOLD, ModelFacts, together


def test_the_shortest_length_and_the_names_that_all_agree_on() -> None:
    assert together([]) is UNTOLD
    assert together([UNTOLD, UNTOLD]) is UNTOLD
    long = ModelFacts(8192, "/models/llama", "")
    assert together([long, UNTOLD]) == long
    assert together([long, ModelFacts(4096, "/elsewhere/llama", "base")]) == ModelFacts(4096, "", "base")
    assert together([ModelFacts(0, "r"), ModelFacts(0, "r")]) == ModelFacts(0, "r")
