"""The regional balancer's configuration file, checked whole. Never opens a connection."""

from __future__ import annotations

import re
from ipaddress import IPv6Address
from typing import Annotated

from pydantic import Field, SecretStr, field_validator, model_validator

from farhop.shell.config import ConnectTls, Entry, Listen, Process, Secret, Session
from farhop.store.report import GPU_TYPES_LIMIT, MODELS_LIMIT
from regional_lb.config.bounds import Foreign, Queue, Watch
from regional_lb.config.policy import PolicyConfig
from regional_lb.config.replica import Model, ReplicaConfig

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


class RegionalConfig(Process):
    """One regional balancer. `advertise` is the host by which the global tier reaches it.

    `policy` is for all models but those of `policies`.

    `prefix_nodes_per_s` bounds what each global balancer is told of the caches: 8 B a node.
    """

    tier: Listen
    control: Listen
    client: Entry | None = None
    advertise: str = "127.0.0.1"
    engine_key: Secret | None = None
    engine_tls: ConnectTls | None = None
    replicas: Annotated[list[ReplicaConfig], Field(min_length=1, max_length=4096)]
    queue: Queue = Queue()
    foreign: Foreign = Foreign()
    watch: Watch = Watch()
    policy: PolicyConfig = PolicyConfig()
    policies: dict[Model, PolicyConfig] = Field(default_factory=dict, max_length=MODELS_LIMIT)
    session: Session = Session()
    prefix_nodes_per_s: Annotated[int, Field(ge=1000, le=10_000_000)] = 50_000

    @field_validator("advertise")
    @classmethod
    def _host(cls, host: str) -> str:
        if _HOST.fullmatch(host):
            return host
        try:
            return f"[{IPv6Address(host[1:-1] if host.startswith('[') and host.endswith(']') else host)}]"
        except ValueError:
            raise ValueError("must be a host name or an address, without a port") from None

    @field_validator("engine_key")
    @classmethod
    def _one_header(cls, key: SecretStr | None) -> SecretStr | None:
        text = key.get_secret_value() if key is not None else "-"
        if not text.isascii() or not text.isprintable() or " " in text:
            raise ValueError("must be printable ASCII without spaces: it is sent as a bearer token")
        return key

    @model_validator(mode="after")
    def _encrypted(self) -> RegionalConfig:
        if (self.tier.tls is None) != (self.control.tls is None):
            raise ValueError("tier.tls, control.tls: give both or neither: the global tier speaks TLS to both or none")
        if self.engine_tls is not None and not any(replica.address.tls for replica in self.replicas):
            raise ValueError("engine_tls: no replica has an https:// url; give them one, or leave this out")
        return self

    @model_validator(mode="after")
    def _weighed(self) -> RegionalConfig:
        known = {replica.label for replica in self.replicas}
        for where, policy in (("policy", self.policy), *((f"policies.{m}", p) for m, p in self.policies.items())):
            for name in policy.weights.keys() - known:
                raise ValueError(
                    f"{where}.weights: no replica {name[:128]!r}; known are {', '.join(sorted(known)[:8])}"
                )
        for model in self.policies.keys() - {model for replica in self.replicas for model in replica.models}:
            raise ValueError(f"policies.{model}: no replica serves this model; correct its name, or leave it out")
        return self

    @model_validator(mode="after")
    def _unique(self) -> RegionalConfig:
        seen: set[str] = set()
        for replica in self.replicas:
            if replica.label in seen:
                raise ValueError(f"replicas: {replica.label} stands twice; give each its own url and name")
            seen.add(replica.label)
        for what, kinds, most in (
            ("models", {model for replica in self.replicas for model in replica.models}, MODELS_LIMIT),
            ("kinds of GPU", {replica.gpu for replica in self.replicas}, GPU_TYPES_LIMIT),
        ):
            if len(kinds) > most:
                raise ValueError(f"replicas: {len(kinds)} {what}, at most {most} in one balancer; run several")
        return self
