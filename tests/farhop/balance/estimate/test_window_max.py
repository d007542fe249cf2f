"""The most of a while is what looking through all of it would find."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.estimate.window_max import WindowMax

LOOKS = st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 100.0), st.floats(0.0, 10.0)), min_size=1, max_size=50)


def test_before_the_first_look_there_is_nothing() -> None:
    assert WindowMax().most == 0.0


@settings(max_examples=150, deadline=None, derandomize=True)
@given(LOOKS)
def test_the_maximum_is_that_of_all_samples_within_the_window(looks: list[tuple[float, float, float]]) -> None:
    """The window may grow: what had left it does not come back."""
    made, now, kept = WindowMax(), 0.0, list[tuple[float, float]]()
    for later_s, figure, window_s in looks:
        now += later_s
        kept = [(at, other) for at, other in (*kept, (now, figure)) if at >= now - window_s]
        assert made.take(figure, now, window_s) == made.most == max(other for _, other in kept)
