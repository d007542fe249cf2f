"""What is learned of models, tenants and targets from finished requests: sizes in tokens, speeds in milliseconds.

Invariants: an estimate always exists, is positive and finite, and lies in a stated domain whatever was reported; the
number of things learned about is bounded, since model and tenant names come from outside. Never reads a clock.
"""

from __future__ import annotations

from collections import OrderedDict
from math import exp, inf
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from farhop.balance.estimate.answers_under_way import AnswersUnderWay
from farhop.balance.estimate.ewma import Mean, RevertingMean
from farhop.balance.estimate.windows import Windows

if TYPE_CHECKING:
    from farhop.balance.machine import Usage

BYTES_PER_TOKEN = 4.0  # English text under a BPE vocabulary of 32k-128k
OUTPUT_TOKENS = 256.0
# Answers under way count if they suggest this many times what is expected, and the guess: for answers of a minute, as
# of reasoning models. If they are hardly longer, counting them only delays first tokens
# (docs/measurements/routing-trials.md).
FAR_LONGER = 3.0
ENTRIES_MAX = 2048

_K = TypeVar("_K")
_V = TypeVar("_V")
_LEARN = 0.05  # what each answer weighs
_OUTPUT_MAX, _OUTPUT_TAU_S, _OUTPUT_CLIP = 1e6, 1800.0, 8.0
_SMALLEST_PROMPT_BYTES = 64  # a chat template of a few tokens would pass for the ratio
# The domains: milliseconds to prefill a token, between two tokens of an answer, and of a whole request.
PREFILL_MS, TPOT_MS, SERVICE_MS = (1e-5, 1e3), (1e-4, 1e5), (1e-3, 1e8)
# Until loads have differed each request is assumed to add this share of a lone one's step to every step, for every
# CONTEXT_TOKENS of its context: the weights are read once for all, each one's KV beside (8B models, 1,000 tokens each:
# A100 0.4 %, H100 0.7 %, L4 0.9 %).
INTERFERENCE_SHARE, CONTEXT_TOKENS = 0.007, 1000.0

_SMALLEST_PREFILL_TOKENS = 64  # below this a step's fixed cost hides the cost per token
_HALF_TOKENS = 256.0  # half a usual prompt gives half of the evidence that a second can give of a prefill speed
_LOAD_MAX = 1e6
# An engine that has just begun compiles and warms up: measurements of its first eight answers (a first token's time and
# a token's) count a quarter.
_COLD_SAMPLES, _COLD_WORTH = 16, 0.25
_FIT_ANSWERS, FIT_TAU_S = 50, 300.0  # the effect of load on a token is learned from this many answers, and forgotten
_FIT_CLIP = 0.5
# A whole request varies as its answers do, far more than a GPU does: as many of them, and for longer.
_SERVICE_MEMORY, SERVICE_TAU_S, _CLIP = 16.0, 30.0, 3.0


