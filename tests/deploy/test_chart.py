"""The chart over a matrix of values: what it renders, what it refuses, and how balancers read its configurations."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import manifests
import pytest
import yaml
from machine import DEPLOY, ROOT, run

CHART = DEPLOY / "kubernetes" / "farhop"
TOOLS = ROOT / ".venv-chart" / "bin" / "python"
KUBECTL = shutil.which("kubectl", path=str(TOOLS.parent)) or shutil.which("kubectl")
EXAMPLES = sorted(path.stem for path in (CHART / "examples").glob("*.yaml"))
WITH_TOOLS = pytest.mark.skipif(not TOOLS.exists(), reason="what renders the chart is not installed: make chart-tools")


def example(name: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((CHART / "examples" / f"{name}.yaml").read_text())
    return values


def changed(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The values with others at `a.b.c`; None takes one out."""
    made = deepcopy(values)
    for path, value in changes.items():
        *folders, last = path.split(".")
        at = made
        for folder in folders:
            at = at.setdefault(folder, {})
        if value is None:
            at.pop(last, None)
        else:
            at[last] = value
    return made


MATRIX = [
    {"tls.source": tls, "global.enabled": upper, "regional.enabled": lower, "regional.client.enabled": client,
     "engines": engines, "networkPolicy.enabled": policy}
    for tls, (upper, lower), client, engines, policy in itertools.product(
        ("certManager", "secret", "none"), ((True, True), (True, False), (False, True)), (False, True),
        ({"pool": "llama", "namespace": "models"}, {"service": "vllm"}), (True, False),
    )
]  # fmt: skip
ZONES = [
    {"zone": "e.example", "servers": ["ns.e.example"], "addresses": {"ns.e.example": ["192.0.2.53"]},
     "names": [{"name": "api.e.example"}]}
]  # fmt: skip
DNS = {"enabled": True, "config": {"zones": ZONES}}
PEER = {"address": "10.20.0.1", "asn": 65000, "local_address": "env:HOST_IP"}
SPEAKER = {"exabgp": {"local_as": 65001, "router_id": "env:HOST_IP", "peers": [PEER]}}
ANYCAST = {"enabled": True, "addresses": ["192.0.2.80"], "config": {"entry": "one", "speaker": SPEAKER}}
SCALED = {"by": "keda", "deployment": "vllm", "model": "org/llama 3"}
MORE = [
    {"etcd.endpoints": ["etcd-0.etcd:12379"], "networkPolicy.etcdPorts": [12379]},
    {"regional.config.limits": {"drain_s": 600}, "shutdown.preStopSeconds": 0},
    {"podDisruptionBudget.maxUnavailable": "50%", "listenHost": "::", "etcd.endpoints": ["[fd00::1]:2379"], "dns": DNS},
    {"regional.autoscaling.enabled": True, "global.autoscaling.enabled": False},
    {"image.digest": "sha256:" + "a" * 64, "podDisruptionBudget.enabled": False},
    {"networkPolicy.regions": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "networkPolicy.otlpPorts": [4317]},
    {
        "regional.config.peers": {"addresses": ["other:9001"]},
        "regional.config.discovery": [{"kind": "file", "path": "x"}],
    },
    {"global.clientTlsSecret": "", "region": "a" * 40},
    {"monitoring.serviceMonitor.enabled": True, "monitoring.rules.enabled": True, "tls.source": "none"},
    {"regional.picker": {"enabled": True, "port": 9100}, "tls.source": "none"},
    {"regional.picker": {"enabled": True, "tls": True, "callers": "gateway", "fallbacks": 0}},
    {"engines.autoscaling": {**SCALED, "token": "prometheus"}},
    {"engines.autoscaling": SCALED, "tls.source": "none", "admin": {"tokensSecret": "", "tokens": {}, "scrape": ""}},
    {"engines.autoscaling": {**SCALED, "by": "hpa", "min": 0}},
    {"dns": DNS},
    {"dns": {**DNS, "kind": "DaemonSet", "keysSecret": "farhop-zones", "service": {"type": "ClusterIP"}}},
    {"dns": {**DNS, "workers": 4}, "tls.source": "none", "global.enabled": False},
    {"anycast": ANYCAST, "dns": DNS, "shutdown.preStopSeconds": 60},
    {"anycast": ANYCAST, "tls.source": "none", "networkPolicy.enabled": False, "global.service": {"type": "NodePort"}},
    {
        "anycast": {
            **ANYCAST,
            "addresses": ["192.0.2.80", "2001:db8::80"],
            "passwordsSecret": "bgp",
            "bgpPorts": [1179],
            "config": {
                "entry": "one",
                "speaker": {"exabgp": {**SPEAKER["exabgp"], "peers": [{**PEER, "port": 1179}]}},
                "drain_s": 120,
                "settle_s": 0.5,
                "last_site": "keep",
                "probe": {"fall": 2},
            },
        },
    },
]


