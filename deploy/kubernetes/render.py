"""Renders the chart without a cluster, in the environment of `make chart-tools`; a line of JSON in, a line out.

Input, per line: {"values": {...}, "name": ..., "namespace": ...}. Output: {"documents": [...],
"faults": [...]} or {"error": "..."}: `faults` is what kubernetes-validate (strict) says against it.
With `--plain FILE` it writes what examples/trial.yaml renders to, for who wants no Helm.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import yaml
from helm_python.chart import Chart

HERE = Path(__file__).parent
NAME, NAMESPACE = "farhop", "farhop"
# Kinds of other projects, whose schemas Kubernetes has not: the tests look at their fields.
FOREIGN = ("monitoring.coreos.com", "cert-manager.io", "inference.networking.k8s.io", "keda.sh")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C reads the same, faster
# It reads its schemas anew for every document, which takes longer than to judge one.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)


def rendered(chart: Any, values: dict[str, Any], name: str = NAME, namespace: str = NAMESPACE) -> str:
    """The manifests as one YAML text, in the order of the templates' names."""
    files = chart.render(values, name=name, namespace=namespace)
    manifests = (text.strip() for path, text in sorted(files.items()) if path.endswith(".yaml"))
    return "\n".join(f"---\n{text.removeprefix('---').strip()}" for text in manifests if text)


def documents(text: str) -> list[dict[str, Any]]:
    """What stands in it. Not to be changed: texts that say the same share it."""
    return [one for part in re.split(r"^---\n", text, flags=re.M) for one in _parsed(part)]


@functools.cache
def _parsed(text: str) -> tuple[dict[str, Any], ...]:
    """As YAML: of one set of values most of the texts are another's, too. A line of `---` always parts documents."""
    return tuple(one for one in yaml.load_all(text, _LOADER) if one)


def faults(found: list[dict[str, Any]]) -> list[str]:
    """What Kubernetes would say against them."""
    said = (_fault(json.dumps(one)) for one in found if not one["apiVersion"].startswith(FOREIGN))
    return [fault for fault in said if fault]


@functools.cache
def _fault(document: str) -> str:
    """As JSON: most documents of one set of values stand in another's, too, and a schema is slow. "" for none."""
    one = json.loads(document)
    try:
        kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        return f"{one['kind']}/{one['metadata']['name']}: {error}"
    return ""


def plain(chart: Any) -> str:
    """The manifest for who wants no Helm."""
    values = yaml.safe_load((HERE / "farhop" / "examples" / "trial.yaml").read_text())
    head = "# What the chart renders with examples/trial.yaml; written by `make chart`, not by hand.\n"
    text = "\n".join(line.rstrip() for line in rendered(chart, values).splitlines())
    return f"{head}{text}\n".replace("managed-by: Helm", "managed-by: kustomize")


def main() -> None:
    """See above."""
    chart = Chart.load(str(HERE / "farhop"))
    if sys.argv[1:2] == ["--plain"]:
        Path(sys.argv[2]).write_text(plain(chart))
        return
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            release = {key: asked[key] for key in ("name", "namespace") if key in asked}
            found = documents(rendered(chart, asked["values"], **release))
            answer: dict[str, Any] = {"documents": found, "faults": faults(found)}
        except helm_python.HelmError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
