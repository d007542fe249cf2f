"""Forms are read as every server would read them, or refused."""

from __future__ import annotations

import logging
from email.parser import BytesParser
from email.policy import HTTP

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance import outcome
from farhop.relay.formats import form
from farhop.relay.formats.prompt import BodyError

RUN = settings(max_examples=300, deadline=None, derandomize=True)
B = b"frontier"
HEADERS = b"accept: */*\r\ncontent-type: multipart/form-data; boundary=" + B + b"\r\n"


def part(name: bytes, content: bytes, disposition: bytes = b"", more: bytes = b"") -> bytes:
    found = disposition or b'form-data; name="' + name + b'"'
    return b"--" + B + b"\r\nContent-Disposition: " + found + b"\r\n" + more + b"\r\n" + content + b"\r\n"


def body(*parts: bytes, end: bytes = b"--" + B + b"--\r\n") -> bytes:
    return b"".join(parts) + end


MODEL = part(b"model", b"m")
FILE = part(b"", b"\0\1\r\n\2", b'form-data; name="file"; filename="a \\"b\\".wav"', b"Content-Type: audio/wav\r\n")


def test_fields_and_files() -> None:
    for whole in (body(MODEL, FILE), body(MODEL, FILE, end=b"--" + B + b"--")):
        made = form.read(whole, HEADERS)
        assert (made.text("model"), made.file_bytes("file")) == ("m", 5)
        assert (made.text("absent"), made.file_bytes("absent")) == (None, None)
    quoted = HEADERS.replace(b"=" + B, b'="' + B + b'"').replace(b"multipart/form-data", b"Multipart/Form-Data ")
    assert form.read(body(part(b"x", b"")), quoted).text("x") == ""
    assert form.read(body(part(b"", b"1", b"form-data;name=x")), HEADERS).text("x") == "1"


CONTENT = st.binary(max_size=30) | st.sampled_from(
    [b"\r\n", b"--", b"\r\n--fro", b"\r\n--", b"--frontie", b"\n--f\r\n"]
)


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "model"]), CONTENT), min_size=1, max_size=5))
@RUN
def test_contents_are_found_as_they_were_written(fields: list[tuple[str, bytes]]) -> None:
    whole = body(*(part(name.encode(), content) for name, content in fields))
    made = form.read(whole, HEADERS)
    for name in {name for name, _ in fields}:
        contents = [content for n, content in fields if n == name]
        assert [whole[f.start : f.end] if f.start >= 0 else b"" for f in made._fields[name]] == contents


@given(st.data())
@RUN
def test_a_mutated_form_is_read_as_a_laxer_server_reads_it_or_refused(data: st.DataObject) -> None:
    whole = bytearray(body(MODEL, FILE))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(whole)))
        what = data.draw(
            st.sampled_from([b"", b"\r", b"\n", b"\r\n", b"--frontier", b"--", b" ", b'"', b";", b"\0", b"x"])
        )
        whole[at : at + data.draw(st.integers(0, 4))] = what
    try:
        made = form.read(bytes(whole), HEADERS)
        model = made.text("model")
    except BodyError:
        return
    seen = BytesParser(policy=HTTP).parsebytes(HEADERS.split(b"\r\n")[1] + b"\r\n\r\n" + bytes(whole))
    models = [
        p.get_payload(decode=True).decode().rstrip("\r\n")
        for p in seen.iter_parts()
        if p.get_param("name", header="content-disposition") == "model"
    ]
    assert models == ([] if model is None else [model.rstrip("\r\n")])


