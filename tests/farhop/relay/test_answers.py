"""Every outcome there is has a status and a body in OpenAI's shape."""

from __future__ import annotations

import json

import pytest

from farhop.balance import outcome
from farhop.relay import answers

ALL = outcome.catalogue()
TOKEN = (outcome.HOP_MISSING, outcome.HOP_FORGED, outcome.HOP_EXPIRED, outcome.HOP_MISADDRESSED, outcome.HOP_USED)


def test_every_outcome_can_be_answered() -> None:
    for reason in ALL:
        reply = answers.refusal(reason, 'it "failed"', param="model")
        error = json.loads(reply.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["message"], error["param"], error["code"]) == (
            'it "failed"',
            "model",
            "model_not_found" if reason is outcome.UNKNOWN_MODEL else reason.reason,
        )
        assert reply.outcome is reason
        assert 200 <= reply.status < 600
        if reason not in (outcome.SERVED, outcome.REDIRECTED, outcome.ADVISED):
            assert reply.status >= 400
            assert error["type"].endswith(("_error", "_request"))
        assert (b"www-authenticate" in reply.extra) == (reply.status == 401)
        line = answers.STATUS_LINES[reply.status]
        assert line.startswith(b"HTTP/1.1 %d " % reply.status)
        assert line.endswith(b"\r\n")


def test_every_outcome_can_be_sent_to_the_tier_above() -> None:
    for reason in [r for r in ALL if r not in TOKEN]:
        header = answers.hop_outcome(reason, 12.9)
        name, value = header.removesuffix(b"\r\n").split(b": ", 1)
        assert name == b"x-farhop-outcome"
        assert answers.read_hop_outcome(value) == (reason, 12.0)
        assert answers.read_hop_outcome(reason.reason.encode()) == (reason, None)


@pytest.mark.parametrize("value", [b"", b"nonsense", b"served\xff", b"; wait_ms=1"])
def test_an_unknown_outcome_is_an_internal_error_there(value: bytes) -> None:
    known, _ = answers.read_hop_outcome(value)
    assert known is outcome.INTERNAL
    assert not known.retryable


@pytest.mark.parametrize("wait", [b"-5", b"x", b"", b"1e3", b"1.5"])
def test_an_absurd_wait_is_none(wait: bytes) -> None:
    assert answers.read_hop_outcome(b"queue_full; wait_ms=" + wait) == (outcome.QUEUE_FULL, None)


@pytest.mark.parametrize(("given", "value"), [(0.0, b"1"), (0.2, b"1"), (1.2, b"2"), (30.0, b"30")])
def test_retry_after_is_whole_seconds_and_never_none(given: float, value: bytes) -> None:
    reply = answers.refusal(outcome.QUEUE_FULL, "full", retry_after_s=given, extra=b"x-a: b\r\n")
    assert reply.extra == b"x-a: b\r\nretry-after: " + value + b"\r\n"


def test_redirect_has_its_location() -> None:
    reply = answers.redirect("https://eu.example/v1", outcome.ENTRY_FORBIDDEN)
    assert (reply.status, reply.extra) == (307, b"location: https://eu.example/v1\r\n")
    error = json.loads(reply.body)["error"]
    assert error["code"] == "entry_forbidden"
    assert error["message"].endswith("give the client the address of one that may, https://eu.example")


def test_a_redirect_with_a_token_in_its_url_does_not_repeat_it() -> None:
    reply = answers.redirect("https://eu.example/v1?t=secret", outcome.REDIRECTED)
    assert b"eu.example" not in reply.body


@pytest.mark.parametrize("path", [b"/v2", b"/v2/models/m/infer", b"/v2/models/m", b"/v2/repository/index"])
def test_an_error_under_the_open_inference_protocol_is_a_text(path: bytes) -> None:
    """Triton's client adds it to its own text, and breaks on an object."""
    told = answers.refusal(outcome.UNKNOWN_KEY, "not known", param="x")
    error = json.loads(answers.in_dialect(told, answers.dialect(path)).body)
    assert error == {"error": "not known", "code": "unknown_key", "param": "x"}
    probed = answers.Reply(503, b"", outcome.SERVED)
    assert answers.in_dialect(probed, answers.dialect(path)) is probed
    redirect = answers.redirect("https://eu.example/v2", outcome.ENTRY_FORBIDDEN)
    assert isinstance(json.loads(answers.in_dialect(redirect, answers.dialect(path)).body)["error"], str)
    event = answers.event_of(outcome.DIED_MID_STREAM, "gone", answers.dialect(path))
    assert event.startswith(b"data: {")
    assert event.endswith(b"\n\n")
    assert json.loads(event.removeprefix(b"data: "))["error"] == "gone"


@pytest.mark.parametrize("path", [b"/v2/rerank", b"/v2/chat", b"/v1/completions"])
def test_coheres_paths_beside_it_have_openais_errors(path: bytes) -> None:
    assert answers.dialect(path) is answers.Dialect.OPENAI


def test_a_broken_stream_ends_with_one_event() -> None:
    event = answers.event_of(outcome.DIED_MID_STREAM, "a\n\nb")
    assert event.count(b"\n\n") == 1
    assert event.endswith(b"\n\n")
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "upstream_died_mid_stream"


def test_a_broken_stream_of_responses_says_its_error_as_documented_and_as_openai_sends_it() -> None:
    """The one has code and message in the event itself, the other in its `error`, without which OpenAI's SDKs, and
    what is built on them, take the stream for a whole one. Both have a number.
    """
    event = answers.event_of(outcome.DIED_MID_STREAM, "gone", answers.dialect(b"/v1/responses"), 7)
    name, _, data = event.decode().partition("\n")
    told = json.loads(data.removeprefix("data: "))
    said = {"code": "upstream_died_mid_stream", "message": "gone", "param": None}
    assert name == "event: error"
    assert told.pop("error") == {"type": "server_error", **said}
    assert told == {"type": "error", "sequence_number": 7, **said}


def test_an_unknown_status_has_a_line_too() -> None:
    assert answers.STATUS_LINES[299] == b"HTTP/1.1 299 Status\r\n"
    assert answers.STATUS_LINES[429] == b"HTTP/1.1 429 Too Many Requests\r\n"
    assert answers.STATUS_LINES[422] == b"HTTP/1.1 422 Unprocessable Content\r\n"


@pytest.mark.parametrize("reason", ["hop_token_missing", "hop_token_forged", "hop_token_expired"])
def test_a_region_that_rejects_our_token_is_no_fault_of_the_client(reason: str) -> None:
    content, _ = answers.read_hop_outcome(reason.encode())
    assert content is outcome.HOP_REJECTED
    assert content.retryable
    assert answers.status_of(content) == 502
