"""DNSSEC, signed as answers are made: ECDSA P-256 with SHA-256 (algorithm 13, RFC 6605), and NSEC that covers one name.

A denial is compact (RFC 9824): an NSEC record at the queried name, whose next name is its direct successor, so that it
reveals no other name. Signatures are kept with their answers. Never reads a clock or a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from entry_dns.answers.message import DNSKEY, IN, NSEC, NXNAME, RRSIG

if TYPE_CHECKING:
    from collections.abc import Iterable

ALGORITHM = 13
ZONE_KEY, ENTRY_POINT = 256, 1  # DNSKEY flags (RFC 4034, 2.1.1)
SHA256 = 2  # a DS record's digest (RFC 4509)
KEYS_MAX = 8  # of one zone: each one's record is in every DNSKEY answer
# Validity, backdating for slow clocks, age at which it is made anew.
VALID_S, BACK_S, AGAIN_S = 3 * 86_400, 3600, 86_400


class KeyFileError(ValueError):
    """A key that cannot sign; the text says why."""


class Role(StrEnum):
    """The purpose of a key: signing a zone's keys (KSK), its records (ZSK), or both (CSK)."""

    CSK = "csk"
    KSK = "ksk"
    ZSK = "zsk"


class Stage(StrEnum):
    """Where a key is in its life (RFC 7583): published but not signing yet, signing, published but signing no more."""

    PUBLISHED = "published"
    ACTIVE = "active"
    RETIRED = "retired"


class ZoneKey:
    """A key of a zone: signs, and makes the DS record for its parent."""

    def __init__(self, pem: bytes, role: Role = Role.CSK, stage: Stage = Stage.ACTIVE) -> None:
        """`pem`: a private key on P-256, PKCS 8 or SEC 1. Raises KeyFileError."""
        try:
            key = serialization.load_pem_private_key(pem, None)
        except (ValueError, TypeError):
            raise KeyFileError("no private key in PEM without a password") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
            raise KeyFileError("not an ECDSA key on P-256; make one: openssl ecparam -name prime256v1 -genkey -noout")
        self._key = key
        numbers = key.public_key().public_numbers()
        public = numbers.x.to_bytes(32, "big") + numbers.y.to_bytes(32, "big")
        self.role, self.stage = role, stage
        flags = ZONE_KEY if role is Role.ZSK else ZONE_KEY | ENTRY_POINT
        self.dnskey = flags.to_bytes(2, "big") + bytes((3, ALGORITHM)) + public
        self.tag = key_tag(self.dnskey)

    def rrsig(self, owner: bytes, kind: int, ttl: int, rdatas: Sequence[bytes], zone: bytes, now: int) -> bytes:
        """The rdata of the signature over a set of records (RFC 4034, 3.1). `owner` and `zone` in lower case; rdatas as
        their canonical form, in any order. `now`: seconds since 1970."""
        labels = _labels(owner)
        head = (
            kind.to_bytes(2, "big") + bytes((ALGORITHM, labels)) + ttl.to_bytes(4, "big")
            + ((now + VALID_S) & 0xFFFFFFFF).to_bytes(4, "big") + ((now - BACK_S) & 0xFFFFFFFF).to_bytes(4, "big")
            + self.tag.to_bytes(2, "big") + zone
        )  # fmt: skip
        fixed = owner + kind.to_bytes(2, "big") + IN.to_bytes(2, "big") + ttl.to_bytes(4, "big")
        records = b"".join(fixed + len(rdata).to_bytes(2, "big") + rdata for rdata in sorted(rdatas))
        r, s = decode_dss_signature(self._key.sign(head + records, ec.ECDSA(hashes.SHA256())))
        return head + r.to_bytes(32, "big") + s.to_bytes(32, "big")


