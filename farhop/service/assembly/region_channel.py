"""The gRPC channel to a regional balancer's control port, opened as configured.

Never judges the messages on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import msgspec

from farhop.balance.machine import Address
from farhop.store.grpc_options import FIXED_WINDOW

if TYPE_CHECKING:
    from farhop.service.config.certificates import Certificates
    from farhop.service.config.region_connections import RegionConnections


# gRPC reads a message whole before anybody may judge it: 4 MiB, its default, of small fields hold the loop for up to
# 0.3 s. A report of 256 models has some 100 KB, and whatever engines call theirs it has no more than this; a piece of a
# cache has 200. A law may be longer.
REPORT_BYTES_MAX = 1024 * 1024


def answers_at_most(service: str, sizes: dict[str, int]) -> str:
    """A gRPC service config, in bytes of a message by method of a regional balancer's service."""
    methods = [
        {"name": [{"service": f"farhop.wire.v1.{service}", "method": method}], "maxResponseMessageBytes": size}
        for method, size in sizes.items()
    ]
    return msgspec.json.encode({"methodConfig": methods}).decode()


_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Else channels to one address share a connection, and a new link is handed the dead one of the link before.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),  # `proxies` alone says what goes through one, not the environment
    *FIXED_WINDOW,
    (
        "grpc.service_config",
        answers_at_most("Region", {"Prefixes": 512 * 1024, "Reports": REPORT_BYTES_MAX, "Ping": 64 * 1024}),
    ),
)


def silence_s(ping_s: float) -> float:
    """How long a channel may be silent before gRPC pings it; as long again without an answer, and it is broken."""
    return max(1.0, 2.0 * ping_s)


def address_of(text: str) -> Address:
    """The address in `host:port`, as reports give it."""
    host, _, port = text.rpartition(":")
    return Address(host.strip("[]"), int(port))


def channel(
    config: RegionConnections, region: str, address: str, certificates: Certificates | None, ping_s: float
) -> grpc.aio.Channel:
    """A channel to a regional balancer, with TLS if configured. `ping_s`: the interval of keepalive traffic."""
    # Without these pings a path that swallows everything would look open for as long as TCP goes on trying.
    idle_ms = int(1e3 * silence_s(ping_s))
    waits = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    options = (*_OPTIONS, *((name, idle_ms) for name in waits), *_proxy_options(config.proxy(region)))
    host = address_of(address).host
    certified = config.certified_name(region)
    if certified is None:
        return grpc.aio.insecure_channel(address, options=options)
    assert certificates is not None  # where there is a name to verify there is whom to believe
    other = () if certified == host else (("grpc.ssl_target_name_override", certified),)
    return grpc.aio.secure_channel(address, certificates.material.channel(), options=(*options, *other))


def _proxy_options(proxy: Address | None) -> tuple[tuple[str, str], ...]:
    """Channel arguments for a proxy. By address, for any target: `grpc.http_proxy` would obey a stray no_proxy."""
    if proxy is None:
        return ()
    return (
        ("grpc.address_http_proxy", str(proxy)),
        ("grpc.address_http_proxy_enabled_addresses", "0.0.0.0/0,::/0"),
    )
