"""Anthropic's Messages API as in vLLM: a body becomes a chat, and its answer blocks, events and usage.

Pure. vLLM drops Claude Code's billing line and puts tool results before the user's text beside them; from 0.32 on it
takes a `cache_salt` here, too. Its errors have Anthropic's form, with types of its own.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from farhop_lab.engine.core.text import token_count
from farhop_lab.engine.formats.api import (
    Call,
    ChatBody,
    JsonSchema,
    Message,
    NamedTool,
    Part,
    RefusedError,
    ResponseFormat,
    StreamOptions,
    call_of,
    decoded,
    refusal,
    render_chat,
    with_tools,
)
from farhop_lab.engine.formats.render import frame
from farhop_lab.engine.formats.tools import Function, Growing, call_id, parsed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as Sequence_

    from farhop_lab.engine.core.sequence import Sequence

_BILLING = "x-anthropic-billing-header"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_encode = msgspec.json.encode


class Turn(msgspec.Struct):
    """One message."""

    role: str
    content: str | list[dict[str, Any]]


class Tool(msgspec.Struct):
    """One tool."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None


class ToolChoice(msgspec.Struct):
    """Whether a tool is to be called, and which."""

    type: str
    name: str | None = None


class OutputFormat(msgspec.Struct):
    """What the answer's text is to be."""

    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct):
    """`output_config`."""

    format: OutputFormat | None = None


class CountBody(msgspec.Struct):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: list[Turn]
    system: str | list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None


class MessagesBody(CountBody, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int
    stream: bool | None = False
    stop_sequences: list[str] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    cache_salt: str | None = None


class AnthropicRefusedError(RefusedError):
    """The same refusal, in Anthropic's format."""

    def body(self) -> bytes:
        """The error with vLLM's text."""
        return _encode({"type": "error", "error": {"type": self.kind, "message": self.message}})


_MESSAGES = msgspec.json.Decoder(MessagesBody)
_COUNT = msgspec.json.Decoder(CountBody)


def parse(body: bytes) -> Call:
    """A request for an answer. RefusedError if it is malformed or not supported."""
    asked = decoded(_MESSAGES, body)
    if asked.max_tokens < 1:
        raise refusal("max_tokens", "max_tokens must be positive")
    chat = _chat(asked)
    chat.stream, chat.stop, chat.cache_salt = asked.stream, asked.stop_sequences, asked.cache_salt
    chat.stream_options = StreamOptions(include_usage=True) if asked.stream else None
    chat.tool_choice = _choice(asked.tool_choice)
    if asked.output_config is not None and (wanted := asked.output_config.format) is not None:
        chat.response_format = ResponseFormat(wanted.type, JsonSchema("answer", wanted.schema))
    call = call_of(chat, prompt := render_chat(chat), asked.max_tokens, "assistant")
    return replace(with_tools(call, chat, prompt), model=asked.model)


def _choice(asked: ToolChoice | None) -> str | NamedTool | None:
    if asked is None:
        return None
    if asked.type == "tool" and asked.name:
        return NamedTool(Function(asked.name))
    if asked.type not in _CHOICES:
        raise refusal("tool_choice", "give auto, any, none, or tool with a name")
    return _CHOICES[asked.type]


def counted(body: bytes) -> tuple[str, bytes]:
    """Model and rendered prompt of a request to count tokens."""
    asked = decoded(_COUNT, body)
    return asked.model, render_chat(_chat(asked))


def count(prompt: bytes) -> bytes:
    """The answer to that."""
    return _encode({"input_tokens": token_count(prompt)})


def _chat(asked: CountBody) -> ChatBody:
    if not asked.messages:
        raise refusal("messages", "it is missing or empty; give at least one message")
    messages: list[Message] = []
    if system := _texts(asked.system):
        messages.append(Message("system", system))
    for turn in asked.messages:
        messages += _of_turn(turn)
    tools = [
        {
            "type": "function",
            "function": {"name": t.name, "description": t.description, "parameters": t.input_schema},
        }
        for t in asked.tools or ()
    ]
    return ChatBody(messages=messages, tools=tools or None)


def _texts(system: str | list[dict[str, Any]] | None) -> str:
    if isinstance(system, str) or system is None:
        return system or ""
    texts = [str(block.get("text") or "") for block in system if block.get("type") == "text"]
    return "".join(text for text in texts if not text.startswith(_BILLING))


def _of_turn(turn: Turn) -> list[Message]:
    if isinstance(turn.content, str):
        return [Message(turn.role, turn.content)]
    results: list[Message] = []
    parts: list[Part] = []
    calls: list[Any] = []
    for block in turn.content:
        kind = block.get("type")
        if kind == "text" and block.get("text"):
            parts.append(Part("text", str(block["text"])))
        elif kind == "image":
            parts.append(Part("image_url", image_url={"url": block.get("source")}))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            results.append(Message("tool", _result(block.get("content"))))
        elif kind not in ("text", "thinking", "redacted_thinking"):
            raise refusal("messages", f"a block of type {kind!r} is not supported")
    content: str | list[Part] | None = parts or None
    if len(parts) == 1 and parts[0].type == "text":
        content = parts[0].text
    return [*results, Message(turn.role, content, calls or None)] if content or calls else results


def _result(content: Any) -> str:
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else []
    return "\n".join(str(block.get("text") or "") for block in blocks if block.get("type") == "text")


def usage(sequence: Sequence) -> dict[str, int]:
    """As Anthropic counts: cached tokens are separate from the other input."""
    return {
        "input_tokens": sequence.prompt_tokens - sequence.cached_tokens,
        "output_tokens": sequence.output_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": sequence.cached_tokens,
    }


class MessageAnswer:
    """The rendering of one answer: one block of text."""

    __slots__ = ("_head", "_id", "_model", "_tail")

    def __init__(self, id: str, model: str) -> None:  # noqa: A002
        self._id, self._model = id, model
        delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "\0"}}
        self._head, self._tail = _event(delta).split(_encode("\0")[1:-1])

    def opening(self, sequence: Sequence) -> bytes:
        """The message begins, and its only block."""
        return self._started(sequence) + frame(_event(_block_start(0, {"type": "text", "text": ""})))

    def _started(self, sequence: Sequence) -> bytes:
        started_usage = {"input_tokens": sequence.prompt_tokens, "output_tokens": 0}
        message = {**self._message([], None, None), "usage": started_usage}
        return frame(_event({"type": "message_start", "message": message}))

    def token(self, text: str) -> bytes:
        """The chunk of one token."""
        return frame(self._head + _encode(text)[1:-1] + self._tail)

    def closing(self, text: str, sequence: Sequence, *, include_usage: bool) -> bytes:  # noqa: ARG002 - always told
        """The chunk of the last token, and the events that end the message."""
        stop = frame(_event({"type": "content_block_stop", "index": 0}))
        return self.token(text) + stop + self._ended(sequence.finished, sequence)

    def _ended(self, finished: str | None, sequence: Sequence) -> bytes:
        delta = {"stop_reason": _STOPS.get(finished or "stop", "end_turn"), "stop_sequence": None}
        ends = ({"type": "message_delta", "delta": delta, "usage": usage(sequence)}, {"type": "message_stop"})
        return b"".join(frame(_event(end)) for end in ends)

    def whole(self, answers: Sequence_[tuple[str, Sequence]]) -> bytes:
        """See Rendering."""
        ((text, sequence),) = answers
        content, finished = self._content(text, sequence)
        reason = _STOPS.get(finished or "stop", "end_turn")
        return _encode({**self._message(content, reason, None), "usage": usage(sequence)})

    def _content(self, text: str, sequence: Sequence) -> tuple[list[dict[str, Any]], str | None]:
        """The blocks of a whole message, and why it ended."""
        return [{"type": "text", "text": text}] if text else [], sequence.finished

    def _message(self, content: list[dict[str, Any]], reason: str | None, at: str | None) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self._model,
            "stop_reason": reason,
            "stop_sequence": at,
        }


