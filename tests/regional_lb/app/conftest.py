"""What the parts of a regional balancer's process are tested in: a whole one, behind a global one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from inprocess import HOP_KEY, Both, Engine, both, topology


@pytest.fixture
def hop_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key that hop tokens are signed with is in the environment."""
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)


@pytest.fixture
async def up(hop_key: None) -> AsyncIterator[Both]:
    """Both tiers over one engine."""
    async with Engine().running() as engine, both(engine, topology()) as running:
        yield running
