"""What is learned of models, tenants and targets from finished requests: sizes in tokens, speeds in milliseconds.

Invariants: an estimate always exists, is positive and finite, and lies in a stated domain whatever was reported; the
number of things learned about is bounded, since model and tenant names come from outside. Never reads a clock.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, TypeVar

from farhop.balance.ewma import Mean

if TYPE_CHECKING:
    from farhop.balance.machine import Usage

BYTES_PER_TOKEN = 4.0  # English text under a BPE vocabulary of 32k-128k
OUTPUT_TOKENS = 256.0
ENTRIES_MAX = 2048

_K = TypeVar("_K")
_SMALLEST_PROMPT_BYTES = 64  # a chat template of a few tokens would pass for the ratio
_SMALLEST_PREFILL_TOKENS = 64  # below this a step's fixed cost hides the cost per token


class Estimates:
    """Bytes per token of each model, output tokens of each tenant and model. The longest not met is forgotten."""

    __slots__ = ("_bytes_per_token", "_output")

    def __init__(self) -> None:
        self._bytes_per_token: OrderedDict[str, Mean] = OrderedDict()
        self._output: OrderedDict[tuple[str, str], Mean] = OrderedDict()

    def bytes_per_token(self, model: str) -> float:
        """Bytes of canonical prompt per token of the model."""
        known = self._bytes_per_token.get(model)
        return BYTES_PER_TOKEN if known is None or known.value is None else known.value

    def output_tokens(self, tenant: str, model: str, max_tokens: int | None) -> float:
        """Tokens the answer will probably have, at most what the request allows."""
        known = self._output.get((tenant, model))
        expected = OUTPUT_TOKENS if known is None or known.value is None else known.value
        return expected if max_tokens is None or expected < max_tokens else max(1.0, float(max_tokens))

    def learn(self, tenant: str, model: str, prompt_bytes: int, usage: Usage) -> None:
        """Take a finished request's usage. Samples outside their domain change nothing."""
        if usage.prompt_tokens > 0 and prompt_bytes >= _SMALLEST_PROMPT_BYTES:
            _learn(self._bytes_per_token, model, prompt_bytes / usage.prompt_tokens, 0.25, 64.0)
        if usage.completion_tokens > 0:
            _learn(self._output, (tenant, model), float(usage.completion_tokens), 1.0, 1e6)


def _learn(known: OrderedDict[_K, Mean], key: _K, sample: float, lo: float, hi: float) -> None:
    entry = known.get(key) or Mean(0.05, lo, hi)
    if not entry.update(sample):
        return
    known[key] = entry
    known.move_to_end(key)
    if len(known) > ENTRIES_MAX:
        known.popitem(last=False)


class Speed:
    """How fast one target works: prefill and decode per token, and a request's whole service, in milliseconds."""

    __slots__ = ("_prefill", "_service", "_tpot")

    def __init__(self, prefill_ms_per_token: float, tpot_ms: float) -> None:
        self._prefill = _mean_around(1e-5, 1e3, prefill_ms_per_token)
        self._tpot = _mean_around(1e-4, 1e5, tpot_ms)
        self._service = _mean_around(1e-3, 1e8, OUTPUT_TOKENS * tpot_ms)

    @property
    def prefill_ms_per_token(self) -> float:
        """Milliseconds to prefill one token."""
        return self._prefill.value or 1e-5

    @property
    def tpot_ms(self) -> float:
        """Milliseconds between two tokens of one answer."""
        return self._tpot.value or 1e-4

    @property
    def service_ms(self) -> float:
        """Milliseconds a request spends at the target."""
        return self._service.value or 1e-3

    def began(self, elapsed_ms: float, prefill_tokens: float) -> bool:
        """A first token came `elapsed_ms` after dispatch, behind and with `prefill_tokens` of uncached prompt.

        False if that was too little of a prompt to tell a pace.
        """
        # The first token also waits for about one decode step, which is not prefill.
        return self.prefilled(max(elapsed_ms - self.tpot_ms, 0.1 * elapsed_ms), prefill_tokens)

    def prefilled(self, elapsed_ms: float, prefill_tokens: float) -> bool:
        """So many uncached tokens of prompt took `elapsed_ms`, and nothing else was done in that time.

        False if that was too little of a prompt to tell a pace.
        """
        if prefill_tokens < _SMALLEST_PREFILL_TOKENS:
            return False
        self._prefill.update(elapsed_ms / prefill_tokens)
        return True

    def ended(self, decode_ms: float, service_ms: float, completion_tokens: int) -> None:
        """An answer ended `decode_ms` after its first token and `service_ms` after dispatch."""
        self._service.update(service_ms)
        if completion_tokens > 1:
            self._tpot.update(decode_ms / (completion_tokens - 1))


def _mean_around(lo: float, hi: float, guess: float) -> Mean:
    """A mean to start from a guess of somebody's: one outside the domain counts as its nearest end."""
    return Mean(0.1, lo, hi, max(lo, min(hi, guess)))
