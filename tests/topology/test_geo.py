from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topology.geo import EARTH_RADIUS_KM, by_distance, cities, distance_km, locate, nearest
from topology.load import load, shipped

HALF_WAY_ROUND_KM = 3.141592653589793 * EARTH_RADIUS_KM
_LATITUDES = st.floats(-90, 90)
_LONGITUDES = st.floats(-180, 180)


@pytest.mark.parametrize(
    ("a", "b", "km"),
    [
        ("london", "paris", 344),
        ("new york", "london", 5570),
        ("tokyo", "frankfurt", 9350),
        ("sydney", "lima", 12820),
    ],
)
def test_distances_between_known_cities(a: str, b: str, km: float) -> None:
    here, there = locate(a), locate(b)
    assert here is not None
    assert there is not None
    assert distance_km(*here, *there) == pytest.approx(km, rel=0.01)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(_LATITUDES, _LONGITUDES, _LATITUDES, _LONGITUDES)
def test_distance_is_symmetric_and_bounded(lat_a: float, lon_a: float, lat_b: float, lon_b: float) -> None:
    km = distance_km(lat_a, lon_a, lat_b, lon_b)
    assert km == pytest.approx(distance_km(lat_b, lon_b, lat_a, lon_a), abs=1e-6)
    assert 0 <= km <= HALF_WAY_ROUND_KM * (1 + 1e-12)
    assert distance_km(lat_a, lon_a, lat_a, lon_a) == 0


def test_antipodes_are_half_way_round() -> None:
    assert distance_km(0, 0, 0, 180) == pytest.approx(HALF_WAY_ROUND_KM)
    assert distance_km(90, 0, -90, 0) == pytest.approx(HALF_WAY_ROUND_KM)


def test_distances_cross_the_date_line() -> None:
    assert distance_km(0, 179.5, 0, -179.5) == pytest.approx(111.2, rel=0.01)


@pytest.mark.parametrize(
    ("city", "region"), [("madrid", "frankfurt"), ("chicago", "virginia"), ("seoul", "tokyo"), ("lagos", "frankfurt")]
)
def test_the_nearest_region(city: str, region: str) -> None:
    point = locate(city)
    assert point is not None
    assert nearest(load(shipped("three-regions")).regions.values(), *point).name == region


def test_by_distance_orders_all_and_breaks_ties_by_name() -> None:
    regions = load(shipped("three-regions")).regions
    assert [region.name for region in by_distance(regions.values(), 51.5, -0.1)] == ["frankfurt", "virginia", "tokyo"]
    same = [regions["tokyo"], regions["tokyo"]]
    assert by_distance(same, 0, 0) == same


def test_nearest_of_none_is_an_error() -> None:
    with pytest.raises(ValueError, match="no region"):
        nearest([], 0, 0)


@pytest.mark.parametrize("name", ["LONDON", " london ", "London, United Kingdom", "london,united  kingdom"])
def test_case_spaces_and_country_do_not_matter(name: str) -> None:
    assert locate(name) == (51.51, -0.13)


def test_accents_do_not_matter() -> None:
    assert locate("São Paulo") == locate("sao paulo") == (-23.55, -46.63)


def test_coordinates_are_taken_as_they_are() -> None:
    assert locate("52.5, -13.25") == (52.5, -13.25)


@pytest.mark.parametrize(
    "name",
    ["", "atlantis", "London, France", "91,0", "0,181", "nan,0", "0,inf", "1,2,3", "x" * 9999, "0," + "1" * 500],
)
def test_an_unknown_place_is_not_located(name: str) -> None:
    assert locate(name) is None


def test_the_shipped_cities_are_many_distinct_and_on_the_globe() -> None:
    names = cities()
    assert len(names) == len(set(names)) >= 80
    for name in names:
        point = locate(name)
        assert point is not None
        assert locate(f"{point[0]},{point[1]}") == point
