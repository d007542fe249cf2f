"""Identifies the other end of a connection to a control or tier port, by mutual TLS.

The name in the caller's certificate determines its access; nothing that the caller says about itself does. If a port
asks for no certificates (loopback, or `insecure`), no identity is proven and callers are trusted. Never decides about
the rights of a tier or region: the services ask for the identity that they need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from farhop.identity import certificate_names

if TYPE_CHECKING:
    from farhop.identity.certificate_names import BalancerIdentity, Tier
    from farhop.service.config.endpoints import Listen


class PeerAuthenticator:
    """The callers of one port. `mutual`: each must bring a certificate, and its name in this trust domain counts."""

    def __init__(self, trust_domain: str, *, mutual: bool) -> None:
        self._trust_domain, self.mutual = trust_domain, mutual

    async def proven(
        self, context: Any, tier: Tier | None = None, region: str | None = None
    ) -> BalancerIdentity | None:
        """The gRPC caller's identity; None if none need be proven.

        Aborts the call (PERMISSION_DENIED) if the caller is not of this tier and region, as far as these are given.
        """
        if not self.mutual:
            return None
        names = context.auth_context().get("x509_subject_alternative_name", ())
        peer = certificate_names.read([name.decode("utf-8", "replace") for name in names], self._trust_domain)
        if peer is None:
            await self._deny(context, "names no balancer of this trust domain; issue one with: farhop certs issue")
        elif tier not in (None, peer.tier) or region not in (None, peer.region):
            wanted = " ".join((tier or "any", "balancer of region", region or "any"))
            await self._deny(context, f"is that of the {peer.tier} balancer of region {peer.region}, not a {wanted}")
        return peer

    async def _deny(self, context: Any, why: str) -> None:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"the certificate {why}")

    def admits(self, tier: Tier, certificate: bytes | None) -> bool:
        """Whether a verified certificate (DER) is that of a balancer of this tier."""
        peer = (
            None
            if certificate is None
            else certificate_names.read(certificate_names.uris(certificate), self._trust_domain)
        )
        return peer is not None and peer.tier == tier


ANY_PEER = PeerAuthenticator(certificate_names.TRUST_DOMAIN, mutual=False)


def peer_authenticator_of(listen: Listen, trust_domain: str) -> PeerAuthenticator:
    """The authenticator of a port, as configured."""
    return PeerAuthenticator(trust_domain, mutual=listen.tls is not None and listen.tls.client_ca_file is not None)
