from __future__ import annotations

from tests.security.fuzz_dns import run


def test_ten_thousand_random_dns_queries_are_answered_or_refused() -> None:
    counted = run(10_000, 1)
    assert counted["queries"] == 10_000
    assert counted["malformed"] > 1000
    assert counted["odd"] < 9_800, "what is well formed goes the short way, too"
    assert counted["cookie_proven"] > 100
