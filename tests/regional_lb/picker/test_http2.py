from __future__ import annotations

import pytest
from hpack import Decoder
from hypothesis import given
from hypothesis import strategies as st

from regional_lb.picker import http2


def read(block: bytes) -> list[tuple[bytes, bytes]]:
    return [tuple(one) for one in Decoder().decode(block, raw=True)]


def test_heads_are_what_hpack_reads() -> None:
    assert read(http2.BEGUN) == [(b":status", b"200"), (b"content-type", b"application/grpc")]
    assert read(http2.UNSUPPORTED_MEDIA_TYPE) == [(b":status", b"415")]
    assert read(http2.status(0, "")) == [(b"grpc-status", b"0")]
    assert read(http2.status(9, "50 % über")) == [(b"grpc-status", b"9"), (b"grpc-message", b"50 %25 %C3%BCber")]


@given(st.integers(0, 16), st.text(max_size=600))
def test_any_status_can_be_read(code: int, text: str) -> None:
    fields = dict(read(http2.status(code, text.encode(errors="replace").decode())))
    assert fields[b"grpc-status"] == b"%d" % code
    assert all(0x20 <= byte < 0x7F for byte in fields.get(b"grpc-message", b""))


def test_frames_are_rfc_9113s() -> None:
    assert http2.frame(http2.PING, http2.ACK, 0, b"12345678") == b"\0\0\x08\x06\x01\0\0\0\0" + b"12345678"
    assert http2.window_update(3, 5) == b"\0\0\x04\x08\0\0\0\0\x03\0\0\0\x05"
    assert http2.reset(1, http2.REFUSED_STREAM) == b"\0\0\x04\x03\0\0\0\0\x01\0\0\0\x07"
    assert http2.goaway(7, http2.NO_ERROR, "x") == b"\0\0\x09\x07\0\0\0\0\0\0\0\0\x07\0\0\0\0x"
    found = http2.settings({http2.INITIAL_WINDOW_SIZE: 9})
    assert list(http2.read_settings(found[9:])) == [(http2.INITIAL_WINDOW_SIZE, 9)]


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (b"\0\4\0\0\0", http2.FRAME_SIZE_ERROR),
        (b"\0\4\x80\0\0\0", http2.FLOW_CONTROL_ERROR),
        (b"\0\5\0\0\0\1", http2.PROTOCOL_ERROR),
    ],
)
def test_settings_that_make_no_sense_are_refused(payload: bytes, code: int) -> None:
    with pytest.raises(http2.Http2Error) as refused:
        list(http2.read_settings(payload))
    assert refused.value.code == code


def test_padding_is_taken_off() -> None:
    assert http2.unpadded(0, b"\2ab") == b"\2ab"
    assert http2.unpadded(http2.PADDED, b"\2ab\0\0") == b"ab"
    for payload in (b"", b"\1", b"\3ab"):
        with pytest.raises(http2.Http2Error):
            http2.unpadded(http2.PADDED, payload)
