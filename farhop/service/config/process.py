"""The configuration that both tiers share: admin port, keys, accounts, identity, limits. Never opens a connection.

Listeners and the connections to other processes are configured in `endpoints`.
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from farhop.accounts.prices import price_book
from farhop.config import (
    DAY_S,
    Bytes,
    ConfigError,
    Count,
    FromOutside,
    Part,
    Seconds,
    Secret,
    is_absent,
    left_out,
    rule,
)
from farhop.identity import certificate_names
from farhop.identity.hop_keys import HopError, read_keys
from farhop.identity.jwt_tokens import ANY_TENANT, LEEWAY_S_MAX, Algorithm, Issuer
from farhop.identity.operators import TOKEN_CHARS_MAX, TOKEN_CHARS_MIN, Operators, Right, digest_of
from farhop.relay.formats.field_guard import Guard
from farhop.relay.http.connection import ClientLimits
from farhop.relay.upstream.pool import UpstreamLimits
from farhop.relay.upstream.resumable import ResumeMode
from farhop.service.config import certificates
from farhop.service.config.endpoints import Etcd, Listen, Signing, check_files, host_of, is_loopback
from farhop.store.documents.report import MODELS_LIMIT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from topology.model import Topology

# A host name, an IPv4 address or an IPv6 one in brackets, and maybe a port.
REFETCH_S = 30.0  # between two requests for an issuer's keys, however many tokens name one that is not known
_ADVERTISE = r"^((\[[0-9A-Fa-f:.]{2,64}\]|[A-Za-z0-9][A-Za-z0-9._-]{0,252})(:[0-9]{1,5})?)?$"
_HOST_PORT = r"^[A-Za-z0-9]([A-Za-z0-9.-]{0,252}[A-Za-z0-9])?(:[0-9]{1,5})?$"


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


class AdminToken(Part):
    """A token of the admin port and its bearer's right: `metrics` (scrape), `read` (everything shown), or `act`."""

    token: Secret
    may: Right = "read"

    @model_validator(mode="after")
    def _long(self) -> AdminToken:
        text = self.token.get_secret_value()
        if not TOKEN_CHARS_MIN <= len(text) <= TOKEN_CHARS_MAX or not text.isascii() or not text.isprintable():
            raise ValueError(
                f"token: must be {TOKEN_CHARS_MIN} or more printable ASCII characters; `openssl rand -hex 32` makes one"
            )
        if " " in text:
            raise ValueError("token: must hold no space; `openssl rand -hex 32` makes one")
        return self


OperatorName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]


class Admin(Listen):
    """The port for operators and Prometheus. Off loopback, callers authenticate by token or certificate.

    `advertise` is the address for operators' commands, HOST or HOST:PORT, if it differs from the one listened on.
    `operators` gives the rights of operators named by certificates (with tls.client_ca_file); any other certificate may
    read.
    """

    advertise: Annotated[str, Field(pattern=_ADVERTISE)] = ""
    tokens: Annotated[dict[OperatorName, AdminToken], Field(max_length=256)] = Field(default_factory=dict)
    operators: Annotated[dict[OperatorName, Right], Field(max_length=1024)] = Field(default_factory=dict)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return is_loopback(self.host)

    @rule
    def _asks(self) -> Iterator[str]:
        certified = self.tls is not None and self.tls.client_ca_file is not None
        if self.operators and not certified:
            yield (
                "operators: are known by their certificates; give tls.client_ca_file, the authority that issues them"
            )
        if self.exposed and not certified and not self.tokens:
            yield (
                "tokens: are not given, nor is tls.client_ca_file, and the host is not loopback: anybody could read "
                "what it tells; give one of them, listen on 127.0.0.1, or say insecure: true"
            )

    def made(self, trust_domain: str) -> Operators:
        """The callers' rights. Off loopback without any credential configured, which is logged, no caller may act."""
        tokens = {name: (digest_of(one.token.get_secret_value()), one.may) for name, one in self.tokens.items()}
        return Operators(
            tokens,
            self.operators,
            trust_domain,
            certified=self.tls is not None and self.tls.client_ca_file is not None,
            anonymous="act" if self.is_local else "read",
        )

    def reached_at(self, port: int, host: str = "") -> str:
        """The HOST:PORT for operators' commands; `host` is this process's address for others, if known.

        "" if others cannot reach it: it listens on loopback.
        """
        if self.advertise:
            return self.advertise if _PORT.search(self.advertise) else f"{self.advertise}:{port}"
        if self.is_local:
            local = not host or is_loopback(host)
            return f"{_bracketed(self.host)}:{port}" if local else ""
        if _is_any(self.host):
            return f"{host}:{port}" if host else ""
        return f"{_bracketed(self.host)}:{port}"


