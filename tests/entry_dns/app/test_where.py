from __future__ import annotations

import pytest

from entry_dns.app.where import where
from tests.entry_dns.conftest import NAMES, atlas, standing, world
from topology.law import Law


def ask(client: str, tenant: str = ""):
    return where(client, tenant, atlas(world()), Law(world()), [standing(name) for name in NAMES], 3)


def test_who_and_why_and_for_which_network() -> None:
    told = ask("203.0.113.7")
    assert (told["network"], told["scope"]) == ("203.0.113.0/24", 24)
    assert [one["entry"] for one in told["entries"]] == ["tokyo", "frankfurt", "virginia"]
    assert [one["place"] for one in told["entries"]] == [1, 2, 3]
    assert ask("2001:db8:aaaa::1")["network"] == "2001:db8:aaaa::/48"


def test_what_the_law_keeps_out_says_so() -> None:
    told = {one["entry"]: one for one in ask("203.0.113.7", "eu-only")["entries"]}
    assert told["frankfurt"]["place"] == 1
    assert told["tokyo"]["place"] is None
    assert told["tokyo"]["why"] == "tenant eu-only: entry allows only eu"
    confined = {one["entry"]: one for one in ask("198.18.0.1")["entries"]}
    assert confined["frankfurt"]["why"] == "the client's network is confined to other places"


def test_what_is_known_of_the_address() -> None:
    assert "no list holds" in ask("8.8.8.8")["known"]
    assert "private" in ask("10.0.0.1")["known"]


@pytest.mark.parametrize(("client", "tenant", "said"), [("x", "", "is no address"), ("1.2.3.4", "x", "not in the law")])
def test_bad_questions(client: str, tenant: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ask(client, tenant)
