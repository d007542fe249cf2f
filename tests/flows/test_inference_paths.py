"""Every inference path through both tiers, as its own clients use it; what does not pass reaches no engine."""

from __future__ import annotations

import hashlib
import io
import json
import math
import urllib.request
import warnings
from collections.abc import Iterator
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import openai

    from tests.conftest import RunningWorld

SDKS = ("openai",)  # see conftest.py
MODEL = "llama-3.1-8b"
KEY = "sk-farhop-anywhere"


@pytest.fixture
def client(running: RunningWorld) -> Iterator[openai.OpenAI]:
    with _client(running) as made:
        yield made


def _client(running: RunningWorld, key: str = KEY, region: str = "virginia") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.entry(region)}/v1", api_key=key, max_retries=0, timeout=20)


def _post(client: openai.OpenAI, path: str, body: Any, **headers: str) -> Any:
    """A path the SDK has no method for, as JSON."""
    url = str(client.base_url).removesuffix("/v1/") + path
    return client.post(url, body=body, cast_to=object, options={"headers": headers})


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_embeddings(client: openai.OpenAI, encoding: Any) -> None:
    texts = ["the cat on the mat", "a cat sat on the mat", "interest rates rose"]
    raw = client.embeddings.with_raw_response.create(model=MODEL, input=texts, encoding_format=encoding)
    assert len(raw.headers["x-farhop-decision"]) == 16
    answer = raw.parse()
    assert answer.usage.prompt_tokens == 5 + 5 + 5
    if encoding == "float":
        one, other, far = (made.embedding for made in answer.data)
        assert math.dist(one, other) < math.dist(one, far)


def test_embeddings_as_the_sdk_asks_for_them_by_default(client: openai.OpenAI) -> None:
    (made,) = client.embeddings.create(model=MODEL, input="the sea").data
    assert len(made.embedding) == 256
    tokens = client.embeddings.create(model=MODEL, input=[[1, 2], [3]])
    assert tokens.usage.prompt_tokens == 3


@pytest.mark.parametrize("kind", ["transcriptions", "translations"])
def test_sound_longer_than_a_segment_arrives_whole(client: openai.OpenAI, kind: str) -> None:
    sound = io.BytesIO(Random(1).randbytes(600_000))
    sound.name = "speech.mp3"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the SDK's view of translations; vLLM serves them
        create = getattr(client.audio, kind).create
        answer = create(model=MODEL, file=sound)
        sound.seek(0)
        text = create(model=MODEL, file=sound, response_format="text")
    assert len(answer.text.split()) == 188  # 600 kB are 75 s, 2.5 words each
    assert text.strip() == answer.text


def test_audio_is_transcribed_where_the_tenants_law_allows(running: RunningWorld) -> None:
    with _client(running, "sk-farhop-eu-only", "tokyo") as european:
        raw = european.audio.transcriptions.with_raw_response.create(model=MODEL, file=("a.mp3", b"x" * 8_000))
        assert raw.headers["x-farhop-region"] == "frankfurt"
        raw = european.embeddings.with_raw_response.create(model=MODEL, input="x")
        assert raw.headers["x-farhop-region"] == "frankfurt"
        with pytest.raises(openai.APIStatusError) as caught:
            european.embeddings.create(model=MODEL, input="x", extra_headers={"x-farhop-allow": "jp"})
        assert caught.value.status_code == 451


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank(client: openai.OpenAI, path: str) -> None:
    documents = ["the weather", "a red fox", "the red fox"]
    answer = _post(client, path, {"model": MODEL, "query": "the red fox", "documents": documents})
    assert [one["index"] for one in answer["results"]] == [2, 1, 0]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_score(client: openai.OpenAI, path: str) -> None:
    answer = _post(client, path, {"model": MODEL, "text_1": "a fox", "text_2": ["a fox", "whales"]})
    assert [round(one["score"], 3) for one in answer["data"]] == [1.0, 0.0]


def test_the_tokenizer(client: openai.OpenAI) -> None:
    tokens = _post(client, "/tokenize", {"model": MODEL, "prompt": "the sea and far"})
    assert tokens["count"] == 4
    text = _post(client, "/detokenize", {"model": MODEL, "tokens": tokens["tokens"]})
    assert text == {"prompt": "the sea and far"}


