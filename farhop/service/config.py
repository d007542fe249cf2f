"""The configuration both tiers share: listeners, TLS, etcd, keys, limits. Never opens a connection."""

from __future__ import annotations

import re
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from farhop.config import DAY_S, Bytes, Count, FromOutside, Part, PublicKey, Seconds, Secret, is_absent, left_out
from farhop.identity import certificate_names
from farhop.identity.hop_keys import HopError, read_keys
from farhop.relay.formats.field_guard import Guard
from farhop.relay.http.connection import ClientLimits
from farhop.relay.upstream.pool import UpstreamLimits
from farhop.service import certificates
from farhop.service.clock import wall
from farhop.service.operators import TOKEN_CHARS_MAX, TOKEN_CHARS_MIN, Operators, Right, digest_of
from farhop.store import envelope
from farhop.store.etcd_link import EtcdSettings

# A host name, an IPv4 address or an IPv6 one in brackets, and maybe a port.
_ADVERTISE = r"^((\[[0-9A-Fa-f:.]{2,64}\]|[A-Za-z0-9][A-Za-z0-9._-]{0,252})(:[0-9]{1,5})?)?$"
_HOST_PORT = r"^[A-Za-z0-9]([A-Za-z0-9.-]{0,252}[A-Za-z0-9])?(:[0-9]{1,5})?$"


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _check_files(files: certificates.Files, info: ValidationInfo) -> None:
    """Raises TlsError, which is a ValueError that names the file."""
    try:
        certificates.load(files, wall())
    except certificates.TlsFileError as error:
        if not left_out(info, str(error).rpartition(";")[0]):
            raise


class ListenTls(Part):
    """TLS where others connect to us. With `client_ca_file` they must bring a certificate that it vouches for."""

    cert_file: str
    key_file: str
    client_ca_file: str | None = None
    handshake_s: Seconds = 10.0

    @model_validator(mode="after")
    def _valid(self, info: ValidationInfo) -> ListenTls:
        _check_files(self.files, info)
        return self

    @property
    def files(self) -> certificates.Files:
        """For farhop.service.certificates."""
        return certificates.Files(True, self.cert_file, self.key_file, self.client_ca_file)


class ConnectTls(Part):
    """TLS where we connect to others: whom we believe (None: the system's authorities), and who we are."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None

    @model_validator(mode="after")
    def _valid(self, info: ValidationInfo) -> ConnectTls:
        _check_files(self.files, info)
        return self

    @property
    def files(self) -> certificates.Files:
        """For farhop.service.certificates."""
        return certificates.Files(False, self.cert_file, self.key_file, self.ca_file)


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine is reached there; a name counts only if it is `localhost`."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class Listen(Part):
    """Where to listen. Port 0 lets the system choose. Off loopback it is with TLS, or `insecure` is said out loud."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)]
    tls: ListenTls | None = None
    insecure: bool = False

    @property
    def exposed(self) -> bool:
        """Whether others than this machine reach it, and it was not said that this may be without proof."""
        return not self.insecure and not is_loopback(self.host)

    @model_validator(mode="after")
    def _encrypted_or_said(self) -> Listen:
        if self.exposed and self.tls is None:
            raise ValueError(
                "tls: is not given, and the host is not loopback; give it (`farhop certs issue` makes certificates), "
                "listen on 127.0.0.1, or say insecure: true"
            )
        return self


class AdminToken(Part):
    """A token of the admin port and what who brings it may: scrape `metrics`, `read` all that is told, or `act`."""

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
    """Where operators and Prometheus come. Off loopback they say who they are, by a token or by a certificate.

    `advertise` is where operators' commands reach it, HOST or HOST:PORT, if that is not where it listens. `operators`
    says what the operators that certificates name may (with tls.client_ca_file); any other certificate may read.
    """

    advertise: Annotated[str, Field(pattern=_ADVERTISE)] = ""
    tokens: Annotated[dict[OperatorName, AdminToken], Field(max_length=256)] = Field(default_factory=dict)
    operators: Annotated[dict[OperatorName, Right], Field(max_length=1024)] = Field(default_factory=dict)

    @property
    def is_local(self) -> bool:
        """Whether nobody but this machine reaches it."""
        return is_loopback(self.host)

    @model_validator(mode="after")
    def _asks(self) -> Admin:
        certified = self.tls is not None and self.tls.client_ca_file is not None
        if self.operators and not certified:
            raise ValueError(
                "operators: are known by their certificates; give tls.client_ca_file, the authority that issues them"
            )
        if self.exposed and not certified and not self.tokens:
            raise ValueError(
                "tokens: are not given, nor is tls.client_ca_file, and the host is not loopback: anybody could read "
                "what it tells; give one of them, listen on 127.0.0.1, or say insecure: true"
            )
        return self

    def made(self, trust_domain: str) -> Operators:
        """Who may what. Off loopback without anything asked, which is said out loud, nobody may act."""
        tokens = {name: (digest_of(one.token.get_secret_value()), one.may) for name, one in self.tokens.items()}
        return Operators(
            tokens,
            self.operators,
            trust_domain,
            certified=self.tls is not None and self.tls.client_ca_file is not None,
            anybody="act" if self.is_local else "read",
        )

    def reached_at(self, port: int, host: str = "") -> str:
        """The HOST:PORT for operators' commands; `host` is where others reach this process, if that is known.

        "" where they cannot: it listens on loopback, and others would have to come from elsewhere.
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


class Entry(Listen):
    """Where clients come. With `reuse_port` several instances share the port, each of which must say so."""

    reuse_port: bool = False

    @model_validator(mode="after")
    def _shared(self) -> Entry:
        if self.reuse_port and not self.port:
            raise ValueError("reuse_port: needs a port that is the same in every instance, not 0")
        return self


class Hop(Part):
    """Keys of the hop token between the tiers, by key id: the fleet's root, or what this region was given of it.
    `active` signs; all verify, so that keys can rotate."""

    keys: Annotated[dict[str, Secret], Field(min_length=1)]
    active: str

    @model_validator(mode="after")
    def _signs(self) -> Hop:
        known = read_keys(self.secrets())  # its HopError is a ValueError that names the key id, never the key
        if self.active not in known:
            raise HopError(f"hop keys: the active key id {self.active!r} is not among {', '.join(sorted(known))}")
        return self

    def secrets(self) -> dict[str, bytes]:
        """Key bytes by key id."""
        return {kid: key.get_secret_value().encode() for kid, key in self.keys.items()}


class SigningKey(Part):
    """A public key (Ed25519: PEM, or the base64 of its 32 bytes; itself, or as secrets are given), and what it may
    sign: kinds of document, or `KIND/REGION` for one region's."""

    public: PublicKey
    may: Annotated[tuple[str, ...], Field(min_length=1, max_length=256)] = envelope.OPERATORS_KINDS

    @model_validator(mode="after")
    def _valid(self) -> SigningKey:
        if not is_absent(self.public):
            envelope.public_key(self.public)
        for right in self.may:
            envelope.check_right(right)
        return self


