"""Images are made once for the session, and are gone after it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import machine


@pytest.fixture(scope="session")
def base() -> Iterator[str]:
    """An image with Python and nothing of Farhop. $FARHOP_TEST_BASE names one that is there already."""
    named = os.environ.get("FARHOP_TEST_BASE")
    if named:
        yield named
        return
    tag = f"farhop-test-base:{os.getpid()}"
    try:
        machine.base_image(tag)
    except machine.MissingError as error:
        pytest.skip(str(error))
    yield tag
    machine.remove_images([tag])


@pytest.fixture(scope="session")
def image(base: str) -> Iterator[str]:
    """Farhop's image, of this checkout; or $FARHOP_TEST_IMAGE, on $FARHOP_TEST_BASE."""
    named = os.environ.get("FARHOP_TEST_IMAGE")
    if named:
        yield named
        return
    tag = f"farhop-test:{os.getpid()}"
    before = set(_dangling())
    print(machine.farhop_image(tag, base))
    yield tag
    machine.remove_images([tag, *(one for one in _dangling() if one not in before)])


@pytest.fixture(scope="session")
def etcd_image(base: str) -> Iterator[str]:
    """An etcd image."""
    tag = f"farhop-test-etcd:{os.getpid()}"
    machine.etcd_image(tag, base)
    yield tag
    machine.remove_images([tag])


@pytest.fixture(scope="session")
def prometheus_image(base: str) -> Iterator[str]:
    """A Prometheus image."""
    tag = f"farhop-test-prometheus:{os.getpid()}"
    try:
        machine.prometheus_image(tag, base)
    except machine.MissingError as error:
        pytest.skip(str(error))
    yield tag
    machine.remove_images([tag])


def _dangling() -> list[str]:
    """Untagged images: stages of builds."""
    return machine.docker("images", "--quiet", "--no-trunc", "--filter", "dangling=true").stdout.split()
