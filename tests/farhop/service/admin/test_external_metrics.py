"""The shape that Kubernetes reads."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from farhop.service.admin import external_metrics as external

TOLD = {"paris": {"llama": 3, "org/qwen": 2}, "tokyo": {"llama": 5}}
AT = datetime(2026, 11, 22, 20, 50, 1, 999_999, tzinfo=UTC)


def test_matching_metrics_are_listed_in_the_form_of_the_kubernetes_api() -> None:
    assert external.values(TOLD, external.selector("region=paris,model=llama"), AT) == {
        "kind": "ExternalMetricValueList",
        "apiVersion": "external.metrics.k8s.io/v1beta1",
        "metadata": {},
        "items": [
            {
                "metricName": "farhop_desired_replicas",
                "metricLabels": {"region": "paris", "model": "llama"},
                "timestamp": "2026-11-22T20:50:01Z",
                "value": "3",
            }
        ],
    }


@pytest.mark.parametrize(
    ("selector", "values"),
    [("", ["3", "2", "5"]), ("model==llama", ["3", "5"]), (" region = paris ", ["3", "2"]), ("model=x", []),
     ("model=org_qwen", ["2"]), ("model=org/qwen", ["2"])],
)  # fmt: skip
def test_selectors_choose_metrics_by_region_and_model(selector: str, values: list[str]) -> None:
    found = external.values(TOLD, external.selector(selector), AT)
    assert [item["value"] for item in found["items"]] == values


@pytest.mark.parametrize("selector", ["region!=paris", "zone=a", "model in (a,b)", "model", "=", "a" * 2000])
def test_an_invalid_label_selector_is_refused_with_the_remedy(selector: str) -> None:
    with pytest.raises(ValueError, match="labelSelector: "):
        external.selector(selector)


def test_one_metric_is_found_by_region_and_model() -> None:
    assert external.one(TOLD, "tokyo", "llama") == 5
    assert external.one(TOLD, None, "org/qwen") == 2
    assert external.one(TOLD, None, "llama") is None  # the region is missing
    assert external.one(TOLD, "rome", "llama") is None
    assert external.status(404, "no")["code"] == 404
