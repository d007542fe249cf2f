"""The fields of a context: a fleet's etcd, the way to its admin ports, the keys whose signatures count.

A model for `context`, which reads and writes the file. Opens nothing but the certificates named.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from farhop.config import Part, Secret
from farhop.identity import certificate_names
from farhop.service.config.endpoints import ConnectTls, Etcd, Signing

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
_URL = re.compile(r"https?://[A-Za-z0-9.:\[\]_-]{1,260}/?")


def _url(text: str) -> str:
    if not _URL.fullmatch(text):
        raise ValueError("is no URL of an admin port; give one such as https://10.1.0.7:8082")
    return text.rstrip("/")


Url = Annotated[str, AfterValidator(_url)]


class AdminPorts(ConnectTls):
    """The way to balancers' admin ports. `urls` are asked besides those that are found in etcd.

    `ca_file` is the authority of their certificates, `cert_file` and `key_file` are the operator's own. A balancer that
    was found must show a certificate of `server_name`, with `{region}` and `{tier}` replaced by its own; "" is for that
    of its host.
    """

    urls: Annotated[tuple[Url, ...], Field(max_length=1024)] = ()
    token: Secret | None = None
    server_name: Annotated[str, Field(pattern=r"^([A-Za-z0-9_.\-]|\{region\}|\{tier\}){0,253}$")] | None = None


class Context(Part):
    """One fleet. `world` is the file of one that `farhop up` runs; without it etcd, hubs or admin ports are given.

    `topology` is the map's file or name, if not the one that balancers report; `signing` is as in their configurations:
    the keys whose signatures count.
    """

    world: str | None = None
    etcd: Etcd = Etcd()
    hubs: dict[Name, Etcd] = Field(default_factory=dict, max_length=64)
    admin: AdminPorts = AdminPorts()
    topology: str | None = None
    signing: Signing = Signing()
    trust_domain: Annotated[str, Field(pattern=f"^{certificate_names.DOMAIN}$")] = certificate_names.TRUST_DOMAIN

    @model_validator(mode="after")
    def _somewhere(self) -> Context:
        if self.world is not None:
            return self
        if self.etcd.endpoints and self.hubs:
            raise ValueError("etcd.endpoints: they are one cluster, and `hubs` are several; leave one of them out")
        for name, hub in self.hubs.items():
            if not hub.endpoints:
                raise ValueError(f"hubs.{name}.endpoints: are not given; name at least one, such as etcd.example:2379")
        if not (self.etcd.endpoints or self.hubs or self.admin.urls):
            raise ValueError("etcd.endpoints: are not given, nor are hubs or admin.urls; give one of them")
        return self
