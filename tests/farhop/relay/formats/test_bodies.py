"""Every kind that has a body has a reader, and none of them fails but in words."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance import outcome
from farhop.relay.formats import bodies
from farhop.relay.formats.paths import Kind
from farhop.relay.formats.prompt import BodyError

KINDS = [kind for kind in Kind if kind not in (Kind.MODELS, Kind.VERSION)]
FORMS = (Kind.TRANSCRIPTION, Kind.TRANSLATION)
KEYS = [
    *("model", "messages", "role", "content", "prompt", "input", "query", "documents", "text_1", "text_2", "tokens"),
    *("inputs", "name", "shape", "datatype", "data", "text_input", "parameters", "max_tokens", "stream"),
]
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3) | st.just("BYTES"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)


def test_every_kind_has_a_reader() -> None:
    assert set(bodies.READERS) == set(KINDS)


@given(st.dictionaries(st.sampled_from(KEYS), VALUE, max_size=6))
@settings(max_examples=400, deadline=None, derandomize=True)
def test_json_of_any_shape_is_read_or_refused(document: object) -> None:
    body = json.dumps(document).encode()
    for kind in KINDS:
        error = refusal(kind, body)
        assert error is None or error.outcome in (outcome.INVALID_FIELD, outcome.INVALID_JSON)
        assert error is None or "\n" not in error.detail


def refusal(kind: Kind, body: bytes) -> BodyError | None:
    try:
        bodies.read(kind, body, b"/v2/models/m/infer")
    except BodyError as error:
        return error
    return None


def test_a_body_that_is_no_json_is_refused() -> None:
    for kind in [kind for kind in KINDS if kind not in FORMS]:
        for body in [b"", b"{", b"\xff", b"[" * 50_000, b'{"model":"\\ud800"}']:
            with pytest.raises(BodyError):
                bodies.read(kind, body)


HALVED = "; a character was cut in two (half a surrogate pair): cut texts between characters"


@pytest.mark.parametrize(
    ("body", "remedy"),
    [
        ('{"model":"m"}'.encode("utf-16"), "; it is UTF-16 or UTF-32: send it in UTF-8"),
        ('{"model":"m"}'.encode("utf-32-be"), "; it is UTF-16 or UTF-32: send it in UTF-8"),
        (b"\x1f\x8b\x08\x00\x00", "; it is compressed: send it as it is"),
        (b"", "; there is none"),
        (b'{"model":"m","user":"\\ud83d"}', HALVED),
        (b'{"user":"\\uD83D and more","model":"m"}', HALVED),
    ],
)
def test_common_mistakes_of_clients_are_answered_with_the_remedy(body: bytes, remedy: str) -> None:
    error = refusal(Kind.CHAT, body)
    assert error is not None
    assert error.outcome is outcome.INVALID_JSON
    assert error.detail.endswith(remedy)


BODIES = {
    Kind.CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    Kind.COMPLETION: {"prompt": "hi"},
    Kind.EMBEDDINGS: {"input": "hi"},
    Kind.RERANK: {"query": "hi", "documents": ["ho"]},
    Kind.SCORE: {"text_1": "hi", "text_2": "ho"},
    Kind.TOKENIZE: {"prompt": "hi"},
    Kind.DETOKENIZE: {"tokens": [1]},
    Kind.INFER: {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hi"]}]},
    Kind.GENERATE: {"text_input": "hi"},
    Kind.GENERATE_STREAM: {"text_input": "hi"},
}


@pytest.mark.parametrize(
    ("content_type", "passes"),
    [
        ("application/json", True),
        ("application/json; charset=utf-8", True),
        ('application/json;charset="UTF-8"', True),
        ("application/json; charset=utf8; profile=x", True),
        ("application/json; charset=us-ascii", True),
        ("application/json; charset=utf-7", False),
        ("application/json; charset=utf-16", False),
        ("application/json; Charset = utf-7", False),
        ('application/json; x="; charset=utf-8"; charset=utf-7', False),
        ("application/json; charset=utf-8; charset=utf-7", False),
        ("application/json; charset", False),
    ],
)
def test_bytes_that_another_charset_makes_another_body_of_are_refused(content_type: str, passes: bool) -> None:
    """aiohttp's `json()` would read `model` a second time here, if told that this is UTF-7."""
    lines = f"content-type: {content_type}\r\n".encode()
    for kind in BODIES.keys() - {Kind.INFER}:
        body = msgspec.json.encode({"model": "m", **BODIES[kind], "+AG0-odel": "big"})
        if passes:
            assert bodies.read(kind, body, b"/v2/models/m/generate", lines).model == "m"
        else:
            with pytest.raises(BodyError, match="send JSON in UTF-8"):
                bodies.read(kind, body, b"/v2/models/m/generate", lines)


def test_a_client_cannot_set_the_bootstrap_address_of_disaggregated_engines() -> None:
    for name in ["bootstrap_host", "bootstrap_port", "bootstrap_room"]:
        for kind in BODIES:
            path, body = b"/v2/models/m/infer", msgspec.json.encode({"model": "m", **BODIES[kind]})
            for value in (b'"10.0.0.1"', b"0", b"false", b"[1]"):
                with pytest.raises(BodyError) as caught:
                    bodies.read(kind, body[:-1] + b',"%b":%b}' % (name.encode(), value), path)
                assert (caught.value.outcome, caught.value.param) == (outcome.INVALID_FIELD, name)
            assert bodies.read(kind, body[:-1] + b',"%b":null}' % name.encode(), path).model == "m"


def test_a_client_does_not_say_where_an_engine_fetches_kv_from() -> None:
    """It names hosts whose memory the engine reads. However it is spelled, on every path with a JSON body."""
    for kind in BODIES:
        for spelled in ["kv_transfer_params", "kv_transfer\\u005fparams"]:
            path = b"/v2/models/m/infer"
            body = msgspec.json.encode({"model": "m", **BODIES[kind]})
            assert bodies.read(kind, body, path).model == "m"
            values = (b'{"remote_host":"10.0.0.1"}', b"1", b"false", b"[]")
            added = [b'"%b":%b' % (spelled.encode(), value) for value in values]
            for more in (*added, b'"vllm_xargs":{"a":1,%b}' % added[1]):
                asked = body[:-1] + b"," + more + b"}"
                with pytest.raises(BodyError) as caught:
                    bodies.read(kind, asked, path)
                assert (caught.value.outcome, caught.value.param) == (outcome.INVALID_FIELD, "kv_transfer_params")
            for more in (b'"%b":null' % spelled.encode(), b'"vllm_xargs":{"a":1}', b'"vllm_xargs":1'):
                assert bodies.read(kind, body[:-1] + b"," + more + b"}", path).model == "m"
