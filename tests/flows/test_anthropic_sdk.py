"""Anthropic's official SDK, pointed at a global balancer, meets what it meets at Anthropic: answers, streams, errors,
usage, and the residency that it asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import anthropic

    from tests.conftest import RunningWorld

SDKS = ("anthropic",)  # see conftest.py
MODEL = "llama-3.1-8b"


@pytest.fixture
def client(running: RunningWorld) -> Iterator[anthropic.Anthropic]:
    with _client(running, "sk-farhop-anywhere") as made:
        yield made


def _client(running: RunningWorld, key: str, region: str = "virginia", **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=running.entry(region), api_key=key, max_retries=0, timeout=20, **options)


def _asked(text: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 12, "messages": [{"role": "user", "content": text}], **more}


def test_a_message(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(**_asked("Hello", system="Be brief."))
    assert answer.type == "message"
    assert answer.content[0].type == "text"
    assert answer.content[0].text
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert 0 < answer.usage.output_tokens <= 12
    assert answer.usage.inference_geo is None


def test_stream_has_the_text_of_the_whole_answer(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**_asked("Same?"))
    with client.messages.stream(**_asked("Same?")) as stream:
        pieces = list(stream.text_stream)
        last = stream.get_final_message()
    assert "".join(pieces) == whole.content[0].text
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert last.stop_reason == whole.stop_reason


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    few = client.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "Hello"}])
    many = client.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "Hello " * 100}])
    assert 0 < few.input_tokens < many.input_tokens


def test_a_conversation_finds_its_prefix_cached(running: RunningWorld) -> None:
    """Claude Code's first line differs in every turn. Of a tenant that has one region, as a busy machine's round trips
    may make another region the better one."""
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=00001;"},
        {"type": "text", "text": "You review code. " * 200, "cache_control": {"type": "ephemeral"}},
    ]
    turns: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Begin."}]}]
    with _client(running, "sk-farhop-eu-only") as client:
        first = client.messages.create(**{**_asked(""), "system": system, "messages": turns})
        system[0]["text"] = "x-anthropic-billing-header: cc_version=1; cch=00002;"
        turns += [{"role": "assistant", "content": first.content[0].text}, {"role": "user", "content": "Go on."}]
        second = client.messages.create(**{**_asked(""), "system": system, "messages": turns})
    assert second.usage.cache_read_input_tokens is not None
    assert second.usage.cache_read_input_tokens > 0.8 * (first.usage.input_tokens)


def test_the_requested_residency_is_kept_and_named_again(client: anthropic.Anthropic) -> None:
    raw = client.messages.with_raw_response.create(**_asked("Where?", inference_geo="eu"))
    assert raw.headers["x-farhop-region"] == "frankfurt"
    assert raw.parse().usage.inference_geo == "eu"
    with client.messages.stream(**_asked("Where?", inference_geo="eu")) as stream:
        found = stream.get_final_message()
    assert found.usage.inference_geo == "eu"
    assert found.usage.output_tokens > 0


def test_an_unknown_residency_is_refused(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"atlantis|inference_geo") as caught:
        client.messages.create(**_asked("Where?", inference_geo="atlantis"))
    assert caught.value.type == "invalid_request_error"


def test_a_residency_never_widens(running: RunningWorld) -> None:
    with _client(running, "sk-farhop-eu-only") as eu_only, pytest.raises(anthropic.APIStatusError) as caught:
        eu_only.messages.create(**_asked("Where?", inference_geo="us"))
    assert caught.value.status_code == 451
    with _client(running, "sk-farhop-eu-only") as eu_only:
        raw = eu_only.messages.with_raw_response.create(**_asked("Where?", inference_geo="global"))
    assert raw.headers["x-farhop-region"] == "frankfurt"


def test_errors_are_those_that_the_sdk_knows(running: RunningWorld, client: anthropic.Anthropic) -> None:
    with _client(running, "sk-wrong") as nobody, pytest.raises(anthropic.AuthenticationError) as caught:
        nobody.messages.create(**_asked("Hello"))
    assert caught.value.type == "authentication_error"
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**{**_asked("Hello"), "model": "nope"})
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        client.messages.create(**{**_asked("Hello"), "messages": []})
    with pytest.raises(anthropic.BadRequestError, match="mcp_servers"):
        client.messages.create(**_asked("Hello", extra_body={"mcp_servers": [{"type": "url", "url": "http://a"}]}))


def test_tools_and_their_results_pass(client: anthropic.Anthropic) -> None:
    tool = {"name": "look", "description": "Look", "input_schema": {"type": "object", "properties": {}}}
    turns = [
        {"role": "user", "content": "Look at https://example.com/a.py"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {"url": "https://example.com"}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "see http://b.example"}]},
    ]
    answer = client.messages.create(**{**_asked(""), "tools": [tool], "messages": turns})
    assert answer.usage.input_tokens > 0


def test_an_agent_calls_its_tool_and_answers_with_what_it_found(client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "required": ["city"], "properties": {"city": {"type": "string"}}}
    asked = {**_asked("How warm?", tools=[{"name": "look", "input_schema": schema}]), "max_tokens": 500}
    with client.messages.stream(**asked, tool_choice={"type": "any"}) as stream:
        called = stream.get_final_message()
    assert called.stop_reason == "tool_use"
    calls = [block for block in called.content if block.type == "tool_use"]
    assert calls
    assert all(isinstance(call.input["city"], str) for call in calls)
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "cold"} for call in calls]
    asked["messages"] += [{"role": "assistant", "content": called.content}, {"role": "user", "content": results}]
    after = client.messages.create(**asked)
    assert [block.type for block in after.content] == ["text"]
