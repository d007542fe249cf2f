"""Sound is counted, never read."""

from __future__ import annotations

import pytest

from farhop.balance.estimate.estimates import BYTES_PER_TOKEN
from farhop.relay.formats import bodies
from farhop.relay.formats.paths import Kind
from farhop.relay.formats.prompt import BodyError, Prompt
from farhop.relay.http import head

PATH = b"/v1/audio/transcriptions"


def read(**fields: str | bytes) -> Prompt:
    """A form of text and files; its headers come as the way in leaves them."""
    body = b""
    for name, value in fields.items():
        data, more = (value, '; filename="a.mp3"') if isinstance(value, bytes) else (value.encode(), "")
        body += f'--edge\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + data + b"\r\n"
    lines = (
        b"POST %b HTTP/1.1" % PATH,
        b"host: x",
        b"content-type: multipart/form-data; boundary=edge",
        b"accept: */*",
    )
    seen = head.read(b"\r\n".join(lines), 100)
    return bodies.read(Kind.TRANSCRIPTION, body + b"--edge--\r\n", seen.path, seen.onward)


def test_thirty_seconds_cost_what_whisper_encodes_them_to() -> None:
    prompt = read(model="whisper-1", file=b"\xff" * 240_000)
    assert (prompt.model, prompt.canonical, prompt.stream, prompt.max_tokens) == ("whisper-1", b"", False, None)
    assert prompt.opaque_bytes / BYTES_PER_TOKEN == 1500
    # The body is forwarded unchanged: a form has no field to request the usage in.
    assert not prompt.hide_usage


@pytest.mark.parametrize(
    ("value", "streams"), [("true", True), ("1", True), ("True", True), ("false", False), ("", False)]
)
def test_transcription_streams_if_its_form_sets_stream(value: str, streams: bool) -> None:
    assert read(model="w", file=b"x", stream=value).stream is streams


def test_a_missing_field_is_named() -> None:
    for fields, param in (
        ({"file": b"x"}, "model"),
        ({"file": b"x", "model": ""}, "model"),
        ({"file": b"x", "model": "m" * 300}, "model"),
        ({"model": "m"}, "file"),
        ({"model": "m", "file": b""}, "file"),
    ):
        with pytest.raises(BodyError) as caught:
            read(**fields)
        assert caught.value.param == param
        assert param in caught.value.detail


def test_json_is_no_form() -> None:
    with pytest.raises(BodyError) as caught:
        bodies.read(Kind.TRANSLATION, b'{"model":"m"}', b"", b"content-type: application/json\r\n")
    assert caught.value.param == "content-type"


@pytest.mark.parametrize("name", ["kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"])
def test_a_client_does_not_say_where_an_engine_fetches_kv_from(name: str) -> None:
    with pytest.raises(BodyError) as caught:
        read(model="whisper-1", file=b"x", **{name: "1"})
    assert caught.value.param == name


@pytest.mark.parametrize(
    "name",
    [
        "fallbacks[]",
        "models[]",
        "user_config[model_list]",
        "model[]",
        "Model[]",
        "stream[]",
        "inference_geo[]",
        "file[0]",
    ],
)
def test_fields_that_servers_read_as_a_list_are_checked_as_one(name: str) -> None:
    """LiteLLM's proxy takes the brackets off, as servers in PHP do."""
    with pytest.raises(BodyError) as caught:
        read(**{name: "another", "model": "w", "file": b"x"})
    assert caught.value.param in (name, name.partition("[")[0])
    listed = {"timestamp_granularities[]": "word", "include[]": "logprobs", "chunking_strategy[type]": "server_vad"}
    assert read(model="w", file=b"x", **listed).model == "w"
