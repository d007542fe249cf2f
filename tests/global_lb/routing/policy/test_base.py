"""A number per region, made once for the same regions."""

from global_lb.routing.policy.base import ByRegion


def test_numbers_by_region_become_a_column_with_a_default() -> None:
    of = ByRegion({"a": 1.0, "b": 2.0}, 9.0)
    names = ("b", "x", "a")
    column = of.column(names)
    assert column.tolist() == [2.0, 9.0, 1.0]
    assert of.column(names) is column
    assert of.column(("a",)).tolist() == [1.0]
