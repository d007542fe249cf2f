from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator

import pytest
from playbook import Playbook

from farhop.balance.machine import Flow


@pytest.fixture
def play() -> Iterator[Callable[[Flow], Playbook]]:
    """Start a playbook; at the end of the test none may be unfinished."""
    begun: list[Playbook] = []

    def start(flow: Flow) -> Playbook:
        begun.append(Playbook(flow))
        return begun[-1]

    yield start
    for playbook in begun:
        playbook.finished()


@pytest.fixture(scope="module", autouse=True)
def _sdks(request: pytest.FixtureRequest) -> None:
    """What a file names in SDKS it finds under that name. To import one takes a second or two, and every worker reads
    every file: so it is done where one of its tests runs."""
    for name in getattr(request.module, "SDKS", ()):
        setattr(request.module, name, importlib.import_module(name))
