"""Streams without a gateway: what is said in turn, out of turn, broken off, and what a stream holds afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from farhop_wire import ext_proc_pb2 as wire
from hypothesis import given
from hypothesis import strategies as st
from inprocess import tenant, until
from picking import CHAT, DUPLEX, NONE, Stage, answered, asked, body, response_piece, sent, stage, text_of

from farhop.balance import outcome
from farhop.store.contract import LAW_KEY
from farhop_lab.memory_store import MemoryCluster
from regional_lb.picker import messages
from topology import law_document
from topology.law import Law

EVENT = b'data: {"choices":[{"delta":{"content":"one"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":11,"completion_tokens":3}}\n\n'
EVENTS = ("content-type", b"text/event-stream")


def address(one: Stage, name: str) -> str:
    return str(one.balancer.flow.replicas.view.replicas[name].address)


async def test_the_head_is_answered_when_the_body_is_whole_and_each_body_ends_once() -> None:
    async with stage() as one:
        stream = one.stream()
        stream.take(asked())
        half = len(CHAT) // 2
        stream.take(body(CHAT[:half], last=False))
        assert sent(stream) == []
        stream.take(body(CHAT[half:]))
        found = sent(stream)
        endpoints = found[0].dynamic_metadata.fields["envoy.lb"].struct_value.fields["x-gateway-destination-endpoint"]
        assert sorted(endpoints.string_value.split(",")) == sorted(address(one, name) for name in "ab")
        mutation = found[0].request_headers.response.header_mutation
        assert "authorization" in mutation.remove_headers
        onward, ends = text_of(found, of_request=True)
        assert ends == 1
        assert msgspec.json.decode(onward)["stream_options"] == {"include_usage": True}
        first = endpoints.string_value.split(",")[0]
        stream.take(answered(b"200", EVENTS, ("set-cookie", b"a=b"), served=first))
        assert sent(stream) == []  # nothing has begun
        stream.take(response_piece(EVENT, last=False))
        found = sent(stream)
        mutation = found[0].response_headers.response.header_mutation
        assert "set-cookie" in mutation.remove_headers
        assert "x-farhop-region" in {one.header.key for one in mutation.set_headers}
        assert text_of(found, of_request=False) == (EVENT, 0)
        stream.take(response_piece(USAGE, last=False))
        stream.take(response_piece(b"data: [DONE]\n\n"))
        assert text_of(sent(stream), of_request=False) == (b"data: [DONE]\n\n", 1)  # no client asked for the usage
        assert stream.is_over
        stream.gone()
        assert not any(one.held)


async def test_a_body_in_tiny_pieces_takes_no_more_than_its_size() -> None:
    async with stage(1) as one:
        stream = one.stream()
        stream.take(asked())
        for _ in range(5000):
            stream.take(body(b"  ", last=False))
        assert stream.exchange is not None
        assert len(stream.exchange._parts or ()) == 1
        stream.take(body(CHAT))
        assert text_of(sent(stream), of_request=True)[1] == 1
        stream.gone()
        assert not any(one.held)


async def test_an_answer_of_known_length_ends_with_its_last_piece() -> None:
    async with stage(1) as one:
        for ends in ([response_piece(b"d}")], [response_piece(b"d}", last=False), response_piece(b"")]):
            stream = one.stream()
            stream.take(asked())
            stream.take(body(CHAT.replace(b"true", b"false")))
            sent(stream)
            stream.take(answered(b"200", ("content-type", b"application/json"), ("content-length", b"7")))
            stream.take(response_piece(b'{"e":', last=False))
            assert text_of(sent(stream), of_request=False) == (b'{"e":', 0)
            for message in ends:
                assert not stream.is_over
                stream.take(message)
            found = sent(stream)
            assert text_of(found, of_request=False) == (b"d}", 1)
            assert len(found) == 1  # the end has no message of its own
            stream.gone()
            assert not any(one.held)


@pytest.mark.parametrize(
    "modes", [(wire.BUFFERED, DUPLEX), (wire.STREAMED, NONE), (NONE, NONE), (DUPLEX, wire.BUFFERED)]
)
async def test_a_body_mode_that_cannot_be_served_is_logged_in_a_line(modes: tuple[int, int]) -> None:
    async with stage(1) as one:
        stream = one.stream()
        stream.take(asked(modes=modes))
        (found,) = sent(stream)
        text = msgspec.json.decode(found.immediate_response.body)["error"]["message"]
        field = "request" if modes[0] != DUPLEX else "response"
        asked_for = wire.BodySendMode.Name(modes[field == "response"])
        assert text.startswith(f"processing_mode.{field}_body_mode: {asked_for} cannot be served")
        assert found.immediate_response.status.code == 500
        assert one.balancer.tier_admin.status()["picker"]["trouble"] == [text]
        assert not any(one.held)


async def test_an_answer_whose_body_is_not_shown_to_us_ends_with_the_stream() -> None:
    async with stage() as one:
        stream = one.stream()
        stream.take(asked(modes=(DUPLEX, NONE)))
        stream.take(body(CHAT))
        onward, _ = text_of(sent(stream), of_request=True)
        assert "stream_options" not in msgspec.json.decode(onward)  # its usage could not be removed again
        stream.take(answered(b"200", EVENTS))
        assert [each.WhichOneof("response") for each in sent(stream)] == ["response_headers"]
        assert len(one.balancer.flow.replicas.ledger) == 1
        stream.gone()
        assert not any(one.held)


@pytest.mark.parametrize("answers", [DUPLEX, NONE])
@pytest.mark.parametrize(("status", "reason"), [(b"307", "engine_redirects"), (b"401", "engine_key_refused")])
async def test_an_engines_redirect_is_not_passed_to_the_client(answers: int, status: bytes, reason: str) -> None:
    """Its answer's body may not pass here, and yet the client gets ours in its place."""
    async with stage() as one:
        stream = one.stream()
        stream.take(asked(modes=(DUPLEX, answers)))
        stream.take(body(CHAT))
        sent(stream)
        stream.take(answered(status, ("location", b"http://10.0.0.7/x")))
        if answers == DUPLEX:
            stream.take(response_piece(b"{}"))
        (found,) = sent(stream)
        assert found.immediate_response.status.code == 502
        assert msgspec.json.decode(found.immediate_response.body)["error"]["code"] == reason
        assert not any(one.held)