class Signing(Part):
    """Whose signatures count on documents in etcd, by the key's name. What any key may sign counts only signed."""

    keys: Annotated[dict[str, SigningKey], Field(max_length=256)] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _valid(self) -> Signing:
        self.made()
        return self

    def made(self) -> envelope.Keys:
        """For farhop.store."""
        return envelope.Keys({
            name: (envelope.public_key(key.public), key.may)
            for name, key in self.keys.items()
            if not is_absent(key.public)
        })  # fmt: skip


class Session(Part):
    """Where a request's session is looked for, in this order; "" not at all. Only if a policy in force goes by it."""

    header: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{0,64}$")] = "x-session-id"
    cookie: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{0,64}$")] = ""
    field: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{0,64}$")] = "user"


class ResumeConfig(Part):
    """Streams that go on from elsewhere when what answers them breaks. `exact`: by token ids, where the engine tells
    them (vLLM); `off`: never."""

    mode: Literal["exact", "off"] = "exact"


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


def host_of(endpoint: str) -> str:
    """The host of `host:port` or of a URL."""
    return urlsplit(endpoint if "://" in endpoint else f"//{endpoint}").hostname or ""


class Etcd(Part):
    """How to reach an etcd cluster; without endpoints it is the topology's hubs, each at the endpoints named there."""

    endpoints: list[str] = Field(default_factory=list)
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    username: str | None = None
    password: Secret | None = None
    insecure: bool = False

    @model_validator(mode="after")
    def _valid(self) -> Etcd:
        self.settings(("127.0.0.1:2379",))
        return self

    def settings(self, hub: tuple[str, ...]) -> EtcdSettings:
        """For the store; `hub` are the endpoints to use where none are configured. ValueError if they make no sense."""
        endpoints = tuple(self.endpoints) or hub
        made = EtcdSettings(
            endpoints=endpoints,
            ca_file=_path(self.ca_file),
            cert_file=_path(self.cert_file),
            key_file=_path(self.key_file),
            username=self.username,
            password=self.password.get_secret_value() if self.password else None,
        )
        if not all(made.tls(one) or is_loopback(host_of(one)) for one in endpoints):
            if self.password is not None:
                raise ValueError("ca_file: is not given, and a password never travels in plaintext; give it")
            if not self.insecure:
                raise ValueError(
                    "ca_file: is not given, and etcd is not on loopback; give it (with cert_file and key_file where "
                    "etcd asks for them), or say insecure: true"
                )
        return made


_IN, _OUT = ClientLimits(), UpstreamLimits()


class Limits(Part):
    """Bounds of the data plane. Bytes, counts and seconds; what each bounds stands in docs/reference."""

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
    """What of a request may reach an engine, beyond what always may. The same in both tiers, or the stricter holds.

    `media_hosts` are `host` or `host:port`; engines may follow a redirect from there, so name none that redirects.
    """

    media_hosts: Annotated[list[Annotated[str, Field(pattern=_HOST_PORT)]], Field(max_length=1024)] = Field(
        default_factory=list
    )
    unknown_fields: Literal["pass", "refuse"] = "pass"

    def guard(self) -> Guard:
        """As the relay has it."""
        return Guard(map(str.lower, self.media_hosts), refuse_unknown=self.unknown_fields == "refuse")


class Member(Part):
    """What every process of a fleet needs. `instance` names it, uniquely in its region.

    `etcd` with endpoints is the one cluster to use. Without, the topology's hubs are, each as `hubs` says by its name,
    else as `etcd` says. `fleet` tells apart what fleets keep in one `state_dir`; without one nothing is kept on disk,
    a restart may fall back to an earlier law, and there is no start while etcd is silent.
    """

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
    """What both tiers need."""

    hop: Hop
    limits: Limits = Limits()
    requests: Requests = Requests()