class Estimates:
    """Bytes per token of each model, output tokens of each tenant and model. The entry unused for longest is forgotten.

    A tokenizer does not change, and every request served measures it. Answer lengths do change, and a tenant whose
    answers are expected to be long may be refused for it: so that estimate returns to the guess, and a single answer of
    a hundred times the length hardly moves it. Answers under way count if they are reported (`began`, `over`); an entry
    without any under way may be forgotten.
    """

    __slots__ = ("bytes_by_tenant", "now", "outputs_by_tenant", "under_way")

    def __init__(self) -> None:
        self.bytes_by_tenant: OrderedDict[str, Mean] = OrderedDict()
        self.outputs_by_tenant: OrderedDict[tuple[str, str], RevertingMean] = OrderedDict()
        self.under_way: dict[tuple[str, str], AnswersUnderWay] = {}
        self.now = 0.0  # set by the owner from time to time

    def bytes_per_token(self, model: str) -> float:
        """Bytes of canonical prompt per token of the model."""
        known = self.bytes_by_tenant.get(model)
        return BYTES_PER_TOKEN if known is None or known.value is None else known.value

    def output_tokens(self, tenant: str, model: str, max_tokens: int | None) -> float:
        """Tokens the answer will probably have, at most what the request allows."""
        known = self.outputs_by_tenant.get((tenant, model))
        expected = OUTPUT_TOKENS if known is None else known.at(self.now)
        if (under_way := self.under_way.get((tenant, model))) is not None:
            least = under_way.least_tokens(self.now, expected)
            if least > FAR_LONGER * max(expected, OUTPUT_TOKENS):
                expected = min(least, _OUTPUT_MAX)
        return expected if max_tokens is None or expected < max_tokens else max(1.0, float(max_tokens))

    def began(self, tenant: str, model: str, tokens_per_s: float, now: float) -> None:
        """An answer begins, at this expected speed (tokens a second)."""
        of = tenant, model
        under_way = self.under_way.get(of)
        if under_way is None:
            if len(self.under_way) >= ENTRIES_MAX:
                self.under_way.pop(next((one for one, it in self.under_way.items() if not it.in_flight), of), None)
            under_way = self.under_way[of] = AnswersUnderWay()
        under_way.began(tokens_per_s, now)

    def over(
        self, tenant: str, model: str, tokens_per_s: float, began_at: float, tokens: float, *, ended: bool
    ) -> None:
        """An answer that was passed to `began` is over: see AnswersUnderWay.over."""
        self.under_way[tenant, model].over(tokens_per_s, began_at, tokens, ended=ended)

    def knows_output(self, tenant: str, model: str) -> bool:
        """Whether any answer to the tenant was seen: else `output_tokens` is a guess."""
        return (tenant, model) in self.outputs_by_tenant

    def learn(self, tenant: str, model: str, prompt_bytes: int, usage: Usage) -> None:
        """Learn from the usage of a finished request. Samples outside their domain are ignored."""
        if usage.prompt_tokens > 0 and prompt_bytes >= _SMALLEST_PROMPT_BYTES:
            known = self.bytes_by_tenant.get(model)
            ratio = known or bytes_by_tenant()
            if ratio.update(prompt_bytes / usage.prompt_tokens):
                if known is not None:
                    self.bytes_by_tenant.move_to_end(model)
                else:
                    _keep(self.bytes_by_tenant, model, ratio)
        if usage.completion_tokens > 0:
            output = self.outputs_by_tenant.get((tenant, model))
            if output is not None:
                if output.update(float(usage.completion_tokens), self.now):
                    self.outputs_by_tenant.move_to_end((tenant, model))
                return
            output = outputs_by_tenant()
            if output.update(float(usage.completion_tokens), self.now):
                _keep(self.outputs_by_tenant, (tenant, model), output)

    def learned(self) -> Learned:
        """All that was learned so far, to be sent to other balancers."""
        return Learned(
            {model: one.value for model, one in self.bytes_by_tenant.items() if one.value is not None},
            {of: one.at(self.now) for of, one in self.outputs_by_tenant.items()},
        )

    def adopt(self, learned: Learned) -> None:
        """What another learned, of what nothing was learned here yet. Values outside their domain change nothing."""
        for model, bytes_per_token in learned.bytes_per_token.items():
            ratio = bytes_by_tenant()
            if model not in self.bytes_by_tenant and ratio.update(bytes_per_token):
                _keep(self.bytes_by_tenant, model, ratio)
        for of, tokens in learned.output_tokens.items():
            output = outputs_by_tenant()
            if of not in self.outputs_by_tenant and output.update(tokens, self.now):
                _keep(self.outputs_by_tenant, of, output)


class Learned(NamedTuple):
    """What `Estimates` know: bytes per token of models, and tokens of answers by (tenant, model)."""

    bytes_per_token: dict[str, float]
    output_tokens: dict[tuple[str, str], float]


def bytes_by_tenant() -> Mean:
    return Mean(_LEARN, 0.25, 64.0)


def outputs_by_tenant() -> RevertingMean:
    return RevertingMean(_LEARN, OUTPUT_TOKENS, 1.0, _OUTPUT_MAX, _OUTPUT_TAU_S, first=1.0, clip=_OUTPUT_CLIP)


def _keep(known: OrderedDict[_K, _V], key: _K, entry: _V) -> None:
    known[key] = entry
    if len(known) > ENTRIES_MAX:
        known.popitem(last=False)