_PORT = re.compile(r":[0-9]{1,5}$")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _is_any(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


class ClientListen(Listen):
    """The listener for clients. With `reuse_port` several instances share the port; each of them must set it."""

    reuse_port: bool = False

    @rule
    def _shared(self) -> Iterator[str]:
        if self.reuse_port and not self.port:
            yield "reuse_port: needs a port that is the same in every instance, not 0"


class Hop(Part):
    """Keys of the hop token between the tiers, by key id: the fleet's root, or this region's derived keys. `active`
    signs; all verify, so that keys can rotate."""

    keys: Annotated[dict[str, Secret], Field(min_length=1)]
    active: str

    @model_validator(mode="after")
    def _signs(self) -> Hop:
        known = read_keys(self.secrets())  # its HopError is a ValueError that names the key id, never the key
        if self.active not in known:
            raise HopError(f"hop keys: the active key id {self.active!r} is not among {', '.join(sorted(known))}")
        return self

    def secrets(self) -> dict[str, bytes]:
        """The key bytes, by key id."""
        return {kid: key.get_secret_value().encode() for kid, key in self.keys.items()}


def _unquoted(value: object) -> object:
    """Undo that YAML reads `off` as false."""
    return "off" if value is False else value


_Mode = Annotated[ResumeMode, BeforeValidator(_unquoted)]


class SessionConfig(Part):
    """Where a request's session is read from, in this order; "": not there. Only if a policy in force uses sessions."""

    header: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{0,64}$")] = "x-session-id"
    cookie: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{0,64}$")] = ""
    field: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{0,64}$")] = "user"


class ResumeConfig(Part):
    """Streams that continue elsewhere when their engine breaks. `exact`: by token ids, if the engine reports them
    (vLLM); `text`: also by their text, if it does not (SGLang); `off`: never. `modes`: by model."""

    mode: _Mode = "exact"
    modes: dict[Annotated[str, Field(min_length=1, max_length=256)], _Mode] = Field(
        default_factory=dict, max_length=MODELS_LIMIT
    )

    def of(self, model: str) -> ResumeMode:
        """How streams of a model may be continued."""
        return self.modes.get(model, self.mode)

    @property
    def on(self) -> bool:
        """Whether any stream may be continued."""
        return any(mode != "off" for mode in (self.mode, *self.modes.values()))


_PLAIN_URL = re.compile(r"https?://[^\s@]+\Z")


class UsageHttp(Part):
    """An additional receiver of usage: batches of CloudEvents, in the form of OpenMeter's `/api/v1/events`. It is
    located in `region` (default: this balancer's): records that a tenant's law forbids there are not sent."""

    url: Annotated[str, Field(max_length=2048)]
    token: Secret | None = None
    region: Annotated[str, Field(max_length=128)] = ""
    batch_max: Annotated[int, Field(ge=1, le=10_000)] = 500
    timeout_s: Seconds = 10.0
    insecure: bool = False

    @rule
    def _encrypted(self) -> Iterator[str]:
        if not _PLAIN_URL.match(self.url):
            yield "url: must be http(s)://host[:port]/path with no user in it; give a secret as `token`"
        if self.url.startswith("http:") and not self.insecure and not is_loopback(host_of(self.url)):
            yield "url: is http, and not on loopback; give an https URL, or say insecure: true"


Folder = Annotated[str, Field(min_length=1, max_length=4096)]
OnFull = Literal["serve", "refuse"]


class UsageConfig(Part):
    """Usage records, in files below `dir`, each instance's in a folder of its own. `on_full`: what becomes of requests
    while records cannot be written: served and counted as lost, or refused. `prices` is a price book."""

    dir: Folder
    on_full: OnFull = "serve"
    sync: Literal["always", "interval", "never"] = "interval"
    sync_s: Seconds = 1.0
    segment_bytes: Annotated[int, Field(ge=4096, le=1 << 34)] = 64 << 20
    segment_s: Seconds = 3600.0
    bytes_max: Annotated[int, Field(ge=65_536, le=1 << 44)] = 10 << 30
    keep_days: Annotated[float, Field(ge=0, le=36_500)] = 400.0
    prices: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    http: UsageHttp | None = None

    @model_validator(mode="after")
    def _sound(self, info: ValidationInfo) -> UsageConfig:
        if self.segment_bytes > self.bytes_max:
            raise ValueError("segment_bytes: is above bytes_max, so that no file would ever be whole; lower it")
        if self.prices is None:
            return self
        if Path(self.prices).exists():
            try:
                price_book(Path(self.prices))
            except ConfigError as error:
                raise ValueError("prices: " + "; ".join(str(error).splitlines())) from None
        elif not left_out(info, f"{self.prices}: no such file"):
            raise ValueError(f"prices: {self.prices} is not there; give the path of a price book, or leave it out")
        return self


class AuditConfig(Part):
    """The audit log, below `dir`, each instance's in a folder of its own. `key` signs its checkpoints: Ed25519, PEM.
    `origin` is the log's name, FLEET/REGION/INSTANCE below farhop.internal if left out."""

    dir: Folder
    key: Secret
    origin: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,255}$")] | None = None
    on_full: OnFull = "serve"

    @model_validator(mode="after")
    def _signs(self) -> AuditConfig:
        if not is_absent(self.key):
            self.signing_key()
        return self

    def signing_key(self) -> Ed25519PrivateKey:
        """The key that signs checkpoints. Raises ValueError with the remedy."""
        try:
            found = load_pem_private_key(self.key.get_secret_value().encode(), None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            found = None
        if not isinstance(found, Ed25519PrivateKey):
            raise ValueError(  # noqa: TRY004 - as that of whoever reads its name
                "key: is no Ed25519 private key in PEM; `openssl genpkey -algorithm ed25519` makes one"
            )
        return found


ClaimName = Annotated[str, Field(max_length=256)]
TenantName = Annotated[str, Field(min_length=1, max_length=128)]
PlaceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class Claims(Part):
    """The claims of a token that identify the caller, by name; "" none. Each named claim must be in every token."""

    tenant: ClaimName = ""
    user: ClaimName = "sub"
    priority: ClaimName = ""
    places: ClaimName = ""


class IssuerConfig(Part):
    """An identity provider: `issuer` and one of `audience` are in its tokens, its keys at `jwks_url`.

    It may authenticate `tenants`; `*`: all of the law. Without `claims.tenant` the only one named. Keys are fetched
    every `refresh_s`, and the last ones count for `stale_s` if that fails.
    """

    issuer: Annotated[str, Field(min_length=1, max_length=1024)]
    audience: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=1024)], ...], Field(min_length=1, max_length=64)
    ]
    jwks_url: Annotated[str, Field(max_length=2048)]
    algorithms: Annotated[tuple[Algorithm, ...], Field(min_length=1)]
    tenants: Annotated[tuple[TenantName, ...], Field(min_length=1, max_length=10_000)]
    claims: Claims = Claims()
    leeway_s: Annotated[float, Field(ge=0, le=LEEWAY_S_MAX)] = 10.0
    lifetime_s_max: Annotated[float, Field(gt=0, le=366 * DAY_S)] = DAY_S
    refresh_s: Annotated[float, Field(ge=REFETCH_S, le=DAY_S)] = 300.0
    stale_s: Annotated[float, Field(gt=0, le=30 * DAY_S)] = DAY_S
    ca_file: str | None = None
    insecure: bool = False

    @model_validator(mode="after")
    def _sound(self, info: ValidationInfo) -> IssuerConfig:
        if not _PLAIN_URL.match(self.jwks_url):
            raise ValueError("jwks_url: must be http(s)://host[:port]/path with no user in it; correct it")
        if self.jwks_url.startswith("http:") and not self.insecure and not is_loopback(host_of(self.jwks_url)):
            raise ValueError("jwks_url: is http, and not on loopback; give an https URL, or say insecure: true")
        if not self.claims.tenant and (len(self.tenants) != 1 or ANY_TENANT in self.tenants):
            raise ValueError("claims.tenant: is not given, and `tenants` names not just one; say which claim names it")
        if self.stale_s < self.refresh_s:
            raise ValueError("stale_s: is below refresh_s, so that keys would end before they are fetched; raise it")
        if self.ca_file is not None:
            check_files(self.files, info)
        return self

    @property
    def files(self) -> certificates.Files:
        """The paths, as farhop.service.config.certificates takes them."""
        return certificates.Files(is_server=False, ca_file=self.ca_file)

    def made(self, name: str) -> Issuer:
        """The issuer, as farhop.identity takes it."""
        claims = self.claims
        return Issuer(
            name, self.issuer, frozenset(self.audience), frozenset(self.algorithms), frozenset(self.tenants),
            claims.tenant, claims.user, claims.priority, claims.places, self.leeway_s, self.lifetime_s_max,
        )  # fmt: skip


