"""The cost model: what a request would cost at a region or replica, in milliseconds. Plain floats in, plain floats out.

Invariants: every formula is finite for finite input and never falls when a cost grows. Never reads a view or a ledger,
and never decides: lower is better, and choosing is farhop.balance.choose's.
"""

from math import inf

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


def tokens(n_bytes: int, bytes_per_token: float) -> float:
    """Tokens in `n_bytes` of prompt, by the model's learned bytes per token. ValueError unless that is positive."""
    if not 0.0 < bytes_per_token < inf:
        raise ValueError(f"bytes_per_token must be a positive number, not {bytes_per_token!r}")
    return n_bytes / bytes_per_token


def uncached_tokens(prompt_tokens: float, hit_tokens: float) -> float:
    """Tokens that must be prefilled: the prompt less the hit, never below 0 (an estimate of a hit may overshoot)."""
    return prompt_tokens - hit_tokens if hit_tokens < prompt_tokens else 0.0


def ttft_ms(
    rtt_ms: float, upload_ms: float, wait_ms: float, uncached_tokens: float, prefill_ms_per_token: float
) -> float:
    """Predicted time to first token at a region: rtt + upload + wait + uncached * prefill rate (all ms)."""
    return rtt_ms + upload_ms + wait_ms + uncached_tokens * prefill_ms_per_token


def reckoned_wait_ms(
    published_wait_ms: float, sent_tokens: float, acknowledged_tokens: float, ms_per_token: float
) -> float:
    """Dead reckoning: the wait a region published, plus what this balancer sent there since and the report cannot know.

    `acknowledged_tokens` is how much of `sent_tokens` that report had seen. Never below what was published: a count
    acknowledged beyond what was sent (this balancer restarted) is nothing outstanding.
    """
    outstanding = sent_tokens - acknowledged_tokens
    return published_wait_ms + outstanding * ms_per_token if outstanding > 0.0 else published_wait_ms


def score_ms(
    ttft_ms: float,
    output_tokens: float,
    token_ms: float,
    best_ms: float,
    stalled_ms: float,
    beta: float,
    usd: float,
    usd_best: float,
    usd_weight_ms: float,
) -> float:
    """A region's score: ttft + beta * (m * (token - least token) + stalled) + usd_weight_ms * (usd - least usd).

    `token_ms` and `stalled_ms` as the functions of their names have them; `best_ms` is the least of the former.
    `beta` (no unit) weighs decode against first token: with 0, all goes to the nearest region until decode collapses
    (GORGO, arXiv 2602.11688). `usd_weight_ms` is the milliseconds one dollar per request is worth.
    """
    return ttft_ms + beta * (output_tokens * (token_ms - best_ms) + stalled_ms) + usd_weight_ms * (usd - usd_best)


def replica_score_ms(
    backlog_tokens: float,
    uncached_tokens: float,
    prefill_ms_per_token: float,
    output_tokens: float,
    token_ms: float,
    best_ms: float,
    stalled_ms: float,
    beta: float,
) -> float:
    """A replica's score: (backlog + uncached) * prefill rate + beta * (m * (token - least token) + stalled).

    `backlog_tokens` are those dispatched there whose prefill is not done (Ledger's prefill_tokens); `token_ms` and
    `stalled_ms` as the functions of their names have them; `best_ms` is the least of the former.
    """
    prefill_ms = (backlog_tokens + uncached_tokens) * prefill_ms_per_token
    return prefill_ms + beta * (output_tokens * (token_ms - best_ms) + stalled_ms)


def token_ms(tpot_ms: float, crowd_ms: float, in_flight: float) -> float:
    """What one more request costs per token of its answer: its own wait (`tpot_ms` with it), and that of all it joins.

    Engines decode a batch in one pass, which each request makes `crowd_ms` longer for every other: choosing by one's
    own wait alone leaves a fleet half as level as it should be (the derivative of n * tpot(n) is tpot(n) + n * tpot').
    """
    return tpot_ms + crowd_ms * in_flight


def stalled_ms(prefill_ms: float, alone_ms: float, in_flight: float) -> float:
    """What a prefill makes the requests under way beside it wait, in sum.

    A pass over prompt and batch takes as long as the longer of the two (the prompt is bound by arithmetic, decoding by
    memory): what the prefill takes beyond a token's `alone_ms` keeps everybody waiting. A missed prefix is paid by all.
    """
    return in_flight * max(0.0, prefill_ms - alone_ms)


def gpu_usd(
    prefill_ms: float, output_tokens: float, tpot_ms: float, slots_per_replica: float, usd_per_gpu_hour: float
) -> float:
    """What a request takes of hardware by the hour: a replica for its prefill, one slot of it per step of decode."""
    return (prefill_ms + output_tokens * tpot_ms / slots_per_replica) * usd_per_gpu_hour / 3.6e6


def egress_usd(n_bytes: float, usd_per_gb: float) -> float:
    """What it costs to send so many bytes out of a region. A GB is 1e9 bytes, as clouds bill it."""
    return n_bytes * usd_per_gb / 1e9
