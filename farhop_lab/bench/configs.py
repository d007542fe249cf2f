"""Configurations of the compared proxies, and of the nginx in place of the engines. Pure.

Each is set up as its own manual recommends for this job: one worker, HTTP/1.1 keep-alive on both sides, no buffering of
answers, sixteen upstream servers in turn, no access log.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from farhop_lab.bench.bodies import MODEL
from farhop_lab.bench.upstream import METRICS, MODELS, answer
from farhop_lab.world.certs import Pair

Targets = Sequence[tuple[str, int]]
_IDLE_S = 300

_NGINX = """daemon off;
master_process off;
worker_processes 1;
worker_rlimit_nofile {files};
pid {folder}/nginx.pid;
error_log stderr error;
events {{ worker_connections {connections}; }}
http {{
  access_log off;
  tcp_nodelay on;
  keepalive_timeout {idle}s;
  keepalive_requests 1000000000;
  client_max_body_size 64m;
  client_body_buffer_size 1m;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
{inner}
}}
"""


def nginx(folder: Path, files: int, inner: str) -> str:
    """Its configuration around the `http` block; `files`: the limit of open files."""
    return _NGINX.format(folder=folder, files=files, connections=files, idle=_IDLE_S, inner=inner)


def nginx_engines(
    folder: Path, hosts: Sequence[str], port: int, files: int, regions: dict[str, str] | None = None
) -> str:
    """An nginx that answers like an idle engine, at once. The token count of a prompt is derived from its size. At the
    hosts in `regions` it answers a global balancer in that region's name."""
    listen = "\n".join(f"    listen {host}:{port} backlog=4096;" for host in hosts)
    places = " ".join(f"{host} {region};" for host, region in (regions or {}).items())
    return nginx(folder, files, f"""  map $content_length $tokens {{
    default 256; "~^[0-9]{{5}}$" 8192; "~^[0-9]{{6}}$" 51200;
  }}
  map $content_length $cached {{
    default 180; "~^[0-9]{{5}}$" 5700; "~^[0-9]{{6}}$" 36000;
  }}
  map $server_addr $place {{ {places} }}
  map $http_x_farhop_hop $region {{ "" ""; default $place; }}
  server {{
{listen}
    default_type application/json;
    add_header x-farhop-region $region;
    location / {{ return 200 '{{"model_path":"bench"}}'; }}
    location = /health {{ return 200 ''; }}
    location = /v1/models {{ return 200 '{MODELS.decode()}'; }}
    location = /metrics {{ default_type text/plain; return 200 '{METRICS}'; }}
    location /v1/chat/completions {{ return 200 '{answer("$tokens", "$cached")}'; }}
  }}""")  # fmt: skip


def nginx_proxy(folder: Path, port: int, targets: Targets, files: int, pair: Pair | None = None) -> str:
    """nginx as the proxy."""
    tls = f"ssl_certificate {pair.cert_file}; ssl_certificate_key {pair.key_file};" if pair is not None else ""
    servers = "\n".join(f"    server {host}:{at};" for host, at in targets)
    return nginx(folder, files, f"""  upstream engines {{
{servers}
    keepalive 2048;
    keepalive_requests 1000000000;
    keepalive_timeout {_IDLE_S}s;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096{" ssl" if tls else ""};
    {tls}
    location / {{
      proxy_pass http://engines;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout {_IDLE_S}s;
    }}
  }}""")  # fmt: skip


def haproxy(port: int, targets: Targets, files: int, pem: str = "") -> str:
    """HAProxy with one thread. `pem`: a file with certificate and key, for TLS."""
    servers = "\n".join(f"  server engine{i} {host}:{at}" for i, (host, at) in enumerate(targets))
    return f"""global
  nbthread 1
  maxconn {files // 2 - 100}
defaults
  mode http
  maxconn {files // 2 - 100}
  timeout connect 5s
  timeout client {_IDLE_S}s
  timeout server {_IDLE_S}s
  option http-keep-alive
  http-reuse always
frontend clients
  bind 127.0.0.1:{port} backlog 4096{f" ssl crt {pem}" if pem else ""}
  default_backend engines
backend engines
  balance roundrobin
{servers}
"""