class TenantCertificate(Part):
    """A client certificate, identified by its only URI, such as a SPIFFE ID: its tenant, and the places it is
    restricted to.
    """

    uri: Annotated[str, Field(pattern=r"^[a-z][a-z0-9+.-]*://[!-~]{1,2000}$")]
    tenant: TenantName
    within: Annotated[tuple[PlaceName, ...], Field(max_length=32)] = ()


class Identity(Part):
    """Authentication besides API keys: tokens by their issuer's name, and certificates of clients. `user_salt` hides
    the users named by tokens and requests in usage records, without it users are left out, and from limits' roots."""

    issuers: Annotated[dict[OperatorName, IssuerConfig], Field(max_length=64)] = Field(default_factory=dict)
    certificates: Annotated[dict[OperatorName, TenantCertificate], Field(max_length=10_000)] = Field(
        default_factory=dict
    )
    user_salt: Secret | None = None

    @rule
    def _distinct(self) -> Iterator[str]:
        for field, values in (
            ("issuers: two have the same `issuer`", [one.issuer for one in self.issuers.values()]),
            ("certificates: two have the same `uri`", [one.uri for one in self.certificates.values()]),
        ):
            if len(values) != len(set(values)):
                yield f"{field}; give each once"
        salt = self.user_salt
        if salt is not None and len(salt.get_secret_value()) < TOKEN_CHARS_MIN:
            yield f"user_salt: must be {TOKEN_CHARS_MIN} characters or more; `openssl rand -hex 32` makes one"

    @property
    def salt(self) -> bytes:
        """The bytes of `user_salt`; b"" without one."""
        return self.user_salt.get_secret_value().encode() if self.user_salt is not None else b""

    def check_entry(self, name: str, entry: Listen | None) -> None:
        """Raise ValueError if clients could not show the certificates that tenants are known by."""
        if self.certificates and entry is not None and (entry.tls is None or entry.tls.client_ca_file is None):
            raise ValueError(
                f"identity.certificates: are given, and {name}.tls.client_ca_file is not; give the authority that "
                "issues them"
            )


