"""Answers as vLLM writes them: one JSON document, or server-sent events framed as HTTP/1.1 chunks.

Pure, and lean: a token's chunk is three byte strings joined. Invariant: one event per HTTP chunk, one token per event.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

if TYPE_CHECKING:
    from farhop_lab.engine.sequence import Sequence

_encode = msgspec.json.encode
_PIECE_CHARS = 4  # nearly every token's text: its frame is prepared once


def frame(event: bytes) -> bytes:
    """One HTTP/1.1 chunk."""
    return b"%x\r\n%b\r\n" % (len(event), event)


DONE = frame(b"data: [DONE]\n\n")


def broken(message: str) -> bytes:
    """What ends a stream whose engine failed, as vLLM ends it."""
    error = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
    return frame(b"data: " + _encode({"error": error}) + b"\n\n") + DONE


def usage(sequence: Sequence) -> dict[str, Any]:
    """The `usage` object: tokens of prompt and answer, and how many of the prompt's came from the cache."""
    return {
        "prompt_tokens": sequence.prompt_tokens,
        "total_tokens": sequence.prompt_tokens + sequence.output_tokens,
        "completion_tokens": sequence.output_tokens,
        "prompt_tokens_details": {"cached_tokens": sequence.cached_tokens},
    }


class Rendering(Protocol):
    """How one request's tokens become bytes."""

    def opening(self) -> bytes:
        """What comes before the first token of a stream."""

    def token(self, text: str) -> bytes:
        """The chunk of one token."""

    def closing(self, text: str, sequence: Sequence, *, include_usage: bool) -> bytes:
        """The chunk of the last token, and what ends the stream."""

    def whole(self, text: str, sequence: Sequence) -> bytes:
        """The answer as one document."""


class Answer:
    """How one request is answered. `role` None: a completion, else a chat in which that role speaks."""

    __slots__ = ("_created", "_head", "_head_framed", "_id", "_model", "_role", "_tail")

    def __init__(self, id: str, model: str, created: int, role: str | None) -> None:  # noqa: A002
        self._id, self._model, self._created, self._role = id, model, created, role
        mark = "\0"
        event = self._event([self._choice(mark, None, None)])
        head, tail = event.split(_encode(mark)[1:-1])
        self._head, self._tail = head, tail
        self._head_framed = b"%x\r\n" % (len(head) + _PIECE_CHARS + len(tail)) + head

    def opening(self) -> bytes:
        """What comes before the first token: a chat says who speaks."""
        if self._role is None:
            return b""
        delta = {"role": self._role, "content": ""}
        return frame(self._event([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]))

    def token(self, text: str) -> bytes:
        """The chunk of one token. Its text is the model's own, which needs no escaping (see text.py)."""
        if len(text) == _PIECE_CHARS:
            return self._head_framed + text.encode("ascii") + self._tail + b"\r\n"
        return frame(self._head + text.encode("ascii") + self._tail)

    def closing(self, text: str, sequence: Sequence, *, include_usage: bool) -> bytes:
        """The chunk of the last token, with the reason for the end, then the usage if asked for, then [DONE]."""
        out = frame(self._event([self._choice(text, sequence.finished, sequence.stop_reason)]))
        if include_usage:
            out += frame(self._event([], usage(sequence)))
        return out + DONE

    def whole(self, text: str, sequence: Sequence) -> bytes:
        """The answer as one document."""
        chat = self._role is not None
        choice: dict[str, Any] = {"index": 0}
        if chat:
            message: dict[str, Any] = {"role": self._role, "content": text, "refusal": None, "tool_calls": []}
            choice["message"] = message | {"reasoning_content": None}
        else:
            choice["text"] = text
        choice |= {"logprobs": None, "finish_reason": sequence.finished, "stop_reason": sequence.stop_reason}
        document = {
            "id": self._id,
            "object": "chat.completion" if chat else "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": usage(sequence),
            "kv_transfer_params": None,
        }
        return _encode(document)

    def _choice(self, text: str, finished: str | None, stop_reason: str | None) -> dict[str, Any]:
        if self._role is None:
            choice: dict[str, Any] = {"index": 0, "text": text, "logprobs": None, "finish_reason": finished}
            return choice | {"stop_reason": stop_reason}
        choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finished}
        return choice if finished is None else choice | {"stop_reason": stop_reason}

    def _event(self, choices: list[dict[str, Any]], used: dict[str, Any] | None = None) -> bytes:
        document: dict[str, Any] = {
            "id": self._id,
            "object": "text_completion" if self._role is None else "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
        if used is not None or self._role is None:  # vLLM writes a null usage into completions, none into chats
            document["usage"] = used
        return b"data: " + _encode(document) + b"\n\n"
