"""Reading bodies of the Open Inference Protocol (KServe V2, Triton): tensors to infer from, texts to generate from.

The model stands in the path. Of the tensors only text is a prompt: what a pass over other tensors costs cannot be told
from their size, so it counts as nothing but a place in the batch. Never decodes a tensor that is not text.
"""

from __future__ import annotations

from typing import Any

import msgspec

from farhop.relay import paths
from farhop.relay.prompt import PAIR, JsonBody, Prompt, header, invalid, not_yours, texts

_JSON_BYTES = b"inference-header-content-length"  # Triton's binary data extension: JSON first, raw tensors behind it


class _Tensor(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    data: msgspec.Raw = msgspec.Raw(b"")


class _Infer(JsonBody, kw_only=True):
    inputs: list[_Tensor]


class _Parameters(msgspec.Struct):
    max_tokens: int | None = None


class _Generate(JsonBody, kw_only=True):
    """TensorRT-LLM's backend takes `max_tokens` as an input, vLLM's as a parameter."""

    text_input: str | list[str]
    max_tokens: int | None = None
    parameters: _Parameters | None = None


_infer = msgspec.json.Decoder(_Infer)
_generate = msgspec.json.Decoder(_Generate)
_data = msgspec.json.Decoder()


def infer(body: bytes, path: bytes, headers: bytes) -> Prompt:
    """`.../infer`. Raises BodyError, or msgspec's errors."""
    document = _infer.decode(memoryview(body)[: _json_bytes(body, headers)])
    if document.kv_transfer_params is not None:
        raise not_yours()
    if not document.inputs:
        raise invalid("inputs", "`inputs` must hold at least one tensor")
    spelled = [text.encode() for tensor in document.inputs if tensor.datatype == "BYTES" for text in _texts(tensor)]
    return Prompt(paths.model_in(path), PAIR.join(spelled))


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
    if bytes(tensor.data) in (b"", b"null"):
        return []  # it is among the raw ones
    found: list[str] = []
    waiting: list[Any] = [_data.decode(tensor.data)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += reversed(value)
        elif isinstance(value, str):
            found.append(value)
        else:
            raise invalid("inputs", f"`data` of tensor `{tensor.name[:64]}` must hold strings, as it is of type BYTES")
    return found


def generate(body: bytes, path: bytes, _headers: bytes) -> Prompt:
    """`.../generate`. Raises BodyError, or msgspec's errors."""
    return _read_generate(body, path, stream=False)


def generate_stream(body: bytes, path: bytes, _headers: bytes) -> Prompt:
    """`.../generate_stream`: the path says that the answer is a stream. Raises as `generate` does."""
    return _read_generate(body, path, stream=True)


def _read_generate(body: bytes, path: bytes, *, stream: bool) -> Prompt:
    asked = _generate.decode(body)
    if asked.kv_transfer_params is not None:
        raise not_yours()
    limit, param = asked.max_tokens, "max_tokens"
    if limit is None and asked.parameters is not None:
        limit, param = asked.parameters.max_tokens, "parameters.max_tokens"
    if limit is not None and limit < 1:
        raise invalid(param, f"`{param}` must be at least 1")
    canonical = texts(asked.text_input, "text_input")
    return Prompt(paths.model_in(path), canonical, stream=stream, max_tokens=limit)