_IN, _OUT = ClientLimits(), UpstreamLimits()


class Limits(Part):
    """Limits of the data plane: bytes, counts and seconds. docs/reference/configuration.md explains each."""

    buffered_bytes_max: Bytes = 512 * 1024 * 1024
    body_bytes_max: Bytes = _IN.body_bytes_max
    head_bytes_max: Annotated[int, Field(ge=1024, le=1 << 20)] = _IN.head_bytes_max
    headers_max: Annotated[int, Field(ge=1, le=10_000)] = _IN.headers_max
    connections_max: Count = _IN.connections_max
    connections_per_client_max: Count = _IN.connections_per_client_max
    streams_per_upstream_max: Count = _OUT.streams_max
    upstream_idle_max: Annotated[int, Field(ge=0, le=1_000_000)] = _OUT.idle_max
    idle_s: Seconds = _IN.idle_s
    head_s: Seconds = _IN.head_s
    body_s: Seconds = _IN.body_s
    upload_s: Seconds = _IN.upload_s
    upload_bytes_per_s_min: Annotated[int, Field(ge=0, le=1 << 20)] = _IN.upload_bytes_per_s_min
    send_s: Seconds = _IN.send_s
    requests_max: Count = 20_000
    traced_per_s_max: Annotated[float, Field(ge=0, le=1e6)] = 100.0
    upstream_idle_s: Seconds = _OUT.idle_s
    request_s: Seconds = 600.0
    connect_s: Seconds = _OUT.connect_s
    first_byte_s: Seconds = _OUT.first_byte_s
    whole_answer_s: Seconds = _OUT.whole_answer_s
    between_bytes_s: Seconds = _OUT.between_bytes_s
    drain_s: Annotated[float, Field(ge=0, le=DAY_S)] = 30.0
    drain_idle_s: Annotated[float, Field(ge=0, le=DAY_S)] = _IN.drain_idle_s


