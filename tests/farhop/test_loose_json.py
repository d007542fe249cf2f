"""Parts of another process's JSON: what is not of its type is empty, and the rest is kept."""

from __future__ import annotations

import pytest

from farhop.loose_json import as_dict, as_list, dicts, dicts_by_name


@pytest.mark.parametrize("value", [None, True, 1, 1.5, "text"])
def test_a_value_of_another_type_is_empty(value: object) -> None:
    assert (as_dict(value), as_list(value), dicts(value), dicts_by_name(value)) == ({}, [], [], {})


def test_of_a_list_the_objects_are_kept_in_their_order() -> None:
    listed = [{"a": 1}, None, "text", [{"b": 2}], {"c": 3}]
    assert dicts(listed) == [{"a": 1}, {"c": 3}]
    assert as_list(listed) is listed
    assert as_dict(listed) == {}


def test_of_an_object_the_fields_that_are_objects_are_kept_by_name() -> None:
    whole = {"a": {"b": 1}, "c": None, "d": [{}], "e": {}}
    assert dicts_by_name(whole) == {"a": {"b": 1}, "e": {}}
    assert as_dict(whole) is whole
    assert as_list(whole) == []
