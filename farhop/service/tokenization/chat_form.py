"""The input of a chat template as vLLM builds it (0.32): the client's messages, tools and options, rewritten.

vLLM parses a body into models of its own and renders those, so the template does not see the client's text: the fields
of tools are in the models' order, with defaults filled in and unknown fields dropped; messages have a few named fields;
`developer` becomes `system` for templates that do not know it. A prompt rendered from the client's own text has as many
tokens, but not the same ones. Never interprets the prompt; never changes the request that is sent on. Source:
vllm/renderers/{chat_utils,hf,online_renderer}.py, vllm/entrypoints/generate/base/protocol.py.
"""

from __future__ import annotations

import json
from typing import Any

# By the kind of a content part, the member that holds its text.
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
_ABSENT_SKIPPED = ("text", "refusal")
_UNSET = (None, "auto")  # values that count as not given
_ATTRIBUTION = "x-anthropic-billing-header"  # Claude Code's: another with every request


class MediaError(Exception):
    """A message has a part that is not text."""


class ChatForm:
    """How one template wants its chats. `in_parts`: it goes through a message's parts itself."""

    def __init__(self, source: str, *, in_parts: bool) -> None:
        self._in_parts = in_parts
        self._knows_developer = '"developer"' in source or "'developer'" in source

    def arguments(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What the template is rendered with, but for the tokenizer's special tokens; `asked` is the body.

        Raises MediaError; KeyError, TypeError or AttributeError for shapes that an engine refuses.
        """
        effort = asked.get("reasoning_effort")
        given: dict[str, Any] = dict(asked.get("chat_template_kwargs") or {})
        ours: dict[str, Any] = {
            "add_generation_prompt": asked.get("add_generation_prompt") is not False,
            "continue_final_message": asked.get("continue_final_message") is True,
            "documents": asked.get("documents"),
            "reasoning_effort": effort,
        }
        if ours["continue_final_message"]:
            ours["add_generation_prompt"] = False
        if effort is not None and "enable_thinking" not in given:
            ours["enable_thinking"] = effort != "none"
        tools = asked.get("tools")
        arguments: dict[str, Any] = {"tools": [tool(one) for one in tools] if tools else None, "documents": None}
        for more in (given, ours):
            arguments |= {name: value for name, value in more.items() if value not in _UNSET}
        arguments["messages"] = self.messages(asked["messages"])
        return arguments

    def messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages of a chat, as the chat template expects them."""
        rendered = [self._message(message) for message in messages]
        if self._knows_developer or all(message["role"] != "developer" for message in rendered):
            return rendered
        for message in rendered:
            if message["role"] == "developer":
                message["role"] = "system"
                message.pop("tools", None)
        return _one_system(rendered)

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        role, content = message["role"], message.get("content")
        parts: list[Any] = [] if content is None else [content] if isinstance(content, str) else list(content)
        if role == "system":
            parts = [kept for part in parts if (kept := _without_attribution(part)) is not None]
        read = [one for part in parts if (one := _part(part, in_parts=self._in_parts))]
        rendered: dict[str, Any] = {"role": role, "content": read if self._in_parts else "\n".join(read)}
        if role == "assistant":
            if calls := message.get("tool_calls"):
                rendered["tool_calls"] = [_call(call) for call in calls]
            reasoning = message.get("reasoning")
            reasoning = message.get("reasoning_content") if reasoning is None else reasoning
            if reasoning is not None:
                rendered["reasoning"] = rendered["reasoning_content"] = reasoning
        elif role == "tool":
            if "tool_call_id" in message:
                rendered["tool_call_id"] = message["tool_call_id"]
            if self._in_parts:
                rendered["content"] = "\n".join(part["text"] for part in read)
        for name in ("name", "task"):
            if isinstance(message.get(name), str):
                rendered[name] = message[name]
        if role == "developer":
            rendered["tools"] = message.get("tools")
        return rendered


def tool(written: dict[str, Any]) -> dict[str, Any]:
    """A tool as vLLM's models write it: type and function first, a function's fields in their order."""
    function, deferred = written["function"], written.get("defer_loading")
    known = {
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function.get("parameters"),
    }
    rare = {"strict": function.get("strict"), "defer_loading": function.get("defer_loading", deferred)}
    known |= {name: value for name, value in rare.items() if value is not None}
    made = {"type": written.get("type", "function"), "function": known}
    return made if deferred is None else {**made, "defer_loading": deferred}


def _part(part: Any, *, in_parts: bool) -> Any:
    """One part of a message's content: its text, or as a template that goes through parts gets it."""
    if isinstance(part, str):
        return {"type": "text", "text": part} if in_parts else part
    kind = part.get("type")
    if kind not in _TEXTS:
        raise MediaError
    text = part.get(_TEXTS[kind])
    if text is None and kind in _ABSENT_SKIPPED:
        return None
    if not isinstance(text, str):
        raise MediaError
    if not in_parts:
        return text
    return {"type": "text", "text": text} | {name: value for name, value in part.items() if name not in _PART_FIELDS}


# What parts of any kind may have by name: those are not handed to templates.
_PART_FIELDS = frozenset(
    (
        "audio_embeds", "audio_url", "cache_control", "closed", "data", "detail", "file", "image_embeds", "image_pil",
        "image_url", "input_audio", "name", "prompt_cache_breakpoint", "prompt_embeds", "refusal", "text", "thinking",
        "type", "uuid", "video_embeds", "video_url",
    )
)  # fmt: skip


def _without_attribution(part: Any) -> Any:
    """A part of a system prompt without the line that differs with every request; None if nothing is left."""
    text = part if isinstance(part, str) else part.get("text") if part.get("type") == "text" else None
    if not (isinstance(text, str) and text.startswith(_ATTRIBUTION)):
        return part
    rest = text.partition("\n")[2]
    if not rest:
        return None
    return rest if isinstance(part, str) else {**part, "text": rest}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call, its fields in the models' order, its arguments as what they spell: an object, whatever came."""
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except ValueError:
            arguments = {}
    spelt = {"arguments": arguments if isinstance(arguments, dict) else {}, "name": function["name"]}
    made: dict[str, Any] = {"id": call["id"]} if "id" in call else {}
    return {**made, "function": spelt, "type": call.get("type", "function")}


def _one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All system messages as one before the others, unless there is but one, and it comes first."""
    systems = [place for place, message in enumerate(messages) if message["role"] == "system"]
    if not systems or systems == [0]:
        return messages
    texts = []
    for place in systems:
        content = messages[place]["content"]
        if isinstance(content, list):
            content = "\n".join(part["text"] for part in content)
        if content:
            texts.append(content)
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]