def cases() -> dict[str, dict[str, Any]]:
    full = example("region")
    secrets = {"tls.secrets": {"global": "g-tls", "regional": "r-tls"}}
    return {
        **{name: example(name) for name in EXAMPLES},
        **{f"matrix {index}": changed(full, {**secrets, **one}) for index, one in enumerate(MATRIX)},
        **{f"more {index}": changed(full, one) for index, one in enumerate(MORE)},
    }


# A wrong value, and the expected message.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no region": ({"region": ""}, "region"),
    "a region that is no name": ({"region": "Paris!"}, "region"),
    "an unknown value": ({"regoin": "paris"}, "regoin"),
    "an unknown value within": ({"global.replcas": 3}, "replcas"),
    "no replicas": ({"global.replicas": 0}, "replicas"),
    "a margin too small": ({"shutdown.marginSeconds": 0}, "marginSeconds"),
    "no hop secret": ({"hop.secret": ""}, "secret"),
    "an active key that is not there": ({"hop.active": "k9"}, 'hop.active: "k9" is not among hop.keys (k1)'),
    "a region without certificates": ({"tls.source": "secret"}, "tls.secrets.global: is not given; name a Secret"),
    "no issuer": ({"tls.issuer.name": ""}, "tls.issuer.name: is not given"),
    "no topology": ({"topology": {"configMap": ""}}, "topology: is not given"),
    "two topologies": ({"topology": {"configMap": "a", "document": {"name": "b"}}}, "both given"),
    "no tier": ({"global.enabled": False, "regional.enabled": False}, "both are false"),
    "tokens without a Secret": ({"admin.tokensSecret": ""}, "admin: give both tokensSecret and tokens"),
    "Prometheus without a token": ({"admin.scrape": ""}, "admin.scrape: is not given"),
    "a right that is none": ({"admin.tokens": {"ops": "all"}}, "tokens"),
    "no engines": ({"engines.pool": ""}, "engines: nobody says where they are"),
    "two kinds of engines": ({"engines.service": "vllm"}, "pool and service are both given"),
    "what the chart writes": (
        {"global.config": {"listen": {"port": 1}}},
        "global.config.listen: is written by the chart",
    ),
    "a password in plaintext": ({"etcd.tlsSecret": ""}, "a password never travels in plaintext"),
    "scaling the wrong way": ({"global.autoscaling": {"enabled": True, "min": 5, "max": 2}}, "min 5 is above max 2"),
    "a wrong type": ({"tls.source": "acme"}, "source"),
    "a port out of range": ({"engines.ports": [70000]}, "ports"),
    "a picker with certificates that are none": (
        {"regional.picker": {"enabled": True, "tls": True}, "tls.source": "none"},
        "regional.picker.tls: there are no certificates with tls.source none",
    ),
    "a pool of nobody's pods": (
        {"regional.picker": {"enabled": True, "pool": "llama"}, "engines.podSelector": {}},
        "regional.picker.pool: the InferencePool needs engines.podSelector.matchLabels",
    ),
    "another pool than the engines'": (
        {"regional.picker": {"enabled": True, "pool": "x"}, "engines.podSelector": {"matchLabels": {"a": "b"}}},
        "regional.picker.pool: is another than engines.pool",
    ),
    "objectives of no pool": (
        {"regional.picker": {"objectives": "llm-d.ai/v1alpha2"}, "engines.pool": "", "engines.service": "vllm"},
        "regional.picker.objectives: are those of an InferencePool",
    ),
    "a picker that believes anybody": ({"regional.picker": {"callers": "all"}}, "callers"),
    "engines scaled by nobody's name": ({"engines.autoscaling": {"by": "keda"}}, "engines.autoscaling: needs"),
    "engines scaled without a token": ({"engines.autoscaling": SCALED}, "engines.autoscaling.token: the admin port"),
    "engines scaled the wrong way": (
        {"engines.autoscaling": {**SCALED, "by": "hpa", "min": 9, "max": 2}},
        "engines.autoscaling: min 9 is above max 2",
    ),
    "a DNS server without zones": ({"dns": {"enabled": True}}, "dns.config.zones: is not given"),
    "a DNS server without certificates": (
        {"dns": DNS, "tls": {"source": "secret", "secrets": {"global": "g", "regional": "r"}}},
        "tls.secrets.dns: is not given; name a Secret",
    ),
    "what the chart writes of DNS": (
        {"dns": {"enabled": True, "config": {"zones": ZONES, "listen": {"port": 53}}}},
        "dns.config.listen: is written by the chart",
    ),
    "a DNS server of no kind": ({"dns": {**DNS, "kind": "StatefulSet"}}, "kind"),
    "an announcer of nothing": ({"anycast": {**ANYCAST, "addresses": []}}, "anycast.addresses: is not given"),
    "an announcer of no balancer": ({"anycast": ANYCAST, "global.enabled": False}, "global.enabled is false"),
    "an announcer of no entry": ({"anycast": {**ANYCAST, "config": {"speaker": SPEAKER}}}, "anycast.config.entry: is"),
    "an announcer without ExaBGP": (
        {"anycast": {**ANYCAST, "config": {"entry": "one", "speaker": {"bird": {"file": "/x"}}}}},
        "anycast.config.speaker.exabgp: is not given",
    ),
    "an announcer that asks another": (
        {"anycast": {**ANYCAST, "config": {"entry": "one", "speaker": SPEAKER, "probe": {"url": "http://x/"}}}},
        "anycast.config.probe.url: is written by the chart",
    ),
    "an address that is none": ({"anycast": {**ANYCAST, "addresses": ["api.example"]}}, "addresses"),
    "a digest that is none": ({"image.digest": "latest"}, "digest"),
}


