"""The scaling signal in the shape of Kubernetes' external metrics API (external.metrics.k8s.io/v1beta1), as HPAs read.

One metric, `farhop_desired_replicas`, with labels `region` and `model`. Values are whole replicas. Never opens anything
and never reads a clock: the time of an answer is an argument.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

NAME = "farhop_desired_replicas"
GROUP = "external.metrics.k8s.io/v1beta1"
METRIC = f"/apis/{GROUP}/namespaces/{{namespace}}/{{metric}}"
PATHS = (f"/apis/{GROUP}", METRIC)
RESOURCES: dict[str, Any] = {
    "kind": "APIResourceList",
    "apiVersion": "v1",
    "groupVersion": GROUP,
    "resources": [
        {"name": NAME, "singularName": "", "namespaced": True, "kind": "ExternalMetricValueList", "verbs": ["get"]}
    ],
}
_LABELS = ("region", "model")
SELECTOR_CHARS_MAX = 1024
_TERM = re.compile(r"\s*([A-Za-z]{1,32})\s*==?\s*([^\s,=!()]{0,256})\s*")


def selector(text: str) -> dict[str, str]:
    """A labelSelector of equalities, `region=paris,model=llama`. ValueError that names the remedy for anything else."""
    if len(text) > SELECTOR_CHARS_MAX:
        raise ValueError(f"labelSelector: at most {SELECTOR_CHARS_MAX} characters")
    wanted: dict[str, str] = {}
    for term in text.split(",") if text.strip() else ():
        match = _TERM.fullmatch(term)
        if match is None or match[1] not in _LABELS:
            raise ValueError("labelSelector: give equalities of region and model, such as region=paris,model=llama")
        wanted[match[1]] = match[2]
    return wanted


def one(desired: Mapping[str, Mapping[str, int]], region: str | None, model: str) -> int | None:
    """The desired replicas of a model in a region (None: in the only one); None if unknown."""
    if region is None:
        known = [models[model] for models in desired.values() if model in models]
        return known[0] if len(known) == 1 else None
    return desired.get(region, {}).get(model)


def values(desired: Mapping[str, Mapping[str, int]], wanted: Mapping[str, str], at: datetime) -> dict[str, Any]:
    """An ExternalMetricValueList of those that match, as of `at` (UTC). A model's name that no label
    may hold (Kubernetes allows no `/` there) is matched with `/` for `_`, too."""
    timestamp = at.strftime("%Y-%m-%dT%H:%M:%SZ")
    items = [
        {
            "metricName": NAME,
            "metricLabels": {"region": region, "model": model},
            "timestamp": timestamp,
            "value": str(replicas),
        }
        for region, models in desired.items()
        for model, replicas in models.items()
        if wanted.get("region", region) == region and wanted.get("model", model) in (model, model.replace("/", "_"))
    ]
    return {"kind": "ExternalMetricValueList", "apiVersion": GROUP, "metadata": {}, "items": items}


def status(code: int, message: str) -> dict[str, Any]:
    """A Kubernetes Status that reports a failure."""
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}
