"""Events and documents, byte for byte where a client's parser would stumble."""

import json

import pytest

from farhop_lab.engine.core.profiles import PROFILES
from farhop_lab.engine.core.sequence import EngineRequest, Sequence, TextModel
from farhop_lab.engine.formats.render import DONE, Answer, frame

SEQUENCE = Sequence("1", EngineRequest(b"x" * 40, max_tokens=1, ignore_eos=True), TextModel("m"), PROFILES["l4"])
SEQUENCE.write_token()
USAGE = {
    "prompt_tokens": 10,
    "total_tokens": 11,
    "completion_tokens": 1,
    "prompt_tokens_details": {"cached_tokens": 0},
}


def _chunks(framed: bytes) -> list[str]:
    """The bodies of HTTP chunks, each one's size checked."""
    bodies = []
    while framed:
        size, _, rest = framed.partition(b"\r\n")
        body, framed = rest[: int(size, 16)], rest[int(size, 16) :]
        assert framed.startswith(b"\r\n")
        framed = framed[2:]
        assert body.startswith(b"data: ")
        assert body.endswith(b"\n\n")
        bodies.append(body[6:-2].decode())
    return bodies


@pytest.mark.parametrize("text", ["", " a", " the", " the sea"])
@pytest.mark.parametrize("model", ["m", 'q"uo\\te'])
def test_a_token_is_one_event_in_one_chunk(text: str, model: str) -> None:
    chat = Answer("chatcmpl-1", model, 7, "assistant")
    (event,) = _chunks(chat.token(text))
    assert json.loads(event) == {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": model,
        "choices": [{"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}],
    }
    (event,) = _chunks(Answer("cmpl-1", model, 7, None).token(text))
    assert json.loads(event)["choices"][0]["text"] == text


def test_a_chat_opens_with_the_role_a_completion_with_nothing() -> None:
    (event,) = _chunks(Answer("c", "m", 7, "assistant").opening(SEQUENCE))
    assert json.loads(event)["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert Answer("c", "m", 7, None).opening(SEQUENCE) == b""


@pytest.mark.parametrize("role", ["assistant", None])
def test_the_end_reason_then_usage_then_done(role: str | None) -> None:
    answer = Answer("c", "m", 7, role)
    last, used, done = _chunks(answer.closing(" sea", SEQUENCE, include_usage=True))
    choice = json.loads(last)["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    assert (json.loads(used)["choices"], json.loads(used)["usage"]) == ([], USAGE)
    assert done == "[DONE]"
    assert len(_chunks(answer.closing("", SEQUENCE, include_usage=False))) == 2
    assert answer.closing("", SEQUENCE, include_usage=False).endswith(DONE)


def test_a_whole_answer() -> None:
    chat = json.loads(Answer("c", "m", 7, "assistant").whole([('"quoted"', SEQUENCE)]))
    assert chat["object"] == "chat.completion"
    assert chat["choices"][0]["message"]["content"] == '"quoted"'
    assert chat["choices"][0]["message"]["role"] == "assistant"
    assert chat["usage"] == USAGE
    completion = json.loads(Answer("c", "m", 7, None).whole([("text", SEQUENCE)]))
    assert (completion["object"], completion["choices"][0]["text"]) == ("text_completion", "text")


def test_a_chunk_has_its_size_in_hex() -> None:
    assert frame(b"x" * 26) == b"1a\r\n" + b"x" * 26 + b"\r\n"
