"""Authenticates a caller: an API key, or a token, becomes a tenant.

The configuration holds only SHA-256 hashes of keys; a key's text exists only in this process's memory, never in a log
or an error. Issued keys (`farhop key`) are `fh_`, 30 random characters and 6 of CRC-32, all in base62: 178 bits, so
that SHA-256 at rest is enough, and a mistyped key is recognised without a look-up. Invariants: only positive results
are remembered, and the memory is bounded; a malformed header authenticates no caller; validity by the clock is checked
at every use, and a clock set back does not revive an expired key.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Protocol

import msgspec

from farhop.balance.outcome import INVALID_FIELD, KEY_NOT_VALID, MISSING_KEY, UNKNOWN_KEY, Outcome

if TYPE_CHECKING:
    from topology.model import Key, Tenant

    Lookup = Callable[[str], tuple[Tenant, Key] | None]

KEY_BYTES_MAX = 512
MEMO_MAX = 4096
PRIORITY_MAX = 9  # as in a law
ISSUED = "fh_"
CHANCE_CHARS, CHECK_CHARS = 30, 6
BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

# RFC 6750 §2.1: "Bearer" 1*SP b64token; the scheme is case-insensitive (RFC 9110 §11.1), spaces are bounded here.
_BEARER = re.compile(rb"(?i:bearer) {1,4}([A-Za-z0-9\-._~+/]{1,%d}=*)" % KEY_BYTES_MAX)


class Principal(msgspec.Struct, frozen=True):
    """The tenant that a credential authenticates. `within` are the places that the key narrows its tenant to; empty: no
    narrowing.

    `key_id` names the credential: an issued key by its id, an issuer of tokens as `jwt:NAME`, a certificate as
    `cert:NAME`. `user` is the salted hash of the user in a token, `priority_max` the highest priority of its requests.
    `explain`: an issued key whose clients may ask for route receipts.
    """

    tenant: str
    key_name: str
    within: tuple[str, ...] = ()
    key_id: str = ""
    models: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    user: str = ""
    priority_max: int = PRIORITY_MAX
    explain: bool = False


class NotIdentified(msgspec.Struct, frozen=True):
    """Why a token or certificate authenticates nobody: the outcome, and the text for the client. The text never quotes
    the credential.
    """

    outcome: Outcome
    detail: str


TWO_CALLERS = NotIdentified(
    INVALID_FIELD, "`authorization` and `x-api-key` hold keys of two different callers: send one of them"
)
TOO_LONG = NotIdentified(UNKNOWN_KEY, f"this is no API key: none has more than {KEY_BYTES_MAX} characters")


class SignedTokens(Protocol):
    """Signed tokens that authenticate a caller (farhop.identity.jwt_tokens)."""

    def known(self, credential: bytes) -> Principal | None:
        """The principal of a token that was verified before, by the SHA-256 of its header; None if it was not."""

    def identify(self, authorization: bytes, credential: bytes) -> Principal | NotIdentified | None:
        """The principal of the token in an `Authorization` header, or why it authenticates nobody; None: the header
        holds no token.
        """


class Issued(msgspec.Struct, frozen=True):
    """A key that was issued. `principal` has its scopes: empty ones narrow nothing. Times in epoch seconds."""

    principal: Principal
    not_before_s: float = 0.0
    expires_s: float = inf
    revoked: bool = False

    def valid(self, now_s: float) -> bool:
        """Whether the key may be used at this time (seconds since 1970)."""
        return not self.revoked and self.not_before_s <= now_s < self.expires_s


def no_issued_key(_sha256: str) -> Issued | None:
    """The look-up of a process to which no keys are issued."""
    return None


def with_checksum(chance: str) -> str:
    """The key of 30 base62 characters of chance."""
    check, number = "", zlib.crc32(chance.encode())
    for _ in range(CHECK_CHARS):
        number, digit = divmod(number, len(BASE62))
        check = BASE62[digit] + check
    return f"{ISSUED}{chance}{check}"


def mistyped(key: str) -> bool:
    """Whether it begins as an issued key does, and its length or its checksum says that it is none."""
    if not key.startswith(ISSUED):
        return False
    chance = key[len(ISSUED) : len(ISSUED) + CHANCE_CHARS]
    return len(chance) != CHANCE_CHARS or with_checksum(chance) != key


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


class Keyring:
    """Answers "who is this?" for one topology. `lookup` maps a key's digest to its tenant and key, in O(1).

    `issued` maps it to a key that was issued beside the topology, and `wall_s` is the time, in epoch seconds. Swap the
    lookup with `replace` whenever the topology changes, and `forget` whenever what is issued does: a revoked key must
    not live on in the memo. `tokens` are asked about what is no key; they remember for themselves.
    """

    __slots__ = ("_issued", "_latest_s", "_lookup", "_tokens", "_wall_s", "memo")

    def __init__(
        self,
        lookup: Lookup,
        issued: Callable[[str], Issued | None] = no_issued_key,
        wall_s: Callable[[], float] = lambda: 0.0,
        tokens: SignedTokens | None = None,
    ) -> None:
        self._lookup, self._issued, self._wall_s, self._latest_s = lookup, issued, wall_s, 0.0
        self._tokens = tokens
        self.memo: dict[bytes, Principal] = {}  # by the header's SHA-256: no key is kept in memory in the clear

    def identify(
        self, authorization: bytes | None, x_api_key: bytes | None = None
    ) -> Principal | NotIdentified | Outcome:
        """The principal of an `Authorization` header (or, without one, of `x-api-key`), or why it authenticates nobody.
        Never raises on malformed input."""
        if authorization is None:
            return MISSING_KEY if x_api_key is None else self.identify(b"Bearer " + x_api_key)
        credential = hashlib.sha256(authorization).digest()
        known = self.memo.get(credential)
        found = known if known is not None else self._learn(authorization, credential)
        if x_api_key is not None and isinstance(found, Principal):
            other = self.identify(b"Bearer " + x_api_key)
            if isinstance(other, Principal) and other != found:
                return TWO_CALLERS  # many clients send an unknown placeholder beside a key
        return found

    def replace(self, lookup: Lookup) -> None:
        """Use another topology from now on. All cached results are dropped."""
        self._lookup = lookup
        self.memo = {}

    def forget(self) -> None:
        """The issued keys have changed: drop all cached results."""
        self.memo = {}

    def _learn(self, authorization: bytes, credential: bytes) -> Principal | NotIdentified | Outcome:
        tokens = self._tokens
        if tokens is None:
            return self._by_key(authorization, credential)
        known = tokens.known(credential)
        if known is not None:
            return known
        found = self._by_key(authorization, credential)  # first: a key of the law may look like anything
        if found is UNKNOWN_KEY or found is MISSING_KEY or found is TOO_LONG:
            return tokens.identify(authorization, credential) or found
        return found

    def _by_key(self, authorization: bytes, credential: bytes) -> Principal | NotIdentified | Outcome:
        key = bearer(authorization)
        if key is None:
            return TOO_LONG if len(authorization) > KEY_BYTES_MAX else MISSING_KEY
        sha256 = digest(key)
        found = self._lookup(sha256)
        if found is None:
            issued = self._issued(sha256)
            if issued is None:
                return UNKNOWN_KEY  # not remembered: guesses would push real keys out of the memo
            self._latest_s = now_s = max(self._latest_s, self._wall_s())
            if not issued.valid(now_s):
                return KEY_NOT_VALID
            principal = issued.principal
            if issued.expires_s < inf:
                return principal
        else:
            tenant, entry = found
            principal = Principal(tenant.name, entry.name, tuple(entry.within))
        if len(self.memo) >= MEMO_MAX:
            del self.memo[next(iter(self.memo))]
        self.memo[credential] = principal
        return principal