@pytest.mark.parametrize("status", [501, 503])
@pytest.mark.parametrize(("modes", "ends"), [((DUPLEX, NONE), False), ((DUPLEX, NONE), True), ((DUPLEX, DUPLEX), True)])
async def test_a_failure_whose_body_is_unseen_or_missing_is_answered_from_here(
    modes: tuple[int, int], ends: bool, status: int
) -> None:
    async with stage(1) as one:
        stream = one.stream()
        stream.take(asked(modes=modes))
        stream.take(body(CHAT))
        sent(stream)
        size = b"0" if ends else b"999"
        failed = answered(b"%d" % status, ("content-type", b"text/plain"), ("content-length", size))
        failed.response_headers.end_of_stream = ends
        stream.take(failed)
        (found,) = sent(stream)
        assert found.immediate_response.status.code == status
        assert msgspec.json.decode(found.immediate_response.body)["error"]["code"] == "engine_error"
        names = [one.header.key for one in found.immediate_response.headers.set_headers]
        assert "content-length" not in names
        assert {"content-type", "x-farhop-decision"} <= {*names}
        assert stream.is_over
        assert not any(one.held)


@pytest.mark.parametrize(
    ("status", "kind", "said"),
    [(b"404", b"application/json", b'{"detail":"Not Found"}'), (b"403", b"text/html", b"<html>no</html>")],
)
async def test_a_refusal_by_the_chosen_engine_passes_as_it_is(status: bytes, kind: bytes, said: bytes) -> None:
    """That it lacks the path is not said of all engines: no other is asked, the gateway sends each request once."""
    async with stage() as one:
        stream = one.stream()
        stream.take(asked())
        stream.take(body(CHAT))
        sent(stream)
        stream.take(answered(status, ("content-type", kind)))
        stream.take(response_piece(said))
        found = sent(stream)
        assert [each.WhichOneof("response") for each in found] == ["response_headers", "response_body"]
        assert text_of(found, of_request=False) == (said, 1)
        stream.gone()
        assert not any(one.held)


