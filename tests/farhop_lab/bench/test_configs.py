"""The proxies' configurations, checked by the proxies themselves where they are installed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from farhop_lab.bench import configs
from farhop_lab.bench.proxies import on_path
from farhop_lab.world.certs import Authority

TARGETS = [("127.0.0.2", 9000), ("127.0.0.3", 9000)]


def test_every_target_is_named(tmp_path: Path) -> None:
    for text in (configs.nginx_proxy(tmp_path, 8000, TARGETS, 1024), configs.haproxy(8000, TARGETS, 1024)):
        assert "127.0.0.2:9000" in text
        assert "127.0.0.3:9000" in text
        assert "127.0.0.1:8000" in text


def test_litellm_asks_the_engines_for_their_model() -> None:
    entries = json.loads(configs.litellm(TARGETS))["model_list"]
    assert [entry["litellm_params"]["api_base"] for entry in entries] == [
        f"http://{host}:{at}/v1" for host, at in TARGETS
    ]
    assert {(entry["model_name"], entry["litellm_params"]["model"]) for entry in entries} == {("bench", "openai/bench")}


def test_envoy_s_is_json() -> None:
    read = json.loads(configs.envoy(8000, TARGETS))["static_resources"]
    (group,) = read["clusters"][0]["load_assignment"]["endpoints"]
    ports = [one["endpoint"]["address"]["socket_address"] for one in group["lb_endpoints"]]
    assert ports == [{"address": host, "port_value": port} for host, port in TARGETS]
    assert read["listeners"][0]["address"]["socket_address"]["port_value"] == 8000


def test_envoy_serves_tls_if_configured(tmp_path: Path) -> None:
    pair = Authority(tmp_path).issue("proxy")
    (chain,) = json.loads(configs.envoy(8000, TARGETS, pair))["static_resources"]["listeners"][0]["filter_chains"]
    assert pair.cert_file in json.dumps(chain["transport_socket"])


@pytest.mark.skipif(on_path("nginx") is None, reason="nginx is not installed")
@pytest.mark.parametrize("kind", ["engines", "proxy", "proxy over TLS"])
def test_nginx_takes_it(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "nginx.conf"
    if kind == "engines":
        file.write_text(configs.nginx_engines(tmp_path, ["127.0.0.1"], 9000, 1024, {"127.0.0.1": "tokyo"}))
    else:
        pair = Authority(tmp_path).issue("proxy") if "TLS" in kind else None
        file.write_text(configs.nginx_proxy(tmp_path, 8000, TARGETS, 1024, pair))
    binary = on_path("nginx")
    assert binary is not None
    text = subprocess.run([binary, "-t", "-c", file, "-p", tmp_path], capture_output=True, text=True, timeout=10)
    assert text.returncode == 0, text.stderr


@pytest.mark.skipif(on_path("haproxy") is None, reason="HAProxy is not installed")
def test_haproxy_takes_it(tmp_path: Path) -> None:
    file = tmp_path / "haproxy.cfg"
    file.write_text(configs.haproxy(8000, TARGETS, 1024))
    binary = on_path("haproxy")
    assert binary is not None
    text = subprocess.run([binary, "-c", "-f", file], capture_output=True, text=True, timeout=10)
    assert text.returncode == 0, text.stdout + text.stderr
