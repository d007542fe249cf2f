from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from topology.load import document, parse, shipped
from topology.problems import Problem, TopologyError

Change = Callable[[dict[str, Any]], object]
Faults = Callable[[Change], list[Problem]]

TEXT = shipped("three-regions").read_text(encoding="utf-8")


@pytest.fixture
def faults() -> Faults:
    """The problems of the default world after a change to its document; none if it is still good."""

    def found(change: Change) -> list[Problem]:
        raw = document(TEXT)
        change(raw)
        try:
            parse(yaml.safe_dump(raw, sort_keys=False), "changed.yaml")
        except TopologyError as error:
            problems = list(error.problems)
        else:
            return []
        assert problems
        assert all(problem.message and problem.remedy for problem in problems)
        return problems

    return found
