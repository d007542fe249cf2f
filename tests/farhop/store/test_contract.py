"""The layout of keys, and errors that say what to do. The promises themselves: tests/contracts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.store import contract
from farhop.store.contract import (
    Change,
    ChangeKind,
    Conflict,
    StoreError,
    override_key,
    parse_instance_key,
    parse_report_key,
    pick_key,
    report_key,
    split_key,
)

names = st.text(min_size=1, max_size=30).filter(lambda name: "/" not in name)


@given(names, names)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_report_key_contains_region_and_instance(region, instance):
    key = report_key(region, instance)
    assert key.startswith(contract.REGION_PREFIX)
    assert parse_report_key(key) == (region, instance)


class LookedUp(dict):
    def __iter__(self):
        raise AssertionError("each of thousands of deletions would go through all keys")


def test_what_a_deletion_ends_is_looked_up():
    known = LookedUp({"/a": 1, "/b": 2})
    assert Change(ChangeKind.DELETE, 1, "/b").ended(known) == ["/b"]
    assert Change(ChangeKind.DELETE, 1, "/c").ended(known) == []
    assert Change(ChangeKind.PUT, 1, "/b").ended(known) == []


def test_the_layout_is_what_operators_type():
    assert report_key("tokyo", "lb-1") == "/farhop/v1/region/tokyo/lb/lb-1"
    assert override_key("tokyo") == "/farhop/v1/override/tokyo"
    assert pick_key("tokyo") == "/farhop/v1/pick/tokyo"
    assert split_key("tokyo") == "/farhop/v1/split/tokyo"
    assert contract.LAW_KEY == "/farhop/v1/policy/law"
    assert contract.law_history_key(7) == "/farhop/v1/policy/was/0000000000000007"


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/farhop/v1/region/",
        "/farhop/v1/region/tokyo/lb/",
        "/farhop/v1/region//lb/a",
        "/farhop/v1/region/tokyo/lb/a/b",
        "/farhop/v1/region/tokyo/replica/a",
        "/farhop/v2/region/tokyo/lb/a",
        "/farhop/v1/override/tokyo",
    ],
)
def test_other_keys_are_nobodys_report(key):
    assert parse_report_key(key) is None


@given(names, names)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_instance_is_read_only_from_keys_under_its_own_prefix(region, instance):
    made = {
        contract.ENTRY_PREFIX: contract.entry_key,
        contract.LATENCY_PREFIX: contract.latency_key,
        contract.ANNOUNCE_PREFIX: contract.announce_key,
    }
    for prefix, key in made.items():
        for other in made:
            found = parse_instance_key(other, key(region, instance))
            assert found == ((region, instance) if other == prefix else None)


@pytest.mark.parametrize("rest", ["", "tokyo", "tokyo/", "/a", "tokyo/a/b"])
def test_other_keys_are_no_instances(rest):
    assert parse_instance_key(contract.ENTRY_PREFIX, contract.ENTRY_PREFIX + rest) is None


@pytest.mark.parametrize("name", ["", "a/b"])
def test_a_name_that_would_not_parse_makes_no_key(name):
    for make in (
        lambda: report_key(name, "x"),
        lambda: report_key("x", name),
        lambda: override_key(name),
        lambda: pick_key(name),
    ):
        with pytest.raises(ValueError, match="cannot be part of a key"):
            make()


def test_conflict_error_names_the_expected_revision():
    assert "absent" in str(Conflict("/k", 0))
    assert "revision 7" in str(Conflict("/k", 7))


def test_a_value_is_bounded():
    contract.check_value("/k", bytes(contract.VALUE_LIMIT_BYTES))
    with pytest.raises(StoreError, match="/k"):
        contract.check_value("/k", bytes(contract.VALUE_LIMIT_BYTES + 1))
