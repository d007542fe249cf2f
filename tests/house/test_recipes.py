"""The recipes of CONTRIBUTING.md: their policies and the tests of these run as they are written there."""

from __future__ import annotations
import __future__

import re
from pathlib import Path
from random import Random
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
from worlds import candidates, law, replica, replicas_of, request

from farhop.balance.ledger import Reservation
from global_lb.routing.pick import pick
from global_lb.routing.policy import Route, RouteConfig, ranked, route
from regional_lb.scheduler.policy import Need, load

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
NEED = Need(prompt_tokens=256.0, output_tokens=100.0, bytes_per_token=4.0)


def defined(section: str, names: dict[str, Any]) -> dict[str, Any]:
    """What the python of this section defines, given these names."""
    body = TEXT.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    made = dict(names)
    for block in re.findall(r"( *)```python\n(.*?)```", body, re.DOTALL):
        code = dedent(block[1])
        if code.startswith(("class ", "def ")):
            exec(compile(code, section, "exec", __future__.annotations.compiler_flag), made)
    return made


def test_a_regional_policy() -> None:
    names = {**vars(load), "np": np, "NEED": NEED, "Reservation": Reservation}
    made = defined("Add a regional policy", {**names, "replica": replica, "replicas_of": replicas_of})
    made["test_the_one_with_the_least_to_prefill"]()


def test_a_global_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    def goes(name: str, **regions: dict[str, Any]) -> str:
        found = candidates(request("a"), 100.0, "london", **regions)
        by = Route(RouteConfig(policy=name))
        chosen = pick(found, law().request_verdict(found.request), by, Random(1), 0.0, "london").chosen
        assert chosen is not None
        return chosen.region

    made = defined("Add a global policy", {**vars(ranked), "goes": goes})
    monkeypatch.setitem(route.KNOWN, "most-room", lambda _: made["MostRoom"]())
    made["test_the_one_with_the_most_slots_left"]()
