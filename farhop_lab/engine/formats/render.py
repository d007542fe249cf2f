"""Answers in vLLM's format: one JSON document, or server-sent events framed as HTTP/1.1 chunks.

Pure, and lean: a token's chunk is three byte strings joined. Invariant: one event per HTTP chunk, one token per event.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from farhop_lab.engine.core.text import END_ID, TOKEN_BYTES, id_of, ids_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Sequence_

    from farhop_lab.engine.core.sequence import Sequence
    from farhop_lab.engine.formats.logprobs import Logprobs

_encode = msgspec.json.encode
_PIECE_CHARS = 4  # nearly every token's text: its frame is prepared once


def frame(event: bytes) -> bytes:
    """One HTTP/1.1 chunk."""
    return b"%x\r\n%b\r\n" % (len(event), event)


DONE = frame(b"data: [DONE]\n\n")


def broken(message: str) -> bytes:
    """The error event that ends a stream whose engine failed, as in vLLM; not framed."""
    error = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
    return b"data: " + _encode({"error": error}) + b"\n\ndata: [DONE]\n\n"


def usage(*sequences: Sequence) -> dict[str, Any]:
    """The `usage` object: tokens of prompt and answers, and how many of the prompt's came from the cache.

    The prompt of several answers counts once.
    """
    first, output_tokens = sequences[0], sum(sequence.output_tokens for sequence in sequences)
    return {
        "prompt_tokens": first.prompt_tokens,
        "total_tokens": first.prompt_tokens + output_tokens,
        "completion_tokens": output_tokens,
        "prompt_tokens_details": {"cached_tokens": first.cached_tokens},
    }


class TokenIds:
    """A sequence's tokens by number, as for `return_token_ids`."""

    def __init__(self, piece_ids: Mapping[bytes, bytes] | None = None) -> None:
        """`piece_ids`: a tokenizer's, for the model's output; otherwise a token's id is its bytes."""
        self._piece_ids = piece_ids or {}

    def of_prompt(self, sequence: Sequence) -> list[int]:
        """The prompt's."""
        prompt = sequence.prompt
        if self._piece_ids:
            return [int.from_bytes(prompt[at : at + TOKEN_BYTES], "big") for at in range(0, len(prompt), TOKEN_BYTES)]
        return ids_of(prompt)

    def of_piece(self, sequence: Sequence) -> int:
        """That of the token just generated."""
        piece = sequence.last_piece
        if self._piece_ids:
            return int.from_bytes(self._piece_ids.get(piece, piece), "big") if piece else END_ID
        return id_of(piece) if piece else END_ID


class Rendering(Protocol):
    """Turns one request's tokens into bytes."""

    def opening(self, sequence: Sequence) -> bytes:
        """What comes before the first token of a stream."""

    def token(self, text: str) -> bytes:
        """The chunk of one token."""

    def closing(self, text: str, sequence: Sequence, *, include_usage: bool) -> bytes:
        """The chunk of the last token, and the end of the stream."""

    def whole(self, answers: Sequence_[tuple[str, Sequence]]) -> bytes:
        """Each answer's text and sequence as one document."""


