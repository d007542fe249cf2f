"""The law in virtual time: each process's own copy, updated from etcd, and its authenticator by API key.

The shipped LawBook and KeyAuthenticator, without etcd and sockets. Never decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farhop.relay.http import head as heads
from farhop.service.authentication.authenticator import KeyAuthenticator
from farhop.service.law.lawbook import LawBook
from farhop.store.contract import LAW_KEY, Change, ChangeKind, KeyValue

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.relay.answers import Reply
    from farhop.service.authentication.authenticator import Caller
    from topology.law import Law

REQUEST_S = 600.0
_HEADERS_MAX = 16
_LOCATION = b"location: "


class LawClient:
    """The law as one process in `region` knows it, at first the topology's. `adopt` is called with each new law."""

    def __init__(self, region: str, law: Law, adopt: Callable[[Law], None]) -> None:
        self.refused: list[str] = []
        self.book = LawBook({}, law, adopt, self.refused.append)
        self.authenticator = KeyAuthenticator(region, self, lambda _regions: {}, REQUEST_S)

    @property
    def law(self) -> Law:
        """The law in force here."""
        return self.book.law

    def apply(self, document: bytes, revision: int, *, anew: bool = False) -> None:
        """This document is now in etcd (b"": none); `anew`: from a listing, as at the start and after an outage."""
        if anew:
            entries = (KeyValue(LAW_KEY, document, revision),) if document else ()
            self.book.changed(Change(ChangeKind.SNAPSHOT, revision, entries=entries))
        else:
            kind = ChangeKind.PUT if document else ChangeKind.DELETE
            self.book.changed(Change(kind, revision, LAW_KEY, document))

    def caller(self, key: str, allow: str = "") -> Caller | Reply:
        """The authenticator's result for a request head with this key; `allow` narrows the regions."""
        lines = [b"POST /v1/chat/completions HTTP/1.1", b"host: sim", b"authorization: Bearer " + key.encode()]
        lines += [b"x-farhop-allow: " + allow.encode()] if allow else []
        return self.authenticator.caller(heads.read(b"\r\n".join(lines), _HEADERS_MAX))


def elsewhere(reply: Reply) -> str | None:
    """The origin in a redirect; None for any other answer."""
    for line in reply.extra.split(b"\r\n"):
        if reply.status == 307 and line.startswith(_LOCATION):
            return "/".join(line.removeprefix(_LOCATION).decode().split("/", 3)[:3])
    return None