def test_kserve(client: openai.OpenAI) -> None:
    path = f"/v2/models/{MODEL}"
    inputs = [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["the sea"]}]
    answers = [
        _post(client, path + "/infer", {"inputs": inputs})["outputs"][0]["data"][0],
        _post(client, path + "/versions/1/infer", {"inputs": inputs})["outputs"][0]["data"][0],
        _post(client, path + "/generate", {"text_input": "the sea"})["text_output"],
    ]
    url = str(client.base_url).removesuffix("/v1/") + path + "/generate_stream"
    streamed = urllib.request.Request(url, b'{"text_input":"the sea"}', {"Authorization": f"Bearer {KEY}"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(streamed, timeout=20) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.read().decode().split("\n") if line]
    answers.append("".join(json.loads(line.removeprefix("data: "))["text_output"] for line in lines))
    assert len(lines) > 1
    assert len(set(answers)) == 1
    with pytest.raises(openai.NotFoundError) as caught:
        _post(client, "/v2/models/no-such/infer", {"inputs": inputs})
    assert _told(caught)[:2] == ("model_not_found", None)
    url = str(client.base_url).removesuffix("/v1/") + "/v2/models/"
    assert client.get(url + MODEL + "/ready", cast_to=object) == {"name": MODEL, "ready": True}
    with pytest.raises(openai.NotFoundError):
        client.get(url + "no-such/ready", cast_to=object)


def _told(caught: pytest.ExceptionInfo[openai.APIStatusError]) -> tuple[str | None, str | None, str]:
    """An error's code, field and text: of an object, as OpenAI has it, or by the Open Inference Protocol, where the
    error is the text."""
    if "/v2/" not in str(caught.value.request.url):
        return caught.value.code, caught.value.param, caught.value.message
    document = caught.value.response.json()
    return document["code"], document["param"], document["error"]


def _traced(running: RunningWorld, client: openai.OpenAI, path: str, body: Any, sequences: int) -> list[Any]:
    """Both tiers' own spans of a request that is computed as so many sequences."""
    trace_id = hashlib.md5(repr((path, body)).encode()).hexdigest()
    _post(client, path, {"model": MODEL, **body}, traceparent=f"00-{trace_id}-{'2' * 16}-01")
    spans = running.call(running.world.collector.wait_for(trace_id, spans=6 + sequences, timeout_s=60.0))
    return [next(span for span in spans if span.name == tier) for tier in ("farhop.global", "farhop.regional")]


@pytest.mark.parametrize(
    ("path", "body", "operation", "sequences", "input_tokens"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}, "chat", 1, None),
        ("/v1/completions", {"prompt": "hey!", "max_tokens": 1}, "text_completion", 1, 1),
        ("/v1/embeddings", {"input": "hey! hey"}, "embeddings", 1, 2),
        ("/rerank", {"query": "hey!", "documents": ["a", "b"]}, "rerank", 2, 4),
        ("/tokenize", {"prompt": "hey!"}, "tokenize", 0, None),
        (f"/v2/models/{MODEL}/generate", {"text_input": "hey!"}, "generate", 1, None),
    ],
)
def test_spans_name_the_operation_and_count_its_tokens(
    running: RunningWorld,
    client: openai.OpenAI,
    path: str,
    body: Any,
    operation: str,
    sequences: int,
    input_tokens: int | None,
) -> None:
    for span in _traced(running, client, path, body, sequences):
        assert span.attributes["gen_ai.operation.name"] == operation
        if input_tokens is not None:
            assert span.attributes["gen_ai.usage.input_tokens"] == input_tokens
        if path in ("/v1/embeddings", "/rerank"):
            assert span.attributes["gen_ai.usage.output_tokens"] == 0


def test_the_usage_of_an_answer_too_long_to_keep_is_read_from_its_end(
    running: RunningWorld, client: openai.OpenAI
) -> None:
    """150 embeddings of 256 dimensions are more than 256 KiB of JSON."""
    for span in _traced(running, client, "/v1/embeddings", {"input": [f"{n:08d}" for n in range(150)]}, 150):
        assert span.attributes["gen_ai.usage.input_tokens"] == 300


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"model": MODEL}, "input"),
        ("/v1/embeddings", {"model": MODEL, "input": [{}]}, "input"),
        ("/v1/rerank", {"model": MODEL, "query": "q"}, "documents"),
        ("/score", {"model": MODEL, "text_1": "q"}, "text_2"),
        ("/tokenize", {"model": MODEL}, "prompt"),
        ("/detokenize", {"model": MODEL, "tokens": "x"}, "tokens"),
        ("/v1/audio/transcriptions", {"model": MODEL}, "content-type"),
        (f"/v2/models/{MODEL}/infer", {}, "inputs"),
        (f"/v2/models/{MODEL}/generate", {"text_input": 5}, "text_input"),
    ],
)
def test_a_wrong_body_is_answered_with_its_field(client: openai.OpenAI, path: str, body: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        _post(client, path, body)
    code, field, text = _told(caught)
    assert (code, field) == ("invalid_field", param)
    assert param in text.lower()


@pytest.mark.parametrize(
    "path",
    ["/generate", "/sleep", "/v2/repository/models/m/load", "/v2/models/m/config", "/v1/embeddings/", "/V1/embeddings"],
)
def test_other_paths_are_refused(client: openai.OpenAI, path: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        _post(client, path, {"model": MODEL, "input": "x"})
    assert _told(caught)[:2] == ("path_not_allowed", None)
