"""How admin ports are spoken to, and what is wrong with one that cannot be asked. Opens no connection: `admin` does.

A token goes to nobody but over TLS to whom the certificate proves, or to this machine.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from urllib.parse import urlsplit


class AdminError(Exception):
    """A balancer that could not be asked, or refused to say; the text says why."""


class QuestionError(AdminError):
    """The question itself is at fault: another balancer would say the same."""


@dataclass(frozen=True)
class Access:
    """How a fleet's admin ports are spoken to. `tls`: whom we believe there, and who we are; None: the system's.

    `ca_file` is that authority alone, "" for the system's: it may have certified the entries, too, who are not to see
    who we are. `names` says, by base URL, which name a certificate must bear in place of the host's; `barred` where the
    token does not go, and why; `unasked` which port is not asked at all, and what to give so that it can be.
    """

    token: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None
    ca_file: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    barred: Mapping[str, str] = field(default_factory=dict)
    unasked: Mapping[str, str] = field(default_factory=dict)

    def as_client(self) -> ssl.SSLContext:
        """Whom a client of this fleet believes: the system's authorities, and the fleet's own. Raises OSError."""
        made = ssl.create_default_context()
        if self.ca_file:
            made.load_verify_locations(self.ca_file)
        return made

    def headers(self, base: str) -> dict[str, str]:
        """What goes along with a request. Raises AdminError where none is to be made, or the token must not go."""
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
