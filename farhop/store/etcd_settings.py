"""An etcd's endpoints and credentials as plain values, from a configuration. Never opens a connection."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

ENDPOINT = re.compile(r"(?:(https?)://)?(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})/?")


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    """Where etcd is and how to speak to it. Endpoints are `host:port`, or URLs; TLS if `ca_file` or an https URL.

    Raises ValueError naming the field. `timeout_s` bounds each call, and the silence after which contact is lost.
    """

    endpoints: tuple[str, ...]
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    username: str | None = None
    password: str | None = None
    timeout_s: float = 2.0

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ValueError("endpoints: name at least one, such as 127.0.0.1:2379")
        for endpoint in self.endpoints:
            match = ENDPOINT.fullmatch(endpoint)
            if match is None or not 0 < int(match[3]) < 65536:
                raise ValueError(f"endpoints: {endpoint!r} is not host:port or a URL such as https://host:2379")
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file, key_file: give both or neither")
        if (self.username is None) != (self.password is None):
            raise ValueError("username, password: give both or neither")
        if not 0.1 <= self.timeout_s <= 60:
            raise ValueError(f"timeout_s: {self.timeout_s} is outside 0.1..60")

    def __repr__(self) -> str:
        return f"EtcdSettings({', '.join(self.endpoints)})"  # never the password

    def tls(self, endpoint: str) -> bool:
        """Whether the channel to this endpoint is encrypted."""
        return self.ca_file is not None or self.cert_file is not None or endpoint.startswith("https:")
