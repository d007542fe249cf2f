"""Bounds: what stands there by default holds together, and nonsense is refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from regional_lb.config import Foreign, Queue, Watch


def test_defaults_are_those_of_the_machine() -> None:
    assert (Queue().wait_s, Foreign().reserve_share, Watch().rise) == (30.0, 0.1, 2)


@pytest.mark.parametrize(("part", "field"), [(Queue, "wait_s"), (Watch, "probe_s"), (Foreign, "reserve_share")])
def test_nonsense_is_refused(part: type[Queue] | type[Watch] | type[Foreign], field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        part(**{field: -1})
