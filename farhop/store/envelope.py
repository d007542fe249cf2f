"""A document in etcd with its author's signature: one envelope for laws, operators' documents and reports.

    {"envelope":1,"key":"ops-1","signature":"<base64>","document":{...}}

The signature (Ed25519) covers the document's etcd key and its exact bytes, so a document signed for one place is
invalid in any other, and etcdctl shows the signed text. Invariants: if a signing key is configured for a kind of
document, documents of that kind count only with the signature of a key that may sign them; sealing and opening do not
change a document. Never decides what a document means, or which of two is newer.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import TYPE_CHECKING

import msgspec
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from farhop.store.contract import (
    ENTRY_DRAIN_PREFIX,
    KEY_PREFIX,
    LAW_KEY,
    LIMIT_PREFIX,
    OVERRIDE_PREFIX,
    PICK_PREFIX,
    REFUSE_PREFIX,
    REGION_PREFIX,
    ROUTE_PREFIX,
    SPLIT_PREFIX,
    STEER_PREFIX,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

KEY_TEXT_MAX = 4096  # characters of a key in PEM
_BEGINS = b'{"envelope":1,'
_CONTEXT = b"farhop document v1\0"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_PREFIXES = {
    OVERRIDE_PREFIX: "drain",
    ENTRY_DRAIN_PREFIX: "drain",
    REFUSE_PREFIX: "drain",
    f"{STEER_PREFIX}bias/": "bias",
    f"{STEER_PREFIX}pin/": "pin",
    PICK_PREFIX: "policy",
    SPLIT_PREFIX: "split",
    ROUTE_PREFIX: "route",
    KEY_PREFIX: "key",
    LIMIT_PREFIX: "limit",
    REGION_PREFIX: "report",
}
KINDS = ("law", *dict.fromkeys(_PREFIXES.values()))
OPERATORS_KINDS = KINDS[:-1]
_REGIONAL = ("drain", "bias", "policy", "split", "route", "report")  # whose place names a region: `KIND/REGION`


class EnvelopeError(ValueError):
    """A document that does not count. `reason` is one of few words, for counters; the text says why to people."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Opened(msgspec.Struct, frozen=True):
    """A document, and the name of the key that signed it; "" if no signature was required."""

    document: bytes
    key: str


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    envelope: int
    key: str
    signature: str
    document: msgspec.Raw


_decoder = msgspec.json.Decoder(_Envelope)


def kind_of(place: str) -> tuple[str, str]:
    """The kind of the document at an etcd key, and its region; "" if it has none."""
    if place == LAW_KEY:
        return "law", ""
    for prefix, kind in _PREFIXES.items():
        if place.startswith(prefix):
            region = place[len(prefix) :].partition("/")[0] if kind in _REGIONAL else ""
            return kind, region
    return "", ""


def _read(value: bytes) -> _Envelope | None:
    """The envelope; None for a bare document. Raises EnvelopeError for what begins as one and is none."""
    if not is_sealed(value):
        return None
    try:
        return _decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EnvelopeError("malformed", f"begins like an envelope but is not one: {error}") from None


def is_sealed(value: bytes) -> bool:
    """Whether the value is an envelope, by its first bytes."""
    return value.startswith(_BEGINS)


def bare(value: bytes) -> bytes:
    """The document in an envelope, without verification; a bare document unchanged."""
    try:
        envelope = _read(value)
    except EnvelopeError:
        return value
    return value if envelope is None else bytes(envelope.document)


def key_named(value: bytes) -> str:
    """The name of the key that an envelope says it was signed with, unproven; "" for a bare document."""
    try:
        envelope = _read(value)
    except EnvelopeError:
        return ""
    return "" if envelope is None else envelope.key


def _signed_bytes(place: str, document: bytes) -> bytes:
    return _CONTEXT + place.encode() + b"\0" + document


