"""A real Envoy with the configuration that stands in deploy/, before a picker and engines of ours."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from farhop_lab.bench.proxies import PROXIES
from farhop_lab.world.child import Child
from farhop_lab.world.ports import free_ports

SAMPLE = Path(__file__).parents[2] / "deploy" / "envoy" / "picker.json"
ENVOY = next(proxy for proxy in PROXIES if proxy.name == "Envoy")
SUBSET_HEADER = "x-test-subset"  # of the client, standing in for a gateway's own narrowing of a request


def document(port: int, picker: int, engines: list[str]) -> dict[str, Any]:
    """The sample on this port, with this picker and these engines (`ip:port`)."""
    config: dict[str, Any] = json.loads(SAMPLE.read_text())
    listener, (ask, serve) = config["static_resources"]["listeners"][0], config["static_resources"]["clusters"]
    listener["address"] = _address(f"127.0.0.1:{port}")
    ask["type"] = "STATIC"
    ask["health_checks"][0] |= {"interval": "0.1s", "no_traffic_interval": "0.1s", "unhealthy_threshold": 1}
    ask["load_assignment"]["endpoints"] = _endpoints([f"127.0.0.1:{picker}"])
    serve["load_assignment"]["endpoints"] = _endpoints(engines)
    return config


def ask_of(config: dict[str, Any], picker: int, engines: list[str], name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sample's two clusters once more, for another pool: `picker-NAME` and `engines-NAME`."""
    found = deepcopy(config["static_resources"]["clusters"][:2])
    for cluster, places in zip(found, ([f"127.0.0.1:{picker}"], engines), strict=True):
        cluster["name"] += f"-{name}"
        cluster["load_assignment"] = {"cluster_name": cluster["name"], "endpoints": _endpoints(places)}
    return found[0], found[1]


def manager(config: dict[str, Any]) -> dict[str, Any]:
    """The HTTP connection manager."""
    found: dict[str, Any] = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    return found


def ext_proc(config: dict[str, Any]) -> dict[str, Any]:
    """The picker's filter."""
    found: dict[str, Any] = next(one for one in manager(config)["http_filters"] if one["name"] == "picker")
    typed: dict[str, Any] = found["typed_config"]
    return typed


def by_tls(ca_file: str, pair: tuple[str, str] | None) -> Callable[[dict[str, Any]], None]:
    """Envoy asks its picker by TLS, and shows this certificate and key, if any."""

    def change(config: dict[str, Any]) -> None:
        shown = [] if pair is None else [{"certificate_chain": _file(pair[0]), "private_key": _file(pair[1])}]
        common = {
            "alpn_protocols": ["h2"],
            "tls_certificates": shown,
            "validation_context": {"trusted_ca": _file(ca_file)},
        }
        kind = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
        socket = {"name": "tls", "typed_config": {"@type": kind, "common_tls_context": common}}
        config["static_resources"]["clusters"][0]["transport_socket"] = socket

    return change


def _file(path: str) -> dict[str, str]:
    return {"filename": path}


def narrow_by_header(config: dict[str, Any]) -> None:
    """A client's header becomes the subset hint."""
    rule = {
        "header": SUBSET_HEADER,
        "on_header_present": {
            "metadata_namespace": "envoy.lb.subset_hint",
            "key": "x-gateway-destination-endpoint-subset",
            "type": "STRING",
        },
        "remove": True,
    }
    kind = "type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config"
    filters = manager(config)["http_filters"]
    filters.insert(0, {"name": "subset", "typed_config": {"@type": kind, "request_rules": [rule]}})


@asynccontextmanager
async def envoy(
    folder: Path,
    picker: int,
    engines: list[str],
    change: Callable[[dict[str, Any]], None] = lambda _: None,
    *,
    at: str = "",
) -> AsyncIterator[int]:
    """Envoy until the end of the block; its port. `at`: where it listens; without, at a port of its own."""
    binary = ENVOY.find()
    assert binary is not None
    host, _, given = at.rpartition(":")
    port = int(given) if given else free_ports(1)[0]
    config = document(port, picker, engines)
    if host:
        config["static_resources"]["listeners"][0]["address"] = _address(at)
    change(config)
    file = folder / f"envoy-{port}.json"
    file.write_text(json.dumps(config))
    arguments = ["-c", str(file), "--concurrency", "1", "--disable-hot-restart", "--log-level", "error"]
    child = Child("envoy", arguments, folder / f"envoy-{port}.log", {}, [binary])
    try:
        await child.start_until(lambda: _listens(host or "127.0.0.1", port), 20.0)
        yield port
    finally:
        await child.stop(2.0)


async def _listens(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.transport.abort()
    return True


def _address(at: str) -> dict[str, Any]:
    host, _, port = at.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def _endpoints(places: list[str]) -> list[dict[str, Any]]:
    return [{"lb_endpoints": [{"endpoint": {"address": _address(at)}} for at in places]}]
