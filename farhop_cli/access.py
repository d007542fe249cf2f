"""How to connect to admin ports, and why one must not be asked. Opens no connection; `admin` does.

The token is sent only over TLS to a proven certificate, or to this machine.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from urllib.parse import urlsplit


class AdminError(Exception):
    """A balancer that could not be asked, or refused to answer; the text says why."""


class QuestionError(AdminError):
    """The question itself is wrong: another balancer would give the same answer."""


@dataclass(frozen=True)
class Access:
    """How to connect to a fleet's admin ports. `tls`: trusted authorities and our certificate; None: the system's.

    `ca_file` is that authority alone, "" for the system's: it may have certified the entries, too, which must not see
    our certificate. `names` gives, by base URL, the name that a certificate must have instead of the host's; `barred`
    where the token must not go, and why; `unasked` which port is not asked at all, and what to give so that it can be.
    """

    token: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None
    ca_file: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    barred: Mapping[str, str] = field(default_factory=dict)
    unasked: Mapping[str, str] = field(default_factory=dict)

    def as_client(self) -> ssl.SSLContext:
        """TLS for a client of this fleet: trusts the system's authorities, and the fleet's own. Raises OSError."""
        made = ssl.create_default_context()
        if self.ca_file:
            made.load_verify_locations(self.ca_file)
        return made

    def headers(self, base: str) -> dict[str, str]:
        """The headers of a request. AdminError if it must not be made, or the token must not go there."""
        if base in self.unasked:
            raise AdminError(f"{base} was not asked: {self.unasked[base]}")
        if not self.token:
            return {}
        if base in self.barred:
            raise AdminError(f"{base} was not asked: {self.barred[base]}")
        if not base.startswith("https:") and not _is_loopback(base):
            raise AdminError(f"{base} was not asked: the token does not travel in plaintext; give its port TLS")
        return {"Authorization": f"Bearer {self.token}"}


NO_ACCESS = Access()


def _is_loopback(base: str) -> bool:
    host = urlsplit(base).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
