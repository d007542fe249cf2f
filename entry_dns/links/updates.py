"""Dynamic updates (RFC 2136), signed with TSIG (RFC 8945), to a server that hosts one of our zones.

Never decides which records to write.
"""

from __future__ import annotations

import base64
import binascii
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, Literal

import dns.asyncquery
import dns.exception
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.tsig
import dns.update
from pydantic import Field

from farhop.config import Part, Seconds, Secret, is_absent, rule

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from entry_dns.answers.snapshot import Records

_ALGORITHMS = {
    "hmac-sha256": dns.tsig.HMAC_SHA256,
    "hmac-sha384": dns.tsig.HMAC_SHA384,
    "hmac-sha512": dns.tsig.HMAC_SHA512,
}


_REMEDIES = {
    dns.rcode.REFUSED: "let key {key!r} update zone {zone}",
    dns.rcode.NOTAUTH: "it is not the primary of zone {zone}, or knows no key {key!r}; name the server that has both",
    dns.rcode.NOTIMP: "it takes no dynamic updates; name the primary of zone {zone}",
    dns.rcode.SERVFAIL: "it could not write zone {zone}, or forward the update to its primary; its log says why",
}


class UpdateError(Exception):
    """The server rejected an update. The text has the reason and the remedy."""


class Publish(Part):
    """Where `farhop dns publish` writes: a server (address) that has `zone`, and the TSIG key that it knows.

    `secret` is in base64, as a provider or `tsig-keygen` gives it.
    """

    server: Annotated[str, Field(min_length=2, max_length=64)]
    port: Annotated[int, Field(ge=1, le=65535)] = 53
    zone: Annotated[str, Field(min_length=1, max_length=253)]
    key_name: Annotated[str, Field(min_length=1, max_length=253)]
    algorithm: Literal["hmac-sha256", "hmac-sha384", "hmac-sha512"] = "hmac-sha256"
    secret: Secret
    timeout_s: Seconds = 5.0

    @rule
    def _usable(self) -> Iterator[str]:
        try:
            ip_address(self.server)
        except ValueError:
            yield "server: is no address; give one such as 192.0.2.53"
        if not is_absent(self.secret):
            try:
                base64.b64decode(self.secret.get_secret_value(), validate=True)
            except binascii.Error:
                yield "secret: is not base64; give it as `tsig-keygen` prints it"


class Updates:
    """Sends updates for one zone to its server."""

    def __init__(self, config: Publish) -> None:
        self._config = config
        secret = base64.b64decode(config.secret.get_secret_value())
        self._key = dns.tsig.Key(config.key_name, secret, _ALGORITHMS[config.algorithm])

    async def write(self, changes: Mapping[tuple[bytes, int], Records | None]) -> None:
        """Replace record sets, by (name in wire form, record type); None deletes a set. Raises UpdateError."""
        config = self._config
        zone = dns.name.from_text(config.zone)
        update = dns.update.UpdateMessage(zone, keyring=self._key)
        for (name, kind), records in changes.items():
            owner, type_ = dns.name.from_wire(name, 0)[0], dns.rdatatype.RdataType(kind)
            if not owner.is_subdomain(zone):
                raise UpdateError(f"{owner} is outside of zone {config.zone}; leave it out, or publish to its own zone")
            update.delete(owner, type_)
            for rdata in records.rdatas if records is not None else ():
                update.add(owner, records.ttl if records is not None else 0, type_, str(ip_address(rdata)))
        server = f"{config.server}:{config.port}"
        try:
            answer = await dns.asyncquery.tcp(update, config.server, timeout=config.timeout_s, port=config.port)
        except (dns.tsig.PeerBadKey, dns.tsig.PeerBadSignature, dns.tsig.BadSignature) as error:
            problem = f"{server} does not take the TSIG key {config.key_name!r} ({type(error).__name__})"
            raise UpdateError(f"{problem}; give the name, algorithm and secret that it has") from None
        except dns.tsig.PeerBadTime:
            raise UpdateError(f"{server}: its clock and ours are too far apart for TSIG; set them") from None
        except (OSError, dns.exception.DNSException, EOFError) as error:
            raise UpdateError(f"{server} cannot be updated: {error or type(error).__name__}; is it there?") from None
        if answer.rcode() != dns.rcode.NOERROR:
            text = dns.rcode.to_text(answer.rcode())
            remedy = _REMEDIES.get(answer.rcode(), "its log says why").format(key=config.key_name, zone=config.zone)
            raise UpdateError(f"{server} answers {text}; {remedy}")
