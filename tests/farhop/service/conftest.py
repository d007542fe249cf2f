from __future__ import annotations

import os

import pytest
from inprocess import HOP_KEY


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of the hop token, and no tracing settings of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
