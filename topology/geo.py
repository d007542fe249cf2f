"""Geography: great-circle distances, the nearest region, coordinates of well-known cities.

It never asks a network. Distance is a guess at the round-trip time and only orders clients' entries; measured times
decide.
"""

from __future__ import annotations

import csv
import unicodedata
from collections.abc import Iterable
from functools import cache
from math import asin, cos, radians, sin, sqrt
from pathlib import Path

from topology.model import Region

EARTH_RADIUS_KM = 6371.0088
"""Mean radius of the Earth (IUGG)."""

_PLACES = Path(__file__).parent / "places.csv"
_PLACE_CHARS_MAX = 200


def distance_km(latitude_a: float, longitude_a: float, latitude_b: float, longitude_b: float) -> float:
    """Great-circle distance between two points in degrees, by the haversine formula; good to 0.5 %."""
    phi_a, phi_b = radians(latitude_a), radians(latitude_b)
    half_north = (phi_b - phi_a) / 2
    half_east = radians(longitude_b - longitude_a) / 2
    square = sin(half_north) ** 2 + cos(phi_a) * cos(phi_b) * sin(half_east) ** 2
    # Rounding can push antipodes a hair above 1, where asin ends.
    return 2 * EARTH_RADIUS_KM * asin(min(1.0, sqrt(square)))


def by_distance(regions: Iterable[Region], latitude: float, longitude: float) -> list[Region]:
    """The regions, nearest first; equals by name."""
    return sorted(regions, key=lambda r: (distance_km(latitude, longitude, r.latitude, r.longitude), r.name))


def nearest(regions: Iterable[Region], latitude: float, longitude: float) -> Region:
    """The region nearest to a point. ValueError if there is none."""
    ordered = by_distance(regions, latitude, longitude)
    if not ordered:
        raise ValueError("no region to choose from")
    return ordered[0]


def locate(place_name: str) -> tuple[float, float] | None:
    """Degrees (latitude, longitude) of a city, "city, country" or "lat,lon". Case and accents do not matter.

    None for a place not listed in places.csv and for coordinates off the globe.
    """
    if len(place_name) > _PLACE_CHARS_MAX:
        return None
    first, comma, second = place_name.partition(",")
    if comma:
        try:
            latitude, longitude = float(first), float(second)
        except ValueError:
            return _cities().get((_plain(first), _plain(second)))
        on_globe = -90 <= latitude <= 90 and -180 <= longitude <= 180
        return (latitude, longitude) if on_globe else None
    return _cities().get((_plain(first), ""))


def cities() -> tuple[str, ...]:
    """The names `locate` knows, sorted."""
    return tuple(sorted(row["name"] for row in _rows()))


@cache
def _cities() -> dict[tuple[str, str], tuple[float, float]]:
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for row in _rows():
        point = (float(row["latitude"]), float(row["longitude"]))
        found[_plain(row["name"]), ""] = found[_plain(row["name"]), _plain(row["country"])] = point
    return found


@cache
def _rows() -> tuple[dict[str, str], ...]:
    with _PLACES.open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def _plain(name: str) -> str:
    decomposed = unicodedata.normalize("NFKD", name.casefold())
    return " ".join("".join(char for char in decomposed if not unicodedata.combining(char)).split())
