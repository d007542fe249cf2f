"""The cost of a chunk is measured of chunks that are what they should be. Never judges by times."""

from __future__ import annotations

from farhop_lab.bench.resume_cost import _WITHOUT_IDS, KINDS, _tap, chunk, measure


def test_each_kind_passes_what_the_client_is_to_see() -> None:
    for kind in KINDS:
        tap = _tap(kind)
        passed = [tap.feed(chunk(n, ids=kind not in _WITHOUT_IDS)) for n in range(30)]
        seen = b"".join(passed)
        assert seen.count(b"data: ") == 30
        assert (b'"token_ids":[' in seen) == (kind == "exact, for the tier above")
        if kind != "off":
            assert tap.progress.tokens == 30
            assert tap.progress.why_not == ""


def test_every_kind_is_measured() -> None:
    found = measure(200, 2)
    assert tuple(found) == KINDS
    assert found["off"].more_us == 0.0
    assert all(one.us > 0.0 for one in found.values())
