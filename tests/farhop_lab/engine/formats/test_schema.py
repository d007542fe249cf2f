"""Documents by a schema, judged by the library that made the schema."""

from __future__ import annotations

import enum
import json
import re
from datetime import date, datetime
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from farhop_lab.engine.formats.schema import Draws, SchemaError, text_of


class Colour(enum.Enum):
    RED = "rouge"
    BLUE = "ozeanblau 🌊"


class Leaf(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["leaf"]
    size: Annotated[int, Field(gt=2, le=9)]


class Tree(BaseModel):
    kind: Literal["tree"]
    children: list[Tree | Leaf] = Field(max_length=2)


class Order(BaseModel):
    code: Annotated[str, Field(pattern=r"^[A-Z]{2}-\d{3,5}(?:x|yz)?[^a-c]$")]
    colour: Colour
    when: datetime
    day: date
    id: UUID
    note: Annotated[str, Field(min_length=30, max_length=33)]
    share: Annotated[float, Field(ge=0.25, lt=0.3)]
    eights: Annotated[int, Field(multiple_of=8, ge=9)]
    tags: Annotated[set[Literal["a", "b", "c"]], Field(min_length=2)]
    pair: tuple[int, str]
    prices: dict[str, float]
    plan: Annotated[Tree | Leaf, Field(discriminator="kind")]
    maybe: str | None
    later: list[int] = []


SCHEMAS = [Order, Tree, list[Leaf], bool, dict[str, list[int]], int | None]


@pytest.mark.parametrize("kind", SCHEMAS, ids=str)
def test_documents_fit_their_schema(kind: Any) -> None:
    adapter = TypeAdapter(kind)
    schema = adapter.json_schema()
    texts = [text_of(schema, Draws(b"a prompt", seed)) for seed in range(40)]
    for text in texts:
        adapter.validate_json(text)
    assert texts == [text_of(schema, Draws(b"a prompt", seed)) for seed in range(40)]
    assert len(set(texts)) > 1


def test_an_object_without_a_schema() -> None:
    assert isinstance(json.loads(text_of(None, Draws(b"", 1))), dict)
    assert text_of({"type": "object", "properties": {}}, Draws(b"", 1)) == "{}"  # a tool without parameters


def test_parts_of_several_schemas() -> None:
    schema = {
        "allOf": [{"$ref": "#/definitions/of"}, {"properties": {"b": {"const": 2}}, "required": ["b"]}],
        "definitions": {"of": {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}},
    }
    assert json.loads(text_of(schema, Draws(b"", 1))) == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"not": {}}, "not: this engine's grammar has no such keyword"),
        ({"type": "string", "pattern": "(?=a)b"}, "pattern: this engine's grammar has no assert"),
        ({"type": "string", "pattern": "("}, "pattern: missing ), unterminated subpattern"),
        ({"type": "string", "pattern": "^a{9}$", "maxLength": 3}, "pattern: no text of this length fits"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "maximum: no such number is above the minimum"),
        ({"type": "array", "items": {"const": 1}, "uniqueItems": True, "minItems": 2}, "uniqueItems: there are"),
        ({"$ref": "#/nowhere"}, "$ref: '#/nowhere' names no part of this schema"),
        ({"$ref": "https://elsewhere.example"}, "names no part of this schema"),
        ({"$defs": {"a": {"properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}}, "$ref": "#/$defs/a"},
         "$ref: it never ends"),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "$ref: it never ends"),
        ({"type": "word"}, "type: 'word' is none of JSON's"),
        ({"enum": []}, "enum: give at least one value"),
        (False, "is no schema that a value fits"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_refused_by_its_keyword(schema: Any, says: str) -> None:
    with pytest.raises(SchemaError, match=re.escape(says)):
        text_of(schema, Draws(b"", 1))


class Answer(BaseModel):
    """What the request wants."""

    verdict: Literal["yes", "no"]
    reasons: list[str] = Field(min_length=1)


async def test_an_answer_in_the_form_that_a_request_wants(replica: Any) -> None:
    """Whole and streamed the same, of its own seed for each, cut by its length like any other."""
    engine = await replica()
    schema = {"name": "answer", "schema": Answer.model_json_schema()}
    form = {"response_format": {"type": "json_schema", "json_schema": schema}}
    chat = {"messages": [{"role": "user", "content": "is it?"}], **form}
    one, other = (await engine.ask("/v1/chat/completions", **chat, n=2))["choices"]
    Answer.model_validate_json(one["message"]["content"])
    Answer.model_validate_json(other["message"]["content"])
    assert (one["finish_reason"], one["message"]["tool_calls"]) == ("stop", [])
    events = await engine.events("/v1/chat/completions", **chat)
    deltas = [event["choices"][0]["delta"]["content"] for event in events]
    assert "".join(deltas) == one["message"]["content"]
    assert max(map(len, deltas)) <= 4
    (text,) = (await engine.ask("/v1/completions", prompt="is it?", max_tokens=200, **form))["choices"]
    Answer.model_validate_json(text["text"])
    (short,) = (await engine.ask("/v1/chat/completions", **chat, max_tokens=3))["choices"]
    assert (short["message"]["content"], short["finish_reason"]) == (one["message"]["content"][:12], "length")
    (free,) = (await engine.ask("/v1/chat/completions", **{**chat, "response_format": {"type": "json_object"}}))[
        "choices"
    ]
    assert isinstance(json.loads(free["message"]["content"]), dict)