class Signer:
    """Signs documents as the key of this name. `pem` is the private key, PKCS 8, not encrypted. Raises ValueError."""

    def __init__(self, name: str, pem: bytes) -> None:
        self.name = _checked(name)
        from cryptography.hazmat.primitives.serialization import load_pem_private_key  # slow: SSH keys, too

        try:
            key = load_pem_private_key(pem, None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            key = None  # no PEM, or one with a passphrase
        if not isinstance(key, Ed25519PrivateKey):
            remedy = "`openssl genpkey -algorithm ed25519` makes one"  # a ValueError, as that of whoever reads its name
            raise ValueError(f"not an Ed25519 private key in PEM without a passphrase; {remedy}")  # noqa: TRY004
        self._key = key

    @property
    def public(self) -> str:
        """Its public half, as configurations name it."""
        return base64.b64encode(self._key.public_key().public_bytes_raw()).decode()

    def seal(self, place: str, document: bytes) -> bytes:
        """The document in its envelope, for this key of etcd. The document must be JSON."""
        signature = base64.b64encode(self._key.sign(_signed_bytes(place, document))).decode()
        return msgspec.json.encode(_Envelope(1, self.name, signature, msgspec.Raw(document)))


class Keys:
    """The trusted keys: by name, the public key and what it may sign (a kind, or `KIND/REGION`)."""

    def __init__(self, keys: Mapping[str, tuple[Ed25519PublicKey, Collection[str]]]) -> None:
        self._keys = {_checked(name): (key, frozenset(may)) for name, (key, may) in keys.items()}
        self._signed = frozenset(one.partition("/")[0] for _, may in self._keys.values() for one in may)

    def asks(self, place: str) -> bool:
        """Whether the document at this key must be signed."""
        return kind_of(place)[0] in self._signed

    def open(self, place: str, value: bytes) -> Opened:
        """The document, if it counts there. Raises EnvelopeError."""
        envelope = _read(value)
        kind, region = kind_of(place)
        if kind not in self._signed:
            return Opened(value if envelope is None else bytes(envelope.document), "")
        if envelope is None:
            raise EnvelopeError("unsigned", f"it is not signed, and a {kind} must be")
        known = self._keys.get(envelope.key)
        if known is None:
            raise EnvelopeError("unknown_key", f"it is signed with key {envelope.key[:64]!r}, which is not configured")
        public, may = known
        if kind not in may and f"{kind}/{region}" not in may:
            raise EnvelopeError(
                "not_allowed", f"key {envelope.key!r} may not sign a {kind}{region and f' of {region}'}"
            )
        document = bytes(envelope.document)
        try:
            public.verify(base64.b64decode(envelope.signature, validate=True), _signed_bytes(place, document))
        except (InvalidSignature, binascii.Error, ValueError):
            raise EnvelopeError("bad_signature", f"the signature is not that of key {envelope.key!r}") from None
        return Opened(document, envelope.key)


NO_KEYS = Keys({})


def public_key(text: str) -> Ed25519PublicKey:
    """A public key, as PEM or as the base64 of its 32 bytes. Raises ValueError that names the remedy."""
    remedy = "give an Ed25519 public key, as PEM (`openssl pkey -pubout`) or the base64 of its 32 bytes"
    if len(text) > KEY_TEXT_MAX:
        raise ValueError(remedy)
    if "-----BEGIN" in text:
        from cryptography.hazmat.primitives.serialization import load_pem_public_key  # slow: SSH keys, too

        try:
            key = load_pem_public_key(text.encode())
        except (ValueError, UnsupportedAlgorithm):
            raise ValueError(remedy) from None
        if not isinstance(key, Ed25519PublicKey):
            raise ValueError(remedy)
        return key
    try:
        return Ed25519PublicKey.from_public_bytes(base64.b64decode(text.strip(), validate=True))
    except (binascii.Error, ValueError):
        raise ValueError(remedy) from None


def check_right(right: str) -> None:
    """Raise ValueError for what no key can be allowed to sign."""
    kind, slash, region = right.partition("/")
    if kind not in KINDS or (slash and (kind not in _REGIONAL or not region)):
        known = ", ".join(KINDS)
        raise ValueError(
            f"may: {right[:64]!r} is no kind of document; there is {known}, and KIND/REGION for a region's own"
        )


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name[:64]!r} is not a name of letters, digits, '.', '_', '-', at most 64 long")
    return name
