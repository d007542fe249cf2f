"""Reading bodies of Anthropic's Messages API, as engines with it do: each becomes an equivalent chat.

`as_chat` gives that chat as vLLM and SGLang make it, so that prefixes are counted in the order of the engine's prompt,
and shared with chats of the same text. What changes from turn to turn and is no part of the prompt is left out: cache
marks, and Claude Code's billing line, whose hash is another one for each request. Never changes a body.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from farhop.relay.formats import field_guard
from farhop.relay.formats.field_guard import json_reader
from farhop.relay.formats.openai import Message, canonical_chat
from farhop.relay.formats.prompt import ASSISTANT_TURN, NO_OUTPUT, AnswerText, Prompt, Sized, generated, invalid

if TYPE_CHECKING:
    from farhop.relay.formats.field_guard import Guard

ATTRIBUTION = "x-anthropic-billing-header"  # how the block begins in which Claude Code says who pays
_ANSWER = AnswerText("text", ASSISTANT_TURN)
_ROLES = {"ctx": "user", "msg": "user"}  # as some versions of Claude Code write them


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]]


class _Tool(msgspec.Struct):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: Any = None


class _Count(Sized, kw_only=True):
    model: str | None = None
    messages: list[_Message]
    system: str | list[dict[str, Any]] | None = None
    tools: list[_Tool] | None = None


class _Messages(_Count, kw_only=True):
    max_tokens: int
    stream: bool | None = None
    cache_salt: str | msgspec.UnsetType | None = msgspec.UNSET


def _read(body: _Messages, guard: Guard) -> Prompt:
    return generated(body, _canonical(body, guard), (body.max_tokens, "max_tokens"), _ANSWER)


def _read_count(body: _Count, guard: Guard) -> Prompt:
    _canonical(body, guard)  # for what may be wrong with it: to count tokens costs no GPU
    return Prompt(body.model or "", b"", max_tokens=NO_OUTPUT, has_options=False)


def _canonical(body: _Count, guard: Guard) -> tuple[bytes, int]:
    """The canonical text of the chat, and how much media it has, in bytes."""
    if not body.messages:
        raise invalid("messages", "`messages` must hold at least one message")
    for message in body.messages:
        _check(message.content, guard)
    _check(body.system, guard)
    if body.tools:
        field_guard.tools([tool.type for tool in body.tools])
    messages, tools = _chat(body)
    if not messages:
        raise invalid("messages", "`messages` say nothing: give a text")
    return canonical_chat([msgspec.convert(message, Message) for message in messages], tools)


def _check(content: str | list[dict[str, Any]] | None, guard: Guard) -> None:
    """Media of blocks come in the request alone, or from where the configuration says."""
    for block in content if isinstance(content, list) else ():
        source = block.get("source")
        if isinstance(source, dict):
            plain = {"data": None} if source.get("type") == "text" else {}  # a document's own words
            guard.media([{"type": "source", **source, "format": None, **plain}], "messages")
        if isinstance(inner := block.get("content"), list):
            _check([one for one in inner if isinstance(one, dict)], guard)


messages = json_reader(_Messages, _read)
count_tokens = json_reader(_Count, _read_count)


def as_chat(body: dict[str, Any]) -> dict[str, Any]:
    """The chat equivalent to a parsed body: `messages`, and `tools` if it has any. Raises ValueError for another
    body.
    """
    messages, tools = _chat(msgspec.convert(body, _Count))
    chat: dict[str, Any] = {"model": body.get("model"), "messages": messages}
    if tools:
        chat["tools"] = tools
    if (arguments := body.get("chat_template_kwargs")) is not None:
        chat["chat_template_kwargs"] = arguments
    return chat


def _chat(body: _Count) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    turns: list[dict[str, Any]] = []
    if system := _text_of(body.system):
        turns.append({"role": "system", "content": system})
    for message in body.messages:
        _turn(message, turns)
    tools = [_function(tool) for tool in body.tools or ()]
    return turns, tools or None


def _text_of(system: str | list[dict[str, Any]] | None) -> str:
    if isinstance(system, str):
        return system
    texts = [str(block.get("text") or "") for block in system or () if block.get("type") == "text"]
    return "".join(text for text in texts if not text.startswith(ATTRIBUTION))


def _turn(message: _Message, turns: list[dict[str, Any]]) -> None:
    """A message, and before it the results of tools that it brings: those are messages of their own in a chat."""
    role = _ROLES.get(message.role, message.role)
    if isinstance(message.content, str) or role == "system":
        text = message.content if isinstance(message.content, str) else _text_of(message.content)
        if text and not (role == "system" and text.startswith(ATTRIBUTION)):
            turns.append({"role": role, "content": text})
        return
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for block in message.content:
        match block.get("type"):
            case "text" if block.get("text"):
                parts.append({"type": "text", "text": block["text"]})
            case "image" | "document" if block.get("source"):
                parts.append({"type": "image_url", "image_url": {"url": _location(block["source"])}})
            case "tool_use":
                calls.append(_call(block))
            case "tool_result" if role == "user":
                _result(block, turns)
            case "tool_result":
                parts.append({"type": "text", "text": f"Tool result: {block.get('content') or ''}"})
    if not parts and not calls:
        return
    turn: dict[str, Any] = {"role": role}
    if calls:
        turn["tool_calls"] = calls
    if len(parts) == 1 and parts[0]["type"] == "text":
        turn["content"] = parts[0]["text"]
    elif parts:
        turn["content"] = parts
    turns.append(turn)


def _call(block: dict[str, Any]) -> dict[str, Any]:
    import json  # as engines write what a template gets: with blanks

    arguments = json.dumps(block.get("input") or {})
    return {
        "id": str(block.get("id") or ""),
        "type": "function",
        "function": {"name": str(block.get("name") or ""), "arguments": arguments},
    }


def _result(block: dict[str, Any], turns: list[dict[str, Any]]) -> None:
    content, pictures = block.get("content"), list[dict[str, Any]]()
    text = content if isinstance(content, str) else ""
    if isinstance(content, list):
        inner = [one for one in content if isinstance(one, dict)]
        text = "\n".join(str(one.get("text") or "") for one in inner if one.get("type") == "text")
        pictures = [
            {"type": "image_url", "image_url": {"url": _location(one["source"])}}
            for one in inner
            if one.get("type") == "image" and one.get("source")
        ]
    turns.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id") or ""), "content": text})
    if pictures:
        turns.append({"role": "user", "content": pictures})


def _location(source: Any) -> str:
    if not isinstance(source, dict):
        return ""
    if source.get("type") == "url":
        return str(source.get("url") or "")
    return f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"


def _function(tool: _Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    schema = tool.input_schema
    if schema is not None:
        function["parameters"] = schema if "type" in schema else {**schema, "type": "object"}
    return {"type": "function", "function": function}
