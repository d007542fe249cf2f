"""The work of reading a body is bounded by its size, whatever its content; text counts as text."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance import outcome
from farhop.relay.formats import shape
from farhop.relay.formats.prompt import BodyError
from tests.conftest import played

RUN = settings(max_examples=played(40), deadline=None, derandomize=True)
PAD = b'"pad":"' + b"x" * shape.SMALL_BYTES + b'"'
TEXT = st.lists(st.sampled_from(["a", '"', "\\", "[", "{", "}", "]", ",", ":", "é", "\n", "x" * 9]), max_size=12).map(
    "".join
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 10**9) | TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=30,
)


def _strings(body: bytes) -> list[int]:
    """Where strings begin and end, one byte after another."""
    found: list[int] = []
    inside = escaped = False
    for at, byte in enumerate(body):
        if inside and escaped:
            escaped = False
        elif inside and byte == 0x5C:
            escaped = True
        elif byte == 0x22:
            inside = not inside
            found.append(at)
    return found


@pytest.mark.hypothesis
@pytest.mark.parametrize("doubtful", [0, 4096])
def test_strings_are_found_where_a_plain_reader_finds_them(monkeypatch: pytest.MonkeyPatch, doubtful: int) -> None:
    monkeypatch.setattr(shape, "_DOUBTFUL_MAX", doubtful)

    @given(st.dictionaries(TEXT, JSON, max_size=6), st.sampled_from([None, 1]))
    @RUN
    def check(document: dict[str, Any], indent: int | None) -> None:
        body = json.dumps(document, indent=indent).encode()
        assert shape.quotes_of(body, np.frombuffer(body, np.uint8)).tolist() == _strings(body)
        assert shape.few_quotes(body) in (None, _strings(body))

    check()


def test_few_strings_are_found_without_a_look_at_each_byte() -> None:
    for text in ("", "plain " * 999, 'a "quote" and \\ a \\\\ backslash \\"', "\\" * 7, '\\"' * 20):
        body = json.dumps({"a": text, "b": [text]}).encode()
        assert shape.few_quotes(body) == _strings(body)
    assert shape.few_quotes(b'{"a":"' + b"\\" * 100_000 + b'"}') is None
    assert shape.few_quotes(b'{"a":[' + b'"",' * 100 + b'""]}') is None


@pytest.mark.hypothesis
def test_a_skeleton_keeps_the_structure_of_its_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape, "_LONG_BYTES", 8)

    def emptied(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: emptied(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [emptied(inner) for inner in value]
        return "" if isinstance(value, str) and len(json.dumps(value)) > 9 else value

    @given(st.dictionaries(TEXT, JSON, max_size=6))
    @RUN
    def check(document: dict[str, Any]) -> None:
        body = json.dumps(document, separators=(",", ":")).encode()
        assert json.loads(shape.skeleton_of(body)) == emptied(document)

    check()


def test_long_prompts_with_code_or_escapes_pass_the_shape_check() -> None:
    code = 'for (i = 0; i < n; i++) { a[i] = "{[,\\"'
    for text in (code * 30_000, "hello, world [1, 2, 3] " * 50_000, "\\" * 300_001, '"' * 300_000):
        shape.check(json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode())


def _many(item: str, count: int) -> bytes:
    return b'{"a":[' + ",".join([item] * count).encode() + b"]," + PAD + b"}"


@pytest.mark.parametrize("item", ["{}", "[]", '""', '"a"', "null", "true", '{"a":1}', '[""]', "[1]", ' {"a" : "b"} '])
def test_items_are_counted(item: str) -> None:
    with pytest.raises(BodyError, match="too many values") as caught:
        shape.check(_many(item, shape.ITEMS_MAX + 1))
    assert caught.value.outcome is outcome.INVALID_FIELD
    shape.check(_many(item, shape.ITEMS_MAX // 6))


@pytest.mark.parametrize("numbers", ["1", "12345", "-1.5", " 7"])
def test_numbers_may_be_many_where_they_are_not_built(numbers: str) -> None:
    body = _many(numbers, shape.ITEMS_MAX + 100)
    shape.check(body, "a")
    for elsewhere in ("", "pad", "b"):
        with pytest.raises(BodyError, match="too many numbers"):
            shape.check(body, elsewhere)
    with pytest.raises(BodyError, match="too many numbers"):
        shape.check(b'{"a":[1],"b":' + body + b"}", "a")


def test_numbers_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape, "NUMBERS_MAX", 20_000)
    shape.check(_many("1", 20_000), "a")
    with pytest.raises(BodyError, match="at most 20000"):
        shape.check(_many("1", 20_100), "a")


@pytest.mark.parametrize("before", ["", "-", "0."])
def test_numbers_have_so_many_digits_and_no_more(before: str) -> None:
    """60 integers of 4,000 digits took 40 ms; what stands in a string is text."""
    for at in range(0, 130, 13):  # wherever it begins
        there = f'"{"x" * at}",{before}'
        shape.check(_many(there + "7" * shape.DIGITS_MAX, 80))
        with pytest.raises(BodyError, match="too many digits: at most 128"):
            shape.check(_many(there + "7" * (shape.DIGITS_MAX + 1), 80))
    shape.check(_many(f'"{"7" * 200}"', 80))


def test_a_number_too_long_at_the_end_of_what_is_no_json_is_found() -> None:
    with pytest.raises(BodyError, match="too many digits"):
        shape.check(_many("1", 9000)[:-1] + b',"b":' + b"7" * 4000)


@pytest.mark.parametrize("item", ["{}", "[]", '{"a":{"b":1}}', '""', "[1]", "1", "{}" + " " * 16])
def test_body_with_too_many_items_is_heavy(item: str) -> None:
    each = 1 + 4 * (item.count("{") + item.count("["))
    most = shape.LIGHT_ITEMS_MAX // each
    shape.outlined(_many(item, most - 10), light=True)
    with pytest.raises(shape.HeavyError):
        shape.outlined(_many(item, most + 4), light=True)
    shape.outlined(_many(item, most + 4))  # where no request waits


def test_token_ids_are_light_where_they_are_not_built_and_fractions_heavy_by_the_thousand() -> None:
    ids = _many("12345", shape.LIGHT_ITEMS_MAX + 10)
    shape.outlined(ids, "a", light=True)
    with pytest.raises(shape.HeavyError):
        shape.outlined(ids, light=True)
    shape.outlined(_many("0.5", shape.LIGHT_FRACTIONS_MAX), light=True)
    with pytest.raises(shape.HeavyError):
        shape.outlined(_many("0.5", shape.LIGHT_FRACTIONS_MAX + 1), light=True)


@pytest.mark.parametrize(("opens", "closes"), [("[", "]"), ('{"a":', "}"), ('[{"b":', "}]")])
def test_nesting_is_bounded(opens: str, closes: str) -> None:
    def nested(depth: int) -> bytes:
        return b'{"x":' + (opens * depth + "1" + closes * depth).encode() + b"," + PAD + b"}"

    shape.check(nested(shape.DEPTH_MAX // 2 - 1))
    with pytest.raises(BodyError, match="nested too deeply") as caught:
        shape.check(nested(shape.DEPTH_MAX))
    assert caught.value.outcome is outcome.INVALID_JSON


def test_escapes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape, "ESCAPES_MAX", 1000)
    shape.check(b'{"a":"' + b"\\n" * 1000 + b'",' + PAD + b"}")
    with pytest.raises(BodyError, match="too many escapes"):
        shape.check(b'{"a":"' + b"\\n" * 1001 + b'",' + PAD + b"}")


@pytest.mark.parametrize("pad", [b"", b"," + PAD])
@pytest.mark.parametrize(
    "members",
    [
        b'"a":1,"a":1',
        b'"a":1,"\\u0061":2',
        b'"b":{"a":1,"x":[{"a":1, "a" :2}]}',
        b'"x":"\\u003a","a":1,"a":2',
        b'"x":"\\u003A:","a":1,"a":2',
        b'"":1,"":2',
        b'"a" : {} ,\n "a":{}',
    ],
)
def test_a_duplicate_key_is_refused(members: bytes, pad: bytes) -> None:
    with pytest.raises(BodyError, match="occurs twice") as caught:
        shape.check(b"{" + members + pad + b"}")
    assert caught.value.param in ("a", None)


@given(st.dictionaries(TEXT, JSON, max_size=6), st.integers(0, 2**32))
@RUN
def test_what_has_each_key_once_passes_however_it_is_written(document: dict[str, Any], seed: int) -> None:
    rng = Random(seed)
    body = json.dumps(document, indent=rng.choice([None, 2]), ensure_ascii=rng.random() < 0.5).encode()
    shape.check(body)
    shape.once(b'{"big":%b,"pad":"%b"}' % (body, b":" * shape.SMALL_BYTES))
