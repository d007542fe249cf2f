"""A session with LangChain, run by the Python of its own environment; ends badly where something is amiss."""

# ruff: noqa: PT017, PT018, BLE001 - there is no pytest in that environment

from __future__ import annotations

import asyncio
import os

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

URL, KEY = os.environ["FARHOP_URL"], os.environ["FARHOP_KEY"]


@tool
def look(n: int) -> str:
    """Looks."""
    return str(n)


def openai(**more: object) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{URL}/v1", api_key=KEY, model="tiny", max_tokens=16, temperature=0.0, stream_usage=True, **more
    )


def anthropic(**more: object) -> ChatAnthropic:
    return ChatAnthropic(base_url=URL, api_key=KEY, model="tiny", max_tokens=16, temperature=0.0, **more)


def session(model: ChatOpenAI | ChatAnthropic) -> None:
    """Whole, streamed, in a batch, in turns, with tools."""
    talk = [SystemMessage("Be brief."), HumanMessage("Hello")]
    whole = model.invoke(talk)
    assert isinstance(whole, AIMessage) and whole.text
    assert whole.usage_metadata and 0 < whole.usage_metadata["output_tokens"] <= 16, whole
    streamed = None
    for piece in model.stream(talk):
        streamed = piece if streamed is None else streamed + piece
    assert streamed is not None and streamed.text == whole.text, (streamed, whole)
    assert streamed.usage_metadata and streamed.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
    assert [answer.text for answer in model.batch([talk, talk])] == [whole.text] * 2
    assert model.invoke([*talk, whole, HumanMessage("Go on.")]).text
    with_tools = model.bind_tools([look])
    assert isinstance(with_tools.invoke(talk), AIMessage)
    call = {"name": "look", "args": {"n": 1}, "id": "call_1"}
    after = [*talk, AIMessage("", tool_calls=[call]), ToolMessage("1", tool_call_id="call_1"), HumanMessage("And?")]
    assert isinstance(with_tools.invoke(after), AIMessage)


async def many(model: ChatOpenAI | ChatAnthropic) -> None:
    """Several at once, asynchronously."""
    answers = await asyncio.gather(*(model.ainvoke(f"Number {n}") for n in range(6)))
    assert all(answer.text for answer in answers)
    assert "".join([piece.text async for piece in model.astream("Number 0")]) == answers[0].text


def refused(model: ChatOpenAI | ChatAnthropic, word: str) -> None:
    """An error comes as the SDK's own."""
    try:
        model.invoke("Hello")
    except Exception as error:
        assert word in type(error).__name__, error
    else:
        raise AssertionError("it was not refused")


for made in (openai(), anthropic()):
    session(made)
    asyncio.run(many(made))
session(openai(use_responses_api=True))
completion = OpenAI(base_url=f"{URL}/v1", api_key=KEY, model="tiny", max_tokens=8)
assert completion.invoke("Hello")
assert "".join(completion.stream("Hello"))
refused(openai().model_copy(update={"model_name": "nobody"}), "NotFoundError")
refused(ChatOpenAI(base_url=f"{URL}/v1", api_key="sk-wrong", model="tiny", max_retries=0), "AuthenticationError")
refused(ChatAnthropic(base_url=URL, api_key="sk-wrong", model="tiny", max_retries=0), "AuthenticationError")
print("fine")
