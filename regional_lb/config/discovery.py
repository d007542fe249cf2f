"""Where replicas are found while a balancer runs, and what is taken for granted of those found there.

Never opens a connection, a file or a socket: whether a source is there shows when it is asked.
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from farhop.shell.config import Part, Seconds
from regional_lb.config.replica import Traits

Port = Annotated[int, Field(ge=1, le=65535)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]  # of an object in Kubernetes
_DOMAIN = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})")
_SELECTOR = r"^[A-Za-z0-9!=(), ._/-]{1,1024}$"


class Template(Traits):
    """What goes for every replica of a source, unless the source itself says otherwise of one."""

    scheme: Literal["http", "https"] = "http"


class FileSource(Part):
    """A file with a list of replicas, as `replicas` has them; looked at every `poll_s`."""

    kind: Literal["file"]
    path: Annotated[str, Field(min_length=1, max_length=4096)]
    poll_s: Seconds = 1.0
    replica: Template = Template()

    @property
    def label(self) -> str:
        """What it is called in the log and in /status."""
        return f"file {self.path}"


class EtcdSource(Part):
    """The region's keys `/farhop/v1/replica/<region>/<name>` in the balancer's own etcd."""

    kind: Literal["etcd"]
    replica: Template = Template()

    @property
    def label(self) -> str:
        """What it is called in the log and in /status."""
        return "etcd"


class DnsSource(Part):
    """A DNS name: `srv` gives hosts and ports, `address` (A and AAAA) hosts on `port`.

    What a name's owner lets be kept for less than `ttl_floor_s` or more than `ttl_ceiling_s` is kept so long all the
    same. `nameservers` are `address` or `address:port`; without any, the system's.
    """

    kind: Literal["dns"]
    host: str
    record: Literal["srv", "address"] = "srv"
    port: Port | None = None
    nameservers: list[str] = Field(default_factory=list, max_length=8)
    ttl_floor_s: Seconds = 5.0
    ttl_ceiling_s: Seconds = 60.0
    timeout_s: Seconds = 5.0
    replica: Template = Template()

    @field_validator("host")
    @classmethod
    def _domain(cls, host: str) -> str:
        if not _DOMAIN.fullmatch(host) or ".." in host or any(len(label) > 63 for label in host.split(".")):
            raise ValueError("must be a DNS name, such as _vllm._tcp.gpus.example or gpus.example")
        return host

    @field_validator("nameservers")
    @classmethod
    def _servers(cls, servers: list[str]) -> list[str]:
        for server in servers:
            nameserver(server)
        return servers

    @model_validator(mode="after")
    def _sound(self) -> DnsSource:
        if (self.record == "address") != (self.port is not None):
            raise ValueError("port: give one with `record: address`, and none with `srv`, whose records say it")
        if self.ttl_floor_s > self.ttl_ceiling_s:
            raise ValueError("ttl_floor_s: must not be above ttl_ceiling_s")
        return self

    @property
    def label(self) -> str:
        """What it is called in the log and in /status."""
        return f"dns {self.record} {self.host}" + (f":{self.port}" if self.port else "")


def nameserver(text: str) -> tuple[str, int]:
    """Address and port of `address`, `address:port` or `[v6]:port`. ValueError if it is neither."""
    host, _, port = text.rpartition(":") if text.count(":") == 1 or "]:" in text else (text, "", "53")
    try:
        address, number = str(ip_address(host.strip("[]"))), int(port)
    except ValueError:
        raise ValueError(f"{text[:64]!r} must be an IP address, or address:port") from None
    if not 1 <= number <= 65535:
        raise ValueError(f"{text[:64]!r}: a port is 1 to 65535")
    return address, number


class KubernetesSource(Part):
    """What Kubernetes knows: endpoints of a `service`, EndpointSlices by `selector`, or the pods of an InferencePool.

    `port` is a port's name or number where there are several. Without `api` the pod's own service account is used; an
    `http://` API (kubectl proxy) is asked without a token.
    """

    kind: Literal["kubernetes"]
    service: Name | None = None
    selector: Annotated[str, Field(pattern=_SELECTOR)] | None = None
    pool: Name | None = None
    namespace: Name | None = None
    port: Port | Annotated[str, Field(pattern=r"^[a-z0-9-]{1,63}$")] | None = None
    api: Annotated[str, Field(pattern=r"^https?://[^/\s?#@]{1,512}$")] | None = None
    token_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/token"  # noqa: S105 - a path
    ca_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"
    namespace_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
    replica: Template = Template()

    @model_validator(mode="after")
    def _one(self) -> KubernetesSource:
        if sum(what is not None for what in (self.service, self.selector, self.pool)) != 1:
            raise ValueError("give one of service, selector and pool")
        if self.pool is not None and self.port is not None:
            raise ValueError("port: an InferencePool says its own targetPorts; leave this out")
        return self

    @property
    def label(self) -> str:
        """What it is called in the log and in /status."""
        what = f"service {self.service}" if self.service else f"pool {self.pool}" if self.pool else self.selector
        return f"kubernetes {self.namespace or ''} {what}".replace("  ", " ")


SourceConfig = Annotated[FileSource | EtcdSource | DnsSource | KubernetesSource, Field(discriminator="kind")]
