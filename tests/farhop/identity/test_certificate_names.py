"""Names in certificates: read only if they are unambiguous and in our trust domain."""

from __future__ import annotations

import pytest

from farhop.identity.certificate_names import TIERS, Peer, host, read, uri

HERE = "fleet.example"


def test_a_written_name_is_read_back() -> None:
    for tier in TIERS:
        for region in ("paris", "us.east-1", "a_b"):
            assert read(["127.0.0.1", uri(HERE, tier, region)], HERE) == Peer(tier, region)
            assert host(HERE, tier, region) == f"{region}.{tier}.fleet.example"


@pytest.mark.parametrize(
    "names",
    [
        [], ["paris.global.fleet.example"], ["spiffe://fleet.example/farhop/global"],
        ["spiffe://fleet.example/farhop/global/"], ["spiffe://fleet.example/farhop/global/paris/x"],
        ["spiffe://other.example/farhop/global/paris"], ["spiffe://fleet.example.evil/farhop/global/paris"],
        ["spiffe://fleet.example/farhop/engine/paris"], ["SPIFFE://fleet.example/farhop/global/paris"],
        [uri(HERE, "global", "paris"), uri(HERE, "global", "tokyo")], [" " + uri(HERE, "global", "paris")],
    ],
)  # fmt: skip
def test_any_other_certificate_name_identifies_no_tenant(names: list[str]) -> None:
    assert read(names, HERE) is None
