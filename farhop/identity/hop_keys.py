"""Keys of the hop token: one secret for the fleet, from which each region gets only what it needs.

    root                                          any text; its holder signs for, and checks, every region
    farhop-hop-to:<region>:<key>                  checks tokens to this region, from any issuer
    farhop-hop-from:<region>:<to>=<key>,<to>=...  signs tokens of this region's global balancers, to those regions

HKDF (RFC 5869) with SHA-256: the key of an audience from the root, that of an (issuer, audience) from the audience's.
Invariant: with a region's keys nothing can be forged for others, neither as another issuer nor to another audience,
only to itself. Never writes a key into a message.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Iterable, Mapping

import msgspec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY_BYTES_MIN = 16
DERIVED_BYTES = 32

_TO, _FROM = "farhop-hop-to:", "farhop-hop-from:"
_KID = re.compile(r"[A-Za-z0-9_-]{1,32}")
_REGION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class HopError(ValueError):
    """An unusable key or claim; the text is one line with its remedy."""


class HopKey(msgspec.Struct, frozen=True):
    """The secret of one key id: the root (`region` is empty), or one region's part of it. `by_audience`: derived keys.

    For a region that checks tokens (`signs` is False), the entry under its own name is the key that pairs are derived
    from; for a region that signs them, the entries are the pairs' keys.
    """

    root: bytes = b""
    region: str = ""
    signs: bool = False
    by_audience: dict[str, bytes] = {}

    def __repr__(self) -> str:
        return "HopKey(...)"  # never the key

    def pair(self, issuer: str, audience: str) -> bytes | None:
        """The key of tokens from `issuer` to `audience`, 32 bytes; None if it is not among ours."""
        if not self.region:
            return _derive(_derive(self.root, "to", audience), "from", issuer)
        known = self.by_audience.get(audience)
        if known is None or (self.signs and issuer != self.region):
            return None
        return known if self.signs else _derive(known, "from", issuer)

    @property
    def _role(self) -> str:
        return f"{'signs those of' if self.signs else 'checks those to'} {self.region!r}"

    def check_issuer(self, kid: str, region: str) -> None:
        """Raise HopError if it cannot sign for a region's global balancers."""
        if self.region and (not self.signs or self.region != region):
            raise HopError(
                f"hop keys: key {kid!r} does not sign tokens of region {region!r}, it {self._role}; "
                f"correct the region, or derive a key with: farhop certs hop-key --from {region}"
            )

    def check_audience(self, kid: str, region: str) -> None:
        """Raise HopError if it cannot check tokens to a region."""
        if self.region and (self.signs or self.region != region):
            raise HopError(
                f"hop keys: key {kid!r} does not check tokens to region {region!r}, it {self._role}; "
                f"correct the region, or derive a key with: farhop certs hop-key --to {region}"
            )


def read_keys(keys: Mapping[str, bytes]) -> dict[str, HopKey]:
    """Keys by key id, from the texts of a configuration. Raises HopError."""
    if not keys:
        raise HopError("hop keys: none given; configure at least one key id with its secret")
    for kid in keys:
        if not _KID.fullmatch(kid):
            raise HopError(f"hop keys: key id {kid!r} must be 1 to 32 of A-Z a-z 0-9 _ -; rename it")
    return {kid: _read(kid, text) for kid, text in keys.items()}


def _read(kid: str, text: bytes) -> HopKey:
    parts = text.decode("latin-1")
    try:
        if parts.startswith(_TO):
            region, _, key = parts.removeprefix(_TO).partition(":")
            return HopKey(region=_region(region), by_audience={region: _key(key)})
        if parts.startswith(_FROM):
            region, _, rest = parts.removeprefix(_FROM).partition(":")
            pairs = (one.partition("=") for one in rest.split(","))
            by_audience = {_region(to): _key(key) for to, _, key in pairs}
            return HopKey(region=_region(region), signs=True, by_audience=by_audience)
    except ValueError:
        raise HopError(
            f"hop keys: key {kid!r} begins like a derived key but is not one; derive it again: farhop certs hop-key"
        ) from None
    if len(text) < KEY_BYTES_MIN:
        raise HopError(
            f"hop keys: key {kid!r} has {len(text)} bytes, at least {KEY_BYTES_MIN} are needed; "
            "make one with: farhop certs hop-key"
        )
    return HopKey(root=text)


def key_to(root: bytes, region: str) -> str:
    """The key with which a region checks tokens."""
    return f"{_TO}{_region(region)}:{_text(_derive(root, 'to', region))}"


def key_from(root: bytes, region: str, audiences: Iterable[str]) -> str:
    """The key with which a region's global balancers sign tokens to those regions."""
    whole = HopKey(root=root)
    pairs = ((to, whole.pair(region, _region(to))) for to in sorted(audiences))
    return f"{_FROM}{_region(region)}:" + ",".join(f"{to}={_text(key)}" for to, key in pairs if key is not None)


def is_derived(text: str) -> bool:
    """Whether it is one region's key, and not a root."""
    return text.startswith((_TO, _FROM))


def body_key(pair: bytes) -> bytes:
    """The key of bodies' macs, 32 bytes, from that of the tokens that they are in."""
    return HKDF(SHA256(), DERIVED_BYTES, salt=None, info=b"farhop hop v3 body").derive(pair)


def _derive(key: bytes, role: str, region: str) -> bytes:
    info = f"farhop hop v2 {role} ".encode() + region.encode()
    return HKDF(SHA256(), DERIVED_BYTES, salt=None, info=info).derive(key)


def _region(name: str) -> str:
    if not _REGION.fullmatch(name):
        raise HopError(f"{name[:64]!r} is not the name of a region")
    return name


def _text(key: bytes) -> str:
    return urlsafe_b64encode(key).rstrip(b"=").decode()


def _key(text: str) -> bytes:
    try:
        key = urlsafe_b64decode(text + "==")
    except Base64Error:
        key = b""
    if len(key) != DERIVED_BYTES or _text(key) != text:
        raise ValueError
    return key
