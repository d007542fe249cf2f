"""How much engines find cached if their answers do not report `cached_tokens`, by the counters on their metrics pages.

A counter does not show one request's share, but over some thousand tokens it shows whether what the mirror has is
cached at all: after a cache was emptied unnoticed, for example. vLLM needs `--enable-prompt-tokens-details` to report
it with each answer. Never decides what is forgotten, and keeps nothing of replicas that left.
"""

from __future__ import annotations

import msgspec

_WINDOW_TOKENS = 4096.0  # predicted in before a comparison means something: some requests' worth
_FOUND_SHARE = 0.5  # requests are under way at each look, so that the two never agree to the token


class _Window(msgspec.Struct):
    reported: bool
    predicted: float = 0.0
    found: float = 0.0


class UnreportedHits:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._windows: dict[str, _Window] = {}

    def reported(self, name: str) -> bool | None:
        """Whether a replica's answers report how much was cached; None: it has given no answer yet."""
        window = self._windows.get(name)
        return window.reported if window is not None else None

    def answered(self, name: str, predicted_tokens: float, *, reported: bool) -> None:
        """The replica answered a prompt of which `predicted_tokens` were predicted to be cached."""
        window = self._windows.get(name)
        if window is None:
            window = self._windows[name] = _Window(reported)
        if window.reported != reported:
            window.reported, window.predicted, window.found = reported, 0.0, 0.0
        if not reported:
            window.predicted += predicted_tokens

    def overrates(self, name: str, found_tokens: float) -> bool:
        """By its counters it found `found_tokens` more since the last look. Whether it is clear by now that far less is
        cached there than was predicted; the comparison begins anew then, and whenever it has shown nothing."""
        window = self._windows.get(name)
        if window is None or window.reported:
            return False
        window.found += found_tokens
        if window.predicted < _WINDOW_TOKENS:
            return False
        overrated = window.found < _FOUND_SHARE * window.predicted
        window.predicted = window.found = 0.0
        return overrated

    def forget(self, name: str) -> None:
        """The replica was removed, or restarted."""
        self._windows.pop(name, None)
