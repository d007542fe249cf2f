"""Reading bodies of OpenAI's Responses API, as far as they are stateless: each becomes an equivalent chat.

A body that needs state of an earlier request, or asks for state to be kept, is refused with the reason, and so are
tools by which an engine would connect to hosts that a client names. OpenAI stores a response by default; clients that
do not set it hardly ever use that (SDKs and agents send the whole conversation), so they are served, and the engine is
told not to store it. A client that asks for a stored response gets the reason why there is none. Never changes a body.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from farhop.relay.formats.field_guard import json_reader
from farhop.relay.formats.openai import Message, canonical_chat
from farhop.relay.formats.prompt import ASSISTANT_TURN, AnswerText, Prompt, Sized, generated, invalid

if TYPE_CHECKING:
    from farhop.relay.formats.field_guard import Guard

_ANSWER = AnswerText("delta", ASSISTANT_TURN)
_STATEFUL = ("conversation", "prompt")
_STORED = "responses are not stored here, since their state would live in one region: leave `store` out, or say false"
_PARTS = ("input_text", "output_text", "text", "refusal")


class _Response(Sized, kw_only=True):
    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    cache_salt: str | msgspec.UnsetType | None = msgspec.UNSET


def _read(body: _Response, guard: Guard) -> Prompt:
    if body.store:
        raise invalid("store", _STORED)
    if body.background:
        raise invalid("background", "an answer in the background would have to be kept here: leave `background` out")
    for name in _STATEFUL:
        if getattr(body, name) is not None:
            raise invalid(
                name, f"`{name}` refers to something stored elsewhere: send the whole conversation as `input`"
            )
    for tool in body.tools or ():
        if tool.get("type") not in ("function", "custom"):
            raise invalid("tools", "`tools` of type function pass: what an engine itself would fetch or run does not")
    messages = _chat(body)
    if not messages:
        raise invalid("input", "`input` says nothing: give a text")
    for message in messages:
        guard.media(message.content, "input")
    made = generated(body, canonical_chat(messages, body.tools), (body.max_output_tokens, "max_output_tokens"), _ANSWER)
    return made if body.store is False else replace(made, lacks_store=True)


def _chat(body: _Response) -> list[Message]:
    turns = [Message("system", body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return [*turns, Message("user", body.input)] if body.input else turns
    for item in body.input:
        kind = item.get("type")
        if kind is None:  # OpenAI's API lets it be left out of a message, and of a reference
            kind = "message" if "role" in item or "content" in item else "item_reference"
        match kind:
            case "message":
                turns.append(Message(str(item.get("role") or "user"), _content(item.get("content"))))
            case "function_call":
                called = {"name": str(item.get("name") or ""), "arguments": str(item.get("arguments") or "")}
                call = {"id": str(item.get("call_id") or ""), "type": "function", "function": called}
                turns.append(Message("assistant", tool_calls=[call]))
            case "function_call_output":
                turns.append(Message("tool", _content(item.get("output")), tool_call_id=str(item.get("call_id") or "")))
            case "item_reference":
                raise invalid("input", "`item_reference` refers to something stored elsewhere: send the item itself")
            case "reasoning":
                pass  # templates leave out what was thought before the last turn
            case _:
                turns.append(Message("user", [item]))
    return turns


def _content(content: Any) -> str | list[dict[str, Any]]:
    if isinstance(content, dict):  # an engine may read it as a list of one
        content = [content]
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    parts = [part for part in content if isinstance(part, dict)]
    texts = [_text(part) for part in parts]
    if len(parts) == 1 and texts[0] is not None:
        return texts[0]
    return [part if text is None else {"type": "text", "text": text} for part, text in zip(parts, texts, strict=True)]


def _text(part: dict[str, Any]) -> str | None:
    text = part.get("text")
    return text if part.get("type") in _PARTS and isinstance(text, str) else None


responses = json_reader(_Response, _read)
