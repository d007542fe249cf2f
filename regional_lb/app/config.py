"""The regional balancer's configuration file, checked whole. Never opens a connection."""

from __future__ import annotations

from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from farhop.balance.model_steps import NameRoute, names_of
from farhop.config import FromOutside, Model, Part, rule
from farhop.identity.hop_keys import HopError
from farhop.identity.hop_token import HopVerifier
from farhop.service.config.endpoints import Listen, is_loopback
from farhop.service.config.process import ClientListen, ResumeConfig, SessionConfig
from farhop.store.documents.report import CLIENT_URL, MODELS_LIMIT
from regional_lb.engines.config import EnginesConfig
from regional_lb.mesh.config import MeshConfig
from regional_lb.picker.config import PickerConfig
from regional_lb.scheduler.admission import ForeignConfig
from regional_lb.scheduler.policy import PolicyConfig
from regional_lb.scheduler.queue import QueueConfig
from regional_lb.scheduler.scaling import ScalingConfig
from regional_lb.scheduler.split import SplitConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

FilePath = Annotated[str, Field(min_length=1, max_length=4096)]


class RegionClientListen(ClientListen):
    """Where clients come. `url` is how those reach it whom a global balancer redirects; without it none are."""

    url: Annotated[str, FromOutside, Field(pattern=f"^{CLIENT_URL.pattern}$")] | None = None

    @rule
    def _own(self) -> Iterator[str]:
        if self.url is not None and self.reuse_port:
            yield "url: a token is for one instance; give each its own port, or leave reuse_port out"


class TokenizerFiles(Part):
    """A model's tokenizer.json and chat template; without a template, the one in the same directory
    (docs/understand/kv.md).
    """

    file: FilePath
    template: FilePath | None = None


class ReplicaResumeConfig(ResumeConfig):
    """As ResumeConfig, for replicas. `move_over_s`: streams of a drained replica leave it within this many seconds;
    None: they finish there.
    """

    move_over_s: Annotated[float, Field(ge=0.0, le=3600.0)] | None = None


class RegionalConfig(EnginesConfig, MeshConfig):
    """One regional balancer: the configuration of all its parts, in one file.

    `policy` and `scaling` are for all models but those of `policies` and `scalings`. `splits` are by model, between the
    versions of its replicas. `routes` are what names of models stand for at `client` (docs/operate/model-routes.md).
    `tokenizers` are by model; an adapter without one uses that of its replica's first model.
    """

    elsewhere: ClassVar = {
        **MeshConfig.elsewhere,
        **dict.fromkeys(("listen", "tier_tls"), "a global balancer's (farhop global)"),
    }

    tier: Listen
    client: RegionClientListen | None = None
    picker: PickerConfig | None = None
    queue: QueueConfig = QueueConfig()
    foreign: ForeignConfig = ForeignConfig()
    policy: PolicyConfig = PolicyConfig()
    policies: dict[Model, PolicyConfig] = Field(default_factory=dict, max_length=MODELS_LIMIT)
    scaling: ScalingConfig = ScalingConfig()
    scalings: dict[Model, ScalingConfig] = Field(default_factory=dict, max_length=MODELS_LIMIT)
    splits: dict[Model, SplitConfig] = Field(default_factory=dict, max_length=MODELS_LIMIT)
    routes: Annotated[tuple[NameRoute, ...], Field(max_length=4096)] = ()
    session: SessionConfig = SessionConfig()
    resume: ReplicaResumeConfig = ReplicaResumeConfig()
    tokenizers: dict[Model, TokenizerFiles] = Field(default_factory=dict, max_length=MODELS_LIMIT)

    @rule
    def _proven(self) -> Iterator[str]:
        for name, listen in (("tier", self.tier), ("control", self.control)):
            if listen.exposed and (listen.tls is None or listen.tls.client_ca_file is None):
                yield (
                    f"{name}.tls.client_ca_file: balancers must prove who they are to be believed off loopback; give "
                    f"the authority of their certificates (`farhop certs init` makes one), or say {name}.insecure: true"
                )

    @rule
    def _reached(self) -> Iterator[str]:
        for name, listen in (("tier", self.tier), ("control", self.control)):
            if not is_loopback(listen.host) and "advertise" not in self.model_fields_set:
                yield (
                    f"advertise: is not given, and {name} is not on loopback; give the host by which global balancers "
                    "and peers reach this process"
                )

    @rule
    def _known(self) -> None:
        self.identity.check_entry("client", self.client)

    @rule
    def _named(self) -> None:
        names_of(self.routes)

    @rule
    def _checks_tokens(self) -> Iterator[str]:
        try:
            HopVerifier(self.hop.secrets(), self.region)
        except HopError as error:
            yield f"hop: {error}"

    @rule
    def _encrypted(self) -> Iterator[str]:
        if (self.tier.tls is None) != (self.control.tls is None):
            yield "tier.tls, control.tls: give both or neither: the global tier speaks TLS to both or none"

    @rule
    def _weighed(self) -> Iterator[str]:
        known = {replica.label for replica in self.replicas}
        for field_path, policy in (("policy", self.policy), *((f"policies.{m}", p) for m, p in self.policies.items())):
            for name in policy.weights.keys() - known if not self.discovery else ():
                yield f"{field_path}.weights: no replica {name[:128]!r}; known are {', '.join(sorted(known)[:8])}"
        if self.discovery or not all(replica.models for replica in self.replicas):
            return
        served = {model for replica in self.replicas for model in replica.served}
        for field_path, named in (("policies", self.policies.keys()), ("tokenizers", self.tokenizers.keys())):
            for model in named - served:
                yield f"{field_path}.{model}: no replica serves this model; correct its name, or leave it out"

    @rule
    def _at_addresses(self) -> Iterator[str]:
        for replica in self.replicas if self.picker is not None else ():
            try:
                ip_address(replica.address.host)
            except ValueError:
                yield (
                    f"replicas: {replica.label} is at a name, and a gateway is told addresses; give it an IP address"
                )

    def tokenizer_of(self) -> dict[str, TokenizerFiles]:
        """The tokenizer files by model, adapters included."""
        known = dict(self.tokenizers)
        for replica in self.replicas:
            for adapter in replica.adapters:
                if replica.models[0] in known:
                    known.setdefault(adapter, known[replica.models[0]])
        return known

    @rule
    def _served(self) -> Iterator[str]:
        if self.discovery:
            return  # a replica found later may serve it
        for model, split in self.splits.items():
            known = {replica.version for replica in self.replicas if model in replica.models}
            for version in sorted(split.versions - known):
                there = ", ".join(sorted(known - {""})[:8]) or "none: give replicas a version"
                yield f"splits.{model}: no replica serves this model in version {version}; there is {there}"
