"""OpenAI's Responses API as in vLLM without a store: a body becomes a chat, and its answer items and events.

Pure. Nothing is kept: a request that names an earlier response is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from farhop_lab.engine.formats.api import (
    Call,
    ChatBody,
    JsonSchema,
    Message,
    NamedTool,
    Part,
    ResponseFormat,
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

_encode = msgspec.json.encode


class NamedFunction(msgspec.Struct):
    """`tool_choice` that names a function."""

    name: str
    type: str = "function"


class TextFormat(msgspec.Struct):
    """`format` of `text`."""

    type: str
    name: str = "answer"
    schema: dict[str, Any] | None = None


class TextConfig(msgspec.Struct):
    """`text`."""

    format: TextFormat | None = None


class ResponsesBody(msgspec.Struct, kw_only=True):
    """POST /v1/responses."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | NamedFunction | None = None
    parallel_tool_calls: bool | None = True
    text: TextConfig | None = None
    max_output_tokens: int | None = None
    stream: bool | None = False
    previous_response_id: str | None = None
    cache_salt: str | None = None


_BODY = msgspec.json.Decoder(ResponsesBody)


def parse(body: bytes) -> Call:
    """A request for an answer. RefusedError if it is malformed or not supported."""
    asked = decoded(_BODY, body)
    if asked.previous_response_id is not None:
        raise refusal("previous_response_id", "no response is stored here")
    messages = [Message("system", asked.instructions)] if asked.instructions else []
    if isinstance(asked.input, str):
        messages.append(Message("user", asked.input))
    else:
        messages += [_message(item) for item in asked.input if item.get("type") != "reasoning"]
    chat = ChatBody(messages=messages, tools=asked.tools, stream=asked.stream, cache_salt=asked.cache_salt)
    if asked.text is not None and (wanted := asked.text.format) is not None:
        chat.response_format = ResponseFormat(wanted.type, JsonSchema(wanted.name, wanted.schema))
    call = call_of(chat, prompt := render_chat(chat), asked.max_output_tokens, "assistant")
    chosen = asked.tool_choice
    chat.tool_choice = NamedTool(Function(chosen.name)) if isinstance(chosen, NamedFunction) else chosen
    chat.parallel_tool_calls = asked.parallel_tool_calls
    chat.tools = [{"function": tool} for tool in asked.tools or () if tool.get("type") == "function"] or None
    return replace(with_tools(call, chat, prompt), model=asked.model)


def _message(item: dict[str, Any]) -> Message:
    kind = item.get("type", "message")
    if kind == "function_call":
        return Message("assistant", None, [{"name": item.get("name"), "arguments": item.get("arguments")}])
    if kind == "function_call_output":
        return Message("tool", str(item.get("output") or ""))
    if kind != "message":
        raise refusal("input", f"an item of type {kind!r} is not supported")
    content = item.get("content")
    if isinstance(content, list):
        return Message(str(item.get("role")), [Part("text", str(part.get("text") or "")) for part in content])
    return Message(str(item.get("role")), content)


def usage(sequence: Sequence) -> dict[str, Any]:
    """Input and output tokens, and how many of the input were cached."""
    return {
        "input_tokens": sequence.prompt_tokens,
        "input_tokens_details": {"cached_tokens": sequence.cached_tokens},
        "output_tokens": sequence.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": sequence.total_tokens,
    }


class ResponseAnswer:
    """The rendering of one answer: one message of one text."""

    __slots__ = ("_created", "_id", "_model", "_number", "_text")

    def __init__(self, id: str, model: str, created: int) -> None:  # noqa: A002
        self._id, self._model, self._created = id, model, created
        self._number, self._text = 0, ""

    def opening(self, sequence: Sequence) -> bytes:  # noqa: ARG002
        """The response begins, its message, and the text in that."""
        return (
            self._started()
            + self._event("response.output_item.added", {"output_index": 0, "item": self._item("", "in_progress")})
            + self._event("response.content_part.added", {**self._position, "part": _part("")})
        )

    def _started(self) -> bytes:
        started = {"response": self._response("in_progress", [], None)}
        return self._event("response.created", started) + self._event("response.in_progress", started)

    def token(self, text: str) -> bytes:
        """The chunk of one token."""
        self._text += text
        return self._event("response.output_text.delta", {**self._position, "delta": text, "logprobs": []})

    def closing(self, text: str, sequence: Sequence, *, include_usage: bool) -> bytes:  # noqa: ARG002 - always told
        """The chunk of the last token, and the events that end the items."""
        last, whole = self.token(text), self._text
        done = self._item(whole, "completed")
        return (
            last
            + self._event("response.output_text.done", {**self._position, "text": whole, "logprobs": []})
            + self._event("response.content_part.done", {**self._position, "part": _part(whole)})
            + self._event("response.output_item.done", {"output_index": 0, "item": done})
            + self._ended([done], sequence)
        )

    def _ended(self, output: list[dict[str, Any]], sequence: Sequence) -> bytes:
        return self._event("response.completed", {"response": self._response(_status(sequence), output, sequence)})

    def whole(self, answers: Sequence_[tuple[str, Sequence]]) -> bytes:
        """See Rendering."""
        ((text, sequence),) = answers
        return _encode(self._response(_status(sequence), self._output(text, sequence), sequence))

    def _output(self, text: str, sequence: Sequence) -> list[dict[str, Any]]:  # noqa: ARG002
        """The items of a whole response."""
        return [self._item(text, "completed")]

    @property
    def _position(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self._id}", "output_index": 0, "content_index": 0}

    def _item(self, text: str, status: str) -> dict[str, Any]:
        content = [_part(text)] if status == "completed" else []
        return {"id": f"msg_{self._id}", "type": "message", "role": "assistant", "status": status, "content": content}

    def _response(self, status: str, output: list[dict[str, Any]], sequence: Sequence | None) -> dict[str, Any]:
        short = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "incomplete_details": short,
            "model": self._model,
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": usage(sequence) if sequence is not None else None,
        }

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        event = {"type": name, "sequence_number": self._number, **fields}
        self._number += 1
        return frame(b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(event)))


class ResponseCalls(ResponseAnswer):
    """The rendering of one answer that calls functions: an item for each call. `named`: see Growing."""

    __slots__ = ("_calls", "_named", "_names")

    def __init__(self, id: str, model: str, created: int, named: str) -> None:  # noqa: A002
        super().__init__(id, model, created)
        self._named, self._calls, self._names = named, Growing(named), list[str]()

    def opening(self, sequence: Sequence) -> bytes:  # noqa: ARG002
        """The response begins; an item does with its call."""
        return self._started()

    def token(self, text: str) -> bytes:
        """The chunks of one token; none, where it is part of a call's frame."""
        return b"".join(self._added(text))

    def _added(self, text: str) -> Iterator[bytes]:
        for at, name, more in self._calls.take(text):
            if name is not None:
                if at:
                    yield self._done(at - 1)
                self._names.append(name)
                added = {"output_index": at, "item": self._call(at, name, "", "in_progress")}
                yield self._event("response.output_item.added", added)
            if more:
                yield self._event("response.function_call_arguments.delta", {**self._place(at), "delta": more})

    def _done(self, at: int) -> bytes:
        name, arguments = self._names[at], self._calls.arguments[at]
        told = {**self._place(at), "name": name, "arguments": arguments}
        item = {"output_index": at, "item": self._call(at, name, arguments, "completed")}
        return self._event("response.function_call_arguments.done", told) + self._event(
            "response.output_item.done", item
        )

    def closing(self, text: str, sequence: Sequence, *, include_usage: bool) -> bytes:  # noqa: ARG002 - always told
        """The chunks of the last token, and the events that end the items."""
        out = self.token(text)
        if self._names:
            out += self._done(len(self._names) - 1)
        made = zip(self._names, self._calls.arguments, strict=True)
        output = [self._call(at, name, arguments, "completed") for at, (name, arguments) in enumerate(made)]
        return out + self._ended(output, sequence)

    def _output(self, text: str, sequence: Sequence) -> list[dict[str, Any]]:
        found = [] if sequence.finished == "length" else parsed(text, self._named)
        made = [self._call(at, name, arguments, "completed") for at, (name, arguments) in enumerate(found)]
        return made or super()._output(text, sequence)

    def _place(self, at: int) -> dict[str, Any]:
        return {"item_id": f"fc_{self._id}_{at}", "output_index": at}

    def _call(self, at: int, name: str, arguments: str, status: str) -> dict[str, Any]:
        return {
            "id": f"fc_{self._id}_{at}",
            "type": "function_call",
            "call_id": call_id(self._id, 0, at),
            "name": name,
            "arguments": arguments,
            "status": status,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(sequence: Sequence) -> str:
    return "incomplete" if sequence.finished == "length" else "completed"