def envoy(port: int, targets: Targets, pair: Pair | None = None) -> str:
    """Envoy with a static cluster. Its configuration is YAML, and JSON is YAML."""
    many = 1_000_000
    manager = {
        "@type": _type("filters.network.http_connection_manager.v3.HttpConnectionManager"),
        "stat_prefix": "clients",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "engines", "timeout": "0s"}}],
                }
            ]
        },
        "http_filters": [
            {"name": "router", "typed_config": {"@type": _type("filters.http.router.v3.Router")}},
        ],
    }
    cluster = {
        "name": "engines",
        "type": "STATIC",
        "connect_timeout": "5s",
        "lb_policy": "ROUND_ROBIN",
        "circuit_breakers": {
            "thresholds": [{"max_connections": many, "max_pending_requests": many, "max_requests": many}]
        },
        "load_assignment": {
            "cluster_name": "engines",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(*at)}} for at in targets]}],
        },
    }
    chain: dict[str, object] = {"filters": [{"name": "http", "typed_config": manager}]}
    if pair is not None:
        files = {"certificate_chain": {"filename": pair.cert_file}, "private_key": {"filename": pair.key_file}}
        context = {
            "@type": _type("transport_sockets.tls.v3.DownstreamTlsContext"),
            "common_tls_context": {"tls_certificates": [files]},
        }
        chain["transport_socket"] = {"name": "tls", "typed_config": context}
    listener = {"address": _address("127.0.0.1", port), "filter_chains": [chain]}
    return msgspec.json.encode({"static_resources": {"listeners": [listener], "clusters": [cluster]}}).decode()


def envoy_picked(port: int, picker: int, targets: Targets) -> str:
    """Envoy with a picker on this port: bodies streamed both ways, endpoints as it decides."""
    config = msgspec.json.decode(envoy(port, targets))
    (listener,), (cluster,) = config["static_resources"]["listeners"], config["static_resources"]["clusters"]
    lb = "load_balancing_policies"
    source = {"metadata": {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint"}]}}
    served = {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint-served"}]}
    spread = {"name": "spread", "typed_config": {"@type": _type(f"{lb}.round_robin.v3.RoundRobin")}}
    override = {
        "@type": _type(f"{lb}.override_host.v3.OverrideHost"),
        "override_host_sources": [source],
        "selected_host_key": served,
        "fallback_policy": {"policies": [{"typed_extension_config": spread}]},
    }
    del cluster["lb_policy"]
    cluster["load_balancing_policy"] = {
        "policies": [{"typed_extension_config": {"name": "picked", "typed_config": override}}]
    }
    http = _type("upstreams.http.v3.HttpProtocolOptions")
    asked = {
        "name": "picker",
        "type": "STATIC",
        "connect_timeout": "5s",
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": http,
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        },
        "load_assignment": {
            "cluster_name": "picker",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address("127.0.0.1", picker)}}]}],
        },
    }
    config["static_resources"]["clusters"].append(asked)
    duplex, send = "FULL_DUPLEX_STREAMED", "SEND"
    processor = {
        "@type": _type("filters.http.ext_proc.v3.ExternalProcessor"),
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
        "message_timeout": "60s",
        "processing_mode": {
            "request_header_mode": send,
            "request_body_mode": duplex,
            "request_trailer_mode": send,
            "response_header_mode": send,
            "response_body_mode": duplex,
            "response_trailer_mode": send,
        },
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    }
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"].insert(0, {"name": "picker", "typed_config": processor})
    return msgspec.json.encode(config).decode()


def litellm(targets: Targets) -> str:
    """LiteLLM's proxy over OpenAI-compatible engines of one model, in turn; without keys, database or callbacks."""
    entries = [
        {
            "model_name": MODEL,
            "litellm_params": {"model": f"openai/{MODEL}", "api_base": f"http://{host}:{port}/v1", "api_key": "none"},
        }
        for host, port in targets
    ]
    keyless = {"dangerously_permit_weak_or_unset_master_key": True}  # otherwise it does not start
    settings = {"litellm_settings": {"num_retries": 0}, "general_settings": keyless}
    return msgspec.json.encode({"model_list": entries, **settings}).decode()


def _type(name: str) -> str:
    return f"type.googleapis.com/envoy.extensions.{name}"


def _address(host: str, port: int) -> dict[str, object]:
    return {"socket_address": {"address": host, "port_value": port}}
