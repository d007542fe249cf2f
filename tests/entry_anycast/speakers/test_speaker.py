"""What is announced, as one word; and what is a prefix."""

import pytest

from entry_anycast.announcing.machine import Phase
from entry_anycast.speakers.speaker import family, network, phase_of


@pytest.mark.parametrize(
    ("found", "phase"),
    [
        (set(), Phase.WITHDRAWN),
        ({("a", False), ("b", False)}, Phase.ANNOUNCED),
        ({("a", True), ("b", True)}, Phase.DRAINING),
        ({("a", True), ("b", False)}, None),
        ({("a", False)}, None),
    ],
)
def test_the_routes_found_map_to_one_phase_or_to_none_if_they_are_mixed(found, phase) -> None:
    assert phase_of(found, {"a", "b"}) is phase


def test_a_text_that_is_no_prefix_is_refused_with_the_remedy() -> None:
    assert (family("2001:db8::/48"), family("192.0.2.0/24")) == (6, 4)
    with pytest.raises(ValueError, match="is no prefix such as"):
        network("192.0.2.1/8")