def render(asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the chart renders to, for each."""
    ended = subprocess.run(
        [str(TOOLS), str(DEPLOY / "kubernetes" / "render.py")],
        input="".join(json.dumps(one) + "\n" for one in asked),
        capture_output=True, text=True, timeout=240.0, check=True,
    )  # fmt: skip
    return list(map(json.loads, ended.stdout.splitlines()))


@pytest.fixture(scope="module")
def rendered() -> dict[str, dict[str, Any]]:
    """Every case, rendered by one process."""
    asked = {**cases(), **{name: changed(example("region"), wrong) for name, (wrong, _) in REFUSED.items()}}
    return dict(zip(asked, render([{"values": values} for values in asked.values()]), strict=True))


@WITH_TOOLS
def test_any_values_render_to_manifests_that_kubernetes_accepts(rendered: dict[str, dict[str, Any]]) -> None:
    wrong: list[str] = []
    for name in cases():
        answer = rendered[name]
        if "error" in answer:
            wrong.append(f"{name}: {answer['error']}")
            continue
        wrong += [f"{name}: {one}" for one in (*answer["faults"], *manifests.broken(answer["documents"]))]
    assert not wrong, "\n".join(wrong)


@WITH_TOOLS
def test_values_that_cannot_be_right_are_refused_in_one_line(rendered: dict[str, dict[str, Any]]) -> None:
    for name, (_, expected) in REFUSED.items():
        assert expected in rendered[name].get("error", "it was rendered"), name


def shown(values: dict[str, Any], **more: str) -> list[dict[str, Any]]:
    """The documents of one release."""
    (answer,) = render([{"values": values, **more}])
    assert "error" not in answer, answer["error"]
    found: list[dict[str, Any]] = answer["documents"]
    assert not answer["faults"]
    assert not manifests.broken(found)
    return found


@WITH_TOOLS
@pytest.mark.parametrize("length", [43, 44, 51, 53])
def test_a_long_name_of_a_release_leaves_each_tier_its_own(length: int) -> None:
    values = changed(example("region"), {"dns": DNS, "anycast": ANYCAST})
    found = manifests.workloads(shown(values, name="r" * length))
    assert [one["metadata"]["name"].rpartition("-")[2] for one in found] == ["global", "regional", "dns", "anycast"]


@WITH_TOOLS
def test_nobody_who_is_not_named_reaches_an_admin_port() -> None:
    """An empty `from` of a NetworkPolicy is everybody."""
    keda = {"by": "keda", "deployment": "vllm", "model": "m", "token": "prometheus"}
    for more, sources in (({}, 0), ({"engines.autoscaling": keda}, 1)):
        (answer,) = render([{"values": changed(example("region"), {"networkPolicy.monitoring": [], **more})}])
        policies = manifests.of(answer["documents"], "NetworkPolicy")
        rules = [rule for one in policies for rule in one["spec"]["ingress"] if rule["ports"][0]["port"] == "admin"]
        assert [len(rule["from"]) for rule in rules] == [1] * sources


@WITH_TOOLS
def test_releases_of_one_name_in_two_namespaces_may_share_the_engines_namespace() -> None:
    values = changed(example("region"), {"engines.namespace": "models"})
    there = [
        (one["kind"], one["metadata"]["name"])
        for namespace in ("paris", "tokyo", "models")
        for one in shown(values, namespace=namespace)
        if one["metadata"].get("namespace") == "models"
    ]
    assert len(set(there)) == len(there) == 6


@WITH_TOOLS
def test_names_are_asked_at_the_ports_on_which_the_clusters_dns_pods_listen() -> None:
    for more, ports in (({}, [53]), ({"networkPolicy.dnsPorts": [53, 5353]}, [53, 5353])):
        for one in manifests.of(shown(changed(example("region"), more)), "NetworkPolicy"):
            names = [(port["port"], port["protocol"]) for port in one["spec"]["egress"][0]["ports"]]
            assert sorted(names) == sorted((port, protocol) for port in ports for protocol in ("UDP", "TCP"))


@WITH_TOOLS
@pytest.mark.parametrize("fleet", ["a" * 128, "Fleet.", "a_-" * 40])
def test_any_name_of_a_fleet_makes_labels_that_kubernetes_accepts(fleet: str) -> None:
    for one in shown(changed(example("region"), {"fleet": fleet})):
        label = one["metadata"]["labels"]["app.kubernetes.io/part-of"]
        assert re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", label)
        assert fleet.startswith(label)


@WITH_TOOLS
def test_in_a_cluster_of_ipv6_every_port_listens_there() -> None:
    values = changed(example("region"), {"listenHost": "::", "dns": DNS, "regional.client.enabled": True})
    found = manifests.configurations(shown(changed(values, {"regional.picker": {"enabled": True}})))
    listening = [
        host
        for config in found.values()
        for one in (config.get(name, {}) for name in manifests.LISTENERS)
        for host in one.get("hosts", [one.get("host")] if one else [])
    ]
    assert listening == ["::"] * 9


@WITH_TOOLS
def test_a_platform_may_give_pods_their_user() -> None:
    """As OpenShift does: of a pod that asks for another it starts none."""
    nobody = {"runAsUser": None, "runAsGroup": None, "fsGroup": None}
    for values, ids in (({}, {65532}), ({"podSecurityContext": nobody}, set())):
        for one in manifests.workloads(shown({**example("region"), **values})):
            context = one["spec"]["template"]["spec"]["securityContext"]
            assert {value for value in context.values() if isinstance(value, int) and value is not True} == ids
            assert context["runAsNonRoot"] is True
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}
            assert None not in context.values()


@WITH_TOOLS
def test_a_tier_may_have_volumes_and_an_affinity_of_its_own() -> None:
    """For usage records and audit logs, which must outlive a pod, and for tokenizers."""
    claim = {"name": "records", "persistentVolumeClaim": {"claimName": "records"}}
    mount = {"name": "records", "mountPath": "/var/lib/farhop-records"}
    near = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": "pool", "operator": "In", "values": ["edge"]}]}]}}}  # fmt: skip
    more = {"global.volumes": [claim], "global.volumeMounts": [mount], "global.affinity": near}
    upper, lower = manifests.workloads(shown(changed(example("region"), more)))
    pod = upper["spec"]["template"]["spec"]
    assert claim in pod["volumes"]
    assert all(mount in one["volumeMounts"] for one in (*pod["initContainers"], *pod["containers"]))
    assert pod["affinity"] == near
    assert "affinity" not in lower["spec"]["template"]["spec"]


@WITH_TOOLS
@pytest.mark.parametrize("name", EXAMPLES)
def test_balancers_take_the_configurations_of_the_examples(
    rendered: dict[str, dict[str, Any]], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = rendered[name]["documents"]
    folder = _mounted(tmp_path, example(name))
    for variable, value in (
        ("POD_NAME", "pod-1"), ("POD_IP", "10.0.0.1"), ("HOST_IP", "10.20.0.7"), ("ETCD_PASSWORD", "secret"),
    ):  # fmt: skip
        monkeypatch.setenv(variable, value)
    for tier, config in manifests.configurations(documents).items():
        config["state_dir"] = str(tmp_path / "state")
        path = tmp_path / f"{tier}.yaml"
        path.write_text(yaml.safe_dump(manifests.at_home(config, folder)))
        _checked(path)


def _checked(path: Path) -> None:
    from entry_anycast.app.config import AnycastConfig
    from entry_anycast.app.probe import Prober
    from entry_dns.app.config import DnsConfig
    from farhop.config import load
    from farhop.service.assembly import stores
    from farhop_cli import check
    from global_lb.app.config import GlobalConfig
    from regional_lb.app.config import RegionalConfig

    if "anycast" in path.stem:
        config = load(AnycastConfig, path)
        assert config.exabgp_made().peers[0].local_address == config.speaker.exabgp.router_id == "10.20.0.7"
        Prober(config.probe, lambda _: None)  # the certificate authority that it trusts is there
        assert check.run([str(path)], no_secrets=False, as_json=True) == 0
        return
    if "dns" in path.stem:
        assert load(DnsConfig, path).zones
        assert check.run([str(path)], no_secrets=False, as_json=True) == 0
        return
    config = load(GlobalConfig if "global" in path.stem else RegionalConfig, path)
    stores.hubs(config, stores.topology_of(config))


def _mounted(tmp_path: Path, values: dict[str, Any]) -> Path:
    """What the Secrets and ConfigMaps of an example would hold."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from farhop_cli import certs

    folder = tmp_path / "etc"
    for name in ("tls", "client-tls", "etcd", "hop", "report", "topology", "admin", "bgp"):
        (folder / name).mkdir(parents=True)
    certs.init(tmp_path / "ca", "farhop.internal")
    region = values["region"]
    certs.issue(tmp_path / "ca", "regional", region, [], 90, "farhop.internal")
    for name in ("tls", "client-tls", "etcd"):
        shutil.copy(tmp_path / "ca" / f"regional-{region}.pem", folder / name / "tls.crt")
        shutil.copy(tmp_path / "ca" / f"regional-{region}.key", folder / name / "tls.key")
        shutil.copy(tmp_path / "ca" / "ca.pem", folder / name / "ca.crt")
    (folder / "bgp" / "router").write_text("secret")
    for key in values["hop"]["keys"]:
        (folder / "hop" / key).write_text("x" * 32)
    for token in values.get("admin", {}).get("tokens", ()):
        (folder / "admin" / token).write_text("x" * 64)
    # The private key that belongs to the examples' public key; only this test uses it.
    private = Ed25519PrivateKey.from_private_bytes(b"farhop's examples: nobody's key.")
    (folder / "report" / "report.pem").write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    document = values["topology"].get("document") or {
        **example("trial")["topology"]["document"],
        "regions": [{**example("trial")["topology"]["document"]["regions"][0], "name": region}],
    }
    document = {**document, "entries": [{"name": "one", "region": region, "ipv4": ["192.0.2.80"]}]}
    (folder / "topology" / "world.yaml").write_text(yaml.safe_dump(document))
    return folder


@WITH_TOOLS
def test_the_plain_manifest_is_what_the_chart_renders(tmp_path: Path) -> None:
    made = tmp_path / "farhop.yaml"
    run(str(TOOLS), str(DEPLOY / "kubernetes" / "render.py"), "--plain", str(made))
    assert made.read_text() == (DEPLOY / "kubernetes" / "plain" / "farhop.yaml").read_text(), "run `make chart`"


# -- without the chart's tools


def plain() -> list[dict[str, Any]]:
    text = (DEPLOY / "kubernetes" / "plain" / "farhop.yaml").read_text()
    return [one for one in yaml.safe_load_all(text) if one]


def test_nothing_is_broken_in_the_plain_manifest() -> None:
    assert manifests.broken(plain()) == []
    assert len(plain()) == 15


def test_balancers_take_the_configurations_of_the_plain_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _mounted(tmp_path, example("trial"))
    for variable, value in (("POD_NAME", "pod-1"), ("POD_IP", "10.0.0.1")):
        monkeypatch.setenv(variable, value)
    for tier, config in manifests.configurations(plain()).items():
        config["state_dir"] = str(tmp_path / "state")
        path = tmp_path / f"{tier}.yaml"
        path.write_text(yaml.safe_dump(manifests.at_home(config, folder)))
        _checked(path)


@pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed: make chart-tools")
def test_kustomize_renders_the_plain_manifest() -> None:
    assert KUBECTL is not None
    made = run(KUBECTL, "kustomize", str(DEPLOY / "kubernetes" / "plain")).stdout
    found = [one for one in yaml.safe_load_all(made) if one]
    assert {one["metadata"]["namespace"] for one in found} == {"farhop"}
    assert manifests.broken(found) == []


# -- that the rules see what they are for

POD = "Deployment/farhop-global spec template spec"
# A position in the plain manifest, the value to write there (None: delete it), and the expected message.
SPOILT: list[tuple[str, Any, str]] = [
    (f"{POD} terminationGracePeriodSeconds", 30, "grace 30 s"),
    (f"{POD} containers 0 env", [], "nobody sets env:POD_NAME"),
    (f"{POD} volumes 2", None, "volumes and mounts"),
    (f"{POD} containers 0 securityContext readOnlyRootFilesystem", False, "may write"),
    (f"{POD} containers 0 readinessProbe httpGet path", "/healthz", "probes are"),
    (f"{POD} containers 0 ports 0 containerPort", 80, "the pod's ports are"),
    (f"{POD} securityContext runAsUser", 0, "runs as more than it need"),
    ("Deployment/farhop-global spec strategy rollingUpdate maxUnavailable", 1, "before others are ready"),
    ("Service/farhop-global spec selector app.kubernetes.io/component", "x", "selects the pods of nobody"),
    ("Service/farhop-global spec ports 0 targetPort", "http", "no port http"),
    ("NetworkPolicy/farhop-regional spec egress 1", None, "may not reach etcd"),
    ("NetworkPolicy/farhop-regional spec egress 3", None, "may not reach engines"),
    ("NetworkPolicy/farhop-regional spec ingress 2", None, "nobody may come to its port"),
    ("NetworkPolicy/farhop-global spec egress 0", {}, "a rule is for all ports"),
]


@pytest.mark.parametrize(("path", "value", "expected"), SPOILT, ids=lambda one: one if isinstance(one, str) else "")
def test_a_broken_rule_is_seen(path: str, value: Any, expected: str) -> None:
    found = plain()
    at: Any = {f"{one['kind']}/{one['metadata']['name']}": one for one in found}
    *folders, last = (int(step) if step.isdigit() else step for step in path.split())
    for step in folders:
        at = at[step]
    if value is None:
        at.pop(last)
    else:
        at[last] = value
    assert any(expected in line for line in manifests.broken(found)), manifests.broken(found)