async def test_the_ledger_follows_a_gateway_to_a_later_endpoint() -> None:
    async with stage() as one:
        flow = one.balancer.flow
        stream = one.stream()
        stream.take(asked())
        stream.take(body(CHAT))
        lb = sent(stream)[0].dynamic_metadata.fields["envoy.lb"].struct_value.fields
        first, second = lb["x-gateway-destination-endpoint"].string_value.split(",")
        names = {address(one, name): name for name in "ab"}
        assert flow.replicas.ledger.load(names[first]).in_flight == 1
        stream.take(answered(b"200", EVENTS, served=second))
        assert (
            flow.replicas.ledger.load(names[first]).in_flight,
            flow.replicas.ledger.load(names[second]).in_flight,
        ) == (
            0,
            1,
        )
        assert flow.replicas.health_tracker.read(names[first], one.balancer.clock.now()).why == "connection refused"
        stream.take(response_piece(EVENT, last=False))
        head = {
            h.header.key: h.header.raw_value
            for h in sent(stream)[0].response_headers.response.header_mutation.set_headers
        }
        assert head["x-farhop-replica"].decode() == names[second]
        stream.take(response_piece(b""))
        assert one.picker.moved == 1
        assert not any(one.held)


@pytest.mark.parametrize(
    ("reset", "code"),
    [
        ("connection_failure", "connect_failed"),
        ("remote_connection_failure|delayed_connect_error:_Connection_refused", "connect_failed"),
        ("connection_timeout", "connect_failed"),
        ("connection_termination", "upstream_died_before_first_byte"),  # it was connected, and may have begun
        ("remote_reset", "upstream_died_before_first_byte"),
    ],
)
async def test_a_gateway_that_got_no_answer_gets_an_error_that_says_how_far_it_came(reset: str, code: str) -> None:
    async with stage() as one:
        stream = one.stream()
        stream.take(asked())
        stream.take(body(CHAT))
        sent(stream)
        local = answered(b"503", ("content-type", b"text/plain"))
        details = local.attributes["envoy.filters.http.ext_proc"].fields["response.code_details"]
        details.string_value = f"upstream_reset_before_response_started{{{reset}}}"
        stream.take(local)
        (found,) = sent(stream)
        assert found.immediate_response.status.code == 502
        assert msgspec.json.decode(found.immediate_response.body)["error"]["code"] == code
        assert not any(one.held)


async def test_trailers_end_both_bodies() -> None:
    async with stage() as one:
        stream = one.stream()
        stream.take(asked())
        stream.take(body(CHAT, last=False))
        stream.take(wire.ProcessingRequest(request_trailers=wire.HttpTrailers()))
        found = sent(stream)
        assert text_of(found, of_request=True)[1] == 0
        assert found[-1].WhichOneof("response") == "request_trailers"
        stream.take(answered(b"200", EVENTS))
        stream.take(response_piece(EVENT, last=False))
        stream.take(wire.ProcessingRequest(response_trailers=wire.HttpTrailers()))
        found = sent(stream)
        assert text_of(found, of_request=False) == (EVENT, 0)
        assert found[-1].WhichOneof("response") == "response_trailers"
        assert not any(one.held)


async def test_repeated_end_of_stream_is_ignored() -> None:
    async with stage() as one:
        stream = one.stream()
        stream.take(asked())
        stream.take(body(CHAT))
        stream.take(body(CHAT))
        assert text_of(sent(stream), of_request=True)[1] == 1
        stream.take(answered(b"200", EVENTS))
        stream.take(response_piece(EVENT))
        assert text_of(sent(stream), of_request=False) == (EVENT, 1)
        assert not any(one.held)


@pytest.mark.parametrize("when", ["reading", "queued", "sent"])
async def test_a_law_that_forbids_it_meanwhile_takes_it_back_from_the_gateway(when: str) -> None:
    cluster = MemoryCluster()
    async with stage(1, cluster=cluster) as one:
        stream, whole = one.stream(), body(CHAT)
        stream.take(asked())
        if when != "reading":
            stream.take(whole)
        if when == "sent":
            assert text_of(sent(stream), of_request=True)[1] == 1
        narrowed = tenant("anywhere", residency={"processing": {"allow": ["world"], "deny": ["us"]}})
        text = law_document.encode({"tenants": [narrowed]}, 2, "ann", "drill", "2026-05-01T12:00:00Z")
        cluster.put(LAW_KEY, text)
        await until(lambda: one.balancer.flow.law.epoch == 2)
        if when == "reading":
            stream.take(whole)
        (refused,) = sent(stream)  # and nothing of the body
        assert refused.immediate_response.status.code == 451
        assert b"tenant anywhere: processing denies us" in refused.immediate_response.body
        stream.take(answered(b"200", EVENTS))  # it was on its way
        assert sent(stream) == []
        stream.gone()
        assert not any(one.held)
        assert (
            one.balancer.flow.replicas.health_tracker.read("a", one.balancer.clock.now()).why == "proven"
        )  # no fault of its


