"""The regional balancer's configuration file, checked whole. Never opens a connection."""

from __future__ import annotations

import re
from ipaddress import IPv6Address
from typing import Annotated

from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator

from farhop.identity.hop import HopVerifier
from farhop.shell.config import ConnectTls, Entry, Listen, Part, Process, Secret, Session
from farhop.store import envelope
from farhop.store.contract import report_key
from farhop.store.report import CLIENT_URL, GPU_TYPES_LIMIT, MODELS_LIMIT
from regional_lb.config.bounds import Foreign, Queue, Watch
from regional_lb.config.discovery import SourceConfig
from regional_lb.config.health import Health
from regional_lb.config.peers import Peers
from regional_lb.config.policy import PolicyConfig
from regional_lb.config.replica import Model, ReplicaConfig
from regional_lb.config.split import SplitConfig
from regional_lb.config.tokenizer import TokenizerFiles

REPLICAS_MAX = 16_384  # of one balancer, wherever they come from
SOURCES_MAX = 32
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


class ClientEntry(Entry):
    """Where clients come. `url` is how those reach it whom a global balancer redirects; without it none are."""

    url: Annotated[str, Field(pattern=f"^{CLIENT_URL.pattern}$")] | None = None

    @model_validator(mode="after")
    def _own(self) -> ClientEntry:
        if self.url is not None and self.reuse_port:
            raise ValueError("url: a token is for one instance; give each its own port, or leave reuse_port out")
        return self


class ReportKey(Part):
    """The key that seals our reports in etcd: its name under `signing.keys`, and its private half (Ed25519, PEM)."""

    name: str
    private: Secret

    @model_validator(mode="after")
    def _sound(self) -> ReportKey:
        self.signer()
        return self

    def signer(self) -> envelope.Signer:
        """For farhop.store. Raises ValueError."""
        return envelope.Signer(self.name, self.private.get_secret_value().encode())


