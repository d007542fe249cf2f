"""Memory over many requests: the regional tier under full load, with prompts that never repeat.

The replicas' KV cache has an ordinary size, so that the prefix trie fills early and evicts from then on: what still
grows in the second half grows without bound. Bounded in time; judges nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from farhop_lab.bench import usage
from farhop_lab.bench.harness import BenchError
from farhop_lab.bench.relay import Tools, busy, running
from farhop_lab.bench.tiers import SOAKED

SHARES = (0.0, 0.1, 0.5, 1.0)
LIMIT_S = 1800.0
BODY_BYTES = 1024
_WARM_S = 1.0
_SLICE_S = (1.0, 10.0)  # one run of the load: short at first, so that a small soak ends on time


class MemorySample(msgspec.Struct, frozen=True):
    """Memory when a share of the requests was answered, and CPU per request since the previous sample."""

    share: float
    requests: int
    rss_bytes: int
    cpu_us: float


class SoakReport(msgspec.Struct, frozen=True):
    """The whole soak: `requests` of those `asked` were answered, `errors` of them wrongly."""

    asked: int
    requests: int
    errors: int
    marks: list[MemorySample]

    @property
    def per_request_bytes(self) -> float:
        """Growth per request over the last interval; one-time allocations lie before it."""
        before, last = self.marks[-2:]
        return (last.rss_bytes - before.rss_bytes) / max(1, last.requests - before.requests)


async def measure(requests: int, progress: Callable[[str], None] = lambda _text: None) -> SoakReport:
    """Run the soak. BenchError if it cannot run."""
    why = SOAKED.missing()
    if why is not None:
        raise BenchError(why)
    tools, limit = Tools.found(), time.monotonic() + LIMIT_S
    async with running(SOAKED, tools, tools.nginx) as (environment, proxy):
        # The first sample includes one-time needs of connections and code.
        await busy(tools, environment, proxy, BODY_BYTES, _WARM_S)
        done, errors, spent_s, rate = 0, 0, 0.0, 1000.0
        marks = [MemorySample(0.0, 0, usage.rss_bytes(usage.tree(proxy.pids)), 0.0)]
        over = False
        while not over:
            left = next(share * requests - done for share in SHARES if share * requests > done)
            slice_s = min(max(left / rate, _SLICE_S[0]), _SLICE_S[1])
            window = await busy(tools, environment, proxy, BODY_BYTES, slice_s, first=done)
            if not window.requests:
                raise BenchError("the regional balancer answers no more")
            rate = window.requests / window.seconds
            done, errors, spent_s = done + window.requests, errors + window.errors, spent_s + window.cpu_s
            progress(f"{done:,} of {requests:,} requests, {window.rss_bytes / 2**20:,.0f} MiB")
            over = done >= requests or time.monotonic() >= limit
            if over or done >= SHARES[len(marks)] * requests:
                cpu_us = spent_s * 1e6 / (done - marks[-1].requests)
                marks.append(MemorySample(done / requests, done, window.rss_bytes, cpu_us))
                spent_s = 0.0
    return SoakReport(requests, done, errors, marks)