async def test_a_replica_that_fails_under_a_narrower_law_is_not_reported_as_the_law() -> None:
    async with stage(1) as one:
        stream = one.stream()
        stream.take(asked())
        stream.take(body(CHAT))
        sent(stream)
        flow, narrowed = one.balancer.flow, tenant("anywhere", residency={"processing": {"allow": ["eu"]}})
        text = law_document.encode({"tenants": [narrowed]}, 2, "ann", "drill", "2026-05-01T12:00:00Z")
        flow.law = Law(law_document.read(text, flow.law.topology, "test").over(flow.law.topology))
        assert stream._run is not None
        stream._run.lost(outcome.BAD_FRAMING)
        (failed,) = sent(stream)
        assert b"the replica failed before it answered" in failed.immediate_response.body


async def test_a_gateway_is_not_asked_again_without_a_salt_but_the_next_request_goes_without() -> None:
    """It sends each request once: a second request after the answer's head would break its protocol."""
    async with stage(1) as one:
        refused, salts = b"""{"detail":"Unexpected fields in the request: {'cache_salt'}"}""", []
        for _ in range(2):
            stream = one.stream()
            stream.take(asked())
            stream.take(body(CHAT.replace(b"{", b'{"cache_salt":"its own",', 1)))
            onward, _ = text_of(sent(stream), of_request=True)
            salts.append("cache_salt" in msgspec.json.decode(onward))
            stream.take(answered(b"422", ("content-type", b"application/json")))
            stream.take(response_piece(refused))
            found = sent(stream)
            assert [each.WhichOneof("response") for each in found] == ["response_headers", "response_body"]
            assert text_of(found, of_request=False) == (refused, 1)
            stream.gone()
            assert not any(one.held)
        assert salts == [True, False]


async def test_an_answer_that_has_begun_is_not_taken_back() -> None:
    async with stage(1) as one:
        stream = one.stream()
        stream.take(asked())
        stream.take(body(CHAT))
        sent(stream)
        stream.take(answered(b"200", EVENTS))
        stream.take(response_piece(EVENT, last=False))
        assert stream._run is not None
        stream._run.recall()  # the machine is told only at the next turn that it has begun
        stream.take(response_piece(b"data: [DONE]\n\n"))
        assert text_of(sent(stream), of_request=False) == (EVENT + b"data: [DONE]\n\n", 1)
        assert not any(one.held)


async def test_of_an_answer_that_has_begun_before_the_request_was_sent_whole_the_rest_is_taken_back() -> None:
    async with stage(1) as one:
        stream = one.stream()
        stream.take(asked())
        stream.take(body(CHAT))
        stream.take(answered(b"200", EVENTS))
        stream.take(response_piece(EVENT, last=False))
        assert stream._run is not None
        await until(lambda: not one.balancer.relay._news)
        stream._run.recall()
        onward = sent(stream)
        assert text_of(onward, of_request=True) == (b"", 0)
        assert b"unlawful_here" in text_of(onward, of_request=False)[0]
        assert stream.withdrawn
        assert stream.broken
        assert not any(one.held)


async def test_body_size_and_time_limits_apply_to_picker_streams() -> None:
    async with stage(1, limits={"body_bytes_max": 1000, "body_s": 1, "upload_s": 5}) as one:
        big = one.stream()
        big.take(asked())
        big.take(body(b"x" * 1001, last=False))
        assert sent(big)[0].immediate_response.status.code == 413
        big.take(body(b"x" * 1001))  # messages on their way arrive, and belong to no stream
        slow = one.stream()
        slow.take(asked())
        slow.check(slow.received_at + 0.9)
        assert not slow.is_over
        slow.check(slow.received_at + 1.1)
        assert sent(slow)[0].immediate_response.status.code == 408
        unknown = one.stream()
        unknown.take(asked("sk-nobody"))
        assert sent(unknown)[0].immediate_response.status.code == 401
        assert not any(one.held)


