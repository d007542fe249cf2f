from __future__ import annotations

from tests.security.fuzz_dns import run


def test_ten_thousand_questions() -> None:
    counted = run(10_000, 1)
    assert counted["queries"] == 10_000
    assert counted["malformed"] > 1000
