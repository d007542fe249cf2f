from __future__ import annotations

import pytest
from farhop_wire import ext_proc_pb2 as wire
from hypothesis import given
from hypothesis import strategies as st
from picking import mutated

from farhop.relay.http import head
from regional_lb.picker import messages

NAMES = st.sampled_from([b"accept", b"authorization", b"x-request-id", b"user-agent", b"x-farhop-tenant", b"cookie"])
HEADERS = st.lists(st.tuples(NAMES, st.sampled_from([b"a", b"b, c", b""])), max_size=8)


def test_a_head_is_read_as_one_of_http_11() -> None:
    given_ = [(b":method", b"POST"), (b":path", b"/v1/x?y=1"), (b":authority", b"h:80"), (b":scheme", b"https"),
              (b"transfer-encoding", b"chunked"), (b"content-length", b"3"), (b"accept", b"*/*")]  # fmt: skip
    read = head.read(messages.request_head(given_, 4096), 10)
    assert (read.method, read.target, read.path, read.known[b"host"]) == (b"POST", b"/v1/x?y=1", b"/v1/x", b"h:80")
    assert (read.content_length, read.onward) == (3, b"accept: */*\r\n")


@pytest.mark.parametrize("value", [b"a\r\nx-farhop-hop: y", b"a\nb", b"a\rb", b"\r\n\r\nGET / HTTP/1.1"])
def test_header_values_cannot_inject_headers(value: bytes) -> None:
    given_ = [(b":method", b"GET"), (b":path", b"/"), (b":authority", b"h"), (b"accept", value)]
    with pytest.raises(head.HeadError, match="control character"):
        head.read(messages.request_head(given_, 4096), 10)
    with pytest.raises(head.HeadError, match="too large: at most 16"):
        messages.request_head([(b":method", b"GET"), (b"accept", b"x" * 20)], 16)


@pytest.mark.parametrize("path", [b"", b"*", b"http://b/v1/x"])
def test_a_path_that_a_gateway_would_send_on_as_it_is_is_a_path(path: bytes) -> None:
    with pytest.raises(head.HeadError, match="must be a path"):
        messages.request_head([(b":method", b"GET"), (b":path", path), (b":authority", b"h")], 4096)


@given(HEADERS, HEADERS)
def test_a_head_becomes_what_is_wanted_and_nothing_else(
    have: list[tuple[bytes, bytes]], want: list[tuple[bytes, bytes]]
) -> None:
    have, want = list(dict(have).items()), list(dict(want).items())
    own = [(b":path", b"/"), (b"x-envoy-attempt-count", b"1"), (b"content-length", b"7")]
    lines = b"".join(b"%b: %b\r\n" % one for one in want)
    changed = messages.mutation([*own, *have], b"host: engine\r\n" + lines, {b"x-to": b"1.2.3.4:5"})
    now = mutated(wire.HeaderMutation.FromString(changed), {name.decode(): value for name, value in [*own, *have]})
    assert now == {name.decode(): value for name, value in [*own, *want]} | {"x-to": b"1.2.3.4:5"}


@given(st.binary(max_size=200_000))
def test_pieces_are_small_and_make_the_whole(body: bytes) -> None:
    pieces = list(messages.pieces(body))
    assert b"".join(pieces) == body
    assert all(0 < len(one) <= 62_000 for one in pieces)


@given(st.binary(max_size=300) | st.integers(60_000, 62_000).map(bytes), st.booleans(), st.booleans())
def test_a_piece_is_written_as_protobuf_writes_it(body: bytes, of_request: bool, last: bool) -> None:
    reply = wire.ProcessingResponse()
    streamed = (reply.request_body if of_request else reply.response_body).response.body_mutation.streamed_response
    streamed.SetInParent()
    streamed.body, streamed.end_of_stream = body, last
    assert messages.piece(memoryview(body), of_request=of_request, last=last) == reply.SerializeToString()


@given(
    st.lists(st.tuples(NAMES, st.binary(max_size=200).filter(lambda value: b"\n" not in value))), st.text(max_size=300)
)
def test_choice_and_answers_are_written_as_protobuf_reads_them(
    want: list[tuple[bytes, bytes]], destination: str
) -> None:
    want = list(dict(want).items())
    changed = messages.mutation([(b"gone", b"1"), (b"gone", b"2")], b"", dict(want))
    mutation = wire.HeaderMutation(
        set_headers=[
            wire.HeaderValueOption(header=wire.HeaderValue(key=name.decode(), raw_value=value), append_action=2)  # type: ignore[arg-type]
            for name, value in want
        ],
        remove_headers=["gone"],
    )
    assert wire.HeaderMutation.FromString(changed) == mutation
    reply = wire.ProcessingResponse()
    reply.request_headers.response.header_mutation.CopyFrom(mutation)
    reply.dynamic_metadata.fields["envoy.lb"].struct_value.fields[messages.DESTINATION].string_value = destination
    assert wire.ProcessingResponse.FromString(messages.chosen(destination, changed)) == reply
    reply = wire.ProcessingResponse()
    reply.response_headers.response.header_mutation.CopyFrom(mutation)
    assert wire.ProcessingResponse.FromString(messages.answered(changed)) == reply
    assert wire.ProcessingResponse.FromString(messages.TRAILERS_OF_ANSWER).HasField("response_trailers")
    assert wire.ProcessingResponse.FromString(messages.TRAILERS_OF_REQUEST).HasField("request_trailers")


def test_a_hint_is_a_list_or_a_string_with_commas() -> None:
    message = wire.ProcessingRequest()
    assert messages.subset(message) is None
    struct = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
    assert messages.subset(message) is None
    value = struct.fields["x-gateway-destination-endpoint-subset"]
    value.string_value = " 10.0.0.1:80,10.0.0.2 ,"
    assert messages.subset(message) == ["10.0.0.1:80", "10.0.0.2"]
    value.list_value.extend(["10.0.0.1:80", "10.0.0.3"])
    assert messages.subset(message) == ["10.0.0.1:80", "10.0.0.3"]
    value.string_value = ""
    assert messages.subset(message) == []


def test_where_it_goes_stands_in_header_and_metadata_alike() -> None:
    changed = messages.mutation([], b"", {messages.DESTINATION.encode(): b"10.0.0.1:80,10.0.0.2:80"})
    found = wire.ProcessingResponse.FromString(messages.chosen("10.0.0.1:80,10.0.0.2:80", changed))
    (set_,) = found.request_headers.response.header_mutation.set_headers
    lb = found.dynamic_metadata.fields["envoy.lb"].struct_value
    assert lb.fields["x-gateway-destination-endpoint"].string_value == set_.header.raw_value.decode()