async def test_headers_are_counted_before_any_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """170,000 of them stand in a message of 340 KB, and took 120 ms."""
    async with stage(1, limits={"headers_max": 50}) as one:
        many, some = asked(), asked()
        for head, count in ((some, 30), (many, 200)):
            for number in range(count):
                head.request_headers.headers.headers.add(key=f"x-{number}", raw_value=b"y")
        served = one.stream()
        served.take(some)
        served.take(body(CHAT))
        assert sent(served)[0].HasField("request_headers")
        answer = answered()
        answer.response_headers.headers.CopyFrom(many.request_headers.headers)
        monkeypatch.setattr(messages, "_joined", None)
        served.take(answer)
        assert sent(served)[-1].immediate_response.status.code == 502
        refused = one.stream()
        refused.take(many)
        (reply,) = sent(refused)
        assert reply.immediate_response.status.code == 431
        assert b"too many headers: at most 50" in reply.immediate_response.body
        assert not any(one.held)


async def test_silent_gateway_stream_times_out() -> None:
    async with stage(1, limits={"head_s": 2}) as one:
        left, other = one.stream(), one.stream()
        left.take(wire.ProcessingRequest())  # which says nothing
        other.take(asked())
        for stream in (left, other):
            stream.check(stream.received_at + 1.9)
            assert not stream.is_over
            stream.check(stream.received_at + 2.1)
        assert (left.is_over, left.broken, other.is_over) == (True, "no request came within 2 s", False)
        left.take(asked())
        assert left.exchange is None
        gone = one.stream()
        gone.gone()
        gone.take(asked())
        assert gone.exchange is None
        other.gone()
        assert not any(one.held)


# Some of all messages, in any order; after each the stream may be abandoned.
MESSAGES: dict[str, Callable[[], wire.ProcessingRequest]] = {
    "head": asked,
    "unknown": lambda: asked("sk-nobody"),
    "half": lambda: body(CHAT[:20], last=False),
    "rest": lambda: body(CHAT[20:]),
    "whole": lambda: body(CHAT),
    "junk": lambda: body(b"{"),
    "trailers": lambda: wire.ProcessingRequest(request_trailers=wire.HttpTrailers()),
    "answer": lambda: answered(b"200", EVENTS),
    "error": lambda: answered(b"500", ("content-type", b"application/json")),
    "odd": lambda: answered(b"99"),
    "event": lambda: response_piece(EVENT, last=False),
    "done": lambda: response_piece(b"data: [DONE]\n\n"),
    "end": lambda: wire.ProcessingRequest(response_trailers=wire.HttpTrailers()),
    "nothing": wire.ProcessingRequest,
}
ORDERS = st.lists(st.sampled_from(sorted(MESSAGES)), max_size=8)
LIKELY = st.sampled_from([["head", "whole", "answer", "event", "done"], ["head", "half", "rest", "answer", "end"]])
IN_TURN = (
    "request_headers",
    "request_body",
    "request_trailers",
    "response_headers",
    "response_body",
    "response_trailers",
)


@pytest.mark.hypothesis
def test_messages_in_any_order_leave_nothing_behind() -> None:
    async def world() -> None:
        async with stage() as one:

            @given(st.one_of(ORDERS, st.tuples(LIKELY, ORDERS).map(lambda both: both[0][: len(both[1])] + both[1])))
            def run(order: list[str]) -> None:
                stream = one.stream()
                seen: list[Any] = []
                for name in order:
                    stream.take(MESSAGES[name]())
                    seen += sent(stream)
                stream.gone()
                assert sent(stream) == []
                kinds = [reply.WhichOneof("response") for reply in seen]
                assert kinds.count("immediate_response") <= 1
                places = [IN_TURN.index(kind) for kind in kinds if kind != "immediate_response"]
                assert places == sorted(places)
                assert text_of(seen, of_request=True)[1] <= 1
                assert text_of(seen, of_request=False)[1] <= 1
                assert not any(one.held), (order, one.held)

            run()

    asyncio.run(world())
