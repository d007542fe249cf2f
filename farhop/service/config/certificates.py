"""Loads certificates and keys from PEM files into TLS contexts, and reloads them when the files change.

Invariants: an unusable set never replaces a usable one (the last good set stays in force); peers are always verified
when we connect; no message contains any part of a key. Never reads a clock: the time is an argument.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc
    from structlog.typing import FilteringBoundLogger

LOOK_S = 5.0  # between two looks at the files: certificates are renewed hours before they must be
FILE_BYTES_MAX = 4 * 1024 * 1024
# TLS 1.2 with forward tls and authenticated encryption only; the suites of TLS 1.3 are all of that kind.
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"


class TlsError(ValueError):
    """Files that cannot be used; the text, one line, names the field, the file and the remedy."""


class TlsFileError(TlsError):
    """A file that is not here, or may not be read."""


class Files(msgspec.Struct, frozen=True):
    """The PEM files of one end. `is_server`: connections come to us. `ca_file`: the authorities that we trust; None:
    the system's.

    A server's `ca_file` is its `client_ca_file`: with it, clients must present a certificate, or may if `is_optional`.
    `protocol` is the application protocol, by its ALPN name.
    """

    is_server: bool
    cert_file: str | None = None
    key_file: str | None = None
    ca_file: str | None = None
    is_optional: bool = False
    protocol: str = "http/1.1"


class Material(msgspec.Struct, frozen=True):
    """The contents of the files, complete and valid. `not_after` is the certificate's end in epoch seconds, None
    without one."""

    context: ssl.SSLContext
    chain: bytes | None
    key: bytes | None
    ca: bytes | None
    not_after: float | None

    def __repr__(self) -> str:
        return "Material(...)"  # never the key

    def channel(self) -> grpc.ChannelCredentials:
        """The credentials of a gRPC channel."""
        import grpc  # not needed to check files

        return grpc.ssl_channel_credentials(self.ca, self.key, self.chain)

    def server(self) -> grpc.ServerCertificateConfiguration:
        """The certificate configuration of a gRPC server."""
        import grpc  # not needed to check files

        assert self.key is not None  # a server has both
        assert self.chain is not None
        return grpc.ssl_server_certificate_configuration([(self.key, self.chain)], self.ca)


def load(files: Files, at: datetime) -> Material:
    """Read, check, and make a context. `at` is the time of the wall clock. Raises TlsError."""
    if (files.cert_file is None) != (files.key_file is None):
        raise TlsError("cert_file, key_file: give both or neither")
    ca_field = "client_ca_file" if files.is_server else "ca_file"
    ca = None if files.ca_file is None else _read(ca_field, files.ca_file)
    if ca is not None:
        _certificates(ca_field, files.ca_file, ca)
    chain = key = not_after = None
    if files.cert_file is not None and files.key_file is not None:
        chain, key = _read("cert_file", files.cert_file), _read("key_file", files.key_file)
        not_after = _check_pair(files, chain, key, at)
    try:
        return Material(_context(files), chain, key, ca, not_after)
    except (ssl.SSLError, OSError) as error:  # replaced while we read it, or something only OpenSSL minds
        why = getattr(error, "reason", None) or error.strerror or "unusable"
        raise TlsError(f"{files.cert_file or files.ca_file}: {_plain(why)}; check the files") from None


def _read(field: str, name: str) -> bytes:
    try:
        with Path(name).open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise TlsFileError(f"{field}: {name}: {error.strerror}; check the path and its permissions") from None
    except ValueError:
        raise TlsError(f"{field}: a path holds no NUL") from None
    if len(data) > FILE_BYTES_MAX:
        raise TlsError(f"{field}: {name}: larger than {FILE_BYTES_MAX} bytes; is it a PEM file?")
    return data


def _certificates(field: str, name: str | None, data: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError:
        raise TlsError(f"{field}: {name}: holds no certificate that can be read; give a PEM file") from None


def _check_pair(files: Files, chain: bytes, key: bytes, at: datetime) -> float:
    """When the certificate ends, epoch seconds. Raises TlsError."""
    leaf = _certificates("cert_file", files.cert_file, chain)[0]
    begins, ends = leaf.not_valid_before_utc, leaf.not_valid_after_utc
    if at >= ends:
        raise TlsError(f"cert_file: {files.cert_file}: expired on {ends:%Y-%m-%d %H:%M} UTC; renew it")
    if at < begins:
        raise TlsError(f"cert_file: {files.cert_file}: not valid before {begins:%Y-%m-%d %H:%M} UTC; check the clock")
    try:
        private = serialization.load_pem_private_key(key, password=None)
    except TypeError:
        raise TlsError(f"key_file: {files.key_file}: is encrypted; give it without a passphrase") from None
    except (ValueError, UnsupportedAlgorithm):
        raise TlsError(f"key_file: {files.key_file}: holds no private key that can be read; give a PEM file") from None
    if private.public_key() != leaf.public_key():
        raise TlsError(
            f"key_file: {files.key_file}: is not the key of the certificate in {files.cert_file}; give its own"
        )
    return ends.timestamp()


def vouches(ca_file: str | None, cert_file: str | None) -> bool:
    """Whether an authority of one file issued a certificate of the other, or is contained in it; True if that is
    unknown: one of the two is not given, or not here."""
    if ca_file is None or cert_file is None:
        return True
    try:
        authorities = _certificates("", ca_file, _read("", ca_file))
        chain = _certificates("", cert_file, _read("", cert_file))
    except TlsError:
        return True
    return any(_issued(one, authority) for one in chain for authority in authorities)


def _issued(one: x509.Certificate, authority: x509.Certificate) -> bool:
    if one == authority:
        return True
    try:
        one.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):  # other names; a key of another kind; another key
        return False
    return True


def bears(cert_file: str, host: str) -> bool:
    """Whether a certificate is in the name of a host, or of all below a domain of its; True where it is not here."""
    try:
        leaf = _certificates("", cert_file, _read("", cert_file))[0]
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except TlsError:
        return True
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension):
        return False
    known = [one.lower() for one in names.get_values_for_type(x509.DNSName)]
    return host.lower() in known or f"*.{host.lower().partition('.')[2]}" in known


def _context(files: Files) -> ssl.SSLContext:
    purpose = ssl.Purpose.CLIENT_AUTH if files.is_server else ssl.Purpose.SERVER_AUTH
    context = ssl.create_default_context(purpose, cafile=files.ca_file)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    context.set_alpn_protocols([files.protocol])
    context.options |= ssl.OP_NO_RENEGOTIATION
    if files.is_server and files.ca_file is not None:
        context.verify_mode = ssl.CERT_OPTIONAL if files.is_optional else ssl.CERT_REQUIRED
    if files.cert_file is not None:
        context.load_cert_chain(files.cert_file, files.key_file, password=lambda: "")  # else OpenSSL asks the terminal
    return context


@functools.cache
def system_context() -> ssl.SSLContext:
    """The TLS context for outgoing connections without a configuration: the system's certificate authorities are
    trusted.
    """
    return _context(Files(is_server=False))


def _plain(reason: str) -> str:
    return reason.lower().replace("_", " ")


class Certificates:
    """The files of one part of the configuration, `name`, as last read whole and valid. Raises TlsError when made."""

    def __init__(self, name: str, files: Files, wall: Callable[[], datetime]) -> None:
        self.name, self._files, self._wall = name, files, wall
        self._stamp = _stamp(files)  # before reading: what changes meanwhile is read again
        self.material = load(files, wall())
        self.trouble: str | None = None
        self.changed: Callable[[], None] = lambda: None  # told of new material

    def context(self) -> ssl.SSLContext:
        """The TLS context for the next handshake."""
        return self.material.context

    def refresh(self) -> bool:
        """Read the files again if they changed; True if there is new material. Raises TlsError, once per change."""
        stamp = _stamp(self._files)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self.material = load(self._files, self._wall())
        except TlsError as error:
            self.trouble = str(error)
            raise
        self.trouble = None
        return True

    def server_credentials(self) -> grpc.ServerCredentials:
        """The credentials of a gRPC server, which looks for new certificates before every handshake."""
        import grpc  # not needed to check files

        given = self.material

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given
            if self.material is given:
                return None
            given = self.material
            return given.server()

        return grpc.dynamic_ssl_server_credentials(
            given.server(),
            fetch,  # type: ignore[arg-type]  # None is "nothing new", says gRPC; its stubs do not
            self._files.ca_file is not None,
        )


def _stamp(files: Files) -> tuple[tuple[int, int, int] | None, ...]:
    return tuple(_stamp_of(name) for name in (files.cert_file, files.key_file, files.ca_file) if name is not None)


def _stamp_of(name: str) -> tuple[int, int, int] | None:
    try:
        found = Path(name).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class TlsManager:
    """All certificates of a process. Their files are checked for changes every few seconds."""

    def __init__(self, log: FilteringBoundLogger, wall: Callable[[], datetime]) -> None:
        self._log, self._wall = log, wall
        self._all: list[Certificates] = []

    def add(self, name: str, files: Files) -> Certificates:
        """Read certificates and keep them current. Raises TlsError."""
        certificates = Certificates(name, files, self._wall)
        self._all.append(certificates)
        return certificates

    async def keep(self) -> None:
        """Look at the files for as long as the process lives."""
        while self._all:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Load changed files. An unusable file is logged as an error, and the previous one stays in use."""
        for certificates in self._all:
            try:
                renewed = await asyncio.to_thread(certificates.refresh)
            except TlsError as error:
                self._log.error("certificate rejected: the last good one stays in use", part=certificates.name,
                                problem=str(error))  # fmt: skip
                continue
            if renewed:
                self._log.warning("certificate renewed", part=certificates.name, until=self._until(certificates))
                certificates.changed()

    def _until(self, certificates: Certificates) -> str | None:
        not_after = certificates.material.not_after
        return None if not_after is None else datetime.fromtimestamp(not_after, UTC).isoformat()

    def not_after(self) -> dict[str, float]:
        """When each certificate ends, epoch seconds, by part of the configuration."""
        return {c.name: c.material.not_after for c in self._all if c.material.not_after is not None}

    def stale(self) -> dict[str, float]:
        """By part, 1 if its files changed to something unusable, so that the former certificates stay in use; else
        0.
        """
        return {c.name: float(c.trouble is not None) for c in self._all}
