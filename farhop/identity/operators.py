"""Authenticates and authorises callers of an admin port: by token, by certificate, or without either if so configured.

There are three rights, each of which includes the one before: `metrics` (scrape), `read` (everything shown), `act`.
Invariants: a token is kept as its hash and compared with all hashes in constant time; no message repeats a credential.
Never decides which right a request needs: the route declares it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Literal

import msgspec

from farhop.identity import certificate_names

Right = Literal["metrics", "read", "act"]
RIGHTS: tuple[Right, ...] = ("metrics", "read", "act")
TOKEN_CHARS_MIN, TOKEN_CHARS_MAX = 16, 4096
_SCHEME = "bearer "


class Operator(msgspec.Struct, frozen=True):
    """The caller, for the log, and its right; "": none."""

    name: str
    may: Right | Literal[""]

    def may_do(self, needed: Right) -> bool:
        """Whether this right includes the one needed."""
        return self.may != "" and RIGHTS.index(self.may) >= RIGHTS.index(needed)


class Operators:
    """The operators of one port.

    `tokens` are SHA-256 digests with a right, by name. `certified`: the connection proved a certificate, which gives
    `read`, or the right in `named` for the operator that it names in the trust domain. Without tokens and certificates,
    any caller has the right `anonymous`.
    """

    def __init__(
        self,
        tokens: Mapping[str, tuple[bytes, Right]] | None = None,
        named: Mapping[str, Right] | None = None,
        trust_domain: str = certificate_names.TRUST_DOMAIN,
        *,
        certified: bool = False,
        anonymous: Right = "act",
    ) -> None:
        self._tokens, self._named, self._trust_domain = dict(tokens or {}), dict(named or {}), trust_domain
        self._certified, self._anonymous = certified, anonymous

    @property
    def asks(self) -> bool:
        """Whether callers must authenticate."""
        return self._certified or bool(self._tokens)

    def of(self, authorization: str | None, certificate: bytes | None) -> Operator:
        """The operator, by the request's `Authorization` and its connection's certificate (DER)."""
        if not self.asks:
            return Operator("anonymous", self._anonymous)
        found = [self._by_token(authorization), self._by_certificate(certificate)]
        return max(found, key=lambda one: -1 if one.may == "" else RIGHTS.index(one.may))

    def _by_token(self, authorization: str | None) -> Operator:
        given = authorization or ""
        if given[: len(_SCHEME)].lower() != _SCHEME or len(given) > TOKEN_CHARS_MAX:
            return _UNKNOWN
        digest = hashlib.sha256(given[len(_SCHEME) :].strip().encode("utf-8", "replace")).digest()
        found = _UNKNOWN
        for name, (known, may) in self._tokens.items():  # all of them, so that the time reveals nothing
            if hmac.compare_digest(known, digest):
                found = Operator(f"token {name}", may)
        return found

    def _by_certificate(self, certificate: bytes | None) -> Operator:
        if not self._certified or certificate is None:
            return _UNKNOWN
        name = certificate_names.operator(certificate_names.uris(certificate), self._trust_domain)
        return Operator(f"operator {name}" if name else "a certificate", self._named.get(name, "read"))


_UNKNOWN = Operator("nobody", "")
OPEN = Operators()


def digest_of(token: str) -> bytes:
    """The digest of a token, which is what is kept."""
    return hashlib.sha256(token.encode()).digest()
