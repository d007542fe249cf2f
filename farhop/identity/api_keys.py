"""Who is asking: an API key becomes a tenant.

Configuration knows keys by their SHA-256 alone; a key's text lives in this process's memory only, never in a log or an
error.
Invariants: no answer but a positive one is remembered, and the memory is bounded; a malformed header is nobody.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from farhop.balance.outcome import MISSING_KEY, UNKNOWN_KEY, Outcome

if TYPE_CHECKING:
    from topology.model import Key, Tenant

    Lookup = Callable[[str], tuple[Tenant, Key] | None]

KEY_BYTES_MAX = 512
MEMO_MAX = 4096

# RFC 6750 §2.1: "Bearer" 1*SP b64token; the scheme is case-insensitive (RFC 9110 §11.1), spaces are bounded here.
_BEARER = re.compile(rb"(?i:bearer) {1,4}([A-Za-z0-9\-._~+/]{1,%d}=*)" % KEY_BYTES_MAX)


class Principal(msgspec.Struct, frozen=True):
    """Who a key speaks for. `within` are the places the key narrows its tenant to; empty means it narrows nothing."""

    tenant: str
    key_name: str
    within: tuple[str, ...] = ()


def digest(key: str) -> str:
    """SHA-256 of a key in lower-case hex (64 characters): the only form of a key that a topology holds.

    API keys are long random strings, so a slow password hash would buy nothing and cost every request.
    """
    return hashlib.sha256(key.encode()).hexdigest()


def bearer(header: bytes | None) -> str | None:
    """The key in an `Authorization` header's value, or None where there is none, or none that RFC 6750 allows."""
    if header is None or len(header) > KEY_BYTES_MAX + len("bearer") + 4:
        return None
    match = _BEARER.fullmatch(header)
    if match is None or len(match[1]) > KEY_BYTES_MAX:
        return None
    return match[1].decode("ascii")


def authorization(authorization: bytes | None, x_api_key: bytes | None) -> bytes | None:
    """The `Authorization` header that stands for what a client sent: its own, or else its `x-api-key`."""
    return b"Bearer " + x_api_key if authorization is None and x_api_key is not None else authorization


class Keyring:
    """Answers "who is this?" for one topology. `lookup` maps a key's digest to its tenant and key, in O(1).

    Swap the lookup with `replace` whenever the topology changes: a revoked key must not live on in the memo.
    """

    __slots__ = ("_lookup", "_memo")

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._memo: dict[bytes, Principal] = {}  # by the header's SHA-256: no key stands in memory in the clear

    def identify(self, authorization: bytes | None) -> Principal | Outcome:
        """The principal of an `Authorization` header, or MISSING_KEY / UNKNOWN_KEY. Never raises on what came in."""
        if authorization is None:
            return MISSING_KEY
        credential = hashlib.sha256(authorization).digest()
        known = self._memo.get(credential)
        return known if known is not None else self._learn(authorization, credential)

    def replace(self, lookup: Lookup) -> None:
        """Answer by another topology from now on; everything remembered is forgotten."""
        self._lookup = lookup
        self._memo = {}

    def _learn(self, authorization: bytes, credential: bytes) -> Principal | Outcome:
        key = bearer(authorization)
        if key is None:
            return MISSING_KEY
        found = self._lookup(digest(key))
        if found is None:
            return UNKNOWN_KEY  # not remembered: guesses would push real keys out of the memo
        tenant, entry = found
        principal = Principal(tenant.name, entry.name, tuple(entry.within))
        if len(self._memo) >= MEMO_MAX:
            del self._memo[next(iter(self._memo))]
        self._memo[credential] = principal
        return principal
