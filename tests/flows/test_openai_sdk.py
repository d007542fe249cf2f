"""The official SDK, pointed at a global balancer, meets what it meets at OpenAI: answers, streams, errors, usage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel, Field

if TYPE_CHECKING:
    import openai

    from tests.conftest import RunningWorld

SDKS = ("openai",)  # see conftest.py
MODEL = "llama-3.1-8b"


@pytest.fixture
def client(running: RunningWorld) -> Iterator[openai.OpenAI]:
    with _client(running, "sk-farhop-anywhere") as made:
        yield made


def _client(running: RunningWorld, key: str, region: str = "virginia", **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.entry(region)}/v1", api_key=key, max_retries=0, timeout=20, **options)


def _messages(text: str) -> Any:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=_messages("Hello"), max_tokens=12)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 12
    assert answer.usage.prompt_tokens_details is not None


def test_chat_streams_piece_by_piece_and_keeps_our_usage_from_view(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=_messages("Stream to me"), max_tokens=12, stream=True, extra_body={"min_tokens": 8}
        )
    )
    texts = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]
    assert len(texts) >= 8
    assert all(chunk.usage is None for chunk in chunks)
    assert all(chunk.choices for chunk in chunks)


def test_chat_streams_usage_if_requested(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=_messages("Count for me"),
            max_tokens=6,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens > 0


def test_stream_has_the_text_of_the_whole_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=_messages("Same?"), max_tokens=20)
    stream = client.chat.completions.create(model=MODEL, messages=_messages("Same?"), max_tokens=20, stream=True)
    pieces = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert pieces == whole.choices[0].message.content


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=8)
    assert answer.choices[0].text
    pieces = [
        chunk.choices[0].text
        for chunk in client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=8, stream=True)
    ]
    assert "".join(pieces) == answer.choices[0].text


def test_answer_headers_name_region_and_decision(client: openai.OpenAI, running: RunningWorld) -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=_messages("Where?"), max_tokens=4)
    assert raw.headers["x-farhop-region"] in running.world.regions  # which one depends on what was measured here
    assert len(raw.headers["x-farhop-decision"]) == 16
    assert "global;dur=" in raw.headers["server-timing"]
    assert not [name for name in raw.headers if name in ("x-farhop-hop", "x-farhop-outcome")]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="is none of those"):
        client.models.retrieve("org/none")


def test_an_unknown_key_is_an_authentication_error(running: RunningWorld) -> None:
    with _client(running, "sk-nobody") as stranger, pytest.raises(openai.AuthenticationError) as caught:
        stranger.chat.completions.create(model=MODEL, messages=_messages("Hi"))
    assert caught.value.code == "unknown_key"


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-nonesuch", messages=_messages("Hi"))
    assert caught.value.code == "model_not_found"


def test_a_wrong_type_is_a_bad_request_that_names_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=_messages("Hi"), max_tokens="many")  # type: ignore[call-overload]
    assert caught.value.code == "invalid_field"
    assert caught.value.param == "max_tokens"


def test_engines_own_validation_error_is_passed_on(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=_messages("Hi"), top_logprobs=1)
    assert caught.value.status_code == 400


def test_an_unlawful_request_is_451_with_the_clause(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(model=MODEL, messages=_messages("Hi"), extra_headers={"x-farhop-allow": "cn"})
    assert caught.value.status_code == 451
    assert caught.value.code == "no_lawful_region"
    assert "within cn" in caught.value.message


def test_tenant_is_served_in_its_lawful_region(running: RunningWorld) -> None:
    with _client(running, "sk-farhop-eu-only", "tokyo") as european:
        raw = european.chat.completions.with_raw_response.create(
            model=MODEL, messages=_messages("Where?"), max_tokens=4
        )
    assert raw.headers["x-farhop-region"] == "frankfurt"


def test_responses_api_works_through_the_sdk_and_stores_nothing(client: openai.OpenAI) -> None:
    found = client.responses.create(model=MODEL, input="Hello", max_output_tokens=8)
    assert found.output_text
    *_, last = client.responses.create(model=MODEL, input="Hello", max_output_tokens=8, stream=True)
    assert last.type == "response.completed"
    assert last.response.output_text == found.output_text
    turns: Any = [{"role": "user", "content": "Hello"}, *found.output, {"role": "user", "content": "Go on."}]
    assert client.responses.create(model=MODEL, input=turns, max_output_tokens=8).output_text
    for more in ({"store": True}, {"previous_response_id": found.id}):
        with pytest.raises(openai.BadRequestError, match="stored here") as caught:
            client.responses.create(model=MODEL, input="Go on.", **more)  # type: ignore[call-overload]
        assert caught.value.param == next(iter(more))


class Weather(BaseModel):
    """What a request wants to be told."""

    place: str
    degrees: float = Field(ge=-40, le=50)


def test_answers_are_parsed_into_the_type_that_was_asked_for(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": _messages("How warm?"), "response_format": Weather}
    found = client.chat.completions.parse(**asked).choices[0].message.parsed
    assert isinstance(found, Weather)
    with client.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == found


def test_an_agent_calls_its_tool_and_answers_with_what_it_found(client: openai.OpenAI) -> None:
    tool: Any = openai.pydantic_function_tool(Weather, name="look")
    talk: Any = _messages("How warm?")
    with client.chat.completions.stream(model=MODEL, messages=talk, tools=[tool], tool_choice="required") as stream:
        (choice,) = stream.get_final_completion().choices
    assert choice.finish_reason == "tool_calls"
    calls = choice.message.tool_calls or []
    assert calls
    assert all(isinstance(call.function.parsed_arguments, Weather) for call in calls)
    talk += [choice.message, *({"role": "tool", "tool_call_id": call.id, "content": "cold"} for call in calls)]
    (after,) = client.chat.completions.create(model=MODEL, messages=talk, tools=[tool]).choices
    assert after.message.content


def test_an_agent_of_the_responses_api_does_the_same(client: openai.OpenAI) -> None:
    """Without state: its next request has the whole conversation."""
    tool: Any = {"type": "function", "name": "look", "parameters": Weather.model_json_schema(), "strict": True}
    talk: Any = [{"role": "user", "content": "How warm?"}]
    with client.responses.stream(model=MODEL, input=talk, tools=[tool], tool_choice="required") as stream:
        called = stream.get_final_response()
    calls = [item for item in called.output if item.type == "function_call"]
    assert calls
    for call in calls:
        Weather.model_validate_json(call.arguments)
    talk += [call.to_dict() for call in calls]
    talk += [{"type": "function_call_output", "call_id": call.call_id, "output": "cold"} for call in calls]
    after = client.responses.create(model=MODEL, input=talk, tools=[tool])
    assert after.output_text
    whole = client.responses.parse(model=MODEL, input="How warm?", text_format=Weather)
    assert isinstance(whole.output_parsed, Weather)


def test_log_probabilities_pass(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": _messages("How sure?"), "max_tokens": 6, "logprobs": True}
    (choice,) = client.chat.completions.create(**asked, top_logprobs=2).choices
    assert choice.logprobs is not None
    assert [len(one.top_logprobs) for one in choice.logprobs.content or ()][:1] == [2]
    (text,) = client.completions.create(model=MODEL, prompt="How sure?", max_tokens=6, logprobs=2).choices
    assert text.logprobs is not None
    assert text.logprobs.tokens


@pytest.mark.parametrize("path", ["files", "batches", "responses/r1"])
def test_stateful_apis_are_refused_with_a_reason(client: openai.OpenAI, path: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.get(f"/{path}", cast_to=object)
    assert "state" in caught.value.message
