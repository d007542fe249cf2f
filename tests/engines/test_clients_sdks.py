"""LangChain and LiteLLM, unmodified, through both tiers: sessions of their own (sessions/)."""

from __future__ import annotations

from pathlib import Path

import pytest
from clients import Entry, program, run

from farhop_lab.world.ports import free_ports

pytestmark = pytest.mark.engines

SESSIONS = Path(__file__).parent / "sessions"


async def test_langchain(entry: Entry, tmp_path: Path) -> None:
    python = program("langchain", "python")
    assert (await run(entry, python, SESSIONS / "with_langchain.py", folder=tmp_path)).endswith("fine\n")
    await entry.both.at_rest()


async def test_litellm_and_its_proxy(entry: Entry, tmp_path: Path) -> None:
    python = program("litellm", "python")
    (port,) = free_ports(1)
    assert (await run(entry, python, SESSIONS / "with_litellm.py", port, folder=tmp_path)).endswith("fine\n")
    await entry.both.at_rest()
