"""What must hold of any manifests for Farhop, whoever rendered them, and the configuration files in them.

`broken` names all that does not hold. It knows Kubernetes' meaning of the fields, not the chart's templates.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Document = dict[str, Any]
MARGIN_S = 5
# For each listener of the configurations: the port's name in the pod.
SELECTORS = {  # where each kind has its own
    "Service": "selector",
    "Deployment": "selector",
    "DaemonSet": "selector",
    "PodDisruptionBudget": "selector",
    "NetworkPolicy": "podSelector",
}
LISTENERS = {
    "listen": "clients",
    "client": "clients",
    "picker": "picker",
    "admin": "admin",
    "tier": "tier",
    "control": "control",
}


def broken(documents: Sequence[Document], namespace: str = "farhop") -> list[str]:
    """Every rule that some document breaks, in a line."""
    return [
        *_same_twice(documents),
        *_references(documents),
        *_selectors(documents),
        *_pods(documents),
        *_flows(documents, namespace),
        *_scaled(documents),
        *asked_by_keda(documents),
    ]


def of(documents: Sequence[Document], kind: str) -> list[Document]:
    """Those of a kind."""
    return [one for one in documents if one["kind"] == kind]


def workloads(documents: Sequence[Document]) -> list[Document]:
    """What runs pods."""
    return [*of(documents, "Deployment"), *of(documents, "DaemonSet")]


def listeners(config: Document) -> dict[str, int]:
    """Of a configuration: its ports, by their names in the pod."""
    fields = {name: config[field]["port"] for field, name in LISTENERS.items() if field in config}
    if "zones" in config:
        fields["dns"] = fields["dns-tcp"] = fields.pop("clients")
    return fields


def configurations(documents: Sequence[Document]) -> dict[str, Document]:
    """By Deployment or DaemonSet: the configuration that its pods read."""
    maps = {one["metadata"]["name"]: one["data"] for one in of(documents, "ConfigMap")}
    found: dict[str, Document] = {}
    for one in workloads(documents):
        spec = one["spec"]["template"]["spec"]
        (name,) = (v["configMap"]["name"] for v in spec["volumes"] if v["name"] == "configuration")
        found[one["metadata"]["name"]] = yaml.safe_load(maps[name]["farhop.yaml"])
    return found


def _same_twice(documents: Sequence[Document]) -> Iterator[str]:
    seen: set[tuple[str, str, str]] = set()
    for one in documents:
        key = (one["kind"], one["metadata"].get("namespace", ""), one["metadata"]["name"])
        if key in seen:
            yield f"{key} stands twice"
        seen.add(key)


def _references(documents: Sequence[Document]) -> Iterator[str]:
    """What a document names is there; Secrets are the user's or cert-manager's."""
    names = {(one["kind"], one["metadata"]["name"]) for one in documents}
    made = {one["spec"]["secretName"] for one in of(documents, "Certificate")}
    for one in workloads(documents):
        at, spec = one["metadata"]["name"], one["spec"]["template"]["spec"]
        if ("ServiceAccount", spec["serviceAccountName"]) not in names:
            yield f"{at}: its ServiceAccount is not there"
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for volume in volumes.values():
            secret = volume.get("secret", {}).get("secretName", "given")
            if not secret or (
                secret.startswith("farhop-") and secret.endswith("l-tls") and made and secret not in made
            ):
                yield f"{at}: Secret {secret!r} is made by nobody"
        for container in (*spec["initContainers"], *spec["containers"]):
            mounts = [mount["name"] for mount in container["volumeMounts"]]
            if set(mounts) != set(volumes):
                yield f"{at}: volumes and mounts of {container['name']} differ: {set(mounts) ^ set(volumes)}"
    for one in of(documents, "RoleBinding"):
        if ("Role", one["roleRef"]["name"]) not in names:
            yield f"{one['metadata']['name']}: its Role is not there"
        for subject in one["subjects"]:
            if ("ServiceAccount", subject["name"]) not in names:
                yield f"{one['metadata']['name']}: no ServiceAccount {subject['name']}"


def _selectors(documents: Sequence[Document]) -> Iterator[str]:
    """Each selects the pods of one Deployment, and ports by name are there."""
    pods = {one["metadata"]["name"]: one["spec"]["template"] for one in workloads(documents)}

    def matched(selector: dict[str, str]) -> list[str]:
        return [name for name, pod in pods.items() if selector.items() <= pod["metadata"]["labels"].items()]

    for one in documents:
        spec = one.get("spec", {})
        field = SELECTORS.get(one["kind"])
        selector = spec[field].get("matchLabels", spec[field]) if field is not None else None
        at = f"{one['kind']}/{one['metadata']['name']}"
        if selector is None:
            continue
        if len(matched(selector)) != 1:
            yield f"{at}: selects the pods of {matched(selector) or 'nobody'}"
            continue
        ports = {p["name"]: p["containerPort"] for p in pods[matched(selector)[0]]["spec"]["containers"][0]["ports"]}
        if one["kind"] == "Service":
            for port in spec["ports"]:
                if port["targetPort"] not in ports:
                    yield f"{at}: no port {port['targetPort']} in its pods"
        if one["kind"] == "NetworkPolicy":
            for rule in spec["ingress"]:
                for port in rule["ports"]:
                    if port["port"] not in ports:
                        yield f"{at}: no port {port['port']} in its pods"
    services = of(documents, "Service")
    for one in of(documents, "ServiceMonitor"):
        wanted = one["spec"]["selector"]["matchLabels"].items()
        chosen = [service for service in services if wanted <= service["metadata"]["labels"].items()]
        names = [{port["name"] for port in service["spec"]["ports"]} for service in chosen]
        if len(chosen) != 1 or not {end["port"] for end in one["spec"]["endpoints"]} <= names[0]:
            yield f"ServiceMonitor/{one['metadata']['name']}: selects {len(chosen)} Services"


def _pods(documents: Sequence[Document]) -> Iterator[str]:
    """Hardened, probed apart, given the time that they need to drain, rolled without a gap."""
    files = configurations(documents)
    for one in workloads(documents):
        at, spec = one["metadata"]["name"], one["spec"]["template"]["spec"]
        config, (container,) = files[at], spec["containers"]
        drain_s = 0.0 if "zones" in config else config.get("limits", {}).get("drain_s", 30.0)
        if "speaker" in config:  # as long as its own end may take (entry_anycast/app/main.py)
            drain_s = config.get("drain_s", 30.0) + config.get("settle_s", 2.0) + 4.0 * config.get("ack_s", 1.0) + 5.0
        if spec.get("hostNetwork", False) != ("speaker" in config):
            yield f"{at}: is on the node's network, or should be"
        pause_s = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        if spec["terminationGracePeriodSeconds"] < drain_s + pause_s + MARGIN_S:
            yield f"{at}: grace {spec['terminationGracePeriodSeconds']} s is less than pause, drain and margin"
        if one["kind"] == "Deployment" and one["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] != 0:
            yield f"{at}: a rollout may take pods away before others are ready"
        outer = spec["securityContext"]
        if not (
            outer["runAsNonRoot"]
            and outer.get("runAsUser", 65532) == 65532  # or whom the platform gives, who is never root
            and outer["seccompProfile"]["type"] == "RuntimeDefault"
        ):
            yield f"{at}: runs as more than it need"
        for each in (*spec["initContainers"], container):
            inner = each["securityContext"]
            if not inner["readOnlyRootFilesystem"] or inner["allowPrivilegeEscalation"]:
                yield f"{at}: {each['name']} may write or rise"
            if inner["capabilities"] != {"drop": ["ALL"]}:
                yield f"{at}: {each['name']} has capabilities"
        paths = {probe: container[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "readiness", "liveness")}
        if paths != {"startup": "/healthz", "readiness": "/readyz", "liveness": "/healthz"}:
            yield f"{at}: probes are {paths}"
        secure = "tls" in config["admin"]
        if any(container[f"{p}Probe"]["httpGet"]["scheme"] != ("HTTPS" if secure else "HTTP") for p in paths):
            yield f"{at}: probes do not speak as the admin port does"
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        found = listeners(config)
        if ports != found:
            yield f"{at}: the pod's ports are {ports}, the configuration's {found}"
        if [each["args"][0] for each in (*spec["initContainers"], container)] != ["check", container["name"]]:
            yield f"{at}: is not checked before it starts"
        yield from _mounted(at, config, container)
        if "checksum/configuration" not in one["spec"]["template"]["metadata"]["annotations"]:
            yield f"{at}: a new configuration is no rollout"


def _mounted(at: str, config: Document, container: Document) -> Iterator[str]:
    """Every file that the configuration names stands below a mount."""
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    for text in _texts(config):
        path = text.removeprefix("file:")
        if path.startswith("/") and not any(path == mount or path.startswith(f"{mount}/") for mount in mounts):
            yield f"{at}: {path} is mounted nowhere"
    given = {one["name"] for one in container["env"]}
    for text in _texts(config):
        if text.startswith("env:") and text.removeprefix("env:") not in given:
            yield f"{at}: nobody sets {text}"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(inner)


def _flows(documents: Sequence[Document], namespace: str) -> Iterator[str]:
    """The network policies permit every flow that the configurations mean, and nothing that has no port."""
    policies = {one["metadata"]["name"]: one["spec"] for one in of(documents, "NetworkPolicy")}
    if not policies:
        return
    for at, config in configurations(documents).items():
        spec = policies.get(at)
        if spec is None:
            yield f"{at}: no NetworkPolicy"
            continue
        if spec["policyTypes"] != ["Ingress", "Egress"]:
            yield f"{at}: what is not named is not denied"
        if any(not rule.get("ports") for rule in (*spec["ingress"], *spec["egress"])):
            yield f"{at}: a rule is for all ports"
        let_in = {port["port"] for rule in spec["ingress"] for port in rule["ports"]}
        let_out = {port["port"] for rule in spec["egress"] for port in rule.get("ports", ())}
        for name in listeners(config).keys() - let_in:
            yield f"{at}: nobody may come to its port {name}"
        for port, why in _wanted(config):
            if port not in let_out:
                yield f"{at}: may not reach {why} at port {port}"
        for rule in spec["egress"]:
            for peer in rule.get("to", ()):
                labels = peer.get("namespaceSelector", {}).get("matchLabels", {})
                homes = {
                    found.get("namespace", namespace)
                    for found in config.get("discovery", ())
                    if found["kind"] == "kubernetes"
                }
                if labels and homes and set(labels.values()) != homes:
                    yield f"{at}: engines are in {homes}, and it may go to {labels}"


def _wanted(config: Document) -> Iterator[tuple[int, str]]:
    yield 53, "names"
    for endpoint in config.get("etcd", {}).get("endpoints") or ["hub:2379"]:
        yield int(endpoint.rpartition(":")[2]), "etcd"
    if "zones" in config:
        yield 443, "entries"
        return
    if "speaker" in config:
        yield int(config["probe"]["url"].rpartition(":")[2].partition("/")[0]), "global balancers"
        for peer in config["speaker"]["exabgp"]["peers"]:
            yield peer.get("port", 179), "BGP neighbours"
        return
    if "listen" in config:
        yield 9000, "regions (tier)"
        yield 9001, "regions (control)"
        return
    yield 9001, "peers"
    for replica in config.get("replicas", ()):
        yield int(replica["url"].rpartition(":")[2]), "engines"
    if any(one["kind"] == "kubernetes" for one in config.get("discovery", ())):
        yield 443, "the Kubernetes API"


def _scaled(documents: Sequence[Document]) -> Iterator[str]:
    deployments = {one["metadata"]["name"]: one["spec"] for one in of(documents, "Deployment")}
    ours = [one for one in of(documents, "HorizontalPodAutoscaler") if one["spec"]["metrics"][0]["type"] == "Pods"]
    scaled = {one["spec"]["scaleTargetRef"]["name"] for one in ours}
    for name in scaled:
        if name not in deployments or "replicas" in deployments[name]:
            yield f"{name}: is scaled, and says how many there are"
    for name, spec in deployments.items():
        if name not in scaled and "replicas" not in spec:
            yield f"{name}: nobody says how many there are"


def asked_by_keda(documents: Sequence[Document]) -> Iterator[str]:
    """What is asked of an admin port by a ScaledObject is a Service's port, with a Secret that is named."""
    ports = {
        one["metadata"]["name"]: {port["port"] for port in one["spec"]["ports"]} for one in of(documents, "Service")
    }
    for one in of(documents, "ScaledObject"):
        (trigger,) = one["spec"]["triggers"]
        url = urlsplit(trigger["metadata"]["url"])
        name = str(url.hostname).partition(".")[0]
        if url.port not in ports.get(name, ()):
            yield f"{one['metadata']['name']}: asks port {url.port} of {name}, which is no Service's"
        rights = [each["metadata"]["name"] for each in of(documents, "TriggerAuthentication")]
        named = trigger.get("authenticationRef", {}).get("name")
        if named is not None and named not in rights:
            yield f"{one['metadata']['name']}: nobody gives it the rights {named}"


def at_home(config: Document, folder: Path) -> Document:
    """The same configuration with its files below another folder."""

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: moved(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [moved(inner) for inner in value]
        return value.replace("/etc/farhop", str(folder)) if isinstance(value, str) else value

    return dict(moved(config))
