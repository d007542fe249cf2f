"""The configuration both tiers share: listeners, TLS, etcd, keys, limits. Never opens a connection."""

from __future__ import annotations

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
from farhop.store import envelope
from farhop.store.etcd_link import EtcdSettings

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


class Process(Part):
    """What both tiers need. `instance` names this process, uniquely in its region.

    `etcd` with endpoints is the one cluster to use. Without, the topology's hubs are, each as `hubs` says by its name,
    else as `etcd` says. `fleet` tells apart what fleets keep in one `state_dir`; without one nothing is kept on disk,
    a restart may fall back to an earlier law, and there is no start while etcd is silent.
    """

    region: str
    instance: Annotated[str, FromOutside, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
    topology: str = "three-regions"
    admin: Listen
    etcd: Etcd = Etcd()
    hubs: dict[str, Etcd] = Field(default_factory=dict, max_length=64)
    hop: Hop
    signing: Signing = Signing()
    trust_domain: Annotated[str, Field(pattern=f"^{certificate_names.DOMAIN}$")] = certificate_names.TRUST_DOMAIN
    fleet: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")] = "fleet"
    state_dir: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    limits: Limits = Limits()
    requests: Requests = Requests()
    log_level: Annotated[Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(_lower)] = "info"
