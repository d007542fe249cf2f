"""Tensors and generated texts: the model is the path's, only text is a prompt."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from farhop.balance import outcome
from farhop.relay.formats import bodies
from farhop.relay.formats.paths import Kind
from farhop.relay.formats.prompt import BodyError, Prompt

INFER, GENERATE, STREAM = b"/v2/models/m/infer", b"/v2/models/m/versions/2/generate", b"/v2/models/m/generate_stream"
TEXT = {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["hello"]}
NUMBERS = {"name": "x", "shape": [2, 2], "datatype": "FP32", "data": [1.5, 2, 3, 4]}


def infer(*inputs: Any, tail: bytes = b"", headers: bytes = b"") -> Prompt:
    body = json.dumps({"inputs": list(inputs)}).encode()
    return bodies.read(Kind.INFER, body + tail, INFER, headers.replace(b"ALL", b"%d" % len(body)))


def generate(path: bytes = GENERATE, **fields: Any) -> Prompt:
    kind = Kind.GENERATE if path is GENERATE else Kind.GENERATE_STREAM
    return bodies.read(kind, json.dumps(fields).encode(), path)


def test_text_is_the_prompt_and_other_tensors_are_not() -> None:
    assert infer(TEXT, NUMBERS) == Prompt("m", b"hello")
    assert infer(NUMBERS) == Prompt("m", b"")
    assert infer({**TEXT, "data": [["a"], ["b"]]}).canonical == infer({**TEXT, "data": ["a", "b"]}).canonical
    assert infer(TEXT).canonical == generate(text_input="hello").canonical


def test_raw_tensors_stand_behind_the_json() -> None:
    raw = {"name": "text_input", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 9}}
    length = b"inference-header-content-length: ALL\r\n"
    assert infer(raw, tail=b"\5\0\0\0hello", headers=length) == Prompt("m", b"")
    assert infer(raw, TEXT, tail=b"\xff{", headers=length).canonical == b"hello"
    with pytest.raises(BodyError) as caught:
        infer(raw, tail=b"\5\0\0\0hello")
    assert caught.value.outcome is outcome.INVALID_JSON


@pytest.mark.parametrize(
    ("heavy", "light"),
    [
        ([{**TEXT, "data": [["x"]] * 3000}], [{**TEXT, "data": [["x"]] * 1000}]),
        ([{**NUMBERS, "parameters": {"a": 1}}] * 1000, [NUMBERS] * 200),
        ([{**TEXT, "data": ["x"] * 9000}], [{**NUMBERS, "data": [1] * 50_000}]),
    ],
)
@pytest.mark.parametrize("tail", [b"", b"\xff{" * 9000])
def test_requests_with_many_tensor_parts_count_as_heavy(heavy: list[Any], light: list[Any], tail: bytes) -> None:
    """They took the loop 10 to 15 ms."""
    for inputs, is_light in ((light, True), (heavy, False)):
        body = json.dumps({"inputs": inputs}).encode()
        length = b"inference-header-content-length: %d\r\n" % len(body)
        assert bodies.read(Kind.INFER, body + tail, INFER, length)
        with contextlib.nullcontext() if is_light else pytest.raises(bodies.HeavyError):
            bodies.read(Kind.INFER, body + tail, INFER, length, light=True)


@pytest.mark.parametrize("value", [b"-1", b"x", b"", b"99999", b"9" * 40])
def test_the_length_of_the_json_is_bounded_by_the_body(value: bytes) -> None:
    with pytest.raises(BodyError) as caught:
        infer(TEXT, headers=b"inference-header-content-length: " + value + b"\r\n")
    assert caught.value.param == "inference-header-content-length"


def test_a_generate_request_is_read_as_a_prompt() -> None:
    assert generate(text_input="hi", max_tokens=5) == Prompt("m", b"hi", max_tokens=5)
    assert generate(text_input="hi", parameters={"max_tokens": 6, "temperature": 0}).max_tokens == 6
    assert generate(text_input="hi", parameters=None).max_tokens is None
    # Triton has no way to request usage: nothing is requested, and nothing is hidden.
    assert generate(STREAM, text_input="hi") == Prompt("m", b"hi", stream=True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "inputs"),
        ({"inputs": []}, "inputs"),
        ({"inputs": [{"name": "x", "shape": [1]}]}, "inputs[0].datatype"),
        ({"inputs": [{**TEXT, "shape": "1"}]}, "inputs[0].shape"),
        ({"inputs": [{**TEXT, "data": [1]}]}, "inputs"),
        ({"inputs": [{**TEXT, "data": {"text": "x"}}]}, "inputs"),
    ],
)
def test_a_bad_tensor_is_named(fields: Any, param: str) -> None:
    with pytest.raises(BodyError) as caught:
        bodies.read(Kind.INFER, json.dumps(fields).encode(), INFER)
    assert (caught.value.outcome, caught.value.param) == (outcome.INVALID_FIELD, param)


def test_the_largest_answer_count_and_length_of_all_backends_readings_is_taken() -> None:
    for fields, most, answers in (
        ({"max_tokens": 1, "parameters": {"max_tokens": 900}}, 900, 1),
        ({"max_tokens": 900, "parameters": {"max_tokens": 1, "n": 3}}, 900, 3),
        ({"n": 2, "parameters": {"best_of": 4}}, None, 4),
    ):
        asked = generate(GENERATE, text_input="x", **fields)
        assert (asked.max_tokens, asked.answers) == (most, answers)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text_input"),
        ({"text_input": 5}, "text_input"),
        ({"text_input": ""}, "text_input"),
        ({"text_input": "x", "max_tokens": 0}, "max_tokens"),
        ({"text_input": "x", "max_tokens": "5"}, "max_tokens"),
        ({"text_input": "x", "parameters": {"max_tokens": -5}}, "parameters.max_tokens"),
        ({"text_input": "x", "parameters": []}, "parameters"),
    ],
)
def test_a_bad_field_is_named(fields: Any, param: str) -> None:
    for path in (GENERATE, STREAM):
        with pytest.raises(BodyError) as caught:
            generate(path, **fields)
        assert caught.value.param == param
