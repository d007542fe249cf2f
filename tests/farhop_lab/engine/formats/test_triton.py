"""Triton's words: text tensors in, text tensors out, events without an end mark."""

from __future__ import annotations

import json
from typing import Any

import pytest

from farhop_lab.engine.core.profiles import PROFILES
from farhop_lab.engine.core.sequence import EngineRequest, Sequence, TextModel
from farhop_lab.engine.formats import triton
from farhop_lab.engine.formats.api import RefusedError

TEXT = {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": [["hi"]]}
LIMIT = {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [7]}


def _infer(*inputs: Any) -> Any:
    return triton.parse_infer(json.dumps({"id": "mine", "inputs": inputs}).encode(), "m")


def _generate(**fields: Any) -> Any:
    return triton.parse_generate(json.dumps(fields).encode(), "m", stream=True)


def test_request_is_parsed() -> None:
    call, own_id = _infer(TEXT, LIMIT)
    assert (call.wanted.prompt, call.wanted.max_tokens, call.model, call.stream, own_id) == (
        b"hi",
        7,
        "m",
        False,
        "mine",
    )
    assert _generate(text_input="hi").wanted.max_tokens == 16
    assert _generate(text_input="hi", max_tokens=3).wanted.max_tokens == 3
    assert _generate(text_input="hi", parameters={"max_tokens": 4}).wanted.max_tokens == 4


@pytest.mark.parametrize(
    "inputs",
    [
        [],
        [LIMIT],
        [{**TEXT, "data": [1]}],
        [{**TEXT, "data": ["a", "b"]}],
        [{**TEXT, "data": None}],
        [TEXT, {**LIMIT, "data": [0]}],
        [TEXT, {**LIMIT, "data": ["x"]}],
        [TEXT, {**LIMIT, "name": "image"}],
    ],
)
def test_other_tensors_are_refused(inputs: list[Any]) -> None:
    with pytest.raises(RefusedError) as caught:
        _infer(*inputs)
    assert caught.value.param in ("inputs", "max_tokens")


def test_triton_answers_have_the_form_of_its_api() -> None:
    sequence = Sequence("s", EngineRequest(b"hi"), TextModel("m"), PROFILES["l4"])
    generated, inferred = triton.Generated("m"), triton.Inferred("m", "mine")
    assert generated.opening(sequence) == b""
    assert json.loads(generated.whole([("x", sequence)]))["text_output"] == "x"
    event = b'data: {"model_name":"m","model_version":"1","text_output":"x"}\n\n'
    assert generated.token("x") == generated.closing("x", sequence, include_usage=False)
    assert generated.token("x").split(b"\r\n")[1] == event
    document = json.loads(inferred.whole([("x", sequence)]))
    assert document["id"] == "mine"
    assert document["outputs"] == [{"name": "text_output", "datatype": "BYTES", "shape": [1], "data": ["x"]}]
    assert "id" not in json.loads(triton.Inferred("m", None).whole([("x", sequence)]))
