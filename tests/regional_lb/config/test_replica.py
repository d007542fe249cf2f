"""One engine endpoint: what it is called, and where its pages are."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from farhop.balance.machine import Address
from regional_lb.config import ReplicaConfig, place_of


def test_its_name_is_its_address_unless_it_has_one() -> None:
    assert ReplicaConfig(url="http://gpu:8000", models=["m"]).label == "gpu:8000"
    assert ReplicaConfig(url="http://gpu:8000", models=["m"], name="a").label == "a"


def test_a_place_is_an_address_and_a_path() -> None:
    assert place_of("https://gpu/metrics") == (Address("gpu", 443, tls="gpu"), "/metrics")
    assert place_of("http://gpu:9400") == (Address("gpu", 9400), "/")


@pytest.mark.parametrize("url", ["ftp://gpu", "gpu:8000", "http://gpu:8000/v1", "http://u:p@gpu", "http://gpu:99999"])
def test_what_is_no_origin_is_refused_and_told(url: str) -> None:
    with pytest.raises(ValidationError, match="http://host:port"):
        ReplicaConfig(url=url, models=["m"])
