from __future__ import annotations

import pytest
from inprocess import HOP_KEY


@pytest.fixture(autouse=True)
def _hop_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
