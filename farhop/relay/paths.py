"""Which requests may pass: an allow-list of inference paths. Everything else is refused with a reason.

Never lets an engine's control surface through (`/flush_cache`, weight updates, LoRA loading, sleep, ...): a path that
is not named here does not exist.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from farhop.balance import outcome
from farhop.balance.outcome import Outcome


class Kind(StrEnum):
    """What a path asks for, and so how its body is read."""

    CHAT = "chat"
    COMPLETION = "completion"
    MODELS = "models"


class PathRefusal(msgspec.Struct, frozen=True):
    """Why a method and path do not pass; `allow` is the `Allow` header's value where the method was wrong."""

    outcome: Outcome
    detail: str
    allow: str = ""


_PATHS: dict[bytes, tuple[bytes, Kind]] = {
    b"/v1/chat/completions": (b"POST", Kind.CHAT),
    b"/v1/completions": (b"POST", Kind.COMPLETION),
    b"/v1/models": (b"GET", Kind.MODELS),
}

# APIs that keep state on one server: a balancer that may send the next request elsewhere cannot honour them.
_STATEFUL = (b"/v1/files", b"/v1/batches", b"/v1/responses", b"/v1/assistants", b"/v1/threads", b"/v1/vector_stores")


def classify(method: bytes, path: bytes) -> Kind | PathRefusal:
    """Name what a request asks for, or say why it does not pass. `path` is without its query."""
    known = _PATHS.get(path)
    if known is None:
        return _unknown(path)
    wanted, kind = known
    if method != wanted:
        allow = wanted.decode()
        return PathRefusal(outcome.METHOD_NOT_ALLOWED, f"this path answers {allow} only", allow)
    return kind


def _unknown(path: bytes) -> PathRefusal:
    if path.startswith(_STATEFUL):
        detail = "stateful APIs (files, batches, responses, ...) are not routed: their state would live in one region"
    else:
        allowed = ", ".join(p.decode() for p in _PATHS)
        detail = f"only inference paths pass here: {allowed}"
    return PathRefusal(outcome.PATH_NOT_ALLOWED, detail)
