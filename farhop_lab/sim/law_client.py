"""The law in virtual time: each process's own copy, which follows what it hears of etcd, and its authenticator by key.

The shipped LawBook and KeyAuthenticator; no etcd and no sockets. Never decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farhop.relay.http import head as heads
from farhop.service.authenticator import KeyAuthenticator
from farhop.service.lawbook import LawBook
from farhop.store.contract import LAW_KEY, Change, ChangeKind, Entry

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.relay.answers import Reply
    from farhop.service.authenticator import Caller
    from topology.law import Law

REQUEST_S = 600.0
_HEADERS_MAX = 16
_LOCATION = b"location: "


class LawClient:
    """What one process in `region` knows of the law, beginning with the topology's. `adopt` is told of another."""

    def __init__(self, region: str, law: Law, adopt: Callable[[Law], None]) -> None:
        self.refused: list[str] = []
        self.book = LawBook({}, law, adopt, self.refused.append)
        self.authenticator = KeyAuthenticator(region, self, lambda _regions: {}, REQUEST_S)

    @property
    def law(self) -> Law:
        """The law in force here."""
        return self.book.law

    def apply(self, document: bytes, revision: int, *, anew: bool = False) -> None:
        """This stands in etcd now (b"": nothing); `anew`: it is listed, as at the start and after an outage."""
        if anew:
            entries = (Entry(LAW_KEY, document, revision),) if document else ()
            self.book.changed(Change(ChangeKind.SNAPSHOT, revision, entries=entries))
        else:
            kind = ChangeKind.PUT if document else ChangeKind.DELETE
            self.book.changed(Change(kind, revision, LAW_KEY, document))

    def caller(self, key: str, allow: str = "") -> Caller | Reply:
        """What the authenticator says to a head with this key; `allow` narrows."""
        lines = [b"POST /v1/chat/completions HTTP/1.1", b"host: sim", b"authorization: Bearer " + key.encode()]
        lines += [b"x-farhop-allow: " + allow.encode()] if allow else []
        return self.authenticator.caller(heads.read(b"\r\n".join(lines), _HEADERS_MAX))


def elsewhere(reply: Reply) -> str | None:
    """The origin that a redirect names; None for any other answer."""
    for line in reply.extra.split(b"\r\n"):
        if reply.status == 307 and line.startswith(_LOCATION):
            return "/".join(line.removeprefix(_LOCATION).decode().split("/", 3)[:3])
    return None
