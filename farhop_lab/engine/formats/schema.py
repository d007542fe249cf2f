"""JSON texts that fit a JSON schema, as an engine writes them whose decoding is bound to one.

Pure. The text is a function of the schema and of what the draws are made of, and nothing else. Never writes what does
not fit: a schema that asks for more than this knows is refused by its keyword, as engines refuse what their grammars
lack.
"""

from __future__ import annotations

import re
import re._constants as regex  # type: ignore[import-not-found]  # the standard library's own parts of a pattern
import re._parser as patterns  # type: ignore[import-not-found]
from math import ceil, floor
from typing import Any

import msgspec
import xxhash

from farhop_lab.engine.core.text import VOCABULARY

DEPTH_MAX = 24  # of values in values: deeper, a schema has to end by itself
OPTIONAL_DEPTH = 4  # deeper, no member that may be left out is written, and no list is longer than it must be
TRIES_MAX = 64  # to find an element that a list does not have yet
PLENTY = 3  # more elements, repetitions or words than required, at most
UNKNOWN = (
    "not", "if", "contains", "patternProperties", "propertyNames", "dependentRequired", "dependentSchemas",
    "dependencies", "unevaluatedProperties", "unevaluatedItems", "minProperties", "maxProperties",
)  # fmt: skip
FORMATS = {
    "date-time": "20[0-3]\\d-0[1-9]-[12]\\dT1\\d:[0-5]\\d:[0-5]\\dZ",
    "date": "20[0-3]\\d-0[1-9]-[12]\\d",
    "time": "1\\d:[0-5]\\d:[0-5]\\dZ",
    "duration": "P[1-9]DT[1-9]H",
    "email": "[a-z]{3,8}@[a-z]{3,8}\\.example",
    "hostname": "[a-z]{3,8}\\.example",
    "uri": "https://[a-z]{3,8}\\.example/[a-z]{2,6}",
    "ipv4": "192\\.0\\.2\\.[1-9]\\d",
    "ipv6": "2001:db8::[1-9a-f][0-9a-f]{3}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
}
_ANY: Any = {"type": ["string", "integer", "boolean"]}
_OBJECT: Any = {"type": "object", "properties": {"answer": _ANY, "why": {"type": "string"}}, "required": ["answer"]}


class SchemaError(ValueError):
    """A schema that no text can be written for. The message names the keyword."""


class Draws:
    """Chance made of a text and a seed."""

    def __init__(self, text: bytes, seed: int) -> None:
        self._state = xxhash.xxh3_64(text, seed=seed)

    def below(self, limit: int) -> int:
        """From 0 up to but not including `limit`."""
        self._state.update(b"\0")
        return self._state.intdigest() % limit

    def word(self) -> str:
        """One of the model's own words."""
        return VOCABULARY[self.below(len(VOCABULARY))].decode().strip()


def text_of(schema: Any, draws: Draws) -> str:
    """A document that fits, as its JSON text. `schema` None: any object. Raises SchemaError."""
    return msgspec.json.encode(_Writer(schema, draws).value(_OBJECT if schema is None else schema, 0)).decode()