@pytest.mark.parametrize(
    "whole",
    [
        b"",
        b"nonsense",
        body(),
        b"preamble\r\n" + body(MODEL),
        b"\r\n" + body(MODEL),
        body(MODEL) + b"epilogue",
        body(MODEL) + MODEL + b"--" + B + b"--\r\n",
        body(MODEL, end=b""),
        body(MODEL, end=b"--" + B + b"\r\n"),
        body(MODEL).replace(b"\r\n", b"\n"),
        body(part(b"x", b"\n--" + B + b'\nContent-Disposition: form-data; name="model"\n\nother')),
        body(part(b"x", b"\r\n--" + B + b' \r\nContent-Disposition: form-data; name="model"\r\n\r\nother')),
        body(part(b"", b"x", b"attachment; name=model")),
        body(part(b"", b"x", b'form-data; name="a"; name="b"')),
        body(part(b"", b"x", b'form-data; name="a"; size=5')),
        body(part(b"", b"x", b"form-data; name*=utf-8''model")),
        body(part(b"", b"x", b'form-data; name="mod\\"el"')),
        body(part(b"", b"x", b'form-data; name="mod\nel"')),
        # For python-multipart, which vLLM's server uses, `model` is a plain field, and the last one counts.
        body(MODEL, part(b"", b"other", rb'form-data; filename*="\\"; name="x"; filename="; name=model; q="')),
        body(part(b"", b"x", b'form-data; name=""')),
        body(part(b"", b"x", b"form-data; filename=a")),
        body(part(b"a", b"x", more=b'Content-Disposition: form-data; name="b"\r\n')),
        body(part(b"a", b"eA==", more=b"Content-Transfer-Encoding: base64\r\n")),
        # aiohttp's servers decode a field so.
        body(part(b"model", b"+AG0-", more=b"Content-Type: text/plain; charset=utf-7\r\n")),
        body(part(b"model", b"m", more=b"Content-Type: text/plain\r\nContent-Type: a/b; charset=utf-16\r\n")),
        body(part(b"_charset_", b"utf-7"), part(b"model", b"+AG0-")),
        body(b"--" + B + b"\r\n\r\nno head\r\n"),
        body(*[part(b"a", b"x")] * (form.PARTS_MAX + 1)),
        body(part(b"a", b"x", more=b"X: y\r\n" * form.HEADERS_MAX)),
        body(part(b"a", b"x", more=b"X: " + b"y" * form.HEADER_BYTES_MAX + b"\r\n")),
    ],
)
def test_a_form_that_could_be_read_in_two_ways_is_refused(whole: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger=""), pytest.raises(BodyError) as caught:
        form.read(whole, HEADERS)
    assert caught.value.outcome is outcome.INVALID_FIELD
    assert "multipart/form-data" in caught.value.detail
    assert caplog.records == []


def test_a_field_may_say_that_it_is_utf_8_and_a_file_what_it_is() -> None:
    plain = part(b"model", b"m", more=b"Content-Type: text/plain; charset=UTF-8\r\n")
    notes = part(b"", b"x", b'form-data; name="file"; filename="a"', b"Content-Type: text/plain; charset=latin-1\r\n")
    assert form.read(body(notes, plain), HEADERS).text("model") == "m"


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"application/json",
        b"multipart/form-data",
        b"multipart/form-data; boundary=",
        b"multipart/form-data; boundary=a b",
        b"multipart/form-data; boundary=a; boundary=b",
        b'multipart/form-data; boundary="a',
        b"multipart/mixed; boundary=a",
        b"multipart/form-data; boundary=" + b"a" * 71,
    ],
)
def test_the_header_must_name_one_boundary(value: bytes) -> None:
    with pytest.raises(BodyError) as caught:
        form.read(body(MODEL), b"content-type: " + value + b"\r\n")
    assert caught.value.param == "content-type"
    assert "boundary" in caught.value.detail


def test_a_form_field_that_is_repeated_or_of_the_wrong_kind_is_refused() -> None:
    twice = form.read(body(MODEL, MODEL), HEADERS)
    mixed = form.read(
        body(part(b"file", b"x"), FILE.replace(b'"file"', b'"model"'), part(b"long", b"x" * 1025)), HEADERS
    )
    odd = form.read(body(part(b"model", b"\xff")), HEADERS)
    for ask, message in (
        (lambda: twice.text("model"), "once"),
        (lambda: mixed.text("model"), "plain field"),
        (lambda: mixed.text("long"), "1024"),
        (lambda: mixed.file_bytes("file"), "filename"),
        (lambda: odd.text("model"), "UTF-8"),
    ):
        with pytest.raises(BodyError) as caught:
            ask()
        assert message in caught.value.detail
        assert caught.value.param in ("model", "file", "long")


@given(st.binary(max_size=80))
@RUN
def test_no_body_breaks_the_reader(data: bytes) -> None:
    for whole in (data, b"--" + B + b"\r\n" + data, MODEL + data):
        try:
            form.read(whole, HEADERS)
        except BodyError:
            continue
