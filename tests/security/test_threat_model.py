"""What docs/operate/security.md names as the proof of a claim is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[a-z_/]+(?:\.py)?)`")


@pytest.mark.parametrize("document", ["docs/operate/security.md", "SECURITY.md"])
def test_every_test_that_is_named_exists(document: str) -> None:
    named = NAMED.findall((ROOT / document).read_text())
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []
