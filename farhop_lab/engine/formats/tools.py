"""Calls of tools: whether and how the emulated model calls those it is offered, and how vLLM shows its calls.

The model writes a call as Hermes' models do, `<tool_call>{"name": ..., "arguments": ...}</tool_call>`; where the
request names the tool, it writes the arguments alone. Pure. Never calls a tool that was not offered, nor with arguments
that its schema does not allow.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from farhop_lab.engine.formats.render import Answer, frame
from farhop_lab.engine.formats.schema import Draws, text_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop_lab.engine.core.sequence import Sequence

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(r'<tool_call>\{"name": ("(?:[^"\\]|\\.)*"), "arguments": ')
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
AUTO_TENTHS = 5  # of ten conversations that offer tools and leave the choice, in so many the model calls one


class Function(msgspec.Struct):
    """A tool's function."""

    name: str
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct):
    """A tool on offer."""

    function: Function
    type: str = "function"


def calls(prompt: bytes) -> bool:
    """Whether the model, left to choose, calls a tool in answer to this prompt."""
    return xxhash.xxh3_64_intdigest(b"tools\0" + prompt) % 10 < AUTO_TENTHS


def script(tools: list[Tool], prompt: bytes, named: str, *, parallel: bool) -> Callable[[int], bytes]:
    """The text of the call, or calls, by the model's seed. `named`: the tool to be called, "" for any."""

    def text(seed: int) -> bytes:
        draws = Draws(prompt, seed)
        if named:
            (tool,) = (one for one in tools if one.function.name == named)
            return text_of(tool.function.parameters or NOTHING, draws).encode()
        out = ""
        for _ in range(2 if parallel and draws.below(4) == 0 else 1):
            function = tools[draws.below(len(tools))].function
            arguments = text_of(function.parameters or NOTHING, draws)
            out += f'{_OPEN}{{"name": {json.dumps(function.name)}, "arguments": {arguments}}}{_CLOSE}'
        return out.encode()

    return text


def parsed(text: str, named: str = "") -> list[tuple[str, str]]:
    """The name and the arguments of each call in an answer's text, as far as they are written."""
    if named:
        return [(named, text)]
    found: list[tuple[str, str]] = []
    for part in text.split(_CLOSE):
        if begun := _CALL.match(part):
            arguments = part[begun.end() :]
            whole = text.count(_CLOSE) > len(found)
            found.append((json.loads(begun[1]), arguments[:-1] if whole else _certain(arguments)))
    return found


def _certain(arguments: str) -> str:
    """Without an end that may belong to the frame."""
    for length in range(min(len(arguments), len(_CLOSE)), 0, -1):
        if ("}" + _CLOSE).startswith(arguments[-length:]):
            return arguments[:-length]
    return arguments


class Growing:
    """The calls in a text that grows token by token. `named`: the tool that the request named, "" for the model's
    choice.
    """

    __slots__ = ("_named", "_shown", "_text")

    def __init__(self, named: str) -> None:
        self._named, self._text = named, ""
        self._shown: list[str] = []  # of each call, the arguments that were told

    def take(self, text: str) -> list[tuple[int, str | None, str]]:
        """What a token adds, of each call it adds to: which one, its name if it begins, and its further arguments."""
        self._text += text
        new: list[tuple[int, str | None, str]] = []
        for at, (name, arguments) in enumerate(parsed(self._text, self._named)):
            begins = at == len(self._shown)
            if begins:
                self._shown.append("")
            if (more := arguments[len(self._shown[at]) :]) or begins:
                self._shown[at] = arguments
                new.append((at, name if begins else None, more))
        return new

    @property
    def arguments(self) -> list[str]:
        """Those told so far, of each call."""
        return self._shown


def call_id(request_id: str, answer: int, at: int) -> str:
    """The id of a call: of which request, which of its answers, and which call there."""
    digest = xxhash.xxh3_64_hexdigest(f"{request_id}\0{answer}\0{at}".encode())
    return f"chatcmpl-tool-{digest}"


class CallsAnswer(Answer):
    """An answer that calls tools. `named`: the tool that the request named, "" for the model's choice."""

    __slots__ = ("_calls", "_named")

    def __init__(self, *given: Any, named: str, **more: Any) -> None:
        super().__init__(*given, **more)
        self._named, self._calls = named, Growing(named)

    def _copy(self, index: int) -> Answer:
        return CallsAnswer(*self._made_of(index), named=self._named)

    def token(self, text: str) -> bytes:
        """The chunk of one token; none, where it is part of a call's frame."""
        return self._chunk(text, None)

    def token_with_details(self, text: str, sequence: Sequence) -> bytes:
        """See Answer."""
        return self._chunk(text, sequence)

    def _chunk(self, text: str, sequence: Sequence | None) -> bytes:
        delta = self._delta(text)
        if sequence is None:
            return frame(self._event([self._of(delta)])) if delta else b""
        details = self._with_details(self._of(delta), sequence)
        return frame(self._event([details], self._used(sequence))) if delta else b""

    def _of(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _delta(self, text: str) -> dict[str, Any]:
        new: list[dict[str, Any]] = []
        for at, name, more in self._calls.take(text):
            if name is not None:
                made = call_id(self._id, self._index, at)
                new.append({"id": made, "type": "function", "index": at, "function": {"name": name}})
            if more:
                new.append({"index": at, "function": {"arguments": more}})
        return {"content": None, "tool_calls": new} if new else {}

    def _last(self, text: str, sequence: Sequence) -> dict[str, Any]:
        delta = self._delta(text)
        reason = "tool_calls" if self._calls.arguments and sequence.finished == "stop" else sequence.finished
        return {**self._of(delta), "finish_reason": reason, "stop_reason": sequence.stop_reason}

    def _message(self, text: str, sequence: Sequence, index: int) -> tuple[dict[str, Any], str | None]:
        cut = sequence.finished == "length"  # then vLLM's parser finds no call in it
        found = [] if cut and not self._named else parsed(text, self._named)
        made = [
            {"id": call_id(self._id, index, at), "type": "function", "function": {"name": name, "arguments": arguments}}
            for at, (name, arguments) in enumerate(found)
        ]
        content = "" if self._named else text if not made else None
        # As OpenAI's: a call that the request named is no reason of the model's.
        reason = "tool_calls" if made and not self._named else sequence.finished
        return {"role": self._role, "content": content, "refusal": None, "tool_calls": made}, reason
