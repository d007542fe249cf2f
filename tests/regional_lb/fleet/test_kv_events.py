from __future__ import annotations

from regional_lb.fleet.kv_events import canonical_keys


def test_different_extra_keys_have_different_encodings() -> None:
    assert canonical_keys(()) == canonical_keys([]) == b""
    spelled = [canonical_keys(keys) for keys in (["a"], ["a", "b"], ["ab"], [["a", 1]], [b"a"], ["a", None])]
    assert len({*spelled, b""}) == 7
    assert canonical_keys(("a",)) == canonical_keys(["a"])
