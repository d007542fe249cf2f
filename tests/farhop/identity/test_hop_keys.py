"""A region's part of the fleet's secret, and what can be done with it."""

from __future__ import annotations

import pytest

from farhop.identity.hop_keys import HopError, HopKey, is_derived, key_from, key_to, read_keys

ROOT = b"r" * 32


def read(text: str) -> HopKey:
    return read_keys({"k1": text.encode()})["k1"]


def test_each_pair_of_regions_has_its_own_key_whichever_key_it_is_derived_from() -> None:
    whole = HopKey(root=ROOT)
    regions = ("paris", "tokyo", "us.east-1")
    pairs = {(a, b): whole.pair(a, b) for a in regions for b in regions}
    assert len(set(pairs.values())) == 9
    for region in regions:
        to, of = read(key_to(ROOT, region)), read(key_from(ROOT, region, regions))
        for a, b in pairs:
            assert to.pair(a, b) == (pairs[a, b] if b == region else None)
            assert of.pair(a, b) == (pairs[a, b] if a == region else None)


@pytest.mark.parametrize(
    "text",
    [
        "farhop-hop-to:", "farhop-hop-to:paris", "farhop-hop-to:paris:short", "farhop-hop-to:pa ris:" + "A" * 43,
        key_to(ROOT, "paris") + "=", key_to(ROOT, "paris")[:-1], "farhop-hop-from:paris:tokyo",
        "farhop-hop-from:paris:tokyo=" + "A" * 40, "farhop-hop-to:paris:" + "\xff" * 43,
    ],
)  # fmt: skip
def test_a_malformed_derived_key_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(HopError, match="derive it again") as refused:
        read(text)
    assert text not in str(refused.value)


def test_a_derived_key_can_be_distinguished_from_a_root_and_shows_nothing() -> None:
    assert is_derived(key_to(ROOT, "paris"))
    assert is_derived(key_from(ROOT, "paris", ["tokyo"]))
    assert not is_derived("r" * 32)
    assert repr(HopKey(root=ROOT)) == "HopKey(...)"
    with pytest.raises(HopError, match="not the name of a region"):
        key_to(ROOT, "no region")
