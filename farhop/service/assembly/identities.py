"""Builds the configured ways to authenticate besides API keys: tokens, their issuers' keys, tenants' certificates.

A process has one set for all ports at which clients bring their own credentials. Never decides about an identity: that
is done in `farhop.identity`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farhop.identity.api_keys import Principal
from farhop.identity.jwt_tokens import TokenVerifier
from farhop.identity.tenant_certificates import TenantCertificates
from farhop.service.authentication.issuer_keys import IssuerKeys
from farhop.service.config.certificates import system_context
from farhop.service.process.clock import wall

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from farhop.service.admission.ingress import Ingress
    from farhop.service.assembly.dataplane import TlsSetup
    from farhop.service.authentication.authenticator import KeyAuthenticator
    from farhop.service.authentication.keybook import KeyBook
    from farhop.service.config.process import Identity, IssuerConfig
    from farhop.service.process.clock import Clock
    from farhop.service.process.tasks import Tasks
    from farhop.telemetry.logs import Throttled
    from farhop.telemetry.metrics import TierMetrics


class Identities:
    """The identity providers and client certificates of one process, as far as they are configured."""

    def __init__(self, config: Identity, issued: KeyBook, tls: TlsSetup, clock: Clock, log: Throttled) -> None:
        self._issued = issued
        self.tokens: TokenVerifier | None = None
        self.issuer_keys: IssuerKeys | None = None
        self.certificates: TenantCertificates | None = None
        if config.issuers:
            self.tokens = TokenVerifier(
                {name: one.made(name) for name, one in config.issuers.items()}, config.salt, _wall_s
            )
            sources = {name: (one, _context(name, one, tls)) for name, one in config.issuers.items()}
            self.issuer_keys = IssuerKeys(self.tokens, sources, clock.now, log)
        if config.certificates:
            named = config.certificates.items()
            by_uri = {one.uri: Principal(one.tenant, "", one.within, f"cert:{name}") for name, one in named}
            self.certificates = TenantCertificates(by_uri, _wall_s)

    def let_in(self, authenticator: KeyAuthenticator, ingress: Ingress) -> None:
        """Accept them at a port for clients, in addition to API keys."""
        authenticator.admit_issued(self._issued, self.tokens)
        authenticator.certificates = self.certificates
        ingress.asks_certificate = self.certificates is not None

    async def open(self, tasks: Tasks) -> None:
        """Begin to fetch the keys of issuers; returns once each issuer was asked, or after a timeout."""
        if self.issuer_keys is not None:
            tasks.start(self.issuer_keys.keep(), "fetch the keys of issuers")
            await self.issuer_keys.begun()

    def observe(self, metrics: TierMetrics) -> None:
        """Export the state as metrics."""
        keys = self.issuer_keys
        ages = dict if keys is None else keys.ages_s
        metrics.gauge("issuer_keys_age_seconds", "Since each issuer's keys were fetched.", ages, "issuer")

    def status(self) -> dict[str, Any]:
        """For operators: the state of issued keys and, if configured, of issuers."""
        status = self._issued.status()
        return status if self.issuer_keys is None else {**status, "issuers": self.issuer_keys.status()}


def _context(name: str, issuer: IssuerConfig, tls: TlsSetup) -> Callable[[], ssl.SSLContext]:
    if issuer.ca_file is None:
        return system_context
    return tls.certificates(f"identity.issuers.{name}", issuer.files).context


def _wall_s() -> float:
    return wall().timestamp()
