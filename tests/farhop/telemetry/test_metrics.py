"""What a scrape says about what happened, read back with Prometheus's own parser. Costs are measured by hand."""

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from farhop.balance.machine import Usage
from farhop.balance.outcome import (
    ADVISED,
    CLIENT_LEFT,
    CONNECT_FAILED,
    ENTRY_FORBIDDEN,
    QUEUE_FULL,
    REDIRECTED,
    SERVED,
    UNLAWFUL,
    Outcome,
    Source,
    catalogue,
)
from farhop.telemetry import metrics as module
from farhop.telemetry.metrics import TierMetrics
from farhop.telemetry.release import release


@pytest.fixture
def metrics() -> TierMetrics:
    return TierMetrics("global", "virginia", "g1")


def scraped(metrics: TierMetrics, name: str) -> dict[frozenset, float]:
    """All samples of a name by their labels, tier and region checked and left out."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            if sample.name == name:
                labels = dict(sample.labels)
                assert (labels.pop("tier"), labels.pop("region")) == ("global", "virginia")
                found[frozenset(labels.items())] = sample.value
    return found


def by(**labels: str) -> frozenset:
    return frozenset(labels.items())


def serve(metrics: TierMetrics, outcome: Outcome = SERVED, status: int = 200, **more) -> None:
    metrics.begun()
    metrics.finished(outcome, status, 1.5, **more)


def test_requests_are_counted_by_outcome_and_class(metrics):
    serve(metrics)
    serve(metrics)
    serve(metrics, QUEUE_FULL, 503)
    serve(metrics, CLIENT_LEFT, 0)
    assert scraped(metrics, "farhop_requests_total") == {
        by(source="engine", reason="served", code="2xx"): 2,
        by(source="region", reason="queue_full", code="5xx"): 1,
        by(source="client", reason="client_left", code="none"): 1,
    }
    assert scraped(metrics, "farhop_duration_seconds_count") == {by(): 4}


def test_refusals_and_denials_follow_from_the_requests(metrics):
    for outcome, status in (
        (SERVED, 200),
        (QUEUE_FULL, 503),
        (UNLAWFUL, 451),
        (ENTRY_FORBIDDEN, 307),
        (CLIENT_LEFT, 0),
        (REDIRECTED, 307),
        (ADVISED, 200),
    ):
        serve(metrics, outcome, status)
    serve(metrics, UNLAWFUL, 451)
    assert scraped(metrics, "farhop_refusals_total") == {
        by(reason="queue_full"): 1,
        by(reason="no_lawful_region"): 2,
        by(reason="entry_forbidden"): 1,
    }
    assert scraped(metrics, "farhop_residency_denials_total") == {
        by(reason="no_lawful_region"): 2,
        by(reason="entry_forbidden"): 1,
    }


def test_every_outcome_has_a_series_and_nothing_else_gets_one(metrics):
    for outcome in catalogue():
        serve(metrics, outcome, 503)
    for number in range(50):
        serve(metrics, Outcome(Source.CLIENT, f"made-up-{number}"), 100 * number)
    counted = scraped(metrics, "farhop_requests_total")
    assert sum(counted.values()) == len(catalogue()) + 50
    assert {dict(labels)["reason"] for labels in counted} == {outcome.reason for outcome in catalogue()} | {"other"}
    assert len(counted) <= len(catalogue()) + 6


def test_times_land_in_histograms_and_by_target(metrics):
    serve(metrics, ttft_s=0.42, tpot_s=0.03, target="tokyo")
    serve(metrics, ttft_s=0.08, target="tokyo")
    assert scraped(metrics, "farhop_ttft_seconds_bucket")[by(le="0.1")] == 1
    assert scraped(metrics, "farhop_ttft_seconds_bucket")[by(le="+Inf")] == 2
    assert scraped(metrics, "farhop_ttft_seconds_sum")[by()] == pytest.approx(0.5)
    assert scraped(metrics, "farhop_tpot_seconds_count") == {by(): 1}
    assert scraped(metrics, "farhop_target_ttft_seconds_count") == {by(target="tokyo"): 2}
    assert scraped(metrics, "farhop_target_ttft_seconds_sum")[by(target="tokyo")] == pytest.approx(0.5)


def test_absurd_samples_are_counted_apart(metrics):
    serve(metrics, ttft_s=-1.0)
    serve(metrics, tpot_s=math.nan, target="tokyo")
    metrics.promised(math.nan, 5.0)
    serve(metrics, usage=Usage(1, 0, 1), hit=(math.inf, "trie"))
    serve(metrics, usage=Usage(-5, 1))
    assert scraped(metrics, "farhop_invalid_samples_total") == {by(): 5}
    assert scraped(metrics, "farhop_ttft_seconds_count") == {by(): 0}
    assert scraped(metrics, "farhop_tokens_total")[by(kind="completion")] == 0


def test_in_flight_follows_begun_and_finished(metrics):
    metrics.begun()
    metrics.begun()
    metrics.finished(SERVED, 200, 1.0)
    assert scraped(metrics, "farhop_in_flight") == {by(): 1}


def test_attempts_and_spills_by_target(metrics):
    metrics.attempted("tokyo", CONNECT_FAILED)
    metrics.attempted("tokyo", CONNECT_FAILED)
    metrics.attempted("tokyo", Outcome(Source.CLIENT, "made-up"))
    metrics.spilled("frankfurt")
    assert scraped(metrics, "farhop_attempts_total") == {
        by(target="tokyo", outcome="connect_failed"): 2,
        by(target="tokyo", outcome="other"): 1,
    }
    assert scraped(metrics, "farhop_spilled_requests_total") == {by(target="frankfurt"): 1}
    assert metrics.traffic() == {"tokyo": {"failed": 2, "refused": 1}, "frankfurt": {"spilled": 1}}


def test_targets_are_bounded(metrics, monkeypatch):
    for number in range(module.TARGETS_MAX + 3):
        metrics.attempted(f"replica-{number}", SERVED)
        serve(metrics, ttft_s=0.1, target=f"replica-{number}")
    attempts = scraped(metrics, "farhop_attempts_total")
    assert len(attempts) == module.TARGETS_MAX + 1
    assert attempts[by(target="other", outcome="served")] == 3
    assert scraped(metrics, "farhop_target_ttft_seconds_count")[by(target="other")] == 3


def test_tokens_prefixes_and_promises(metrics):
    serve(metrics, usage=Usage(100, 20, 64), hit=(60.0, "exact"))
    serve(metrics, usage=Usage(10, 2))
    metrics.promised(400.0, 430.0)
    metrics.promised(400.0, 310.0)
    assert scraped(metrics, "farhop_tokens_total") == {
        by(kind="prompt"): 110,
        by(kind="completion"): 22,
        by(kind="cached"): 64,
    }
    assert scraped(metrics, "farhop_prefix_predicted_tokens_total") == {by(source="exact"): 60, by(source="trie"): 0}
    assert scraped(metrics, "farhop_prefix_actual_tokens_total") == {by(source="exact"): 64, by(source="trie"): 0}
    assert scraped(metrics, "farhop_prefix_error_tokens_total") == {by(source="exact"): 4, by(source="trie"): 0}
    sums = scraped(metrics, "farhop_ttft_error_seconds_sum")
    assert sums[by(direction="late")] == pytest.approx(0.03)
    assert sums[by(direction="early")] == pytest.approx(0.09)
    shares = scraped(metrics, "farhop_ttft_error_ratio_sum")
    assert shares[by()] == pytest.approx(30.0 / 430.0 + 90.0 / 310.0)


def test_reasons_of_refused_reports_are_bounded(metrics):
    for number in range(module.REASONS_MAX + 5):
        metrics.report_refused(f"reason-{number}")
    refused = scraped(metrics, "farhop_reports_refused_total")
    assert refused[by(reason="other")] == 5
    assert len(refused) == module.REASONS_MAX + 1


def test_gauges_are_read_at_the_scrape(metrics):
    level = {"queued": 3.0}
    metrics.gauge("queued", "Requests waiting here.", lambda: level["queued"])
    metrics.gauge("report_age_seconds", "Age of the last report.", lambda: {"tokyo": 0.5}, label="from")
    assert scraped(metrics, "farhop_queued") == {by(): 3}
    level["queued"] = 7.0
    assert scraped(metrics, "farhop_queued") == {by(): 7}
    assert scraped(metrics, "farhop_report_age_seconds") == {by(**{"from": "tokyo"}): 0.5}
    with pytest.raises(ValueError, match="another name"):
        metrics.gauge("queued", "Again.", lambda: 0)


def test_a_gauge_with_too_many_values_is_cut(metrics):
    metrics.gauge("wait_ms", "Wait.", lambda: {f"r{number}": 1.0 for number in range(999)}, label="target")
    assert len(scraped(metrics, "farhop_wait_ms")) == module.TARGETS_MAX


def test_metrics_of_two_tiers_in_one_process_are_separate():
    first, second = TierMetrics("global", "virginia", "g1"), TierMetrics("regional", "tokyo", "r1")
    serve(first)
    own = f'farhop_build_info{{balancer="r1",region="tokyo",tier="regional",version="{release()}"}} 1.0'
    assert own.encode() in second.render()
    assert b'reason="served"' not in second.render()


def test_hostile_labels_stay_one_sample(metrics):
    metrics.attempted('a"} 1\nfarhop_fake 1', SERVED)
    assert scraped(metrics, "farhop_attempts_total") == {by(target='a"} 1\nfarhop_fake 1', outcome="served"): 1}


def test_the_content_type_is_prometheus_text():
    assert module.CONTENT_TYPE.startswith("text/plain; version=0.0.4")


def test_requests_by_version_are_counted_by_split_reason_and_code_and_bounded(metrics, monkeypatch):
    metrics.versioned("v1", "session", 200, 0.25)
    metrics.versioned("v1", "session", 200, None)
    metrics.versioned("v1", "session", 0, -1.0)
    assert scraped(metrics, "farhop_version_requests_total") == {
        by(version="v1", split="session", code="2xx"): 2,
        by(version="v1", split="session", code="none"): 1,
    }
    assert scraped(metrics, "farhop_version_ttft_seconds_sum") == {by(version="v1"): 0.25}
    for n in range(2 * module.VERSIONS_MAX):
        metrics.versioned(f"n{n}", "", 503, 1.0)
    assert len(scraped(metrics, "farhop_version_ttft_seconds_count")) == module.VERSIONS_MAX + 1
    assert scraped(metrics, "farhop_version_requests_total")[by(version="other", split="", code="5xx")] > 1


def test_what_only_grows_is_read_as_a_counter(metrics):
    metrics.counter("ejections", "Ejections.", lambda: {"streak": 2.0}, "reason")
    assert scraped(metrics, "farhop_ejections_total") == {by(reason="streak"): 2}
    assert "# TYPE farhop_ejections_total counter" in metrics.render().decode()
    with pytest.raises(ValueError, match="is taken"):
        metrics.gauge("ejections", "Again.", float)


def test_models_are_labelled_apart_once_an_engine_answered_for_them(metrics, monkeypatch):
    monkeypatch.setattr(module, "MODELS_MAX", 3)
    serve(metrics, status=404, model="made-up")
    for model in ("a", "a", "b", "c", "d"):
        serve(metrics, ttft_s=0.2, tpot_s=0.01, model=model, usage=Usage(10, 2, 4))
    serve(metrics, CONNECT_FAILED, 502, model="a")
    assert scraped(metrics, "farhop_model_requests_total") == {
        by(model="other", code="4xx"): 1,
        by(model="a", code="2xx"): 2,
        by(model="a", code="5xx"): 1,
        by(model="b", code="2xx"): 1,
        by(model="other", code="2xx"): 2,
    }
    assert scraped(metrics, "farhop_model_tokens_total")[by(model="a", kind="cached")] == 8
    assert scraped(metrics, "farhop_model_ttft_seconds_count")[by(model="a")] == 2
    assert scraped(metrics, "farhop_model_tpot_seconds_sum")[by(model="b")] == pytest.approx(0.01)
    assert next(iter(scraped(metrics, "farhop_build_info"))) is not None


def test_a_gauge_of_two_labels(metrics):
    metrics.gauge("desired", "Wanted.", lambda: {("tokyo", "llama"): 3.0, ("rome", "llama"): 1.0}, ("target", "model"))
    lines = [line for line in metrics.render().decode().splitlines() if line.startswith("farhop_desired{")]
    assert [line.rpartition(" ")[2] for line in lines if 'model="llama"' in line and 'target="tokyo"' in line] == [
        "3.0"
    ]
    assert len(lines) == 2


def test_finished_requests_are_counted_in_batches_even_without_scrapes(metrics):
    for _ in range(3 * module.AT_ONCE + 1):
        serve(metrics, target="tokyo", model="m", ttft_s=0.2, usage=Usage(10, 3, 8), hit=(10.0, "trie"))
    assert len(metrics.pending_over) == 1
    times = 3 * module.AT_ONCE + 1
    assert scraped(metrics, "farhop_duration_seconds_count") == {by(): times}
    assert scraped(metrics, "farhop_prefix_predicted_tokens_total")[by(source="trie")] == 10.0 * times
    assert scraped(metrics, "farhop_tokens_total")[by(kind="prompt")] == 10 * times
    assert metrics.pending_over == []