class RegionalConfig(Process):
    """One regional balancer. `advertise` is the host by which the global tier reaches it. `replicas` are fixed,
    `discovery` finds more of them at work.

    `policy` is for all models but those of `policies`. `splits` are by model, between the versions of its replicas.

    `tokenizers` are by model; an adapter that has none is read by that of its replica's first model.

    Reports go to the region's hub and to `remote_hub`: one by name, the `nearest` by wire time, or `none`.

    `prefix_nodes_per_s` bounds what each global balancer is told of the caches: 8 B a node.
    """

    tier: Listen
    control: Listen
    client: ClientEntry | None = None
    advertise: str = "127.0.0.1"
    engine_key: Secret | None = None
    engine_tls: ConnectTls | None = None
    discovery: list[SourceConfig] = Field(default_factory=list, max_length=SOURCES_MAX)
    replicas: list[ReplicaConfig] = Field(default_factory=list, max_length=REPLICAS_MAX, validate_default=True)
    queue: Queue = Queue()
    foreign: Foreign = Foreign()
    watch: Watch = Watch()
    health: Health = Health()
    peers: Peers = Peers()
    remote_hub: Annotated[str, Field(min_length=1, max_length=128)] = "nearest"
    policy: PolicyConfig = PolicyConfig()
    policies: dict[Model, PolicyConfig] = Field(default_factory=dict, max_length=MODELS_LIMIT)
    splits: dict[Model, SplitConfig] = Field(default_factory=dict, max_length=MODELS_LIMIT)
    session: Session = Session()
    tokenizers: dict[Model, TokenizerFiles] = Field(default_factory=dict, max_length=MODELS_LIMIT)
    report_key: ReportKey | None = None
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

    @field_validator("discovery")
    @classmethod
    def _once(cls, discovery: list[SourceConfig]) -> list[SourceConfig]:
        seen: set[str] = set()
        for source in discovery:
            if source.label in seen:
                raise ValueError(f"{source.label} stands twice; leave one out")
            seen.add(source.label)
        return discovery

    @field_validator("replicas")
    @classmethod
    def _some(cls, replicas: list[ReplicaConfig], info: ValidationInfo) -> list[ReplicaConfig]:
        if not replicas and not info.data.get("discovery", True):  # absent where it is itself in error
            raise ValueError("there is none; list one or more, or say under `discovery` where they are found")
        return replicas

    @field_validator("engine_key")
    @classmethod
    def _one_header(cls, key: SecretStr | None) -> SecretStr | None:
        text = key.get_secret_value() if key is not None else "-"
        if not text.isascii() or not text.isprintable() or " " in text:
            raise ValueError("must be printable ASCII without spaces: it is sent as a bearer token")
        return key

    @property
    def report_signer(self) -> envelope.Signer | None:
        """What seals our reports in etcd; None: nothing does."""
        return None if self.report_key is None else self.report_key.signer()

    @model_validator(mode="after")
    def _counts(self) -> RegionalConfig:
        """What we sign must count here, too: all balancers of a fleet know the same keys."""
        place, document, signer = report_key(self.region, self.instance), b"{}", self.report_signer
        try:
            self.signing.made().open(place, document if signer is None else signer.seal(place, document))
        except envelope.EnvelopeError as error:
            raise ValueError(
                f"report_key: our own reports would not count: {error}; give the private half of a key under "
                f"signing.keys that may sign report/{self.region}"
            ) from None
        return self

    @model_validator(mode="after")
    def _proven(self) -> RegionalConfig:
        for name, listen in (("tier", self.tier), ("control", self.control)):
            if listen.exposed and (listen.tls is None or listen.tls.client_ca_file is None):
                raise ValueError(
                    f"{name}.tls.client_ca_file: balancers must prove who they are to be believed off loopback; give "
                    f"the authority of their certificates (`farhop certs init` makes one), or say {name}.insecure: true"
                )
        return self

    @model_validator(mode="after")
    def _checks_tokens(self) -> RegionalConfig:
        HopVerifier(self.hop.secrets(), self.region)
        return self

    @model_validator(mode="after")
    def _encrypted(self) -> RegionalConfig:
        if (self.tier.tls is None) != (self.control.tls is None):
            raise ValueError("tier.tls, control.tls: give both or neither: the global tier speaks TLS to both or none")
        if self.peers.tls is not None and self.control.tls is None:
            raise ValueError("peers.tls: control.tls is not given, and peers speak as it does; give both or neither")
        # What is found later may have any scheme, any name and any model: then only what is listed can be wrong.
        if (
            self.engine_tls is not None
            and not self.discovery
            and not any(replica.address.tls for replica in self.replicas)
        ):
            raise ValueError("engine_tls: no replica has an https:// url; give them one, or leave this out")
        return self

    @model_validator(mode="after")
    def _decoded(self) -> RegionalConfig:
        answered = {model for replica in self.replicas if replica.role != "prefill" for model in replica.models}
        for replica in self.replicas:
            if alone := set(replica.models) - answered:
                raise ValueError(
                    f"replicas: {min(alone)[:128]!r} has replicas of role prefill only; give it one of role decode or "
                    "mixed, which answers"
                )
        prefilled = {m for r in self.replicas if (r.role, r.handover) == ("prefill", "sglang") for m in r.models}
        for replica in self.replicas if not self.discovery else ():
            if (replica.role, replica.handover) == ("decode", "sglang") and (alone := set(replica.models) - prefilled):
                raise ValueError(
                    f"replicas: {min(alone)[:128]!r} has a decode engine of SGLang's, which answers nothing alone, and "
                    "none of role prefill with disaggregation: sglang; give it one"
                )
        return self

    @model_validator(mode="after")
    def _weighed(self) -> RegionalConfig:
        known = {replica.label for replica in self.replicas}
        for where, policy in (("policy", self.policy), *((f"policies.{m}", p) for m, p in self.policies.items())):
            for name in policy.weights.keys() - known if not self.discovery else ():
                raise ValueError(
                    f"{where}.weights: no replica {name[:128]!r}; known are {', '.join(sorted(known)[:8])}"
                )
        if self.discovery or not all(replica.models for replica in self.replicas):
            return self
        served = {model for replica in self.replicas for model in replica.served}
        for where, named in (("policies", self.policies.keys()), ("tokenizers", self.tokenizers.keys())):
            for model in named - served:
                raise ValueError(f"{where}.{model}: no replica serves this model; correct its name, or leave it out")
        return self

    def tokenizer_of(self) -> dict[str, TokenizerFiles]:
        """By model, adapters included."""
        known = dict(self.tokenizers)
        for replica in self.replicas:
            for adapter in replica.adapters:
                if replica.models[0] in known:
                    known.setdefault(adapter, known[replica.models[0]])
        return known

    @model_validator(mode="after")
    def _served(self) -> RegionalConfig:
        if self.discovery:
            return self  # who will be found may serve it
        for model, split in self.splits.items():
            known = {replica.version for replica in self.replicas if model in replica.models}
            for version in sorted(split.versions - known):
                there = ", ".join(sorted(known - {""})[:8]) or "none: give replicas a version"
                raise ValueError(f"splits.{model}: no replica serves this model in version {version}; there is {there}")
        return self

    @model_validator(mode="after")
    def _unique(self) -> RegionalConfig:
        seen: set[str] = set()
        for replica in self.replicas:
            if replica.label in seen:
                raise ValueError(f"replicas: {replica.label} stands twice; give each its own url and name")
            seen.add(replica.label)
        for what, kinds, most in (
            ("models", {model for replica in self.replicas for model in replica.served}, MODELS_LIMIT),
            ("kinds of GPU", {replica.gpu for replica in self.replicas}, GPU_TYPES_LIMIT),
        ):
            if len(kinds) > most:
                raise ValueError(f"replicas: {len(kinds)} {what}, at most {most} in one balancer; run several")
        return self
