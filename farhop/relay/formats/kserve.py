"""Reading bodies of the Open Inference Protocol (KServe V2, Triton): tensors to infer from, texts to generate from.

The model is in the path. Of the tensors only text is a prompt: the cost of other tensors does not follow from their
size, so they count only as a place in the batch. Never decodes a tensor that is not text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from farhop.relay.formats import paths, preferences, shape
from farhop.relay.formats.field_guard import arguments
from farhop.relay.formats.prompt import PAIR, Prompt, header, how_many, invalid, json_decoder, longest, output_limit
from farhop.relay.formats.texts import texts

if TYPE_CHECKING:
    from farhop.relay.formats.field_guard import Guard

_JSON_BYTES = b"inference-header-content-length"  # Triton's binary data extension: JSON first, raw tensors behind it


class _Tensor(msgspec.Struct):
    name: str
    datatype: str
    shape: msgspec.Raw
    data: msgspec.Raw = msgspec.Raw(b"")
    parameters: dict[str, Any] | None = None


class _Output(msgspec.Struct):
    parameters: dict[str, Any] | None = None


class _Infer(msgspec.Struct, kw_only=True):
    inputs: list[_Tensor]
    outputs: list[_Output] | None = None


class _Parameters(msgspec.Struct):
    max_tokens: int | None = None
    n: Any = None
    best_of: Any = None


class _Generate(_Parameters, kw_only=True):
    """TensorRT-LLM's backend takes `max_tokens` as an input, vLLM's as a parameter."""

    text_input: msgspec.Raw
    parameters: _Parameters | None = None


_infer = json_decoder(_Infer)
_generate = msgspec.json.Decoder(_Generate)
# Flat, or nested as deep as shapes of texts are; at the first number it ends.
_Nested: TypeAlias = list[str | list[str | list[str | list[str]]]]
_data = msgspec.json.Decoder(str | _Nested)


def has_raw(lines: bytes) -> bool:
    """Whether raw tensors may follow a body's JSON, by its header lines ready to be sent on."""
    return b"\r\n" + _JSON_BYTES + b":" in b"\r\n" + lines


def infer(body: bytes, path: bytes, headers: bytes, guard: Guard, *, light: bool = False) -> Prompt:
    """`.../infer`. Raises BodyError, or msgspec's errors; `light` as in `shape.outlined`."""
    json_part = memoryview(body)[: _json_bytes(body, headers)]
    fields = shape.check(json_part, "inputs", light=light)
    guard.fields(fields)
    document = _infer(json_part)
    for tensor in (*document.inputs, *(document.outputs or ())):
        arguments("parameters", tensor.parameters)
    if not document.inputs:
        raise invalid("inputs", "`inputs` must hold at least one tensor")
    for i, tensor in enumerate(document.inputs):
        if bytes(memoryview(tensor.shape)[:1]) != b"[":
            raise invalid(f"inputs[{i}].shape", "`shape` must be a list of numbers")
    texts = [text.encode() for tensor in document.inputs if tensor.datatype == "BYTES" for text in _texts(tensor)]
    return Prompt(paths.model_in(path), PAIR.join(texts), preferences=preferences.read(fields))


def _json_bytes(body: bytes, headers: bytes) -> int:
    value = header(headers, _JSON_BYTES)
    if value is None:
        return len(body)
    if not value.isdigit() or len(value) > 15 or int(value) > len(body):
        name = _JSON_BYTES.decode()
        raise invalid(name, f"`{name}` must be how many bytes of the body are JSON, at most {len(body)}")
    return int(value)


def _texts(tensor: _Tensor) -> list[str]:
    """The texts of a tensor, row by row: its data may be flat or nested as its shape is."""
    raw = bytes(tensor.data)
    if raw in (b"", b"null"):
        return []  # it is among the raw ones
    found: list[str] = []
    try:
        waiting: list[Any] = [_data.decode(raw)]
    except msgspec.ValidationError:
        detail = f"`data` of tensor `{tensor.name[:64]}` must hold strings, as it is of type BYTES"
        raise invalid("inputs", detail) from None
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            found.append(value)
        else:
            waiting += reversed(value)
    return found


def generate(body: bytes, path: bytes, _headers: bytes, _guard: Guard) -> Prompt:
    """`.../generate`. Raises BodyError, or msgspec's errors."""
    return _read_generate(body, path, stream=False)


def generate_stream(body: bytes, path: bytes, _headers: bytes, _guard: Guard) -> Prompt:
    """`.../generate_stream`: the path says that the answer is a stream. Raises as `generate` does."""
    return _read_generate(body, path, stream=True)


def _read_generate(body: bytes, path: bytes, *, stream: bool) -> Prompt:
    asked = _generate.decode(body)
    inner = asked.parameters or _Parameters()
    limit, param = asked.max_tokens, "max_tokens"
    if limit is None:
        limit, param = inner.max_tokens, "parameters.max_tokens"
    elif inner.max_tokens is not None:
        limit = longest(limit, inner.max_tokens)
    most = output_limit(limit, param)
    canonical = texts(asked.text_input, "text_input").canonical
    answers = how_many(asked.n, asked.best_of, inner.n, inner.best_of)
    return Prompt(paths.model_in(path), canonical, stream=stream, max_tokens=most, answers=answers)
