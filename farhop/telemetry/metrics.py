"""What a tier counts, and how Prometheus reads it.

The hot path keeps plain numbers only, which are added up some requests at a time; families are built when scraped.
Invariants: every label set is bounded; totals derived from others are computed at the scrape, so they cannot disagree;
no tenant or prompt is a label, and a model only once an engine has answered for it, so that clients cannot make names
up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from farhop.balance.machine import Usage
from farhop.balance.outcome import ADVISED, CLIENT_LEFT, REDIRECTED, Outcome, Source, by_reason
from farhop.telemetry.release import release
from farhop.telemetry.series import OTHER, SAMPLE_MAX, Buckets, Counter, Histogram, Labels

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
HIT_SOURCES = ("trie", "exact")
TARGETS_MAX = 64
REASONS_MAX = 32
READINGS_MAX = 64
PAIRS_MAX = 1024  # of two labels
VERSIONS_MAX = 64
AT_ONCE = 64  # requests that are over: some 0.2 ms
MODELS_MAX = 16  # each has two histograms; of others it is `other`

# From one LAN round trip to a queue's patience; steps of ~1.5 where objectives are set (100 ms to 3 s).
TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0)
# A decode step: ~10 ms on an H100, ~55 ms on an L4 and more in full batches.
TPOT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)
DURATION_BUCKETS_S = (0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
ERROR_SHARES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)  # of what was seen
ERROR_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

_NOT_REFUSED = (CLIENT_LEFT.reason, REDIRECTED.reason, ADVISED.reason)
_CLASSES = ("none", "1xx", "2xx", "3xx", "4xx", "5xx")

Reading = Callable[[], "float | Mapping[str, float] | Mapping[tuple[str, str], float]"]


_Label = str | tuple[str, str] | None
# A request that is over, as passed to `finished`.
_Over = tuple[str, int, float, float | None, float | None, str, str, "Usage | None", tuple[float, str] | None]


class _OfModel:
    """The counters of one model."""

    __slots__ = ("requests", "tokens", "tpot", "ttft")

    def __init__(self) -> None:
        self.requests: dict[str, int] = {}
        self.tokens = [0, 0, 0]  # prompt, completion, cached
        self.ttft, self.tpot = Buckets(TTFT_BUCKETS_S), Buckets(TPOT_BUCKETS_S)


_COARSE: dict[Source | None, str] = {Source.CLIENT: "left", Source.ENGINE: "failed", Source.TRANSPORT: "failed"}
_KINDS = ("prompt", "completion", "cached")


class TierMetrics(Collector):
    """The metrics of one tier's process, on a registry of its own. Every name begins with `farhop_`.

    `tier` ("global", "regional") and `region` are labels of every series, `instance` is in `farhop_build_info` alone
    (Prometheus sets its own `instance`). A target is a region in the global tier and a replica in the regional one.
    """

    def __init__(self, tier: str, region: str, instance: str) -> None:
        self._const = (("tier", tier), ("region", region))
        self._instance = instance
        self.in_flight = 0
        self.pending_over: list[_Over] = []
        self._targets = Labels(TARGETS_MAX)
        self._reasons, self._versions = Labels(REASONS_MAX), Labels(VERSIONS_MAX)
        self._models: dict[str, _OfModel] = {}
        self._readings: dict[
            str, tuple[type[GaugeMetricFamily | CounterMetricFamily], str, _Label, Reading]
        ] = {}  # at every scrape
        # Read at the scrape: by reason, what was refused before it was a request.
        self.refused_unread: Callable[[], Mapping[str, float]] = dict
        self._make_counters()
        self._make_histograms()
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def _make_counters(self) -> None:
        self._requests: dict[tuple[str, int], int] = {}
        self._attempts = Counter(
            "farhop_attempts", "Attempts upstream, by target and how each ended.", ("target", "outcome")
        )
        self._spills = Counter(
            "farhop_spilled_requests", "Requests sent past the best region as it was hot.", ("target",)
        )
        self._reports = Counter(
            "farhop_reports_refused", "Reports from below dropped as stale, absurd or malformed.", ("reason",)
        )
        self._handshakes = Counter(
            "farhop_handshakes_refused", "TLS handshakes of listeners that failed.", ("listener", "reason")
        )
        self._unread = Counter(
            "farhop_connections_refused",
            "Connections refused before a request was read: too many, a head that is malformed, too large or too slow.",
            ("reason",),
        )
        self._tokens = Counter("farhop_tokens", "Tokens engines say they used.", ("kind",))
        by = ("source",)
        self._predicted = Counter("farhop_prefix_predicted_tokens", "Prompt tokens expected to be cached.", by)
        self._actual = Counter("farhop_prefix_actual_tokens", "Prompt tokens the engine said were cached.", by)
        self._prefix_error = Counter("farhop_prefix_error_tokens", "Prompt tokens that predictions were off by.", by)
        self._prompt_tokens = self._completion_tokens = self._cached_tokens = 0
        self._prefixes = {source: [0.0, 0.0, 0.0] for source in HIT_SOURCES}  # predicted, actual, off
        self._versioned = Counter(
            "farhop_version_requests",
            "Requests finished at a replica whose version is known, by it and why it was that.",
            ("version", "split", "code"),
        )
        self._invalid = Counter("farhop_invalid_samples", "Samples outside their domain: negative, NaN or infinite.")
        self._counters = (
            self._attempts, self._spills, self._reports, self._handshakes, self._unread, self._tokens, self._predicted,
            self._actual, self._prefix_error,
            self._versioned, self._invalid,
        )  # fmt: skip

    def _make_histograms(self) -> None:
        duration = Histogram(
            "farhop_duration_seconds", "From the request's head to its last byte, or its refusal.", DURATION_BUCKETS_S
        )
        ttft = Histogram("farhop_ttft_seconds", "From the request's head to the answer's first byte.", TTFT_BUCKETS_S)
        tpot = Histogram("farhop_tpot_seconds", "Time per output token after the first.", TPOT_BUCKETS_S)
        error = Histogram(
            "farhop_ttft_error_seconds", "How far the promised TTFT was off.", ERROR_BUCKETS_S, ("direction",)
        )
        share = Histogram(
            "farhop_ttft_error_ratio", "How far the promised TTFT was off, as a share of what was seen.", ERROR_SHARES
        )
        self._share = share.series()
        self._late, self._early = error.series(("late",)), error.series(("early",))
        self._duration, self._ttft, self._tpot = duration.series(), ttft.series(), tpot.series()
        self._histograms = (duration, ttft, tpot, error, share)
        # Count and sum only: 64 targets of 21 bucket lines each made a scrape hold the event loop up for 27 ms.
        self._ttft_by_target: dict[str, list[float]] = {}
        self._ttft_by_version: dict[str, list[float]] = {}

    def begun(self) -> None:
        """A request's head is read. Pair it with one `finished`."""
        self.in_flight += 1

    def finished(
        self,
        outcome: Outcome,
        status: int,
        duration_s: float,
        ttft_s: float | None = None,
        tpot_s: float | None = None,
        target: str = "",
        model: str = "",
        usage: Usage | None = None,
        hit: tuple[float, str] | None = None,
    ) -> None:
        """A request begun has ended. `status` is what the client got (0: it got none), `target` the one that served it.
        `model` is what it asked for, if an engine was asked; `usage` is what that reports. `hit`, if the usage shows
        what was cached: how many tokens were expected to be, and by which of HIT_SOURCES: `trie` is our own estimate,
        `exact` is from the engine's KV events.

        Refusals and residency denials are derived from this: do not count them separately.
        """
        self.in_flight -= 1
        over = self.pending_over
        over.append((outcome.reason, status, duration_s, ttft_s, tpot_s, target, model, usage, hit))
        if len(over) >= AT_ONCE:
            self._count()

    def _count(self) -> None:
        """Count the requests that are over. Counting many at once costs half as much as one by one."""
        over, self.pending_over = self.pending_over, []
        requests, duration, ttft, tpot = self._requests, self._duration, self._ttft, self._tpot
        for reason, status, duration_s, ttft_s, tpot_s, target, model, usage, hit in over:
            key = (reason, status // 100)
            if key in requests:
                requests[key] += 1
            else:
                self._first_of(key)
            of = self._of_model(model, status) if model else None
            sound = usage is None or self._took(usage, of)
            samples = [(duration, duration_s)]
            if ttft_s is not None:
                samples.append((ttft, ttft_s))
                if 0.0 <= ttft_s <= SAMPLE_MAX:
                    served = self._ttft_by_target.get(target) or self._served_by(target)
                    served[0] += 1
                    served[1] += ttft_s
                if of is not None:
                    samples.append((of.ttft, ttft_s))
            if tpot_s is not None:
                samples.append((tpot, tpot_s))
                if of is not None:
                    samples.append((of.tpot, tpot_s))
            for buckets, value in samples:  # Buckets.observe, without a frame for each
                if 0.0 <= value <= SAMPLE_MAX:
                    buckets.counts[bisect_left(buckets.bounds, value)] += 1
                    buckets.total += value
                else:
                    sound = False
            if hit is not None and usage is not None and sound:
                sound = self._compared(hit, usage.cached_tokens or 0)
            if not sound:
                self._invalid.add(())

    def _compared(self, hit: tuple[float, str], actual_tokens: int) -> bool:
        """Compare the predicted cached tokens with the actual ones; returns whether the figures are plausible."""
        predicted_tokens, source = hit
        if not (0 <= predicted_tokens <= SAMPLE_MAX and 0 <= actual_tokens <= SAMPLE_MAX):
            return False
        sums = self._prefixes[source]
        sums[0] += predicted_tokens
        sums[1] += actual_tokens
        sums[2] += abs(predicted_tokens - actual_tokens)
        return True

    def _took(self, usage: Usage, of: _OfModel | None) -> bool:
        """Count the tokens that an engine reports for a request; returns whether the numbers are plausible."""
        counts = prompt, completion, cached = usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens or 0
        if min(counts) < 0 or max(counts) > SAMPLE_MAX:
            return False
        self._prompt_tokens += prompt
        self._completion_tokens += completion
        self._cached_tokens += min(cached, prompt)
        if of is not None:
            tokens = of.tokens
            tokens[0] += prompt
            tokens[1] += completion
            tokens[2] += cached
        return True

    def _of_model(self, model: str, status: int) -> _OfModel:
        known = self._models.get(model)
        if known is None:
            if not 200 <= status < 300 or len(self._models) >= MODELS_MAX:
                model = OTHER
            known = self._models.setdefault(model, _OfModel())
        status_class = status // 100
        code = _CLASSES[status_class if 0 <= status_class < len(_CLASSES) else 0]
        known.requests[code] = known.requests.get(code, 0) + 1
        return known

    def attempted(self, target: str, outcome: Outcome) -> None:
        """One attempt upstream has ended, whatever happens to its request."""
        key = (target, outcome.reason)
        counts = self._attempts.values
        if key in counts:
            counts[key] += 1
        else:
            self._attempts.add((self._targets.admit(target), _known(outcome.reason)))

    @property
    def process(self) -> tuple[str, str, str]:
        """The tier, region and instance of the process."""
        return (self._const[0][1], self._const[1][1], self._instance)

    def traffic(self) -> dict[str, dict[str, int]]:
        """By target how many attempts were served, left by their client, refused or failed, and how many came past a
        hot region: since the start."""
        found: dict[str, dict[str, int]] = {}
        for (target, reason), count in self._attempts.values.items():
            outcome = by_reason(reason)
            source = outcome.source if outcome is not None else None
            how = _COARSE.get(source, "refused") if reason != "served" else "ok"
            flows = found.setdefault(target, {})
            flows[how] = flows.get(how, 0) + int(count)
        for (target,), count in self._spills.values.items():
            found.setdefault(target, {})["spilled"] = int(count)
        return found

    def spilled(self, to: str) -> None:
        """A request went to region `to` because its best one was hot."""
        self._spills.add((self._targets.admit(to),))

    def versioned(self, version: str, split: str, status: int, ttft_s: float | None) -> None:
        """A request was served in this version of its model. `split` is one of few words, `status` as for `finished`.

        Say it beside `finished`, not in its place.
        """
        version = self._versions.admit(version)
        status_class = status // 100
        code = _CLASSES[status_class if 0 <= status_class < len(_CLASSES) else 0]
        self._versioned.add((version, split, code))
        if ttft_s is not None and 0.0 <= ttft_s <= SAMPLE_MAX:
            served = self._ttft_by_version.setdefault(version, [0, 0.0])
            served[0] += 1
            served[1] += ttft_s

    def promised(self, promised_ttft_ms: float, actual_ttft_ms: float) -> None:
        """Compare the time to first token that a choice was based on with the actual one."""
        late_ms = actual_ttft_ms - promised_ttft_ms
        if not (self._late if late_ms >= 0 else self._early).observe(abs(late_ms) / 1e3):
            self._invalid.add(())
        elif actual_ttft_ms > 0.0:
            self._share.observe(abs(late_ms) / actual_ttft_ms)

    def report_refused(self, reason: str) -> None:
        """A report from below was refused; `reason` is a fixed word, never its text."""
        self._reports.add((self._reasons.admit(reason),))

    def handshake_refused(self, listener: str, reason: str) -> None:
        """A connection to a listener failed its TLS handshake; both are fixed words."""
        self._handshakes.add((listener, reason))

    def gauge(self, name: str, help_text: str, read: Reading, label: _Label = None) -> None:
        """Read `read()` at every scrape as `farhop_<name>`: a number, or with `label` a mapping of its values; with
        several labels the keys are tuples.

        So queued requests, trie nodes, the age of reports and their like cost a request nothing. ValueError if a name
        is taken.
        """
        self._register(name, GaugeMetricFamily, help_text, read, label)

    def counter(self, name: str, help_text: str, read: Reading, label: _Label = None) -> None:
        """As `gauge`, for a value that only grows while the process lives: `farhop_<name>_total`."""
        self._register(name, CounterMetricFamily, help_text, read, label)

    def _register(
        self,
        name: str,
        family: type[GaugeMetricFamily | CounterMetricFamily],
        help_text: str,
        read: Reading,
        label: _Label,
    ) -> None:
        if name in self._readings or len(self._readings) >= READINGS_MAX:
            raise ValueError(f"metric {name!r} is taken, or there are {READINGS_MAX} already; use another name")
        self._readings[name] = (family, help_text, label, read)

    def render(self) -> bytes:
        """The Prometheus text of now; serve it as CONTENT_TYPE."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """All metric families, built from plain numbers; called by the registry."""
        self._count()
        names = [name for name, _ in self._const]
        own = [value for _, value in self._const]
        info = InfoMetricFamily("farhop_build", "This balancer.", labels=names)
        info.add_metric(own, {"balancer": self._instance, "version": release()})
        yield info
        yield from self._request_families(names, own)
        self._unread.values = {(_known(reason),): count for reason, count in self.refused_unread().items()}
        self._tokens.values = {
            ("prompt",): self._prompt_tokens,
            ("completion",): self._completion_tokens,
            ("cached",): self._cached_tokens,
        }
        for source, totals in self._prefixes.items():
            for counter, total in zip((self._predicted, self._actual, self._prefix_error), totals, strict=True):
                counter.values[(source,)] = total
        for counter in self._counters:
            yield counter.family(self._const)
        for histogram in self._histograms:
            yield histogram.family(self._const)
        for by, sums in (("target", self._ttft_by_target), ("version", self._ttft_by_version)):
            summary = SummaryMetricFamily(
                f"farhop_{by}_ttft_seconds", f"TTFT of requests served, by {by}.", labels=[*names, by]
            )
            for value, (count, total_s) in sums.items():
                summary.add_metric([*own, value], int(count), total_s)
            yield summary
        yield from self._model_families(names, own)
        in_flight = GaugeMetricFamily("farhop_in_flight", "Requests begun and not finished.", labels=names)
        in_flight.add_metric(own, self.in_flight)
        yield in_flight
        for name, (family, help_text, label, read) in self._readings.items():
            yield _family_of(family, f"farhop_{name}", help_text, self._const, label, read())

    def _model_families(self, names: list[str], own: list[str]) -> Iterator[Metric]:
        labels = [*names, "model"]
        requests = CounterMetricFamily(
            "farhop_model_requests", "Requests finished, by model.", labels=[*labels, "code"]
        )
        tokens = CounterMetricFamily(
            "farhop_model_tokens", "Tokens engines say they used, by model.", labels=[*labels, "kind"]
        )
        ttft = HistogramMetricFamily(
            "farhop_model_ttft_seconds", "From the head to the answer's first byte, by model.", labels=labels
        )
        tpot = HistogramMetricFamily(
            "farhop_model_tpot_seconds", "Time per output token after the first, by model.", labels=labels
        )
        for model, of in self._models.items():
            for code, count in of.requests.items():
                requests.add_metric([*own, model, code], count)
            for kind, total in zip(_KINDS, of.tokens, strict=True):
                tokens.add_metric([*own, model, kind], total)
            ttft.add_metric([*own, model], list(of.ttft.cumulative()), of.ttft.total)
            tpot.add_metric([*own, model], list(of.tpot.cumulative()), of.tpot.total)
        yield from (requests, tokens, ttft, tpot)

    def _first_of(self, key: tuple[str, int]) -> None:
        """Count the first of its kind, and everything that has no kind of its own."""
        reason, status_class = key
        bounded = (_known(reason), status_class if 0 <= status_class < len(_CLASSES) else 0)
        self._requests[bounded] = self._requests.get(bounded, 0) + 1

    def _served_by(self, target: str) -> list[float]:
        return self._ttft_by_target.setdefault(self._targets.admit(target), [0, 0.0])

    def _request_families(self, names: list[str], own: list[str]) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "farhop_requests", "Requests finished, by how.", labels=[*names, "source", "reason", "code"]
        )
        refusals: dict[str, int] = {}
        denials: dict[str, int] = {}
        for (reason, status_class), count in self._requests.items():
            outcome = by_reason(reason)
            source = outcome.source if outcome is not None else OTHER
            requests.add_metric([*own, source, reason, _CLASSES[status_class]], count)
            if source is Source.LAW:
                denials[reason] = denials.get(reason, 0) + count
            if source not in (Source.ENGINE, Source.TRANSPORT) and reason not in _NOT_REFUSED:
                refusals[reason] = refusals.get(reason, 0) + count
        yield requests
        for name, help_text, counts in (
            ("farhop_refusals", "Requests the balancer answered itself instead of an engine.", refusals),
            ("farhop_residency_denials", "Requests the law turned away.", denials),
        ):
            family = CounterMetricFamily(name, help_text, labels=[*names, "reason"])
            for reason, count in counts.items():
                family.add_metric([*own, reason], count)
            yield family


def _family_of(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    help_text: str,
    const: tuple[tuple[str, str], ...],
    label: _Label,
    reading: float | Mapping[str, float] | Mapping[tuple[str, str], float],
) -> GaugeMetricFamily | CounterMetricFamily:
    names, own = [name for name, _ in const], [value for _, value in const]
    if not isinstance(reading, Mapping):
        family = kind(name, help_text, labels=names)
        family.add_metric(own, reading)
        return family
    labels = label if isinstance(label, tuple) else (label or "target",)
    family = kind(name, help_text, labels=[*names, *labels])
    most = TARGETS_MAX if len(labels) == 1 else PAIRS_MAX
    for value, number in list(reading.items())[:most]:  # a sum over the rest would mean nothing
        family.add_metric([*own, *(value if isinstance(value, tuple) else (value,))], number)
    return family


def _known(reason: str) -> str:
    return reason if by_reason(reason) is not None else OTHER
