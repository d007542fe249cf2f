"""The terms of the cost model that both tiers share, in milliseconds. What they are summed to: regional_lb's and
global_lb's `policy/predictive.py`.

Invariants: every term is finite for finite input and never falls when a cost grows. Never reads a view or a ledger.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

INIT_WINDOW_BYTES = 14_600  # 10 segments of 1460 bytes (RFC 6928)
# How far into a text a token's attention takes as much arithmetic as its weights do: 2 P / (4 L d) tokens, for P
# parameters that take part and L layers of attention over d values (PaLM, arXiv 2204.02311, appendix B: of its 6 P and
# 12 L d for a token of context a forward pass takes a third).
# Llama 3.1 8B 30,600, 70B 53,900; Qwen2.5 32B 49,600; gpt-oss-120b 34,000; of many experts, few of which take part,
# less: DeepSeek-V3 14,800, Qwen3-30B-A3B 8,400.
ATTENTION_TOKENS = 32_768.0
# In a shorter text attention is an eighth of the work at the most, and engines fill their steps by tokens, not by work:
# counted from 1,024 on, prompts of 3,000 near capacity found steps full that were not (first tokens' p90 1.2 times).
LONG_TOKENS = 8192.0

Amount = TypeVar("Amount", float, NDArray[np.float64])


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


def prefill_work(uncached: Amount, prompt: float, attention: Amount | float = ATTENTION_TOKENS) -> Amount:
    """The work of prefilling a prompt's uncached tokens, as the number of tokens at a text's beginning that take as
    long.

    Each of `uncached` tokens, the last of `prompt`, attends to all before it, prompt - uncached / 2 in the mean.
    100,000 uncached tokens are the work of 250,000, the last 1,000 of them that of 4,000: counting uncached tokens
    alone, a long prompt would seem to cost less than half of what it does, and a cached context would seem cheap to
    compute again. All in bytes, if `attention` is.
    """
    return uncached * (1.0 + (prompt - 0.5 * uncached) / attention)


def stalled_ms(prefill_ms: float, alone_ms: float, in_flight: float) -> float:
    """How long a prefill delays the requests under way beside it, summed over them (ms).

    A pass over prompt and batch takes as long as the longer of the two (the prompt is bound by arithmetic, decoding by
    memory): what the prefill takes beyond a token's `alone_ms` keeps everybody waiting. A missed prefix is paid by all.
    """
    return in_flight * max(0.0, prefill_ms - alone_ms)


def behind_ms(wait_ms: float, *, work: float, mean_work: float, ms_per_unit: float) -> float:
    """How long a prefill delays the requests behind it in the queue, summed over them (ms): for a request with this
    `work` (prefill_work, in bytes or tokens), if the mean is `mean_work`, at `ms_per_unit`, after a wait of
    `wait_ms`.

    In a queue in balance, as many requests are behind one that is served as were before it when it came (Little 1961):
    wait_ms / (mean_work * ms_per_unit) requests at each replica, each of which waits work * ms_per_unit longer. A wait
    shorter than one prefill is hardly a queue, and counts by its share. If only a request's own wait counts, a missed
    prefix is free: five regions of eight L4, cold and near their capacity, sent each other a third of their work
    because of queues that this caused (docs/measurements/routing-trials.md).
    """
    mean_ms = max(mean_work * ms_per_unit, 1e-9)
    return wait_ms * min(wait_ms / mean_ms, 1.0) * work / mean_work