class ZoneKeys:
    """All keys of a zone. Every one is published; of the active ones, KSKs and CSKs sign the keys, ZSKs and CSKs all
    else (RFC 4035, 2.2).
    """

    def __init__(self, keys: Sequence[ZoneKey]) -> None:
        """KeyFileError if these cannot sign a zone."""
        if len(keys) > KEYS_MAX:
            raise KeyFileError(f"there are {len(keys)} keys; a zone has {KEYS_MAX} at most")
        active = [one for one in keys if one.stage is Stage.ACTIVE]
        self._over_keys = tuple(one for one in active if one.role is not Role.ZSK)
        self._over_all = tuple(one for one in active if one.role is not Role.KSK)
        if not self._over_keys:
            raise KeyFileError("no active key signs the keys; make a csk or a ksk active")
        if not self._over_all:
            raise KeyFileError("no active key signs the records; make a csk or a zsk active")
        if len({one.tag for one in keys}) < len(keys):
            raise KeyFileError("two keys have one tag: list each key once, or make another")
        self.keys = tuple(keys)
        self.dnskeys = tuple(one.dnskey for one in keys)
        self.entry_points = tuple(one.dnskey for one in self._over_keys)  # that a parent's DS records should name

    def rrsigs(self, owner: bytes, kind: int, ttl: int, rdatas: Sequence[bytes], zone: bytes, now: int) -> list[bytes]:
        """The rdata of each signature over a set of records; see ZoneKey.rrsig."""
        signers = self._over_keys if kind == DNSKEY and owner == zone else self._over_all
        return [one.rrsig(owner, kind, ttl, rdatas, zone, now) for one in signers]


def delegation(zone: bytes, dnskey: bytes) -> bytes:
    """The rdata of the DS record by which a parent names a key: SHA-256 (RFC 4034, 5.1.4; RFC 4509)."""
    digest = hashlib.sha256(zone + dnskey).digest()
    return key_tag(dnskey).to_bytes(2, "big") + bytes((dnskey[3], SHA256)) + digest


def key_tag(dnskey: bytes) -> int:
    """RFC 4034, appendix B."""
    total = sum(byte << 8 if at % 2 == 0 else byte for at, byte in enumerate(dnskey))
    return (total + (total >> 16)) & 0xFFFF


def _labels(owner: bytes) -> int:
    count, at = 0, 0
    while owner[at]:
        count += owner[at : at + 2] != b"\x01*"
        at += 1 + owner[at]
    return count


def nsec(name: bytes, types: Iterable[int], zone: bytes, *, exists: bool) -> bytes:
    """The rdata of an NSEC record with the types of a name in this zone, or for one that does not exist (RFC 9824)."""
    types_set = {RRSIG, NSEC, *types} if exists else {RRSIG, NSEC, NXNAME}
    windows: dict[int, bytearray] = {}
    for kind in sorted(types_set):
        bits = windows.setdefault(kind >> 8, bytearray())
        low = kind & 0xFF
        bits.extend(bytes(max(0, low // 8 + 1 - len(bits))))
        bits[low // 8] |= 0x80 >> (low % 8)
    listed = b"".join(bytes((window, len(bits))) + bits for window, bits in windows.items())
    return successor(name, zone) + listed


def successor(name: bytes, zone: bytes) -> bytes:
    """The direct successor of a name of the zone in canonical order (RFC 4034, 6.1; RFC 4471, 3.1.2), both in lower
    case; of the last possible one, the zone itself.

    Never the name itself: such a record would deny all other names of the zone.
    """
    if len(name) <= 253:
        return b"\x01\x00" + name
    while name != zone:
        label, above = name[1 : 1 + name[0]], name[1 + name[0] :]
        if len(name) < 255 and len(label) < 63:
            return bytes((len(label) + 1,)) + label + b"\x00" + above
        label = label.rstrip(b"\xff")
        if label:
            last = label[-1] + 1
            if last == ord("A"):
                last = ord("Z") + 1  # letters sort as small ones
            return bytes((len(label),)) + label[:-1] + bytes((last,)) + above
        name = above
    return zone


__all__ = [
    "AGAIN_S", "ALGORITHM", "DNSKEY", "KeyFileError", "Role", "Stage", "ZoneKey", "ZoneKeys", "delegation", "key_tag",
    "nsec", "successor",
]  # fmt: skip