class Speed:
    """What one target was measured to do: prefill and decode per token, and a request's whole service, in milliseconds.

    It gives what was measured and how much evidence that is by now, never what to expect: that also needs what its
    peers measure, and what is configured (regional_lb.fleet.speeds). A token takes the longer the more requests are
    under way beside it, by `interference_share` of a lone one's time for each: set from outside, since it belongs to
    the model and the GPU, and one target's loads seldom differ enough to measure it.
    """

    __slots__ = (
        "_alone", "_at", "_cov", "_interference_share", "_load", "_mean_ms", "_prefill", "_samples", "_service",
        "_taken", "_var",
    )  # fmt: skip

    def __init__(self) -> None:
        self._interference_share = INTERFERENCE_SHARE
        self._prefill, self._alone = Windows(_HALF_TOKENS), Windows()
        self._service = DecayingMean()
        self._samples = 0  # counted as far as they are a cold engine's
        # Of loads and what a token took at each: means, spread of the loads, and how both go together.
        self._load = self._mean_ms = self._var = self._cov = 0.0
        self._taken, self._at = 0, 0.0

    @property
    def interference_share(self) -> float:
        """By what share of a lone token's time each request under way lengthens a token.

        Set to another value, it changes what a lone token is thought to take, not what was measured at a load.
        """
        return self._interference_share

    @interference_share.setter
    def interference_share(self, share: float) -> None:
        former = self._interference_share
        self._alone.rescale(lambda load: (1.0 + former * max(load - 1.0, 0.0)) / (1.0 + share * max(load - 1.0, 0.0)))
        self._interference_share = share

    @property
    def sampled_at(self) -> float | None:
        """When it last took a sample, None before the first."""
        times = [one.sampled_at for one in (self._prefill, self._alone, self._service) if one.sampled_at is not None]
        return max(times, default=None)

    def began(self, elapsed_ms: float, prefill_tokens: float, tpot_ms: float, now: float) -> bool:
        """A first token came `elapsed_ms` after dispatch, behind and with `prefill_tokens` of uncached prompt, where a
        token takes `tpot_ms`. False if that was too little of a prompt to measure a speed."""
        # The first token also waits for about one decode step, which is not prefill.
        return self.prefilled(max(elapsed_ms - tpot_ms, 0.1 * elapsed_ms), prefill_tokens, now)

    def prefilled(self, elapsed_ms: float, prefill_tokens: float, now: float) -> bool:
        """This many uncached tokens of prompt took `elapsed_ms`, and nothing else was done in that time.

        False if that was too little of a prompt to measure a speed.
        """
        if not _SMALLEST_PREFILL_TOKENS <= prefill_tokens < inf:
            return False
        prefill_ms_per_token = elapsed_ms / prefill_tokens
        if PREFILL_MS[0] <= prefill_ms_per_token <= PREFILL_MS[1]:
            # By tokens: what every prompt costs beside its tokens weighs a hundredfold in a short one, and the speed is
            # asked for long ones.
            self._prefill.take(prefill_ms_per_token, now, prefill_tokens * self._worth())
        return True

    def ended(self, decode_ms: float, service_ms: float, completion_tokens: int, load: float, now: float) -> None:
        """An answer ended `decode_ms` after its first token and `service_ms` after dispatch, with `load` requests under
        way in the mean since its first token, itself among them."""
        if SERVICE_MS[0] <= service_ms <= SERVICE_MS[1]:
            self._service.take(service_ms, now)
        if completion_tokens < 2 or not 1.0 <= load <= _LOAD_MAX:
            return
        tpot_ms = decode_ms / (completion_tokens - 1)
        if not TPOT_MS[0] <= tpot_ms <= TPOT_MS[1]:
            return
        worth = 1.0 if self._samples == _COLD_SAMPLES else self._worth()
        self._alone.take(max(TPOT_MS[0], tpot_ms / (1.0 + self._interference_share * (load - 1.0))), now, worth, load)
        self._fit_load(tpot_ms, load, now)

    def _worth(self) -> float:
        self._samples = min(self._samples + 1, _COLD_SAMPLES)
        return 1.0 if self._samples == _COLD_SAMPLES else _COLD_WORTH

    def _fit_load(self, tpot_ms: float, load: float, now: float) -> None:
        """How loads and tokens go together, by the latest answers (least squares, forgetting)."""
        if self._taken < _FIT_ANSWERS:
            self._taken += 1
        weight, keep = 1.0 / self._taken, 1.0
        if self._at < now:
            keep, self._at = exp((self._at - now) / FIT_TAU_S), now
        more, longer_ms = load - self._load, tpot_ms - self._mean_ms
        if self._taken > 1:
            most_ms = _FIT_CLIP * self._mean_ms  # what a stall made of a token says nothing of loads
            longer_ms = max(-most_ms, min(longer_ms, most_ms))
        self._load += weight * more
        self._mean_ms += weight * longer_ms
        self._var = (1.0 - weight) * (self._var * keep + weight * more * more)
        self._cov = (1.0 - weight) * (self._cov * keep + weight * more * longer_ms)

    def adopt(self, other: Measured, now: float) -> None:
        """Begin with what another measured of the same target, if nothing was measured here. Figures outside their
        domain change nothing."""
        if self.sampled_at is not None:
            return
        prefill_ms = other.prefill_ms_per_token
        if PREFILL_MS[0] <= prefill_ms <= PREFILL_MS[1] and 0.0 < other.prefill_evidence < inf:
            self._prefill.adopt(prefill_ms, other.prefill_evidence, now)
        if SERVICE_MS[0] <= other.service_ms <= SERVICE_MS[1] and 0.0 < other.service_evidence < inf:
            self._service.adopt(other.service_ms, other.service_evidence, now)
        if TPOT_MS[0] <= other.alone_ms <= TPOT_MS[1] and 0.0 < other.alone_evidence < inf:
            self._alone.adopt(other.alone_ms, other.alone_evidence, now)
            if 0.0 <= other.var <= _LOAD_MAX * _LOAD_MAX and abs(other.cov) <= other.var:
                self._load, self._mean_ms = 1.0, other.alone_ms
                self._var, self._cov = other.var, other.cov * other.alone_ms
                self._taken, self._at = _FIT_ANSWERS, now
        self._samples = _COLD_SAMPLES  # its engine is not the one that has just begun

    def measured(self, now: float) -> Measured:
        """All that was measured, as of `now`."""
        prefill_ms_per_token, prefill = self._prefill.read(now)
        lone_ms, lone = self._alone.read(now)
        service_ms, service = self._service.read(now)
        alone_ms = self._mean_ms / (1.0 + self._interference_share * max(self._load - 1.0, 0.0)) or 1.0
        keep = _decay(self._at - now)
        keep_cov, keep_var = keep * self._cov / alone_ms, keep * self._var
        return Measured(prefill_ms_per_token, lone_ms, service_ms, prefill, lone, service, keep_cov, keep_var)


