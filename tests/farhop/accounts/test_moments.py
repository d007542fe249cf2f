from __future__ import annotations

from datetime import datetime

from hypothesis import given
from hypothesis import strategies as st

from farhop.accounts.moments import moment


@given(st.floats(0, 4e9))
def test_a_moment_is_written_to_the_millisecond(at_s: float) -> None:
    written = moment(at_s)
    assert len(written) == len("2026-11-26T00:00:00.000Z")
    assert abs(datetime.fromisoformat(written).timestamp() - at_s) < 0.0011


def test_seconds_follow_each_other() -> None:
    assert [moment(1_795_000_000.0 + n / 4) for n in range(3, 6)] == [
        "2026-11-18T11:06:40.750Z", "2026-11-18T11:06:41.000Z", "2026-11-18T11:06:41.250Z",
    ]  # fmt: skip