class Answer:
    """The rendering of one answer. `role` None: a completion, otherwise a chat with that role; `echo` precedes a
    completion that is not streamed.

    `beside` gives the renderings of its further answers; the stream ends with the last of them. `token_ids` turns a
    sequence's prompt and a piece of its answer into token ids, `logprobs` gathers those of its tokens, if requested.
    """

    __slots__ = (
        "_created", "_echo", "_ended", "_head", "_head_framed", "_id", "_index", "_model", "_of_each", "_open", "_role",
        "_tail", "_token_ids", "_usage_each", "kv_transfer_params", "logprobs",
    )  # fmt: skip

    def __init__(
        self,
        id: str,  # noqa: A002
        model: str,
        created: int,
        role: str | None,
        index: int = 0,
        echo: str = "",
        token_ids: TokenIds | None = None,
        usage_each: bool = False,
        logprobs: Logprobs | None = None,
    ) -> None:
        self._echo, self._token_ids, self._usage_each = echo, token_ids, usage_each
        self._id, self._model, self._created, self._role, self._index = id, model, created, role, index
        self._ended: list[Sequence] = []
        self.logprobs = logprobs
        self._of_each = [self]  # this answer and those beside it, by their index
        self.kv_transfer_params: dict[str, Any] | None = None  # where another engine finds the prompt's KV
        self._open = [1]
        mark = "\0"
        event = self._event([self._choice(mark, None, None)])
        head, tail = event.split(_encode(mark)[1:-1])
        self._head, self._tail = head, tail
        self._head_framed = b"%x\r\n" % (len(head) + _PIECE_CHARS + len(tail)) + head

    def beside(self, index: int) -> Answer:
        """The rendering of another answer to the same prompt, in the same stream."""
        other = self._copy(index)
        other._ended, other._open, other._of_each = self._ended, self._open, self._of_each
        self._open[0] += 1
        self._of_each.append(other)
        return other

    def _copy(self, index: int) -> Answer:
        return Answer(*self._made_of(index))

    def _made_of(self, index: int) -> tuple[Any, ...]:
        logprobs = self.logprobs.beside() if self.logprobs is not None else None
        head = self._id, self._model, self._created, self._role, index
        return *head, self._echo, self._token_ids, self._usage_each, logprobs

    @property
    def details(self) -> bool:
        """Whether a token's chunk has more than its text."""
        return self._token_ids is not None or self._usage_each or self.logprobs is not None

    def opening(self, sequence: Sequence) -> bytes:
        """What comes before the first token: a chat has its role there."""
        if self._role is None:
            return b""
        delta = {"role": self._role, "content": ""}
        choice = {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}
        if self._token_ids is None:
            return frame(self._event([choice]))
        return frame(self._event([choice], prompt_token_ids=self._token_ids.of_prompt(sequence)))

    def token_with_details(self, text: str, sequence: Sequence) -> bytes:
        """The chunk of one token, with its id if ids are wanted (a completion's first also has the prompt's), its
        logprobs and the usage so far if those are.
        """
        return frame(self._event([self._with_details(self._choice(text, None, None), sequence)], self._used(sequence)))

    def _used(self, sequence: Sequence) -> dict[str, Any] | None:
        return usage(sequence) if self._usage_each else None

    def _with_details(self, choice: dict[str, Any], sequence: Sequence) -> dict[str, Any]:
        if self.logprobs is not None:
            choice["logprobs"] = self.logprobs.take(sequence)
        if self._token_ids is None:
            return choice
        if self._role is None:
            first = sequence.output_tokens == 1
            choice["prompt_token_ids"] = self._token_ids.of_prompt(sequence) if first else None
        return choice | {"token_ids": [self._token_ids.of_piece(sequence)]}

    def token(self, text: str) -> bytes:
        """The chunk of one token. The model's own narrow text needs no escaping (see text.py)."""
        if len(text) == _PIECE_CHARS and text[0] == " " and text.isascii() and text[1:].isalpha():
            return self._head_framed + text.encode() + self._tail + b"\r\n"
        return frame(self._head + _encode(text)[1:-1] + self._tail)

    def closing(self, text: str, sequence: Sequence, *, include_usage: bool) -> bytes:
        """The chunk of the last token, with the finish reason; for the last answer also the end of the stream: the
        usage if wanted, then [DONE].
        """
        choice = self._with_details(self._last(text, sequence), sequence)
        out = frame(self._event([choice], self._used(sequence)))
        self._ended.append(sequence)
        if len(self._ended) < self._open[0]:
            return out
        if include_usage:
            out += frame(self._event([], usage(*self._ended)))
        return out + DONE

    def _last(self, text: str, sequence: Sequence) -> dict[str, Any]:
        return self._choice(text, sequence.finished, sequence.stop_reason)

    def whole(self, answers: Sequence_[tuple[str, Sequence]]) -> bytes:
        """See Rendering."""
        chat = self._role is not None
        document = {
            "id": self._id,
            "object": "chat.completion" if chat else "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [self._whole_choice(at, text, sequence) for at, (text, sequence) in enumerate(answers)],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": usage(*(sequence for _, sequence in answers)),
            "kv_transfer_params": self.kv_transfer_params,
        }
        return _encode(document)

    def _whole_choice(self, index: int, text: str, sequence: Sequence) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index}
        reason = sequence.finished
        if self._role is not None:
            message, reason = self._message(text, sequence, index)
            choice["message"] = message | {"reasoning_content": None}
        else:
            choice["text"] = self._echo + text
        gathered = None if self.logprobs is None else self._of_each[index].logprobs
        logprobs = gathered.whole() if gathered is not None else None
        return choice | {"logprobs": logprobs, "finish_reason": reason, "stop_reason": sequence.stop_reason}

    def _message(self, text: str, sequence: Sequence, index: int) -> tuple[dict[str, Any], str | None]:  # noqa: ARG002
        """A chat's message, and why it ended."""
        return {"role": self._role, "content": text, "refusal": None, "tool_calls": []}, sequence.finished

    def _choice(self, text: str, finished: str | None, stop_reason: str | None) -> dict[str, Any]:
        if self._role is None:
            choice: dict[str, Any] = {"index": self._index, "text": text, "logprobs": None, "finish_reason": finished}
            return choice | {"stop_reason": stop_reason}
        choice = {"index": self._index, "delta": {"content": text}, "logprobs": None, "finish_reason": finished}
        return choice if finished is None else choice | {"stop_reason": stop_reason}

    def _event(self, choices: list[dict[str, Any]], used: dict[str, Any] | None = None, **more: Any) -> bytes:
        document: dict[str, Any] = {
            "id": self._id,
            "object": "text_completion" if self._role is None else "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
        if used is not None or self._role is None:  # vLLM writes a null usage into completions, but not into chats
            document["usage"] = used
        document |= more
        return b"data: " + _encode(document) + b"\n\n"
