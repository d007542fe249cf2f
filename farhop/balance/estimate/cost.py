"""The terms of the cost model that both tiers share, in milliseconds. What they are summed to: regional_lb's and
global_lb's `policy/predictive.py`.

Invariants: every term is finite for finite input and never falls when a cost grows. Never reads a view or a ledger.
"""

INIT_WINDOW_BYTES = 14_600  # 10 segments of 1460 bytes (RFC 6928)


def upload_ms(body_bytes: int, rtt_ms: float, init_window_bytes: int = INIT_WINDOW_BYTES) -> float:
    """Extra wait of slow start for a body on an idle connection: whole round trips beyond the one in `rtt_ms`.

    Slow start doubles the window each round trip (RFC 5681), so k flights carry w + 2w + ... = (2^k - 1) w bytes. With
    n = ceil(body / w) windows to send, k is the least with 2^k > n, which is n's bit length; the first flight rides on
    the round trip that is counted anyway. 14,600 B: 0; 200 KB: n = 14, 4 flights, 3 extra. A warm pool pays less, and
    loss more: this is the lossless idle case.
    """
    if body_bytes <= init_window_bytes:
        return 0.0
    windows = -(-body_bytes // init_window_bytes)
    return (windows.bit_length() - 1) * rtt_ms


def token_ms(tpot_ms: float, batch_interference_ms: float, in_flight: float) -> float:
    """What one more request costs per token of its answer: its own wait (`tpot_ms` with it), and that of all it joins.

    Engines decode a batch in one pass, which each request makes `batch_interference_ms` longer for every other:
    choosing by one's own wait alone leaves a fleet half as level as it should be
    (the derivative of n * tpot(n) is tpot(n) + n * tpot').
    """
    return tpot_ms + batch_interference_ms * in_flight


def stalled_ms(prefill_ms: float, alone_ms: float, in_flight: float) -> float:
    """What a prefill makes the requests under way beside it wait, in sum.

    A pass over prompt and batch takes as long as the longer of the two (the prompt is bound by arithmetic, decoding by
    memory): what the prefill takes beyond a token's `alone_ms` keeps everybody waiting. A missed prefix is paid by all.
    """
    return in_flight * max(0.0, prefill_ms - alone_ms)


def behind_ms(wait_ms: float, *, uncached: float, mean_uncached: float, pace_ms: float) -> float:
    """What a prefill makes those wait, in sum, who come behind it: of a request with so much `uncached` (bytes or
    tokens), where in the mean it is `mean_uncached`, at `pace_ms` for each of these, and `wait_ms` go before it.

    A queue in balance is as long behind who is served as it was before him when he came (Little 1961): of wait_ms /
    (mean_uncached * pace_ms) requests at each replica, each of which waits uncached * pace_ms longer. What is shorter
    than one of them is no queue but somebody's prefill, and counts by its share. Where only one's own wait counts, a
    missed prefix is free: five regions of eight L4, cold and near their capacity, sent each other a third of their work
    for queues that this made (docs/measurements/routing-trials.md).
    """
    mean_ms = max(mean_uncached * pace_ms, 1e-9)
    return wait_ms * min(wait_ms / mean_ms, 1.0) * uncached / mean_uncached
