"""Authenticates a client by its TLS certificate, whose one URI names a tenant.

The configuration maps URIs (SPIFFE IDs or others) to tenants. The common name does not count, and if there are two
URIs, neither does. Invariants: only certificates verified by the handshake come here; a certificate that expires while
its connection is open no longer authenticates. Never verifies a chain: TLS does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

from cryptography import x509

from farhop.balance.outcome import KEY_NOT_VALID, UNKNOWN_KEY
from farhop.identity import certificate_names
from farhop.identity.api_keys import NotIdentified, Principal

MEMO_MAX = 16_384
HEADER = b":certificate"  # under which a head carries it: no client can send a header of such a name

_UNKNOWN = NotIdentified(
    UNKNOWN_KEY, "this certificate is no tenant's: exactly one URI in it must be one that is known here"
)
_ENDED = NotIdentified(
    KEY_NOT_VALID, "this certificate has expired since this connection was made: connect again with another"
)


class TenantCertificates:
    """The tenants of client certificates, by the URI in the certificate. `wall_s`: the time in seconds since 1970."""

    def __init__(self, by_uri: Mapping[str, Principal], wall_s: Callable[[], float]) -> None:
        self._by_uri, self._wall_s, self._latest_s = dict(by_uri), wall_s, 0.0
        self.memo: dict[bytes, tuple[Principal, float]] = {}  # by the certificate's SHA-256; until when

    def identify(self, certificate: bytes) -> Principal | NotIdentified:
        """The principal of a verified certificate (DER), or why it authenticates nobody."""
        digest = hashlib.sha256(certificate).digest()
        known = self.memo.get(digest)
        if known is None:
            found = certificate_names.uris(certificate)
            principal = self._by_uri.get(found[0]) if len(found) == 1 else None
            if principal is None:
                return _UNKNOWN
            known = principal, x509.load_der_x509_certificate(certificate).not_valid_after_utc.timestamp()
            if len(self.memo) >= MEMO_MAX:
                del self.memo[next(iter(self.memo))]
            self.memo[digest] = known
        self._latest_s = now_s = max(self._latest_s, self._wall_s())
        return known[0] if now_s < known[1] else _ENDED