class _Writer:
    def __init__(self, root: Any, draws: Draws) -> None:
        self._root, self._draws = root, draws

    def value(self, schema: Any, depth: int) -> Any:
        """A value that fits this part of the schema."""
        if depth > DEPTH_MAX:
            raise SchemaError("$ref: it never ends")
        if schema is True or schema == {}:
            schema = _ANY
        if not isinstance(schema, dict):
            raise SchemaError(f"{str(schema)[:64]!r} is no schema that a value fits")
        schema = self._resolved(schema, depth)
        if unknown := [name for name in UNKNOWN if name in schema]:
            raise SchemaError(f"{unknown[0]}: this engine's grammar has no such keyword")
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._one_of(schema["enum"], "enum")
        kinds = schema.get("type") or _implied(schema)
        kind = self._shallow(kinds, depth) if isinstance(kinds, list) else kinds
        match kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "string":
                return self._string(schema)
            case "integer" | "number":
                return self._number(schema, whole=kind == "integer")
            case "boolean":
                return bool(self._draws.below(2))
            case "null":
                return None
        raise SchemaError(f"type: {str(kind)[:64]!r} is none of JSON's")

    def _resolved(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        """The same without references and choices."""
        for _ in range(DEPTH_MAX):
            if "$ref" in schema:
                found = self._referred(schema["$ref"])
                schema = {**found, **{name: one for name, one in schema.items() if name != "$ref"}}
            elif choice := next((name for name in ("anyOf", "oneOf") if schema.get(name)), ""):
                rest = {name: one for name, one in schema.items() if name != choice}
                schema = _both(rest, self._shallow(schema[choice], depth))
            elif "allOf" in schema:
                rest = {name: one for name, one in schema.items() if name != "allOf"}
                for part in schema["allOf"]:
                    rest = _both(rest, self._resolved(part, depth))
                schema = rest
            else:
                return schema
        raise SchemaError("$ref: it never ends")

    def _referred(self, pointer: Any) -> dict[str, Any]:
        found = self._root
        for step in str(pointer).removeprefix("#").split("/")[1:]:
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        if not str(pointer).startswith("#") or not isinstance(found, dict):
            raise SchemaError(f"$ref: {str(pointer)[:64]!r} names no part of this schema")
        return found

    def _shallow(self, choices: list[Any], depth: int) -> Any:
        """One of them; deep inside the simplest, so that a schema that refers to itself comes to an end."""
        if depth < OPTIONAL_DEPTH:
            return self._one_of(choices, "anyOf")
        return min(choices, key=lambda one: len(str(one)) if one not in ("null", {"type": "null"}) else 0)

    def _one_of(self, choices: Any, keyword: str) -> Any:
        if not isinstance(choices, list) or not choices:
            raise SchemaError(f"{keyword}: give at least one value")
        return choices[self._draws.below(len(choices))]

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        document = {
            name: self.value(part, depth + 1)
            for name, part in properties.items()
            if name in required or (depth < OPTIONAL_DEPTH and part is not False and self._draws.below(4))
        }
        more = schema.get("additionalProperties", True)
        document |= {name: self.value(more, depth + 1) for name in required if name not in document}
        if not document and "properties" not in schema and more is not False and depth < OPTIONAL_DEPTH:  # a map
            document = {self._draws.word(): self.value(more, depth + 1) for _ in range(1 + self._draws.below(2))}
        return document

    def _array(self, schema: dict[str, Any], depth: int) -> list[Any]:
        first, rest = schema.get("prefixItems") or [], schema.get("items", True)
        least = max(schema.get("minItems", 0), len(first) if rest is False or first else 0)
        most = schema.get("maxItems", len(first) if rest is False else least + PLENTY)
        if most < least:
            raise SchemaError("maxItems: it is below minItems")
        count = least if depth >= OPTIONAL_DEPTH else min(most, least + self._draws.below(PLENTY))
        items: list[Any] = []
        for at in range(count):
            part = first[at] if at < len(first) else rest
            for _ in range(TRIES_MAX):
                item = self.value(part, depth + 1)
                if not schema.get("uniqueItems") or item not in items:
                    items.append(item)
                    break
        if len(items) < least:
            raise SchemaError("uniqueItems: there are too few different ones")
        return items

    def _string(self, schema: dict[str, Any]) -> str:
        pattern = schema.get("pattern") or FORMATS.get(schema.get("format", ""))
        least = schema.get("minLength", 0)
        most = schema.get("maxLength", least + 40)
        for _ in range(TRIES_MAX if pattern else 0):
            if least <= len(text := self._of_pattern(pattern)) <= most:
                return text
        if pattern or most < least:
            raise SchemaError("pattern: no text of this length fits" if pattern else "maxLength: it is below minLength")
        words = [self._draws.word() for _ in range(1 + self._draws.below(PLENTY))]
        while len(text := " ".join(words)) < least:
            words.append(self._draws.word())
        return text[:most]

    def _of_pattern(self, pattern: Any) -> str:
        try:
            parsed = patterns.parse(str(pattern))
        except re.error as error:
            raise SchemaError(f"pattern: {error}") from None
        return "".join(self._parts(list(parsed)))

    def _parts(self, parsed: list[Any]) -> list[str]:
        out: list[str] = []
        for kind, of in parsed:
            if kind is regex.LITERAL:
                out.append(chr(of))
            elif kind is regex.ANY:
                out.append(self._draws.word()[0])
            elif kind is regex.IN:
                out.append(self._in(of))
            elif kind in (regex.MAX_REPEAT, regex.MIN_REPEAT):
                least, most, part = of
                times = least + self._draws.below(min(int(most) - least, PLENTY) + 1)
                out += (text for _ in range(times) for text in self._parts(list(part)))
            elif kind is regex.SUBPATTERN:
                out += self._parts(list(of[-1]))
            elif kind is regex.BRANCH:
                out += self._parts(list(self._one_of(of[1], "pattern")))
            elif kind is not regex.AT:
                raise SchemaError(f"pattern: this engine's grammar has no {str(kind).lower()}")
        return out

    def _in(self, of: list[Any]) -> str:
        known = {regex.CATEGORY_DIGIT: "0123456789", regex.CATEGORY_WORD: "abcdefgh_0123", regex.CATEGORY_SPACE: " "}
        there: set[str] = set()
        for kind, what in of:
            if kind is regex.LITERAL:
                there.add(chr(what))
            elif kind is regex.RANGE:
                there.update(map(chr, range(what[0], min(what[1], what[0] + 255) + 1)))
            elif kind is regex.CATEGORY and what in known:
                there.update(known[what])
            elif kind is not regex.NEGATE:
                raise SchemaError(f"pattern: this engine's grammar has no {str(what).lower()}")
        if of[0][0] is regex.NEGATE:
            there = set("abcdefghijklmnopqrstuvwxyz0123456789_-") - there
        return str(self._one_of(sorted(there), "pattern"))

    def _number(self, schema: dict[str, Any], *, whole: bool) -> int | float:
        step = schema.get("multipleOf", 1 if whole else 0.5)
        low, high = schema.get("minimum"), schema.get("maximum")
        above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
        bounds = [one for one in (low, above, high, below) if one is not None]
        floors = [ceil(low / step)] if low is not None else []
        floors += [floor(above / step) + 1] if above is not None else []
        tops = [floor(high / step)] if high is not None else []
        tops += [ceil(below / step) - 1] if below is not None else []
        least = max(floors) if floors else min(0, *tops) if tops else 0
        most = min(tops) if tops else least + 100
        if most < least:
            if whole or "multipleOf" in schema:
                raise SchemaError("maximum: no such number is above the minimum")
            return float(bounds[0] + bounds[-1]) / 2
        number = (least + self._draws.below(most - least + 1)) * step
        return int(number) if whole else round(float(number), 12)


def _implied(schema: dict[str, Any]) -> str | list[str]:
    """The type that other keywords speak of."""
    if "properties" in schema or "required" in schema or "additionalProperties" in schema:
        return "object"
    if "items" in schema or "prefixItems" in schema:
        return "array"
    if any(name in schema for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")):
        return "number"
    if any(name in schema for name in ("pattern", "format", "minLength", "maxLength")):
        return "string"
    kinds: list[str] = _ANY["type"]
    return kinds


def _both(one: dict[str, Any], other: Any) -> dict[str, Any]:
    """What fits both, as far as schemas of objects are put together."""
    if not isinstance(other, dict):
        raise SchemaError("anyOf: give schemas")
    joined = {**one, **other}
    if "properties" in one and "properties" in other:
        joined["properties"] = {**one["properties"], **other["properties"]}
    if "required" in one and "required" in other:
        joined["required"] = [*one["required"], *other["required"]]
    return joined
