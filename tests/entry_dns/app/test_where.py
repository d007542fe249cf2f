from __future__ import annotations

import dns.message
import pytest

from entry_dns.answers.prepare import ClientLocation
from entry_dns.app.where import where
from tests.entry_dns.conftest import NAMES, atlas, entry_health, unconfined, world
from topology.law import Law


def ask(client: str, tenant: str = "", known=None, **how):
    known = atlas(world()) if known is None else known
    return where(client, tenant, known, Law(world()), [entry_health(name) for name in NAMES], 3, **how)


def test_where_shows_the_entry_the_reason_and_the_network() -> None:
    found = ask("203.0.113.7")
    assert (found["network"], found["scope"]) == ("203.0.113.0/24", 24)
    assert [one["entry"] for one in found["entries"]] == ["tokyo", "frankfurt", "virginia"]
    assert [one["place"] for one in found["entries"]] == [1, 2, 3]
    assert ask("2001:db8:aaaa::1")["network"] == "2001:db8:aaaa::/48"


def test_entries_excluded_by_the_law_are_shown_as_such() -> None:
    fields = {one["entry"]: one for one in ask("203.0.113.7", "eu-only")["entries"]}
    assert fields["frankfurt"]["place"] == 1
    assert fields["tokyo"]["place"] is None
    assert fields["tokyo"]["why"] == "tenant eu-only: entry allows only eu"
    confined = {one["entry"]: one for one in ask("198.18.0.1")["entries"]}
    assert confined["frankfurt"]["why"] == "the client's network is confined to other places"


def test_where_says_whether_an_address_is_private_or_in_no_list() -> None:
    assert "no list holds" in ask("8.8.8.8")["known"]
    assert "private" in ask("10.0.0.1")["known"]


@pytest.mark.parametrize(
    ("client", "tenant", "message"), [("x", "", "is no address"), ("1.2.3.4", "x", "not in the law")]
)
def test_a_bad_address_or_tenant_is_refused(client: str, tenant: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask(client, tenant)


def test_what_is_answered_without_a_client_subnet_and_why() -> None:
    assert ask("203.0.113.7")["without_subnet"] == {
        "by": "shared", "entries": ["tokyo"], "kept_back": {"virginia": "198.18.0.0/15", "frankfurt": "198.18.0.0/15"},
    }  # fmt: skip
    assert ask("203.0.113.7", "eu-only")["without_subnet"] == {
        "by": "shared", "entries": [], "kept_back": {"frankfurt": "198.18.0.0/15"},
    }  # fmt: skip
    by_resolver = ask("203.0.113.7", by_resolver=True)["without_subnet"]
    assert (by_resolver["by"], by_resolver["entries"]) == ("resolver", ["tokyo"])
    assert by_resolver["kept_back"].keys() == {"virginia", "frankfurt"}
    assert ask("203.0.113.7", known=unconfined())["without_subnet"] == {
        "by": "resolver", "entries": None, "kept_back": {},
    }  # fmt: skip
    assert ask("203.0.113.7", "eu-only", known=unconfined())["without_subnet"] == {
        "by": "all", "entries": ["frankfurt"], "kept_back": {},
    }  # fmt: skip


def test_the_shown_answer_without_a_subnet_is_what_the_server_answers(responder) -> None:
    """`farhop where` and the responder, from the same view."""
    for tenant, name in (("", "api.entry.example"), ("eu-only", "eu.entry.example")):
        query = dns.message.make_query(name, "A", use_edns=0)
        answer = dns.message.from_wire(responder.answer(query.to_wire(), "192.0.2.200"))
        at = {entry: one.ipv4[0] for entry, one in world().entries.items()}
        found = [one.address for rrset in answer.answer for one in rrset]
        assert found == [at[entry] for entry in ask("8.8.8.8", tenant)["without_subnet"]["entries"]]


def test_a_confined_network_of_ipv6_is_named() -> None:
    known = atlas(world(), ("2001:db8:77::/48", ClientLocation(35.7, 139.7, within=("jp",))))
    assert ask("203.0.113.7", known=known)["without_subnet"]["kept_back"]["frankfurt"] in (
        "198.18.0.0/15", "2001:db8:77::/48",
    )  # fmt: skip