class MessageCalls(MessageAnswer):
    """The rendering of one answer that calls tools: a block for each call."""

    __slots__ = ("_calls", "_named")

    def __init__(self, id: str, model: str, named: str) -> None:  # noqa: A002
        super().__init__(id, model)
        self._named, self._calls = named, Growing(named)

    def opening(self, sequence: Sequence) -> bytes:
        """The message begins; a block does with its call."""
        return self._started(sequence)

    def token(self, text: str) -> bytes:
        """The chunks of one token; none, where it is part of a call's frame."""
        return b"".join(frame(_event(fields)) for fields in self._added(text))

    def _added(self, text: str) -> Iterator[dict[str, Any]]:
        for at, name, more in self._calls.take(text):
            if name is not None:
                if at:
                    yield {"type": "content_block_stop", "index": at - 1}
                yield _block_start(at, self._block(at, name, {}))
            if more:
                delta = {"type": "input_json_delta", "partial_json": more}
                yield {"type": "content_block_delta", "index": at, "delta": delta}

    def closing(self, text: str, sequence: Sequence, *, include_usage: bool) -> bytes:  # noqa: ARG002 - always told
        """The chunks of the last token, and the events that end the message."""
        out, finished = self.token(text), sequence.finished
        if made := len(self._calls.arguments):
            out += frame(_event({"type": "content_block_stop", "index": made - 1}))
        return out + self._ended("tool_calls" if made and finished == "stop" else finished, sequence)

    def _content(self, text: str, sequence: Sequence) -> tuple[list[dict[str, Any]], str | None]:
        found = [] if sequence.finished == "length" else parsed(text, self._named)
        try:
            made = [self._block(at, name, json.loads(arguments)) for at, (name, arguments) in enumerate(found)]
        except ValueError:  # a stop sequence cut it short
            made = []
        if not made:
            return super()._content(text, sequence)
        return made, sequence.finished if self._named else "tool_calls"  # see CallsAnswer

    def _block(self, at: int, name: str, given: dict[str, Any]) -> dict[str, Any]:
        return {"type": "tool_use", "id": call_id(self._id, 0, at), "name": name, "input": given}


def _block_start(index: int, block: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def _event(fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (str(fields["type"]).encode(), _encode(fields))
