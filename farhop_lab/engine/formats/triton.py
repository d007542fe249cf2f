"""Triton's generation APIs: `infer` of KServe's protocol over text tensors, and the `generate` extension.

Pure. The inputs are those of TensorRT-LLM's ensemble: `text_input`, `max_tokens`, `text_output`. Never guesses: other
tensors and the binary data extension are refused by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from farhop_lab.engine.core.sequence import EngineRequest
from farhop_lab.engine.formats.api import COMPLETION_MAX_TOKENS, Call, RefusedError, decoded, refusal
from farhop_lab.engine.formats.render import frame

if TYPE_CHECKING:
    from collections.abc import Sequence as Sequence_

    from farhop_lab.engine.core.sequence import Sequence

VERSION = "1"  # the model's only one


class Tensor(msgspec.Struct):
    """One input of an inference."""

    name: str
    datatype: str
    shape: list[int]
    data: list[Any] | None = None


class InferBody(msgspec.Struct):
    """POST /v2/models/{model}/infer."""

    inputs: list[Tensor]
    id: str | None = None


class Parameters(msgspec.Struct):
    """Parameters of a generation, as far as this engine uses them."""

    max_tokens: int | None = None


class GenerateBody(msgspec.Struct):
    """POST /v2/models/{model}/generate and generate_stream."""

    text_input: str
    max_tokens: int | None = None
    parameters: Parameters | None = None


class TritonRefusedError(RefusedError):
    """The same refusal, in the protocol's format: the error is a text."""

    def body(self) -> bytes:
        """As Triton writes it."""
        return msgspec.json.encode({"error": self.message})


_INFER = msgspec.json.Decoder(InferBody)
_GENERATE = msgspec.json.Decoder(GenerateBody)


def parse_infer(body: bytes, model: str) -> tuple[Call, str | None]:
    """What to generate, and the request's own id. RefusedError if it is malformed or not supported."""
    asked = decoded(_INFER, body)
    given = {tensor.name: _only(tensor) for tensor in asked.inputs}
    text, limit = given.get("text_input"), given.get("max_tokens")
    if not isinstance(text, str):
        raise refusal("inputs", "tensor text_input must hold one string, as BYTES")
    if limit is not None and type(limit) is not int:
        raise refusal("inputs", "tensor max_tokens must hold one whole number")
    return _call(model, text, limit, stream=False), asked.id


def parse_generate(body: bytes, model: str, *, stream: bool) -> Call:
    """What to generate. RefusedError if it is malformed."""
    asked = decoded(_GENERATE, body)
    limit = asked.max_tokens
    if limit is None and asked.parameters is not None:
        limit = asked.parameters.max_tokens
    return _call(model, asked.text_input, limit, stream=stream)


def _only(tensor: Tensor) -> Any:
    if tensor.name not in ("text_input", "max_tokens"):
        raise refusal("inputs", f"unexpected inference input '{tensor.name}' for this model")
    value: Any = tensor.data
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value


def _call(model: str, text: str, limit: int | None, *, stream: bool) -> Call:
    if limit is not None and limit < 1:
        raise refusal("max_tokens", f"max_tokens must be at least 1, got {limit}.")
    wanted = EngineRequest(text.encode("utf-8", "surrogatepass"), max_tokens=limit or COMPLETION_MAX_TOKENS)
    return Call(wanted, model, stream, include_usage=False, role=None)


class Generated:
    """The rendering of a generation: one document, or one event for each token."""

    def __init__(self, model: str) -> None:
        self._model = model

    def opening(self, sequence: Sequence) -> bytes:  # noqa: ARG002
        """Nothing comes before the first token."""
        return b""

    def token(self, text: str) -> bytes:
        """The chunk of one token."""
        return frame(b"data: " + self._document(text) + b"\n\n")

    def closing(self, text: str, sequence: Sequence, *, include_usage: bool) -> bytes:  # noqa: ARG002
        """The chunk of the last token; the stream has no end marker."""
        return self.token(text)

    def whole(self, answers: Sequence_[tuple[str, Sequence]]) -> bytes:
        """The answer as one document."""
        return self._document(answers[0][0])

    def _document(self, text: str) -> bytes:
        return msgspec.json.encode({"model_name": self._model, "model_version": VERSION, "text_output": text})


class Inferred(Generated):
    """The rendering of an inference, as a tensor."""

    def __init__(self, model: str, request_id: str | None) -> None:
        super().__init__(model)
        self._id = request_id

    def _document(self, text: str) -> bytes:
        output = {"name": "text_output", "datatype": "BYTES", "shape": [1], "data": [text]}
        named = {} if self._id is None else {"id": self._id}
        document = {**named, "model_name": self._model, "model_version": VERSION, "outputs": [output]}
        return msgspec.json.encode(document)
