from __future__ import annotations

from regional_lb.fleet.kv_events import spell


def test_keys_are_spelled_apart() -> None:
    assert spell(()) == spell([]) == b""
    spelled = [spell(keys) for keys in (["a"], ["a", "b"], ["ab"], [["a", 1]], [b"a"], ["a", None])]
    assert len({*spelled, b""}) == 7
    assert spell(("a",)) == spell(["a"])
