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
_GUESS_TOKENS = 256.0  # what the guess of a prefill's pace is worth: half a usual prompt outweighs it
_TPOT_MS = 1e-4, 1e5  # the domain of a token's time
_TPOT_WEIGHT = 0.02  # of a sample: what prompts in between make of a token varies far more than a GPU does
# Until loads have differed each request is taken to add so much of a lone one's step to every step: the weights are
# read once for all, each one's KV beside (8B models, 1,000 tokens each: A100 0.4 %, H100 0.7 %, L4 0.9 %).
_CROWD_SHARE = 0.007
_LOAD_MAX = 1e6
_CROWD_DOUBT = 100.0  # the guess counts as measured over loads that differ by 10 requests
_PACE_MS = 1e-5, 1e3  # its domain
_PACE_TOKENS = 8192.0  # the pace of a prefill is that of the last so many tokens


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
    """How fast one target works: prefill and decode per token, and a request's whole service, in milliseconds.

    A token takes the longer the more requests are under way beside it: `tpot_at` says how long, by a line through what
    was measured (least squares, forgetting), with a guess for its slope until loads have differed.
    """

    __slots__ = (
        "_load", "_load_tpot", "_load_var", "_pace_ms", "_pace_tokens", "_samples", "_service", "_tpot_ms",
    )  # fmt: skip

    def __init__(self, prefill_ms_per_token: float, tpot_ms: float) -> None:
        self._pace_ms = max(_PACE_MS[0], min(_PACE_MS[1], prefill_ms_per_token))
        self._pace_tokens = _GUESS_TOKENS
        self._tpot_ms = max(_TPOT_MS[0], min(_TPOT_MS[1], tpot_ms))
        self._load = 1.0  # the guess is of one alone
        self._load_var = self._load_tpot = 0.0
        self._samples = 0
        self._service = _mean_around(1e-3, 1e8, OUTPUT_TOKENS * tpot_ms)

    @property
    def prefill_ms_per_token(self) -> float:
        """Milliseconds to prefill one token."""
        return self._pace_ms

    @property
    def tpot_ms(self) -> float:
        """Milliseconds between two tokens of one answer, as of late."""
        return self._tpot_ms

    @property
    def crowd_ms(self) -> float:
        """Milliseconds that each request under way adds to every token of all others: 0 or more."""
        guess_ms = _CROWD_SHARE * self._tpot_ms / (1.0 + _CROWD_SHARE * (self._load - 1.0))
        slope_ms = (self._load_tpot + _CROWD_DOUBT * guess_ms) / (self._load_var + _CROWD_DOUBT)
        return max(0.0, min(slope_ms, self._tpot_ms / self._load))  # a token alone takes no less than nothing

    def tpot_at(self, load: float) -> float:
        """Milliseconds between two tokens with so many requests under way."""
        return max(_TPOT_MS[0], self._tpot_ms + self.crowd_ms * (load - self._load))

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
        pace_ms = elapsed_ms / prefill_tokens
        if _PACE_MS[0] <= pace_ms <= _PACE_MS[1]:
            # By tokens, not by samples: what every prompt costs beside its tokens weighs a hundredfold in a short one,
            # and paces are asked for long ones.
            self._pace_tokens = min(_PACE_TOKENS, self._pace_tokens + prefill_tokens)
            self._pace_ms += min(1.0, prefill_tokens / self._pace_tokens) * (pace_ms - self._pace_ms)
        return True

    def ended(self, decode_ms: float, service_ms: float, completion_tokens: int, load: float = 1.0) -> None:
        """An answer ended `decode_ms` after its first token and `service_ms` after dispatch, with `load` requests under
        way, itself among them."""
        self._service.update(service_ms)
        if completion_tokens < 2 or not 1.0 <= load <= _LOAD_MAX:
            return
        tpot_ms = decode_ms / (completion_tokens - 1)
        if not _TPOT_MS[0] <= tpot_ms <= _TPOT_MS[1]:
            return
        self._samples += 1
        weight = max(_TPOT_WEIGHT, 1.0 / self._samples)
        more, longer_ms = load - self._load, tpot_ms - self._tpot_ms
        self._load += weight * more
        self._tpot_ms += weight * longer_ms
        if weight < 1.0:
            self._load_var = (1.0 - weight) * (self._load_var + weight * more * more)
            self._load_tpot = (1.0 - weight) * (self._load_tpot + weight * more * longer_ms)


def _mean_around(lo: float, hi: float, guess: float) -> Mean:
    """A mean to start from a guess of somebody's: one outside the domain counts as its nearest end."""
    return Mean(0.1, lo, hi, max(lo, min(hi, guess)))
