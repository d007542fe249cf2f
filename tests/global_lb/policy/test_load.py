"""The least used share, with what was sent since."""

from worlds import field, request

from global_lb.policy.load import LeastLoad


def test_the_share_used_and_what_was_sent_since() -> None:
    told = field(
        request("a"), 100.0, "", a={"used_share": 0.5, "slots_total": 10},
        b={"used_share": 0.3, "slots_total": 10, "unacknowledged_bytes": 9.0}, c={"used_share": 0.45, "rtt_ms": 900.0},
    )  # fmt: skip
    assert [round(score, 6) for score in LeastLoad().score(told).tolist()] == [0.5, 0.4, 0.45]
