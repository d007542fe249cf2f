"""The round-trip time to a region, from pings, without the noise of queues and garbage collectors on the way.

    rtt_ms = least round trip of the window + k * (median - least of the latest pings)

The minimum is the wire; what usually lies above it is jitter, and is allowed for; one stray ping is not, nor one of the
first two: the median of few is the lower one, and a surprising first one is soon followed by another. A longer route is
accepted when all of the latest pings show it: earlier samples are dropped. Without pings the estimate returns to what
was known before any. Invariants: never below the least sample of the window; absurd samples change nothing. Never reads
a clock: `now` is monotonic seconds.
"""

from __future__ import annotations

from collections import deque
from statistics import median, median_low

WINDOW_S = 30.0
JITTER_SHARE = 1.0  # k
LATEST = 8  # pings: a stray one is outvoted, and a better path is believed after five
MOVED_SHARE = 0.25  # a sample this far off shows that the path has changed: look again soon
NOISE_MS = 1.0  # and by at least this: less is the noise of a short path
NOISY = 3.0  # and by this many times what usually lies above the minimum: less is usual jitter
SAMPLE_MAX_MS = 60_000.0
SAMPLES_MAX = 512


class RttEstimate:
    """The round-trip estimate to one region. `initial_ms` is used until the first ping."""

    __slots__ = ("_deviation_ms", "_estimate_ms", "_initial_ms", "_path_changed", "_samples")

    def __init__(self, initial_ms: float) -> None:
        self._estimate_ms = self._initial_ms = initial_ms
        self._deviation_ms = 0.0
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES_MAX)
        self._path_changed = False

    def assume(self, initial_ms: float) -> None:
        """Use this value while no pings are known. What pings measured is kept."""
        if not self._samples:
            self._estimate_ms = initial_ms
        self._initial_ms = initial_ms

    @property
    def rtt_ms(self) -> float:
        """The estimate as of the last ping, in milliseconds."""
        return self._estimate_ms

    def at(self, now: float) -> float:
        """The estimate at `now`: the last one while pings come; after a window without any it goes back to
        `initial_ms`, over another window."""
        if not self._samples:
            return self._initial_ms
        gone = min(1.0, max(0.0, (now - self._samples[-1][0]) / WINDOW_S - 1.0))
        return self._estimate_ms + gone * (self._initial_ms - self._estimate_ms)

    @property
    def moving(self) -> bool:
        """Whether the last sample was far from the estimate before it: worth pinging more often."""
        return self._path_changed

    def sample(self, rtt_ms: float, now: float) -> bool:
        """Add the result of a ping. Returns False, and changes nothing, if it is outside 0..SAMPLE_MAX_MS."""
        if not 0.0 <= rtt_ms <= SAMPLE_MAX_MS:
            return False
        self._samples.append((now, rtt_ms))
        while now - self._samples[0][0] > WINDOW_S:
            self._samples.popleft()
        times_ms = [ms for _, ms in self._samples]
        least_ms, latest = min(times_ms), times_ms[-LATEST:]
        if len(latest) == LATEST and min(latest) > least_ms + max(NOISE_MS, MOVED_SHARE * least_ms):
            while len(self._samples) > LATEST:
                self._samples.popleft()
            least_ms = min(latest)
        deviation_ms = (median if len(latest) == LATEST else median_low)(latest) - min(latest)
        noise_ms = max(NOISE_MS, MOVED_SHARE * self._estimate_ms, NOISY * self._deviation_ms)
        self._path_changed = abs(rtt_ms - self._estimate_ms) > noise_ms
        self._estimate_ms, self._deviation_ms = least_ms + JITTER_SHARE * deviation_ms, deviation_ms
        return True