class Measured(NamedTuple):
    """What a target was measured to do: milliseconds to prefill a token, between two tokens of an answer that is alone,
    and of a whole request (0: never), and the evidence for each. `cov / var` is by what share of a lone token each
    request lengthens it, by loads of that variance."""

    prefill_ms_per_token: float
    alone_ms: float
    service_ms: float
    prefill_evidence: float
    alone_evidence: float
    service_evidence: float
    cov: float
    var: float


class DecayingMean:
    """A mean (what Little's law asks for) whose evidence fades; one sample moves it by no more than its weight allows
    a sample CLIP times as large."""

    __slots__ = ("_evidence", "_mean", "sampled_at")

    def __init__(self) -> None:
        self._mean = self._evidence = 0.0
        self.sampled_at: float | None = None

    def take(self, sample: float, now: float) -> None:
        """Add a sample, which must be above 0."""
        before = self.sampled_at
        evidence = 0.0 if before is None else self._evidence * exp(min(0.0, before - now) / SERVICE_TAU_S)
        if evidence:
            sample = min(sample, _CLIP * self._mean)
        self._evidence = min(evidence + 1.0, _SERVICE_MEMORY)
        self._mean += (sample - self._mean) / self._evidence if evidence else sample - self._mean
        self.sampled_at = now

    def adopt(self, mean: float, evidence: float, now: float) -> None:
        """Start with another balancer's mean, and the evidence for it."""
        self._mean, self._evidence, self.sampled_at = mean, min(evidence, _SERVICE_MEMORY), now

    def read(self, now: float) -> tuple[float, float]:
        """The mean, and the evidence for it as of `now`: (0, 0) before the first sample."""
        if self.sampled_at is None:
            return 0.0, 0.0
        return self._mean, self._evidence * exp(min(0.0, self.sampled_at - now) / SERVICE_TAU_S)


def _decay(minus_age_s: float) -> float:
    return exp(minus_age_s / FIT_TAU_S) if minus_age_s < 0.0 else 1.0
