"""The answers of `GET /v1/models` and `GET /v1/models/NAME`: OpenAI's members, and those of Anthropic for its SDK.

From models and what is known of them to the bytes of the document. Never knows who asks, or why these models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from farhop.balance.model_facts import ModelFacts

_ANTHROPIC = b"anthropic-version: "


def listed(models: dict[str, ModelFacts], lines: bytes) -> bytes:
    """The document for these models, in their order; `lines` are the request's headers."""
    data = [_one(model, facts, lines) for model, facts in models.items()]
    document: dict[str, Any] = {"object": "list", "data": data}
    if _is_anthropics(lines):
        ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        document |= {"has_more": False, "first_id": ends[0], "last_id": ends[1]}
    return msgspec.json.encode(document)


def described(model: str, facts: ModelFacts, lines: bytes) -> bytes:
    """The document of one model."""
    return msgspec.json.encode(_one(model, facts, lines))


def ready(model: str) -> bytes:
    """The document that says of one model that it is served, as the Open Inference Protocol has it."""
    return msgspec.json.encode({"name": model, "ready": True})


def _one(model: str, facts: ModelFacts, lines: bytes) -> dict[str, Any]:
    known = {name: value for name, value in msgspec.structs.asdict(facts).items() if value}  # as engines word it
    one = {"id": model, "object": "model", "created": 0, "owned_by": "farhop"} | known
    if _is_anthropics(lines):
        one |= {"type": "model", "display_name": model, "created_at": "1970-01-01T00:00:00Z"}
    return one


def _is_anthropics(lines: bytes) -> bool:
    return lines.startswith(_ANTHROPIC) or b"\r\n" + _ANTHROPIC in lines