class Requests(Part):
    """What a request may pass to an engine beyond the always permitted fields. Set it alike in both tiers; otherwise
    the stricter applies.

    `media_hosts` are `host` or `host:port`; engines may follow a redirect from there, so name no host that redirects.
    """

    media_hosts: Annotated[list[Annotated[str, Field(pattern=_HOST_PORT)]], Field(max_length=1024)] = Field(
        default_factory=list
    )
    unknown_fields: Literal["pass", "refuse"] = "pass"

    def guard(self) -> Guard:
        """The field guard of these settings."""
        return Guard(map(str.lower, self.media_hosts), refuse_unknown=self.unknown_fields == "refuse")


class Traces(Part):
    """Where the collector is that the OTEL_* variables name: in `region` (default: this balancer's). Spans of requests
    whose law allows no records there are not exported."""

    region: Annotated[str, Field(max_length=128)] = ""


class Member(Part):
    """The settings that every process of a fleet needs. `instance` names it, uniquely in its region.

    `etcd` with endpoints is the only cluster used. Without endpoints, the topology's hubs are, each configured by its
    name in `hubs`, else by `etcd`. `fleet` separates fleets that share one `state_dir`; without one nothing is kept on
    disk, a restart may return to an earlier law, and the process cannot start while etcd is silent.
    """

    elsewhere = dict.fromkeys(("regions", "countries", "jurisdictions", "rtt_ms", "tenants"), "a topology's")

    region: str
    instance: Annotated[str, FromOutside, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
    topology: str = "three-regions"
    admin: Admin
    etcd: Etcd = Etcd()
    hubs: dict[str, Etcd] = Field(default_factory=dict, max_length=64)
    signing: Signing = Signing()
    trust_domain: Annotated[str, Field(pattern=f"^{certificate_names.DOMAIN}$")] = certificate_names.TRUST_DOMAIN
    fleet: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")] = "fleet"
    state_dir: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    log_level: Annotated[Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(_lower)] = "info"


class Process(Member):
    """The settings that both tiers share. Without `usage` or `audit` no such records are written."""

    hop: Hop
    limits: Limits = Limits()
    requests: Requests = Requests()
    usage: UsageConfig | None = None
    audit: AuditConfig | None = None
    identity: Identity = Identity()
    traces: Traces = Traces()

    def collector_in(self, topology: Topology) -> str:
        """The region of the spans' collector, "" if it is this balancer's. Raises ConfigError if the map lacks it."""
        region = self.traces.region
        if region and region not in topology.regions:
            known = ", ".join(sorted(topology.regions)[:8])
            raise ConfigError("traces.region", [f"no region {region!r} in the topology; known are {known}"])
        return "" if region == self.region else region
