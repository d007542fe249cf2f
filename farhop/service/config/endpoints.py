"""How a process is reached and how it reaches others: listeners, TLS, etcd, and the signatures that count there.

Operators' commands use these parts, too, so nothing here imports a server. Never opens a connection.
"""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, model_validator

from farhop.config import Part, PublicKey, Seconds, Secret, is_absent, left_out, rule
from farhop.service.config import certificates
from farhop.service.process.clock import wall
from farhop.store import envelope
from farhop.store.etcd_settings import EtcdSettings

if TYPE_CHECKING:
    from collections.abc import Iterator


def check_files(files: certificates.Files, info: ValidationInfo) -> None:
    """Raises TlsError, which is a ValueError that names the file."""
    try:
        certificates.load(files, wall())
    except certificates.TlsFileError as error:
        if not left_out(info, str(error).rpartition(";")[0]):
            raise


class ListenTls(Part):
    """TLS of our listeners. With `client_ca_file`, clients must present a certificate issued by it; if
    `client_certificate` is optional (for clients' ports), only a presented certificate must be."""

    cert_file: str
    key_file: str
    client_ca_file: str | None = None
    client_certificate: Literal["required", "optional"] = "required"
    handshake_s: Seconds = 10.0

    @model_validator(mode="after")
    def _valid(self, info: ValidationInfo) -> ListenTls:
        check_files(self.files, info)
        return self

    @property
    def files(self) -> certificates.Files:
        """The paths, as farhop.service.config.certificates takes them."""
        optional = self.client_certificate == "optional"
        return certificates.Files(
            is_server=True,
            cert_file=self.cert_file,
            key_file=self.key_file,
            ca_file=self.client_ca_file,
            is_optional=optional,
        )


class ConnectTls(Part):
    """TLS of our connections to others: the authorities that we trust (None: the system's), and our own certificate."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None

    @model_validator(mode="after")
    def _valid(self, info: ValidationInfo) -> ConnectTls:
        check_files(self.files, info)
        return self

    @property
    def files(self) -> certificates.Files:
        """The paths, as farhop.service.config.certificates takes them."""
        return certificates.Files(
            is_server=False, cert_file=self.cert_file, key_file=self.key_file, ca_file=self.ca_file
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it; a name counts only if it is `localhost`."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class Listen(Part):
    """An address to listen on. Port 0: the system chooses. Off loopback it needs TLS, or an explicit `insecure`."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)]
    tls: ListenTls | None = None
    insecure: bool = False

    @property
    def exposed(self) -> bool:
        """Whether other hosts can reach it, and it was not configured that this may be without authentication."""
        return not self.insecure and not is_loopback(self.host)

    @rule
    def _encrypted_or_declared(self) -> Iterator[str]:
        if self.exposed and self.tls is None:
            yield (
                "tls: is not given, and the host is not loopback; give it (`farhop certs issue` makes certificates), "
                "listen on 127.0.0.1, or say insecure: true"
            )


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
        """The keys, as farhop.store takes them."""
        return envelope.Keys({
            name: (envelope.public_key(key.public), key.may)
            for name, key in self.keys.items()
            if not is_absent(key.public)
        })  # fmt: skip


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


def host_of(endpoint: str) -> str:
    """The host in `host:port` or in a URL."""
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

    @property
    def files(self) -> certificates.Files:
        """For `certificates`. Not looked at here: a process that knows the law starts without etcd."""
        return certificates.Files(
            is_server=False, cert_file=self.cert_file, key_file=self.key_file, ca_file=self.ca_file
        )

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
